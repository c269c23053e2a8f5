"""docs/architecture.md names files, modules and classes that are there."""

from __future__ import annotations

import re

from tests.docs.test_commands import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGE = ROOT / "kvbaton"
WAYS = PAGE.partition("## The three ways")[2].partition("```")[2].partition("```")[0]
MODULE = re.compile(r"\b(?:[a-z_]+/)+[a-z_]+\b")


def test_files_exist() -> None:
    named = set(re.findall(r"`((?:[\w.-]+/)*[\w.-]+(?:/|\.py|\.md))`", PAGE))
    assert len(named) > 50
    missing = [name for name in named if not any((at / name).exists() for at in (ROOT, PACKAGE))]
    assert missing == []


def test_the_ways_pass_through_modules_that_exist() -> None:
    named = set(MODULE.findall(WAYS))
    assert len(named) > 15
    missing = [
        name
        for name in named
        if not (PACKAGE / name).is_dir() and not (PACKAGE / f"{name}.py").exists()
    ]
    assert missing == []


def test_classes_exist() -> None:
    texts = (path.read_text() for path in PACKAGE.rglob("*.py"))
    defined = {name for text in texts for name in re.findall(r"^class (\w+)", text, re.MULTILINE)}
    named = set(re.findall(r"`([A-Z][a-z]+[A-Z]\w*)(?:\.\w+)*(?:\(\))?`", PAGE))
    assert len(named) > 10
    assert named - defined == set()

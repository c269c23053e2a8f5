"""Every command in the README, the documents and the launch scripts exists, with its flags."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvbaton.cli import make_parser

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
SCRIPTS = sorted((ROOT / "examples").glob("*.sh"))
FENCE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(kvbaton [a-z][^`\n]*)`")


def blocks(page: Path) -> list[str]:
    """What stands between fences, or a whole script."""
    text = page.read_text()
    return FENCE.findall(text) if page.suffix == ".md" else [text]


def commands() -> dict[str, list[str]]:
    """Words of each command of ours, by where it stands."""
    found: dict[str, list[str]] = {}
    for page in (*PAGES, *SCRIPTS):
        lines = [line for b in blocks(page) for line in b.replace("\\\n", " ").splitlines()]
        if page.suffix == ".md":
            lines += [line for line in INLINE.findall(page.read_text()) if "[" not in line]
        for line in lines:
            if match := re.match(r"(?:exec )?(kvbaton [a-z][a-z].*?)(?: &)?$", line.strip()):
                text = re.sub(r'"\$\{@:\d\}"', "", match[1])
                words = shlex.split(text, comments=True)[1:]
                found[f"{page.relative_to(ROOT)}: {line.strip()}"] = words
    return found


COMMANDS = commands()


def python_commands() -> dict[str, list[str]]:
    """Words of each ``python ...`` on a line of its own or in a sentence, by where it stands."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        lines = [line for b in blocks(page) for line in b.replace("\\\n", " ").splitlines()]
        lines += re.findall(r"`(python [^`]*)`", page.read_text())
        for line in lines:
            if re.match(r"python (-m )?[a-z]", line):
                words = shlex.split(line.replace("\n", " "), comments=True)[1:]
                found[f"{page.name}: {line}"] = words
    return found


PYTHON = python_commands()


def without_gaps(words: list[str]) -> list[str]:
    """A command without what "..." stands for, unless that is a flag's value."""
    before = ["", *words]
    return [w for w, last in zip(words, before, strict=False) if w != "..." or last[:2] == "--"]


@pytest.mark.parametrize("place", COMMANDS)
def test_a_command_is_understood(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, status = COMMANDS[place], 0
    try:
        make_parser().parse_args(without_gaps(words))
    except SystemExit as end:
        status = int(end.code or 0)
    said = capsys.readouterr().err
    # In a sentence, not to be typed, or with something left out.
    only_named = "required" in said and (len(words) <= 3 or "..." in words)
    assert status == 0 or only_named, said


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 12
    assert {words[0] for words in COMMANDS.values()} >= {
        "up",
        "chat",
        "router",
        "prefill",
        "decode",
    }


@pytest.mark.parametrize("place", PYTHON)
def test_what_python_is_to_run_exists_with_its_flags(place: str) -> None:
    first, *words = PYTHON[place]
    if first == "-m":
        found = find_spec(words.pop(0))
        assert found is not None
        assert found.origin is not None
        path = Path(found.origin)
    else:
        path = ROOT / first
    text = path.read_text()
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0]
            flag = f'"{name}"' in text or f"{name[2:].replace('-', '_')}:" in text
            assert flag, f"{path.name} knows no {name}"


def test_every_example_is_run_by_a_test() -> None:
    tests = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    examples = [path for path in (ROOT / "examples").iterdir() if path.name != "__pycache__"]
    assert len(examples) > 8
    for path in examples:
        mine = [text for text in tests if f'"{path.name}"' in text or f"/{path.name}" in text]
        assert mine, f"no test runs {path.name}"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        name
        for page in PAGES
        for text in (*blocks(page), *re.findall(r"`[^`\n]+`", page.read_text()))
        for name in re.findall(r"^`?make ([a-z-]+)", text, re.MULTILINE)
    }
    assert named
    assert named <= targets

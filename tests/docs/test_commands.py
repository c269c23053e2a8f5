"""Every command in the README, the documents and the launch scripts exists, with its flags."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kvbaton.cli import make_parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
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
                words = shlex.split(match[1].replace('"${@:2}"', ""), comments=True)[1:]
                found[f"{page.name}: {line.strip()}"] = words
    return found


COMMANDS = commands()


@pytest.mark.parametrize("place", COMMANDS)
def test_a_command_is_understood(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, status = COMMANDS[place], 0
    try:
        make_parser().parse_args(words)
    except SystemExit as end:
        status = int(end.code or 0)
    said = capsys.readouterr().err
    only_named = "required" in said and len(words) <= 3  # in a sentence, not to be typed
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

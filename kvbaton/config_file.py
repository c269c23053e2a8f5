"""``--config FILE``: options of a command from a YAML file, as vLLM reads them.

A key is an option without its dashes in front, with dashes or underscores between its words, and
under any of its names. What the command line says wins.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Sequence
from typing import Any

from kvbaton.errors import ConfigError

CONFIG = "--config"


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Let a command read a file."""
    text = "YAML with options of this command; those of the command line win"
    parser.add_argument(CONFIG, metavar="FILE", help=text)


def with_config(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """A command line with what its ``--config`` says behind: no list there ends in a word of ours.

    Args:
        parser: of the command, with all of its options.
        words: of the command line.

    Raises:
        ConfigError: the file can't be read, or a key of it is no option, or has no fitting value.
    """
    path = _path_in(words)
    if path is None:
        return list(words)
    said = {word.partition("=")[0] for word in words if word.startswith("-")}
    found: list[str] = []
    seen: dict[argparse.Action, str] = {}
    options = {
        name.lstrip("-").replace("-", "_"): action
        for action in parser._actions  # argparse has no other way to ask which options there are
        for name in action.option_strings
        if action.dest not in ("help", "config") and not name.startswith("--no-")
    }
    for key, value in _read(path).items():
        action = options.get(str(key).replace("-", "_"))
        if action is None:
            known = difflib.get_close_matches(str(key).replace("-", "_"), options, n=1)
            hint = f"; did you mean {known[0].replace('_', '-')!r}?" if known else ""
            raise ConfigError(CONFIG, f"{path}: {parser.prog} has no option {key!r}{hint}")
        if action in seen:
            raise ConfigError(CONFIG, f"{path}: {seen[action]!r} and {key!r} are the same option")
        seen[action] = key
        if not said & set(action.option_strings):
            found += _words(action, value, f"{path}: {key!r}")
    return [*words, *found]


def _path_in(words: Sequence[str]) -> str | None:
    """What the command line itself says of ``--config``."""
    only = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    only.add_argument(CONFIG)
    try:
        path: str | None = only.parse_known_args(words)[0].config
    except argparse.ArgumentError:  # it has no value: the command's own parser says so
        return None
    return path


def _read(path: str) -> dict[Any, Any]:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            found = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(CONFIG, f"{path} can't be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(CONFIG, f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ConfigError(CONFIG, f"{path} must hold options, as in 'port: 8000'")
    return found


def _words(action: argparse.Action, value: Any, where: str) -> list[str]:
    """The command line that says the same."""
    name = action.option_strings[0]
    if isinstance(value, bool) and (action.nargs == 0 or action.nargs == "?"):
        negative = [f"--no-{name[2:]}"] if f"--no-{name[2:]}" in action.option_strings else []
        return [name] if value else negative
    if action.nargs == 0:
        raise ConfigError(CONFIG, f"{where} must be true or false, not {value!r}")
    several = action.nargs in ("+", "*")
    appends = isinstance(action, argparse._AppendAction)
    values = value if isinstance(value, list) and (several or appends) else [value]
    texts = [_text(one, where) for one in values]
    if not texts:
        raise ConfigError(CONFIG, f"{where} is an empty list")
    return [name, *texts] if several else [f"{name}={text}" for text in texts]


def _text(value: Any, where: str) -> str:
    """A value as the command line has it; what has parts is JSON there."""
    if isinstance(value, (dict, list)):
        return json.dumps(value)
    if value is None or isinstance(value, bool):
        raise ConfigError(CONFIG, f"{where} must have a value, not {json.dumps(value)}")
    return str(value)

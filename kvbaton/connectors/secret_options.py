"""Secrets in a connector's options: filled in when it is built, told as they were written.

In an option's text ``{env:NAME}`` stands for an environment variable, and ``{file:PATH}`` for what
is in a file. A plug-in's author may put what stood for it into any error; whoever logs or shows
such a text passes it through `as_written`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from kvbaton.errors import ConfigError

LEAST = 4
"""Characters of what is looked for in texts: of less there is something everywhere."""

_SECRET = re.compile(r"\{(env|file):([^{}]+)\}")
_known: dict[str, str] = {}
"""What was filled in, in this process, and how it was written."""


def as_written(text: str) -> str:
    """A text in which all that was filled in is as it was written in its spec."""
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, _known[secret])
    return text


def filled_in(flag: str, option: str, value: Any) -> Any:
    """An option's value with what its texts stand for.

    Specs inside of it are left as they are: whoever loads them fills them in.

    Raises:
        ConfigError: of `flag`, if a variable is not set or a file can't be read.
    """
    if isinstance(value, list):
        return [filled_in(flag, option, part) for part in value]
    if isinstance(value, dict):
        return {name: filled_in(flag, option, part) for name, part in value.items()}
    if not isinstance(value, str) or '{"' in value:
        return value

    def look_up(found: re.Match[str]) -> str:
        source, name = found.groups()
        try:
            secret = os.environ[name] if source == "env" else Path(name).read_text().strip()
        except KeyError as error:
            text = f"option {option} needs the environment variable {name}, which is not set"
            raise ConfigError(flag, text) from error
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(flag, f"option {option} can't be read: {error}") from error
        if len(secret) >= LEAST:
            _known[secret] = found[0]
        return secret

    return _SECRET.sub(look_up, value)

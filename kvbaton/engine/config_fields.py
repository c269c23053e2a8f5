"""How parts of ``config.json`` are read: each by the fields that it has, with their defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from kvbaton.errors import ConfigError

FieldsT = TypeVar("FieldsT")


def convert_fields(content: Mapping[str, Any], form: type[FieldsT], architecture: str) -> FieldsT:
    """Those that a `msgspec.Struct` names.

    Args:
        content: of ``config.json``.
        form: the struct.
        architecture: which the file names.

    Raises:
        ConfigError: a field is missing or of the wrong type.
    """
    try:
        return msgspec.convert(content, form)
    except msgspec.ValidationError as error:
        raise ConfigError("--model", f"config.json of {architecture}: {error}") from error


def check_sizes(sizes: Iterable[tuple[str, int, int]]) -> None:
    """Raise `ConfigError` unless each field's value is within 1 and its bound."""
    for name, value, most in sizes:
        if not 1 <= value <= most:
            raise ConfigError("--model", f"config.json: {name} {value} is not within 1 and {most}")

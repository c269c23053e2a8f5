"""The grammar of all that a model writes, of which a client has asked for a part.

What the client wants stands where the model writes it: its answer behind its reasoning, which is
left free, or the arguments of calls of functions in the form that the family writes them in, so
that the parser of that form reads them back. Whatever reads tokens by the grammar (drafts, the node
that decodes, one that goes on) need not know where reasoning ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from kvbaton.errors import RequestError
from kvbaton.text.structured import Piece, StructuredOutputs, joined

MAX_CALLS = 16
"""Calls of one answer that has to call: some models never stop."""
TEXT = "TEXT"
"""The rule for any text without tags that are tokens."""
SPACE = "SPACE"
"""The rule for white space between parts, or none."""
_TERMINALS = f"{TEXT}: /(.|\\n)*/\n{SPACE}: /[ \\t\\n]{{0,4}}/\n"
_NAME = re.compile(r"[\w.\-]{1,256}")

Functions = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the parameters of each function that may be called, by its name."""


class ParametersSchema(Struct):
    """What is read of the JSON schema of a function's parameters; `llguidance` reads the rest."""

    type: Literal["object"] = "object"
    properties: dict[str, Any] = {}
    required: list[str] = []


class OutputGrammar:
    """Such a grammar in the making: rules, and the grammars that they refer to."""

    def __init__(self) -> None:
        self._rules: list[str] = []
        self._pieces: dict[str, Piece] = {}

    def part(self, piece: Piece) -> str:
        """A grammar as a part of a rule."""
        name = f"part{len(self._pieces)}"
        self._pieces[name] = piece
        return f"@{name}"

    def until(self, end: str) -> str:
        """Any text up to the first `end`, and that."""
        name = f"until{len(self._rules)}"
        self._rules.append(f"{name}[suffix={quoted(end)}]: {TEXT}\n")
        return name

    def arguments(self, schema: Mapping[str, Any]) -> str:
        """JSON that a function takes."""
        return self.part(StructuredOutputs(json=dict(schema)).piece())

    def whole(self, start: str) -> str:
        """As an engine takes it, from the rule for all of the text."""
        return joined(f"start: {start}\n{_TERMINALS}{''.join(self._rules)}", self._pieces)


def quoted(text: str) -> str:
    """Just this text, as a part of a rule."""
    return json.dumps(text, ensure_ascii=False)


def repeated(call: str, between: str) -> str:
    """A call, or several with something between them."""
    return (
        f"{call} ({between} {call}){{0,{MAX_CALLS - 1}}}"
        if between
        else f"({call}){{1,{MAX_CALLS}}}"
    )


def forced_functions(functions: Functions, choice: Any) -> Functions:
    """What an answer may call that has to call.

    Args:
        functions: of the request's ``tools``.
        choice: its ``tool_choice``, which forces calls.

    Raises:
        RequestError: naming the field that is wrong.
    """
    if choice != "required":
        named = choice.get("function") if isinstance(choice, Mapping) else None
        name = named.get("name") if isinstance(named, Mapping) else None
        if not isinstance(name, str):
            raise RequestError(
                'must be "auto", "none", "required" or {"type": "function", "function": {"name": '
                "...}}",
                param="tool_choice",
                code="unsupported",
            )
        if name not in functions:
            raise RequestError(f"there is no function {name!r} in tools", param="tool_choice")
        functions = {name: functions[name]}
    for name, schema in functions.items():
        if not _NAME.fullmatch(name):
            allowed = "is not of letters, digits, _, . and -, 256 at most, and can't be forced"
            raise RequestError(f"the name {name[:300]!r} {allowed}", param="tools")
        try:
            msgspec.convert(schema, ParametersSchema)
        except msgspec.ValidationError as error:
            problem = f"the parameters of {name} must be an object's schema: {error}"
            raise RequestError(problem, param="tools") from error
    return {name: {"type": "object", **schema} for name, schema in functions.items()}

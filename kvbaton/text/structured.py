"""Turns a request's constraints on its text into a grammar for `llguidance`.

Such a grammar is JSON with a list of grammars. The first one (Lark) describes the whole text and
refers to the others by name: ``@body`` is the part that the client constrains.

The client's part is placed where the model writes it (`OutputGrammar`): the answer after the
reasoning, which is unconstrained, or the arguments of calls in the syntax of the model's family, so
that the family's parser can read them. Code that follows tokens by the grammar (drafts, the decode
node, a successor) need not know where reasoning ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from kvbaton.errors import RequestError
from kvbaton.messages.engine import MAX_GRAMMAR

WHITESPACE = r"[ \t\n\r]{0,16}"
"""Default white space between tokens of JSON; it is bounded because some models never stop."""

BODY = "@body"
"""Rule of the part that the client constrains."""

Piece = dict[str, Any]
"""A grammar without a name, under the key ``json_schema`` or ``lark_grammar``."""


class StructuredOutputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constraint on the text: exactly one of the first five fields. Names as in vLLM.

    Attributes:
        json: A JSON schema, as an object or as text.
        json_object: Any JSON object.
        regex: A regular expression that the whole text matches; no look-around.
        choice: One of these texts.
        grammar: A grammar in llguidance's Lark, or in GBNF.
        disable_any_whitespace: Allow no white space between tokens of JSON.
        whitespace_pattern: Regular expression of white space between tokens of JSON.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def piece(self, field: str = "structured_outputs") -> Piece:
        """Make the grammar.

        Args:
            field: Name of this constraint in errors.

        Raises:
            RequestError: None or several of the fields are given, or the field's value is wrong.
        """
        kinds = ("json", "json_object", "regex", "choice", "grammar")
        given = [name for name in kinds if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(f"needs exactly one of {', '.join(kinds)}", param=field)
        if self.json is not None:
            return self._of_schema(self.json, f"{field}.json")
        if self.regex is not None:
            if (len(self.regex) - len(self.regex.rstrip("\\"))) % 2:
                raise RequestError("ends with a lone backslash", param=f"{field}.regex")
            from llguidance import regex_to_lark

            pattern = regex_to_lark(self.regex, use_ascii="d")
            return {"lark_grammar": f"start: /{pattern}/"}
        if self.choice is not None:
            if not self.choice or "" in self.choice:
                raise RequestError("needs texts that are not empty", param=f"{field}.choice")
            texts = " | ".join(quoted(text) for text in self.choice)
            # One terminal, because the parser takes at most 2,000 alternatives of a rule.
            return {"lark_grammar": f"start: CHOICE\nCHOICE: {texts}"}
        if self.grammar is not None:
            return {"lark_grammar": _lark(self.grammar, f"{field}.grammar")}
        return self._of_schema({"type": "object"}, field)

    def _of_schema(self, schema: Any, field: str) -> Piece:
        if isinstance(schema, str):
            try:
                schema = msgspec.json.decode(schema)
            except (msgspec.DecodeError, RecursionError) as error:
                raise RequestError(f"is no JSON: {error}", param=field) from error
        if not isinstance(schema, dict):
            raise RequestError("must be a JSON schema, an object", param=field)
        options: dict[str, Any] = {"whitespace_pattern": self.whitespace_pattern or WHITESPACE}
        if self.disable_any_whitespace:
            options = {"whitespace_flexible": False}
        return {"json_schema": {"x-guidance": options, **schema}}


def wanted(response_format: Any, structured_outputs: Any) -> tuple[str, Piece] | None:
    """The constraint of a request as (name of the field, grammar); None without one.

    Raises:
        RequestError: A field is wrong; the error names it.
    """
    found = None
    if response_format is not None:
        found = _of_response_format(response_format)
    if structured_outputs is not None:
        if found is not None:
            raise RequestError("excludes response_format", param="structured_outputs")
        told = msgspec.to_builtins(structured_outputs)
        if isinstance(told, dict):  # vLLM's has further fields, which ask for nothing like this
            told = {name: value for name, value in told.items() if value not in (None, False)}
        try:
            given = msgspec.convert(told, StructuredOutputs)
        except msgspec.ValidationError as error:
            raise RequestError(str(error), param="structured_outputs") from error
        found = "structured_outputs", given.piece()
    return found


def _of_response_format(given: Any) -> tuple[str, Piece] | None:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        field = "response_format"
        return field, StructuredOutputs(json_object=True).piece(field)
    if kind == "json_schema":
        field = "response_format.json_schema"
        named = given.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else None
        if not isinstance(schema, dict):
            raise RequestError("needs a schema, an object", param=f"{field}.schema")
        return f"{field}.schema", StructuredOutputs(json=schema).piece(field)
    raise RequestError(
        "type must be text, json_object or json_schema",
        param="response_format.type",
        code="unsupported" if kind == "structural_tag" else None,
    )


def joined(rules: str, pieces: Mapping[str, Piece]) -> str:
    """Make a whole grammar.

    Args:
        rules: Lark with a rule ``start``.
        pieces: By name, the grammars that the rules refer to.
    """
    named = [{"name": name, **piece} for name, piece in pieces.items()]
    # Where only one text can follow, llguidance would force its tokens, also a special token where
    # the text spells its name.
    first = {"lark_grammar": f'%llguidance {{"no_forcing": true}}\n{rules}'}
    return json.dumps({"grammars": [first, *named]}, ensure_ascii=False)


def check_length(grammar: str, field: str) -> None:
    """Raise `RequestError` if a grammar is longer than engines take."""
    if len(grammar) > MAX_GRAMMAR:
        problem = f"makes a grammar of more than {MAX_GRAMMAR} characters"
        raise RequestError(problem, param=field)


def _lark(text: str, field: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    check_length(text, field)  # reading one takes 0.3 s per 100,000 characters
    try:
        found: str = any_to_lark(text)
    except Exception as error:  # the parser may raise anything for a client's text
        raise RequestError(f"can't be read: {error}", param=field) from error
    return found


MAX_CALLS = 16
"""Maximum number of calls in an answer that has to call, because some models never stop."""
TEXT = "TEXT"
"""Rule of any text without tags that are tokens."""
SPACE = "SPACE"
"""Rule of optional white space between parts."""
_TERMINALS = f"{TEXT}: /(.|\\n)*/\n{SPACE}: /[ \\t\\n]{{0,4}}/\n"
_NAME = re.compile(r"[\w.\-]{1,256}")

Functions = Mapping[str, Mapping[str, Any]]
"""Functions that may be called: the JSON schema of the parameters, by name."""


class ParametersSchema(Struct):
    """The parts of a parameters' JSON schema that are read here; `llguidance` reads the rest."""

    type: Literal["object"] = "object"
    properties: dict[str, Any] = {}
    required: list[str] = []


class OutputGrammar:
    """Builds a grammar: rules, and the grammars that they refer to."""

    def __init__(self) -> None:
        self._rules: list[str] = []
        self._pieces: dict[str, Piece] = {}

    def part(self, piece: Piece) -> str:
        """Add a grammar, and return the reference to it for use in a rule."""
        name = f"part{len(self._pieces)}"
        self._pieces[name] = piece
        return f"@{name}"

    def until(self, end: str) -> str:
        """Add a rule of any text up to and including the first `end`, and return its name."""
        name = f"until{len(self._rules)}"
        self._rules.append(f"{name}[suffix={quoted(end)}]: {TEXT}\n")
        return name

    def arguments(self, schema: Mapping[str, Any]) -> str:
        """Add the grammar of JSON arguments, and return the reference to it."""
        return self.part(StructuredOutputs(json=dict(schema)).piece())

    def whole(self, start: str) -> str:
        """The whole grammar, for the engine, with the rule of the whole text."""
        return joined(f"start: {start}\n{_TERMINALS}{''.join(self._rules)}", self._pieces)


def moved(schema: Any, place: str) -> Any:
    """Adapt the references in a JSON schema that is placed within another schema.

    Args:
        schema: The schema, or a part of it.
        place: JSON pointer to its place in the other schema.
    """
    if isinstance(schema, list):
        return [moved(part, place) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: moved(part, place) for key, part in schema.items()}
    if isinstance(to := schema.get("$ref"), str) and to[:1] == "#":
        found["$ref"] = f"#{place}{to[1:]}"
    return found


def quoted(text: str) -> str:
    """A literal text, for use in a rule."""
    return json.dumps(text, ensure_ascii=False)


def repeated(call: str, between: str) -> str:
    """Rule of one or several calls, with a separator between them."""
    return (
        f"{call} ({between} {call}){{0,{MAX_CALLS - 1}}}"
        if between
        else f"({call}){{1,{MAX_CALLS}}}"
    )


def forced_functions(functions: Functions) -> Functions:
    """Complete the schemas of functions of which an answer has to call one.

    Raises:
        RequestError: No grammar can express a name or the kind of a schema.
    """
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


def loosened(functions: Functions) -> Functions:
    """Reduce the schemas of `forced_functions` to the names and types of parameters."""
    return {
        name: {
            "type": "object",
            "properties": {
                key: {"type": kind["type"]} if isinstance(kind, Mapping) and "type" in kind else {}
                for key, kind in schema.get("properties", {}).items()
            },
            "required": schema.get("required", ()),
        }
        for name, schema in functions.items()
    }

"""From what a request asks of its text to a grammar, as `llguidance` takes it.

Such a grammar is JSON: a list of grammars, of which the first says how a text begins, goes on and
ends (Lark), and refers to the others by name: ``@body`` is what the client wants to have.

What the client wants stands where the model writes it (`OutputGrammar`): its answer behind its
reasoning, which is left free, or the arguments of calls of functions in the form that the family
writes them in, so that the parser of that form reads them back. Whatever reads tokens by the
grammar (drafts, the node that decodes, one that goes on) need not know where reasoning ends.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

import msgspec
from msgspec import Struct

from kvbaton.errors import RequestError
from kvbaton.messages.engine import MAX_GRAMMAR

CHECK_S = 10.0
"""A grammar that takes longer to check is refused."""
WHITESPACE = r"[ \t\n\r]{0,16}"
"""Between the tokens of JSON, unless a request says otherwise; without an end, some models never
find one."""

BODY = "@body"
"""The rule for what the client wants to have."""

Piece = dict[str, Any]
"""A grammar without a name: ``json_schema`` or ``lark_grammar``."""


class StructuredOutputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the text must be; one of the first five. Names as vLLM's.

    Attributes:
        json: a JSON schema, or one as text.
        json_object: any JSON object.
        regex: a regular expression that the whole text matches; no look-around.
        choice: one of these texts.
        grammar: Lark as llguidance has it, or GBNF.
        disable_any_whitespace: of JSON, none between its tokens.
        whitespace_pattern: a regular expression for it.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def piece(self, field: str = "structured_outputs") -> Piece:
        """As a grammar.

        Args:
            field: what messages call this.

        Raises:
            RequestError: none or several are given, or it is none.
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
            # One terminal: of a rule's alternatives the parser takes 2,000 at most.
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
    """What the fields of a request say, and the field's name; None for any text.

    Raises:
        RequestError: naming the field that is wrong.
    """
    found = None
    if response_format is not None:
        found = _of_response_format(response_format)
    if structured_outputs is not None:
        if found is not None:
            raise RequestError("excludes response_format", param="structured_outputs")
        try:
            given = msgspec.convert(msgspec.to_builtins(structured_outputs), StructuredOutputs)
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
    """A whole grammar.

    Args:
        rules: Lark with a rule ``start``.
        pieces: what they refer to, by name.
    """
    named = [{"name": name, **piece} for name, piece in pieces.items()]
    # Where only one text can follow, llguidance would force its tokens: a special one for its name.
    first = {"lark_grammar": f'%llguidance {{"no_forcing": true}}\n{rules}'}
    return json.dumps({"grammars": [first, *named]}, ensure_ascii=False)


async def checked_grammar(grammar: str, field: str) -> str:
    """A grammar that was compiled once, in a thread, without a vocabulary.

    Raises:
        RequestError: it is wrong, too large, or too hard.
    """
    if len(grammar) > MAX_GRAMMAR:
        problem = f"makes a grammar of more than {MAX_GRAMMAR} characters"
        raise RequestError(problem, param=field)
    try:
        async with asyncio.timeout(CHECK_S):
            error = await asyncio.to_thread(_error, grammar)
    except TimeoutError:
        error = f"took more than {CHECK_S:g} s to compile"
    if error:
        raise RequestError(f"can't be followed: {error}"[:1000], param=field)
    return grammar


@lru_cache(maxsize=64)
def _error(grammar: str) -> str:
    """What is wrong with a grammar; empty if nothing is."""
    import llguidance

    limits = llguidance.LLParserLimits(verbose_errors=False)
    is_wrong, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
    if is_wrong:
        return "; ".join(messages)
    # One that only leads to itself is no mistake by its form: no first byte fits it.
    matcher = llguidance.LLMatcher(_bytes_alone(), grammar, log_level=0, limits=limits)
    if not matcher.is_error():  # as with special tokens, which only the model's vocabulary has
        matcher.compute_bitmask()
        if error := matcher.get_error():
            return "no text fits it" if error.startswith("NoExtensionBias") else error
    return ""


@lru_cache(maxsize=1)
def _bytes_alone() -> Any:
    """A vocabulary of single bytes."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _lark(text: str, field: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        found: str = any_to_lark(text)
    except Exception as error:  # whatever a parser of other people's text may raise
        raise RequestError(f"can't be read: {error}", param=field) from error
    return found


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


def moved(schema: Any, place: str) -> Any:
    """A JSON schema that stands at a place in another one, where its references lead then.

    Args:
        schema: or a part of it.
        place: a JSON pointer.
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


def loosened(functions: Functions) -> Functions:
    """Functions whose parameters, as of `forced_functions`, are of their types, and else any."""
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

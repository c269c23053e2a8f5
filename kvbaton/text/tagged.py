"""Output format of most families: reasoning and calls between tags.

    <think>...</think>Content. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>

A call begins once its head is complete: the function's name, up to the brace that opens the
arguments. From there on all text is arguments, unchanged, up to the brace that closes them. Text
that does not match a head is content. So no text is lost, and no emitted part is taken back. JSON
whose keys come in another order is parsed once it is complete. White space beside a tag belongs to
the tag.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import regex
from msgspec import Struct
from typing_extensions import override

from kvbaton.errors import RequestError
from kvbaton.text.output_parser import MessagePart, OutputFormat, OutputParser, split_calls
from kvbaton.text.structured import SPACE, TEXT, Functions, OutputGrammar, moved, quoted, repeated
from kvbaton.text.tokenizer import Tokenizer

FIRST_MARK: Final = 0xFDE0
MARKS: Final = "\ufde0-\ufdef"


_WHOLE = regex.compile(r"\s*+\[?+\s*+(?=\{)")
_MARK = re.compile(f"[{MARKS}]")
_STRUCTURE = re.compile(rf'["{{}}\\{MARKS}]')
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_ALPHANUMERIC = string.ascii_letters + string.digits


class CallSyntax(Struct, frozen=True):
    """How a family writes calls, as regular expressions in which ``«tag»`` is a tag.

    Attributes:
        tags: All tags.
        begin: Start of a call, before its head.
        heads: Per style of call, a pattern of the head, with the function as the group ``name``
            and the arguments after it, and a pattern of the text after the arguments, with the
            group ``more`` if another head follows.
        in_template: Texts that chat templates of the family contain.
        call: A call as the template writes it, with ``$name`` and ``$arguments``.
        around: Texts of the template before all calls, between two calls and after all calls.
        ignored: Tags around several calls.
        json: Whether a call that does not match a head may be JSON with the same members.
        xml: Whether each argument has tags of its own.
        bare: Whether JSON at the start of the content is a call if it names a function.
        one_each: Whether the template takes only one call per message.
        short_ids: Whether call ids are nine letters and digits.
    """

    tags: tuple[str, ...]
    begin: str
    heads: tuple[tuple[str, str], ...]
    in_template: tuple[str, ...]
    call: str
    around: tuple[str, str, str] = ("", "", "")
    ignored: str = ""
    json: bool = True
    xml: bool = False
    bare: bool = False
    one_each: bool = False
    short_ids: bool = False


NO_CALLS = CallSyntax(tags=(), begin="", heads=(), in_template=(), call="", json=False)


class TaggedFormat(OutputFormat):
    """Format of a model that writes tags.

    Args:
        tokenizer: Tokenizer of the model. Tags that are not tokens are searched for in the text.
        syntax: Syntax of calls; None if calls are not parsed.
        reasoning: Tags around reasoning; empty if reasoning is not parsed.
    """

    def __init__(
        self, tokenizer: Tokenizer, syntax: CallSyntax | None, reasoning: tuple[str, ...]
    ) -> None:
        self.calls, self.reasons = syntax is not None, bool(reasoning)
        syntax = syntax or NO_CALLS
        self.syntax, self._reasoning, self._tokenizer = syntax, reasoning, tokenizer
        tags = (*reasoning, *syntax.tags)
        marks = {tag: chr(FIRST_MARK + i) for i, tag in enumerate(tags)}
        self._marks = {tag: m for tag, m in marks.items() if tag in tokenizer.added_tokens}
        self.tags = {ord(mark): tag for tag, mark in self._marks.items()}
        self.marks_all = len(self._marks) == len(tags)
        named = {"begin": syntax.begin, "ignored": syntax.ignored}
        opens = [f"(?P<{name}>{pattern})" for name, pattern in named.items() if pattern]
        bare = [r"(?P<bare>\A\s*+(?=\{))"] if syntax.bare else []
        think = [rf"(?P<think>\A\s*+«{reasoning[0]}»)"] if reasoning else []
        self.text = self._any(opens)
        self.first_text = self._any(bare + opens)
        self.first = self._any(think + bare + opens)
        self.first_without_calls = self._any(think)
        self.reasoning = self._any([f"(?P<end>«{reasoning[1]}»)"] if reasoning else [])
        self.heads = [(self.compile(head), self.compile(tail)) for head, tail in syntax.heads]
        if syntax.xml:
            self.parameter = self.compile(
                r"\s*+(?:<parameter=(?P<key>[^>\n]{1,256}+)>(?:\n|(?=[^\n]))"
                r"|(?P<done>(?:</function>)?+\s*+«</tool_call>»))"
            )
            self.value_end = self.compile(r"\n?</parameter>")

    def compile(self, pattern: str) -> Any:
        """Compile a pattern; each ``«tag»`` becomes its mark, or the tag's text without one."""
        return regex.compile(
            regex.sub("«(.*?)»", lambda m: regex.escape(self._marks.get(m[1], m[1])), pattern)
        )

    def _any(self, patterns: Sequence[str]) -> Any:
        """A pattern that matches any of several; None if there are none."""
        return self.compile("|".join(patterns)) if patterns else None

    @override
    def marks(self, *, calls: bool) -> Mapping[int, str]:
        shown = {*self._reasoning, *(self.syntax.tags if calls else ())}
        added = self._tokenizer.added_tokens
        return {added[tag]: mark for tag, mark in self._marks.items() if tag in shown}

    @override
    def parser(
        self, prompt: Sequence[int], functions: Functions | None, *, only: bool = False
    ) -> TaggedParser:
        begun, closed = self._reasoned(prompt)
        return TaggedParser(self, functions, only=only, reasons=begun, reasoned=closed)

    def _reasoned(self, prompt: Sequence[int]) -> tuple[bool, bool]:
        """Whether the end of a prompt begins reasoning, and whether it ends reasoning."""
        tail = self._tokenizer.decode(list(prompt[-16:]), skip_special_tokens=False).rstrip()
        begin, end = self._reasoning or ("", "")
        return bool(begin) and tail.endswith(begin), bool(end) and tail.endswith(end)

    @override
    def reasoning_rule(self, prompt: Sequence[int], grammar: OutputGrammar) -> str:
        begun, closed = self._reasoned(prompt)
        if closed or not self._reasoning:
            return ""
        begin, end = self._reasoning
        is_token = end in self._marks
        rest = f"{TEXT} {self._written(end)}" if is_token else grammar.until(end)
        return f"{rest} {SPACE}" if begun else f"({self._written(begin)} {rest} {SPACE})?"

    @override
    def calls_rule(self, functions: Functions, grammar: OutputGrammar, *, one: bool) -> str:
        syntax = self.syntax
        template, (before, between, behind) = syntax.call, syntax.around
        if "[ARGS]" in self._marks:  # Mistral's later tokenizers
            template, before, between, behind = "«[TOOL_CALLS]»$name«[ARGS]»$arguments", "", "", ""
        calls = []
        for name, schema in functions.items():
            if syntax.bare:  # one JSON grammar, which can be an alternative to a JSON answer
                parameters = moved(schema, "/properties/parameters")
                members = {"name": {"const": name}, "parameters": parameters}
                more = {"required": [*members], "additionalProperties": False}
                calls.append(grammar.arguments({"type": "object", "properties": members, **more}))
                continue
            head, tail = template.replace("$name", name).split("$arguments")
            of = self._tagged_arguments if syntax.xml else OutputGrammar.arguments
            calls.append(f"{self._all(head)} {of(grammar, schema)} {self._all(tail)}")
        call = f"({' | '.join(calls)})"
        written = call if one or syntax.one_each else repeated(call, self._all(between))
        return f"{self._all(before)} {written} {self._all(behind)}"

    def _all(self, template: str) -> str:
        """Turn text with ``«tags»`` into a part of a rule."""
        pieces = filter(None, re.split("(«.*?»)", template))
        return " ".join(
            self._written(piece[1:-1]) if piece[0] == "«" else quoted(piece) for piece in pieces
        )

    def _written(self, tag: str) -> str:
        is_token = tag in self._marks
        return f"<[{self._tokenizer.added_tokens[tag]}]>" if is_token else quoted(tag)

    @staticmethod
    def _tagged_arguments(grammar: OutputGrammar, schema: Mapping[str, Any]) -> str:
        """Rule of arguments in tags of their own, in the schema's order; strings are unquoted."""
        rules, required, place = [], schema.get("required", ()), "/$defs/all"
        whole = {"$defs": {"all": moved(schema, place)}}
        for key, kind in schema.get("properties", {}).items():
            kind = kind if isinstance(kind, Mapping) else {}
            end = "\n</parameter>\n"
            if kind.get("type") != "string":
                alone = moved(kind, place)
                wanted = kind if alone == kind else {**alone, **whole}
                value = f"{grammar.arguments(wanted)} {quoted(end)}"
            elif "enum" in kind:
                allowed = kind["enum"] if isinstance(kind["enum"], list) else ()
                texts = [quoted(text) for text in allowed if isinstance(text, str)]
                if not texts:
                    raise RequestError(f"the enum of {key} has no text", param="tools")
                value = f"({' | '.join(texts)}) {quoted(end)}"
            else:
                value = grammar.until(end)
            optional = "" if key in required else "?"
            rules.append(f"({quoted(f'<parameter={key}>' + chr(10))} {value}){optional}")
        return " ".join(rules)

    @override
    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        syntax = self.syntax
        found = split_calls(messages) if syntax.one_each else super().messages(messages)
        if syntax.short_ids:
            for message in found:
                if isinstance(name := message.get("tool_call_id"), str):
                    message["tool_call_id"] = name[-9:]
                if calls := message.get("tool_calls"):
                    message["tool_calls"] = [
                        {**call, "id": str(call["id"])[-9:]} if "id" in call else call
                        for call in calls
                    ]
        return found

    @override
    def call_id(self) -> str:
        if not self.syntax.short_ids:
            return super().call_id()
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


class TaggedParser(OutputParser):
    """Parses the text of one choice.

    Args:
        form: Format of the model.
        functions: See `OutputFormat.parser`, as for `only`.
        reasons: Whether the prompt has begun the reasoning.
        reasoned: Whether the prompt has ended the reasoning.
    """

    def __init__(
        self,
        form: TaggedFormat,
        functions: Functions | None,
        *,
        only: bool,
        reasons: bool,
        reasoned: bool,
    ) -> None:
        self._form, self._functions, self._only = form, functions, only
        self._held = ""  # text that is not parsed yet
        self._last = False
        self._parts: list[MessagePart] = []
        self._read = self._read_text
        self.kind = "reasoning" if reasons else "content"
        self._first = not reasons and not reasoned  # reasoning may follow
        self._empty = True  # there is no content yet
        self._after_tag = reasons
        self._begin = ""  # text that began a call; it becomes content if there is no call
        self._is_bare = False
        self._tail: Any = None
        self._object = JsonObject()
        self._call = ""  # text of a call that is parsed once it is complete
        self._properties: Mapping[str, Any] = {}
        self._separator, self._value, self._is_string = "", "", False

    @override
    def push(self, text: str, *, last: bool = False) -> list[MessagePart]:
        waits_at_blank = self._held[-1:].isspace()
        self._held += text
        self._last, self._parts = last, []
        if waits_at_blank and not last and not text.strip():
            return []  # only the text after blanks tells whether they belong to a tag
        while self._read():
            pass
        return self._parts

    # Each of these parses a part of `_held`, and returns whether more may be parsed.

    def _read_text(self) -> bool:
        """Parse content or reasoning, up to a tag."""
        held, form = self._held, self._form
        if self.kind == "reasoning":
            pattern = form.reasoning
        elif self._functions is None:
            pattern = form.first_without_calls if self._first else None
        elif self._empty:
            pattern = form.first if self._first else form.first_text
        else:
            pattern = form.text
        if pattern and held.isspace() and not self._last:
            return False
        found = None  # most pieces have no mark
        # A tag may also be plain text, and bare JSON may begin a call.
        otherwise = not form.marks_all or (form.syntax.bare and self._empty)
        if pattern and (otherwise or _MARK.search(held)):
            found = pattern.search(held, partial=not self._last)
        if found is None or found.partial:
            end = len(held) if found is None else found.start()
            if pattern and not self._last:
                end = len(held[:end].rstrip())  # trailing blanks belong to a tag that may follow
            self._say(held[:end])
            self._held = held[end:]
            return False
        text, self._held = held[: found.start()].rstrip(), held[found.end() :]
        self._say(text)
        if found.lastgroup in ("begin", "bare"):
            self._begin = held[len(text) : found.end()]
            self._read, self._is_bare = self._read_head, found.lastgroup == "bare"
            return True
        self._after_tag = True
        if found.lastgroup == "think":
            self.kind, self._first = "reasoning", False
        elif found.lastgroup == "end":
            self.kind = "content"
        return True

    def _say(self, text: str) -> None:
        if self._after_tag:
            text = text.lstrip()
        if text:
            self._after_tag = False
            if self.kind == "content" and text.strip():
                self._empty = self._first = False
            self._parts.append(MessagePart(self.kind, text.translate(self._form.tags)))

    def _read_head(self) -> bool:
        """Parse the head of a call, up to its arguments."""
        waits = False
        if self._held.isspace() and not self._last:
            return False
        for head, tail in self._form.heads:
            found = head.match(self._held, partial=not self._last)
            if found is not None and not found.partial:
                if not self._may_call(found["name"]):
                    return self._refuse()
                self._held = self._held[found.end() :]
                self._start(found["name"], tail)
                return True
            waits |= found is not None
        if waits:
            return False
        found = _WHOLE.match(self._held)
        if found is None or not self._form.syntax.json:
            return self._refuse()
        self._held, self._begin = self._held[found.end() :], self._begin + found[0]
        self._object, self._call, self._read = JsonObject(), "", self._read_whole
        return True

    def _may_call(self, name: str) -> bool:
        return not (self._is_bare or self._only) or name in (self._functions or ())

    def _refuse(self) -> bool:
        """Take the beginning of a call as content, because it is not a call."""
        self._say(self._begin)
        self._empty = self._first = False
        self._read = self._read_text
        return True

    def _start(self, function: str, tail: Any) -> None:
        self._parts.append(MessagePart("call", "", self.num_calls, function))
        self.num_calls += 1
        self._tail, self._object = tail, JsonObject()
        self._read = self._read_arguments
        if self._form.syntax.xml:
            schema = (self._functions or {}).get(function, {}).get("properties")
            self._properties = schema if isinstance(schema, Mapping) else {}
            self._separator, self._read = "{", self._read_parameter

    def _argue(self, text: str) -> None:
        if text:
            self._parts.append(MessagePart("call", text, self.num_calls - 1))

    def _read_arguments(self) -> bool:
        end = self._object.end(self._held)
        self._argue(self._held[:end].translate(self._form.tags))
        self._held = "" if end is None else self._held[end:]
        if end is not None:
            self._read = self._read_tail
        return end is not None

    def _read_whole(self) -> bool:
        """Parse a call that is emitted once it is complete."""
        end = self._object.end(self._held)
        self._call += self._held[:end]
        self._held = "" if end is None else self._held[end:]
        if end is None and not self._last:
            return False
        try:
            call = msgspec.json.decode(self._call.translate(self._form.tags), type=WholeCall)
        except (msgspec.MsgspecError, RecursionError):
            call = None
        if call is None or not self._may_call(call.name):
            self._begin += self._call
            return self._refuse()
        self._start(call.name, self._form.heads[0][1])
        given = call.arguments or call.parameters or {}
        self._argue(given if isinstance(given, str) else _json(given))
        self._read = self._read_tail
        return True

    def _read_tail(self) -> bool:
        """Parse the text after the arguments."""
        found = self._tail.match(self._held, partial=True)
        if found is not None and found.partial:
            if self._last:
                self._held = ""
            return False
        self._begin, self._after_tag, self._read = "", True, self._read_text
        if found is not None:
            self._held = self._held[found.end() :]
            if found.lastgroup == "more":
                self._read = self._read_head
        return True

    def _read_parameter(self) -> bool:
        """Parse the tag before an argument, or the one after the last argument."""
        found = self._form.parameter.match(self._held, partial=True)
        if found is not None and found.partial:
            if self._last:
                self._held = ""
            return False
        if found is not None:
            self._held = self._held[found.end() :]
        if found is None or found["key"] is None:
            self._argue("{}" if self._separator == "{" else "}")
            self._after_tag, self._read = True, self._read_text
            return True
        kind = self._properties.get(found["key"])
        self._is_string = isinstance(kind, Mapping) and kind.get("type") == "string"
        quote = '"' if self._is_string else ""
        self._argue(f"{self._separator}{_json(found['key'])}: {quote}")
        self._separator, self._value, self._read = ", ", "", self._read_value
        return True

    def _read_value(self) -> bool:
        """Parse an argument; a string is emitted as it arrives, other values once complete."""
        found = self._form.value_end.search(self._held, partial=not self._last)
        ends = found is not None and not found.partial
        text = self._held[: None if found is None else found.start()]
        self._held = self._held[found.end() if ends else len(text) :]
        text = text.translate(self._form.tags)
        if self._is_string:
            self._argue(_json(text)[1:-1] + '"' * ends)
        else:
            self._value += text
            if ends or self._last:
                self._argue(_as_json(self._value))
        if ends:
            self._read = self._read_parameter
        return ends


class WholeCall(Struct):
    """A call in JSON; some models write its arguments as a JSON string."""

    name: str
    arguments: dict[str, Any] | str | None = None
    parameters: dict[str, Any] | str | None = None


class JsonObject:
    """Finds the end of a JSON object in text that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._skip = 0  # characters of the next piece that are escaped

    def end(self, text: str) -> int | None:
        """Position in the next piece at which the object ends; None if it goes on.

        The object ends after its last brace, or before a mark outside its strings.
        """
        for found in _STRUCTURE.finditer(text):
            at, character = found.start(), found[0]
            if at < self._skip:
                continue
            if character == "\\":
                self._skip = at + 2 if self._in_string else 0
            elif character == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                continue
            elif character in "{}":
                self._depth += 1 if character == "{" else -1
                if self._depth == 0:
                    return at + 1
            else:
                return at
        self._skip = max(0, self._skip - len(text))
        return None


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _as_json(text: str) -> str:
    """A value that may be other than a string: unchanged if it is JSON, else as a JSON string."""
    text = text.strip()
    try:
        msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return _PYTHON.get(text) or _json(text)
    return text

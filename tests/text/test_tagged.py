# ruff: noqa: RUF001 -- DeepSeek's tags have such bars
"""Reasoning, calls and content come apart, however the text is cut and whatever is in it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.errors import ConfigError
from kvbaton.text.output_parser import OutputFormat
from kvbaton.text.parsers import CALL_SYNTAXES, REASONING_TAGS, find_output_format
from kvbaton.text.structured import Functions
from kvbaton.text.tagged import TaggedFormat
from kvbaton.text.tokenizer import Tokenizer
from tests.support.parsed_output import Read, read_pieces
from tests.support.scripted_source import SPECIAL, train_backend

FAMILIES = [name for name in CALL_SYNTAXES if name != "deepseek_v31"]
TAGS = sorted({tag for syntax in CALL_SYNTAXES.values() for tag in syntax.tags})
THINK = REASONING_TAGS["qwen3"]
WITH_TAGS = Tokenizer(train_backend([*SPECIAL, *TAGS, *THINK]))
WITHOUT_TAGS = Tokenizer(train_backend())
STRING = {"type": "string"}
FUNCTIONS: Functions = {
    "f": {"properties": {"a": STRING, "b": {"type": "integer"}}},
    "get.x-y_2": {},
}
BEGIN, CALL, SEP, CALL_END, END = (
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)


def forms(family: str) -> list[TaggedFormat]:
    """The family's format where its tags are tokens, and where they are not."""
    return [
        TaggedFormat(tokenizer, CALL_SYNTAXES[family], THINK)
        for tokenizer in (WITH_TAGS, WITHOUT_TAGS)
    ]


def marked(form: OutputFormat, text: str) -> str:
    """The text as a detokenizer gives it."""
    marks = form.marks(calls=True)
    for tag in [*TAGS, *THINK]:
        text = text.replace(tag, marks.get(WITH_TAGS.added_tokens[tag], tag))
    return text


def read(
    form: OutputFormat,
    pieces: Sequence[str],
    functions: Functions | None = FUNCTIONS,
    begun: str = "",
    only: bool = False,
) -> Read:
    tokenizer = WITH_TAGS if form.marks(calls=True) else WITHOUT_TAGS
    parser = form.parser(tokenizer.encode(begun, add_special_tokens=False), functions, only=only)
    return read_pieces(parser, pieces)


def write(family: str, calls: list[tuple[str, dict[str, Any]]], spaced: bool) -> list[str]:
    """Calls as the family's models write them, in each style that it has."""
    pairs = [(name, json.dumps(given, ensure_ascii=False)) for name, given in calls]
    key = "parameters" if family == "llama3_json" else "arguments"
    objects = [f'{{"name": "{name}", "{key}": {given}}}' for name, given in pairs]
    gap = "\n" if spaced else ""
    if family == "hermes":
        return [gap.join(f"<tool_call>{gap}{o}{gap}</tool_call>" for o in objects)]
    if family == "llama3_json":
        return [f"{tag}{f';{gap}'.join(objects)}{gap}" for tag in ("", "<|python_tag|>")]
    if family == "mistral":
        newer = "".join(f"[TOOL_CALLS]{name}[ARGS]{given}{gap}" for name, given in pairs)
        named = "".join(f"[TOOL_CALLS]{name}[CALL_ID]a1B2[ARGS]{given}" for name, given in pairs)
        array = f"[TOOL_CALLS]{gap}[{f',{gap}'.join(objects)}]"
        ids = f",{gap}".join(f'{o[:-1]}, "id": "123456789"}}' for o in objects)
        return [array, f"[TOOL_CALLS] [{ids}]", newer, named]
    if family == "deepseek_v3":
        first = [f"{CALL}function{SEP}{n}\n```json\n{given}\n```{CALL_END}" for n, given in pairs]
        second = [f"{CALL}{n}{SEP}{given}{CALL_END}" for n, given in pairs]
        return [BEGIN + gap.join(all_of) + END for all_of in (first, second)]
    return [
        gap.join(
            f"<tool_call>{gap}<function={name}>\n"
            + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
            + f"</function>{gap}</tool_call>"
            for name, values in calls
        )
    ]


def cut(data: st.DataObject, text: str) -> list[str]:
    size = data.draw(st.sampled_from([1, 3, 7, 40]), "most in a piece")
    pieces = []
    while text:
        length = data.draw(st.integers(1, size)) if size > 1 else 1
        pieces.append(text[:length])
        text = text[length:]
    return pieces or [""]


plain = st.text('ab \nß東{}[]<>"\\,:;', max_size=12).map(lambda text: f"x{text}z")
arguments = st.dictionaries(
    st.sampled_from(["a", "k", "東 x"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | plain,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(plain, inner, max_size=2),
        max_leaves=4,
    ),
    max_size=3,
)


@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_what_is_written_is_read(family: str, data: st.DataObject) -> None:
    reasoning = data.draw(st.just("") | plain, "reasoning")
    before = data.draw(st.just("") | plain, "before")
    given = arguments
    if family == "qwen3_coder":  # which has no notation for a text within a text
        texts = st.text('ab \n{}",:', max_size=9).map(lambda text: f"x{text}z")
        given = st.fixed_dictionaries({}, optional={"a": texts, "b": st.integers()})
    calls = data.draw(
        st.lists(st.tuples(st.sampled_from(sorted(FUNCTIONS)), given), min_size=1, max_size=3)
    )
    written = data.draw(st.sampled_from(write(family, calls, data.draw(st.booleans()))))
    if family == "llama3_json" and not written.startswith("<|python_tag|>"):
        before = ""  # without a tag it must be all there is
    after = "" if family == "llama3_json" else data.draw(st.just("") | plain, "after")
    gap = data.draw(st.sampled_from(["", "\n", "\n\n"]))
    text = f"<think>{gap}{reasoning}{gap}</think>{gap}" if reasoning else ""
    text += f"{before}{gap}{written}{gap}{after}"
    for form in forms(family):
        told, content, found = read(form, cut(data, marked(form, text)))
        assert (told, content) == (reasoning, before + after)
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls


FRAGMENTS = [
    *TAGS, *THINK, "{", "}", '{"name": "f", "arguments": {', '{"name": "f", "parameters": {"a": ',
    '"name": "', '"', "[", "]", ",", ", ", ";", " ", "\n", "\n\n", "\\", "f", "get.x-y_2",
    "function", "```json\n", "\n```", "<function=f>", "<parameter=a>\n", "<parameter=b>",
    "\n</parameter>",
    "</function>", "<", "</", '"type": "function", ', '{"type": "function", ',
]  # fmt: skip


@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_no_cut_matters_and_no_word_is_lost(family: str, data: st.DataObject) -> None:
    words = iter(f"w{number}." for number in range(100))
    fragments = st.sampled_from([*FRAGMENTS, *[""] * 8]).map(lambda text: text or next(words))
    text = "".join(data.draw(st.lists(fragments, max_size=16), "fragments"))
    begun = data.draw(st.sampled_from(["", "<think>\n", "<think>\n\n</think>\n\n"]), "begun")
    functions = {"f": FUNCTIONS["f"]}
    for form, only in product(forms(family), [False, True]):
        how: dict[str, Any] = {"begun": begun, "only": only}
        if only:
            how["functions"] = functions
        whole = read(form, [marked(form, text)], **how)
        assert read(form, cut(data, marked(form, text)), **how) == whole
        assert read(form, list(marked(form, text)) or [""], **how) == whole
        reasoning, content, calls = whole
        assert not only or all(name in functions for name, _ in calls)
        told = reasoning + content + "".join(name + given for name, given in calls)
        for word in text.replace(".", ". ").split():
            if word[0] == "w" and word[1:-1].isdigit():
                assert told.count(word) == 1, (word, whole)


@pytest.mark.parametrize("form", forms("hermes"))
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Just so.\n", ("", "Just so.\n", [])),
        (" \n", ("", " \n", [])),
        ("<think>\nHm.\n</think>\n\nYes.", ("Hm.", "Yes.", [])),
        ("<think>Cut o", ("Cut o", "", [])),
        ("<think></think>Yes.", ("", "Yes.", [])),
        # What is no call is content, all of it.
        ("A <tool_call>f(1)</tool_call>", ("", "A <tool_call>f(1)</tool_call>", [])),
        ('<tool_call>{"nam": 1}</tool_call>', ("", '<tool_call>{"nam": 1}</tool_call>', [])),
        ('<tool_call>{"name": "f", "argu', ("", '<tool_call>{"name": "f", "argu', [])),
        ('<tool_call>{"name": 1}', ("", '<tool_call>{"name": 1}', [])),
        # Other JSON for the same.
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>!',
         ("", "!", [("f", '{"a":1}')])),
        ('<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", "{}")])),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
         ("", "", [("f", '{"a": 1}')])),
        # It begins well, and ends badly.
        ('<tool_call>{"name": "f", "arguments": {"a": [1', ("", "", [("f", '{"a": [1')])),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', ("", "", [("f", '{"a": 1}')])),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>',
         ("", "", [("f", '{"a": 1}')])),
        ('<tool_call>{"name": "f", "arguments": {}, "x": 1}</tool_call>',
         ("", ', "x": 1}</tool_call>', [("f", "{}")])),
        # A tag in a text is text.
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>\\""}}</tool_call>',
         ("", "", [("f", '{"a": "</tool_call>\\""}')])),
        ("See <think>.", ("", "See <think>.", [])),
    ],
)  # fmt: skip
def test_odd_texts(form: OutputFormat, text: str, expected: Read) -> None:
    assert read(form, [marked(form, text)]) == expected
    assert read(form, list(marked(form, text))) == expected


def test_a_reader_need_not_wait() -> None:
    form, *_ = forms("hermes")
    parser = form.parser([], FUNCTIONS)
    (begun,) = parser.push(marked(form, '<tool_call>{"name": "f", "arguments": {'))[:1]
    assert (begun.kind, begun.function, begun.text) == ("call", "f", "")
    (piece,) = parser.push('"a": "some')
    assert piece.text == '"a": "some'
    (said,) = form.parser([], FUNCTIONS).push("Hello, ")
    assert said.text == "Hello,"


def test_arguments_with_tags_have_the_types_of_the_schema() -> None:
    _, form = forms("qwen3_coder")
    text = (
        "<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=b>\n12\n</parameter>"
        "\n<parameter=c>\nTrue\n</parameter>\n<parameter=d>\nx\ny\n</parameter>\n</function>\n"
        "</tool_call>"
    )
    (_, _, ((name, given),)) = read(form, [text])
    assert (name, json.loads(given)) == ("f", {"a": "12", "b": 12, "c": True, "d": "x\ny"})


@pytest.mark.parametrize(
    "text", ['{"a": 1}', '{"name": "g", "parameters": {}}', ' {"name": 1', "{"]
)
def test_json_that_calls_nothing_is_content(text: str) -> None:
    for form in forms("llama3_json"):
        assert read(form, [text]) == read(form, list(text)) == ("", text, [])


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>{"name":'),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>x</parameter>"),
        ("llama3_json", '{"name": "f", "parameters": {}};'),
        ("mistral", "[TOOL_CALLS]f"),
        ("deepseek_v3", f"{CALL}function{SEP}f"),
    ],
)
def test_blanks_are_read_once(family: str, text: str) -> None:
    """What a model that never stops writes takes no longer the more there is of it."""
    for form in forms(family):
        parser = form.parser((), FUNCTIONS)
        parser.push(marked(form, text) if form.marks_all else text)
        began = time.process_time()
        for _ in range(20_000):
            parser.push(" \n")
        parser.push("", last=True)
        assert time.process_time() - began < 1, "20 times as long where each is read anew"


def test_without_functions_calls_are_content() -> None:
    text = '<think>Hm.</think><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    _, form = forms("hermes")
    reasoning, content, calls = read(form, [text], functions=None)
    assert (reasoning, content, calls) == ("Hm.", text.partition("</think>")[2], [])
    form, _ = forms("hermes")
    assert form.marks(calls=False).keys() == {WITH_TAGS.added_tokens[tag] for tag in THINK}


def test_the_prompt_tells_whether_reasoning_has_begun() -> None:
    for form in forms("hermes"):
        text = marked(form, "Hm.</think>Yes.")
        assert read(form, [text], begun="<think>\n")[:2] == ("Hm.", "Yes.")
        asked = "What is <think>?<|assistant|>"
        assert read(form, ["Yes."], begun=asked)[:2] == ("", "Yes.")
        closed = "<think>\n\n</think>\n\n"
        assert read(form, [marked(form, "<think>")], begun=closed)[:2] == ("", "<think>")


def test_calls_of_mistral_have_nine_letters() -> None:
    form, _ = forms("mistral")
    assert len(form.call_id()) == 9
    assert form.call_id().isalnum()
    call = {"id": "call_0123456789ab", "function": {"name": "f"}}
    asked = {"role": "assistant", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "1"}
    first, second = form.messages([asked, result])
    assert first["tool_calls"][0]["id"] == second["tool_call_id"] == "3456789ab"
    assert call["id"] == "call_0123456789ab"


def test_llama_takes_one_call_in_a_message() -> None:
    form, _ = forms("llama3_json")
    one, two = {"id": "1"}, {"id": "2"}
    results = [{"role": "tool", "tool_call_id": i, "content": i} for i in "12"]
    asked = {"role": "assistant", "content": "", "tool_calls": [one, two]}
    assert form.messages([asked, *results]) == [
        {"role": "assistant", "content": "", "tool_calls": [one]}, results[0],
        {"role": "assistant", "tool_calls": [two]}, results[1],
    ]  # fmt: skip


def test_parsers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="--tool-call-parser: can't be openai"):
        find_output_format(WITHOUT_TAGS, "openai")

"""What a grammar of all that a model writes allows is read back by the parser of its format."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import llguidance
import numpy as np
import pytest

from kvbaton.errors import RequestError
from kvbaton.text.harmony import MARKERS
from kvbaton.text.output_parser import OutputFormat
from kvbaton.text.parsers import CALL_SYNTAXES, find_output_format
from kvbaton.text.structured import MAX_CALLS, OutputGrammar, StructuredOutputs, forced_functions
from kvbaton.text.tagged import TaggedFormat
from kvbaton.text.tokenizer import Tokenizer
from tests.support.scripted_source import SPECIAL, train_backend
from tests.text.test_tagged import TAGS, THINK, WITH_TAGS, WITHOUT_TAGS, read, write

NO_ARGS = Tokenizer(train_backend([*SPECIAL, *(t for t in TAGS if t != "[ARGS]"), *THINK]))
SHORT = {"type": "string", "enum": ["x", 'ü "}', "東\n京"]}
FUNCTIONS = {
    "f": {
        "properties": {"a": SHORT, "b": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "get.x-y_2": {"properties": {}, "additionalProperties": False},
}
ANSWER = {**FUNCTIONS["f"], "type": "object", "properties": {"a": SHORT}}


@cache
def vocabulary(tokenizer: Tokenizer) -> Any:
    return llguidance.LLTokenizer(tokenizer._backend.to_str())


def matcher(tokenizer: Tokenizer, grammar: str) -> Any:
    found = llguidance.LLMatcher(vocabulary(tokenizer), grammar)
    assert not found.get_error()
    return found


def takes(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether a text is all that the grammar wants."""
    state = matcher(tokenizer, grammar)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return bool(state.try_consume_tokens(ids) == len(ids) and state.is_accepting())


def walk(tokenizer: Tokenizer, grammar: str, rng: random.Random) -> str:
    """A text of random tokens that it allows; it ends where it may, and free text soon."""
    state, ids = matcher(tokenizer, grammar), list[int]()
    ends = [i for name, i in tokenizer.added_tokens.items() if name in ("</think>",)]
    while not (state.is_accepting() and (state.is_stopped() or rng.random() < 0.5)):
        bits = np.unpackbits(np.frombuffer(state.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: tokenizer._backend.get_vocab_size()]).tolist()
        leaves = [i for i in ends if i in allowed and rng.random() < 0.2]
        token = leaves[0] if leaves else rng.choice(allowed)
        if tokenizer._backend.id_to_token(token) == "</s>":
            break
        assert state.consume_token(token)
        ids.append(token)
        assert len(ids) < 3000
    return tokenizer.decode(ids, skip_special_tokens=False)


def calls_grammar(form: OutputFormat, one: bool, reasoning: str = "") -> str:
    grammar = OutputGrammar()
    rule = form.calls_rule(forced_functions(FUNCTIONS), grammar, one=one)
    return grammar.whole(f"{reasoning} ({rule})")


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("family", CALL_SYNTAXES)
@pytest.mark.parametrize(
    "tokenizer", [WITH_TAGS, WITHOUT_TAGS, NO_ARGS], ids=["tags", "text", "v3"]
)
def test_forced_calls_are_calls(family: str, one: bool, tokenizer: Tokenizer) -> None:
    form = TaggedFormat(tokenizer, CALL_SYNTAXES[family], THINK)
    grammar, rng = calls_grammar(form, one), random.Random(family)
    for _ in range(12):
        text = walk(tokenizer, grammar, rng)
        shown = text
        for tag, mark in form._marks.items():
            shown = shown.replace(tag, mark)
        reasoning, content, calls = read(form, [shown], FUNCTIONS)
        assert (reasoning, content.strip()) == ("", ""), text
        assert len(calls) == 1 if one else 1 <= len(calls) <= MAX_CALLS
        for name, arguments in calls:
            given = json.loads(arguments)
            if name == "f":
                assert given["a"] in SHORT["enum"]
                assert given.get("b", 0) in range(10)
                assert given.keys() <= {"a", "b"}
            else:
                assert (name, given) == ("get.x-y_2", {})


@pytest.mark.parametrize("enum", [None, "x", 5, [], [["x"]], [None, 1]])
def test_a_wrong_enum_is_refused(enum: Any) -> None:
    """Of arguments in tags of their own, of which we write the rules."""
    form = TaggedFormat(WITH_TAGS, CALL_SYNTAXES["qwen3_coder"], ())
    functions = {"f": {"type": "object", "properties": {"a": {"type": "string", "enum": enum}}}}
    with pytest.raises(RequestError) as refused:
        form.calls_rule(functions, OutputGrammar(), one=True)
    assert refused.value.param == "tools"


def test_an_enum_may_hold_what_is_no_text() -> None:
    form, grammar = TaggedFormat(WITH_TAGS, CALL_SYNTAXES["qwen3_coder"], ()), OutputGrammar()
    schema = {
        "type": "object", "required": ["a"],
        "properties": {"a": {"type": "string", "enum": ["x", None, 5]}},
    }  # fmt: skip
    whole = grammar.whole(form.calls_rule({"f": schema}, grammar, one=True))
    (written,) = write("qwen3_coder", [("f", {"a": "x"})], spaced=True)
    assert takes(WITH_TAGS, whole, written)
    assert not takes(WITH_TAGS, whole, written.replace("x\n", "5\n"))


@pytest.mark.parametrize("family", CALL_SYNTAXES)
def test_references_lead_where_they_do_in_the_schema(family: str) -> None:
    """As pydantic (``$defs``) and zod (``#/properties/...``) write them, and to all of it."""
    tree = {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}
    pair = {"type": "array", "items": {"$ref": "#/properties/n"}, "minItems": 2}
    schema = {
        "properties": {"n": {"$ref": "#/$defs/digit"}, "~p/": pair, "more": tree},
        "required": ["n"],
        "additionalProperties": False,
        "$defs": {"digit": {"enum": [1, 2, 3]}},
    }
    form, grammar = TaggedFormat(WITH_TAGS, CALL_SYNTAXES[family], ()), OutputGrammar()
    functions = forced_functions({"f": schema})
    whole = grammar.whole(form.calls_rule(functions, grammar, one=True))
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"n": 3, "~p/": [1, 2], "more": [{"n": 2}]}, True),
        ({"n": 4}, False),
        ({"n": 3, "~p/": [1, 4]}, False),
        ({"n": 3, "more": [{"n": 4}]}, False),
        ({"n": 3, "more": [{}]}, False),
    ]
    for given, fits in cases:
        xml = CALL_SYNTAXES[family].xml
        call = ("f", {k: json.dumps(v) for k, v in given.items()} if xml else given)
        styles = [
            text
            for spaced in (True, False)
            for text in write(family.replace("_v31", "_v3"), [call], spaced=spaced)
        ]
        assert any(takes(WITH_TAGS, whole, text) for text in styles) == fits, given


@pytest.mark.parametrize("family", CALL_SYNTAXES)
def test_what_templates_write_is_allowed(family: str) -> None:
    form = TaggedFormat(WITH_TAGS, CALL_SYNTAXES[family], ())
    calls: list[tuple[str, dict[str, Any]]] = [("f", {"a": 'ü "}', "b": 3}), ("get.x-y_2", {})]
    if CALL_SYNTAXES[family].one_each:
        calls = calls[:1]
    grammar = calls_grammar(form, one=False)
    styles = write(family.replace("_v31", "_v3"), calls, spaced=True)
    styles += write(family.replace("_v31", "_v3"), calls, spaced=False)
    assert any(takes(WITH_TAGS, grammar, text) for text in styles), styles
    assert not takes(WITH_TAGS, grammar, "f"), "content is no call"


@pytest.mark.parametrize("tokenizer", [WITH_TAGS, WITHOUT_TAGS], ids=["tags", "text"])
@pytest.mark.parametrize(
    ("prompt", "text", "allowed"),
    [
        ("", '<think>Größe?\n{"a": 1}</think>\n\n{"a": "x"}', True),
        ("", '{"a": "x"}', True),
        ("", 'Größe?</think>{"a": "x"}', False),
        ("", '<think>Größe?</think>\n\nIt is {"a": "x"}', False),
        ("<think>\n", 'Größe?</think>{"a": "x"}', True),
        ("<think>\n", '{"a": "x"}', False),
        ("<think></think>\n", '{"a": "x"}', True),
        ("<think></think>\n", '<think></think>{"a": "x"}', False),
    ],
)
def test_an_answer_follows_its_reasoning(
    tokenizer: Tokenizer, prompt: str, text: str, allowed: bool
) -> None:
    form, grammar = TaggedFormat(tokenizer, None, THINK), OutputGrammar()
    before = form.reasoning_rule(tokenizer.encode(prompt, add_special_tokens=False), grammar)
    answer = form.answer_rule(grammar.part(StructuredOutputs(json=ANSWER).piece()))
    assert takes(tokenizer, grammar.whole(f"{before} ({answer})"), text) == allowed


def test_harmony() -> None:
    tokenizer = Tokenizer(train_backend([*SPECIAL, *MARKERS]))
    form = find_output_format(tokenizer)
    assert form is not None
    grammar = OutputGrammar()
    before = form.reasoning_rule([], grammar)
    answer = form.answer_rule(grammar.part(StructuredOutputs(json=ANSWER).piece()))
    whole = grammar.whole(f"{before} ({answer})")
    thought = "<|channel|>analysis<|message|>Größe?<|end|><|start|>assistant"
    final = '<|channel|>final<|message|>{"a": "x"}'
    assert takes(tokenizer, whole, thought + final)
    assert takes(tokenizer, whole, final)
    assert not takes(tokenizer, whole, '{"a": "x"}')
    calls = calls_grammar(form, True, form.reasoning_rule([], OutputGrammar()))
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "x", "b": 3}'
    assert takes(tokenizer, calls, thought + call)
    other = call.replace("functions.f", "functions.get.x-y_2").rpartition("{")[0] + "{}"
    assert takes(tokenizer, calls, other)
    assert not takes(tokenizer, calls, call.replace("functions.f", "functions.g"))


@pytest.mark.parametrize(
    "functions",
    [
        {"a b": {}},
        {"f": {"type": "array"}},
        {"f": {"properties": None}},
        {"f": {"properties": ["a"]}},
        {"f": {"properties": {}, "required": None}},
        {"f": {"properties": {}, "required": [1]}},
    ],
)
def test_what_can_not_be_forced(functions: Any) -> None:
    with pytest.raises(RequestError) as refused:
        forced_functions(functions)
    assert refused.value.param == "tools"

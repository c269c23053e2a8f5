"""Grammars: texts follow them at any temperature, wherever tokens come from, and others' stay."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from select import select
from typing import Any

import pytest

from kvbaton.engine.grammars import Grammars
from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest, SamplingParams, Shutdown
from kvbaton.text.structured import StructuredOutputs, joined
from kvbaton.text.tokenizer import Tokenizer
from tests.engine.test_speculative import SPECULATIVE
from tests.support.engine_node import Call, Node, greedy
from tests.support.engine_pair import Pair, make_pair
from tests.support.prompts import prompt_of
from tests.support.waiting import until

__all__ = ["make_pair"]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Größe", 'quo"te']},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "parts": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "text": {"type": "string", "maxLength": 5},
    },
    "required": ["name", "size", "parts"],
    "additionalProperties": False,
}


def grammar(**fields: Any) -> str:
    return joined("start: @body", {"body": StructuredOutputs(**fields).piece()})


@cache  # not where the tests of other devices are collected, which may lack the library
def json_grammar() -> str:
    return grammar(json=SCHEMA, disable_any_whitespace=True)


FREE: dict[str, Any] = {"ignore_eos": False, "max_tokens": 200, "temperature": 1.0}


def check_json(text: str) -> None:
    found = json.loads(text)
    assert {"name", "size", "parts"} <= found.keys() <= SCHEMA["properties"].keys()  # type: ignore[attr-defined]
    assert found["name"] in ("Ada", "Größe", 'quo"te')
    assert isinstance(found["size"], int)
    assert 0 <= found["size"] <= 99
    assert len(found["parts"]) <= 3
    assert all(isinstance(part, bool) for part in found["parts"])
    assert len(found.get("text", "")) <= 5


def check_spaced(text: str) -> None:
    check_json(text)
    assert "  " not in text.replace(str(json.loads(text).get("text")), "")


KINDS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "spaced": ({"json": SCHEMA, "whitespace_pattern": " ?"}, check_spaced),
    "compact": ({"json": SCHEMA, "disable_any_whitespace": True}, check_json),
    "regex": (
        {"regex": r"[a-f]{3}-\d{2,4}/x?\"é"},
        lambda text: re.fullmatch(r"[a-f]{3}-[0-9]{2,4}/x?\"é", text) or pytest.fail(text),
    ),
    "choice": (
        {"choice": ["yes", "yes, but", 'a "b" \n']},
        lambda text: {"yes": 1, "yes, but": 1, 'a "b" \n': 1}[text],
    ),
    "name of a token": (
        {"choice": ["<|endoftext|>x"]},
        lambda text: {"<|endoftext|>x": 1}[text],
    ),
    "gbnf": (
        {"grammar": 'root ::= "a" b\nb ::= [0-9] | "x"'},
        lambda text: re.fullmatch("a[0-9x]", text) or pytest.fail(text),
    ),
}


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint()


@pytest.fixture(scope="module")
def text_of(folder: Path) -> Callable[[Call], list[str]]:
    """The texts of all choices, which have ended by themselves."""
    tokenizer = Tokenizer.load(folder)

    def texts(call: Call) -> list[str]:
        call.result()
        found = []
        for choice in range(call.request.params.n):
            outputs = [o for o in call.outputs if o.choice == choice]
            assert outputs[-1].finish_reason == "stop", outputs[-1]
            tokens = [token for output in outputs for token in output.token_ids]
            assert tokens[-1] in (1, 2), "it ends with an end token"
            found.append(tokenizer.decode(tokens[:-1], skip_special_tokens=False))
        return found

    return texts


@pytest.fixture(scope="module")
def nodes(folder: Path) -> Iterator[Callable[..., Node]]:
    made: dict[str, Node] = {}

    def node(**settings: Any) -> Node:
        if repr(settings) not in made:
            made[repr(settings)] = Node(f"node{len(made)}", folder, **settings)
        return made[repr(settings)]

    yield node
    for one in made.values():
        one.mailbox.post(Shutdown(grace_s=0.0))
        one.bury()
        assert one.imbalance == 0


def test_texts_follow_their_grammars_and_others_are_as_ever(
    nodes: Callable[..., Node], text_of: Callable[[Call], list[str]]
) -> None:
    """All kinds in the same steps."""
    node = nodes()
    beside = [{"temperature": 0.9, "seed": i, "top_p": 0.9, "max_tokens": 40} for i in range(3)]
    alone = [node.generate(prompt_of(20 + i), **p).result() for i, p in enumerate(beside)]
    calls = [
        (kind, node.generate(prompt_of(9 + 7 * i), **FREE, grammar=grammar(**fields), seed=i, n=i))
        for kind, (fields, _) in KINDS.items()
        for i in (1, 2)
    ]
    others = [node.generate(prompt_of(20 + i), **p) for i, p in enumerate(beside)]
    for kind, call in calls:
        _, check = KINDS[kind]
        texts = text_of(call)
        assert len(texts) == call.request.params.n
        for text in texts:
            check(text)
    assert [other.result() for other in others] == alone


def test_drafts_change_no_token(nodes: Callable[..., Node]) -> None:
    plain, drafting = nodes(), nodes(**SPECULATIVE)
    array = {"type": "array", "items": {"enum": ["ab", "cd"]}, "minItems": 6, "maxItems": 8}
    rule = grammar(json=array, disable_any_whitespace=True)
    before = drafting.counters()
    asked = [
        FREE | {"temperature": temperature, "seed": seed, "grammar": rule, "logprobs": 1}
        for temperature, seed in ((0.0, 0), (1.0, 1), (1.0, 2))
    ]
    told = []
    for node in (plain, drafting):
        calls = [node.generate(prompt_of(12 + i), **params) for i, params in enumerate(asked)]
        told.append([call.result() for call in calls])
    assert told[0] == told[1]
    name = "kvbaton_spec_decode_num_accepted_tokens_total"
    assert drafting.counters()[name] > before[name]


def test_a_small_pool_preempts_them(
    nodes: Callable[..., Node], text_of: Callable[[Call], list[str]]
) -> None:
    small, large = nodes(num_blocks=40, max_model_len=128), nodes()
    asked = [FREE | {"seed": i, "grammar": json_grammar(), "max_tokens": 90} for i in range(6)]
    calls = [small.generate(prompt_of(12 + i), **params) for i, params in enumerate(asked)]
    tokens = [call.result() for call in calls]
    assert small.scheduler.totals.preemptions
    assert tokens == [
        large.generate(prompt_of(12 + i), **params).result() for i, params in enumerate(asked)
    ]


def test_it_goes_on_where_another_engine_stopped(
    nodes: Callable[..., Node], text_of: Callable[[Call], list[str]]
) -> None:
    node, params = nodes(), greedy(FREE | {"seed": 4, "grammar": json_grammar()})
    whole = node.generate(prompt_of(11), **FREE, seed=4, grammar=json_grammar()).result()
    for known in (1, 5, len(whole) - 1):
        request = AddRequest(
            request_id=f"resumed-{known}",
            token_ids=array("I", prompt_of(11)),
            resume_ids=tuple(whole[:known]),
            params=params,
        )
        call = node.add(request)
        until(call.over, "the end")
        assert [t for output in call.outputs for t in output.token_ids] == whole[known:]


def test_what_can_not_be_followed_is_told(nodes: Callable[..., Node]) -> None:
    node = nodes()
    broken = node.generate(prompt_of(5), **FREE, grammar="start: nothing")
    assert broken.result() == []
    assert broken.finish_reason == "error"
    assert "grammar" in str(broken.error)
    assert broken.outputs[-1].error_code == "grammar_failed", "no other node is to try"
    request = AddRequest(
        request_id="unfit",
        token_ids=array("I", (5,)),
        resume_ids=(7,),
        params=greedy(FREE | {"grammar": json_grammar()}),
    )
    unfit = node.add(request)
    assert unfit.result() == []
    assert "does not fit" in str(unfit.error)
    nothing = node.generate(prompt_of(5), **FREE, grammar=json_grammar(), allowed_token_ids=(7,))
    assert nothing.result() == []
    assert "no allowed token fits it" in str(nothing.error)
    assert nothing.outputs[-1].error_code == "grammar_failed"
    many = " | ".join(f'"w{i}"' for i in range(3000))  # which a parser's row does not hold
    large = node.generate(prompt_of(5), **FREE, grammar=grammar(grammar=f"start: {many}"))
    assert len(large.result()) < 3
    assert "items; max is" in str(large.error)
    assert large.outputs[-1].error_code == "grammar_failed"
    for field, value in (("ignore_eos", True), ("min_tokens", 3), ("grammar", "x" * (1 << 19))):
        refused = node.generate(prompt_of(5), **(FREE | {"grammar": json_grammar(), field: value}))
        with pytest.raises(AssertionError, match=field):
            refused.result()
    assert node.generate(prompt_of(5), max_tokens=3).result(), "it goes on"


def test_the_node_that_decodes_goes_on_where_the_first_token_led(
    make_pair: Callable[..., Pair],
    nodes: Callable[..., Node],
    text_of: Callable[[Call], list[str]],
) -> None:
    pair = make_pair()
    for i in range(2):
        params = FREE | {"seed": i, "grammar": json_grammar(), "n": 1 + i % 2}
        at_p, at_d = pair.hand_over(prompt_of(20 + i), goes_on=True, **params)
        for text in text_of(at_d):
            check_json(text)
        alone = nodes().generate(prompt_of(20 + i), **params)
        assert text_of(at_d) == text_of(alone)
        assert at_p.tokens == alone.tokens[:1]
    pair.settle()
    assert pair.d.counters()['kvbaton_prompt_tokens_total{source="transferred"}'] == 41


def test_a_grammar_that_nobody_waits_for_keeps_no_core_awake(folder: Path) -> None:
    grammars = Grammars(folder, 384, [1, 2], lambda sequence: None)
    try:
        params = SamplingParams(grammar=json_grammar())
        grammars.check(params.grammar)
        until(lambda: select(grammars.wake_fds, [], [], 0.0)[0], "it is compiled")
        grammars.poll(0.0)
        assert select(grammars.wake_fds, [], [], 0.0)[0] == []
    finally:
        grammars.close()


def test_a_request_without_one_is_sent_as_before() -> None:
    """A core that knows no grammars serves it, and refuses the others by the field's name."""
    import msgspec

    from kvbaton.messages.engine import SamplingParams

    assert b"grammar" not in msgspec.msgpack.encode(SamplingParams(seed=1))
    assert b"grammar" in msgspec.msgpack.encode(SamplingParams(grammar=json_grammar()))


def test_a_scheduler_without_grammars_refuses_them() -> None:
    from tests.support.toy_engine import Loop, ask

    with pytest.raises(RequestError, match="grammars"):
        Loop().add(ask("a", [1, 2, 3], grammar="start: /a/"))

"""Messages on channels come apart, wherever their text is cut."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from kvbaton.text.harmony import MARKERS, HarmonyFormat, HarmonyParser
from kvbaton.text.parsers import find_output_format
from kvbaton.text.tokenizer import Tokenizer
from tests.support.parsed_output import read_pieces

WHOLE = (
    "<|channel|>analysis<|message|>The user\nwants it.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>So: f.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
    '<|call|><|start|>assistant to=functions.g.h<|channel|>commentary json<|message|>{"b": 2}'
    "<|call|><|start|>assistant<|channel|>final<|constrain|>json<|message|>Done; see < end >."
)
READ = {
    "reasoning": "The user\nwants it.\nSo: f.",
    "content": "Let me look.\nDone; see < end >.",
    "calls": [("f", '{"a": 1}'), ("g.h", '{"b": 2}')],
}


VOCABULARY: Any = SimpleNamespace(added_tokens={name: i for i, name in enumerate(MARKERS)})
FORMAT = HarmonyFormat(VOCABULARY, calls=True, reasons=True)


def marked(text: str) -> str:
    for name, mark in MARKERS.items():
        text = text.replace(name, mark)
    return text


def read(pieces: list[str], *, begun: str = "<|start|>assistant", calls: bool = True) -> object:
    parser = HarmonyParser(marked(begun), calls=calls)
    reasoning, content, found = read_pieces(parser, pieces)
    return {"reasoning": reasoning, "content": content, "calls": found}


def test_all_at_once() -> None:
    assert read([marked(WHOLE)]) == READ


@pytest.mark.parametrize("seed", range(20))
def test_wherever_it_is_cut(seed: int) -> None:
    text, rng = marked(WHOLE), random.Random(seed)
    cuts = sorted(rng.sample(range(len(text)), rng.choice([3, 40, len(text) - 1])))
    assert read([text[i:j] for i, j in zip([0, *cuts], [*cuts, None], strict=True)]) == READ


@pytest.mark.parametrize(
    ("begun", "text", "expected"),
    [
        # No header at all: nothing is lost, and nothing of the prompt's is repeated.
        ("<|start|>assistant", "Hello there.", ("", "Hello there.")),
        ("", "Hello there.", ("", "Hello there.")),
        # The template has begun the message, or ended the one before.
        ("<|start|>assistant<|channel|>final<|message|>The answer", " is 3.", ("", " is 3.")),
        ("<|start|>user<|message|>Hi<|end|>", "<|start|>assistant<|message|>Yo", ("", "Yo")),
        # Cut within a header, or within the reasoning.
        ("<|start|>assistant", "<|channel|>ana", ("", "")),
        ("<|start|>assistant", "<|channel|>analysis<|message|>Hm<|end|><|start|>as", ("Hm", "")),
        # A header that lacks its start, and a message that lacks its end.
        ("<|start|>assistant", "<|channel|>analysis<|message|>A<|channel|>final<|message|>B",
         ("A", "B")),
        ("<|start|>assistant", "<|channel|>analysis<|message|>A<|start|>assistant<|message|>B",
         ("A", "B")),
        # A tool of the model's own.
        ("<|start|>assistant", "<|channel|>commentary to=python<|message|>1+1", ("1+1", "")),
    ],
)  # fmt: skip
def test_odd_texts(begun: str, text: str, expected: tuple[str, str]) -> None:
    reasoning, content = expected
    found = {"reasoning": reasoning, "content": content, "calls": []}
    assert read([marked(text)], begun=begun) == found
    assert read(list(marked(text)), begun=begun) == found


def test_a_call_that_nobody_asked_for_is_content() -> None:
    text = '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>'
    assert read([marked(text)], calls=False) == {
        "reasoning": "", "content": '{"a": 1}', "calls": [],
    }  # fmt: skip


def test_a_model_without_the_markers_has_none(tokenizer: Tokenizer) -> None:
    assert find_output_format(tokenizer) is None


def test_messages_for_the_template() -> None:
    call = {"role": "assistant", "content": "Hm.", "reasoning_content": "Think.", "tool_calls": [1]}
    (shown,) = FORMAT.messages([call])
    assert (shown["thinking"], "content" in shown) == ("Think.\nHm.", False)
    bare = {"role": "assistant", "content": None, "tool_calls": [1]}
    assert FORMAT.messages([bare]) == [{"role": "assistant", "tool_calls": [1]}]
    user = {"role": "user", "content": "Hi"}
    final = {"role": "assistant", "content": "Yo", "tool_calls": None}
    assert FORMAT.messages([user, final]) == [user, {"role": "assistant", "content": "Yo"}]


def test_each_call_of_several_is_followed_by_its_result() -> None:
    one, two = {"id": "1", "function": "f"}, {"id": "2", "function": "g"}
    first, second = ({"role": "tool", "tool_call_id": i, "content": i} for i in "12")
    stray = {"role": "tool", "content": "?"}
    calls = {"role": "assistant", "content": "Both.", "tool_calls": [one, two]}
    assert FORMAT.messages([calls, second, stray, first]) == [
        {"role": "assistant", "thinking": "Both.", "tool_calls": [one]},
        first,
        {"role": "assistant", "tool_calls": [two]},
        second,
        stray,
    ]


def test_tools_have_descriptions() -> None:
    assert FORMAT.tools([{"function": {"name": "f"}}, {"function": {"description": "d"}}]) == [
        {"function": {"name": "f", "description": ""}},
        {"function": {"description": "d"}},
    ]

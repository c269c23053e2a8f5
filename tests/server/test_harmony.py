"""Chats with a model that writes on channels: reasoning, calls and answer are apart for clients."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llguidance
import openai
import pytest

from kvbaton.cluster.chat import stream_answer
from kvbaton.text.harmony import MARKERS
from kvbaton.text.tokenizer import Tokenizer
from tests.support.scripted_source import SPECIAL, write_tokenizer

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}"
    "{% for t in tools or [] %}<|start|>developer<|message|>"
    "{{ '// ' + t.function.description }}<|end|>"
    "{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}"
    "{% if m.tool_calls %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant"
    " to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
THOUGHT = "<|channel|>analysis<|message|>Größe of 東京?<|end|>"
ANSWER = f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>It is 🎉."
CALL = (
    f"{THOUGHT}<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    '{"a": 1}'
)
ASK: list[Any] = [{"role": "user", "content": "How large?"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
]


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("harmony")
    return Tokenizer.load(
        write_tokenizer(folder, special=[*SPECIAL, *MARKERS], chat_template=TEMPLATE)
    )


@pytest.fixture
def start(serve: Any, harmony: Tokenizer) -> Callable[[str], Any]:
    return lambda text: serve(text, tokenizer=harmony)


async def test_reasoning_and_answer(start: Any) -> None:
    endpoint = await start(ANSWER)
    _, whole = await endpoint.post(CHAT, {"messages": ASK, "n": 2, "reasoning_effort": "low"})
    for choice in whole["choices"]:
        assert choice["message"] == {
            "role": "assistant", "content": "It is 🎉.", "reasoning_content": "Größe of 東京?",
            "reasoning": "Größe of 東京?",
        }  # fmt: skip
        assert choice["finish_reason"] == "stop"
    ids = list(endpoint.source.requests[0].token_ids)
    shown = endpoint.frontend.tokenizer.decode(ids, skip_special_tokens=False)
    assert shown == "[low]<|start|>user<|message|>How large?<|end|><|start|>assistant"


async def test_a_call(start: Any) -> None:
    endpoint = await start(CALL)
    status, whole = await endpoint.post(CHAT, {"messages": ASK, "tools": TOOLS})
    assert status == 200, whole
    (choice,) = whole["choices"]
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {
        "role": "assistant", "content": None, "reasoning_content": "Größe of 東京?",
        "reasoning": "Größe of 東京?",
    }  # fmt: skip
    assert choice["finish_reason"] == "tool_calls"
    stops = endpoint.source.requests[0].params.stop_token_ids
    assert [endpoint.frontend.tokenizer.token_text(stop) for stop in sorted(stops)] == [
        "<|call|>", "<|return|>",
    ]  # fmt: skip
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(("text", "called"), [(ANSWER, False), (CALL, True)])
async def test_streams_say_the_same(start: Any, text: str, called: bool) -> None:
    endpoint = await start(text)
    async with openai.AsyncOpenAI(
        base_url=f"{endpoint.url}/v1", api_key="x", max_retries=0
    ) as client:
        chunks = await client.chat.completions.create(
            model="tiny", messages=ASK, tools=TOOLS, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        reasoning, content, arguments = "", "", ""
        calls, roles, finishes, usage = [], [], [], None
        async for chunk in chunks:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                new = choice.delta
                roles += [new.role] * (new.role is not None)
                finishes += [choice.finish_reason] * (choice.finish_reason is not None)
                reasoning += getattr(new, "reasoning_content", None) or ""
                content += new.content or ""
                for call in new.tool_calls or []:
                    assert call.function is not None
                    assert call.index == 0
                    calls += [(call.type, call.function.name)] * (call.id is not None)
                    arguments += call.function.arguments or ""
    assert (roles, reasoning) == (["assistant"], "Größe of 東京?")
    assert usage is not None
    assert usage.completion_tokens == len(endpoint.source._tokens(endpoint.source.requests[0]))
    if called:
        assert (content, calls, finishes) == ("", [("function", "f")], ["tool_calls"])
        assert json.loads(arguments) == {"a": 1}
    else:
        assert (content, calls, finishes) == ("It is 🎉.", [], ["stop"])


@pytest.mark.parametrize("written", ['{"a": 1}', '{"a": "half \\ud83d"}'])
async def test_the_result_of_a_call_goes_back(start: Any, written: str) -> None:
    endpoint = await start(ANSWER)
    function = {"name": "f", "arguments": written}
    conversation = [
        *ASK,
        {"role": "assistant", "content": None, "reasoning_content": "Look.",
         "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]  # fmt: skip
    status, _ = await endpoint.post(CHAT, {"messages": conversation, "tools": TOOLS})
    assert status == 200
    ids = list(endpoint.source.requests[0].token_ids)
    shown = endpoint.frontend.tokenizer.decode(ids, skip_special_tokens=False)
    assert "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant to=functions.f" in shown
    assert f"<|message|>{written}<|call|><|start|>tool<|message|>3<|end|>" in shown


async def test_the_command_shows_reasoning_first(start: Any) -> None:
    endpoint, shown = await start(ANSWER), list[str]()
    body = {"model": "tiny", "messages": ASK}
    answer = await stream_answer(endpoint.session, endpoint.url, body, shown.append)
    assert "".join(shown) == "Größe of 東京?\n\nIt is 🎉."
    assert answer.text == "It is 🎉."


async def test_what_looks_like_a_marker_is_text(start: Any, harmony: Tokenizer) -> None:
    endpoint = await start("")
    said = [
        i for word in ("<|", "end", "|>") for i in harmony.encode(word, add_special_tokens=False)
    ]
    head = harmony.encode("<|channel|>final<|message|>A", add_special_tokens=False)
    endpoint.source.script = [*head, *said]
    _, whole = await endpoint.post(CHAT, {"messages": ASK})
    assert whole["choices"][0]["message"]["content"] == "A<|end|>"


async def test_raw_on_request(start: Any) -> None:
    endpoint = await start(ANSWER)
    _, whole = await endpoint.post(CHAT, {"messages": ASK, "skip_special_tokens": False})
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": ANSWER}


async def test_a_stop_string_ends_the_answer(start: Any) -> None:
    endpoint = await start(ANSWER)
    _, whole = await endpoint.post(CHAT, {"messages": ASK, "stop": "is"})
    assert whole["choices"][0]["message"]["content"] == "It "
    assert whole["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
async def test_calls_are_forced(start: Any, harmony: Tokenizer, choice: Any) -> None:
    endpoint = await start(ANSWER)
    body = {"messages": ASK, "tools": TOOLS, "tool_choice": choice}
    status, answer = await endpoint.post(CHAT, body)
    assert status == 200, answer
    vocabulary = llguidance.LLTokenizer(harmony._backend.to_str())
    matcher = llguidance.LLMatcher(vocabulary, endpoint.source.requests[0].params.grammar)
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>"
    ids = harmony.encode(text, add_special_tokens=False)
    assert matcher.try_consume_tokens(ids) == len(ids)
    final = harmony.encode("final<|message|>", add_special_tokens=False)
    assert matcher.validate_tokens(final) < len(final), "the answer is to be a call"
    call = harmony.encode("commentary to=functions.f", add_special_tokens=False)
    assert matcher.validate_tokens(call) == len(call)


@pytest.mark.parametrize("name", ["f", "g"])
@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_are_called(
    start: Any, harmony: Tokenizer, mode: str, name: str
) -> None:
    endpoint, other = await start(CALL), {"type": "function", "function": {"name": "g"}}
    named = [{"type": "function", "function": {"name": name}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    body = {"messages": ASK, "tools": [*TOOLS, other], "tool_choice": choice}
    status, whole = await endpoint.post(CHAT, body)
    assert status == 200, whole
    message = whole["choices"][0]["message"]
    assert ("tool_calls" in message) == (name == "f")
    assert message["content"] == (None if name == "f" else '{"a": 1}')
    grammar = endpoint.source.requests[0].params.grammar
    assert (grammar == "") == (mode == "auto")
    if grammar:
        vocabulary = llguidance.LLTokenizer(harmony._backend.to_str())
        matcher = llguidance.LLMatcher(vocabulary, grammar)
        text = "<|channel|>commentary to=functions."
        ids = harmony.encode(text, add_special_tokens=False)
        assert matcher.try_consume_tokens(ids) == len(ids)
        for called in "fg":
            said = harmony.encode(f"{called} ", add_special_tokens=False)
            assert (matcher.validate_tokens(said) == len(said)) == (called == name)


async def test_an_answer_in_a_format_or_a_call(start: Any, harmony: Tokenizer) -> None:
    endpoint = await start(ANSWER)
    asked = {"messages": ASK, "tools": TOOLS, "response_format": {"type": "json_object"}}
    status, answer = await endpoint.post(CHAT, asked)
    assert status == 200, answer
    vocabulary = llguidance.LLTokenizer(harmony._backend.to_str())
    for text, fits in (
        ('final<|message|>{"a": 1}', True),
        ('commentary to=functions.f <|constrain|>json<|message|>{"a": "b"}', True),
        ('commentary to=functions.g <|constrain|>json<|message|>{"a": "b"}', False),
        ("final<|message|>It is large.", False),
    ):
        matcher = llguidance.LLMatcher(vocabulary, endpoint.source.requests[0].params.grammar)
        ids = harmony.encode(f"<|channel|>{text}", add_special_tokens=False)
        assert (matcher.try_consume_tokens(ids) == len(ids)) == fits, text


async def test_an_answer_that_was_cut_off_goes_back(start: Any, harmony: Tokenizer) -> None:
    endpoint = await start(ANSWER)
    few = len(harmony.encode(THOUGHT, add_special_tokens=False)) - 3
    _, cut = await endpoint.post(CHAT, {"messages": ASK, "max_tokens": few})
    message = cut["choices"][0]["message"]
    assert (message["content"], cut["choices"][0]["finish_reason"]) == (None, "length")
    status, _ = await endpoint.post(CHAT, {"messages": [*ASK, message, *ASK]})
    assert status == 200


async def test_an_effort_that_is_none(start: Any) -> None:
    endpoint = await start(ANSWER)
    body = {"messages": ASK, "reasoning_effort": "huge"}
    status, error = await endpoint.post(CHAT, body)
    assert (status, error["error"]["param"]) == (400, "reasoning_effort")

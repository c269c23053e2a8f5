"""Anthropic's Messages API: a request is the chat that it means, and its answer says the same."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbaton.text.tokenizer import Tokenizer
from tests.server.test_tool_calls import (
    ARGUMENTS,
    CHAT,
    FAMILIES,
    THINKING,
    models,
    start,
    written,
)
from tests.support.chats import picture
from tests.support.messages_stream import assembled, data_of

__all__ = ["models", "start"]  # fixtures

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
ASK: list[Any] = [{"role": "user", "content": "How large?"}]
SCHEMA = {"properties": {"a": {"type": "string"}}}
TOOLS: list[Any] = [{"name": "f", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}]
ASKED = {"model": "tiny", "max_tokens": 100, "messages": ASK}
CALLED = {"type": "tool_use", "id": "call_123456789", "name": "f", "input": ARGUMENTS}


async def streamed(endpoint: Any, body: Any) -> Any:
    async with endpoint.session.post(MESSAGES, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        return assembled(data_of(await response.read()))


async def asked_alike(endpoint: Any, body: Any, chat: Any) -> None:
    """Both are the same for the source, and what counts tokens counts them."""
    status, answer = await endpoint.post(MESSAGES, {**ASKED, **body})
    assert status == 200, answer
    status, answer = await endpoint.post(CHAT, {"messages": ASK, "max_tokens": 100, **chat})
    assert status == 200, answer
    mine, wanted = endpoint.source.requests[-2:]
    assert mine.token_ids == wanted.token_ids
    assert mine.items == wanted.items
    assert mine.params.grammar == wanted.params.grammar
    assert mine.params.stop_token_ids == wanted.params.stop_token_ids
    given = {key: body[key] for key in ("system", "tools", "thinking") if key in body}
    given["messages"] = body.get("messages", ASK)
    status, counted = await endpoint.post(COUNT, {"model": "tiny", **given})
    assert (status, counted) == (200, {"input_tokens": len(mine.token_ids)})


# --- answers ---


@pytest.mark.parametrize("family", FAMILIES)
async def test_reasoning_and_a_call_whole_and_streamed(
    start: Any, models: dict[str, Tokenizer], family: str
) -> None:
    endpoint = await start(family, written(family, models[family]))
    body = {**ASKED, "tools": TOOLS}
    status, whole = await endpoint.post(MESSAGES, body)
    assert status == 200, whole
    *before, call = whole["content"]
    thought = {"type": "thinking", "thinking": THINKING, "signature": ""}
    assert before == ([thought] if family in ("hermes", "deepseek_v3") else [])
    assert {**call, "id": ""} == {**CALLED, "id": ""}
    assert call["id"]
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "tiny")
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
    tokens = len(endpoint.source.requests[0].token_ids)
    made = len(endpoint.source._tokens(endpoint.source.requests[0]))
    assert whole["usage"] == {
        "input_tokens": tokens - 4,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "output_tokens": made,
    }
    told = await streamed(endpoint, body)
    assert told["content"][-1].pop("id") != whole["content"][-1].pop("id")
    assert told.pop("id") != whole.pop("id")
    assert told == whole


async def test_text_between_thinking_and_calls(start: Any) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
    endpoint = await start("hermes", f"<think>\nHm.\n</think>\n\nI look.{call}\n{call}")
    for choice, calls in ({}, 2), ({"disable_parallel_tool_use": True}, 1):
        body = {**ASKED, "tools": TOOLS, "tool_choice": {"type": "auto", **choice}}
        _, whole = await endpoint.post(MESSAGES, body)
        told = await streamed(endpoint, body)
        for message in (whole, told):
            kinds = [block["type"] for block in message["content"]]
            assert kinds == ["thinking", "text", *["tool_use"] * calls]
            assert message["content"][1]["text"] == "I look."
            assert message["content"][-1]["input"] == {"a": "b"}
            assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("extra", "reason", "sequence", "text"),
    [
        ({}, "end_turn", None, "Hello wide world."),
        ({"max_tokens": 2}, "max_tokens", None, None),
        ({"stop_sequences": ["xyz", " wor"]}, "stop_sequence", " wor", "Hello wide"),
    ],
)
async def test_why_it_stops(
    serve: Any, extra: Any, reason: str, sequence: str | None, text: str | None
) -> None:
    endpoint = await serve()
    _, whole = await endpoint.post(MESSAGES, {**ASKED, **extra})
    told = await streamed(endpoint, {**ASKED, **extra})
    for message in (whole, told):
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
        (block,) = message["content"]
        assert block["type"] == "text"
        assert text is None or block["text"] == text


async def test_every_token_is_an_event(serve: Any) -> None:
    """Also one that adds no text: an empty chunk would end the answer's body."""
    endpoint = await serve()
    endpoint.source.script = [
        0,
        1,
        *endpoint.source.tokenizer.encode("Hi", add_special_tokens=False),
    ]
    told = await streamed(endpoint, ASKED)
    assert [block["text"] for block in told["content"]] == ["Hi"]


async def test_a_call_that_is_cut_off(start: Any, models: dict[str, Tokenizer]) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "so'
    endpoint = await start("hermes", text + 'me"}}</tool_call>')
    few = len(models["hermes"].encode(text, add_special_tokens=False))
    body = {**ASKED, "tools": TOOLS, "max_tokens": few}
    _, whole = await endpoint.post(MESSAGES, body)
    assert whole["stop_reason"] == "max_tokens"
    assert whole["content"][0]["input"] == {"INVALID_JSON": '{"a": "so'}


async def test_a_call_with_half_a_character(start: Any) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "half \\ud83d"}}</tool_call>'
    endpoint = await start("hermes", text)
    body = {**ASKED, "tools": TOOLS}
    status, whole = await endpoint.post(MESSAGES, body)
    assert (status, whole["content"][0]["input"]) == (200, {"a": "half ?"})


# --- requests ---


async def test_a_conversation_with_tools_is_the_chat_that_it_means(start: Any) -> None:
    call = {**CALLED, "input": {"a": "東"}}
    body = {
        "max_tokens": 4,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f2e;"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "And right."},
        ],
        "tools": [{**TOOLS[0], "input_schema": {}, "description": "how large", "type": "custom"}],
        "messages": [
            *ASK,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look."},
                    call,
                    {**call, "id": "call_987654321"},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": CALLED["id"], "content": "3"},
                    {
                        "type": "tool_result", "tool_use_id": "call_987654321", "is_error": True,
                        "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "5"}],
                    },
                    {"type": "text", "text": "So?"},
                ],
            },
            {"role": "system", "content": "Hurry."},
        ],
    }  # fmt: skip
    calls = [
        {"id": name, "type": "function", "function": {"name": "f", "arguments": '{"a": "東"}'}}
        for name in ("call_123456789", "call_987654321")
    ]
    chat = {
        "max_tokens": 4,
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "description": "how large", "parameters": {}},
            }
        ],
        "messages": [
            {"role": "system", "content": "Be brief.\nAnd right."},
            *ASK,
            {
                "role": "assistant", "content": "I look.", "reasoning_content": "Hm.",
                "tool_calls": calls,
            },
            {"role": "tool", "tool_call_id": "call_123456789", "content": "3"},
            {"role": "tool", "tool_call_id": "call_987654321", "content": "4\n5"},
            {"role": "user", "content": "So?\nHurry."},
        ],
    }  # fmt: skip
    for family in ("hermes", "qwen3_coder"):
        await asked_alike(await start(family, "It is 3."), body, chat)


async def test_what_one_says_in_a_row_is_one_message(start: Any) -> None:
    """Templates that want user and assistant to take turns would refuse it."""
    first = {"role": "system", "content": "Be brief."}
    given = [first, *ASK, {"role": "user", "content": "And how wide?"}]
    meant = [first, {"role": "user", "content": "How large?\nAnd how wide?"}]
    endpoint = await start("hermes", "x")
    await asked_alike(endpoint, {"messages": given}, {"messages": meant})


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"type": "tool", "name": "f"},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
    ],
    ids=["auto", "none", "any", "one", "tool"],
)
async def test_tool_choice(
    start: Any, models: dict[str, Tokenizer], given: Any, meant: Any
) -> None:
    endpoint = await start("hermes", written("hermes", models["hermes"]))
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    body = {"tools": TOOLS, "tool_choice": given}
    await asked_alike(endpoint, body, {"tools": tools, **meant})
    _, whole = await endpoint.post(MESSAGES, {**ASKED, **body})
    called = given["type"] != "none"
    assert whole["stop_reason"] == ("tool_use" if called else "end_turn")
    assert [block["type"] for block in whole["content"]][-1] == ("tool_use" if called else "text")


@pytest.mark.parametrize("kind", ["enabled", "disabled"])
async def test_thinking(start: Any, kind: str) -> None:
    endpoint = await start("hermes", "It is 3.")
    body = {"thinking": {"type": kind, "budget_tokens": 1024}}
    chat = {"chat_template_kwargs": {"enable_thinking": kind == "enabled"}}
    await asked_alike(endpoint, body, chat)


async def test_an_answer_that_has_begun(start: Any) -> None:
    endpoint = await start("hermes", " 3.")
    begun = [*ASK, {"role": "assistant", "content": "It is"}]
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    await asked_alike(endpoint, {"messages": begun}, {"messages": begun, **goes_on})


async def test_structured_output(start: Any) -> None:
    endpoint = await start("hermes", "{}")
    form = {"type": "json_schema", "schema": {"type": "object"}}
    meant = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    await asked_alike(
        endpoint, {"output_config": {"effort": "max", "format": form}}, {"response_format": meant}
    )


async def test_sampling_and_extensions(serve: Any) -> None:
    endpoint = await serve()
    body = {
        **ASKED, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop_sequences": [], "priority": 3,
        "cache_salt": "s", "timeout": 9, "metadata": {"user_id": "u"}, "unknown": 1,
    }  # fmt: skip
    status, whole = await endpoint.post(MESSAGES, body)
    assert status == 200, whole
    (request,) = endpoint.source.requests
    params = request.params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 7)
    assert (request.priority, request.cache_salt, request.deadline_s) == (3, "s", 9)


async def test_images(serve: Any, checkpoint: Callable[..., Path]) -> None:
    endpoint = await serve(None, tokenizer=Tokenizer.load(checkpoint(family="qwen2_5_vl")))
    shown = [base64.b64encode(picture(i)).decode() for i in range(2)]

    def block(data: str) -> Any:
        return {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": data},
        }

    def part(data: str) -> Any:
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

    def say(first: Any, result: Any) -> list[Any]:
        asked = {"type": "text", "text": "What?"}
        return [
            {"role": "user", "content": [asked, first]},
            {"role": "assistant", "content": "A call."},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result", "tool_use_id": "x",
                        "content": [{"type": "text", "text": "3"}, result],
                    },
                    asked,
                ],
            },
        ]  # fmt: skip

    asked, three = {"type": "text", "text": "What?"}, [{"type": "text", "text": "3"}]
    chat = [
        {"role": "user", "content": [asked, part(shown[0])]},
        {"role": "assistant", "content": "A call."},
        {"role": "tool", "tool_call_id": "x", "content": [*three, part(shown[1])]},
        {"role": "user", "content": [asked]},
    ]
    messages = say(block(shown[0]), block(shown[1]))
    await asked_alike(
        endpoint,
        {"messages": messages, "max_tokens": 4},
        {"messages": chat, "max_tokens": 4},
    )
    assert [item.data for item in endpoint.source.requests[0].items] == [picture(0), picture(1)]
    for url in ({"type": "url", "url": "ftp://x"}, {**block("AAAA")["source"]}):
        wrong = {"type": "image", "source": url}
        body = {**ASKED, "messages": say(block(shown[0]), wrong)}
        for path in (MESSAGES, COUNT):
            status, answer = await endpoint.post(path, body)
            assert status == 400
            assert answer["error"]["message"].startswith("messages[2].content[0].content[1]: ")


# --- errors ---


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [*ASK, {"role": "tool", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [*ASK, {"role": "user", "content": [{"type": "document"}]}]},
            "messages[1].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [CALLED]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [*ASK, {"role": "assistant", "content": [CALLED]}]}, "messages"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"temperature": 3}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOLS[0], "type": "web_search_20250305"}]}, "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "often"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_format": {"type": "json_schema", "schema": SCHEMA}}, "output_format"),
        ({"mcp_servers": [{"type": "url", "url": "x", "name": "y"}]}, "mcp_servers"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    ],
)
async def test_what_is_wrong_is_named(start: Any, extra: Any, field: str) -> None:
    endpoint = await start("hermes", "x")
    status, answer = await endpoint.post(MESSAGES, {**ASKED, **extra})
    assert status == 400, answer
    assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    assert field in answer["error"]["message"]
    assert endpoint.source.requests == []


async def test_an_input_that_can_just_be_read(start: Any) -> None:
    """What is nested deeper than it can be written again is no failure of ours."""
    endpoint = await start("hermes", "x")
    messages = [*ASK, {"role": "assistant", "content": [{**CALLED, "input": {"a": 0}}]}, *ASK]
    body = json.dumps({"model": "tiny", "messages": messages})
    for depth in range(500, sys.getrecursionlimit(), 2):
        deep = body.replace('{"a": 0}', '{"a": ' + "[" * depth + "]" * depth + "}")
        async with endpoint.session.post(COUNT, data=deep) as response:
            assert response.status in (200, 400), depth


async def test_errors_have_anthropics_shape(serve: Any) -> None:
    endpoint = await serve(api_keys=("right",), max_body_bytes=1000)
    right = {"X-Api-Key": "right", "X-Request-Id": "mine"}
    for body, headers, path, status, kind in (
        (ASKED, {"X-Api-Key": "wrong"}, MESSAGES, 401, "authentication_error"),
        ({**ASKED, "model": "claude"}, right, MESSAGES, 404, "not_found_error"),
        ({"model": "claude", "messages": ASK}, right, COUNT, 404, "not_found_error"),
        (ASKED, right, f"{MESSAGES}/batches", 404, "not_found_error"),
        ({**ASKED, "system": "x" * 1000}, right, MESSAGES, 413, "request_too_large"),
    ):
        async with endpoint.session.post(path, json=body, headers=headers) as response:
            answer = await response.json()
            assert (response.status, answer["error"]["type"]) == (status, kind), answer
            assert answer["type"] == "error"
            assert answer["request_id"] == response.headers["Request-Id"]
            assert headers.get("X-Request-Id", answer["request_id"]) == answer["request_id"]


async def test_a_stream_that_fails_ends_with_an_error(serve: Any) -> None:
    endpoint = await serve()
    endpoint.source.failure, endpoint.source.fail_at = RuntimeError("broken"), 2
    async with endpoint.session.post(MESSAGES, json={**ASKED, "stream": True}) as response:
        assert response.status == 200
        *_, last = data_of(await response.read())
    assert last["type"] == "error"
    assert last["error"]["type"] == "api_error"
    assert last["request_id"] == response.headers["Request-Id"]
    status, answer = await endpoint.post(MESSAGES, ASKED)
    assert (status, answer["error"]["type"]) == (500, "api_error")


async def test_an_api_key_is_the_tenants_in_either_header(serve: Any) -> None:
    endpoint = await serve(api_keys=("one", "two"))
    for headers in (
        {"X-Api-Key": "one", "anthropic-version": "2023-06-01", "anthropic-beta": "x"},
        {"Authorization": "Bearer one"},
        {"X-Api-Key": "two"},
        {"X-Api-Key": "another", "Authorization": "Bearer one"},
    ):
        status, answer = await endpoint.post(MESSAGES, ASKED, headers=headers)
        assert status == 200, answer
    one, bearer, two, both = (request.tenant for request in endpoint.source.requests)
    assert one == bearer == both != two
    status, _ = await endpoint.post(
        CHAT, {"messages": ASK}, headers={"Authorization": "Bearer x", "X-Api-Key": "one"}
    )
    assert status == 401, "a bearer token is what counts where there is one"


async def test_requests_are_counted_by_path(serve: Any) -> None:
    endpoint = await serve()
    await endpoint.post(MESSAGES, ASKED)
    await endpoint.post(COUNT, {"model": "tiny", "messages": ASK})
    counts = endpoint.frontend.metrics.requests.counts
    assert counts["POST", MESSAGES, "200"] == counts["POST", COUNT, "200"] == 1

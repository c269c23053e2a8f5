"""OpenAI's Responses API: a request is the chat that it means, and its answer says the same."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from kvbaton.text.tokenizer import Tokenizer
from tests.server.test_tool_calls import (
    ARGUMENTS,
    CHAT,
    FAMILIES,
    THINKING,
    allowed,
    models,
    start,
    written,
)
from tests.support.chats import data_url, picture
from tests.support.responses_stream import assembled, events_of

__all__ = ["models", "start"]  # fixtures

RESPONSES = "/v1/responses"
COUNT = "/v1/responses/input_tokens"
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
ASK: list[Any] = [{"role": "user", "content": "How large?"}]
SCHEMA = {"properties": {"a": {"type": "string"}}}
TOOLS: list[Any] = [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}]
CHAT_TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
NAMED = {"type": "function", "name": "f"}
ALLOWED = {"type": "allowed_tools", "mode": "auto"}
CHAT_NAMED = {"type": "function", "function": {"name": "f"}}
ASKED: dict[str, Any] = {"model": "tiny", "max_output_tokens": 100, "input": ASK}
CALL = {"type": "function_call", "call_id": "call_1234", "name": "f", "arguments": '{"a": "東"}'}
RESULT = {"type": "function_call_output", "call_id": "call_1234", "output": "3"}


async def told(endpoint: Any, body: Any) -> tuple[Any, Any]:
    """An answer, and the same streamed; each is as OpenAI's SDK has them."""
    status, whole = await endpoint.post(RESPONSES, body)
    assert status == 200, whole
    Response.model_validate(whole)
    async with endpoint.session.post(RESPONSES, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        stream = await response.read()
    events = events_of(stream)
    for number, event in enumerate(events):
        EVENT.validate_python({**event, "sequence_number": number})
    return whole, assembled(events)


def without_names(response: Any) -> Any:
    """What two answers to a request have in common."""
    own = ("id", "created_at", "completed_at")
    items = [{k: v for k, v in i.items() if k not in ("id", "call_id")} for i in response["output"]]
    return {**{k: v for k, v in response.items() if k not in own}, "output": items}


async def asked_alike(endpoint: Any, body: Any, chat: Any) -> None:
    """Both are the same for the source, and what counts tokens counts them."""
    few = {**ASKED, "max_output_tokens": 4}
    status, answer = await endpoint.post(RESPONSES, {**few, **body})
    assert status == 200, answer
    status, answer = await endpoint.post(CHAT, {"messages": ASK, "max_tokens": 4, **chat})
    assert status == 200, answer
    mine, wanted = endpoint.source.requests[-2:]
    assert mine.token_ids == wanted.token_ids
    assert mine.items == wanted.items
    assert mine.params.grammar == wanted.params.grammar
    assert mine.params.stop_token_ids == wanted.params.stop_token_ids
    given = {key: ASKED[key] for key in ("model", "input")} | body
    status, counted = await endpoint.post(COUNT, given)
    assert (status, counted) == (
        200, {"object": "response.input_tokens", "input_tokens": len(mine.token_ids)}
    )  # fmt: skip


# --- answers ---


@pytest.mark.parametrize("family", FAMILIES)
async def test_reasoning_and_a_call_whole_and_streamed(
    start: Any, models: dict[str, Tokenizer], family: str
) -> None:
    endpoint = await start(family, written(family, models[family]))
    whole, streamed = await told(endpoint, {**ASKED, "tools": TOOLS})
    assert without_names(whole) == without_names(streamed)
    *before, call = whole["output"]
    thinks = family in ("hermes", "deepseek_v3")
    assert [item["type"] for item in before] == (["reasoning"] if thinks else [])
    if thinks:
        assert before[0]["content"] == [{"type": "reasoning_text", "text": THINKING}]
        assert before[0]["summary"] == []
    assert (call["type"], call["name"], call["status"]) == ("function_call", "f", "completed")
    assert json.loads(call["arguments"]) == ARGUMENTS
    assert call["call_id"]
    assert "namespace" not in call
    assert (whole["object"], whole["model"], whole["status"]) == ("response", "tiny", "completed")
    usage, source = whole["usage"], endpoint.source
    made = len(source._tokens(source.requests[0]))
    assert usage["input_tokens"] == len(source.requests[0].token_ids)
    assert usage["input_tokens_details"]["cached_tokens"] == 4
    assert usage["output_tokens"] == made
    assert usage["total_tokens"] == usage["input_tokens"] + made
    thought = len(models[family].encode(THINKING, add_special_tokens=False)) if thinks else 0
    assert 0 <= usage["output_tokens_details"]["reasoning_tokens"] - thought <= 4 * thinks


async def test_tokens_of_reasoning_that_come_at_once(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a step with drafts brings them, or a source that is ahead of its reader."""
    monkeypatch.setattr("tests.support.scripted_source.TURNS", 0)
    endpoint = await start("hermes", "<think>\nabcabcabc\n</think>\n\nabcabcabc")
    for response in await told(endpoint, ASKED):
        assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
        usage = response["usage"]
        share = usage["output_tokens_details"]["reasoning_tokens"] / usage["output_tokens"]
        assert 0.3 < share < 0.7


async def test_text_between_reasoning_and_calls(start: Any) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
    endpoint = await start("hermes", f"<think>\nHm.\n</think>\n\nI look.{call}\n{call}")
    for parallel, calls in (None, 2), (True, 2), (False, 1):
        body = {**ASKED, "tools": TOOLS, "parallel_tool_calls": parallel}
        for response in await told(endpoint, body):
            kinds = [item["type"] for item in response["output"]]
            assert kinds == ["reasoning", "message", *["function_call"] * calls]
            (text,) = response["output"][1]["content"]
            assert text == {
                "type": "output_text",
                "text": "I look.",
                "annotations": [],
                "logprobs": [],
            }
            assert response["parallel_tool_calls"] is (parallel is not False)
            assert len({item["id"] for item in response["output"]}) == 2 + calls


@pytest.mark.parametrize(
    ("extra", "status", "text"),
    [
        ({}, "completed", "Hello wide world."),
        ({"max_output_tokens": 2}, "incomplete", None),
        ({"stop": ["xyz", " wor"]}, "completed", "Hello wide"),
    ],
)
async def test_why_it_stops(serve: Any, extra: Any, status: str, text: str | None) -> None:
    for response in await told(await serve(), {**ASKED, **extra}):
        (item,) = response["output"]
        assert (response["status"], item["status"]) == (status, status)
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        assert response["incomplete_details"] == reason
        assert (response["completed_at"] is None) == (status == "incomplete")
        assert text is None or item["content"][0]["text"] == text


async def test_every_token_is_an_event(serve: Any) -> None:
    """Also one that adds no text: an empty chunk would end the answer's body."""
    endpoint = await serve()
    tokenizer = endpoint.source.tokenizer
    endpoint.source.script = [0, 1, *tokenizer.encode("Hi", add_special_tokens=False)]
    for response in await told(endpoint, ASKED):
        assert [item["content"][0]["text"] for item in response["output"]] == ["Hi"]


async def test_an_answer_without_text(serve: Any) -> None:
    for response in await told(await serve(""), ASKED):
        assert (response["status"], response["output"]) == ("completed", [])


@pytest.mark.parametrize("how", ["length", "stop"])
async def test_a_call_that_is_cut_off(start: Any, models: dict[str, Tokenizer], how: str) -> None:
    """Passed back, it is a call with arguments that chat templates can read."""
    text = '<tool_call>{"name": "f", "arguments": {"a": "so'
    endpoint = await start("hermes", text + 'me"}}</tool_call>')
    few = len(models["hermes"].encode(text, add_special_tokens=False))
    cut = {"max_output_tokens": few} if how == "length" else {"stop": 'me"}'}
    for response in await told(endpoint, {**ASKED, "tools": TOOLS, **cut}):
        status = "incomplete" if how == "length" else "completed"
        (call,) = response["output"]
        assert (response["status"], call["status"]) == (status, status)
        assert call["arguments"] == '{"a": "so'
        result = {**RESULT, "call_id": call["call_id"]}
        meant = {"name": "f", "arguments": '{"INVALID_JSON": "{\\"a\\": \\"so"}'}
        chat = [
            *ASK,
            {"role": "assistant", "content": None,
             "tool_calls": [{"id": call["call_id"], "type": "function", "function": meant}]},
            {"role": "tool", "tool_call_id": call["call_id"], "content": "3"},
        ]  # fmt: skip
        await asked_alike(endpoint, {"input": [*ASK, call, result]}, {"messages": chat})


async def test_reasoning_passed_back(start: Any) -> None:
    """In full, in short, or so that only who has encrypted it can read it."""
    endpoint = await start("hermes", "<think>\nHm.\n</think>\n\nIt is 3.")
    for response in await told(endpoint, {**ASKED, "include": ["reasoning.encrypted_content"]}):
        thought, said = response["output"]
        short = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
        meant = {"role": "assistant", "reasoning_content": "Hm.", "content": "It is 3."}
        for item in (thought, short):
            body, chat = {"input": [*ASK, item, said, *ASK]}, {"messages": [*ASK, meant, *ASK]}
            await asked_alike(endpoint, body, chat)
        meant["reasoning_content"] = "Hm.\nHm."
        await asked_alike(endpoint, {"input": [*ASK, thought, short, said, *ASK]}, chat)
        meant.pop("reasoning_content")
        foreign: Any = {
            "type": "reasoning",
            "summary": [],
            "content": None,
            "encrypted_content": "gA",
        }
        await asked_alike(endpoint, {"input": [*ASK, foreign, said, *ASK]}, chat)


# --- requests ---


async def test_a_conversation_with_tools_is_the_chat_that_it_means(start: Any) -> None:
    body = {
        "instructions": "Be brief.",
        "tools": [{**TOOLS[0], "description": "how large", "parameters": None}],
        "input": [
            {"type": "message", "role": "developer",
             "content": [{"type": "input_text", "text": "And right."}]},
            *ASK,
            {"type": "reasoning", "id": "rs_1", "summary": [],
             "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
            CALL,
            {**CALL, "call_id": "call_5678"},
            RESULT,
            {**RESULT, "call_id": "call_5678",
             "output": [{"type": "input_text", "text": "4"}, {"type": "input_text", "text": "5"}]},
            {"role": "user", "content": "So?"},
            {"role": "system", "content": "Hurry."},
        ],
    }  # fmt: skip
    calls = [
        {"id": name, "type": "function", "function": {"name": "f", "arguments": '{"a": "東"}'}}
        for name in ("call_1234", "call_5678")
    ]
    described = {"name": "f", "description": "how large", "parameters": {}}
    chat = {
        "tools": [{"type": "function", "function": described}],
        "messages": [
            {"role": "system", "content": "Be brief.\nAnd right."},
            *ASK,
            {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.",
             "tool_calls": calls},
            {"role": "tool", "tool_call_id": "call_1234", "content": "3"},
            {"role": "tool", "tool_call_id": "call_5678", "content": "4\n5"},
            {"role": "user", "content": "So?\nHurry."},
        ],
    }  # fmt: skip
    for family in ("hermes", "qwen3_coder"):
        await asked_alike(await start(family, "It is 3."), body, chat)


async def test_a_text_is_what_the_user_says(start: Any) -> None:
    await asked_alike(await start("hermes", "x"), {"input": "How large?"}, {})


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({}, {}),
        ({"tool_choice": "none"}, {"tool_choice": "none"}),
        ({"tool_choice": "required"}, {"tool_choice": "required"}),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tool_choice": NAMED},
            {"tool_choice": CHAT_NAMED},
        ),
        *[
            (
                {"tool_choice": {**ALLOWED, "mode": mode, "tools": [NAMED]}},
                {"tool_choice": allowed(mode, "f")},
            )
            for mode in ("auto", "required")
        ],
    ],
    ids=["auto", "none", "required", "one", "named", "allowed", "one of the allowed"],
)
async def test_tool_choice(
    start: Any, models: dict[str, Tokenizer], given: Any, meant: Any
) -> None:
    endpoint = await start("hermes", written("hermes", models["hermes"]))
    body = {"tools": TOOLS, **given}
    await asked_alike(endpoint, body, {"tools": CHAT_TOOLS, **meant})
    _, whole = await endpoint.post(RESPONSES, {**ASKED, **body})
    called = given.get("tool_choice") != "none"
    assert whole["output"][-1]["type"] == ("function_call" if called else "message")
    assert whole["tool_choice"] == given.get("tool_choice", "auto")
    assert [tool["name"] for tool in whole["tools"]] == ["f"]


async def test_tools_in_a_namespace(start: Any) -> None:
    """As agents have those of MCP servers and of their own; the model sees functions."""
    text = '<tool_call>\n{"name": "n__f", "arguments": {}}\n</tool_call>'
    endpoint = await start("hermes", text)
    space = {"type": "namespace", "name": "n", "description": "x", "tools": TOOLS}
    tools = [{"type": "function", "name": "f", "parameters": None}, space]
    body: Any = {"tools": tools}
    shown = [
        {"type": "function", "function": {"name": "f", "parameters": {}}},
        {"type": "function", "function": {"name": "n__f", "parameters": SCHEMA}},
    ]
    await asked_alike(endpoint, body, {"tools": shown})
    named = {"type": "function", "name": "f", "namespace": "n"}
    forced = {"type": "function", "function": {"name": "n__f"}}
    await asked_alike(
        endpoint, {**body, "tool_choice": named}, {"tools": shown, "tool_choice": forced}
    )
    for response in await told(endpoint, {**ASKED, **body}):
        (call,) = response["output"]
        assert (call["name"], call["namespace"]) == ("f", "n")
        past = {"id": call["call_id"], "type": "function",
                "function": {"name": "n__f", "arguments": "{}"}}  # fmt: skip
        chat = [
            *ASK,
            {"role": "assistant", "content": None, "tool_calls": [past]},
            {"role": "tool", "tool_call_id": call["call_id"], "content": "3"},
        ]
        result = {**RESULT, "call_id": call["call_id"]}
        given = {"input": [*ASK, call, result], **body}
        await asked_alike(endpoint, given, {"messages": chat, "tools": shown})


@pytest.mark.parametrize(
    ("effort", "thinks"), [(None, None), ("none", False), ("minimal", None), ("xhigh", None)]
)
async def test_effort(start: Any, effort: Any, thinks: Any) -> None:
    endpoint = await start("hermes", "It is 3.")
    chat = {} if thinks is None else {"chat_template_kwargs": {"enable_thinking": thinks}}
    await asked_alike(endpoint, {"reasoning": {"effort": effort, "summary": "auto"}}, chat)


async def test_structured_output(start: Any) -> None:
    endpoint = await start("hermes", "{}")
    schema = {"type": "object"}
    for form, meant in (
        ({"type": "text"}, {"type": "text"}),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "n", "strict": True, "schema": schema},
            {"type": "json_schema", "json_schema": {"schema": schema}},
        ),
    ):
        body = {"text": {"format": form, "verbosity": "low"}}
        await asked_alike(endpoint, body, {"response_format": meant})
        _, whole = await endpoint.post(RESPONSES, {**ASKED, **body})
        assert whole["text"] == body["text"]


async def test_sampling_extensions_and_what_is_harmless(serve: Any) -> None:
    endpoint = await serve()
    body = {
        **ASKED, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 5, "priority": 3,
        "cache_salt": "s", "timeout": 9, "metadata": {"a": "b"}, "user": "u", "store": True,
        "prompt_cache_key": "k", "truncation": "auto", "service_tier": "auto", "include": [],
        "safety_identifier": "x", "background": False, "previous_response_id": None, "unknown": 1,
        "max_tool_calls": 3, "stream_options": None, "client_metadata": {"a": "b"},
    }  # fmt: skip
    status, whole = await endpoint.post(RESPONSES, body)
    assert status == 200, whole
    (request,) = endpoint.source.requests
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 7, 5)
    assert (request.priority, request.cache_salt, request.deadline_s) == (3, "s", 9)
    assert (whole["metadata"], whole["store"]) == ({"a": "b"}, False)
    assert (whole["temperature"], whole["max_output_tokens"]) == (0.5, 100)


async def test_images(serve: Any, checkpoint: Callable[..., Path]) -> None:
    endpoint = await serve(None, tokenizer=Tokenizer.load(checkpoint(family="qwen2_5_vl")))
    shown = [data_url(picture(i)) for i in range(2)]

    def say(first: str, second: str) -> list[Any]:
        image = {"type": "input_image", "image_url": second, "detail": "auto"}
        return [
            {"role": "user", "content": [
                {"type": "input_text", "text": "What?"}, {**image, "image_url": first}]},
            CALL,
            {**RESULT, "output": [{"type": "input_text", "text": "3"}, image]},
        ]  # fmt: skip

    def part(url: str) -> Any:
        return {"type": "image_url", "image_url": {"url": url}}

    function = {"name": "f", "arguments": CALL["arguments"]}
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "What?"}, part(shown[0])]},
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": CALL["call_id"], "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": CALL["call_id"],
         "content": [{"type": "text", "text": "3"}, part(shown[1])]},
    ]  # fmt: skip
    await asked_alike(
        endpoint,
        {"input": say(*shown)},
        {"messages": chat},
    )
    assert [item.data for item in endpoint.source.requests[0].items] == [picture(0), picture(1)]
    for url in ("ftp://x", "data:image/png;base64,AAAA"):
        status, answer = await endpoint.post(RESPONSES, {**ASKED, "input": say(shown[0], url)})
        assert (status, answer["error"]["param"]) == (400, "input[2].output[1]")


# --- errors ---

WRONG: list[tuple[Any, str]] = [
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "x"}, "max_output_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": 3}, "input"),
    ({"input": ["x"]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ({"input": [*ASK, {"role": "tool", "content": "x"}]}, "input[1].role"),
    ({"input": [{"content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"text": "x"}]}]}, "input[0].content[0].type"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        "input[0].content[0].type",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
        "input[0].content[0].image_url",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0]",
    ),
    ({"input": [{"type": "function_call", "name": "f", "call_id": "x"}]}, "input[0].arguments"),
    (
        {"input": [{"type": "reasoning", "summary": [{"type": "summary_text"}]}]},
        "input[0].summary[0].text",
    ),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input[0].output"),
    ({"instructions": [*ASK]}, "instructions"),
    ({"stop": [""]}, "stop"),
    ({"temperature": 3}, "temperature"),
    ({"top_k": -2}, "top_k"),
    ({"metadata": {"a": 1}}, "metadata[...]"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"name": "f"}]}, "tools[0].type"),
    *[
        ({"tools": [*TOOLS, {"type": kind, "name": "f"}]}, "tools[1].type")
        for kind in (
            "web_search",
            "file_search",
            "mcp",
            "code_interpreter",
            "local_shell",
            "custom",
        )
    ],
    ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "custom", "name": "f"}}, "tool_choice.type"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    *[
        ({"tools": TOOLS, "tool_choice": {**ALLOWED, **choice}}, where)
        for choice, where in (
            ({}, "tool_choice.tools"),
            ({"tools": []}, "tool_choice.tools"),
            ({"tools": [NAMED], "mode": "none"}, "tool_choice.mode"),
            ({"tools": [NAMED, {**NAMED, "name": "g"}]}, "tool_choice.tools[1]"),
            ({"tools": [{**NAMED, "namespace": "n"}]}, "tool_choice.tools[0]"),
            ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tool_choice.tools[0].type"),
        )
    ],
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ({"reasoning": "low"}, "reasoning"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": {"id": "x"}}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
]


async def test_what_is_wrong_is_named_by_what_counts(start: Any) -> None:
    endpoint = await start("hermes", "x")
    for extra, field in (
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"model": "other"}, "model"),
    ):
        status, answer = await endpoint.post(COUNT, {**ASKED, **extra})
        assert status == (404 if field == "model" else 400)
        assert answer["error"]["param"] == field


async def test_the_sdk_counts(start: Any) -> None:
    endpoint = await start("hermes", "x")
    async with openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="x") as client:
        counted = await client.responses.input_tokens.count(model="tiny", input=ASK)
        answered = await client.responses.create(model="tiny", input=ASK)
    assert answered.usage is not None
    assert counted.input_tokens == answered.usage.input_tokens


async def test_a_message_names_the_field_as_the_client_does(start: Any) -> None:
    endpoint = await start("hermes", "x")
    _, answer = await endpoint.post(RESPONSES, {**ASKED, "max_output_tokens": 0})
    assert answer["error"]["message"].startswith("max_output_tokens must be in [1, ")


@pytest.mark.parametrize(("extra", "field"), WRONG)
async def test_what_is_wrong_is_named(start: Any, extra: Any, field: str) -> None:
    endpoint = await start("hermes", "x")
    status, answer = await endpoint.post(RESPONSES, {**ASKED, **extra})
    assert status == 400, answer
    error = answer["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", field)
    assert field in error["message"]
    assert endpoint.source.requests == []


async def test_a_schema_that_can_not_be_followed_is_named(start: Any) -> None:
    endpoint = await start("hermes", "x")
    inner = [{**TOOLS[0], "parameters": {"type": "what"}}]
    tools = [*TOOLS, {"type": "namespace", "name": "n", "tools": inner}]
    _, answer = await endpoint.post(RESPONSES, {**ASKED, "tools": tools, "tool_choice": "required"})
    assert answer["error"]["param"] in ("tools", "tools[1].tools[0].parameters")


async def test_a_prompt_that_is_too_long(start: Any) -> None:
    endpoint = await start("hermes", "x")
    status, answer = await endpoint.post(RESPONSES, {**ASKED, "input": "東" * 1000})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert answer["error"]["param"] == "input"


async def test_a_huge_list_of_items(start: Any) -> None:
    """Each is looked at once; of what one says in a row there may be any number."""
    endpoint = await start("hermes", "x")
    small = [{"role": "assistant", "content": "x"}, {"type": "reasoning", "summary": []}]
    body = {**ASKED, "input": [*small * 20_000, *ASK]}
    data = io.BytesIO(json.dumps(body).encode())
    async with asyncio.timeout(20), endpoint.session.post(RESPONSES, data=data) as response:
        status, answer = response.status, await response.json()
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("stream", [False, True])
async def test_what_can_just_be_read(start: Any, stream: bool) -> None:
    """What is nested deeper than it can be written again is no failure of ours."""
    endpoint = await start("mistral", "x")
    tools = [{**TOOLS[0], "parameters": {"a": 0}}]
    asked = {**ASKED, "max_output_tokens": 1, "tools": tools, "tool_choice": "none"}
    body, found = json.dumps({**asked, "stream": stream}), set()
    for depth in range(800, sys.getrecursionlimit()):
        data = body.replace('"a": 0', f'"a": {"[" * depth}{"]" * depth}')
        async with endpoint.session.post(RESPONSES, data=data) as response:
            found.add(response.status)
            ends = not stream or b"event: response.incomplete" in await response.read()
            assert ends or response.status == 400, depth
    assert found == {200, 400}


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_nothing_is_stored(serve: Any, method: str) -> None:
    endpoint = await serve()
    async with endpoint.session.request(method, f"{RESPONSES}/resp_1") as response:
        error = (await response.json())["error"]
        assert (response.status, error["type"]) == (404, "not_found_error")
        assert error["param"] == "response_id"
        assert "as input" in error["message"]


async def test_a_stream_that_fails_ends_with_a_failed_response(serve: Any) -> None:
    endpoint = await serve()
    endpoint.source.failure, endpoint.source.fail_at = RuntimeError("broken"), 2
    async with endpoint.session.post(RESPONSES, json={**ASKED, "stream": True}) as response:
        assert response.status == 200
        events = events_of(await response.read())
    EVENT.validate_python({**events[-1], "sequence_number": 0})
    assert events[-1]["type"] == "response.failed"
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert failed["id"] == events[0]["response"]["id"]
    told = [event["delta"] for event in events if event["type"].endswith("output_text.delta")]
    (item,) = failed["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "".join(told))
    assert told
    status, answer = await endpoint.post(RESPONSES, ASKED)
    assert (status, answer["error"]["type"]) == (500, "server_error")


async def test_a_client_that_goes_away_ends_its_stream(serve: Any) -> None:
    endpoint = await serve()
    held = asyncio.Event()

    async def gate(index: int) -> None:
        if index == 2:
            await held.wait()

    endpoint.source.gate = gate
    async with endpoint.session.post(RESPONSES, json={**ASKED, "stream": True}) as response:
        assert b"response.created" in await response.content.readuntil(b"\n\n")
        response.close()
    async with asyncio.timeout(10):
        await endpoint.source.cancellation.wait()
    assert len(endpoint.source.cancelled) == 1


# --- OpenAI's SDK ---


class Size(pydantic.BaseModel):
    """What is asked for."""

    metres: int


async def test_openais_sdk(start: Any, models: dict[str, Tokenizer]) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
    endpoint = await start("hermes", f"<think>\nHm.\n</think>\n\nI look.{call}")
    url = f"{endpoint.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
        whole = await client.responses.create(model="tiny", input="How large?", tools=TOOLS)
        assert (whole.output_text, whole.status) == ("I look.", "completed")
        async with client.responses.stream(model="tiny", input="How large?", tools=TOOLS) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds[-1] == "response.completed"
        assert final.output_text == "I look."
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
        result: Any = {"type": "function_call_output", "call_id": "x", "output": "3"}
        past: Any = [{"role": "user", "content": "How large?"}, *final.output]
        past[-1].call_id = "x"
        endpoint.source.text = '<think>\nHm.\n</think>\n\n{"metres": 3}'
        parsed = await client.responses.parse(
            model="tiny", input=[*past, result], tools=TOOLS, text_format=Size
        )
        assert parsed.output_parsed == Size(metres=3)
        with pytest.raises(openai.BadRequestError, match=r"previous_response_id.*as input"):
            await client.responses.create(model="tiny", input="x", previous_response_id="resp_1")
        with pytest.raises(openai.NotFoundError, match="as input"):
            await client.responses.retrieve("resp_1")


async def test_keys_and_counters(serve: Any) -> None:
    endpoint = await serve(api_keys=("one", "two"))
    status, answer = await endpoint.post(RESPONSES, ASKED)
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    for key in ("one", "two"):
        headers = {"Authorization": f"Bearer {key}"}
        status, answer = await endpoint.post(RESPONSES, ASKED, headers=headers)
        assert status == 200, answer
    one, two = (request.tenant for request in endpoint.source.requests)
    assert one != two
    counts = endpoint.frontend.metrics.requests.counts
    assert counts["POST", RESPONSES, "200"] == 2
    assert counts["POST", RESPONSES, "401"] == 1

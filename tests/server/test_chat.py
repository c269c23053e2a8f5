import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from kvbaton.text.tokenizer import Tokenizer
from tests.support.scripted_source import MAX_MODEL_LEN, TEMPLATE, write_tokenizer

TEXT = "Bonjour, 東京!"
ASK: list[Any] = [{"role": "user", "content": "Greet the city."}]


async def test_a_whole_answer(serve: Any) -> None:
    endpoint = await serve(TEXT)
    status, answer = await endpoint.post("/v1/chat/completions", {"messages": ASK})
    assert status == 200
    assert answer["object"] == "chat.completion"
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": TEXT}
    assert choice["finish_reason"] == "stop"
    request = endpoint.source.requests[0]
    shown = endpoint.frontend.tokenizer.decode(list(request.token_ids), skip_special_tokens=False)
    assert shown == "<s><|user|>Greet the city.<|assistant|>", "one start token, from the template"
    assert request.params.max_tokens == MAX_MODEL_LEN - len(request.token_ids)


async def test_no_top_logprobs_need_no_logprobs(serve: Any) -> None:
    """As vLLM has it: libraries say 0 for what was not asked for."""
    status, answer = await (await serve(TEXT)).post(
        "/v1/chat/completions", {"messages": ASK, "top_logprobs": 0}
    )
    assert status == 200
    assert answer["choices"][0]["logprobs"] is None


async def test_the_openai_client(serve: Any) -> None:
    endpoint = await serve(TEXT)
    async with openai.AsyncOpenAI(
        base_url=f"{endpoint.url}/v1", api_key="x", max_retries=0
    ) as client:
        whole = await client.chat.completions.create(
            model="tiny", messages=ASK, logprobs=True, top_logprobs=2, n=2, max_completion_tokens=60
        )
        assert [choice.message.content for choice in whole.choices] == [TEXT, TEXT]
        logprobs = whole.choices[1].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        told = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
        assert told == TEXT.encode() + b"</s>", "bytes of parts of characters are exact"
        assert len(logprobs.content[0].top_logprobs) == 2
        chunks = await client.chat.completions.create(
            model="tiny",
            messages=ASK,
            stream=True,
            stream_options={"include_usage": True},
            n=2,
        )
        texts, usage, roles = {0: "", 1: ""}, None, []
        async for chunk in chunks:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                assert "\ufffd" not in (choice.delta.content or "")
                texts[choice.index] += choice.delta.content or ""
                roles += [choice.delta.role] * (choice.delta.role is not None)
        assert texts == {0: TEXT, 1: TEXT}
        assert roles == ["assistant"] * 2
        assert usage is not None
        assert whole.usage is not None
        assert usage.completion_tokens == whole.usage.completion_tokens


async def test_token_ids_and_prompt_logprobs(serve: Any) -> None:
    endpoint = await serve(TEXT)
    body = {"messages": ASK, "return_token_ids": True, "prompt_logprobs": 0}
    _, answer = await endpoint.post("/v1/chat/completions", body)
    prompt = list(endpoint.source.requests[0].token_ids)
    assert answer["prompt_token_ids"] == prompt
    assert len(answer["prompt_logprobs"]) == len(prompt)
    assert answer["choices"][0]["token_ids"][-1] == 1


async def test_template_options(serve: Any) -> None:
    endpoint = await serve(TEXT)
    body = {"messages": ASK, "add_generation_prompt": False}
    await endpoint.post("/v1/chat/completions", body)
    ids = list(endpoint.source.requests[0].token_ids)
    shown = endpoint.frontend.tokenizer.decode(ids, skip_special_tokens=False)
    assert shown == "<s><|user|>Greet the city."


GO_ON = {"continue_final_message": True, "add_generation_prompt": False}


async def shown(endpoint: Any, body: dict[str, Any]) -> str:
    """The prompt that the source is asked for."""
    status, answer = await endpoint.post("/v1/chat/completions", body)
    assert status == 200, answer
    ids = list(endpoint.source.requests[-1].token_ids)
    text: str = endpoint.frontend.tokenizer.decode(ids, skip_special_tokens=False)
    return text


async def test_the_final_message_goes_on(serve: Any, tmp_path: Path) -> None:
    endpoint = await serve(TEXT)
    begun = [*ASK, {"role": "assistant", "content": "Dear "}]
    told = "<s><|user|>Greet the city.<|assistant|>Dear"
    assert await shown(endpoint, {"messages": begun, **GO_ON}) == told + " "
    parts = [*ASK, {"role": "assistant", "content": [{"type": "text", "text": "Dear"}]}]
    assert await shown(endpoint, {"messages": parts, **GO_ON}) == told
    status, counted = await endpoint.post("/tokenize", {"messages": begun, **GO_ON})
    assert (status, counted["tokens"]) == (200, list(endpoint.source.requests[0].token_ids))

    trims = TEMPLATE.replace("(m.content or '')", "(m.content or '') | trim + '</s>'")
    assert trims != TEMPLATE
    trimming = Tokenizer.load(write_tokenizer(tmp_path, chat_template=trims))
    endpoint = await serve(TEXT, tokenizer=trimming)
    told = "<s><|user|>Greet the city.</s><|assistant|>Dear"
    assert await shown(endpoint, {"messages": begun, **GO_ON}) == told


@pytest.mark.parametrize(
    "body",
    [
        {"messages": ASK, "continue_final_message": True},
        {"messages": ASK, "continue_final_message": True, "add_generation_prompt": True},
        {"messages": [{"role": "assistant", "tool_calls": []}], **GO_ON},
    ],
)
async def test_what_cannot_go_on_is_named(serve: Any, body: dict[str, Any]) -> None:
    endpoint = await serve(TEXT)
    for path in ("/v1/chat/completions", "/tokenize"):
        status, answer = await endpoint.post(path, body)
        assert (status, answer["error"]["param"]) == (400, "continue_final_message")
    assert not endpoint.source.requests


async def test_a_template_that_hides_the_final_message(serve: Any, tmp_path: Path) -> None:
    hides = "{{ bos_token }}{{ messages[0].content }}"
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, chat_template=hides))
    endpoint = await serve(TEXT, tokenizer=tokenizer)
    begun = [*ASK, {"role": "assistant", "content": "Dear"}]
    status, answer = await endpoint.post("/v1/chat/completions", {"messages": begun, **GO_ON})
    assert (status, answer["error"]["param"]) == (400, "continue_final_message")


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"tools": [TOOL]}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": 5}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"grammar": "start: start"}}, "structured_outputs"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        (
            {"structured_outputs": {"json": {}}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"echo": True}, "echo"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": MAX_MODEL_LEN}, "messages"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    ],
)
async def test_what_is_refused_is_named(serve: Any, extra: Any, param: str) -> None:
    endpoint = await serve(TEXT)
    status, answer = await endpoint.post("/v1/chat/completions", {"messages": ASK, **extra})
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert param in answer["error"]["message"], "which is all that most clients show"
    assert endpoint.source.requests == []


@pytest.mark.parametrize(
    "extra",
    [
        {"response_format": {"type": "text"}},
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [], "tool_choice": "auto"},
        {"best_of": None, "suffix": None, "modalities": ["text"], "store": True},
        {"regex": None, "ebnf": None, "json_schema": None},
        {
            "structured_outputs": {
                "choice": ["a"],
                "structural_tag": None,
                "disable_fallback": False,
            }
        },
    ],
)
async def test_what_is_harmless_is_taken(serve: Any, extra: Any) -> None:
    endpoint = await serve(TEXT)
    status, answer = await endpoint.post("/v1/chat/completions", {"messages": ASK, **extra})
    assert status == 200, answer


async def test_tokenize_and_back(serve: Any) -> None:
    endpoint = await serve(TEXT)
    status, answer = await endpoint.post(
        "/tokenize", {"prompt": "Größe", "return_token_strs": True}
    )
    assert status == 200
    assert answer["tokens"] == endpoint.frontend.tokenizer.encode("Größe")
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == MAX_MODEL_LEN
    _, back = await endpoint.post("/detokenize", {"tokens": answer["tokens"]})
    assert back == {"prompt": "<s>Größe"}
    _, chat = await endpoint.post("/tokenize", {"messages": ASK})
    _, shown = await endpoint.post("/detokenize", {"tokens": chat["tokens"]})
    assert shown["prompt"] == "<s><|user|>Greet the city.<|assistant|>"
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": ASK}, "messages"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "", "messages": []}, "messages"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ):
        status, answer = await endpoint.post(path, body)
        assert (status, answer["error"]["param"]) == (400, param)


async def test_a_model_without_a_chat_template(serve: Any, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_text("{}")
    endpoint = await serve(TEXT, tokenizer=Tokenizer.load(folder))
    status, answer = await endpoint.post("/v1/chat/completions", {"messages": ASK})
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert "--chat-template" in answer["error"]["message"]


async def test_others_are_answered_while_ids_become_a_text(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, loop = await serve(TEXT), asyncio.get_running_loop()
    decode = endpoint.frontend.tokenizer.decode

    async def ask() -> int:
        async with endpoint.session.get("/version") as response:
            return int(response.status)

    def meanwhile(ids: list[int], **options: Any) -> str:
        assert asyncio.run_coroutine_threadsafe(ask(), loop).result(timeout=5) == 200
        return str(decode(ids, **options))

    monkeypatch.setattr(endpoint.frontend.tokenizer, "decode", meanwhile)
    status, _ = await endpoint.post("/detokenize", {"tokens": [5] * 1000})
    assert status == 200


async def test_a_long_prompt_is_encoded_beside_the_loop(serve: Any) -> None:
    endpoint = await serve(TEXT)
    text = "The quick brown fox. " * 2000
    status, answer = await endpoint.post("/tokenize", {"prompt": text})
    assert status == 200
    assert answer["tokens"] == endpoint.frontend.tokenizer.encode(text)
    status, answer = await endpoint.post("/v1/completions", {"prompt": text})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert str(MAX_MODEL_LEN) in answer["error"]["message"]


async def test_of_a_text_that_is_far_too_long_only_the_beginning_is_encoded(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, encode, lengths = await serve(TEXT), Tokenizer.encode, list[int]()

    def encode_and_note(self: Tokenizer, text: str, **how: Any) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, **how)

    monkeypatch.setattr(Tokenizer, "encode", encode_and_note)
    text = "The quick brown fox. " * 2000
    for path, prompt, param in (
        ("/v1/completions", {"prompt": text}, "prompt"),
        ("/v1/completions", {"prompt": ["a", text]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, "messages"),
    ):
        status, answer = await endpoint.post(path, prompt)
        assert (status, answer["error"]["param"]) == (400, param)
        assert answer["error"]["code"] == "context_length_exceeded"
        assert "the first 4096 alone have" in answer["error"]["message"]
        assert max(lengths) == 16 * MAX_MODEL_LEN
        status, _ = await endpoint.post(path, {**prompt, "truncate_prompt_tokens": 9})
        assert status == 200, "its end is wanted"
        assert max(lengths) >= len(text)
        lengths.clear()
    assert json.dumps(answer)

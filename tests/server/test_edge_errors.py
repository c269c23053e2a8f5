import asyncio
import contextlib
import functools
import gzip
import io
import json
import struct
import time
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import ErrorObject

from kvbaton.errors import ConfigError
from kvbaton.server.config import EndpointConfig
from kvbaton.server.frontend import FrontendConfig
from tests.support.scripted_source import MAX_MODEL_LEN, VOCAB
from tests.support.waiting import PATIENCE_S, eventually


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]"),
        ({"prompt": [VOCAB]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [10**400]}, "prompt"),
        ({"n": 10**400}, "n"),
        ({"n": -(10**400)}, "n"),
        ({"priority": 10**400}, "priority"),
        ({"top_k": 10**400}, "top_k"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"prompt": ["x"] * 300}, "prompt"),
        ({"prompt": [3] * MAX_MODEL_LEN}, "prompt"),
        ({"prompt": ["x"] * 200, "n": 100}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 0, "temperature": 2.1}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"max_tokens": MAX_MODEL_LEN}, "prompt"),
        ({"min_tokens": 99}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 99}, "prompt_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [5]}, "stop[0]"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [3, VOCAB]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [3] * (VOCAB + 1)}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**400]}, "allowed_token_ids"),
        ({"allowed_token_ids": "3"}, "allowed_token_ids"),
        ({"bad_words": "x"}, "bad_words"),
        ({"bad_words": ["x", " "]}, "bad_words"),
        ({"bad_words": ["x" * 257]}, "bad_words"),
        ({"bad_words": ["x"] * 1025}, "bad_words"),
        ({"bad_words": [3]}, "bad_words[0]"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": MAX_MODEL_LEN + 1}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 10**400}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -1, "max_tokens": MAX_MODEL_LEN}, "prompt"),
        ({"thinking_token_budget": 0}, "thinking_token_budget"),
        ({"guided_json": {}}, "guided_json"),
        ({"regex": "a"}, "regex"),
        ({"ebnf": 'root ::= "a"'}, "ebnf"),
        ({"json_schema": "{}"}, "json_schema"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": 1e9}, "timeout"),
        ({"priority": 2**40}, "priority"),
        ({"cache_salt": "x" * 5000}, "cache_salt"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"kv_transfer_params": 5}, "kv_transfer_params"),
    ],
)
async def test_what_is_wrong_is_named(serve: Any, extra: Any, param: str) -> None:
    endpoint = await serve()
    status, answer = await endpoint.post("/v1/completions", {"prompt": "x", **extra})
    error = answer["error"]
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
    assert error["message"]
    ErrorObject.model_validate(error)  # code is a text or null, which some clients insist on
    assert endpoint.source.requests == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b'{"x":' + b"[" * 100_000,
        b"NaN",
        b"null",
    ],
)
async def test_what_is_no_json_is_a_400(serve: Any, data: bytes) -> None:
    endpoint = await serve()
    async with endpoint.session.post("/v1/completions", data=data) as response:
        assert response.status == 400
        assert (await response.json())["error"]["message"]


async def test_a_body_may_begin_with_a_byte_order_mark(serve: Any) -> None:
    """As files do that Windows' PowerShell writes; Python's own parser skips it, too."""
    endpoint = await serve()
    data = '{"prompt": "x", "max_tokens": 1}'.encode("utf-8-sig")
    async with endpoint.session.post("/v1/completions", data=data) as response:
        assert response.status == 200, await response.text()


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        (MAX_MODEL_LEN - 2, f"exceed context limit: {MAX_MODEL_LEN - 2} + 5 > {MAX_MODEL_LEN}"),
        (MAX_MODEL_LEN, f"prompt is too long: {MAX_MODEL_LEN} tokens > {MAX_MODEL_LEN} maximum"),
    ],
)
async def test_clients_see_by_words_that_a_context_is_full(
    serve: Any, tokens: int, found: str
) -> None:
    """LiteLLM and agents by words of OpenAI, Claude Code by words of Anthropic."""
    endpoint = await serve()
    body = {"prompt": [3] * tokens, "max_tokens": 5}
    status, answer = await endpoint.post("/v1/completions", body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    told = answer["error"]["message"]
    assert f"this model's maximum context length is {MAX_MODEL_LEN} tokens" in told
    assert found in told


async def test_missing_fields_are_named(serve: Any) -> None:
    endpoint = await serve()
    for path, param in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
        status, answer = await endpoint.post(path, {})
        assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("head", "told"),
    [
        (b"GET /version HTTP/1.1\r\nHost: x\r\nAuthorization: " + b"s" * 9000, "8190 bytes"),
        (b"GET /" + b"s" * 9000 + b" HTTP/1.1\r\nHost: x", "8190 bytes"),
        (b"GET /version HTTP/1.1\r\nHost: x\r\nHost: y", "Duplicate 'Host'"),
        (b"SSH-2.0-OpenSSH_9.6", "no HTTP/1.1"),
    ],
    ids=("header", "path", "hosts", "ssh"),
)
async def test_a_head_that_can_not_be_read_is_an_error_like_others(
    serve: Any, head: bytes, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = await serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    with caplog.at_level("INFO"):
        writer.write(head + b"\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            answer = await reader.read()
    writer.close()
    answered, _, body = answer.partition(b"\r\n\r\n")
    assert answered.split()[1] == b"400"
    assert b"Content-Type: application/json" in answered
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    assert told in error["message"]
    assert "ssss" not in error["message"] + caplog.text, "it may be a secret"


async def test_unknown_places_answer_in_the_same_shape(serve: Any) -> None:
    endpoint = await serve()
    async with endpoint.session.get("/nowhere") as response:
        assert response.status == 404
        error = (await response.json())["error"]
        assert (error["type"], error["code"]) == ("not_found_error", None)
        assert error["message"].startswith("GET /nowhere is not served here")
    async with endpoint.session.get("/v1/completions") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert (await response.json())["error"]["message"] == (
            "GET /v1/completions is not served here; GET /openapi.json tells what is"
        )
    async with endpoint.session.get("/v1/models/other") as response:
        assert response.status == 404


async def test_a_long_body_is_a_413(serve: Any) -> None:
    endpoint = await serve(max_body_bytes=1000)
    status, answer = await endpoint.post("/v1/completions", {"prompt": "x" * 2000})
    assert status == 413
    assert "1000" in answer["error"]["message"]


async def test_a_body_that_does_not_come_is_a_408(serve: Any) -> None:
    endpoint = await serve(body_timeout_s=0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
    status = await asyncio.wait_for(reader.readline(), PATIENCE_S)
    assert b" 408 " in status
    writer.close()


async def test_a_body_that_is_announced_as_too_long_is_not_waited_for(serve: Any) -> None:
    endpoint = await serve(max_body_bytes=1000)
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n")
    status = await asyncio.wait_for(reader.readline(), PATIENCE_S)
    assert b" 413 " in status
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        (b"Content-Encoding: gzip", b'{"prompt": "x"}', b"400"),
        (b"Content-Encoding: deflate", b"x" * 70_000, b"400"),
        (b"Expect: a-miracle", b"{}", b"417"),
        (b"Transfer-Encoding: gzip", b"{}", b"400"),
    ],
)
async def test_what_http_does_not_allow_is_no_failure_of_ours(
    serve: Any, caplog: pytest.LogCaptureFixture, head: bytes, body: bytes, status: bytes
) -> None:
    endpoint = await serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    length = b"Content-Length: %d" % len(body)
    lines = (b"POST /v1/completions HTTP/1.1", b"Host: x", head, length, b"", body)
    writer.write(b"\r\n".join(lines))
    answer = await asyncio.wait_for(reader.readline(), PATIENCE_S)
    assert answer.split()[1] == status
    writer.close()
    await writer.wait_closed()
    status_after, _ = await endpoint.post("/v1/completions", {"prompt": "x"})
    assert status_after == 200
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == []


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("identity", bytes)],
)
async def test_a_body_may_be_compressed(serve: Any, encoding: str, pack: Any) -> None:
    endpoint = await serve(max_body_bytes=1000)
    headers = {"Content-Encoding": encoding}
    for blanks, wanted in ((900, 200), (1000, 413)):
        data = pack(b'{"prompt": "Hi", "max_tokens": 1' + b" " * blanks + b"}")
        async with endpoint.session.post("/v1/completions", data=data, headers=headers) as response:
            assert response.status == wanted
    headers = {"Content-Encoding": "br"}
    async with endpoint.session.post("/v1/completions", data=b"{}", headers=headers) as response:
        assert response.status == 415
        assert "gzip" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    "rest", [gzip.compress(b', "max_tokens": 1}', mtime=0), b"?"], ids=["a member", "no member"]
)
async def test_what_follows_a_compressed_body_is_not_left_out(serve: Any, rest: bytes) -> None:
    endpoint = await serve()
    data = gzip.compress(b'{"prompt": "Hi"' + b"}" * (rest == b"?")) + rest
    headers = {"Content-Encoding": "gzip"}
    async with endpoint.session.post("/v1/completions", data=data, headers=headers) as response:
        assert response.status == 400
        assert "follows its end" in (await response.json())["error"]["message"]


@functools.cache
def bomb() -> bytes:
    """A gibibyte of blanks in a megabyte: its parts are equal, so that one is packed."""
    blanks, crc = b" " * (1 << 22), 0
    for _ in range(256):
        crc = zlib.crc32(blanks, crc)
    packer = zlib.compressobj(9, wbits=-15)
    part = packer.compress(blanks) + packer.flush(zlib.Z_FULL_FLUSH)
    head = b"\x1f\x8b\x08" + bytes(6) + b"\xff"
    whole = b"".join([head, part * 256, packer.flush(), struct.pack("<II", crc, 1 << 30)])
    assert zlib.decompressobj(wbits=31).decompress(whole, 3 << 22) == blanks * 3
    return whole


@pytest.mark.parametrize("key", ["right", "wrong"])
async def test_a_small_body_does_not_unpack_to_a_large_one(serve: Any, key: str) -> None:
    """Whoever sent it had a megabyte cost seconds, in which nobody else was answered."""
    endpoint = await serve(api_keys=("right",))
    body = bomb()
    headers = {"Content-Encoding": "gzip", "Authorization": f"Bearer {key}"}
    began = time.process_time()
    async with endpoint.session.post("/v1/completions", data=body, headers=headers) as response:
        assert response.status == (413 if key == "right" else 401)
    await endpoint.post("/v1/completions", {"prompt": "x"})  # once it was thrown away
    assert time.process_time() - began < 0.5


async def test_messages_show_numbers_as_they_were_sent(serve: Any) -> None:
    endpoint = await serve()
    for extra, told in (
        ({"top_k": -2}, "top_k must be in [0, 2147483647], not -2"),
        ({"prompt": [5_000_000]}, "it spans 5000000 to 5000000"),
        ({"timeout": 1e9}, "timeout must be in (0, 3600], not 1e+09"),
    ):
        _, answer = await endpoint.post("/v1/completions", {"prompt": "x", **extra})
        assert told in answer["error"]["message"]


async def test_long_bodies_that_come_slowly_leave_room_for_others(serve: Any) -> None:
    endpoint = await serve(api_keys=("flood", "other"), max_bodies_bytes=9 << 20)
    more, body = asyncio.Event(), json.dumps({"prompt": "x", "user": "y" * (2 << 20)}).encode()
    held = endpoint.frontend.long_bodies

    async def slowly() -> AsyncIterator[bytes]:
        yield body[: 3 << 19]
        await more.wait()
        yield body[3 << 19 :]

    async def send(key: str, data: Any, **headers: str) -> int:
        headers |= {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        url = "/v1/completions"
        async with endpoint.session.post(url, data=data, headers=headers) as response:
            status: int = response.status
            return status

    length = {"Content-Length": str(len(body))}
    slow = [asyncio.create_task(send("flood", slowly(), **length)) for _ in range(3)]
    await eventually(lambda: endpoint.frontend.metrics.in_flight == 3)
    assert await send("flood", b'{"prompt": "x"}') == 200, "a short one is no burden"
    assert await send("other", io.BytesIO(body)) == 200, "a tenant has half of it at most"
    assert held.total() == 2 * len(body), "the third waits"
    more.set()
    assert await asyncio.gather(*slow) == [200, 200, 200]
    assert not held


async def test_bodies_of_which_little_has_come_hold_nobody_up(serve: Any) -> None:
    """In chunks, or as long as is announced: no room is taken for what may never come."""
    endpoint = await serve()
    config = endpoint.frontend.config
    count = config.max_bodies_bytes // config.max_body_bytes + 1
    lengths = ("Transfer-Encoding: chunked", f"Content-Length: {config.max_body_bytes}")
    async with contextlib.AsyncExitStack() as stack:
        for length in lengths:
            for _ in range(count):
                _, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
                stack.callback(writer.close)
                head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n1\r\n{{"
                writer.write(head.encode())
        await eventually(lambda: endpoint.frontend.metrics.in_flight == 2 * count)
        async with asyncio.timeout(PATIENCE_S / 2):  # sooner than those are given up
            body = io.BytesIO(json.dumps({"prompt": "x", "user": "y" * (2 << 20)}).encode())
            async with endpoint.session.post("/v1/completions", data=body) as response:
                assert response.status == 200


async def test_a_body_in_chunks_is_bounded(serve: Any) -> None:
    endpoint = await serve(max_body_bytes=3 << 20)

    async def chunks(end: int) -> AsyncIterator[bytes]:
        yield b'{"prompt": "x", "user": "'
        for _ in range(end):
            yield b"y" * (1 << 19)
        yield b'"}'

    for halves, expected in ((1, 200), (5, 200), (6, 413), (60, 413)):
        async with endpoint.session.post("/v1/completions", data=chunks(halves)) as response:
            assert response.status == expected
    assert not endpoint.frontend.long_bodies


async def test_a_long_body_that_finds_no_room_in_time_is_a_429(serve: Any) -> None:
    endpoint = await serve(max_bodies_bytes=9 << 20, body_timeout_s=0.1)
    endpoint.frontend.long_bodies["others"] = 9 << 20
    body = io.BytesIO(json.dumps({"prompt": "x", "user": "y" * (2 << 20)}).encode())
    async with endpoint.session.post("/v1/completions", data=body) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "1")
        message = (await response.json())["error"]["message"]
    assert "bodies of more than 1 MiB are on their way" in message
    assert set(endpoint.frontend.long_bodies) == {"others"}


async def test_api_keys(serve: Any) -> None:
    endpoint = await serve(api_keys=("right",))
    paths = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/inference/v1/generate")
    for value in (None, "Bearer wrong", "Bearer ", "right", "Basic right", "Bearer r\xefght"):
        headers = {} if value is None else {"Authorization": value}
        for path in paths:
            async with endpoint.session.post(path, data=b"{", headers=headers) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert (await response.json())["error"]["code"] == "invalid_api_key"
    good = {"Authorization": "bearer right"}
    status, _ = await endpoint.post("/v1/completions", {"prompt": "x"}, headers=good)
    assert status == 200
    async with endpoint.session.get("/version") as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("flags", "least"),
    [
        ({"api_keys": ("a",)}, -5), ({"api_keys": ("a", "b")}, 0), ({"min_priority": -2}, -2),
        ({"api_keys": ("a", "b"), "min_priority": -3}, -3),
    ],
)  # fmt: skip
async def test_where_tenants_have_keys_none_goes_before_all_others(
    flags: dict[str, Any], least: int, serve: Any, tmp_path: Path
) -> None:
    config = FrontendConfig.of(EndpointConfig(**flags), str(tmp_path), "tiny")
    endpoint = await serve(min_priority=config.min_priority)
    for priority, allowed in ((least, True), (least - 1, least == -5)):
        status, answer = await endpoint.post(
            "/v1/completions", {"prompt": "x", "priority": priority}
        )
        assert status == (200 if allowed else 400), answer
        assert allowed or answer["error"]["param"] == "priority"
    with pytest.raises(ConfigError, match="--min-priority: 1 is above 0"):
        EndpointConfig(min_priority=1)


async def test_requests_of_one_key_are_one_tenants(serve: Any) -> None:
    endpoint = await serve(api_keys=("one", "two"))
    for key, path, body in (
        ("one", "/v1/completions", {"prompt": "x"}),
        ("two", "/v1/completions", {"prompt": "x"}),
        ("one", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        status, _ = await endpoint.post(path, body, headers={"Authorization": f"Bearer {key}"})
        assert status == 200
    first, other, again = (request.tenant for request in endpoint.source.requests)
    assert first == again != other
    assert "one" not in first
    open_to_all = await serve()
    await open_to_all.post("/v1/completions", {"prompt": "x"}, headers={"Authorization": "Bearer"})
    assert open_to_all.source.requests[-1].tenant == ""


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [("abc-1:2", "abc-1:2"), ("a b\t\xe9c", "abc"), ("x" * 500, "x" * 128)],
)
async def test_request_ids_are_honoured_cleaned_and_echoed(
    serve: Any, sent: str, echoed: str
) -> None:
    endpoint = await serve()
    for streamed in (True, False):
        body = {"prompt": "x", "stream": streamed, "request_id": "in-the-body"}
        headers = {"X-Request-Id": sent}
        async with endpoint.session.post("/v1/completions", json=body, headers=headers) as response:
            assert response.headers["X-Request-Id"] == echoed
            assert f'"id":"cmpl-{echoed}"' in await response.text()
    first, second = (request.request_id for request in endpoint.source.requests)
    assert first != second, "a client may repeat an id"
    async with endpoint.session.post("/v1/completions", json=body) as response:
        assert response.headers["X-Request-Id"] == "in-the-body"
    async with endpoint.session.get("/nowhere") as response:
        assert len(response.headers["X-Request-Id"]) == 32


async def test_requests_are_counted_by_route(serve: Any) -> None:
    endpoint = await serve()
    await endpoint.post("/v1/completions", {"prompt": "x"})
    await endpoint.post("/v1/completions", {"prompt": 7})
    await endpoint.post("/no/such/place", {})
    value = endpoint.frontend.metrics.registry.get_sample_value

    def count(path: str, status: str, method: str = "POST") -> float | None:
        labels = {"method": method, "path": path, "status": status}
        got: float | None = value("kvbaton_http_requests_total", labels)
        return got

    assert count("/v1/completions", "200") == 1
    assert count("/v1/completions", "400") == 1
    assert count("unmatched", "404", "other") == 1
    assert value("kvbaton_time_to_first_token_seconds_count") == 1
    assert value("kvbaton_e2e_request_latency_seconds_count") == 1
    tokens = len(endpoint.frontend.tokenizer.encode("Hello wide world.", add_special_tokens=False))
    assert value("kvbaton_inter_token_latency_seconds_count") == min(tokens, 15)
    assert value("kvbaton_http_requests_in_flight") == 0


FIELDS = [
    "prompt", "messages", "model", "stream", "stream_options", "n", "max_tokens", "temperature",
    "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "logprobs",
    "top_logprobs", "prompt_logprobs", "echo", "priority", "cache_salt", "request_id", "timeout",
    "kv_transfer_params", "tools", "tool_choice", "response_format", "chat_template_kwargs",
    "return_token_ids", "add_generation_prompt", "include_stop_str_in_output", "best_of",
    "skip_special_tokens", "max_completion_tokens",
]  # fmt: skip
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-5, 300)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["user", "none", "text", "a", "{{ x }}", "<s>"])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "include_usage", "1", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
plausible = st.fixed_dictionaries(
    {
        "prompt": st.text(min_size=1, max_size=20)
        | st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.text(max_size=5), "content": st.text(max_size=9)}),
            max_size=3,
        ),
    },
    optional={
        "stream": st.booleans(),
        "n": st.integers(1, 3),
        "logprobs": st.integers(0, 3) | st.booleans(),
        "echo": st.booleans(),
        "stop": st.lists(st.text(min_size=1, max_size=3), max_size=3),
        "min_tokens": st.integers(0, 5),
        "max_tokens": st.integers(0, 30),
    },
)
odd = st.dictionaries(st.sampled_from(FIELDS), values, max_size=3)


@pytest.fixture
async def fuzzed(serve: Any) -> Any:
    endpoint = await serve("Hello é wide world.")
    yield endpoint
    assert len(endpoint.source.requests) > 20, "some bodies must be good ones"


@settings(
    deadline=None,
    max_examples=250,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(base=plausible, strange=odd, chat=st.booleans())
async def test_no_body_is_our_fault(fuzzed: Any, base: Any, strange: Any, chat: bool) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = {**base, **strange}
    async with asyncio.timeout(PATIENCE_S):
        async with fuzzed.session.post(path, data=json.dumps(body)) as response:
            text = await response.text()
    assert response.status in (200, 400, 404), (body, text)
    if response.status != 200:
        assert json.loads(text)["error"]["message"]
    elif body.get("stream"):
        assert text.endswith("data: [DONE]\n\n"), (body, text)
    assert fuzzed.source.running == 0

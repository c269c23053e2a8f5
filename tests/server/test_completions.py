import asyncio
import json
import socket
from datetime import datetime
from typing import Any

import openai
import pytest
from aiohttp import ClientSession

from kvbaton.errors import EngineDeadError, RequestError
from kvbaton.text.tokenizer import Tokenizer
from tests.support.scripted_source import EOS, MAX_MODEL_LEN
from tests.support.waiting import PATIENCE_S

TEXT = "Hello wide world."


async def stream(endpoint: Any, path: str, body: dict[str, Any]) -> list[Any]:
    """Events of a stream; the closing ``[DONE]`` as that text."""
    async with endpoint.session.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in (await response.text()).split("\n\n")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines if line]


async def test_fields_of_several_prompts_are_read_once(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,024 bad words for each of 256 prompts would hold up all others for many seconds."""
    endpoint = await serve()
    encode, encoded = Tokenizer.encode, list[str]()

    def counted(self: Tokenizer, text: str, **how: Any) -> list[int]:
        encoded.append(text)
        return encode(self, text, **how)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    asked = {"prompt": ["a", "b", "c"], "bad_words": ["wide"]}
    for seed in (None, 7):
        encoded.clear()
        endpoint.source.requests.clear()
        status, _ = await endpoint.post("/v1/completions", {**asked, "seed": seed})
        assert status == 200
        assert encoded.count("wide") == encoded.count(" wide") == 1
        params = [request.params for request in endpoint.source.requests]
        assert all(one.bad_words_token_ids for one in params)
        assert len({one.seed for one in params}) == (3 if seed is None else 1)


async def test_a_whole_completion(serve: Any) -> None:
    endpoint = await serve(TEXT)
    status, answer = await endpoint.post(
        "/v1/completions", {"model": "tiny", "prompt": "The quick", "max_tokens": 100}
    )
    prompt = endpoint.frontend.tokenizer.encode("The quick")
    length = len(endpoint.frontend.tokenizer.encode(TEXT, add_special_tokens=False)) + 1
    assert status == 200
    assert answer["choices"] == [
        {
            "index": 0,
            "text": TEXT,
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": length,
        "total_tokens": len(prompt) + length,
        "prompt_tokens_details": {"cached_tokens": min(4, len(prompt))},
    }
    assert endpoint.source.requests[0].token_ids.tolist() == prompt
    assert endpoint.source.cancelled == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_each_token_is_a_chunk_also_where_it_adds_no_text(serve: Any, path: str) -> None:
    """Load generators count chunks; bytes of one character are several tokens."""
    endpoint = await serve("東京 👩‍🚀 ends")
    asked = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    chunks = await stream(endpoint, path, {**asked, "max_tokens": 100, "stop": ["nothing"]})
    count = len(endpoint.frontend.tokenizer.encode(endpoint.source.text, add_special_tokens=False))
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert len(choices) == count + 1, "the end token is one, too"
    texts = [choice["delta"]["content"] if "chat" in path else choice["text"] for choice in choices]
    assert "".join(texts) == endpoint.source.text
    assert "" in texts[:-1]


@pytest.mark.parametrize("stops", [None, ["wide"], ["nowhere", "e w"]])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("echo", [False, True])
async def test_streamed_is_the_same_as_whole(
    serve: Any, stops: list[str] | None, logprobs: int | None, echo: bool
) -> None:
    endpoint = await serve(TEXT)
    body = {
        "prompt": ["The quick", "A baton é"],
        "n": 2,
        "max_tokens": 50,
        "stop": stops,
        "logprobs": logprobs,
        "echo": echo,
        "seed": 1,
    }
    _, whole = await endpoint.post("/v1/completions", body)
    chunks = await stream(
        endpoint, "/v1/completions", {**body, "stream_options": {"include_usage": True}}
    )
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [c for chunk in chunks[:-2] for c in chunk["choices"]]
        mine = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        if logprobs is not None:
            for key, values in choice["logprobs"].items():
                assert [v for part in mine for v in part["logprobs"][key]] == values
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert whole["choices"][3]["text"].startswith("A baton é" if echo else "Hello")


async def test_logprobs_and_their_offsets(serve: Any) -> None:
    endpoint = await serve("dog")
    body = {"prompt": [5, 6, 7], "max_tokens": 9, "logprobs": 3, "echo": True}
    _, answer = await endpoint.post("/v1/completions", body)
    scores = answer["choices"][0]["logprobs"]
    assert scores["token_logprobs"][0] is None
    assert scores["top_logprobs"][0] is None
    assert scores["token_logprobs"][1:] == [-0.5] * (len(scores["tokens"]) - 1)
    assert -9999.0 in scores["top_logprobs"][1].values()
    offsets = [sum(map(len, scores["tokens"][:i])) for i in range(len(scores["tokens"]))]
    assert scores["text_offset"] == offsets


async def test_scoring_a_prompt_generates_nothing(serve: Any) -> None:
    endpoint = await serve(TEXT)
    body = {"prompt": "A baton", "max_tokens": 0, "echo": True, "logprobs": 1}
    _, answer = await endpoint.post("/v1/completions", body)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("A baton", "length")
    assert answer["usage"]["completion_tokens"] == 0
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]


async def test_a_stop_string_cancels_the_rest(serve: Any) -> None:
    endpoint = await serve("one two three four five six seven")
    body = {"prompt": "x", "max_tokens": 100, "stop": "three"}
    _, answer = await endpoint.post("/v1/completions", body)
    choice = answer["choices"][0]
    assert choice["text"] == "one two "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "three")
    assert len(endpoint.source.cancelled) == 1
    body = {**body, "include_stop_str_in_output": True}
    _, answer = await endpoint.post("/v1/completions", body)
    assert answer["choices"][0]["text"] == "one two three"


async def test_extensions_reach_the_source(serve: Any) -> None:
    endpoint = await serve(TEXT)
    body = {
        "prompt": [1, 2, 3],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": -1,
        "frequency_penalty": 1,
        "logit_bias": {"7": -100},
        "seed": -5,
        "min_tokens": 2,
        "max_tokens": 7,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "priority": -3,
        "cache_salt": "me",
        "timeout": 5,
        "n": 2,
        "an_unknown_field": {"x": 1},
    }
    status, _ = await endpoint.post("/v1/completions", body)
    request = endpoint.source.requests[0]
    assert status == 200
    assert (request.priority, request.cache_salt, request.deadline_s) == (-3, "me", 5)
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 0, 0.1)
    assert (params.repetition_penalty, params.presence_penalty) == (1.2, -1)
    assert (params.frequency_penalty, params.logit_bias) == (1, {7: -100.0})
    assert (params.seed, params.min_tokens, params.max_tokens) == (2**63 - 5, 2, 7)
    assert (params.stop_token_ids, params.ignore_eos, params.n) == ((9,), True, 2)


async def test_no_share_of_the_probability_is_the_likeliest_token(serve: Any) -> None:
    """OpenAI's and Anthropic's APIs allow a `top_p` of 0; engines take none."""
    endpoint = await serve(TEXT)
    for given in (0, -0.0):
        body = {"prompt": "x", "temperature": 0.7, "top_p": given}
        status, answer = await endpoint.post("/v1/completions", body)
        assert status == 200, answer
        params = endpoint.source.requests[-1].params
        assert (params.temperature, params.top_p) == (0, 1)


async def test_a_missing_seed_is_minted(serve: Any) -> None:
    endpoint = await serve(TEXT)
    for _ in range(2):
        await endpoint.post("/v1/completions", {"prompt": "x"})
    first, second = (request.params.seed for request in endpoint.source.requests)
    assert first != second
    assert 0 <= first < 2**63


async def test_token_ids_are_returned_on_demand(serve: Any) -> None:
    endpoint = await serve(TEXT)
    body = {"prompt": [5, 6], "max_tokens": 99, "return_token_ids": True}
    _, answer = await endpoint.post("/v1/completions", body)
    choice = answer["choices"][0]
    assert choice["prompt_token_ids"] == [5, 6]
    tokens = endpoint.frontend.tokenizer.encode(TEXT, add_special_tokens=False)
    assert choice["token_ids"] == [*tokens, EOS]
    chunks = await stream(endpoint, "/v1/completions", body)
    parts = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert [t for part in parts for t in part["token_ids"]] == choice["token_ids"]


async def test_tokens_may_be_named_by_id(serve: Any) -> None:
    endpoint = await serve(TEXT)
    more = {"max_tokens": 99, "return_token_ids": True, "return_tokens_as_token_ids": True}
    body = {"prompt": [5, 6], "logprobs": 2, "echo": True, **more}
    _, answer = await endpoint.post("/v1/completions", body)
    (choice,) = answer["choices"]
    names = [f"token_id:{token}" for token in (5, 6, *choice["token_ids"])]
    scores = choice["logprobs"]
    assert scores["tokens"] == names
    assert all(name in top for name, top in zip(names[1:], scores["top_logprobs"][1:], strict=True))
    plain = await endpoint.post("/v1/completions", body | {"return_tokens_as_token_ids": False})
    assert scores["text_offset"] == plain[1]["choices"][0]["logprobs"]["text_offset"]
    chunks = await stream(endpoint, "/v1/completions", body)
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1]]
    assert [offset for part in told for offset in part["text_offset"]] == scores["text_offset"]
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
    _, answer = await endpoint.post("/v1/chat/completions", chat | more)
    (choice,) = answer["choices"]
    entries = choice["logprobs"]["content"]
    assert [e["token"] for e in entries] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(top["token"].startswith("token_id:") for e in entries for top in e["top_logprobs"])
    assert bytes(entries[0]["bytes"]) == endpoint.frontend.tokenizer.token_bytes(
        choice["token_ids"][0]
    )


async def test_prompt_logprobs_in_the_shape_of_vllm(serve: Any) -> None:
    endpoint = await serve(TEXT)
    body = {"prompt": [5, 6], "prompt_logprobs": 1}
    _, answer = await endpoint.post("/v1/completions", body)
    first, second = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    decoded = endpoint.frontend.tokenizer.token_text(6)
    assert second["6"] == {"logprob": -0.5, "rank": 1, "decoded_token": decoded}
    status, answer = await endpoint.post("/v1/completions", {**body, "stream": True})
    assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")


async def test_usage_with_every_chunk(serve: Any) -> None:
    endpoint = await serve(TEXT)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(endpoint, "/v1/completions", {"prompt": "x", "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


async def test_the_openai_client(serve: Any) -> None:
    endpoint = await serve(TEXT, api_keys=("k1", "k2"))
    async with openai.AsyncOpenAI(
        base_url=f"{endpoint.url}/v1", api_key="k2", max_retries=0
    ) as client:
        whole = await client.completions.create(
            model="tiny", prompt="x", max_tokens=50, logprobs=2, extra_body={"top_k": 5}
        )
        assert whole.choices[0].text == TEXT
        assert whole.choices[0].logprobs is not None
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        chunks = await client.completions.create(
            model="tiny", prompt="x", max_tokens=50, stream=True
        )
        assert "".join([chunk.choices[0].text async for chunk in chunks]) == TEXT
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
            await client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="tiny", prompt="x", temperature=9)
        assert caught.value.param == "temperature"


async def test_an_error_after_the_first_token_is_an_event(serve: Any) -> None:
    endpoint = await serve(TEXT)
    endpoint.source.failure = EngineDeadError("it fell over")
    endpoint.source.fail_at = 2
    events = await stream(endpoint, "/v1/completions", {"prompt": "x"})
    assert events[-1]["error"]["message"] == "the engine is down: it fell over"
    assert events[0]["choices"][0]["text"]
    assert "[DONE]" not in events
    async with openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="x") as client:
        chunks = await client.completions.create(model="tiny", prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="it fell over"):
            [chunk async for chunk in chunks]


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (EngineDeadError("gone"), 503, "engine_dead"),
        (RequestError("full", status=429, code="overloaded"), 429, "overloaded"),
        (RequestError("no", param="prompt"), 400, None),
        (ZeroDivisionError("a bug"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("streamed", [True, False])
async def test_an_error_before_the_first_token_is_a_status(
    serve: Any, failure: Exception, status: int, code: str | None, streamed: bool
) -> None:
    endpoint = await serve(TEXT)
    endpoint.source.failure = failure
    body = {"prompt": "x", "stream": streamed}
    async with endpoint.session.post("/v1/completions", json=body) as response:
        answer = await response.json()
        assert (response.status, answer["error"]["code"]) == (status, code)
        assert ("Retry-After" in response.headers) == (status in (429, 503))
    assert answer["error"]["message"]
    assert "a bug" not in answer["error"]["message"], "internals stay inside"


@pytest.mark.parametrize("end", ["abort", "error"])
async def test_what_did_not_complete_is_no_200(serve: Any, end: str) -> None:
    endpoint = await serve(TEXT)
    endpoint.source.end = end
    endpoint.source.final = {"error": "KV did not arrive"}
    status, answer = await endpoint.post("/v1/completions", {"prompt": "x", "max_tokens": 99})
    assert status == 503
    assert "KV did not arrive" in answer["error"]["message"]


async def test_an_end_by_the_deadline_is_a_timeout(serve: Any) -> None:
    endpoint = await serve(TEXT)
    endpoint.source.end = "abort"

    async def outlast(index: int) -> None:
        """The request's time runs since it was read, and that was before this is called."""
        clock = asyncio.get_running_loop().time
        asked = clock()
        while not index and clock() < asked + 0.02:
            await asyncio.sleep(0)

    endpoint.source.gate = outlast
    body = {"prompt": "x", "max_tokens": 99, "timeout": 0.01}
    status, answer = await endpoint.post("/v1/completions", body)
    assert (status, answer["error"]["code"]) == (504, "timeout")


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("stuck_at", [0, 1])
async def test_a_source_that_overstays_is_closed(serve: Any, streamed: bool, stuck_at: int) -> None:
    endpoint = await serve(TEXT, deadline_grace_s=0.05)

    async def stick(index: int) -> None:
        if index == stuck_at:
            await asyncio.Event().wait()

    endpoint.source.gate = stick
    body = {"prompt": "x", "timeout": 0.01, "stream": streamed}
    async with endpoint.session.post("/v1/completions", json=body) as response:
        text = await response.text()
    begun = streamed and stuck_at == 1
    assert response.status == (200 if begun else 504)
    assert '"code":"timeout"' in text
    assert text.count("HTTP/1.1") == 0
    assert endpoint.source.running == 0


async def open_narrow(endpoint: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection through which little fits that nobody reads."""
    narrow, small = socket.socket(), 1 << 15
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, small)
    narrow.setblocking(False)
    await asyncio.get_running_loop().sock_connect(narrow, ("127.0.0.1", endpoint.port))
    async with asyncio.timeout(PATIENCE_S):
        while not endpoint.runner.server.connections:
            await asyncio.sleep(0.001)
    (server_side,) = endpoint.runner.server.connections
    peer = server_side.transport.get_extra_info("socket")
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, small)
    return await asyncio.open_connection(sock=narrow, limit=1)


async def test_a_client_that_never_reads_is_hung_up_on(serve: Any) -> None:
    endpoint = await serve(TEXT, deadline_grace_s=0.05)
    endpoint.source.script = [5] * 200
    body = {"prompt": "x", "stream": True, "max_tokens": 200, "logprobs": 20, "n": 100}
    data = json.dumps({**body, "timeout": 1.0}).encode()  # more than fits is made by then
    _, writer = await open_narrow(endpoint)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await asyncio.wait_for(endpoint.source.cancellation.wait(), PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        while endpoint.runner.server.connections:  # until the endpoint has hung up
            await asyncio.sleep(0.01)
    writer.transport.abort()
    await asyncio.sleep(0)


async def test_one_failing_prompt_cancels_the_others(serve: Any) -> None:
    endpoint = await serve(TEXT)
    source = endpoint.source
    entered = asyncio.Event()

    async def second_fails(index: int) -> None:
        if len(source.requests) == 2 and not entered.is_set():
            entered.set()
            raise RequestError("the second is refused", status=429)
        if index == 1:
            await asyncio.Event().wait()

    source.gate = second_fails
    status, _ = await endpoint.post("/v1/completions", {"prompt": ["a", "b"]})
    assert status == 429
    assert source.running == 0


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("prompts", ["one", ["one", "two"]])
async def test_a_client_that_goes_away_cancels(serve: Any, streamed: bool, prompts: Any) -> None:
    endpoint = await serve(TEXT)
    waiting = asyncio.Event()

    async def hold(index: int) -> None:
        if index == 1:
            waiting.set()
            await asyncio.Event().wait()

    endpoint.source.gate = hold
    body = {"prompt": prompts, "stream": streamed}
    async with ClientSession(endpoint.url) as session:
        post = asyncio.ensure_future(session.post("/v1/completions", json=body))
        await asyncio.wait_for(waiting.wait(), PATIENCE_S)
        if streamed:
            (await post).close()
        else:
            post.cancel()
        await asyncio.gather(post, return_exceptions=True)
    async with asyncio.timeout(PATIENCE_S):
        while endpoint.source.running:
            await endpoint.source.cancellation.wait()
            endpoint.source.cancellation.clear()
    assert len(endpoint.source.cancelled) == (1 if prompts == "one" else 2)


async def test_a_reader_that_is_too_slow_loses_its_request(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbaton.engine.outputs.MAX_BEHIND", 1000)
    endpoint = await serve(TEXT)
    endpoint.source.script = [5] * 200
    body = {"prompt": "x", "stream": True, "max_tokens": 200, "logprobs": 20, "n": 100}
    reader, writer = await open_narrow(endpoint)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await asyncio.wait_for(endpoint.source.cancellation.wait(), PATIENCE_S)
    told = b""
    async with asyncio.timeout(PATIENCE_S):
        while b'"code":"too_slow"' not in told:
            some = await reader.read(1 << 16)
            assert some, "hung up without a reason"
            told += some
    assert told.count(b'"text"') < 100 * 200
    writer.transport.abort()
    await asyncio.sleep(0)


async def test_the_last_token_leaves_with_the_end(serve: Any) -> None:
    endpoint = await serve()
    body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
    async with endpoint.session.post("/v1/completions", json=body) as response:
        parts = [part async for part in response.content.iter_chunks()]
    chunks, whole = list[bytes](), b""
    for data, ends_chunk in parts:
        whole += data
        if ends_chunk:
            chunks.append(whole)
            whole = b""
    token, usage, end = chunks[-1].removesuffix(b"\n\n").split(b"\n\n")
    assert b'"finish_reason":"' in token
    assert b'"completion_tokens":' in usage
    assert end == b"data: [DONE]"


async def test_a_model_may_have_several_names(serve: Any) -> None:
    endpoint = await serve(aliases=("other", "org/name"))
    for name in ("tiny", "other", "org/name"):
        body = {"model": name, "prompt": "Hi", "max_tokens": 1}
        status, answer = await endpoint.post("/v1/completions", body)
        assert (status, answer["model"]) == (200, "tiny")
        async with endpoint.session.get(f"/v1/models/{name}") as response:
            assert (await response.json())["id"] == name
    async with endpoint.session.get("/v1/models") as response:
        found = await response.json()
    cards = found["data"]
    assert [card["id"] for card in cards] == ["tiny", "other", "org/name"]
    # What Anthropic's SDK reads of models, and of a list that comes in pages.
    assert (found["has_more"], found["first_id"], found["last_id"]) == (False, "tiny", "org/name")
    for card in cards:
        assert (card["type"], card["display_name"]) == ("model", card["id"])
        assert datetime.fromisoformat(card["created_at"]).timestamp() == card["created"]
    status, answer = await endpoint.post("/v1/completions", {**body, "model": "fourth"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(("keep", "max_tokens"), [(3, 7), (200, 7), (-1, 7), (-1, 250)])
async def test_the_last_tokens_of_long_prompts_are_kept(
    serve: Any, keep: int, max_tokens: int
) -> None:
    endpoint = await serve(TEXT)
    ids = [n % 390 + 4 for n in range(300)]
    fields = {"truncate_prompt_tokens": keep, "max_tokens": max_tokens, "return_token_ids": True}
    told = {"prompt": [ids, ids[:2]], **fields, "echo": True}
    status, answer = await endpoint.post("/v1/completions", told)
    assert status == 200, answer
    kept = ids[-(MAX_MODEL_LEN - max_tokens if keep == -1 else keep) :]
    assert [request.token_ids.tolist() for request in endpoint.source.requests] == [kept, ids[:2]]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [kept, ids[:2]]
    assert answer["choices"][0]["text"].startswith(endpoint.frontend.tokenizer.decode(kept))
    assert answer["usage"]["prompt_tokens"] == len(kept) + 2


async def test_chats_are_truncated_too(serve: Any) -> None:
    endpoint = await serve(TEXT)
    told = {"messages": [{"role": "user", "content": "The quick brown fox. " * 60}]}
    assert (await endpoint.post("/v1/chat/completions", told))[0] == 400
    for fields, length in (
        ({"truncate_prompt_tokens": 5}, 5),
        ({"truncate_prompt_tokens": -1, "max_tokens": 20}, MAX_MODEL_LEN - 20),
        ({"truncate_prompt_tokens": -1, "max_completion_tokens": 30}, MAX_MODEL_LEN - 30),
        ({"truncate_prompt_tokens": -1}, MAX_MODEL_LEN - 1),
    ):
        status, answer = await endpoint.post("/v1/chat/completions", {**told, **fields})
        assert (status, answer["usage"]["prompt_tokens"]) == (200, length)
        assert len(endpoint.source.requests[-1].token_ids) == length


async def test_bad_words_are_tokens_with_and_without_a_space(serve: Any) -> None:
    endpoint = await serve(TEXT)
    words = ["fox", "  over", "fox"]
    told = {"prompt": "x", "bad_words": words, "allowed_token_ids": [5, 3]}
    assert (await endpoint.post("/v1/completions", told))[0] == 200
    params = endpoint.source.requests[0].params
    tokenizer = endpoint.frontend.tokenizer
    assert [tokenizer.decode(list(ids)) for ids in params.bad_words_token_ids] == [
        "fox", " fox", "over", " over"
    ]  # fmt: skip
    assert params.allowed_token_ids == (5, 3)

"""The HTTP face of real nodes and router, asked by the official client where it knows the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.served_pair import Pair, settle
from tests.support.servers import HttpFailure, Server, completion

openai = pytest.importorskip("openai", reason="GPU machines lack it, and no GPU test needs it")

pytestmark = pytest.mark.e2e

Prompt = Callable[[int], list[int]]
ASK: list[Any] = [{"role": "user", "content": "Who hands over the baton?"}]


@pytest.fixture(params=["router", "prefill", "decode"])
def server(request: pytest.FixtureRequest, pair: Pair, small: Server) -> Server:
    pair.moves = "all" if request.param == "router" else "nothing"
    return {"router": pair.router, "prefill": pair.p, "decode": small}[request.param]


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_the_official_client(client: Any) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id == "tiny"
    whole = client.completions.create(
        model="tiny", prompt="Once upon", max_tokens=6, temperature=0, n=2, logprobs=2
    )
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.tokens or []) == 6
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    talk = client.chat.completions.create(
        model="tiny", messages=ASK, max_completion_tokens=6, temperature=0, logprobs=True
    )
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=ASK,
            max_completion_tokens=6,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == talk.choices[0].message.content
    assert chunks[-1].usage is not None
    assert talk.usage is not None
    assert chunks[-1].usage.completion_tokens == talk.usage.completion_tokens


def test_errors_have_the_clients_types(client: Any, pair: Pair) -> None:
    pair.moves = "nothing"
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="tiny", prompt="x", temperature=3)
    assert raised.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="tiny", prompt="x", max_tokens=10_000)
    assert raised.value.code == "context_length_exceeded"


def test_tokenize_and_back(server: Server, pair: Pair) -> None:
    pair.moves = "nothing"
    text = "A baton, 東京."
    told = server.post("/tokenize", {"prompt": text, "add_special_tokens": False})
    assert told["count"] == len(told["tokens"])
    assert server.post("/detokenize", {"tokens": told["tokens"]}) == {"prompt": text}
    talk = server.post("/tokenize", {"messages": ASK})
    assert talk["count"] > 5
    assert told["max_model_len"] == talk["max_model_len"] == 512


def test_no_cache_is_shared_between_salts(pair: Pair, prompt: Prompt) -> None:
    ids = prompt(48)

    def cached(salt: str | None) -> tuple[float, float]:
        """Prompt tokens that P and D took from their caches for one request."""
        settle(pair.p, pair.d)
        before = pair.at_p(), pair.at_d()
        body = completion(ids, max_tokens=2) | ({} if salt is None else {"cache_salt": salt})
        pair.router.post("/v1/completions", body)
        settle(pair.p, pair.d)
        after = pair.at_p(), pair.at_d()
        p, d = (
            (a - b)("kvbaton_prompt_tokens_total", source="local_cache")
            for a, b in zip(after, before, strict=True)
        )
        # A source that was faster than its reservation reads its own run's blocks once more.
        revived = (after[0] - before[0])("kvbaton_transfers_revived_total")
        return p - 47 * revived, d

    assert cached("a") == (0, 0)
    assert cached("b") == (0, 0), "b has seen a's blocks"
    assert cached(None) == (0, 0), "no salt has seen a's blocks"
    assert cached("a")[1] > 0, "a does not see its own"


def test_usage_tells_of_cached_tokens(pair: Pair, prompt: Prompt) -> None:
    ids = prompt(48)

    def usage() -> Any:
        settle(pair.p, pair.d)
        return pair.router.post("/v1/completions", completion(ids, max_tokens=2))["usage"]

    assert usage()["prompt_tokens_details"]["cached_tokens"] == 0
    assert usage()["prompt_tokens_details"]["cached_tokens"] >= 32
    assert pair.router.post("/reset_prefix_cache", {})["nodes"] == {"p16": True, "d16": True}
    assert usage()["prompt_tokens_details"]["cached_tokens"] == 0


def test_tokens_in_tokens_out_over_the_router_is_not_offered(pair: Pair) -> None:
    pair.moves = "nothing"
    with pytest.raises(HttpFailure) as raised:
        pair.router.post("/inference/v1/generate", {"token_ids": [3]})
    assert raised.value.status == 404

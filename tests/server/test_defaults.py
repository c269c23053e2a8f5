"""Defaults that come from the model instead of from the API."""

from typing import Any

MODEL: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "min_p": 0.1, "max_tokens": 7}
ASK = [{"role": "user", "content": "Greet the city."}]


async def test_the_model_recommends_and_the_client_decides(serve: Any) -> None:
    endpoint = await serve(sampling_defaults=MODEL)
    await endpoint.post("/v1/completions", {"prompt": "x"})
    await endpoint.post("/v1/completions", {"prompt": "x", "temperature": 0, "top_k": None})
    first, second = (request.params for request in endpoint.source.requests)
    assert (first.temperature, first.top_k, first.min_p, first.top_p) == (0.6, 20, 0.1, 1.0)
    assert (second.temperature, second.top_k, second.min_p) == (0, 20, 0.1)
    assert first.max_tokens == 16, "a completion's length has a default of its own"


async def test_length_of_a_chat(serve: Any) -> None:
    endpoint = await serve(sampling_defaults=MODEL)
    await endpoint.post("/v1/chat/completions", {"messages": ASK})
    await endpoint.post("/v1/chat/completions", {"messages": ASK, "max_tokens": 9})
    assert [request.params.max_tokens for request in endpoint.source.requests] == [7, 9]

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import make_mocked_request
from prometheus_client.parser import text_string_to_metric_families

from kvbaton.errors import EngineDeadError, RequestError
from kvbaton.messages.engine import NO_METRICS, HistogramCounts, Metrics, Output
from kvbaton.messages.nodes import GenerateResponse
from kvbaton.server.auth import check_key, require_operator
from kvbaton.server.config import EndpointConfig
from kvbaton.server.frontend import FrontendConfig
from kvbaton.server.metrics import split_name
from kvbaton.server.network import operator_token, registration_token
from kvbaton.server.node_app import make_node_app, make_starting_app, transfer_parser
from kvbaton.text.tokenizer import Tokenizer
from tests.support.listening import listen
from tests.support.scripted_source import EOS, MAX_MODEL_LEN, VOCAB, ScriptedClient
from tests.support.waiting import PATIENCE_S

GENERATE = "/inference/v1/generate"
ID = "ab" * 16


async def test_tokens_in_tokens_out(node: Any) -> None:
    body = {
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 99, "n": 2, "logprobs": 1, "prompt_logprobs": 0},
        "request_id": "r1",
    }
    status, answer = await node.post(GENERATE, body)
    assert status == 200
    whole = msgspec.convert(answer, GenerateResponse)
    text = node.client.tokenizer.encode("Hello wide world.", add_special_tokens=False)
    assert whole.request_id == "r1"
    assert [choice.token_ids for choice in whole.choices] == [(*text, EOS)] * 2
    assert [choice.finish_reason for choice in whole.choices] == ["stop"] * 2
    assert whole.choices[1].logprobs is not None
    assert len(whole.choices[1].logprobs) == len(text) + 1
    assert whole.prompt_logprobs is not None
    assert len(whole.prompt_logprobs) == 3
    assert whole.usage.completion_tokens == 2 * (len(text) + 1)


async def test_a_stream_of_outputs(node: Any) -> None:
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3, "seed": 4}, "stream": True}
    headers = {"X-Request-Id": "mine"}
    async with node.session.post(GENERATE, json=body, headers=headers) as response:
        *events, done, end = (await response.text()).split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    outputs = [msgspec.json.decode(event.removeprefix("data: "), type=Output) for event in events]
    assert [output.index for output in outputs] == [0, 1, 2]
    assert {output.request_id for output in outputs} == {"mine"}
    assert outputs[-1].finish_reason == "length"
    assert node.client.requests[0].params.seed == 4


async def test_everything_of_a_request_reaches_the_engine(node: Any) -> None:
    body = {
        "token_ids": [5, 6],
        "resume_token_ids": [9, 9],
        "sampling_params": {"max_tokens": 3, "top_k": -1},
        "cache_salt": "s",
        "priority": 7,
        "deadline_s": 9.5,
        "kv_transfer_params": {"do_remote_decode": True, "transfer_id": ID, "attempt": 2},
    }
    status, _ = await node.post(GENERATE, body)
    assert status == 200
    request = node.client.requests[0]
    assert request.resume_ids == (9, 9)
    assert (request.cache_salt, request.priority, request.deadline_s) == ("s", 7, 9.5)
    assert request.params.top_k == 0
    assert request.params.seed is not None
    assert request.transfer.transfer_id.hex() == ID
    assert (request.transfer.role, request.transfer.attempt) == ("source", 2)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [VOCAB]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids[0]"),
        ({"token_ids": "text"}, "token_ids"),
        ({"token_ids": [1] * MAX_MODEL_LEN}, "token_ids"),
        ({"resume_token_ids": [VOCAB]}, "resume_token_ids"),
        ({"resume_token_ids": [1] * 16}, "resume_token_ids"),
        ({"sampling_params": {"temperature": 7}}, "sampling_params.temperature"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"logit_bias": {"9999": 1}}}, "sampling_params.logit_bias"),
        ({"sampling_params": {"unheard_of": 1}}, "sampling_params"),
        ({"sampling_params": {"grammar": "start: nothing"}}, "sampling_params.grammar"),
        ({"sampling_params": {"grammar": '{"grammars": [{'}}, "sampling_params.grammar"),
        ({"sampling_params": {"grammar": " " * (2**18 + 1)}}, "sampling_params.grammar"),
        (
            {"sampling_params": {"grammar": "start: /a/", "ignore_eos": True}},
            "sampling_params.ignore_eos",
        ),
        ({"priority": 2**80}, "priority"),
        ({"deadline_s": -1}, "deadline_s"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params."),
        ({"kv_transfer_params": []}, "kv_transfer_params"),
    ],
)
async def test_what_is_wrong_is_named(node: Any, extra: Any, param: str) -> None:
    status, answer = await node.post(GENERATE, {"token_ids": [1], **extra})
    assert status == 400
    assert str(answer["error"]["param"]).startswith(param), answer
    assert node.client.requests == []


async def test_a_failed_generation(node: Any) -> None:
    node.client.end = "error"
    node.client.final = {"error": "KV did not arrive"}
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 99}}
    status, answer = await node.post(GENERATE, body)
    assert (status, answer["error"]["code"]) == (503, "generation_failed")
    async with node.session.post(GENERATE, json={**body, "stream": True}) as response:
        text = await response.text()
    assert '"finish_reason":"error"' in text, "the router sees the end itself"
    assert text.endswith("data: [DONE]\n\n")
    node.client.final = {"error": "no token fits", "error_code": "grammar_failed"}
    status, answer = await node.post(GENERATE, body)
    assert (status, answer["error"]["code"]) == (400, "grammar_failed"), "the request is to blame"
    node.client.final = {"error": "logits are NaN", "error_code": "no_token"}
    async with node.session.post(GENERATE, json=body) as response:
        assert (response.status, response.headers["X-Should-Retry"]) == (500, "false")
        assert (await response.json())["error"]["code"] == "no_token", "it would fail again"


async def test_cancelling_a_stream(node: Any) -> None:
    reached = asyncio.Event()

    async def hold(index: int) -> None:
        if index == 1:
            reached.set()
            await asyncio.Event().wait()

    node.client.gate = hold
    response = await node.session.post(GENERATE, json={"token_ids": [1], "stream": True})
    await asyncio.wait_for(reached.wait(), PATIENCE_S)
    response.close()
    await asyncio.wait_for(node.client.cancellation.wait(), PATIENCE_S)
    assert len(node.client.cancelled) == 1


async def test_a_hand_over_through_the_openai_endpoints(node: Any) -> None:
    node.client.final = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "h"}}
    ask = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None}
    body = {"prompt": "x", "max_tokens": 1, "kv_transfer_params": ask}
    _, answer = await node.post("/v1/completions", body)
    assert answer["kv_transfer_params"] == node.client.final["kv_transfer_params"]
    assert node.client.requests[0].transfer.role == "source"
    async with node.session.post("/v1/completions", json={**body, "stream": True}) as response:
        events = [line for line in (await response.text()).split("\n\n") if '"id"' in line]
    assert ["kv_transfer_params" in event for event in events] == [False] * (len(events) - 1) + [
        True
    ]
    chat = {**body, "messages": [{"role": "user", "content": "x"}]}
    _, answer = await node.post("/v1/chat/completions", chat)
    assert answer["kv_transfer_params"] == node.client.final["kv_transfer_params"]
    status, answer = await node.post("/v1/completions", {**body, "prompt": ["a", "b"]})
    assert (status, answer["error"]["param"]) == (400, "prompt")


async def test_health(node: Any) -> None:
    assert await node.get("/health") == (200, {"status": "ok"})
    node.client.metrics = Metrics(
        counters={}, gauges={"kvbaton_unhealthy": 0.0, "kvbaton_ledger_imbalance": 0.0}
    )
    assert (await node.get("/health"))[0] == 200
    node.client.metrics = Metrics(counters={}, gauges={'kvbaton_unhealthy{reason="old"}': 1.0})
    status, answer = await node.get("/health")
    assert status == 503
    assert "kvbaton_unhealthy" in answer["error"]["message"]
    node.client.metrics = NO_METRICS
    node.client.dead = "the core exited with code -9"
    status, answer = await node.get("/health")
    assert (status, "code -9" in answer["error"]["message"]) == (503, True)
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        (GENERATE, {"token_ids": [1]}),
        ("/v1/models", None),
    ):
        status, _ = await (node.get(path) if body is None else node.post(path, body))
        assert status == 503


async def test_ping_and_load_are_as_vllm_has_them(node: Any) -> None:
    assert await node.get("/ping") == (200, {"status": "ok"})
    async with node.session.post("/ping") as response:
        assert response.status == 200
    assert await node.get("/load") == (200, {"server_load": 0})
    counts = {"running": 2.0, "waiting": 3.0, "loading": 1.0}
    gauges = {f"kvbaton_sequences_{state}": count for state, count in counts.items()}
    node.client.metrics = Metrics(counters={}, gauges=gauges)
    assert await node.get("/load") == (200, {"server_load": 6})
    assert node.client.commands[-1] == "metrics", "it is as of now"
    node.client.dead = "the core exited with code -9"
    assert (await node.get("/ping"))[0] == 503


async def test_a_node_that_is_drained_is_not_healthy_but_lives(
    node: Any, caplog: pytest.LogCaptureFixture
) -> None:
    node.client.draining = True
    with caplog.at_level("INFO"):
        status, answer = await node.get("/health")
        assert (status, answer["error"]["code"]) == (503, "draining")
        assert await node.get("/live") == (200, {"status": "ok"})
        node.client.dead = "the core exited with code -9"
        assert (await node.get("/live"))[0] == 503
        assert not caplog.messages, "every router probes each second"
        await node.get("/nothing")
    assert len(caplog.messages) == 1, "another path's error is told"


async def test_a_node_whose_engine_hangs_is_not_healthy_and_does_not_live(
    node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await node.get("/live"))[0] == 200
    monkeypatch.setattr("kvbaton.engine.client.HUNG_S", 0.0)
    for path in ("/health", "/live"):
        status, answer = await node.get(path)
        assert (status, answer["error"]["code"]) == (503, "unhealthy")
        assert "the engine has not been heard of for" in answer["error"]["message"]


async def test_a_starting_node_says_so() -> None:
    runner, port = await listen(make_starting_app(), "127.0.0.1", 0)
    async with ClientSession(f"http://127.0.0.1:{port}") as session:
        for path in ("/health", "/v1/models"):
            async with session.get(path) as response:
                assert response.status == 503
                assert (await response.json())["error"]["code"] == "starting"
        assert (await session.get("/live")).status == 200
    await runner.cleanup()


async def test_metrics_are_prometheus_text(node: Any) -> None:
    await node.post("/v1/completions", {"prompt": "x", "max_tokens": 3})
    node.client.metrics = Metrics(
        counters={
            'kvbaton_prompt_tokens_total{source="computed"}': 5.0,
            'kvbaton_prompt_tokens_total{source="transferred"}': 7.0,
            "kvbaton_steps_total": 2.0,
            "kvbaton_odd": 1.0,
        },
        gauges={'kvbaton_blocks{owner="a \\"b\\" \\\\ c\\n"}': 3.0},
        histograms={
            "kvbaton_time_to_first_token_seconds": HistogramCounts(
                bounds=(0.5, 1.0), counts=(2, 1, 4), total=9.5
            )
        },
    )
    async with node.session.get("/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        families = {
            family.name: family for family in text_string_to_metric_families(await response.text())
        }
    assert families["kvbaton_steps"].documentation == "Steps."
    tokens = families["kvbaton_prompt_tokens"]
    assert tokens.type == "counter"
    assert {s.labels["source"]: s.value for s in tokens.samples} == {
        "computed": 5.0,
        "transferred": 7.0,
    }
    assert families["kvbaton_blocks"].samples[0].labels == {"owner": 'a "b" \\ c\n'}
    assert families["kvbaton_steps"].samples[0].value == 2.0
    assert families["kvbaton_odd"].samples[0].value == 1.0
    first_token = families["kvbaton_time_to_first_token_seconds"]
    assert first_token.type == "histogram"
    assert {s.name[35:] + s.labels.get("le", ""): s.value for s in first_token.samples} == {
        "_bucket0.5": 2.0,
        "_bucket1.0": 3.0,
        "_bucket+Inf": 7.0,
        "_count": 7.0,
        "_sum": 9.5,
    }


async def test_metrics_are_of_now(node: Any) -> None:
    async def report(name: str, argument: Any = None) -> Any:
        assert name == "metrics"
        node.client.metrics = Metrics(counters={"kvbaton_steps_total": 8.0}, gauges={})

    node.client.metrics = Metrics(counters={"kvbaton_steps_total": 7.0}, gauges={})
    node.client.command = report
    async with node.session.get("/metrics") as response:
        assert "kvbaton_steps_total 8.0" in await response.text()


@pytest.mark.parametrize("failure", [EngineDeadError("gone"), TimeoutError()])
async def test_metrics_of_an_engine_that_does_not_answer_are_the_latest(
    node: Any, failure: Exception
) -> None:
    async def fail(name: str, argument: Any = None) -> Any:
        raise failure

    node.client.metrics = Metrics(counters={"kvbaton_steps_total": 7.0}, gauges={})
    node.client.command = fail
    async with node.session.get("/metrics") as response:
        assert response.status == 200
        assert "kvbaton_steps_total 7.0" in await response.text()


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="not a Prometheus name"):
        split_name("1 bad name")


async def test_operators_only(node: Any) -> None:
    assert await node.get("/state") == (200, {"asked": "state"})
    assert await node.get("/debug/steps") == (200, {"asked": "steps"})
    status, answer = await node.post("/reset_prefix_cache", {})
    assert (status, answer) == (200, {"result": {"asked": "reset_prefix_cache"}})
    assert node.client.commands == ["state", "steps", "reset_prefix_cache"]
    status, answer = await node.post("/reset_prefix_cache?reset_external=true", {})
    assert (status, answer["store"]) == (200, {"asked": "reset_store"})
    assert (await node.post("/reset_prefix_cache?reset_external=yes", {}))[0] == 400
    assert node.client.commands[3:] == ["reset_prefix_cache", "reset_store"]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("clear at redis failed: StoreError: gone"), "StoreError: gone"),
        (TimeoutError(), "it does not answer"),
    ],
)
async def test_a_store_that_is_not_cleared_is_told(node: Any, error: Exception, told: str) -> None:
    async def fail(name: str, argument: Any = None) -> Any:
        if name == "reset_store":
            raise error
        return 0

    node.client.command = fail
    status, answer = await node.post("/reset_prefix_cache?reset_external=true", {})
    assert (status, answer["error"]["code"]) == (503, "store")
    assert answer["error"]["message"].startswith("the store was not cleared: ")
    assert told in answer["error"]["message"]


async def test_the_engine_that_dies_while_asked(node: Any) -> None:
    async def die(name: str, argument: Any = None) -> Any:
        raise EngineDeadError("just now")

    node.client.command = die
    status, answer = await node.get("/state")
    assert (status, "just now" in answer["error"]["message"]) == (503, True)


async def test_a_refusal_of_the_core_keeps_its_fields(node: Any) -> None:
    node.client.failure = RequestError(
        "not a member", param="kv_transfer_params.remote_host", code="not_a_member"
    )
    for body in ({"token_ids": [1]}, {"token_ids": [1], "stream": True}):
        status, answer = await node.post(GENERATE, body)
        assert status == 400
        assert answer["error"] == {
            "message": "kv_transfer_params.remote_host: not a member",
            "type": "invalid_request_error",
            "param": "kv_transfer_params.remote_host",
            "code": "not_a_member",
        }


@pytest.mark.parametrize(
    ("sender", "header", "welcome"),
    [
        ("127.0.0.1", None, True),
        ("10.0.0.7", None, False),
        ("10.0.0.7", "Bearer key", True),
        ("10.0.0.7", f"Bearer {operator_token('secret')}", True),
        ("10.0.0.7", f"Bearer {registration_token('secret')}", False),
        ("10.0.0.7", f"Bearer {operator_token('other')}", False),
        ("10.0.0.7", "Bearer ", False),
    ],
)
@pytest.mark.parametrize("clustered", [True, False])
def test_who_may_ask_what_operators_may(
    tokenizer: Tokenizer, sender: str, header: str | None, welcome: bool, clustered: bool
) -> None:
    """From elsewhere an API key, or what the router makes of the cluster key."""
    token = operator_token("secret") if clustered else ""
    config = FrontendConfig(model_name="tiny", api_keys=("key",), operator_token=token)
    app = make_node_app(ScriptedClient(tokenizer, "Hi."), tokenizer, config)
    headers = {} if header is None else {"Authorization": header}
    request = make_mocked_request("POST", "/reset_prefix_cache", headers, app=app)
    known = welcome and (clustered or header != f"Bearer {operator_token('secret')}")
    with nullcontext() if known else pytest.raises(RequestError, match="API key"):
        require_operator(request.clone(remote=sender))


@pytest.mark.parametrize(("key", "welcome"), [("tenant", False), ("ops", True), ("ops2", True)])
def test_where_operators_have_keys_those_of_tenants_open_nothing_of_theirs(
    tokenizer: Tokenizer, tmp_path: Path, key: str, welcome: bool
) -> None:
    flags = EndpointConfig(api_keys=("tenant",), operator_keys=("ops", "ops2"))
    config = FrontendConfig.of(flags, str(tmp_path), "tiny")
    app = make_node_app(ScriptedClient(tokenizer, "Hi."), tokenizer, config)
    headers = {"Authorization": f"Bearer {key}"}
    request = make_mocked_request("POST", "/drain", headers, app=app)
    with nullcontext() if welcome else pytest.raises(RequestError, match="operator's API key"):
        require_operator(request.clone(remote="10.0.0.7"))
    completion = make_mocked_request("POST", "/v1/completions", headers, app=app)
    with nullcontext() if not welcome else pytest.raises(RequestError, match="a valid API key"):
        check_key(completion)


@pytest.mark.parametrize("role", ["prefill", "decode", "any"])
async def test_a_node_that_is_to_do_one_half_says_once_that_it_does_both(
    tokenizer: Tokenizer, role: Any, caplog: pytest.LogCaptureFixture
) -> None:
    parse = transfer_parser(role)
    handed = {"do_remote_decode": True, "transfer_id": ID}
    spec, _ = parse(handed)
    assert spec is not None
    assert spec.role == "source"
    assert not caplog.records
    assert [parse(None), parse({}), parse(None)] == [(None, None)] * 3
    assert len(caplog.records) == (0 if role == "any" else 1)
    assert all(f"this {role} node serves it alone" in text for text in caplog.messages)

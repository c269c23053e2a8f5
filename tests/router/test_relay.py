"""The relay of one request across nodes and attempts, without a socket."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest, Item, Output, SamplingParams, TransferSpec
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.config import RelayTimers
from kvbaton.router.node_request import NodeError, NodeRequest
from kvbaton.router.relay import (
    MARKS_S,
    Action,
    AskNode,
    CancelNode,
    CheckNode,
    Finished,
    RequestRelay,
)
from kvbaton.router.route import Route
from kvbaton.types import TokenLogprobs

TRANSFER = bytes(range(16))
TIMERS = RelayTimers(idle_s=30.0, finish_grace_s=2.0, max_retries=2)


def node(node_id: str, role: str) -> NodeInfo:
    return NodeInfo(
        node_id=node_id,
        generation="1",
        role=role,
        url=f"http://{node_id}",
        model="m",
        control_address="tcp://127.0.0.1:7000",
        tp_size=2,
    )


P, D0, D1, D2 = node("p", "prefill"), *(node(f"d{i}", "decode") for i in range(3))
ENCODERS = [node(f"e{i}", "encode") for i in range(2)]
ITEMS = tuple(
    Item(start=i, length=33 - i, digest=bytes([i]) * 32, grid=(1, 6, 22), data=b"image %d" % i)
    for i in range(2)
)
ITEM_IDS = [bytes([i]) * 16 for i in range(2)]


def request(n: int = 1, max_tokens: int = 5, **fields: object) -> AddRequest:
    params = SamplingParams(n=n, max_tokens=max_tokens, seed=7)
    return AddRequest(request_id="r", token_ids=array("I", (1, 2, 3)), params=params, **fields)  # type: ignore[arg-type]


class Bench:
    """A relay with its clock, and what it did."""

    def __init__(self, add: AddRequest, *, sources: bool = True, retries: int = 2) -> None:
        self.now = 100.0
        self.routed: list[tuple[int, frozenset[str]]] = []
        self.sources = sources
        self.encoders = ENCODERS
        self.started: list[NodeRequest] = []
        self.checked: list[NodeRequest] = []
        self.cancelled: list[NodeRequest] = []
        self.emitted: list[Output] = []
        self.end: Finished | RequestError | None = None
        timers = RelayTimers(TIMERS.idle_s, TIMERS.finish_grace_s, retries)
        self.relay = RequestRelay(
            add,
            self.route,
            transfer_id=TRANSFER,
            item_ids=ITEM_IDS[: len(add.items)],
            timers=timers,
            now=self.now,
        )

    def route(self, num_tokens: int, items: Sequence[Item], avoid: frozenset[str]) -> Route | None:
        self.routed.append((num_tokens, avoid))
        left = [d for d in (D0, D1, D2) if d.node_id not in avoid]
        if not left:
            return None
        encoders = [e for e in self.encoders if e.node_id not in avoid]
        chosen = tuple(encoders[i % len(encoders)] if encoders else None for i in range(len(items)))
        return Route(left[0], P if self.sources and P.node_id not in avoid else None, chosen)

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            assert self.end is None, f"{action} after {self.end}"
            match action:
                case AskNode(asked):
                    self.started.append(asked)
                case CheckNode(asked):
                    self.checked.append(asked)
                case CancelNode(asked):
                    self.cancelled.append(asked)
                case Output():
                    self.emitted.append(action)
                case Finished() | RequestError():
                    self.end = action

    def start(self) -> Bench:
        self.do(self.relay.start(self.now))
        return self

    def asked(self, side: str, attempt: int = 0, item: int = 0) -> NodeRequest:
        wanted = (side, attempt, item)
        [asked] = [s for s in self.started if (s.side, s.attempt, s.item) == wanted]
        return asked

    def say(self, side: str, index: int, *tokens: int, attempt: int = 0, **fields: object) -> None:
        output = Output(request_id="x", index=index, token_ids=tokens, **fields)  # type: ignore[arg-type]
        self.do(self.relay.output(self.asked(side, attempt), output, self.now))

    def fail(self, side: str, attempt: int = 0, item: int = 0, **fields: object) -> None:
        error = NodeError("boom", **fields)  # type: ignore[arg-type]
        self.do(self.relay.failed(self.asked(side, attempt, item), error, self.now))

    def encoded(self, item: int = 0, reason: str = "length") -> None:
        output = Output(request_id="x", token_ids=(0,), finish_reason=reason)
        self.do(self.relay.output(self.asked("encoder", 0, item), output, self.now))

    def ended(self, side: str, attempt: int = 0) -> None:
        self.do(self.relay.ended(self.asked(side, attempt), self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.relay.tick(self.now))

    def tokens(self, choice: int = 0) -> list[int]:
        mine = [o for o in self.emitted if o.choice == choice]
        result: list[int] = []
        for output in mine:
            assert output.index == len(result)
            result.extend(output.token_ids)
        return result

    def error(self) -> RequestError:
        assert isinstance(self.end, RequestError)
        return self.end


def test_both_sides_start_at_once_with_their_parts() -> None:
    bench = Bench(request()).start()
    source, target = bench.started
    assert (target.node, source.node) == (D0, P)
    assert source.request.transfer == TransferSpec(
        role="source", transfer_id=TRANSFER, attempt=0, goes_on=True
    )
    assert target.request.transfer == TransferSpec(
        role="target",
        transfer_id=TRANSFER,
        attempt=0,
        peer="tcp://127.0.0.1:7000",
        peer_node="p",
    )
    assert [*source.request.token_ids] == [*target.request.token_ids] == [1, 2, 3]
    assert target.request.params == source.request.params


def test_the_first_token_comes_from_the_source_and_the_rest_from_the_target() -> None:
    bench = Bench(request(max_tokens=3)).start()
    bench.say("source", 0, 10, finish_reason="length", cached_tokens=2)
    assert bench.tokens() == [10]
    assert bench.emitted[0].finish_reason is None, "a source stops after one token anyway"
    bench.say("target", 0, 10, transferred_tokens=3)
    bench.say("target", 1, 11, 12, finish_reason="length")
    assert bench.tokens() == [10, 11, 12]
    assert bench.emitted[-1].finish_reason == "length"
    assert (bench.emitted[-1].cached_tokens, bench.emitted[-1].transferred_tokens) == (2, 3)
    assert isinstance(bench.end, Finished)


def test_a_second_token_of_the_source_is_relayed_too() -> None:
    bench = Bench(request(max_tokens=3)).start()
    bench.say("source", 0, 10)
    bench.say("source", 1, 11, finish_reason="length")
    assert bench.tokens() == [10, 11]
    bench.say("target", 0, 10)
    bench.say("target", 1, 11)
    bench.say("target", 2, 12, finish_reason="length")
    assert bench.tokens() == [10, 11, 12]
    assert bench.relay.from_source == 2
    assert [output.finish_reason for output in bench.emitted] == [None, None, "length"]
    assert isinstance(bench.end, Finished)


@pytest.mark.parametrize("silent", [False, True])
def test_both_tokens_of_the_source_may_come_at_once(silent: bool) -> None:
    """As they do if the router was busy."""
    bench = Bench(request()).start()
    bench.say("source", 0, 10, 11, finish_reason="stop", stop_reason=11)
    assert bench.tokens() == [10]
    if silent:
        bench.wait(2.1)
    else:
        bench.say("target", 0, 10, 11, finish_reason="stop", stop_reason=11)
    assert bench.tokens() == [10, 11]
    assert bench.emitted[-1].token_ids == (11,)
    assert isinstance(bench.end, Finished)


def test_a_target_that_fails_is_resumed_from_both_tokens_of_its_source() -> None:
    bench = Bench(request()).start()
    bench.say("source", 0, 10)
    bench.say("source", 1, 11, finish_reason="length")
    bench.fail("target")
    again = [asked for asked in bench.started if asked.attempt == 1]
    assert [asked.request.resume_ids for asked in again] == [(10, 11)] * len(again)


def test_a_second_token_that_differs_from_the_targets_is_dropped() -> None:
    bench = Bench(request(max_tokens=3)).start()
    bench.say("target", 0, 10, 11)
    bench.say("source", 0, 10)
    bench.say("source", 1, 99, finish_reason="stop")
    bench.say("target", 2, 12, finish_reason="length")
    assert bench.tokens() == [10, 11, 12]
    assert isinstance(bench.end, Finished)


def test_a_target_that_is_faster_needs_no_source() -> None:
    bench = Bench(request(max_tokens=2)).start()
    bench.say("target", 0, 10)
    bench.say("source", 0, 99, finish_reason="length")
    bench.say("target", 1, 11, finish_reason="length")
    assert bench.tokens() == [10, 11]
    assert bench.cancelled == [bench.asked("source")]


def test_a_target_that_contradicts_the_committed_token_is_replaced_with_a_forced_prefix() -> None:
    bench = Bench(request()).start()
    bench.say("source", 0, 10, finish_reason="length")
    bench.say("target", 0, 77)
    assert set(bench.cancelled) == {bench.asked("source"), bench.asked("target")}
    again = bench.started[2:]
    assert [s.request.resume_ids for s in again] == [(10,), (10,)]
    assert [s.request.transfer and s.request.transfer.attempt for s in again] == [1, 1]
    assert bench.routed[1] == (4, frozenset()), "nobody failed, so nobody is avoided"
    bench.say("target", 1, 78)
    bench.say("source", 1, 11, attempt=1, finish_reason="length")
    bench.say("target", 1, 11, 12, attempt=1)
    assert bench.tokens() == [10, 11, 12], "the closed attempt's tokens are dropped"


def test_logprobs_are_cut_with_their_tokens() -> None:
    def lp(value: float) -> TokenLogprobs:
        return TokenLogprobs(value, 1)

    bench = Bench(scored_request()).start()
    bench.say("source", 0, 10, logprobs=(lp(-0.1),), prompt_logprobs=(None, lp(-1.0)))
    bench.say("target", 0, 10, 11, logprobs=(lp(-0.1), lp(-0.2)), prompt_logprobs=(None,))
    assert [o.logprobs for o in bench.emitted] == [(lp(-0.1),), (lp(-0.2),)]
    assert [o.prompt_logprobs for o in bench.emitted] == [(None, lp(-1.0)), None]


def test_a_source_that_fails_at_once_is_left_out_of_a_new_attempt() -> None:
    bench = Bench(request(max_tokens=2)).start()
    bench.fail("source", status=500)
    assert bench.cancelled == [bench.asked("source"), bench.asked("target")]
    assert bench.routed[-1] == (3, frozenset({"p"}))
    assert [s.side for s in bench.started if s.attempt == 1] == ["target"]
    bench.say("target", 0, 10, 11, attempt=1, finish_reason="length")
    assert bench.tokens() == [10, 11]
    assert isinstance(bench.end, Finished)


def test_a_source_that_fails_late_leaves_the_request_to_its_target() -> None:
    bench = Bench(request(max_tokens=2)).start()
    bench.say("target", 0, 10)
    bench.fail("source", status=500)
    assert (bench.cancelled, bench.end) == ([bench.asked("source")], None)
    bench.say("target", 1, 11, finish_reason="length")
    assert bench.tokens() == [10, 11]
    assert isinstance(bench.end, Finished)


def test_a_source_that_its_target_called_off_is_no_failure() -> None:
    bench = Bench(request(max_tokens=2)).start()
    bench.say("source", 0, finish_reason="abort")
    assert (bench.cancelled, len(bench.routed)) == ([], 1)
    bench.say("target", 0, 10, 11, finish_reason="length")
    assert bench.tokens() == [10, 11]


@pytest.mark.parametrize("how", ["fail", "error", "abort", "ended", "gap", "silence"])
def test_a_target_that_dies_is_resumed_elsewhere_from_the_committed_tokens(how: str) -> None:
    bench = Bench(request(max_tokens=4)).start()
    bench.say("source", 0, 10, finish_reason="length")
    bench.ended("source")
    bench.say("target", 0, 10, 11)
    match how:
        case "fail":
            bench.fail("target")
        case "error" | "abort":
            bench.say("target", 2, finish_reason=how)
        case "ended":
            bench.ended("target")
        case "gap":
            bench.say("target", 3, 13)
        case "silence":
            bench.wait(29.0)
            assert len(bench.started) == 2
            bench.wait(1.0)
    assert bench.routed[-1] == (5, frozenset({"d0"}))
    assert bench.started[-1].request.resume_ids == (10, 11)
    bench.say("target", 2, 12, 13, attempt=1, finish_reason="length")
    assert bench.tokens() == [10, 11, 12, 13]
    assert isinstance(bench.end, Finished)


def test_a_request_that_waits_for_its_first_token_is_not_given_up() -> None:
    """It may be in the queue of either node: only whether they hang is looked at."""
    bench = Bench(request()).start()
    for _ in range(3):
        bench.wait(29.0)
        assert bench.checked == []
        bench.wait(1.0)
        assert [asked.side for asked in bench.checked] == ["source", "target"]
        bench.checked.clear()
    bench.say("source", 0, 10, finish_reason="length")
    bench.ended("source")
    bench.wait(30.0)
    assert [asked.side for asked in bench.checked] == ["target"]
    assert (len(bench.started), bench.cancelled) == (2, [])
    bench.say("target", 0, 10, 11)
    bench.wait(30.0)
    assert bench.cancelled == [bench.asked("target")], "one that fell silent"


def test_retries_are_bounded() -> None:
    bench = Bench(request()).start()
    for attempt in range(3):
        assert bench.end is None
        bench.fail("target", attempt)
    assert bench.error().status == 502
    assert "d2" in bench.error().message


def test_no_node_at_all_is_a_503() -> None:
    bench = Bench(request())
    bench.route = lambda num_tokens, items, avoid: None  # type: ignore[method-assign]
    bench.relay._route = bench.route
    bench.start()
    assert (bench.error().status, bench.error().code) == (503, "no_node_ready")


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_wrong_request_is_told_to_the_client_and_not_retried(side: str) -> None:
    bench = Bench(request()).start()
    bench.fail(side, status=400, param="sampling_params.top_p", code="nope")
    error = bench.error()
    assert (error.status, error.param, error.code) == (400, "sampling_params.top_p", "nope")
    assert len(bench.started) == 2
    other = "target" if side == "source" else "source"
    assert bench.asked(other) in bench.cancelled


def test_a_refusal_of_what_the_router_added_is_not_the_clients_fault() -> None:
    bench = Bench(request()).start()
    bench.fail("target", status=400, param="kv_transfer_params.remote_host", code="not_a_member")
    assert bench.end is None
    assert (bench.started[-2].node, bench.started[-1].node) == (P, D1)


def test_busy_nodes_are_passed_on_as_busy() -> None:
    bench = Bench(request(), retries=0).start()
    bench.fail("target", status=429, code="queue_full")
    assert (bench.error().status, bench.error().code) == (429, "queue_full")


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(("max_tokens", "reason"), [(1, "length"), (5, "stop")])
def test_an_end_by_the_source_waits_for_the_target_but_not_for_long(
    max_tokens: int, reason: str, place: int
) -> None:
    bench = Bench(request(max_tokens=place + max_tokens)).start()
    for index in range(place):
        bench.say("source", index, 9)
    bench.say("source", place, 10, finish_reason=reason, stop_reason=10)
    shown = place + (reason == "length")
    assert [output.finish_reason for output in bench.emitted] == [None] * shown
    bench.wait(1.9)
    assert bench.end is None
    assert bench.relay.next_deadline() == pytest.approx(bench.now + 0.1)
    bench.wait(0.2)
    assert isinstance(bench.end, Finished)
    assert (bench.emitted[-1].finish_reason, bench.emitted[-1].stop_reason) == (reason, 10)
    assert bench.tokens() == [9] * place + [10]


@pytest.mark.parametrize("place", [0, 1])
def test_a_stop_token_comes_together_with_its_reason(place: int) -> None:
    """Else its text would be shown before it is known to be none."""
    for silent in (False, True):
        bench = Bench(request()).start()
        for side in ["source"] + ["target"] * (not silent):
            for index in range(place):
                bench.say(side, index, 9)
            bench.say(side, place, 10, finish_reason="stop", stop_reason=10)
            assert silent or side == "target" or len(bench.emitted) == place
        if silent:
            bench.wait(2.1)
        assert bench.tokens() == [9] * place + [10]
        last = bench.emitted[-1]
        assert (last.token_ids, last.finish_reason, last.stop_reason) == ((10,), "stop", 10)
        assert isinstance(bench.end, Finished)


def test_a_target_that_dies_after_an_announced_end_costs_no_retry() -> None:
    bench = Bench(request()).start()
    bench.say("source", 0, 10, finish_reason="stop")
    bench.fail("target")
    assert isinstance(bench.end, Finished)
    assert len(bench.started) == 2


def test_a_target_that_dies_after_the_last_token_costs_no_retry() -> None:
    bench = Bench(request(max_tokens=2)).start()
    bench.say("target", 0, 10, 11)
    bench.fail("target")
    assert bench.emitted[-1].finish_reason == "length"
    assert len(bench.started) == 2


def test_the_client_leaving_cancels_both_sides() -> None:
    bench = Bench(request()).start()
    bench.do(bench.relay.client_gone())
    # A target that is told last would take it for a failure of its source, and compute the prompt.
    assert [asked.side for asked in bench.cancelled] == ["target", "source"]
    bench.say("target", 0, 10)
    bench.wait(1e6)
    assert bench.emitted == []
    assert bench.end is None


def test_the_deadline_ends_it() -> None:
    bench = Bench(request(deadline_s=10.0)).start()
    bench.say("target", 0, 10)
    bench.wait(9.9)
    assert bench.end is None
    bench.wait(0.2)
    assert (bench.error().status, bench.error().code) == (504, "timeout")
    assert {asked.side for asked in bench.cancelled} == {"source", "target"}


def test_several_choices_are_generated_anew_and_compared() -> None:
    bench = Bench(request(n=2, max_tokens=2)).start()
    bench.say("target", 0, 10)
    bench.say("target", 0, 20, 21, choice=1, finish_reason="length")
    bench.fail("target")
    assert bench.started[-1].request.resume_ids == ()
    bench.say("target", 0, 10, 11, attempt=1, finish_reason="length")
    assert isinstance(bench.end, Finished)
    assert (bench.tokens(0), bench.tokens(1)) == ([10, 11], [20, 21])


def test_several_choices_that_differ_the_second_time_are_an_error() -> None:
    bench = Bench(request(n=2)).start()
    bench.say("target", 0, 10)
    bench.fail("target")
    bench.say("target", 0, 77, attempt=1)
    assert bench.error().code == "tokens_differ"


# --- items ---


def pictured(**fields: object) -> AddRequest:
    return request(items=ITEMS, cache_salt="salt", priority=3, **fields)  # type: ignore[arg-type]


def test_items_go_to_encoders_at_once_and_say_where_they_come_from() -> None:
    bench = Bench(pictured()).start()
    source, first, second, target = bench.started
    assert [(s.side, s.node.node_id) for s in (first, second)] == [
        ("encoder", "e0"),
        ("encoder", "e1"),
    ]
    assert [len(s.request.token_ids) for s in (first, second)] == [64, 32], "whole blocks"
    assert second.request.items == (msgspec.structs.replace(ITEMS[1], start=0),)
    assert not any(second.request.token_ids)
    assert (second.request.cache_salt, second.request.priority) == ("salt", 3)
    params = second.request.params
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (0.0, 1, True)
    assert second.request.transfer == TransferSpec(
        role="source", transfer_id=ITEM_IDS[1], attempt=0
    )
    assert len({s.request.request_id for s in (target, first, second)}) == 3
    assert target.request.items == ITEMS, "its KV comes from the source"
    for item, plain, encoder in zip(source.request.items, ITEMS, ENCODERS, strict=True):
        assert item.transfer is not None
        assert (item.transfer.role, item.transfer.attempt) == ("target", 0)
        assert (item.transfer.peer, item.transfer.peer_node) == (
            encoder.control_address,
            encoder.node_id,
        )
        assert msgspec.structs.replace(item, transfer=None) == plain, "data stays, as a fallback"
    assert [i.transfer and i.transfer.transfer_id for i in source.request.items] == ITEM_IDS


def test_a_node_alone_gets_the_outputs_itself() -> None:
    bench = Bench(pictured(), sources=False)
    bench.encoders = ENCODERS[:1]
    *_, target = bench.start().started
    assert [i.transfer and i.transfer.peer_node for i in target.request.items] == ["e0", "e0"]


def test_without_encoders_items_are_as_they_came() -> None:
    bench = Bench(pictured())
    bench.encoders = []
    source, target = bench.start().started
    assert target.request.items == source.request.items == ITEMS


@pytest.mark.parametrize("how", ["failed", "error", "400"])
def test_an_encoder_that_fails_before_the_prompt_is_computed_is_left_out_at_once(how: str) -> None:
    bench = Bench(pictured(max_tokens=2)).start()
    if how == "error":
        bench.encoded(0, "error")
    else:
        bench.fail("encoder", status=400 if how == "400" else None)
    assert bench.end is None
    assert set(bench.cancelled) == {s for s in bench.started[:4]}
    assert bench.routed[-1] == (3, frozenset({"e0"}))
    again = {s.side: s for s in bench.started[4:]}
    assert [
        i.transfer and (i.transfer.peer_node, i.transfer.attempt)
        for i in (again["source"].request.items)
    ] == [("e1", 1), ("e1", 1)]
    assert again["encoder"].node.node_id == "e1"
    assert "encoder of item 0 e0" in bench.relay.story[0]
    bench.say("target", 0, 10, 11, attempt=1, finish_reason="length")
    assert isinstance(bench.end, Finished)


def test_an_encoder_that_fails_once_the_prompt_is_computed_matters_to_nobody() -> None:
    bench = Bench(pictured(max_tokens=2)).start()
    bench.say("source", 0, 10)
    bench.fail("encoder", item=1)
    assert (bench.cancelled, len(bench.routed)) == ([bench.asked("encoder", item=1)], 1)
    bench.fail("target")
    assert bench.routed[-1] == (4, frozenset({"e1", "d0"})), "it is avoided all the same"


def test_what_an_encoder_has_encoded_it_can_not_fail_any_more() -> None:
    bench = Bench(pictured()).start()
    bench.encoded(0)
    bench.encoded(1, "abort")  # the receiver had it already
    for item in range(2):
        bench.fail("encoder", item=item)
    assert (bench.cancelled, bench.emitted, len(bench.routed)) == ([], [], 1)


def test_encoders_end_no_request_even_after_the_last_attempt() -> None:
    bench = Bench(pictured(max_tokens=2), retries=0).start()
    bench.fail("encoder", item=0)
    bench.fail("encoder", item=1)
    assert (bench.end, len(bench.started)) == (None, 4)
    bench.say("target", 0, 10, 11, finish_reason="length")
    assert isinstance(bench.end, Finished)


def test_an_encoder_that_fails_while_nobody_else_is_left_ends_no_request() -> None:
    bench = Bench(pictured(max_tokens=2)).start()
    bench.relay._route = lambda num_tokens, items, avoid: None
    bench.fail("encoder")
    assert (bench.end, bench.cancelled) == (None, [bench.asked("encoder")])
    bench.say("target", 0, 10, 11, finish_reason="length")
    assert isinstance(bench.end, Finished)
    assert bench.asked("encoder", item=1) in bench.cancelled


def test_the_client_leaving_cancels_encoders_too() -> None:
    bench = Bench(pictured()).start()
    bench.do(bench.relay.client_gone())
    assert set(bench.cancelled) == {s for s in bench.started}


# --- every interleaving ---


def truth(choice: int, index: int) -> int:
    return 1000 * (choice + 1) + index * index % 97


@dataclass
class World:
    """Legs that answer by the rules, until hypothesis breaks them."""

    bench: Bench
    stops: list[int]
    max_tokens: int
    scripts: dict[NodeRequest, list[Output | str]] = field(default_factory=dict)
    seen: int = 0
    breaking: tuple[str, ...] = ("source", "target", "encoder")

    def length(self, choice: int) -> int:
        return min(self.stops[choice], self.max_tokens)

    def reason(self, choice: int) -> str:
        return "stop" if self.stops[choice] <= self.max_tokens else "length"

    def take_up(self, data: st.DataObject) -> None:
        for start in self.bench.started[self.seen :]:
            base = len(start.request.resume_ids)
            side = start.side
            script = {"source": self.source, "target": self.target, "encoder": self.encoder}[side](
                base, data
            )
            cut = data.draw(st.integers(0, len(script)), label="cut")
            if side in self.breaking and data.draw(st.booleans(), label="breaks"):
                script = [*script[:cut], "fail"]
            self.scripts[start] = script
        self.seen = len(self.bench.started)

    def source(self, base: int, data: st.DataObject) -> list[Output | str]:
        script: list[Output | str] = []
        goes_on = len(self.stops) == 1 and data.draw(st.booleans(), label="goes on")
        for choice in range(len(self.stops)):
            for index in range(base, min(base + 1 + goes_on, self.length(choice))):
                last, over = index + 1 >= self.length(choice), index == base + goes_on
                reason = self.reason(choice) if last else "length"
                script.append(
                    Output(
                        request_id="x",
                        choice=choice,
                        index=index,
                        token_ids=(truth(choice, index),),
                        finish_reason=reason if last or over else None,
                    )
                )
        return [*script, "end"]

    def encoder(self, base: int, data: st.DataObject) -> list[Output | str]:
        reason = data.draw(st.sampled_from(["length", "abort", "error"]), label="encoder ends")
        return [Output(request_id="x", token_ids=(0,), finish_reason=reason), "end"]

    def target(self, base: int, data: st.DataObject) -> list[Output | str]:
        script: list[Output | str] = []
        at = [base] * len(self.stops)
        while live := [c for c in range(len(self.stops)) if at[c] < self.length(c)]:
            choice = data.draw(st.sampled_from(live), label="choice")
            most = self.length(choice) - at[choice]
            count = data.draw(st.integers(1, most), label="count")
            tokens = tuple(truth(choice, at[choice] + i) for i in range(count))
            start, at[choice] = at[choice], at[choice] + count
            done = at[choice] == self.length(choice)
            script.append(
                Output(
                    request_id="x",
                    choice=choice,
                    index=start,
                    token_ids=tokens,
                    finish_reason=self.reason(choice) if done else None,
                )
            )
        return [*script, "end"]

    def step(self, asked: NodeRequest) -> None:
        event = self.scripts[asked].pop(0)
        relay, now = self.bench.relay, self.bench.now
        if event == "fail":
            self.bench.do(relay.failed(asked, NodeError("boom"), now))
        elif isinstance(event, Output):
            self.bench.do(relay.output(asked, event, now))
        else:
            self.bench.do(relay.ended(asked, now))


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_every_interleaving_yields_each_token_exactly_once(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 2), label="n")
    max_tokens = data.draw(st.integers(1, 5), label="max_tokens")
    stops = [data.draw(st.integers(1, 6), label="stop") for _ in range(n)]
    items = ITEMS if data.draw(st.booleans(), label="items") else ()
    add = request(n=n, max_tokens=max_tokens, items=items)
    bench = Bench(add, sources=data.draw(st.booleans()))
    world = World(bench.start(), stops, max_tokens)
    while bench.end is None:
        world.take_up(data)
        speaking = [asked for asked, script in world.scripts.items() if script]
        choices: list[NodeRequest | str] = [*speaking, "time"]
        pick = data.draw(st.sampled_from(choices), label="next")
        if isinstance(pick, str):
            bench.now = max(bench.now, bench.relay.next_deadline())
            bench.do(bench.relay.tick(bench.now))
        else:
            world.step(pick)
    for choice in range(n):
        ends = [o for o in bench.emitted if o.choice == choice and o.finish_reason is not None]
        expected = [truth(choice, i) for i in range(world.length(choice))]
        given = bench.tokens(choice)
        assert given == expected[: len(given)]
        if isinstance(bench.end, Finished):
            assert given == expected
            assert [o.finish_reason for o in ends] == [world.reason(choice)]
    check_nothing_left_open(bench)


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_whatever_encoders_do_the_request_is_answered(data: st.DataObject) -> None:
    retries = data.draw(st.integers(0, 2), label="retries")
    bench = Bench(pictured(max_tokens=3), sources=data.draw(st.booleans()), retries=retries)
    world = World(bench.start(), [4], 3, breaking=("encoder",))
    while bench.end is None:
        world.take_up(data)
        speaking = [asked for asked, script in world.scripts.items() if script]
        world.step(data.draw(st.sampled_from(speaking), label="next"))
    assert isinstance(bench.end, Finished)
    assert bench.tokens() == [truth(0, i) for i in range(3)]
    check_nothing_left_open(bench)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_nodes_that_disagree_never_make_a_client_see_two_tokens_at_one_place(
    data: st.DataObject,
) -> None:
    bench = Bench(request(max_tokens=4)).start()
    for _ in range(30):
        if bench.end is not None:
            break
        asked = data.draw(st.sampled_from(bench.started), label="asked")
        output = Output(
            request_id="x",
            index=data.draw(st.integers(0, 4), label="index"),
            token_ids=tuple(data.draw(st.lists(st.integers(0, 1), max_size=2), label="tokens")),
            finish_reason=data.draw(st.sampled_from([None, None, "length", "stop", "error"])),
        )
        bench.do(bench.relay.output(asked, output, bench.now))
    bench.tokens()  # contiguous, each index once
    assert sum(o.finish_reason is not None for o in bench.emitted) <= 1
    if bench.end is not None:
        check_nothing_left_open(bench)


def check_nothing_left_open(bench: Bench) -> None:
    """After the end, only sides that were not cancelled may still speak, and nobody listens."""
    for start in bench.started:
        late = Output(request_id="x", index=0, token_ids=(1,))
        assert bench.relay.output(start, late, bench.now) == []
        assert bench.relay.failed(start, NodeError("late"), bench.now) == []
        assert bench.relay.ended(start, bench.now) == []
    assert bench.relay.tick(bench.now + 1e9) == []
    assert bench.relay.client_gone() == []


def scored_request() -> AddRequest:
    params = SamplingParams(max_tokens=2, seed=7, prompt_logprobs=0)
    return AddRequest(request_id="r", token_ids=array("I", (1, 2, 3)), params=params)


def prompt_scores() -> tuple[TokenLogprobs | None, ...]:
    return (None, TokenLogprobs(-1.0, 1, ()), TokenLogprobs(-2.0, 2, ()))


def test_the_end_waits_for_the_prompts_logprobs_of_a_slow_source() -> None:
    bench = Bench(scored_request()).start()
    bench.say("target", 0, 10)
    bench.say("target", 1, 11, finish_reason="length")
    assert bench.end is None
    bench.say("source", 0, 10, finish_reason="length", prompt_logprobs=prompt_scores())
    assert isinstance(bench.end, Finished)
    assert bench.tokens() == [10, 11]
    told = [o.prompt_logprobs for o in bench.emitted if o.prompt_logprobs is not None]
    assert told == [prompt_scores()]
    assert bench.emitted[0].prompt_logprobs is not None, "a stream shows them before the first"


def test_the_prompts_logprobs_come_with_a_first_token_that_ends_the_text() -> None:
    bench = Bench(scored_request()).start()
    bench.say("source", 0, 10, finish_reason="stop", prompt_logprobs=prompt_scores())
    bench.say("target", 0, 10, finish_reason="stop")
    bench.ended("source")
    assert bench.tokens() == [10]
    assert [o.prompt_logprobs for o in bench.emitted] == [prompt_scores()]


def test_a_source_that_dies_with_the_prompts_logprobs_is_replaced() -> None:
    bench = Bench(scored_request()).start()
    bench.say("target", 0, 10)
    bench.say("target", 1, 11, finish_reason="length")
    bench.fail("source")
    assert bench.end is None
    assert len(bench.started) > 2, "no new attempt"


def test_the_end_of_a_timed_request_waits_for_when_its_source_prefilled() -> None:
    """The target may be faster with all tokens than the source with the one that it sampled."""
    bench = Bench(request(max_tokens=2, timed=True)).start()
    bench.say("target", 0, 10, 11, finish_reason="length", transferred_tokens=2)
    assert bench.end is None
    bench.say("source", 0, 10, finish_reason="length")
    bench.ended("source")
    assert isinstance(bench.end, Finished)
    assert bench.tokens() == [10, 11]


@pytest.mark.parametrize(("timed", "transferred"), [(False, 2), (True, 0)])
def test_nothing_else_waits_for_its_source(timed: bool, transferred: int) -> None:
    """Nor does it if the target had all tokens: the source may never come to prefill."""
    bench = Bench(request(max_tokens=2, timed=timed)).start()
    bench.say("target", 0, 10, 11, finish_reason="length", transferred_tokens=transferred)
    assert isinstance(bench.end, Finished)


@pytest.mark.parametrize("dies", [True, False])
def test_a_source_whose_times_do_not_come_costs_no_attempt(dies: bool) -> None:
    bench = Bench(request(max_tokens=2, timed=True)).start()
    bench.say("target", 0, 10, 11, finish_reason="length", transferred_tokens=2)
    if dies:
        bench.fail("source", lost=True)
    else:
        assert bench.relay.next_deadline() == bench.now + MARKS_S
        bench.wait(MARKS_S)
    assert isinstance(bench.end, Finished)
    assert bench.tokens() == [10, 11]
    assert [asked.side for asked in bench.started] == ["source", "target"]
    assert bench.cancelled == [bench.asked("source")]


def test_the_end_of_a_timed_request_waits_for_when_its_items_were_encoded() -> None:
    bench = Bench(request(max_tokens=2, timed=True, items=ITEMS)).start()
    bench.say("source", 0, 10, finish_reason="length")
    bench.ended("source")
    bench.say("target", 0, 10, 11, finish_reason="length", transferred_tokens=2)
    bench.encoded(0)
    assert bench.end is None
    bench.fail("encoder", item=1)
    assert isinstance(bench.end, Finished)
    assert bench.tokens() == [10, 11]


def test_an_encoder_of_what_was_cached_may_never_come_to_it() -> None:
    bench = Bench(request(max_tokens=2, timed=True, items=ITEMS)).start()
    bench.say("source", 0, 10, finish_reason="length", cached_tokens=40)
    bench.ended("source")
    bench.say("target", 0, 10, 11, finish_reason="length", transferred_tokens=2)
    assert isinstance(bench.end, Finished)


def test_who_computes_the_prompt_is_told_what_is_left_of_the_objective() -> None:
    bench = Bench(request(ttft_s=2.0)).start()
    assert bench.asked("source").request.ttft_s == 2.0
    assert bench.asked("target").request.ttft_s == 0.0, "it waits for the source"
    bench.now += 0.5
    bench.fail("target", status=503)
    assert bench.asked("source", 1).request.ttft_s == pytest.approx(1.5)


def test_what_has_a_token_has_no_objective_for_the_first() -> None:
    bench = Bench(request(ttft_s=2.0)).start()
    bench.say("source", 0, 11)
    bench.fail("target", lost=True)
    asked = bench.asked("source", 1).request
    assert (asked.resume_ids, asked.ttft_s) == ((11,), 0.0)


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("relayed", [0, 2])
def test_what_no_node_can_go_on_with_is_tried_once(side: str, relayed: int) -> None:
    """A grammar that fails in mid-text, say: it would fail again from the same tokens."""
    if side == "source" and relayed:
        pytest.skip("a source says one token")
    bench = Bench(request()).start()
    if relayed:
        bench.say("target", 0, *range(relayed))
    why = "no token fits the grammar"
    bench.say(side, relayed, finish_reason="error", error=why, error_code="grammar_failed")
    assert (bench.error().status, bench.error().code) == (400, "grammar_failed")
    assert why in bench.error().message
    assert len(bench.routed) == 1


def test_a_choice_that_no_node_can_go_on_with_ends_the_others_at_the_node() -> None:
    """The node goes on with its other choices, of which nobody wants to know any more."""
    bench = Bench(request(n=2), sources=False).start()
    bench.say("target", 0, 10)
    bench.say("target", 1, choice=0, finish_reason="error", error_code="grammar_failed")
    assert bench.error().code == "grammar_failed"
    assert bench.cancelled == [bench.asked("target")]


def test_what_fails_at_every_node_by_itself_is_a_500() -> None:
    """Logits that are NaN, say: another node may have better memory, not other weights."""
    bench = Bench(request()).start()
    for attempt in range(3):
        bench.say(
            "target",
            0,
            attempt=attempt,
            finish_reason="error",
            error="logits are NaN",
            error_code="no_token",
        )
    assert len(bench.routed) == 3
    assert (bench.error().status, bench.error().code) == (500, "no_token")
    assert "logits are NaN" in bench.error().message


def test_an_item_that_can_not_be_used_ends_the_request() -> None:
    bench = Bench(request(items=ITEMS)).start()
    bench.say("encoder", 0, finish_reason="error", error="cut off", error_code="invalid_image")
    assert (bench.error().status, bench.error().code) == (400, "invalid_image")
    assert len(bench.routed) == 1


def test_nodes_that_are_told_to_stop_cost_no_attempt() -> None:
    bench = Bench(request()).start()
    for attempt in range(4):
        bench.fail("target" if attempt % 2 else "source", attempt, lost=True, leaving=True)
    assert [avoid for _, avoid in bench.routed] == [frozenset()] * 5, (
        "others may come in their place"
    )
    for attempt in range(4, 7):
        bench.fail("target", attempt, lost=True)
    assert bench.error().status == 502, "two attempts more, as ever"

"""A running request that goes on at another node, as the relay sees it, without a socket."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest, Item, Output, PrefixAt, SamplingParams
from kvbaton.router.config import RelayTimers
from kvbaton.router.node_request import NodeError, NodeRequest
from kvbaton.router.relay import Action, AskNode, CancelNode, Finished, MoveEnded, RequestRelay
from kvbaton.router.route import Route
from tests.router.test_relay import node

A, B, C = node("a", "any"), node("b", "any"), node("c", "any")
PROMPT = (1, 2, 3)
PARAMS = SamplingParams(
    max_tokens=12, seed=7, temperature=0.5, frequency_penalty=0.5, min_tokens=3, logprobs=1
)


def token(index: int) -> int:
    """What every node says."""
    return 100 + index


class Moved:
    """A relay whose target is A, and what it did."""

    def __init__(self, params: SamplingParams = PARAMS, retries: int = 2) -> None:
        self.now = 50.0
        self.asked: list[NodeRequest] = []
        self.cancelled: list[NodeRequest] = []
        self.out: list[Output] = []
        self.gaps: list[float | None] = []
        self.end: Finished | RequestError | None = None
        self.next_route = Route(A)
        timers = RelayTimers(idle_s=60.0, max_retries=retries, move_s=5.0)
        request = AddRequest(request_id="r", token_ids=array("I", PROMPT), params=params)
        self.relay = RequestRelay(
            request, self.route, transfer_id=bytes(16), timers=timers, now=self.now
        )
        self.do(self.relay.start(self.now))

    def route(self, tokens: int, items: Sequence[Item], avoid: frozenset[str]) -> Route | None:
        left = [n for n in (self.next_route.target, B, C) if n.node_id not in avoid]
        return Route(left[0]) if left else None

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            assert self.end is None, f"{action} after {self.end}"
            match action:
                case AskNode(asked):
                    self.asked.append(asked)
                case CancelNode(asked):
                    self.cancelled.append(asked)
                case MoveEnded(gap_s):
                    self.gaps.append(gap_s)
                case Output():
                    self.out.append(action)
                case Finished() | RequestError():
                    self.end = action

    def move(self, to: Route | None = None) -> NodeRequest:
        assert self.relay.can_move()
        held = self.relay.known_tokens
        self.do(self.relay.move(to or Route(B, holder=A, held=held), self.now))
        return self.asked[-1]

    def begin_move(self) -> tuple[NodeRequest, NodeRequest]:
        """The target has said four tokens; it and its successor."""
        (target,) = self.asked
        self.go_on(target, 0, 4)
        return target, self.move()

    def say(self, asked: NodeRequest, index: int, *tokens: int, end: str | None = None) -> None:
        output = Output(request_id="x", index=index, token_ids=tokens, finish_reason=end)
        self.do(self.relay.output(asked, output, self.now))

    def go_on(self, asked: NodeRequest, start: int, end: int) -> None:
        """Say tokens, one at a time, the last of all with the end."""
        for index in range(start, end):
            last = index + 1 == self.relay.request.params.max_tokens
            self.say(asked, index, token(index), end="length" if last else None)

    def tokens(self) -> list[int]:
        told: list[int] = []
        for output in self.out:
            assert output.index == len(told)
            told.extend(output.token_ids)
        return told

    def complete(self) -> None:
        assert isinstance(self.end, Finished)
        assert self.tokens() == [token(i) for i in range(12)]


def test_a_successor_that_caught_up_takes_over() -> None:
    moved = Moved()
    a, b = moved.begin_move()
    assert (b.node, b.side, b.request.resume_ids) == (B, "successor", tuple(map(token, range(4))))
    assert b.request.prefix == PrefixAt(peer=str(A.control_address), num_tokens=7)
    assert (tuple(b.request.token_ids), b.request.params) == (PROMPT, PARAMS), (
        "all goes on as it was"
    )
    assert moved.cancelled == [], "the target goes on meanwhile"
    moved.go_on(a, 4, 5)
    moved.now += 0.25
    moved.say(b, 4, token(4))
    assert moved.cancelled == [a]
    assert moved.gaps == [0.25]
    assert moved.relay.target is b
    moved.go_on(a, 5, 7)  # it has not heard of it
    moved.go_on(b, 5, 12)
    moved.complete()


def test_a_target_that_was_faster_is_stopped_and_all_that_it_said_counts() -> None:
    moved = Moved()
    a, b = moved.begin_move()
    moved.go_on(a, 4, 8)
    moved.say(b, 4, token(4))
    again = moved.asked[-1]
    assert again.node is B
    assert again.request.resume_ids == tuple(map(token, range(8)))
    assert again.request.prefix is None, "it has fetched what there was"
    assert again.request.request_id not in (a.request.request_id, b.request.request_id)
    assert set(moved.cancelled) == {a, b}
    moved.go_on(a, 8, 9)
    moved.go_on(b, 5, 9)
    assert len(moved.tokens()) == 8, "neither is heard any more"
    moved.now += 0.5
    moved.go_on(again, 8, 12)
    assert moved.gaps == [0.5]
    moved.complete()


def test_tokens_computed_elsewhere_are_not_told_as_cached() -> None:
    moved = Moved()
    _, b = moved.begin_move()
    for index in (4, 5):
        output = Output(request_id="x", index=index, token_ids=(token(index),), cached_tokens=3)
        moved.do(moved.relay.output(b, output, moved.now))
        assert moved.out[-1].cached_tokens == 0


@pytest.mark.parametrize("how", ["error", "abort", "refused", "late", "another", "skips"])
def test_a_successor_that_fails_changes_nothing(how: str) -> None:
    moved = Moved()
    a, b = moved.begin_move()
    moved.go_on(a, 4, 6)
    if how in ("error", "abort"):
        moved.say(b, 4, end=how)
    elif how == "refused":
        moved.do(moved.relay.failed(b, NodeError("busy", 429), moved.now))
    elif how == "late":
        assert moved.relay.next_deadline() == moved.now + 5.0
        moved.now += 5.0
        moved.do(moved.relay.tick(moved.now))
    else:
        moved.say(b, *((4, 77) if how == "another" else (7, token(7))))
    assert moved.cancelled == [b]
    assert moved.gaps == [None]
    assert moved.relay.can_move(), "perhaps later"
    moved.go_on(a, 6, 12)
    moved.complete()


@pytest.mark.parametrize("late", [False, True])
def test_a_successor_that_fails_after_the_target_was_stopped_is_a_retry(late: bool) -> None:
    moved = Moved(retries=1)
    a, b = moved.begin_move()
    moved.go_on(a, 4, 8)
    moved.say(b, 4, token(4))
    again = moved.asked[-1]
    moved.next_route = Route(C)
    if late:
        assert moved.relay.next_deadline() == moved.now + 5.0
        moved.now += 5.0
        moved.do(moved.relay.tick(moved.now))
    else:
        moved.do(moved.relay.failed(again, NodeError("gone"), moved.now))
    c = moved.asked[-1]
    assert (c.node, c.side, c.request.resume_ids) == (C, "target", tuple(map(token, range(8))))
    moved.go_on(c, 8, 12)
    moved.complete()


def test_a_target_that_dies_meanwhile_is_a_retry() -> None:
    moved = Moved(retries=1)
    a, b = moved.begin_move()
    moved.do(moved.relay.failed(a, NodeError("gone"), moved.now))
    retried = moved.asked[-1]
    assert b in moved.cancelled
    assert moved.gaps == [None]
    assert (retried.side, retried.request.resume_ids) == ("target", tuple(map(token, range(4))))
    moved.go_on(retried, 4, 12)
    moved.complete()


def test_moves_are_no_retries() -> None:
    moved = Moved(retries=0)
    at = moved.asked[0]
    moved.go_on(at, 0, 2)
    for start in range(2, 8, 2):
        to = B if at.node is A else A
        following = moved.move(Route(to, holder=at.node, held=moved.relay.known_tokens))
        moved.go_on(following, start, start + 2)
        at = following
    moved.go_on(at, 8, 12)
    moved.complete()


def test_the_end_ends_a_move() -> None:
    moved = Moved()
    a, b = moved.begin_move()
    moved.go_on(a, 4, 12)
    assert moved.cancelled == [b]
    moved.complete()


def test_who_leaves_ends_both() -> None:
    moved = Moved()
    a, b = moved.begin_move()
    moved.do(moved.relay.client_gone())
    assert set(moved.cancelled) == {a, b}
    assert not moved.relay.is_moving


def test_what_can_not_move() -> None:
    several = Moved(SamplingParams(max_tokens=12, seed=7, n=2))
    several.say(several.asked[0], 0, token(0))
    assert not several.relay.can_move()
    young = Moved()
    assert not young.relay.can_move(), "its prompt is not computed"
    old = Moved()
    old.go_on(old.asked[0], 0, 11)
    assert not old.relay.can_move(), "one more token, and it is over"
    moving = Moved()
    moving.go_on(moving.asked[0], 0, 4)
    moving.move()
    assert not moving.relay.can_move()


Event = tuple[str, int]
EVENTS = st.lists(
    st.tuples(st.sampled_from(["say", "move", "fail", "late", "stale"]), st.integers(0, 5)),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(EVENTS)
@example([("say", 0)] * 12)
def test_no_order_of_events_loses_or_repeats_a_token(events: list[Event]) -> None:
    """Nodes say what they would: each goes on from where it was told to, at its own speed."""
    moved = Moved(retries=100)
    said: dict[NodeRequest, int] = {}

    def speak(asked: NodeRequest) -> None:
        index = said.get(asked, len(asked.request.resume_ids))
        if index < asked.request.params.max_tokens:
            said[asked] = index + 1
            moved.go_on(asked, index, index + 1)

    moved.next_route, open_now = Route(C), list(moved.asked)
    for what, which in events:
        if moved.end is not None:
            break
        asked = open_now[which % len(open_now)]
        if what == "say":
            speak(asked)
        elif what == "stale":
            closed = [asked for asked in moved.asked if not asked.open]
            if closed:
                speak(closed[which % len(closed)])
        elif what == "move" and moved.relay.can_move():
            moved.move(Route((A, B, C)[which % 3], holder=asked.node, held=5))
        elif what == "fail":
            moved.relay._avoid = frozenset()
            moved.do(moved.relay.failed(asked, NodeError("boom"), moved.now))
        elif what == "late":
            moved.now += which
            moved.do(moved.relay.tick(moved.now))
        open_now = [asked for asked in moved.asked if asked.open]
        if moved.end is None:
            assert len(open_now) in (1, 2)
            assert set(moved.asked) == {*moved.cancelled, *open_now}
    assert moved.end is None or not open_now
    while moved.end is None:
        speak(next(asked for asked in reversed(moved.asked) if asked.open))
    moved.complete()

"""Rules broken one at a time, in the real code. The simulator must notice."""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import pytest

from kvbaton.connectors.digest import BlockRange, PendingDigests, Sums
from kvbaton.connectors.protocol import incoming, source, target
from kvbaton.connectors.protocol.checks import is_repetition
from kvbaton.connectors.protocol.events import (
    Deliver,
    Fail,
    Fence,
    Fenced,
    Release,
    Unquarantine,
)
from kvbaton.connectors.protocol.incoming import Incoming, TargetState
from kvbaton.connectors.protocol.machine import Machine, Tombstones
from kvbaton.connectors.protocol.outgoing import SourceState
from kvbaton.connectors.protocol.source import Source
from kvbaton.connectors.protocol.source_sessions import SourceSessions
from kvbaton.connectors.protocol.target import Target
from kvbaton.connectors.protocol.target_sessions import TargetSessions
from kvbaton.connectors.transfer import target_worker
from kvbaton.connectors.transfer.source_worker import SourceWorker
from kvbaton.connectors.transfer.target_worker import TargetWorker
from kvbaton.decode.target_connector import TargetConnector
from kvbaton.engine.block_pool import BlockPool
from kvbaton.engine.client import EngineClient
from kvbaton.engine.encoder.cache_manager import EncoderCacheManager
from kvbaton.engine.kv_cache_manager import KVCacheManager
from kvbaton.errors import RequestError
from kvbaton.messages.control import Accepted, Ack, Drained, SessionDrained
from kvbaton.prefill.source_connector import SourceConnector
from kvbaton.router.dispatch import Dispatcher
from kvbaton.router.node_request import NodeRequest
from kvbaton.router.relay import CancelNode, RequestRelay
from kvbaton.types import Attempt
from tests.simulator.executor import SimulatedExecutor
from tests.simulator.run import simulate
from tests.simulator.world import ViolationError

Patch = tuple[Any, str, Any]


class Mutant(NamedTuple):
    """A rule broken.

    Attributes:
        name: what it does wrong.
        patches: owner, attribute, and what stands there instead.
        caught_by: ``simulator``, or the test that catches what the simulator can't see.
    """

    name: str
    patches: tuple[Patch, ...]
    caught_by: str = "simulator"


MUTANTS: list[Mutant] = []


def breaks(*places: tuple[Any, str], caught_by: str = "simulator") -> Callable[[Any], Any]:
    """Add a mutant that has a function in the place of others."""

    def add(function: Any) -> Any:
        patches = tuple((owner, name, function) for owner, name in places)
        MUTANTS.append(Mutant(function.__name__, patches, caught_by))
        return function

    return add


def drop(machine: Any, kind: type) -> None:
    """Take actions of a kind out of those decided on."""
    actions = machine.actions
    actions[:] = [action for action in actions if not isinstance(action, kind)]


def nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of what does something, or of a check that finds something."""


def off(name: str, *places: tuple[Any, str], caught_by: str = "simulator") -> None:
    """Add a mutant that does not do something."""
    patches = tuple((owner, attribute, nothing) for owner, attribute in places)
    MUTANTS.append(Mutant(name, patches, caught_by))


# --- D: when blocks are free, when they may be read ---


real_give_up = Target._give_up


@breaks((Target, "_give_up"))
def frees_on_timeout(self: Any, record: Any, given: Any) -> None:
    real_give_up(self, record, given)
    if record.name in self.live:
        self._end(record)


real_leave = Target._leave


@breaks((Target, "_leave"))
def frees_on_cancel(self: Any, record: Any, outcome: str) -> None:
    real_leave(self, record, outcome)
    if record.name in self.live:
        self._end(record)


@breaks((Target, "_try_deliver"))
def trusts_complete(self: Any, record: Any) -> None:
    if record.complete is not None:
        self.do(Deliver(record.name, record.complete.choices, 0, record.num_tokens))
        self._send(record, Ack, verdict="ok")
        record.outcome = "delivered"
        self._end(record)


@breaks((Target, "_verified"))
def trusts_notices(self: Any, record: Any, event: Any) -> None:
    record.verified[event.write] = ()
    self._try_deliver(record)


real_landed = Target._landed


@breaks((Target, "_landed"))
def counts_one_notice_for_all(self: Any, record: Any, event: Any) -> None:
    real_landed(self, record, event)
    arrival = record.arrivals.get(event.write)
    if arrival is not None and arrival.missing:
        arrival.missing.clear()
        self.do(record.verification(event.write))


@breaks((Target, "_landed"))
def counts_one_part_for_all(self: Any, record: Any, event: Any) -> None:
    real_landed(self, record, msgspec.structs.replace(event, parts=event.part + 1))


@breaks((Incoming, "valid_through"))
def takes_all_for_valid(self: Any) -> Any:
    return self.num_tokens


real_lose = TargetSessions.lose


@breaks((TargetSessions, "lose"))
def takes_a_lost_peers_writes_for_gone(self: Any, node: Any, why: str) -> None:
    real_lose(self, node, why)
    for other in self.sessions_with(node):
        self._release_all(other)


real_session_end = TargetSessions.end_session


@breaks((TargetSessions, "end_session"))
def ends_quarantine_with_the_session(self: Any, session: Any, why: str, **options: Any) -> None:
    real_session_end(self, session, why, **options)
    self._release_all(session)


@breaks((TargetWorker, "_fence"))
def believes_a_fence_that_did_not_hold(self: Any, action: Any, now: float) -> None:
    _, links = self.linked.pop(action.node, (action.node, {}))
    for (own, _), peer in links.items():
        self.transports[own].fence(peer)
    self.handle(Fenced(action.node), now)


real_end = Target._end


@breaks((Target, "_end"))
def keeps_delivered_blocks_in_quarantine(self: Any, record: Any) -> None:
    real_end(self, record)
    if record.outcome == "delivered":
        drop(self, Unquarantine)


MUTANTS.append(
    Mutant(
        "hands_out_reserved_blocks",
        (
            (KVCacheManager, "hold_incoming", nothing),
            (KVCacheManager, "release_incoming", nothing),
        ),
    )
)

# --- D: one outcome ---


@breaks((Target, "_fail"))
def fails_twice(self: Any, record: Any, reason: str, **options: Any) -> None:
    for _ in range(2):
        self.do(Fail(record.name, record.valid_through(), reason))
    self._leave(record, "failed")


@breaks((Target, "_cancel_target"))
def fails_after_cancel(self: Any, record: Any, event: Any) -> None:
    self.do(Fail(record.name, record.start, "cancelled"))
    self._leave(record, "cancelled")


real_try_deliver = Target._try_deliver


@breaks((Target, "_try_deliver"))
def delivers_and_fails(self: Any, record: Any) -> None:
    real_try_deliver(self, record)
    if any(isinstance(action, Deliver) for action in self.actions):
        self.do(Fail(record.name, record.start, "a second outcome"))


# --- D: what it asks, and of whom ---


@breaks((Target, "_repeat_cancel"))
def cancels_once(self: Any, record: Any, given: Any) -> None:
    self.ring_in("resend", record.name, self.timers.resend)
    if not any("> Cancel" in line for _, line in record.story):
        self._answer_late(record, None)


real_up = TargetSessions._up


@breaks((TargetSessions, "_up"))
def takes_welcome_for_drained(self: Any, line: Any, session: Any, message: Any) -> None:
    real_up(self, line, session, message)
    for other in self.sessions_with(message.sender):
        if other.over:
            self._release_all(other)


@breaks((TargetSessions, "_may_answer"))
def never_asks_what_has_drained(self: Any, session: Any, over: Any) -> bool:
    return False


real_repeat_reserve = Target._repeat_reserve


@breaks((Target, "_repeat_reserve"))
def keeps_nothing_alive(self: Any, record: Any, given: Any) -> None:
    if record.state is TargetState.RESERVED:
        real_repeat_reserve(self, record, given)
    else:
        self.ring_in("resend", record.name, self.timers.lease / 4)


off("ignores_a_source_that_is_gone", (TargetSessions, "peer_gone"))


@breaks((TargetSessions, "_up"))
def fences_a_healthy_peer(self: Any, line: Any, session: Any, message: Any) -> None:
    real_up(self, line, session, message)
    self.do(Fence(message.sender))


# Its connection breaks, or it is silent: no schedule needs the third way to learn of it.
off(
    "waits_for_a_stale_generation",
    (TargetSessions, "_replaced"),
    caught_by="test_protocol_target.py::test_another_generation_at_an_address_has_the_old_one_fenced",
)


# Only a peer that lies in the session of another one could show it.
@breaks(
    (Target, "_about_attempt"),
    caught_by="test_protocol_target.py::test_an_answer_in_the_session_of_another_peer_moves_nothing",
)
def takes_foreign_answers(self: Any, session: Any, message: Any) -> None:
    record = self.record(Attempt(message.transfer_id, message.attempt))
    record.session = record.session or session
    self.apply(type(message), record, message)


# --- P: when blocks are free, when a drain is over ---


@breaks((Source, "_cancel_over"))
def drops_unknown_cancels(self: Any, record: Any, message: Any) -> None:
    self.count("dropped")


@breaks((Source, "_cancel_over"))
def forgets_cancels(self: Any, record: Any, message: Any) -> None:
    if not self.has_undrained(record.name):
        self._send(record, Drained)


@breaks((Source, "_cancel"))
def drains_early(self: Any, record: Any, message: Any) -> None:
    self._send(record, Drained)
    if record.state is not SourceState.STOPPING:
        self._stop(record, "cancelled")


real_stop = Source._stop


@breaks((Source, "_stop"))
def releases_early(self: Any, record: Any, outcome: str) -> None:
    record.in_flight.clear()
    real_stop(self, record, outcome)


real_source_end = Source._end


@breaks((Source, "_end"))
def never_releases(self: Any, record: Any, outcome: str) -> None:
    real_source_end(self, record, outcome)
    drop(self, Release)


real_closed = SourceSessions.closed


@breaks((SourceSessions, "closed"))
def takes_closed_for_drained(self: Any, event: Any) -> None:
    real_closed(self, event)
    if event.session in self._over:
        self._over[event.session].in_flight.clear()


@breaks((SourceSessions, "_tell_drained"))
def says_drained_as_soon_as_it_is_asked(self: Any, session: Any, asked: Any) -> None:
    if asked:
        self.send(session, SessionDrained, over=tuple(asked))


MUTANTS.append(
    Mutant(
        "reuses_blocks_that_are_sent",
        (
            (KVCacheManager, "hold_outgoing", nothing),
            (KVCacheManager, "release_outgoing", nothing),
        ),
    )
)


real_report_blocks = SourceConnector._report_blocks


@breaks((SourceConnector, "_report_blocks"))
def reports_blocks_of_a_step_in_flight(self: Any, *args: Any, in_flight: bool = False) -> Any:
    return real_report_blocks(self, *args)


off("gives_no_prepared_write_back", (SourceWorker, "_drop_plans"))


# --- P: what it posts ---


@breaks((Source, "_write_ended"))
def posts_again(self: Any, record: Any, event: Any) -> None:
    self._mark_terminal(record, event)
    if not event.ok and record.state is not SourceState.STOPPING:
        record.posted = record.writes[event.write][0]
        self._push(record)
    elif record.state is SourceState.STOPPING:
        self._settle(record)


class OfOneRange:
    """As `PendingSums`."""

    def __init__(self, pending: PendingDigests) -> None:
        self._pending = pending

    def poll(self) -> list[Sums] | None:
        found = self._pending.poll()
        return None if found is None else found[0]


def signs_at_push(
    self: Any, attempt: Any, tables: Any, start: int, end: int, counted: Any, **options: Any
) -> Any:
    def sums(group: int, blocks: Any, **options: Any) -> Any:
        begin = max(start, counted[group])
        first = begin - begin % self.executor.layouts[0][group].block_size
        return OfOneRange(self.executor.digest([BlockRange(group, blocks, first, first, end)]))

    with mock.patch.object(self.executor, "sums", sums):
        return real_report_blocks(self, attempt, tables, start, end, counted)


MUTANTS.append(
    Mutant(
        "signs_at_push",
        (
            (SourceConnector, "_report_blocks", signs_at_push),
            (SourceConnector, "_report_in_flight", nothing),
        ),
    )
)


real_push = Source._push


@breaks((Source, "_push"))
def knows_no_common_block_border(self: Any, record: Any) -> None:
    with mock.patch.object(record.session, "unit", 1):
        real_push(self, record)


@breaks((Source, "_first_tokens"))
def sends_a_wrong_first_token(self: Any, record: Any, event: Any) -> None:
    (first, *others) = event.choices
    record.choices = (msgspec.structs.replace(first, token=first.token + 1), *others)
    self._push(record)


off("never_evicts", (Source, "_evict"))
off("evicts_nothing_from_the_cache", (KVCacheManager, "evict"))


# --- P: whom it believes ---


@breaks((Source, "_reserve_announced"))
def takes_a_reserve_of_another_prompt(self: Any, record: Any, message: Any) -> None:
    self._check_reserve(record, message)
    self._bind(record, message)
    self._engage(record)


@breaks((Source, "_announce_reserved"))
def takes_a_request_of_another_prompt(self: Any, record: Any, event: Any) -> None:
    self._engage(record)


@breaks((source, "is_repetition"))
def lets_a_reserve_change(old: Any, new: Any) -> bool:
    return True


@breaks((Source, "_foreign"))
def takes_foreign_messages(self: Any, session: Any, record: Any, message: Any) -> None:
    self.apply(type(message), record, message)


off("ignores_a_target_that_is_gone", (SourceSessions, "peer_gone"))


@breaks(
    (SourceSessions, "_is_for_us"),
    caught_by="test_protocol_source.py::test_a_session_with_an_earlier_generation_is_not_taken_up",
)
def takes_messages_to_an_earlier_generation(self: Any, message: Any) -> bool:
    return True


@breaks((Source, "_reserve_again"))
def renews_no_lease(self: Any, record: Any, message: Any) -> None:
    self._check_reserve(record, message)
    if is_repetition(record.reserve, message):
        self._send(record, Accepted)


@breaks((Source, "_repeat"))
def tells_no_progress(self: Any, record: Any, given: Any) -> None:
    self.ring_in("resend", record.name, self.timers.resend)
    if record.state is SourceState.COMPLETED:
        self._send_complete(record)


real_engage = Source._engage


@breaks((Source, "_engage"))
def forgets_the_lease(self: Any, record: Any) -> None:
    real_engage(self, record)
    self.clear("deadline", record.name)


# No schedule of thousands has that order: a `Hello` must overtake a later session's messages.
@breaks(
    (SourceSessions, "is_news"),
    caught_by="test_protocol_source.py::test_an_overtaken_hello_ends_nothing",
)
def takes_a_stale_hello(self: Any, hello: Any) -> bool:
    return True


real_session_of = SourceSessions.session_of


@breaks((SourceSessions, "session_of"))
def takes_stale_sessions(self: Any, event: Any) -> Any:
    name = event.message.session
    known = self.known.get(name) or self._over.get(name)
    if known is None:
        return real_session_of(self, event)
    known.link = event.link
    return known


# --- both sides: numbers, checks, memory ---


@breaks((Machine, "admit"))
def admits_duplicate_numbers(self: Any, session: Any, link: Any, seq: int) -> bool:
    session.last_in, session.link = seq, link
    return True


# To remember for longer harms nobody in a schedule: ids are used once.
@breaks(
    (Tombstones, "outcome"),
    caught_by="test_protocol_source.py::test_an_ended_attempt_is_forgotten_in_the_end",
)
def forgets_no_tombstone(self: Any, name: Any, now: float) -> Any:
    return self._outcomes.get(name, (None, now))[0]


# --- block keys ---


real_send_held = SourceConnector._send_held


@breaks((SourceConnector, "_send_held"))
def sends_another_block(self: Any, action: Any) -> None:
    """As if a key still meant the block that it once named."""
    real = BlockPool.match

    def match(pool: Any, keys: Any, group: int = 0) -> list[int]:
        return [real(pool, keys, group)[0]] * len(keys) if real(pool, keys, group) else []

    with mock.patch.object(BlockPool, "match", match):
        real_send_held(self, action)


@breaks((SourceConnector, "_send_held"))
def lets_go_while_it_pushes(self: Any, action: Any) -> None:
    real_send_held(self, action)
    for spans in self._held.pop(action.attempt, ()):
        self.scheduler.blocks.release_outgoing(spans)


real_pin_keys = Source._pin


@breaks((Source, "_pin"))
def pins_without_limit(self: Any, record: Any, message: Any) -> None:
    with mock.patch.multiple(source, PINNED_SHARE=0, PINNED_SHARE_PER_PEER=0):
        real_pin_keys(self, record, message)


@breaks((Source, "_pin"))
def pins_for_one_peer_without_limit(self: Any, record: Any, message: Any) -> None:
    with mock.patch.object(source, "PINNED_SHARE_PER_PEER", 0):
        real_pin_keys(self, record, message)


@breaks((TargetConnector, "poll"))
def takes_all_as_come(self: Any, now: float) -> Any:
    """What P said of how much it still has is not heeded."""
    taken = list(self.receiver.take())
    for i, action in enumerate(taken):
        if isinstance(action, Deliver) and action.attempt in self._live:
            taken[i] = msgspec.structs.replace(action, num_tokens=self._live[action.attempt].end)
    with mock.patch.object(self.receiver, "take", return_value=taken):
        return real_target_poll(self, now)


real_target_poll = TargetConnector.poll

off("keeps_no_sums_of_what_it_received", (SimulatedExecutor, "_keep"))
real_look_at_check = TargetWorker._check_digests


@breaks((TargetWorker, "_check_digests"))
def trusts_what_it_fetched(self: Any, check: Any, now: float) -> None:
    """Digests of blocks asked for by key are not compared."""
    record = self.target.live.get(check.order.attempt)
    with ExitStack() as stack:
        if record is not None and record.order.keys:
            stack.enter_context(mock.patch.object(target_worker, "mismatches", return_value=()))
        real_look_at_check(self, check, now)


off("checks_no_reserve", (source, "check_reserve"))
off("checks_no_notice", (incoming, "check_landed"))
off("checks_no_complete", (target, "check_complete"))
off("checks_no_ack", (source, "check_ack"))


off("checks_no_hello", (SourceSessions, "check_hello"))


# --- encoder outputs beside a language model ---


real_retired, real_pin = EncoderCacheManager.retired, EncoderCacheManager._pin


def pin_without_ref(self: Any, need: Any, blocks: Any) -> None:
    with mock.patch.object(self._outputs, "ref", nothing):
        real_pin(self, need, blocks)


def unpin_without_deref(self: Any, need: Any) -> None:
    need.blocks = None


@breaks((EncoderCacheManager, "retired"))
def lets_go_of_rows_that_a_step_reads(self: Any, sequence: Any) -> None:
    real_retired(self, sequence)
    for _, blocks in self._left:
        self._outputs.deref([blocks])
    self._left.clear()


@breaks((EncoderCacheManager, "_use_transfer"))
def uses_an_items_hand_over_again(self: Any, request: Any, item: Any) -> Any:
    return item.transfer


real_engage_source = SourceConnector._engage


@breaks((SourceConnector, "_engage"))
def runs_a_prompt_again_with_used_hand_overs(self: Any, source: Any, action: Any) -> None:
    real_add = self.scheduler.add

    def add(request: Any, **how: Any) -> None:
        real_add(msgspec.structs.replace(request, items=source.request.items), **how)

    with mock.patch.object(self.scheduler, "add", add):
        real_engage_source(self, source, action)


@breaks((EncoderCacheManager, "ready_until"))
def takes_every_item_for_ready(self: Any, sequence: Any, start: int) -> int:
    return 1 << 30


@breaks((EncoderCacheManager, "_give_up_one"))
def never_gives_up_a_pin(self: Any) -> bool:
    return False


MUTANTS.append(
    Mutant(
        "reuses_blocks_of_pinned_items",
        (
            (EncoderCacheManager, "_pin", pin_without_ref),
            (EncoderCacheManager, "_unpin", unpin_without_deref),
        ),
    )
)
off("declines_no_item", (EncoderCacheManager, "_decline"))
off("waits_for_items_of_a_sequence_that_is_over", (EncoderCacheManager, "retired"))


# --- running requests that move to another node ---


real_node_requests, real_relay_move = RequestRelay._node_requests, RequestRelay.move


def resumes_with(**wrong: Any) -> Callable[..., Any]:
    """What goes on elsewhere does so with other parameters."""

    def node_requests(self: Any, route: Any, resume_ids: Any, now: float) -> Any:
        request = self.request
        if resume_ids:
            params = msgspec.structs.replace(request.params, **wrong)
            self.request = msgspec.structs.replace(request, params=params)
        try:
            return real_node_requests(self, route, resume_ids, now)
        finally:
            self.request = request

    return node_requests


WRONG: dict[str, dict[str, Any]] = {
    "forgets_the_penalties": {"frequency_penalty": 0.0, "presence_penalty": 0.0},
    "loses_the_seed": {"seed": 99},
    "asks_for_no_logprobs": {"logprobs": None},
    "forgets_what_stops_it": {"stop_token_ids": ()},
}
for name, wrong in WRONG.items():
    MUTANTS.append(Mutant(name, ((RequestRelay, "_node_requests", resumes_with(**wrong)),)))


@breaks((RequestRelay, "_node_requests"))
def resumes_as_a_longer_prompt(self: Any, route: Any, resume_ids: Any, now: float) -> Any:
    """Where the prompt ends is forgotten, and with it what penalties and limits count."""
    request = self.request
    whole = request.token_ids + array("I", resume_ids)
    self.request = msgspec.structs.replace(request, token_ids=whole)
    try:
        return real_node_requests(self, route, (), now)
    finally:
        self.request = request


@breaks((RequestRelay, "_node_requests"))
def resumes_a_token_too_late(self: Any, route: Any, resume_ids: Any, now: float) -> Any:
    """It says the one after the next first, as what follows."""
    asked = real_node_requests(self, route, resume_ids, now)
    for one in asked:
        if resume_ids:
            longer = (*resume_ids, resume_ids[-1])
            one.request = msgspec.structs.replace(one.request, resume_ids=longer)
    return asked


@breaks((RequestRelay, "_from_target"))
def repeats_the_last_token(self: Any, asked: Any, output: Any, now: float) -> Any:
    """What the client has already is relayed again, with what is new."""
    choice = self._choices[output.choice]
    if output.index < len(choice.tokens):
        del choice.tokens[output.index :]
    return real_from_target(self, asked, output, now)


real_from_target = RequestRelay._from_target


@breaks((RequestRelay, "move"))
def stops_the_source_before_the_target_has_it(self: Any, route: Any, now: float) -> Any:
    before = self._open
    actions = real_relay_move(self, route, now)
    self._open = [one for one in self._open if one not in before]
    return [*actions, *self._cancel(list(before))]


MUTANTS.append(
    Mutant(
        "heeds_answers_after_it_has_cancelled",
        (
            (NodeRequest, "open", property(lambda self: True, nothing)),
            (EngineClient, "cancel", nothing),
        ),
    )
)


@breaks((RequestRelay, "_from_successor"))
def lets_the_source_go_on(self: Any, asked: Any, output: Any, now: float) -> Any:
    actions = real_from_successor(self, asked, output, now)
    return [one for one in actions if not isinstance(one, CancelNode)]


real_from_successor = RequestRelay._from_successor


@breaks((RequestRelay, "_from_successor"))
def takes_over_with_a_gap(self: Any, asked: Any, output: Any, now: float) -> Any:
    """The first token of the successor is not heard, as if it were the source's."""
    later = msgspec.structs.replace(output, token_ids=output.token_ids[1:])
    return real_from_successor(self, asked, later, now)


real_failed = RequestRelay.failed


@breaks((RequestRelay, "failed"))
def a_failed_move_ends_the_request(self: Any, asked: Any, error: Any, now: float) -> Any:
    target = self.target
    if asked.open and asked.side == "successor" and target is not None:
        return self.fail(RequestError(error.message, status=502, code="node_failed"))
    return real_failed(self, asked, error, now)


off("never_ends_leaving_a_node", (Dispatcher, "left"))


TELLING: dict[int, str] = {
    1: "fences_a_healthy_peer declines_no_item",
    3: (
        "trusts_what_it_fetched forgets_the_penalties loses_the_seed repeats_the_last_token "
        "stops_the_source_before_the_target_has_it lets_the_source_go_on never_ends_leaving_a_node"
    ),
    5: "believes_a_fence_that_did_not_hold knows_no_common_block_border",
    8: "posts_again takes_foreign_messages",
    12: "takes_a_reserve_of_another_prompt",
    13: "cancels_once",
    19: "resumes_as_a_longer_prompt",
    21: "reports_blocks_of_a_step_in_flight",
    24: (
        "frees_on_cancel trusts_complete takes_all_for_valid ends_quarantine_with_the_session "
        "hands_out_reserved_blocks fails_twice drains_early releases_early never_releases "
        "reuses_blocks_that_are_sent gives_no_prepared_write_back sends_a_wrong_first_token "
        "ignores_a_target_that_is_gone forgets_the_lease takes_stale_sessions "
        "admits_duplicate_numbers checks_no_reserve checks_no_notice"
    ),
    27: "never_asks_what_has_drained",
    29: "counts_one_part_for_all lets_go_of_rows_that_a_step_reads",
    38: "frees_on_timeout",
    41: "forgets_cancels checks_no_ack",
    43: (
        "drops_unknown_cancels pins_without_limit pins_for_one_peer_without_limit "
        "asks_for_no_logprobs resumes_a_token_too_late heeds_answers_after_it_has_cancelled"
    ),
    46: "fails_after_cancel",
    53: (
        "trusts_notices keeps_delivered_blocks_in_quarantine delivers_and_fails signs_at_push "
        "never_evicts evicts_nothing_from_the_cache checks_no_hello takes_every_item_for_ready "
        "reuses_blocks_of_pinned_items waits_for_items_of_a_sequence_that_is_over"
    ),
    62: "takes_a_request_of_another_prompt sends_another_block takes_all_as_come",
    69: "lets_a_reserve_change renews_no_lease",
    86: "takes_welcome_for_drained takes_closed_for_drained says_drained_as_soon_as_it_is_asked",
    119: "checks_no_complete",
    126: "ignores_a_source_that_is_gone",
    149: "keeps_nothing_alive",
    158: "counts_one_notice_for_all lets_go_while_it_pushes",
    187: "forgets_what_stops_it takes_over_with_a_gap",
    198: "tells_no_progress keeps_no_sums_of_what_it_received",
    216: "takes_a_lost_peers_writes_for_gone",
    259: "a_failed_move_ends_the_request",
    281: (
        "uses_an_items_hand_over_again runs_a_prompt_again_with_used_hand_overs "
        "never_gives_up_a_pin"
    ),
}
"""Schedules that catch what few others do, and what each catches: it is tried first of all.

This file, run as a module, tells which they are now.
"""
SEEDS: tuple[int, ...] = tuple(dict.fromkeys([24, 53, *TELLING, *range(300)]))


@contextmanager
def broken(mutant: Mutant) -> Iterator[None]:
    """With a rule broken everywhere."""
    with ExitStack() as stack:
        for owner, name, instead in mutant.patches:
            stack.enter_context(mock.patch.object(owner, name, instead))
        yield


def first_caught(mutant: Mutant) -> int | None:
    """The first seed whose schedule tells a mutant."""
    own = [seed for seed, names in TELLING.items() if mutant.name in names.split()]
    with broken(mutant):
        for seed in [*own, *SEEDS]:
            try:
                simulate(seed)
            except ViolationError as violation:
                cause = violation.__cause__ or violation.__context__
                assert not isinstance(cause, AttributeError | NameError | TypeError), (
                    f"{mutant.name} is out of date: {cause!r}"
                )
                return seed
    return None


SEEN = [mutant for mutant in MUTANTS if mutant.caught_by == "simulator"]
UNSEEN = [mutant for mutant in MUTANTS if mutant.caught_by != "simulator"]


@pytest.mark.parametrize("mutant", SEEN, ids=lambda m: m.name)
def test_the_simulator_catches(mutant: Mutant) -> None:
    assert first_caught(mutant) is not None, f"it survived {len(SEEDS)} schedules"


@pytest.mark.parametrize("mutant", UNSEEN, ids=lambda m: m.name)
def test_a_unit_test_catches(mutant: Mutant) -> None:
    file, _, test = mutant.caught_by.partition("::")
    module = importlib.import_module(f"tests.connectors.{file.removesuffix('.py')}")
    getattr(module, test)()
    with broken(mutant), pytest.raises(AssertionError):
        getattr(module, test)()


def test_the_simulator_sees_most_rules() -> None:
    assert len(SEEN) >= 79
    assert len(UNSEEN) <= 6


def main() -> None:
    """Print what `TELLING` may be, for when a change has made other schedules tell."""
    found: dict[int, list[str]] = {}
    for mutant in SEEN:
        seed = first_caught(mutant)
        if seed is not None:
            found.setdefault(seed, []).append(mutant.name)
    for seed, names in sorted(found.items()):
        print(f'{seed}: "{" ".join(names)}",')


if __name__ == "__main__":
    main()

"""Machines and nodes that break one rule each. The simulator must catch every one."""

from __future__ import annotations

from functools import cached_property

import pytest

from kvbaton.connectors.protocol.events import (
    Closed,
    Deliver,
    Landed,
    OpenPeer,
    Post,
    Received,
    Verified,
    WriteEnded,
)
from kvbaton.connectors.protocol.source import Source
from kvbaton.connectors.protocol.source_sessions import Outgoing, SessionState, SourceSession
from kvbaton.connectors.protocol.target import Target
from kvbaton.connectors.protocol.target_sessions import Incoming, Line
from kvbaton.messages.control import Ack, Cancel, Drained
from kvbaton.testing.simulated_decode import Decode, Stay
from kvbaton.testing.simulated_node import Job
from kvbaton.testing.simulated_prefill import Prefill, Run
from kvbaton.testing.simulator import simulate
from kvbaton.types import NodeId


class FreesOnTimeout(Target):
    """Frees blocks when its patience ends."""

    def _give_up(self, record: Incoming, given: None) -> None:
        self._fail(record, "timeout")
        self._end(record, "failed")


class FreesOnCancel(Target):
    """Frees blocks as soon as `Cancel` is sent."""

    def _drain(self, record: Incoming, outcome: str) -> None:
        super()._drain(record, outcome)
        self._end(record, outcome)


class TrustsComplete(Target):
    """Takes P's word that the bytes are here."""

    def _try_deliver(self, record: Incoming) -> None:
        if record.complete is None:
            return
        self._do(Deliver(record.name, record.complete.choices, 0))
        self._send(record, Ack, verdict="ok")
        self._end(record, "delivered")


class TrustsNotices(Target):
    """Delivers when every write has landed, whatever the digests say."""

    def _verified(self, record: Incoming, event: Verified) -> None:
        record.verified[event.write] = ()
        self._try_deliver(record)


class CountsOneNotice(Target):
    """Takes one rank pair's notice for all."""

    def _landed(self, record: Incoming, event: Landed) -> None:
        super()._landed(record, event)
        arrival = record.arrivals.get(event.write)
        if arrival is not None and arrival.missing:
            arrival.missing.clear()
            self._verify(record, event.write, arrival)


class NoFence(Target):
    """Takes a dead peer's writes for gone."""

    def _lose(self, node: NodeId) -> None:
        super()._lose(node)
        for session in [s for s in self._sessions.values() if s.node == node]:
            self._release_all(session)


class CancelsOnce(Target):
    """Never repeats `Cancel`."""

    def _repeat_cancel(self, record: Incoming, given: None) -> None:
        self._in("resend", record.name, self.timers.resend)
        if not any("> Cancel" in line for line in self.story(record.name)):
            self._cancel_again(record, None)


class AlwaysClean(Target):
    """Tells every P that it needs no promise."""

    def _unsettled(self, line: Line) -> bool:
        return False


class DropsUnknownCancel(Source):
    """Does not answer a `Cancel` of what it does not know any more."""

    def _cancel_unknown(self, record: Outgoing, message: Cancel) -> None:
        self._count("dropped")

    def _cancel_over(self, record: Outgoing, message: Cancel) -> None:
        self._count("dropped")


class DrainsEarly(Source):
    """Answers `Cancel` while writes are in flight."""

    def _cancel_engaged(self, record: Outgoing, message: Cancel) -> None:
        self._send(record, Drained)
        self._stop(record, "cancelled")


class ReleasesEarly(Source):
    """Frees P's blocks at `Ack`, `Cancel` or lease end, whatever is in flight."""

    def _stop(self, record: Outgoing, outcome: str, *, engine_knows: bool = False) -> None:
        record.flying.clear()
        super()._stop(record, outcome, engine_knows=engine_knows)


class PostsAgain(Source):
    """Pushes a range again after its write has failed."""

    def _write_ended(self, record: Outgoing, event: WriteEnded) -> None:
        self._strike(record, event)
        session = record.session
        if not event.ok and session is not None:
            start, end = record.writes[event.write]
            self._post(record, session, start, end)


class WelcomesEarly(Source):
    """Opens a session while an earlier one still drains."""

    def _try_open(self, session: SourceSession) -> None:
        for older in self._others(session):
            self._close(older, force=True)
        session.state = SessionState.UP
        self._do(OpenPeer(session.id, session.peer, session.ranks))
        self._welcome(session)


class ClosedIsDrained(Source):
    """Believes that nothing lands any more once its own side is closed."""

    def _closed(self, event: Closed) -> None:
        for record in self._live.values():
            if record.session is not None and record.session.id == event.session:
                record.flying.clear()
        super()._closed(event)


class ForgetsTheLease(Source):
    """Waits for ever for a D that is gone."""

    def _engage(self, record: Outgoing) -> None:
        super()._engage(record)
        self._alarms.clear("lease", record.name)
        self._alarms.clear("total", record.name)


class TakesStaleSessions(Source):
    """Goes on with messages of a session that is over, and of any number."""

    def _session_of(self, event: Received) -> SourceSession | None:
        session = self._sessions.get(event.message.session) or self._old.get(event.message.session)
        if session is None:
            return super()._session_of(event)
        session.link = event.link
        self._sessions.setdefault(session.id, session)
        return session

    def _session_over(self, session: SourceSession) -> None:
        self._old[session.id] = session
        super()._session_over(session)

    @cached_property
    def _old(self) -> dict[bytes, SourceSession]:
        return {}


class SignsAtPush(Prefill):
    """Reads memory again for the digests, so it signs whatever is there."""

    def digests(self, action: Post, heads: set[int]) -> list[int | None]:
        return self.read(self.runs[action.attempt].blocks, action.start, action.end, heads)


class ReportsEarly(Prefill):
    """Reports blocks when a step is launched, not when it is over."""

    def launch(self, run: Run, end: int) -> None:
        computed, run.computed = run.computed, end
        for position in range(computed, end):
            for head in range(2):
                run.signed[position, head] = run.job.value(position, head)
        if run.engaged:
            self.report(run)
        run.computed = computed
        super().launch(run, end)


class ReusesEarly(Prefill):
    """Frees a held block when its run ends, not at `Release`."""

    def _give_back(self, run: Run) -> None:
        run.held.clear()
        super()._give_back(run)


class HandsOutReserved(Decode):
    """Reuses the blocks of a request that has ended though they are still in quarantine."""

    def _give_back(self, stay: Stay) -> None:
        if not stay.in_use:
            self.free += stay.blocks.values()
            stay.blocks = {}


class DoesNotWaitForItems(Prefill):
    """Computes tokens of items whether their outputs are here or not."""

    def ready_until(self, job: Job) -> int:
        return job.num_tokens


MACHINES: list[type[Source] | type[Target]] = [
    FreesOnTimeout,
    FreesOnCancel,
    TrustsComplete,
    TrustsNotices,
    CountsOneNotice,
    NoFence,
    CancelsOnce,
    AlwaysClean,
    DropsUnknownCancel,
    DrainsEarly,
    ReleasesEarly,
    PostsAgain,
    WelcomesEarly,
    ClosedIsDrained,
    ForgetsTheLease,
    TakesStaleSessions,
]
NODES: list[type[Prefill] | type[Decode]] = [
    SignsAtPush,
    ReportsEarly,
    ReusesEarly,
    HandsOutReserved,
    DoesNotWaitForItems,
]
NUM_SEEDS = 60


def simulate_with(mutant: type, seed: int) -> None:
    prefill: type[Prefill] = mutant if issubclass(mutant, Prefill) else Prefill
    decode: type[Decode] = mutant if issubclass(mutant, Decode) else Decode
    if issubclass(mutant, Source | Target):
        node = prefill if issubclass(mutant, Source) else decode
        made = type("Mutant", (node,), {"machine_type": mutant})
        prefill, decode = (made, decode) if node is prefill else (prefill, made)
    simulate(seed, prefill, decode)


@pytest.mark.parametrize("mutant", [*MACHINES, *NODES], ids=lambda m: m.__name__)
def test_the_simulator_catches(mutant: type) -> None:
    for seed in range(NUM_SEEDS):
        try:
            simulate_with(mutant, seed)
        except AssertionError:
            return
    pytest.fail(f"{mutant.__name__} survived {NUM_SEEDS} schedules")


def test_the_real_machines_pass_the_same_seeds() -> None:
    for seed in range(NUM_SEEDS):
        simulate(seed)

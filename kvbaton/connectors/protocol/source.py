"""P's side of the hand-over: pushes what the engine computes into blocks that D has reserved.

Laws of this machine:

1. Nothing is posted but into a frozen `Reserve` of a session that is up, and no token twice.
2. `Drained`, `Welcome` and `Release` wait for every write to be terminal; only for `Release`, and
   only of a session that ends, a closed peer will do.
3. Every `Engage` has one `Release`; nothing is posted after it.

What happens when is in `table.SOURCE`; each rule there is a method here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvbaton.connectors.protocol.checks import (
    check_ack,
    check_reserve,
    first_token,
    is_extension,
)
from kvbaton.connectors.protocol.events import (
    Announce,
    Closed,
    Engage,
    EvictSource,
    FirstTokens,
    Identity,
    PeerGone,
    Received,
    RefuseAnnounce,
    Release,
    SourceEvent,
    SourceFailed,
    StopSource,
    Tick,
    WriteEnded,
)
from kvbaton.connectors.protocol.machine import reply
from kvbaton.connectors.protocol.session import Pairable
from kvbaton.connectors.protocol.source_pushing import SourcePushing
from kvbaton.connectors.protocol.source_sessions import (
    Outgoing,
    SessionState,
    SourceSession,
)
from kvbaton.connectors.protocol.table import SourceState
from kvbaton.messages.control import (
    Accepted,
    Ack,
    Cancel,
    Drained,
    Failed,
    Hello,
    NotNeeded,
    Reserve,
    TransferMessage,
)
from kvbaton.types import Attempt, TransferTimers

State = SourceState
_OUTCOME_COUNTER = {"acked": "completed", "not_needed": "completed", "cancelled": "cancelled"}


class Source(SourcePushing):
    """P's machine.

    Args:
        identity: what this side says of itself.
        timers: of the protocol.
        new_id: makes 16 random bytes.
        pairable: checks layouts, source first; raises `ValueError` naming both values.
        max_attempts: attempts that may be alive at once; more are refused by name.
        max_notice_bytes: of the transport; a write's digests fit into its notice.
    """

    def __init__(
        self,
        identity: Identity,
        timers: TransferTimers,
        *,
        new_id: Callable[[], bytes],
        pairable: Pairable,
        max_attempts: int = 65_536,
        max_notice_bytes: int = 1 << 16,
    ) -> None:
        super().__init__(
            identity,
            timers,
            new_id=new_id,
            pairable=pairable,
            max_notice_bytes=max_notice_bytes,
        )
        self._max_attempts = max_attempts

    def ledger(self) -> dict[str, Any]:
        """Attempts alive by state, leases, and writes that are not terminal."""
        live = self._live.values()
        return {
            "attempts": self._states(),
            "leases": sum(r.engaged for r in live),
            "held_blocks": sum(len(blocks) for r in live for blocks in r.blocks),
            "writes_in_flight": sum(len(r.flying) for r in live),
            "writes_undrained": sum(len(writes) for writes in self._undrained.values()),
            "sessions": self.sessions(),
        }

    # --- dispatch ---

    def _react(self, event: SourceEvent) -> None:
        match event:
            case Received():
                self._received(event)
            case Tick():
                self._ring()
            case PeerGone():
                self._peer_gone(event.node)
            case Closed():
                self._closed(event)
            case _:
                self._apply(type(event).__name__, self._record(event.attempt), event)

    def _received(self, event: Received) -> None:
        message = event.message
        if isinstance(message, Hello):
            self._hello(event.link, message)
        elif not isinstance(message, Reserve | Cancel | NotNeeded | Ack):
            self._count_dropped("unexpected")
        elif (session := self._session_of(event)) is not None:
            record = self._record(Attempt(message.transfer_id, message.attempt))
            self._tell(record, f"< {type(message).__name__} in {record.state.value}")
            if record.name in self._live and record.session not in (None, session):
                self._foreign(record, session, message)
            else:
                self._apply(type(message).__name__, record, message)

    def _foreign(self, record: Outgoing, session: SourceSession, message: TransferMessage) -> None:
        """A message about an attempt that is bound to another session: it can't touch it."""
        if isinstance(message, Reserve):
            self._refuse(record, message, "conflict", "the attempt is bound to another session")
        elif isinstance(message, Cancel):
            # True for the asker: nothing was ever accepted from this session.
            self._do(reply(session, self._message(Drained, session, record.name)))
        else:
            self._count_dropped("foreign")

    # --- Reserve ---

    def _acceptable(self, record: Outgoing, message: Reserve) -> bool:
        groups = self._sessions[message.session].groups
        problem = check_reserve(message, groups)
        if problem is not None:
            self._refuse(record, message, "malformed", problem)
        elif record.state is State.UNKNOWN and len(self._live) >= self._max_attempts:
            self._refuse(record, message, "too_many", f"{len(self._live)} attempts", retry=True)
            return False
        return problem is None

    def _bind(self, record: Outgoing, message: Reserve) -> None:
        session = self._sessions[message.session]
        record.session, record.reserve = session, message
        record.prompt_key, record.num_tokens = message.prompt_key, message.num_tokens
        record.start = first_token(message.spans, session.groups)
        self._in("total", record.name, message.remaining_ms / 1000)

    def _reserve_first(self, record: Outgoing, message: Reserve) -> None:
        if self._acceptable(record, message):
            self._bind(record, message)
            self._enter(record, State.RESERVED)
            self._in("unclaimed", record.name, self.timers.unannounced)
            self._in("progress", record.name, self.timers.progress_period)
            self._send(record, Accepted)

    def _reserve_announced(self, record: Outgoing, message: Reserve) -> None:
        if not self._acceptable(record, message):
            return
        if (message.prompt_key, message.num_tokens) != (record.prompt_key, record.num_tokens):
            self._refuse(record, message, "prompt", _prompts(record, message))
            return
        self._bind(record, message)
        self._send(record, Accepted)
        self._engage(record)

    def _reserve_again(self, record: Outgoing, message: Reserve) -> None:
        assert record.reserve is not None
        if not self._acceptable(record, message):
            return
        if not is_extension(record.reserve, message):
            self._refuse(record, message, "conflict", "a reservation is frozen once sent")
            return
        record.reserve = message
        if record.state is not State.RESERVED:
            self._in("lease", record.name, self.timers.lease)
        self._send(record, Accepted)
        if record.state is State.ENGAGED:
            self._push(record)

    def _reserve_over(self, record: Outgoing, message: Reserve) -> None:
        code = "expired" if record.outcome == "expired" else "consumed"
        self._refuse(record, message, code, f"the attempt ended: {record.outcome}")

    def _engage(self, record: Outgoing) -> None:
        record.engaged = True
        record.ready = record.posted = record.start
        record.blocks = [{} for _ in self._negotiator.groups]
        self._enter(record, State.ENGAGED)
        self._in("lease", record.name, self.timers.lease)
        self._in("progress", record.name, self.timers.progress_period)
        self._do(Engage(record.name, record.start))

    # --- Announce ---

    def _announce_first(self, record: Outgoing, event: Announce) -> None:
        if len(self._live) >= self._max_attempts:
            self._do(RefuseAnnounce(record.name, "too_many"))
            return
        record.prompt_key, record.num_tokens = event.prompt_key, event.num_tokens
        self._enter(record, State.ANNOUNCED)
        # The queue may be long, and the entry pins nothing: `unclaimed` starts with the answer.
        self._in("unclaimed", record.name, self.timers.total)

    def _announce_reserved(self, record: Outgoing, event: Announce) -> None:
        if (event.prompt_key, event.num_tokens) == (record.prompt_key, record.num_tokens):
            self._engage(record)
            return
        assert record.reserve is not None
        self._refuse(record, record.reserve, "prompt", _prompts(event, record))
        self._end(record, "failed")

    def _announce_twice(self, record: Outgoing, event: Announce) -> None:
        self._do(RefuseAnnounce(record.name, "conflict"))

    def _announce_over(self, record: Outgoing, event: Announce) -> None:
        known = record.outcome in ("expired", "cancelled", "not_needed")
        self._do(RefuseAnnounce(record.name, record.outcome if known else "consumed"))

    def _finish_idle(self, record: Outgoing, event: FirstTokens) -> None:
        self._in("unclaimed", record.name, self.timers.unclaimed)

    # --- writes ---

    def _write_ended(self, record: Outgoing, event: WriteEnded) -> None:
        self._strike(record, event)
        if not event.ok:
            self._fail(record, f"write {event.write} failed: {event.error}")

    def _write_stopping(self, record: Outgoing, event: WriteEnded) -> None:
        self._strike(record, event)
        self._settle(record)

    def _write_late(self, record: Outgoing, event: WriteEnded) -> None:
        if event.ok or event.drained:
            write = (event.write, event.source_rank, event.target_rank)
            self._write_outlived(record.name, write)

    def _strike(self, record: Outgoing, event: WriteEnded) -> None:
        if event.ok or event.drained:
            record.flying.discard((event.write, event.source_rank, event.target_rank))

    # --- the end ---

    def _ack(self, record: Outgoing, message: Ack) -> None:
        if not self._check_ack(record, message):
            return
        if message.verdict == "ok":
            self._stop(record, "acked")
        else:
            self._mismatch(record, message)

    def _ack_early(self, record: Outgoing, message: Ack) -> None:
        if not self._check_ack(record, message):
            return
        if message.verdict == "ok" or record.session is None:
            self._refuse(record, message, "conflict", "nothing was completed yet")
        else:
            self._mismatch(record, message)

    def _ack_late(self, record: Outgoing, message: Ack) -> None:
        if self._check_ack(record, message) and message.verdict == "mismatch":
            self._evict(record, message)

    def _check_ack(self, record: Outgoing, message: Ack) -> bool:
        problem = check_ack(message, record.num_tokens)
        if problem is not None:
            self._refuse(record, message, "malformed", problem)
        return problem is None

    def _mismatch(self, record: Outgoing, message: Ack) -> None:
        self._evict(record, message)
        self._stop(record, "failed")

    def _evict(self, record: Outgoing, message: Ack) -> None:
        if not record.evicted and record.engaged:
            record.evicted = True
            self.counters.mismatches += 1
            self._do(EvictSource(record.name, message.bad))

    def _cancel_unknown(self, record: Outgoing, message: Cancel) -> None:
        record.session = self._sessions[message.session]
        self._bury(record, "cancelled")
        self._send(record, Drained)

    def _cancel_idle(self, record: Outgoing, message: Cancel) -> None:
        record.session = self._sessions[message.session]
        record.drain_owed = True
        self._stop(record, "cancelled")

    def _cancel_engaged(self, record: Outgoing, message: Cancel) -> None:
        record.drain_owed = True
        self._stop(record, "cancelled")

    def _cancel_late(self, record: Outgoing, message: Cancel) -> None:
        record.drain_owed = True

    def _cancel_over(self, record: Outgoing, message: Cancel) -> None:
        session = self._sessions[message.session]
        self._do(reply(session, self._message(Drained, session, record.name)))

    def _spare_unknown(self, record: Outgoing, message: NotNeeded) -> None:
        self._bury(record, "not_needed")

    def _spare(self, record: Outgoing, message: NotNeeded) -> None:
        self._stop(record, "not_needed")

    def _fail(self, record: Outgoing, reason: str) -> None:
        self._send(record, Failed, reason=reason[:4000])
        self._stop(record, "failed")

    def _fail_idle(self, record: Outgoing, event: SourceFailed) -> None:
        self._end(record, "failed")

    def _fail_engaged(self, record: Outgoing, event: SourceFailed) -> None:
        self._send(record, Failed, reason=event.reason[:4000])
        self._stop(record, "failed", engine_knows=True)

    def _expire_idle(self, record: Outgoing, given: None) -> None:
        self._end(record, "expired")

    def _expire_reserved(self, record: Outgoing, given: None) -> None:
        self._send(record, Failed, reason="the request did not come in time")
        self._end(record, "expired")

    def _expire_engaged(self, record: Outgoing, given: None) -> None:
        self._send(record, Failed, reason="the lease has expired")
        self._stop(record, "expired")

    def _abandon(self, record: Outgoing, why: str) -> None:
        self._tell(record, f"session over: {why}")
        if record.state is not State.STOPPING:
            self._stop(record, "lost")

    def _stop(self, record: Outgoing, outcome: str, *, engine_knows: bool = False) -> None:
        """Post nothing more; wait for what is in flight."""
        record.outcome = outcome
        if record.state is not State.RESERVED and record.choices is None and not engine_knows:
            self._do(StopSource(record.name, outcome))
        self._enter(record, State.STOPPING)
        self._in("stuck", record.name, self.timers.lease)
        self._settle(record)

    def _settle(self, record: Outgoing) -> None:
        if record.flying or record.state is not State.STOPPING:
            return
        if record.drain_owed:
            self._send(record, Drained)
        session = record.session
        self._end(record, record.outcome)
        if session is not None and session.state is SessionState.CLOSING:
            self._close(session, force=False)

    def _force_close(self, record: Outgoing, given: None) -> None:
        assert record.session is not None
        self._in("stuck", record.name, self.timers.lease)
        self._end_session(record.session, "a write does not end")

    def _end(self, record: Outgoing, outcome: str) -> None:
        record.outcome = outcome
        if record.engaged:
            self._do(Release(record.name, outcome))
        del self._live[record.name]
        counter = _OUTCOME_COUNTER.get(outcome, "failed")
        setattr(self.counters, counter, getattr(self.counters, counter) + 1)
        self._bury(record, outcome)

    def _bury(self, record: Outgoing, outcome: str) -> None:
        """Remember only how an attempt ended."""
        self._tell(record, f"{record.state.value} -> ended: {outcome}")
        tomb = Outgoing(record.name, State.ENDED, outcome, num_tokens=record.num_tokens)
        self._ended[record.name] = tomb
        record.state = State.ENDED
        self._keep_alarms(record)
        self._in("tombstone", record.name, self.timers.tombstone)

    # --- checks ---

    def validate(self) -> None:
        """Check the machine's own invariants; raises `AssertionError` with the story."""
        self._validate((r, problem) for r in self._live.values() if (problem := _wrong(r)))
        for session in self._sessions.values():
            if session.state is SessionState.CLOSING and not session.close_sent:
                assert self._alarms.at("close", session.id) is not None, f"{session} waits for ever"


def _wrong(record: Outgoing) -> str | None:
    if record.engaged != (record.state in (State.ENGAGED, State.COMPLETED)) and (
        record.state is not State.STOPPING
    ):
        return "engaged in a wrong state"
    if record.flying and not record.engaged:
        return "writes without a lease"
    ends = [record.start, *(end for _, end in record.writes)]
    if [start for start, _ in record.writes] != ends[:-1]:
        return f"writes do not join: {record.writes}"
    if record.state is State.STOPPING and not record.flying:
        return "nothing is in flight and it has not ended"
    if record.engaged and not record.posted <= record.ready <= record.num_tokens:
        return f"posted {record.posted}, ready {record.ready} of {record.num_tokens}"
    return None


def _prompts(ours: Outgoing | Announce, theirs: Outgoing | Reserve) -> str:
    return (
        f"source has {ours.num_tokens} tokens with key {ours.prompt_key.hex()[:16]}, "
        f"target {theirs.num_tokens} with {theirs.prompt_key.hex()[:16]}"
    )

"""D's side of the hand-over: reserves blocks, and lets the engine read them when that is safe.

Laws of this machine:

1. The engine may read only after `Complete`, a notice of every rank pair of every write that
   `Complete` counts, and good digests of each.
2. Blocks that P was told of are freed by `Drained`, a later `Welcome` or `Fenced` of the same
   generation, or a delivery, since then nothing is in flight. A timeout never frees.
3. Every `Start` has one `Unquarantine`, and one of `Deliver`, `Fail` and `CancelTarget`.

What happens when is in `table.TARGET`; each rule there is a method here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvbaton.connectors.protocol.checks import (
    first_token,
    flatten,
)
from kvbaton.connectors.protocol.events import (
    CancelTarget,
    Fail,
    Fenced,
    Identity,
    Meet,
    PeerGone,
    Received,
    Start,
    TargetEvent,
    Tick,
    Unneeded,
    Unquarantine,
    Unreachable,
)
from kvbaton.connectors.protocol.machine import reply
from kvbaton.connectors.protocol.session import Pairable
from kvbaton.connectors.protocol.table import TargetState
from kvbaton.connectors.protocol.target_receiving import TargetReceiving
from kvbaton.connectors.protocol.target_sessions import (
    Incoming,
    SessionState,
    TargetSession,
)
from kvbaton.errors import LocalProtocolError
from kvbaton.messages.control import (
    Accepted,
    Ack,
    Cancel,
    Complete,
    Drained,
    Failed,
    NotNeeded,
    Progress,
    Refused,
    Reserve,
    TransferMessage,
    Welcome,
)
from kvbaton.types import Attempt, TransferTimers

State = TargetState
MAX_MISMATCHES = 3
"""Mismatches within `TransferTimers.put_out` after which a peer is asked nothing for as long."""


class Target(TargetReceiving):
    """D's machine.

    Args:
        identity: what this side says of itself.
        timers: of the protocol.
        new_id: makes 16 random bytes.
        pairable: checks layouts, source first; raises `ValueError` naming both values.
        max_blocks_per_peer: blocks that may be reserved or in quarantine for one address; None for
            no limit.
    """

    def __init__(
        self,
        identity: Identity,
        timers: TransferTimers,
        *,
        new_id: Callable[[], bytes],
        pairable: Pairable,
        max_blocks_per_peer: int | None = None,
    ) -> None:
        super().__init__(identity, timers, new_id=new_id, pairable=pairable)
        self._max_blocks = max_blocks_per_peer

    @property
    def unhealthy(self) -> bool:
        """Whether blocks have been in quarantine for longer than `quarantine_limit`."""
        limit = self._now - self.timers.quarantine_limit
        return any(r.state is State.DRAINING and r.since <= limit for r in self._live.values())

    def ledger(self) -> dict[str, Any]:
        """Attempts alive by state, blocks reserved, and quarantines with their ages in seconds."""
        live = self._live.values()
        draining = [r for r in live if r.state is State.DRAINING]
        return {
            "attempts": self._states(),
            "reserved_blocks": sum(r.num_blocks for r in live if r.state is not State.DRAINING),
            "quarantined_blocks": sum(r.num_blocks for r in draining),
            "quarantined": [
                {
                    "transfer_id": r.name.transfer_id.hex(),
                    "attempt": r.name.number,
                    "blocks": r.num_blocks,
                    "age_s": self._now - r.since,
                }
                for r in draining
            ],
            "fencing": [node.node for node in self._lost],
            "sessions": self.sessions(),
        }

    # --- dispatch ---

    def _react(self, event: TargetEvent) -> None:
        match event:
            case Received():
                self._received(event)
            case Tick():
                self._ring()
            case PeerGone():
                self._peer_gone(event.node)
            case Fenced():
                self._fenced(event)
            case Meet():
                self._open(self._line(event.address))
            case Unreachable():
                self._unreachable(event)
            case Unneeded():
                self._unneeded(event)
            case _:
                self._apply(type(event).__name__, self._record(event.attempt), event)

    def _received(self, event: Received) -> None:
        message = event.message
        session = self._sessions.get(message.session)
        if session is None:
            self._count_dropped("unknown_session")
        elif isinstance(message, Refused) and message.transfer_id is None:
            self._refused_session(session, message)
        elif not session.admit(event.link, message.seq):
            self._count_dropped("stale_seq")
        elif isinstance(message, Welcome):
            self._welcomed(event, session, message)
        elif isinstance(message, Accepted | Refused | Progress | Complete | Failed | Drained):
            self._about_attempt(session, message)
        else:
            self._count_dropped("unexpected")

    def _about_attempt(self, session: TargetSession, message: TransferMessage | Refused) -> None:
        assert message.transfer_id is not None
        record = self._record(Attempt(message.transfer_id, message.attempt))
        kind = type(message).__name__
        if record.state is not State.UNKNOWN:
            self._tell(record, f"< {kind} in {record.state.value}")
        if record.name in self._live and record.session is not session:
            self._count_dropped("foreign")
        elif session.state is not SessionState.UP and kind != "Drained":
            self._count_dropped("session_over")
        else:
            self._apply(kind, record, message)

    # --- Start ---

    def _start(self, record: Incoming, event: Start) -> None:
        line = self._line(event.address)
        record.order, record.line = event, line
        record.start = first_token(event.spans, self._negotiator.groups)
        record.num_blocks = sum(len(flatten(spans)) for spans in event.spans)
        self._live[record.name] = record
        self.counters.started += 1
        seconds = event.deadline_s or self.timers.total
        record.deadline = self._now + seconds
        self._enter(record, State.WAITING)
        self._in("total", record.name, seconds)
        reason = self._unwelcome(record)
        if reason is not None:
            self._fail_unsent(record, reason)
        elif line.session is not None and line.session.state is SessionState.UP:
            self._reserve(record, line.session)
        else:
            line.waiting.append(record.name)
            self._open(line)

    def _unwelcome(self, record: Incoming) -> str | None:
        """Why P can't be asked now."""
        line = record.line
        assert line is not None
        times = line.mismatches = [
            at for at in line.mismatches if at > self._now - self.timers.put_out
        ]
        if len(times) >= MAX_MISMATCHES:
            return f"{line.address} was put out after {len(times)} mismatches"
        blocks = sum(r.num_blocks for r in self._live.values() if r.line is line)
        if self._max_blocks is not None and blocks > self._max_blocks:
            return f"{blocks} blocks would wait for {line.address}, at most {self._max_blocks} may"
        return None

    def _start_twice(self, record: Incoming, event: Start) -> None:
        raise LocalProtocolError(f"{record.name} is started twice")

    def _start_consumed(self, record: Incoming, event: Start) -> None:
        self.counters.started += 1
        self.counters.failed += 1
        start = first_token(event.spans, self._negotiator.groups)
        self._do(Fail(record.name, start, "the attempt has ended already"))
        self._do(Unquarantine(record.name))

    def _unneeded(self, event: Unneeded) -> None:
        line = self._line(event.address)
        if line.session is not None and line.session.state is SessionState.UP:
            message = self._message(NotNeeded, line.session, event.attempt)
            self._do(reply(line.session, message, line.address))
        else:
            line.unneeded.append(event.attempt)
            self._open(line)

    # --- Reserve and its answers ---

    def _reserve(self, record: Incoming, session: TargetSession) -> None:
        record.session = session
        self._enter(record, State.RESERVED)
        self._heard(record)
        self._repeat_reserve(record, None)

    def _repeat_reserve(self, record: Incoming, given: None) -> None:
        self._in("resend", record.name, self.timers.resend)
        self._send_reserve(record)

    def _keep_alive(self, record: Incoming, given: None) -> None:
        self._in("keepalive", record.name, self.timers.lease / 4)
        self._send_reserve(record)

    def _send_reserve(self, record: Incoming) -> None:
        assert record.order is not None
        self._send(
            record,
            Reserve,
            prompt_key=record.order.prompt_key,
            num_tokens=record.order.num_tokens,
            spans=record.order.spans,
            remaining_ms=max(1, int((record.deadline - self._now) * 1000)),
        )

    def _accepted(self, record: Incoming, message: Accepted) -> None:
        self._answered(record)

    def _note(self, record: Incoming, message: Accepted) -> None:
        """P's `Progress` moves the deadline; its answers to our repeats do not."""

    def _progress(self, record: Incoming, message: Progress) -> None:
        self._answered(record)

    def _refused(self, record: Incoming, message: Refused) -> None:
        self._count(message.code)
        self._fail(record, f"refused ({message.code}): {message.message}")

    def _peer_failed(self, record: Incoming, message: Failed | Drained) -> None:
        reason = message.reason if isinstance(message, Failed) else "P stopped unasked"
        self._fail(record, f"the source failed: {reason}")

    # --- late messages ---

    def _answer_complete(self, record: Incoming, message: Complete) -> None:
        if record.outcome == "delivered":
            record.session = self._sessions[message.session]
            self._send(record, Ack, verdict="ok")
            record.session = None
        else:
            self._disown(record, message)

    def _disown(self, record: Incoming, message: TransferMessage) -> None:
        session = self._sessions[message.session]
        self._do(reply(session, self._message(Cancel, session, record.name), session.address))

    # --- the end ---

    def _fail(self, record: Incoming, reason: str) -> None:
        self._tell(record, f"failed: {reason}")
        self._do(Fail(record.name, self._valid_through(record), reason))
        self._drain(record, "failed")

    def _fail_unsent(self, record: Incoming, reason: str) -> None:
        self._tell(record, f"failed: {reason}")
        self._do(Fail(record.name, record.start, reason))
        self._end(record, "failed")

    def _give_up(self, record: Incoming, given: None) -> None:
        self._fail(record, "nothing was heard of the transfer in time")

    def _give_up_unsent(self, record: Incoming, given: None) -> None:
        self._fail_unsent(record, "no session in time")

    def _cancel_unsent(self, record: Incoming, event: CancelTarget) -> None:
        self._end(record, "cancelled")

    def _cancel_sent(self, record: Incoming, event: CancelTarget) -> None:
        self._drain(record, "cancelled")

    def _drain(self, record: Incoming, outcome: str) -> None:
        """The engine is done with the attempt; its blocks wait until no byte can land."""
        record.outcome, record.since = outcome, self._now
        self._enter(record, State.DRAINING)
        self._in("silence", record.name, self.timers.silence)
        self._repeat_cancel(record, None)

    def _repeat_cancel(self, record: Incoming, given: None) -> None:
        self._in("resend", record.name, self.timers.resend)
        assert record.session is not None
        assert record.line is not None
        if record.session.forgotten:
            self._open(record.line)
        else:
            self._cancel_again(record, None)

    def _cancel_again(self, record: Incoming, message: Complete | None) -> None:
        if record.bad:
            self._send(record, Ack, verdict="mismatch", bad=record.bad)
        self._send(record, Cancel)

    def _suspect(self, record: Incoming, given: None) -> None:
        session = record.session
        assert session is not None
        assert session.node is not None
        self._in("silence", record.name, self.timers.silence)
        self._session_over(session, "the peer leaves blocks in quarantine")
        self._lose(session.node)

    def _drained(self, record: Incoming, given: Any) -> None:
        self._end(record, record.outcome)

    def _end(self, record: Incoming, outcome: str) -> None:
        """Nothing of the attempt can land any more."""
        self._do(Unquarantine(record.name))
        if record.line is not None and record.name in record.line.waiting:
            record.line.waiting.remove(record.name)
        counter = {"delivered": "completed", "cancelled": "cancelled"}.get(outcome, "failed")
        setattr(self.counters, counter, getattr(self.counters, counter) + 1)
        session = record.session
        self._ended[record.name] = Incoming(record.name, State.ENDED, outcome)
        del self._live[record.name]
        self._enter(record, State.ENDED)
        self._in("tombstone", record.name, self.timers.tombstone)
        self._forget_session(session)

    # --- checks ---

    def validate(self) -> None:
        """Check the machine's own invariants; raises `AssertionError` with the story."""
        self._validate((r, problem) for r in self._live.values() if (problem := self._wrong(r)))
        for line in self._lines.values():
            if line.session is not None and line.session.state is SessionState.HELLO:
                assert self._alarms.at("hello", line.address) is not None, f"{line} waits for ever"
            if line.waiting:
                assert line.session is not None, f"{line} has no session under way"
        for node in self._lost:
            assert self._alarms.at("fence", node) is not None, f"{node} is not being fenced"

    def _wrong(self, record: Incoming) -> str | None:
        if (record.session is None) != (record.state is State.WAITING):
            return "a session in a wrong state"
        if record.session is not None and record.session.id not in self._sessions:
            return "its session was forgotten"
        over = record.session is not None and record.session.state is SessionState.OVER
        if over and record.state is not State.DRAINING:
            return "alive in a session that is over"
        if record.complete is None and record.state is State.COMPLETING:
            return "completing without Complete"
        landed = {number for number, arrival in record.arrivals.items() if not arrival.missing}
        if not set(record.verified) <= landed:
            return "verified before it has landed"
        return None

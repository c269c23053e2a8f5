"""D's side of the hand-over: reserves blocks, and lets the engine read them when that is safe.

Laws of this machine:

1. The engine may read only after `Complete`, a notice of every rank pair of every write that
   `Complete` counts, and good digests of each.
2. Blocks that P was told of are freed by `Drained`, `SessionDrained` or `Fenced` of the same
   generation, or a delivery, since then nothing is in flight. A timeout never frees.
3. Every `Start` has one `Unquarantine`, and one of `Deliver`, `Fail` and `CancelTarget`.

What happens when is in `Target.table`, whose rules are methods here.
"""

# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from kvbaton.connectors.protocol.checks import check_complete, first_token
from kvbaton.connectors.protocol.events import (
    CancelTarget,
    Deliver,
    Fail,
    Fenced,
    Identity,
    Landed,
    Meet,
    Part,
    PeerGone,
    Received,
    Start,
    TargetAction,
    TargetEvent,
    Tick,
    Unneeded,
    Unquarantine,
    Unreachable,
    Verified,
)
from kvbaton.connectors.protocol.incoming import Incoming
from kvbaton.connectors.protocol.machine import Machine, Table
from kvbaton.connectors.protocol.session import Negotiator, Pairable
from kvbaton.connectors.protocol.table import TARGET_ALARMS, TargetState
from kvbaton.connectors.protocol.target_sessions import SessionState, TargetSession, TargetSessions
from kvbaton.errors import LocalProtocolError
from kvbaton.messages.control import (
    Accepted,
    Ack,
    Cancel,
    Complete,
    Drained,
    Failed,
    Progress,
    Refused,
    Reserve,
    SessionDrained,
    TransferMessage,
    Welcome,
)
from kvbaton.types import Attempt, TransferTimers

State = TargetState
MAX_MISMATCHES = 3
"""Mismatches within `TransferTimers.put_out` after which a peer is asked nothing for as long."""

UNHEALTHY_SHARE = 4
"""A node is unhealthy while one block in so many waits in quarantine for too long."""


class Target(Machine[TargetEvent, TargetAction, TargetState, Incoming]):
    """D's machine.

    Args:
        identity: what this side says of itself.
        timers: of the protocol.
        new_id: makes 16 random bytes.
        pairable: checks layouts, source first; raises `ValueError` naming both values.
        max_blocks_per_peer: blocks that may be reserved or in quarantine for one address; None for
            no limit but the pool. For a peer that leaves more than a quarter of the pool in
            quarantine nothing is reserved.
    """

    alarms_of = TARGET_ALARMS
    states = TargetState
    sessions_type: ClassVar[type[TargetSessions]] = TargetSessions

    def __init__(
        self,
        identity: Identity,
        timers: TransferTimers,
        *,
        new_id: Callable[[], bytes],
        pairable: Pairable,
        max_blocks_per_peer: int | None = None,
    ) -> None:
        super().__init__(timers)
        self.identity = identity
        negotiator = Negotiator(identity, pairable)
        self.groups = negotiator.groups
        self.sessions = self.sessions_type(
            self.context,
            identity,
            timers,
            negotiator,
            new_id=new_id,
            reserve=self._reserve,
            fail=self._fail_once,
            release=lambda record: self._end(record, record.outcome),
        )
        self._max_blocks = max_blocks_per_peer
        self._num_blocks = sum(group.num_blocks for group in self.groups)
        self._quarantine: dict[Attempt, Incoming] = {}

    @property
    def unhealthy(self) -> str:
        """Why the node is: too many blocks wait in quarantine, and for whom; empty if it is well."""
        limit = self.context.now - self.timers.quarantine_limit
        old = [record for record in self._quarantine.values() if record.since <= limit]
        blocks = sum(record.num_blocks for record in old)
        if blocks * UNHEALTHY_SHARE < self._num_blocks:
            return ""
        peers = {r.session.node.node for r in old if r.session and r.session.node}
        return (
            f"{blocks} of {self._num_blocks} blocks are in quarantine for more than "
            f"{self.timers.quarantine_limit:g} s because of {', '.join(sorted(peers))}"
        )

    def has_session(self, session: bytes) -> bool:
        """Whether a session is in use, or has blocks in quarantine."""
        return session in self.sessions.known

    def ledger(self) -> dict[str, Any]:
        """Attempts alive by state, blocks reserved, and quarantines with their ages in seconds."""
        draining = self._quarantine.values()
        quarantined = sum(r.num_blocks for r in draining)
        return {
            "attempts": self._states(),
            "reserved_blocks": sum(r.num_blocks for r in self.live.values()) - quarantined,
            "quarantined_blocks": quarantined,
            "quarantined": [
                {
                    "transfer_id": r.name.transfer_id.hex(),
                    "attempt": r.name.number,
                    "blocks": r.num_blocks,
                    "age_s": self.context.now - r.since,
                }
                for r in draining
            ],
            "unhealthy": self.unhealthy,
            "fencing": [node.node for node in self.sessions.lost],
            "sessions": self.sessions.dump(),
        }

    # --- dispatch ---

    def _react(self, event: TargetEvent) -> None:
        match event:
            case Received():
                self._received(event)
            case Tick():
                self._ring()
            case PeerGone():
                self.sessions.peer_gone(event.node)
            case Fenced():
                self.sessions.fenced(event)
            case Meet():
                self.sessions.meet(event.address)
            case Part():
                self.sessions.part(event.address)
            case Unreachable():
                self.sessions.unreachable(event)
            case Unneeded():
                self.sessions.unneeded(event)
            case _:
                self._apply(type(event), self.record(event.attempt), event)

    def _received(self, event: Received) -> None:
        message = event.message
        session = self.sessions.known.get(message.session)
        if session is None:
            self.context.count("unknown_session", dropped=True)
        elif isinstance(message, Refused) and message.transfer_id is None:
            session.heard = self.context.now
            self.sessions.refused(session, message)
        elif not session.admit(event.link, message.seq):
            self.context.count("stale_seq", dropped=True)
        else:
            session.heard = self.context.now
            match message:
                case Welcome():
                    self.sessions.welcomed(session, message)
                case SessionDrained():
                    self.sessions.drained(session, message)
                case Accepted() | Refused() | Progress() | Complete() | Failed() | Drained():
                    self._about_attempt(session, message)
                case _:
                    self.context.count("unexpected", dropped=True)

    def _about_attempt(self, session: TargetSession, message: TransferMessage | Refused) -> None:
        assert message.transfer_id is not None, "else it is about the session"
        record = self.record(Attempt(message.transfer_id, message.attempt))
        if record.state is not State.UNKNOWN:
            self.context.tell(record.name, f"< {type(message).__name__} in {record.state.value}")
        if record.name in self.live and record.session is not session:
            self.context.count("foreign", dropped=True)
        elif session.state is not SessionState.UP and not isinstance(message, Drained):
            self.context.count("session_over", dropped=True)
        else:
            if record.name not in self.live:
                record.session = session
            self._apply(type(message), record, message)

    def _absent(self, name: Attempt, outcome: str | None) -> Incoming:
        if outcome is None:
            return Incoming(name)
        return Incoming(name, State.ENDED, outcome)

    def _ring_session(self, name: str, owner: Any) -> None:
        self.sessions.ring(name, owner)

    def _in(self, alarm: str, record: Incoming, seconds: float) -> None:
        self.context.ring_in(alarm, record.name, seconds)

    def _send(self, record: Incoming, kind: type[TransferMessage], **fields: Any) -> None:
        assert record.session is not None, "nobody to send to"
        self.context.tell(record.name, f"> {kind.__name__}")
        name = record.name
        fields |= {"transfer_id": name.transfer_id, "attempt": name.number}
        record.session.send(self.context, kind, **fields)

    # --- Start ---

    def _start(self, record: Incoming, event: Start) -> None:
        """Wait for the session (open one if there is none), then send `Reserve`. Over the cap, or a peer that was put out: fail at once."""
        if self.sessions.crowded(event.address):
            self._turn_down(event, "too many addresses are in use")
            return
        line = record.line = self.sessions.line(event.address)
        record.order = event
        record.start = first_token(event.spans, self.groups)
        record.num_blocks = sum(len(span.blocks) for spans in event.spans for span in spans)
        line.num_attempts += 1
        line.num_blocks += record.num_blocks
        line.waiting[record.name] = self.live[record.name] = record
        self.counters.started += 1
        seconds = event.deadline_s or self.timers.total
        record.deadline = self.context.now + seconds
        self._set_state(record, State.WAITING)
        self._in("total", record, seconds)
        self._heard(record)
        reason = self._unwelcome(record)
        if reason is not None:
            self._fail(record, reason)
        elif line.session is not None and line.session.state is SessionState.UP:
            del line.waiting[record.name]
            self._reserve(record, line.session)
        else:
            self.sessions.open(line)

    def _unwelcome(self, record: Incoming) -> str | None:
        """Why P can't be asked now."""
        line = record.line
        assert line is not None
        line.mismatches = [
            at for at in line.mismatches if at > self.context.now - self.timers.put_out
        ]
        if len(line.mismatches) >= MAX_MISMATCHES:
            return f"{line.address} was put out after {len(line.mismatches)} mismatches"
        blocks = line.num_blocks
        if self._max_blocks is not None and blocks > self._max_blocks:
            return f"{blocks} blocks would wait for {line.address}, at most {self._max_blocks} may"
        left = sum(r.num_blocks for r in self._quarantine.values() if r.line is line)
        if left * UNHEALTHY_SHARE > self._num_blocks:
            return f"{line.address} leaves {left} blocks in quarantine"
        return None

    def _start_twice(self, record: Incoming, event: Start) -> None:
        """A bug of ours: `LocalProtocolError`."""
        raise LocalProtocolError(f"{record.name} is started twice")

    def _start_consumed(self, record: Incoming, event: Start) -> None:
        """Fail at once, nothing is sent."""
        self._turn_down(event, "the attempt has ended already")

    def _turn_down(self, event: Start, reason: str) -> None:
        self.counters.started += 1
        self.counters.failed += 1
        start = first_token(event.spans, self.groups)
        self.context.do(Fail(event.attempt, start, reason), Unquarantine(event.attempt))

    # --- Reserve and its answers ---

    def _reserve(self, record: Incoming, session: TargetSession) -> None:
        record.session = session
        session.attempts[record.name] = record
        self._set_state(record, State.RESERVED)
        self._heard(record)
        self._repeat_reserve(record, None)

    def _repeat_reserve(self, record: Incoming, given: None) -> None:
        """Send `Reserve` again."""
        self._in("resend", record, self.timers.resend)
        self._send_reserve(record)

    def _keep_alive(self, record: Incoming, given: None) -> None:
        """Send `Reserve` again: P renews its lease."""
        self._in("keepalive", record, self.timers.lease / 4)
        self._send_reserve(record)

    def _send_reserve(self, record: Incoming) -> None:
        assert record.order is not None
        self._send(
            record,
            Reserve,
            prompt_key=record.order.prompt_key,
            num_tokens=record.num_tokens,
            spans=record.order.spans,
            remaining_ms=max(1, int((record.deadline - self.context.now) * 1000)),
        )

    def _heard(self, record: Incoming) -> None:
        self._in("progress_deadline", record, self.timers.progress_deadline)

    def _accepted(self, record: Incoming, message: object) -> None:
        """P has it. From now on `Reserve` is repeated slowly, as a sign of life; the progress deadline starts anew."""
        if record.state is State.RESERVED:
            self._set_state(record, State.ENGAGED)
            self._in("keepalive", record, self.timers.lease / 4)
        self._heard(record)

    def _note(self, record: Incoming, message: Accepted) -> None:
        """P lives; no deadline moves: its `Progress` does that, not its answers to our repeats."""

    def _refused(self, record: Incoming, message: Refused) -> None:
        """Fail; `Cancel`."""
        self.context.count(message.code)
        self._fail(record, f"refused ({message.code}): {message.message}")

    def _peer_failed(self, record: Incoming, message: Failed) -> None:
        """Fail; `Cancel`, since what was posted may still land."""
        self._fail(record, f"the source failed: {message.reason}")

    def _drained_unasked(self, record: Incoming, message: Drained) -> None:
        """P has given up and nothing is in flight: fail, `Unquarantine`."""
        self._fail(record, "the source failed: it stopped unasked")
        self._end(record, record.outcome)

    # --- bytes ---

    def _landed(self, record: Incoming, event: Landed) -> None:
        """Check it and note the rank pair; `Verify` the write if no pair is missing."""
        session = record.session
        assert session is not None
        exists = event.source_rank < session.num_ranks
        exists &= event.target_rank < len(self.identity.ranks)
        if event.session != session.id or not exists:
            self.context.count("junk_notice", dropped=True)
            return
        self._accepted(record, event)
        try:
            arrival = record.land(event, self.groups, len(self.identity.ranks))
        except ValueError as error:
            self._malformed(record, str(error))
            return
        if arrival is not None:
            self._verify(record, event.write)

    def _verify(self, record: Incoming, write: int) -> None:
        self.context.do(record.verification(write, self.groups))

    def _verified(self, record: Incoming, event: Verified) -> None:
        """Good: deliver if everything is here. Bad: `Ack(mismatch)`, fail, `Cancel`."""
        if event.error:
            self._fail(record, f"write {event.write} can't be verified: {event.error}")
            return
        record.verified[event.write] = event.bad
        self._heard(record)
        if not event.bad:
            self._try_deliver(record)
            return
        assert record.line is not None
        self.counters.mismatches += 1
        record.line.mismatches.append(self.context.now)
        record.bad = event.bad
        self._fail(record, f"tokens {event.bad} do not match their digests")

    def _malformed(self, record: Incoming, problem: str) -> None:
        self.context.count("malformed")
        self._fail(record, f"the source sent nonsense: {problem}")

    # --- Complete ---

    def _complete(self, record: Incoming, message: Complete) -> None:
        """Check it; deliver if everything is here."""
        problem = check_complete(message, record.start, record.num_tokens)
        if problem is not None:
            self._malformed(record, problem)
            return
        record.complete = message
        self._accepted(record, message)
        self._set_state(record, State.COMPLETING)
        self._try_deliver(record)

    def _complete_again(self, record: Incoming, message: Complete) -> None:
        """Must equal the first one; no deadline moves."""
        assert record.complete is not None
        if msgspec.structs.replace(message, seq=record.complete.seq) != record.complete:
            self._malformed(record, "two Complete messages differ")

    def _try_deliver(self, record: Incoming) -> None:
        complete = record.complete
        if complete is None or any(n not in record.verified for n in range(complete.num_writes)):
            return
        if record.valid_through() != record.num_tokens:
            self._malformed(record, "its writes do not make up the prompt")
            return
        self.context.do(Deliver(record.name, complete.choices, complete.cached_tokens))
        self._send(record, Ack, verdict="ok")
        # All rank pairs of all writes have landed, and P posts no range twice: nothing of this
        # attempt is in flight, so its blocks need no `Drained`.
        self._end(record, "delivered")

    # --- late messages ---

    def _answer_complete(self, record: Incoming, message: Complete) -> None:
        """Delivered: `Ack(ok)` again. Else `Cancel`."""
        if record.outcome == "delivered":
            self._send(record, Ack, verdict="ok")
        else:
            self._disown(record, message)

    def _disown(self, record: Incoming, message: TransferMessage) -> None:
        """Answer `Cancel`: nobody here waits for it."""
        self._send(record, Cancel)

    # --- the end ---

    def _fail(self, record: Incoming, reason: str) -> None:
        self.context.tell(record.name, f"failed: {reason}")
        self.context.do(Fail(record.name, record.valid_through(), reason))
        self._leave(record, "failed")

    def _fail_once(self, record: Incoming, reason: str) -> None:
        """Its session is over."""
        if record.state is not State.DRAINING:
            self._fail(record, reason)

    def _give_up(self, record: Incoming, given: None) -> None:
        """Fail; `Cancel`, or `Unquarantine` at once if P never heard of the blocks."""
        assert record.line is not None
        who = record.line.address if record.state is State.WAITING else "the transfer"
        self._fail(record, f"nothing was heard of {who} in time")

    def _cancel_target(self, record: Incoming, event: CancelTarget) -> None:
        """`Cancel`, until `Drained` or a fence; `Unquarantine` at once if P never heard of the blocks."""
        self._leave(record, "cancelled")

    def _leave(self, record: Incoming, outcome: str) -> None:
        """The engine is done with the attempt; its blocks wait until no byte can land."""
        if record.session is None:
            self._end(record, outcome)
        else:
            self._drain(record, outcome)

    def _drain(self, record: Incoming, outcome: str) -> None:
        record.outcome, record.since = outcome, self.context.now
        self._quarantine[record.name] = record
        self._set_state(record, State.DRAINING)
        self._in("silence", record, self.timers.silence)
        self._repeat_cancel(record, None)

    def _repeat_cancel(self, record: Incoming, given: None) -> None:
        """Send `Cancel` again (after `Ack(mismatch)` if that was the reason). Of a session that is over the next one's `Hello` asks."""
        assert record.session is not None
        if not record.session.over:
            self._in("resend", record, self.timers.resend)
            self._cancel_again(record, None)

    def _cancel_again(self, record: Incoming, message: Complete | None) -> None:
        """Send `Cancel` again at once."""
        if record.bad:
            self._send(record, Ack, verdict="mismatch", bad=record.bad)
        self._send(record, Cancel)

    def _suspect(self, record: Incoming, given: None) -> None:
        """`Fence` its peer, if nothing was heard of that for so long; until that holds or it is heard of."""
        self._in("silence", record, self.timers.silence)
        node = record.session.node if record.session is not None else None
        assert node is not None, "P was told of the blocks"
        if self.sessions.is_silent(node):
            self.sessions.peer_gone(node)

    def _drained(self, record: Incoming, given: Drained) -> None:
        """`Unquarantine`."""
        self._end(record, record.outcome)

    def _end(self, record: Incoming, outcome: str) -> None:
        """Nothing of the attempt can land any more."""
        self.context.do(Unquarantine(record.name))
        self._quarantine.pop(record.name, None)
        counter = {"delivered": "completed", "cancelled": "cancelled"}.get(outcome, "failed")
        self._count_end(record.name, outcome, counter)
        self._set_state(record, State.ENDED)
        self.sessions.released(record)

    # fmt: off
    table: ClassVar[Table] = {
        #              unknown          waiting          reserved          engaged           completing        draining         ended
        Accepted:     (Machine._drop,   Machine._drop,   _accepted,        _note,            _note,            Machine._drop,   Machine._drop),
        Refused:      (Machine._drop,   Machine._drop,   _refused,         _refused,         _refused,         Machine._drop,   Machine._drop),
        Progress:     (_disown,         Machine._drop,   _accepted,        _accepted,        _accepted,        Machine._drop,   Machine._drop),
        Complete:     (_disown,         Machine._drop,   _complete,        _complete,        _complete_again,  _cancel_again,   _answer_complete),
        Failed:       (Machine._drop,   Machine._drop,   _peer_failed,     _peer_failed,     _peer_failed,     Machine._drop,   Machine._drop),
        Drained:      (Machine._drop,   Machine._drop,   _drained_unasked, _drained_unasked, _drained_unasked, _drained,        Machine._drop),
        Start:        (_start,          _start_twice,    _start_twice,     _start_twice,     _start_twice,     _start_twice,    _start_consumed),
        Landed:       (Machine._ignore, Machine._ignore, _landed,          _landed,          _landed,          Machine._ignore, Machine._ignore),
        Verified:     (Machine._ignore, Machine._ignore, _verified,        _verified,        _verified,        Machine._ignore, Machine._ignore),
        CancelTarget: (Machine._ignore, _cancel_target,  _cancel_target,   _cancel_target,   _cancel_target,   Machine._ignore, Machine._ignore),
        "resend":     (None,            None,            _repeat_reserve,  None,             None,             _repeat_cancel,  None),
        "keepalive":  (None,            None,            None,             _keep_alive,      _keep_alive,      None,            None),
        "progress_deadline": (None,     _give_up,        _give_up,         _give_up,         _give_up,         None,            None),
        "total":      (None,            _give_up,        _give_up,         _give_up,         _give_up,         None,            None),
        "silence":    (None,            None,            None,             None,             None,             _suspect,        None),
    }
    # fmt: on

    # --- checks ---

    def validate(self) -> None:
        """Check the machine's own invariants; raises `AssertionError` with the story."""
        self._validate((record, record.wrong()) for record in self.live.values())
        self.sessions.validate()

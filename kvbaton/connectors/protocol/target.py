"""D's side of the hand-over: reserves blocks, and lets the engine read them when that is safe.

Laws of this machine:

1. The engine may read only after `Complete`, the notices of every rank pair of every write that
   `Complete` counts, and matching digests of each.
2. Blocks that P knows of are freed by `Drained`, `SessionDrained` or `Fenced` of the same
   generation, or by a delivery, after which nothing is in flight. A time-out never frees blocks.
3. Every `Start` has one `Unquarantine`, and one of `Deliver`, `Fail` and `CancelTarget`.

`Target.table` says which rule, a method of this class, applies in which state.
"""

# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from kvbaton.connectors.layout import GroupKind
from kvbaton.connectors.plan import block_tables
from kvbaton.connectors.protocol import events
from kvbaton.connectors.protocol.checks import check_complete, counted_from, first_token
from kvbaton.connectors.protocol.incoming import Incoming, TargetSession
from kvbaton.connectors.protocol.incoming import TargetState as State
from kvbaton.connectors.protocol.machine import (
    Machine,
    Reactions,
    RefusalError,
    SessionState,
    Table,
)
from kvbaton.connectors.protocol.target_sessions import TargetSessions
from kvbaton.errors import LocalProtocolError
from kvbaton.messages import control
from kvbaton.types import Attempt, NodeId, TransferTimers

MAX_MISMATCHES = 3
"""Mismatches within `quarantine_limit` after which a P is not used for the same time."""

UNHEALTHY_SHARE = 4
"""D is unhealthy while 1 / `UNHEALTHY_SHARE` of its blocks are in quarantine for too long."""


class Target(TargetSessions):
    """D's machine.

    Args:
        identity: How this node identifies itself.
        timers: Timers of the protocol.
        new_id: Makes 16 random bytes.
        max_blocks_per_peer: Maximum number of blocks reserved or in quarantine for one P, over all
            of its addresses; None for no limit but the pool. For a P that leaves more than a
            quarter of the pool in quarantine for longer than `resend`, nothing is reserved.
    """

    is_source = False
    states = State
    record_type = Incoming

    def __init__(
        self,
        identity: events.Identity,
        timers: TransferTimers,
        *,
        new_id: Callable[[], bytes],
        max_blocks_per_peer: int | None = None,
    ) -> None:
        super().__init__(identity, timers, new_id)
        self._max_blocks = max_blocks_per_peer
        self._num_blocks = sum(group.num_blocks for group in self.groups)
        self._quarantine: dict[Attempt, Incoming] = {}

    @property
    def unhealthy(self) -> str:
        """Why the node is unhealthy: blocks in quarantine, and for which Ps; empty if it is not."""
        limit = self.now - self.timers.quarantine_limit
        old = [record for record in self._quarantine.values() if record.since <= limit]
        blocks = sum(record.num_blocks for record in old)
        if blocks * UNHEALTHY_SHARE < self._num_blocks:
            return ""
        peers = {node.node for record in old if (node := record.bound_to.node)}
        return (
            f"{blocks} of {self._num_blocks} blocks are in quarantine for more than "
            f"{self.timers.quarantine_limit:g} s because of {', '.join(sorted(peers))}"
        )

    def ledger(self) -> dict[str, Any]:
        """`Machine.ledger`, and reserved blocks and quarantines with their ages in seconds."""
        draining = self._quarantine.values()
        quarantined = sum(r.num_blocks for r in draining)
        return {
            **super().ledger(),
            "reserved_blocks": sum(r.num_blocks for r in self.live.values()) - quarantined,
            "quarantined_blocks": quarantined,
            "quarantined": [
                {
                    "transfer_id": r.name.transfer_id.hex(),
                    "attempt": r.name.number,
                    "blocks": r.num_blocks,
                    "age_s": self.now - r.since,
                }
                for r in draining
            ],
            "unhealthy": self.unhealthy,
            "fencing": [node.node for node in self.fencing()],
        }

    # --- dispatch ---

    def _received(self, event: events.Received) -> None:
        message = event.message
        session = self.known.get(message.session)
        if session is None:
            self.count("unknown_session")
            return
        of_session = isinstance(message, control.Refused) and message.transfer_id is None
        if not of_session and not self.admit(session, event.link, message.seq):
            return  # (the refusal of a session has no number)
        session.heard = self.now
        match message:
            case control.Welcome():
                self.welcomed(session, message)
            case control.SessionDrained():
                self.session_drained(session, message)
            case control.Refused() if of_session:
                self.refused(session, message)
            case control.TransferMessage() | control.Refused() if type(message) in self.table:
                self._about_attempt(session, message)
            case _:
                self.count("unexpected")

    def _about_attempt(
        self, session: TargetSession, message: control.TransferMessage | control.Refused
    ) -> None:
        assert message.transfer_id is not None, "else it is about the session"
        record = self.record(Attempt(message.transfer_id, message.attempt))
        if record.state is not State.UNKNOWN:
            line = f"< {type(message).__name__} in {record.state.value}"
            record.story.append((self.now, line))
        if record.name in self.live and record.session is not session:
            self.count("foreign")
        elif session.state is not SessionState.UP and not isinstance(message, control.Drained):
            self.count("session_over")
        else:
            record.session = session
            self.apply(type(message), record, message)

    # --- Start ---

    def _start(self, record: Incoming, event: events.Start) -> None:
        """Wait for the session (open one if there is none), then send `Reserve`. Fail at once if P is over its cap of blocks, or is not used because of mismatches."""
        if self.is_crowded(event.address):
            self._turn_down(event, "too many addresses are in use")
            return
        line = record.line = self.line(event.address)
        record.order, record.num_tokens = event, event.num_tokens
        record.targets = block_tables(event.spans, self.groups, event.num_tokens)
        record.start = first_token(event.spans, self.groups)
        record.num_blocks = sum(len(span.blocks) for spans in event.spans for span in spans)
        record.began = self.now
        record.until = self.now + (event.deadline_s or self.timers.total)
        line.attempts[record.name] = record
        self._set_state(record, State.WAITING)
        self._heard(record)
        if line.up is not None:
            self._reserve(record, line.up)
        elif reason := self._unwelcome(record, None):
            self._fail(record, reason)
        else:
            self.open_line(line)

    def _unwelcome(self, record: Incoming, node: NodeId | None) -> str | None:
        """Why P can't be used now, or None; `node` is None until the session is up."""
        line, name = record.line, node and node.node

        def is_peers(other: Incoming) -> bool:
            if other.line is line:
                return True
            bound = other.session and other.session.node
            return name is not None and bound is not None and bound.node == name

        since = self.now - self.timers.quarantine_limit
        line.mismatches = [at for at in line.mismatches if at > since]
        if len(line.mismatches) >= MAX_MISMATCHES:
            return f"{line.address} was put out after {len(line.mismatches)} mismatches"
        if self._max_blocks is not None:
            blocks = sum(r.num_blocks for r in self.live.values() if is_peers(r))
            if blocks > self._max_blocks:
                who, most = line.address, self._max_blocks
                return f"{blocks} blocks would wait for {who}, at most {most} may"
        asked = self.now - self.timers.resend  # later quarantines: P may be about to drain them
        draining = (r for r in self._quarantine.values() if r.since <= asked)
        left = sum(r.num_blocks for r in draining if is_peers(r))
        if left * UNHEALTHY_SHARE > self._num_blocks:
            return f"{line.address} leaves {left} blocks in quarantine"
        return None

    def _start_twice(self, record: Incoming, event: events.Start) -> None:
        """Raise `LocalProtocolError`: this is a bug of D's engine."""
        raise LocalProtocolError(f"{record.name} is started twice")

    def _start_consumed(self, record: Incoming, event: events.Start) -> None:
        """Fail at once; nothing is sent."""
        self._turn_down(event, "the attempt has ended already")

    def _turn_down(self, event: events.Start, reason: str) -> None:
        self.counters.started += 1
        self.counters.failed += 1
        start = first_token(event.spans, self.groups)
        self.do(events.Fail(event.attempt, start, reason))
        self.do(events.Unquarantine(event.attempt))

    # --- Reserve and its answers ---

    def _reserve(self, record: Incoming, session: TargetSession) -> None:
        """Send `Reserve`; from now on P knows of the blocks. If P, over all of its addresses, exceeds its cap of blocks, or is not used because of mismatches: send `NotNeeded` and fail."""
        if reason := self._unwelcome(record, session.node):
            if not record.order.keys:  # P would compute a prompt that nobody waits for
                self.unneeded(events.Unneeded(record.name, record.line.address))
            self._fail(record, reason)
            return
        record.session = session
        session.attempts[record.name] = record
        whole = record.start, record.num_tokens
        record.counted = counted_from(self.groups, session.groups, *whole)
        self._set_state(record, State.RESERVED)
        self._heard(record)
        self._repeat_reserve(record, None)

    def _repeat_reserve(self, record: Incoming, given: None) -> None:
        """Send `Reserve` again: every `resend` until it is answered, then four times in a `lease`, which renews P's lease."""
        unanswered = record.state is State.RESERVED
        self.ring_in(
            "resend", record.name, self.timers.resend if unanswered else self.timers.lease / 4
        )
        self._send(
            record,
            control.Reserve,
            prompt_key=record.order.prompt_key,
            num_tokens=record.num_tokens,
            spans=record.order.spans,
            remaining_ms=max(1, int((record.until - self.now) * 1000)),
            keys=record.order.keys,
        )

    def _heard(self, record: Incoming) -> None:
        left = record.until - self.now
        self.ring_in("deadline", record.name, min(self.timers.progress_deadline, left))

    def _accepted(self, record: Incoming, message: object) -> None:
        """P is at work: restart the deadline, and repeat `Reserve` less often."""
        if record.state is State.RESERVED:
            record.times["accepted"] = self.now
            self._set_state(record, State.ENGAGED)
            self.ring_in("resend", record.name, self.timers.lease / 4)
        self._heard(record)

    def _peer_failed(self, record: Incoming, message: control.Failed | control.Refused) -> None:
        """Fail and send `Cancel`, since posted writes may still land."""
        if isinstance(message, control.Failed):
            why = f"the source failed: {message.reason}"
            self._fail(record, why, answered=message.engine)
        else:
            self.count("refused")  # not by the message's code, which may be any text
            self._fail(record, f"refused ({message.code}): {message.message}", answered=True)

    # --- bytes ---

    def _landed(self, record: Incoming, event: events.Landed) -> None:
        """Check the notice and note its part; `Verify` the write once all parts of all rank pairs have landed."""
        session, pair = record.bound_to, (event.source_rank, event.target_rank)
        if event.session != session.id or pair not in session.pairs:
            self.count("junk_notice")
            return
        self._accepted(record, event)
        record.times.setdefault("first_landed", self.now)
        record.times["landed"] = self.now
        if record.land(event) is not None:
            self.do(record.verification(event.write))

    def _verified(self, record: Incoming, event: events.Verified) -> None:
        """If the digests match: deliver once everything has arrived. Else fail, and send `Ack(mismatch)` and `Cancel`."""
        if event.error:
            self._fail(record, f"write {event.write} can't be verified: {event.error}")
            return
        record.verified[event.write] = event.bad
        self._heard(record)
        if event.bad:
            self.counters.mismatches += 1
            record.line.mismatches.append(self.now)
            record.bad = event.bad
            self._fail(record, f"tokens {event.bad} do not match their digests")
        else:
            self._try_deliver(record)

    def refuse(self, record: Incoming, refusal: RefusalError) -> None:
        """Fail: P sent something invalid."""
        self.count(refusal.code)
        self._fail(record, f"the source sent nonsense: {refusal}")

    # --- Complete ---

    def _complete(self, record: Incoming, message: control.Complete) -> None:
        """Check the message; deliver if everything has arrived."""
        unit = 0  # a prompt is handed over as a whole
        if record.order.keys:
            # P may hold fewer blocks than requested. If a group keeps only a part of the prefix,
            # the reserved blocks are those for all tokens: it is all or nothing.
            whole = all(group.kind is GroupKind.FULL for group in self.groups)
            unit = self.groups[0].block_size if whole else record.num_tokens
        if problem := check_complete(message, record.start, record.num_tokens, unit):
            raise RefusalError("malformed", problem)
        record.complete = message
        record.completed, record.crossed = self.now, record.valid_through()
        self._accepted(record, message)
        self._set_state(record, State.COMPLETING)
        self._try_deliver(record)

    def _complete_again(self, record: Incoming, message: control.Complete) -> None:
        """Check that it equals the first one; deadlines stay."""
        assert record.complete is not None
        if msgspec.structs.replace(message, seq=record.complete.seq) != record.complete:
            raise RefusalError("malformed", "two Complete messages differ")

    def _try_deliver(self, record: Incoming) -> None:
        complete = record.complete
        if complete is None or any(n not in record.verified for n in range(complete.num_writes)):
            return
        if record.valid_through() != complete.num_tokens:
            raise RefusalError("malformed", "its writes do not make up the prompt")
        delivered = complete.choices, complete.cached_tokens, complete.num_tokens
        times = (*record.times.items(), ("verified", self.now))
        fetched = bool(record.order.keys)
        begin = (record.start, record.began) if fetched else (record.crossed, record.completed)
        tokens, address = complete.num_tokens - begin[0], record.order.address
        crossing = events.Crossing(address, fetched, tokens, begin[1], self.now)
        self.do(events.Deliver(record.name, *delivered, times, crossing))
        record.outcome = "delivered"
        self._send(record, control.Ack, verdict="ok")
        # All rank pairs of all writes have landed, and P posts no range twice: nothing of this
        # attempt is in flight, so its blocks need no `Drained`.
        self._end(record)

    # --- the end ---

    def _answer_late(self, record: Incoming, message: control.TransferMessage | None) -> None:
        """If the attempt was delivered, `Ack(ok)`. Else nobody waits for it: `Cancel`, after `Ack(mismatch)` if that was the reason."""
        if record.outcome == "delivered":
            self._send(record, control.Ack, verdict="ok")
            return
        if record.bad:
            self._send(record, control.Ack, verdict="mismatch", bad=record.bad)
        self._send(record, control.Cancel)

    def _give_up(self, record: Incoming, given: None) -> None:
        """Fail because nothing was heard in time; `Cancel`, or `Unquarantine` at once if P never knew of the blocks."""
        who = record.line.address if record.state is State.WAITING else "the transfer"
        self._fail(record, f"nothing was heard of {who} in time")

    def _cancel_target(self, record: Incoming, event: events.CancelTarget) -> None:
        """Send `Cancel` until `Drained` or a fence; `Unquarantine` at once if P never knew of the blocks."""
        self._leave(record, "cancelled")

    def _fail(self, record: Incoming, reason: str, *, answered: bool = False) -> None:
        """`Fail` and send `Cancel`; `Unquarantine` at once if P never knew of the blocks."""
        record.story.append((self.now, f"failed: {reason}"))
        self.do(events.Fail(record.name, record.valid_through(), reason, answered))
        self._leave(record, "failed")

    def _leave(self, record: Incoming, outcome: str) -> None:
        """End the attempt for the engine; its blocks wait until no byte can land any more."""
        record.outcome, record.since = outcome, self.now
        if record.session is None:  # P never knew of the blocks
            self._end(record)
            return
        self._quarantine[record.name] = record
        self._set_state(record, State.DRAINING)
        self.ring_in("deadline", record.name, self.timers.lease)
        self._repeat_cancel(record, None)

    def _repeat_cancel(self, record: Incoming, given: None) -> None:
        """Send `Cancel` again (after `Ack(mismatch)` if that was the reason). If the session is over, the next session's `Hello` asks instead."""
        if not record.bound_to.over:
            self.ring_in("resend", record.name, self.timers.resend)
            self._answer_late(record, None)

    def _suspect(self, record: Incoming, given: None) -> None:
        """`Fence` P. If nothing was heard of it for a `lease`: until the fence succeeds or P is heard of. If P lives, but has not drained for `quarantine_limit`: once in a `lease`."""
        self.ring_in("deadline", record.name, self.timers.lease)
        node = record.bound_to.node
        assert node is not None, "P was told of the blocks"
        if self.is_silent(node):
            self.lose(node, "nothing was heard")
        elif self.now - record.since >= self.timers.quarantine_limit:
            record.story.append((self.now, f"{node.node} lives and does not drain: fence it"))
            self.fence(node)

    def _drained(self, record: Incoming, message: control.Drained) -> None:
        """`Unquarantine`; if P gave up by itself, fail first."""
        if record.state is not State.DRAINING:
            self._fail(record, "the source failed: it stopped unasked")
        self._end(record)

    def _end(self, record: Incoming) -> None:
        """End the attempt: no write of it can land any more."""
        self.do(events.Unquarantine(record.name))
        self._quarantine.pop(record.name, None)
        self._finish(record, record.outcome)
        self.released(record)

    reactions: ClassVar[Reactions] = {
        events.Received: _received,
        events.PeerGone: TargetSessions.peer_gone,
        events.Fenced: TargetSessions.fenced,
        events.SetMembers: TargetSessions.set_members,
        events.Unreachable: TargetSessions.unreachable,
        events.Unneeded: TargetSessions.unneeded,
    }
    _drop, _ignore = Machine._drop, Machine._ignore
    # fmt: off
    table: ClassVar[Table] = {
        #                unknown       waiting         reserved         engaged          completing       draining        ended
        control.Accepted:       (_drop,        _drop,          _accepted,       _ignore,         _ignore,         _drop,          _drop),
        control.Refused:        (_drop,        _drop,          _peer_failed,    _peer_failed,    _peer_failed,    _drop,          _drop),
        control.Progress:       (_answer_late, _drop,          _accepted,       _accepted,       _accepted,       _drop,          _drop),
        control.Complete:       (_answer_late, _drop,          _complete,       _complete,       _complete_again, _answer_late,   _answer_late),
        control.Failed:         (_drop,        _drop,          _peer_failed,    _peer_failed,    _peer_failed,    _drop,          _drop),
        control.Drained:        (_drop,        _drop,          _drained,        _drained,        _drained,        _drained,       _drop),
        events.Start:          (_start,       _start_twice,   _start_twice,    _start_twice,    _start_twice,    _start_twice,   _start_consumed),
        events.Landed:         (_ignore,      _ignore,        _landed,         _landed,         _landed,         _ignore,        _ignore),
        events.Verified:       (_ignore,      _ignore,        _verified,       _verified,       _verified,       _ignore,        _ignore),
        events.CancelTarget:   (_ignore,      _cancel_target, _cancel_target,  _cancel_target,  _cancel_target,  _ignore,        _ignore),
        "session up":   (None,         _reserve,       None,            None,            None,            None,           None),
        "session over": (None,         _fail,          _fail,           _fail,           _fail,           _ignore,        None),
        "resend":       (None,         None,           _repeat_reserve, _repeat_reserve, _repeat_reserve, _repeat_cancel, None),
        "deadline":     (None,         _give_up,       _give_up,        _give_up,        _give_up,        _suspect,       None),
    }
    # fmt: on

"""D's side of the hand-over: when received blocks may be used, and when they may be freed.

The rules that hold here:

1. Blocks are used only after `Complete`, a notice for every part of every write it counts, and
   right digests for all of them.
2. Reserved blocks are given back exactly once: when everything has landed, on `Drained` (or the
   `Welcome` of a newer session) of the same P generation, or once that generation is fenced.
   A timeout never frees.
3. A question is asked again until it is answered or its deadline has passed.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvbaton.connectors.protocol.events import (
    AdmitPeer,
    Attempt,
    CancelTarget,
    Counters,
    Deliver,
    Fail,
    Fence,
    Fenced,
    Identity,
    Landed,
    PeerGone,
    Received,
    Send,
    Start,
    TargetAction,
    TargetEvent,
    Tick,
    TransferTimers,
    Unneeded,
    Unquarantine,
    Verified,
    Verify,
    spans_slice,
)
from kvbaton.connectors.protocol.session import Pairable, Stories, Timers, decode_layouts
from kvbaton.errors import LayoutMismatchError
from kvbaton.wire import (
    MIN_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Accepted,
    Ack,
    Cancel,
    Complete,
    Drained,
    Failed,
    Hello,
    Message,
    NodeId,
    NotNeeded,
    Progress,
    Pushed,
    RankCard,
    Refused,
    Reserve,
    TransferMessage,
    Welcome,
)

MAX_WRITES = 1 << 20
MAX_ENDED = 4096


class State(enum.Enum):
    """Where an attempt is on D."""

    OPENING = enum.auto()
    """Waits for the session; P knows nothing of it yet."""
    RESERVING = enum.auto()
    """`Reserve` is sent, not yet answered."""
    LOADING = enum.auto()
    """P has accepted; bytes may land."""
    QUARANTINED = enum.auto()
    """Given up; bytes may still land."""


@dataclass
class _Session:
    """A session with the P at one address.

    Attributes:
        node: P's life; None until its `Welcome`.
        unneeded: attempts to call off as soon as the session is open.
    """

    id: bytes
    address: str
    node: NodeId | None = None
    ranks: tuple[RankCard, ...] = ()
    seq_in: int = -1
    seq_out: int = -1
    unneeded: list[Attempt] = field(default_factory=list)


@dataclass
class _Write:
    """What is known of one write of an attempt."""

    landed: set[tuple[int, int]] = field(default_factory=set)
    pushed: Pushed | None = None
    verifying: bool = False
    verified: bool = False


@dataclass
class _Transfer:
    """One attempt.

    Attributes:
        session: where it was reserved.
        node: P's life that may write; None while none may.
    """

    start: Start
    state: State
    session: bytes
    node: NodeId | None = None
    writes: dict[int, _Write] = field(default_factory=dict)
    complete: Complete | None = None
    since: float = 0.0


class Target:
    """The machine. See `events` for what goes in and out.

    Args:
        identity: what this node says of itself.
        timers: durations.
        new_id: makes 16 random bytes.
        pairable: raises `LayoutMismatchError` if P's and D's layouts of a group can't meet.
        max_mismatches: a peer with more wrong digests is put out.
        max_quarantined: most attempts of one address whose blocks wait in quarantine.
    """

    def __init__(
        self,
        identity: Identity,
        timers: TransferTimers,
        *,
        new_id: Callable[[], bytes],
        pairable: Pairable,
        max_mismatches: int = 3,
        max_quarantined: int = 256,
    ) -> None:
        self.identity = identity
        self.timers = timers
        self.counters = Counters()
        self._new_id = new_id
        self._pairable = pairable
        self._max_mismatches = max_mismatches
        self._max_quarantined = max_quarantined
        self._layouts = decode_layouts(identity.ranks)
        self._sessions: dict[bytes, _Session] = {}
        self._by_address: dict[str, _Session] = {}
        self._transfers: dict[Attempt, _Transfer] = {}
        self._ended: OrderedDict[Attempt, tuple[bytes, str]] = OrderedDict()
        self._mismatches: dict[str, int] = {}
        self._timers: Timers[tuple[str, Any]] = Timers()
        self._stories = Stories()
        self._actions: list[TargetAction] = []
        self._now = 0.0
        self._on: dict[type, Callable[[Any], None]] = {
            Received: self._received,
            PeerGone: self._peer_gone,
            Tick: self._tick,
            Start: self._start,
            Unneeded: self._unneeded,
            Landed: self._landed,
            Verified: self._verified,
            CancelTarget: self._cancel_target,
            Fenced: self._fenced,
        }
        self._on_message: dict[type, Callable[[_Transfer, Any], None]] = {
            Accepted: self._accepted,
            Refused: self._refused,
            Pushed: self._pushed,
            Progress: self._progress,
            Complete: self._complete,
            Failed: self._failed,
            Drained: self._drained,
        }

    # --- the interface ---

    def handle(self, event: TargetEvent, now: float) -> list[TargetAction]:
        """Process one event; returns what is to be done, in order."""
        self._now = now
        self._on[type(event)](event)
        actions, self._actions = self._actions, []
        return actions

    def next_deadline(self) -> float | None:
        """When the next `Tick` is due."""
        return self._timers.next()

    @property
    def unhealthy(self) -> bool:
        """Whether blocks are in quarantine for longer than its limit."""
        limit = self._now - self.timers.quarantine_limit
        return any(
            t.state is State.QUARANTINED and t.since < limit for t in self._transfers.values()
        )

    def stories(self) -> dict[Attempt, list[str]]:
        """What happened to the latest attempts, for diagnosis."""
        return self._stories.all()

    def ledger(self) -> dict[str, Any]:
        """Live attempts by state, and the sessions."""
        states: dict[str, int] = {}
        for transfer in self._transfers.values():
            states[transfer.state.name.lower()] = states.get(transfer.state.name.lower(), 0) + 1
        return {
            "sessions": {s.id.hex(): s.address for s in self._sessions.values()},
            "attempts": states,
            "mismatches": dict(self._mismatches),
            "counters": msgspec.to_builtins(self.counters),
        }

    def validate(self) -> None:
        """Raise `AssertionError`, with the story, if a law of this file does not hold."""
        names = self._timers.names()
        for attempt, transfer in self._transfers.items():
            story = self._stories.of(attempt)
            assert any(name[1] == attempt for name in names), f"no timer\n{story}"
            assert transfer.state is State.OPENING or transfer.node is not None, story

    # --- sessions ---

    def _open_session(self, address: str) -> _Session:
        session = _Session(self._new_id(), address)
        self._sessions[session.id] = self._by_address[address] = session
        self._timers.arm(("session", session.id), self._now + self.timers.session)
        self._hello(session)
        return session

    def _hello(self, session: _Session) -> None:
        self._timers.arm(("hello", session.id), self._now + self.timers.resend)
        self._send(
            session,
            Hello,
            sender=self.identity.node,
            min_version=MIN_PROTOCOL_VERSION,
            max_version=PROTOCOL_VERSION,
            identity=self.identity.digest,
            identity_record=self.identity.record,
            transport=self.identity.transport,
            ranks=self.identity.ranks,
        )

    def _received(self, event: Received) -> None:
        message = event.message
        session = self._sessions.get(message.session)
        if session is None:
            self.counters.dropped_messages += 1
            return
        if isinstance(message, Refused) and message.transfer_id is None:
            self._session_refused(session, message)
            return
        if message.seq <= session.seq_in:
            self.counters.dropped_messages += 1
            return
        session.seq_in = message.seq
        if isinstance(message, Welcome):
            self._welcome(session, message)
        else:
            self._transfer_message(session, message)

    def _welcome(self, session: _Session, message: Welcome) -> None:
        if session.node is not None:
            return
        try:
            theirs = decode_layouts(message.ranks)
            if len(theirs[0]) != len(self._layouts[0]):
                raise LayoutMismatchError("the numbers of KV groups differ")
            for group in range(len(theirs[0])):
                self._pairable([r[group] for r in theirs], [r[group] for r in self._layouts])
        except (LayoutMismatchError, msgspec.DecodeError, ValueError) as error:
            self._drop_session(session, f"layout: {error}")
            return
        self._timers.cancel_all(session.id)
        session.node, session.ranks = message.sender, message.ranks
        self._do(AdmitPeer(session.id, message.sender, message.ranks))
        self._settle_old(session)
        for transfer in self._of_session(session.id):
            self._reserve(transfer, session)
        for attempt in session.unneeded:
            self._send_transfer(session, NotNeeded, attempt)
        session.unneeded.clear()

    def _settle_old(self, session: _Session) -> None:
        """A `Welcome` says `Drained` for every older session of the same generation."""
        for transfer in list(self._transfers.values()):
            if transfer.node is None or transfer.session == session.id:
                continue
            if transfer.node == session.node:
                self._fail(transfer, "the session was opened anew")
                self._release(transfer)
            elif session.node is not None and transfer.node.node == session.node.node:
                self._fail(transfer, "the prefill node was restarted")

    def _session_refused(self, session: _Session, message: Refused) -> None:
        self._drop_session(session, f"refused: {message.code}: {message.message}")
        waiting = any(
            t.state is State.QUARANTINED and self._address(t) == session.address
            for t in self._transfers.values()
        )
        if message.code == "unknown_session" and waiting:
            self._open_session(session.address)

    def _drop_session(self, session: _Session, reason: str) -> None:
        self._timers.cancel_all(session.id)
        self._sessions.pop(session.id, None)
        if self._by_address.get(session.address) is session:
            del self._by_address[session.address]
        for transfer in list(self._of_session(session.id)):
            self._fail(transfer, reason)

    def _peer_gone(self, event: PeerGone) -> None:
        for session in list(self._sessions.values()):
            if session.node == event.node:
                self._drop_session(session, "the prefill node is gone")
        if any(t.node == event.node for t in self._transfers.values()):
            self._do(Fence(event.node))

    def _fenced(self, event: Fenced) -> None:
        for transfer in list(self._transfers.values()):
            if transfer.node == event.node:
                self._fail(transfer, "the prefill node is gone")
                self._release(transfer)

    def _of_session(self, session_id: bytes) -> Iterable[_Transfer]:
        return [t for t in self._transfers.values() if t.session == session_id]

    @staticmethod
    def _address(transfer: _Transfer) -> str:
        return transfer.start.address

    # --- reservations ---

    def _start(self, event: Start) -> None:
        self.counters.started += 1
        transfer = _Transfer(event, State.OPENING, b"", since=self._now)
        self._tell(transfer, f"start with {event.address}")
        objection = self._start_objection(event)
        if event.attempt in self._transfers:
            objection = "this attempt is live already"
        if objection is not None:
            self.counters.failed += 1
            self._do(Fail(event.attempt, self._first_token(transfer), objection))
            self._do(Unquarantine(event.attempt))
            return
        self._transfers[event.attempt] = transfer
        total = event.deadline_s or self.timers.total
        self._timers.arm(("total", event.attempt), self._now + total)
        session = self._by_address.get(event.address) or self._open_session(event.address)
        transfer.session = session.id
        if session.node is not None:
            self._reserve(transfer, session)

    def _start_objection(self, event: Start) -> str | None:
        if self._mismatches.get(event.address, 0) >= self._max_mismatches:
            return "this prefill node has sent wrong bytes too often"
        waiting = sum(
            t.state is State.QUARANTINED and self._address(t) == event.address
            for t in self._transfers.values()
        )
        if waiting >= self._max_quarantined:
            return f"{waiting} hand-overs of this prefill node are in quarantine"
        return None

    def _first_token(self, transfer: _Transfer) -> int:
        return min(
            spans[0].first * layout.block_size
            for spans, layout in zip(transfer.start.spans, self._layouts[0], strict=True)
            if spans
        )

    def _reserve(self, transfer: _Transfer, session: _Session) -> None:
        start = transfer.start
        transfer.state = State.RESERVING
        transfer.node = session.node
        total = self._timers.at(("total", start.attempt))
        remaining = max(0.0, (total or self._now) - self._now)
        self._timers.arm(("reserve", start.attempt), self._now + self.timers.resend)
        if self._timers.at(("progress", start.attempt)) is None:
            self._heard(transfer)
        self._send_transfer(
            session,
            Reserve,
            start.attempt,
            prompt_key=start.prompt_key,
            num_tokens=start.num_tokens,
            spans=start.spans,
            remaining_ms=int(remaining * 1000),
        )

    def _heard(self, transfer: _Transfer) -> None:
        deadline = self._now + self.timers.progress_deadline
        self._timers.arm(("progress", transfer.start.attempt), deadline)

    def _unneeded(self, event: Unneeded) -> None:
        session = self._by_address.get(event.address) or self._open_session(event.address)
        if session.node is None:
            session.unneeded.append(event.attempt)
        else:
            self._send_transfer(session, NotNeeded, event.attempt)

    # --- what P says ---

    def _transfer_message(self, session: _Session, message: Any) -> None:
        if not isinstance(message, TransferMessage | Refused) or message.transfer_id is None:
            self.counters.dropped_messages += 1
            return
        attempt = Attempt(message.transfer_id, message.attempt)
        transfer = self._transfers.get(attempt)
        if transfer is None or transfer.session != session.id:
            self._answer_ended(session, attempt, message)
            return
        if transfer.state is not State.QUARANTINED:
            self._heard(transfer)
        self._on_message[type(message)](transfer, message)

    def _answer_ended(self, session: _Session, attempt: Attempt, message: Any) -> None:
        """P repeats `Complete` until it has its `Ack`: say again how it ended."""
        ended = self._ended.get(attempt)
        if isinstance(message, Complete) and ended is not None and ended[0] == session.id:
            self._send_transfer(session, Ack, attempt, verdict=ended[1])
        else:
            self.counters.dropped_messages += 1

    def _accepted(self, transfer: _Transfer, message: Accepted) -> None:
        if transfer.state is State.RESERVING:
            transfer.state = State.LOADING
            self._timers.cancel(("reserve", transfer.start.attempt))

    def _refused(self, transfer: _Transfer, message: Refused) -> None:
        code = message.code
        self.counters.by_code[code] = self.counters.by_code.get(code, 0) + 1
        self._fail(transfer, f"refused: {code}: {message.message}")

    def _progress(self, transfer: _Transfer, message: Progress) -> None:
        """Hearing it was all."""

    def _failed(self, transfer: _Transfer, message: Failed) -> None:
        self._fail(transfer, message.reason)

    def _drained(self, transfer: _Transfer, message: Drained) -> None:
        if transfer.state is State.QUARANTINED:
            self._release(transfer)

    def _pushed(self, transfer: _Transfer, message: Pushed) -> None:
        if transfer.state not in (State.RESERVING, State.LOADING):
            return
        in_range = 0 <= message.start < message.end <= transfer.start.num_tokens
        if not in_range or message.write >= MAX_WRITES:
            self._fail(transfer, f"pushed [{message.start}, {message.end}): out of range")
            return
        write = transfer.writes.setdefault(message.write, _Write())
        write.pushed = write.pushed or message
        self._advance(transfer, message.write)

    def _landed(self, event: Landed) -> None:
        transfer = self._transfers.get(event.attempt)
        if transfer is None or transfer.session != event.session or event.write >= MAX_WRITES:
            self.counters.dropped_messages += 1
            return
        write = transfer.writes.setdefault(event.write, _Write())
        write.landed.add((event.source_rank, event.target_rank))
        if transfer.state in (State.RESERVING, State.LOADING):
            self._heard(transfer)
            self._advance(transfer, event.write)

    def _complete(self, transfer: _Transfer, message: Complete) -> None:
        if transfer.state not in (State.RESERVING, State.LOADING):
            return
        if message.num_tokens != transfer.start.num_tokens or not message.choices:
            self._fail(transfer, f"complete with {message.num_tokens} tokens")
            return
        transfer.complete = message
        self._finish(transfer)

    # --- verifying ---

    def _advance(self, transfer: _Transfer, number: int) -> None:
        """Verify a write once all its parts have landed and its digests are known."""
        write = transfer.writes[number]
        if write.pushed is None or write.verifying or not self._all_landed(transfer, write):
            return
        write.verifying = True
        start, end = write.pushed.start, write.pushed.end
        target = tuple(
            spans_slice(spans, start // layout.block_size, -(-end // layout.block_size))
            for spans, layout in zip(transfer.start.spans, self._layouts[0], strict=True)
        )
        self._do(
            Verify(
                transfer.session,
                transfer.start.attempt,
                number,
                start,
                end,
                target,
                write.pushed.digests,
            )
        )

    def _all_landed(self, transfer: _Transfer, write: _Write) -> bool:
        session = self._sessions.get(transfer.session)
        if session is None:
            return False
        pairs = {(s, t) for s in range(len(session.ranks)) for t in range(len(self.identity.ranks))}
        return pairs <= write.landed

    def _verified(self, event: Verified) -> None:
        transfer = self._transfers.get(event.attempt)
        if transfer is None or transfer.state is State.QUARANTINED:
            return
        if not event.bad:
            transfer.writes[event.write].verified = True
            self._tell(transfer, f"verified {event.write}")
            self._finish(transfer)
            return
        self.counters.mismatches += 1
        address = self._address(transfer)
        self._mismatches[address] = self._mismatches.get(address, 0) + 1
        session = self._sessions.get(transfer.session)
        if session is not None:
            self._send_transfer(session, Ack, event.attempt, verdict="mismatch", bad=event.bad)
        self._fail(transfer, f"digests of {list(event.bad)} do not match")

    def _finish(self, transfer: _Transfer) -> None:
        """Deliver, if everything that `Complete` counts has landed and is verified."""
        complete = transfer.complete
        if complete is None or not self._all_verified(transfer, complete):
            return
        attempt = transfer.start.attempt
        self.counters.completed += 1
        self._tell(transfer, "deliver")
        self._do(Deliver(attempt, complete.choices, complete.cached_tokens))
        session = self._sessions.get(transfer.session)
        if session is not None:
            self._send_transfer(session, Ack, attempt, verdict="ok")
        self._remember(attempt, transfer.session, "ok")
        # P posts nothing after `Complete`, and every write that it counts has landed as a whole:
        # nothing is in flight.
        self._forget(transfer)

    def _all_verified(self, transfer: _Transfer, complete: Complete) -> bool:
        writes = [transfer.writes.get(number) for number in range(complete.num_writes)]
        if not all(write is not None and write.verified for write in writes):
            return False
        covered = self._covered(transfer)
        return covered == transfer.start.num_tokens

    def _covered(self, transfer: _Transfer) -> int:
        """Tokens verified without a gap, from the start of the reservation on."""
        through = self._first_token(transfer)
        ranges = sorted(
            (w.pushed.start, w.pushed.end)
            for w in transfer.writes.values()
            if w.verified and w.pushed is not None
        )
        for start, end in ranges:
            if start <= through:
                through = max(through, end)
        return through

    # --- ends ---

    def _cancel_target(self, event: CancelTarget) -> None:
        transfer = self._transfers.get(event.attempt)
        if transfer is None or transfer.state is State.QUARANTINED:
            return
        self.counters.cancelled += 1
        self._tell(transfer, "cancelled")
        self._quarantine(transfer)

    def _fail(self, transfer: _Transfer, reason: str) -> None:
        if transfer.state is State.QUARANTINED:
            return
        self.counters.failed += 1
        self._tell(transfer, f"fail: {reason}")
        self._do(Fail(transfer.start.attempt, self._covered(transfer), reason))
        self._quarantine(transfer)

    def _quarantine(self, transfer: _Transfer) -> None:
        attempt = transfer.start.attempt
        reserved = transfer.state is not State.OPENING
        transfer.state = State.QUARANTINED
        transfer.since = self._now
        self._timers.cancel_all(attempt)
        self._remember(attempt, transfer.session, "failed")
        if reserved:
            self._timers.arm(("fence", attempt), self._now + self.timers.fence_retry)
            self._cancel(transfer)
        else:
            # P never learned where these blocks are.
            self._release(transfer)

    def _cancel(self, transfer: _Transfer) -> None:
        attempt = transfer.start.attempt
        self._timers.arm(("cancel", attempt), self._now + self.timers.resend)
        session = self._sessions.get(transfer.session)
        if session is not None:
            self._send_transfer(session, Cancel, attempt)
        elif self._address(transfer) not in self._by_address:
            self._open_session(self._address(transfer))

    def _release(self, transfer: _Transfer) -> None:
        self._tell(transfer, "unquarantine")
        self._forget(transfer)

    def _forget(self, transfer: _Transfer) -> None:
        attempt = transfer.start.attempt
        if self._transfers.pop(attempt, None) is not None:
            self._timers.cancel_all(attempt)
            self._do(Unquarantine(attempt))

    def _remember(self, attempt: Attempt, session: bytes, verdict: str) -> None:
        self._ended[attempt] = (session, verdict)
        self._ended.move_to_end(attempt)
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    # --- time ---

    def _tick(self, event: Tick) -> None:
        for kind, owner in self._timers.due(self._now):
            if kind in ("hello", "session"):
                self._session_timer(kind, owner)
            else:
                transfer = self._transfers.get(owner)
                if transfer is not None:
                    self._transfer_timer(kind, transfer)

    def _session_timer(self, kind: str, session_id: bytes) -> None:
        session = self._sessions.get(session_id)
        if session is None or session.node is not None:
            return
        if kind == "hello":
            self._hello(session)
        else:
            self._drop_session(session, f"{session.address} did not answer")

    def _transfer_timer(self, kind: str, transfer: _Transfer) -> None:
        session = self._sessions.get(transfer.session)
        if kind == "reserve" and session is not None:
            self._reserve(transfer, session)
        elif kind == "cancel":
            self._cancel(transfer)
        elif kind == "fence":
            self._timers.arm(("fence", transfer.start.attempt), self._now + self.timers.fence_retry)
            if transfer.node is not None:
                self._do(Fence(transfer.node))
        elif kind in ("progress", "total"):
            self._fail(transfer, f"the target's timer {kind!r} ran out")

    # --- words ---

    def _do(self, action: TargetAction) -> None:
        self._actions.append(action)

    def _tell(self, transfer: _Transfer, what: str) -> None:
        self._stories.add(transfer.start.attempt, self._now, what)

    def _send(self, session: _Session, kind: type[Message], **fields: Any) -> None:
        session.seq_out += 1
        message: Any = kind(session=session.id, seq=session.seq_out, **fields)
        self._do(Send(message, address=session.address))

    def _send_transfer(
        self, session: _Session, kind: type[TransferMessage], attempt: Attempt, **fields: Any
    ) -> None:
        self._send(session, kind, transfer_id=attempt.transfer_id, attempt=attempt.number, **fields)

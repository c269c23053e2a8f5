"""D's sessions: one line per address of a P, and what becomes of quarantines when a session ends.

A session is *hello* until `Welcome`, then *up*, and *over* for good once P does not know it, its
peer is gone or suspect. Attempts of a session that is over fail; their blocks stay in quarantine
until P says `Drained`, or `Welcome` to a later session, or its generation is fenced.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvbaton.connectors.protocol.events import (
    AdmitPeer,
    Fence,
    Fenced,
    Identity,
    Received,
    Start,
    TargetAction,
    TargetEvent,
    Unreachable,
)
from kvbaton.connectors.protocol.machine import Machine, reply
from kvbaton.connectors.protocol.session import NegotiationError, Pairable, Session, groups_of
from kvbaton.connectors.protocol.table import TARGET, TARGET_ALARMS, TargetState
from kvbaton.messages.control import (
    MIN_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Complete,
    DigestRun,
    Hello,
    NotNeeded,
    Refused,
    Welcome,
)
from kvbaton.types import Attempt, NodeId, TransferTimers


class SessionState(Enum):
    """State of a session on D."""

    HELLO = "hello"
    UP = "up"
    OVER = "over"


@dataclass
class TargetSession(Session):
    """A session with one P.

    Attributes:
        forgotten: P said that it does not know the session: it answers nothing in it any more.
    """

    address: str = ""
    state: SessionState = SessionState.HELLO
    since: float = 0.0
    forgotten: bool = False


@dataclass
class Line:
    """An address of a P: the session in use, and what waits for it."""

    address: str
    session: TargetSession | None = None
    node: NodeId | None = None
    waiting: list[Attempt] = field(default_factory=list)
    unneeded: list[Attempt] = field(default_factory=list)
    mismatches: list[float] = field(default_factory=list)


@dataclass
class Arrival:
    """What has landed of a write.

    Attributes:
        start: first token.
        end: past the last token.
        missing: rank pairs of which a part is missing.
        parts: parts that are here, by rank pair.
        digests: what P claims.
    """

    start: int
    end: int
    missing: set[tuple[int, int]]
    parts: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    digests: list[DigestRun] = field(default_factory=list)


@dataclass
class Incoming:
    """One attempt on D.

    Attributes:
        order: what the engine asked for.
        start: first token of the reservation.
        deadline: hard limit.
        arrivals: what has landed, by write.
        verified: ranges that do not match, by verified write; empty for a good one.
        bad: ranges that do not match; told to P until it has drained.
        since: when the quarantine began.
    """

    name: Attempt
    state: TargetState = TargetState.UNKNOWN
    outcome: str = ""
    order: Start | None = None
    start: int = 0
    deadline: float = 0.0
    num_blocks: int = 0
    line: Line | None = None
    session: TargetSession | None = None
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    verified: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    complete: Complete | None = None
    bad: tuple[tuple[int, int], ...] = ()
    since: float = 0.0


class TargetSessions(Machine[TargetEvent, TargetAction, TargetState, Incoming]):
    """The half of `Target` that knows sessions."""

    table = TARGET
    alarms_of = TARGET_ALARMS
    states = TargetState

    def __init__(
        self,
        identity: Identity,
        timers: TransferTimers,
        *,
        new_id: Callable[[], bytes],
        pairable: Pairable,
    ) -> None:
        super().__init__(identity, timers, new_id=new_id, pairable=pairable)
        self._lines: dict[str, Line] = {}
        self._sessions: dict[bytes, TargetSession] = {}
        self._lost: set[NodeId] = set()
        self._numbers = itertools.count()

    def sessions(self) -> list[dict[str, Any]]:
        """Sessions that are in use or have blocks in quarantine, for diagnosis."""
        return [
            {
                "session": session.id.hex(),
                "address": session.address,
                "node": session.node.node if session.node else None,
                "generation": session.node.generation.hex() if session.node else None,
                "state": session.state.value,
                "attempts": sum(r.session is session for r in self._live.values()),
                "fencing": session.node in self._lost,
            }
            for session in self._sessions.values()
        ]

    def has_session(self, session: bytes) -> bool:
        """Whether a session is in use, or has blocks in quarantine."""
        return session in self._sessions

    # --- opening ---

    def _line(self, address: str) -> Line:
        return self._lines.setdefault(address, Line(address))

    def _open(self, line: Line) -> None:
        """Send `Hello` in a new session, if there is none."""
        if line.session is not None:
            if line.session.state is SessionState.HELLO:
                self._bound_wait(line)
            return
        session = TargetSession(
            self._new_id(), numbers=self._numbers, address=line.address, since=self._now
        )
        line.session = self._sessions[session.id] = session
        self._bound_wait(line)
        self._say_hello(line, session)

    def _bound_wait(self, line: Line) -> None:
        if self._alarms.at("session", line.address) is None:
            self._in("session", line.address, self.timers.session)

    def _say_hello(self, line: Line, session: TargetSession) -> None:
        self._in("hello", line.address, self.timers.resend)
        own = self.identity
        message = Hello(
            session=session.id,
            seq=session.next_seq(),
            sender=own.node,
            min_version=MIN_PROTOCOL_VERSION,
            max_version=PROTOCOL_VERSION,
            identity=own.digest,
            identity_record=own.record,
            transport=own.transport,
            ranks=own.ranks,
            clean=not self._unsettled(line),
        )
        self._do(reply(session, message, line.address))

    def _unsettled(self, line: Line) -> bool:
        """Whether a write of an earlier session with this P may still land in blocks in use.

        While we do not know who answers at the address, every attempt counts.
        """
        return any(
            record.session is not None
            and (
                line.node is None
                or record.session.node is None
                or record.session.address == line.address
                or record.session.node.node == line.node.node
            )
            for record in self._live.values()
        )

    def _needed(self, line: Line) -> bool:
        """Whether somebody waits for the line's session, or needs its `Welcome` as a promise."""
        return bool(line.waiting or line.unneeded) or any(
            record.state is TargetState.DRAINING
            and record.session is not None
            and record.session.forgotten
            and record.session.address == line.address
            for record in self._live.values()
        )

    def _hang_up(self, line: Line) -> None:
        """Give a session up that never came up."""
        session, line.session = line.session, None
        if session is not None:
            self._sessions.pop(session.id, None)
        self._alarms.keep(line.address, ())

    def _fail_waiting(self, line: Line, reason: str) -> None:
        line.unneeded.clear()
        for name in line.waiting[:]:
            self._fail_unsent(self._live[name], reason)

    def _unreachable(self, event: Unreachable) -> None:
        line = self._lines[event.address]
        self._hang_up(line)
        self._fail_waiting(line, event.reason)

    # --- answers to Hello ---

    def _welcomed(self, event: Received, session: TargetSession, message: Welcome) -> None:
        line = self._lines[session.address]
        if session.state is not SessionState.HELLO:
            self._count_dropped("late_welcome")
            return
        try:
            layouts = self._negotiator.check_welcome(message)
        except NegotiationError as error:
            self._count(error.code)
            self._hang_up(line)
            self._fail_waiting(line, f"can't pair with {line.address}: {error}")
            return
        session.node, session.state = message.sender, SessionState.UP
        session.groups, session.num_ranks = groups_of(layouts), len(layouts)
        self._settle_earlier(line, session, message.sender)
        line.node = message.sender
        self._alarms.keep(line.address, ())
        self._do(AdmitPeer(session.id, message.sender, message.ranks))
        self._send_waiting(line, session)

    def _settle_earlier(self, line: Line, session: TargetSession, node: NodeId) -> None:
        """`Welcome` is `Drained` for all earlier sessions with that generation, and no other."""
        self._lost.discard(node)
        self._alarms.clear("fence", node)
        for other in [s for s in self._sessions.values() if s is not session]:
            if other.node == node:
                self._session_over(other, "a new session has begun")
                self._release_all(other)
            elif other.address == line.address and other.node is not None:
                self._session_over(other, "another generation answers")
                self._lose(other.node)

    def _send_waiting(self, line: Line, session: TargetSession) -> None:
        waiting, line.waiting = line.waiting, []
        for name in waiting:
            self._reserve(self._live[name], session)
        unneeded, line.unneeded = line.unneeded, []
        for name in unneeded:
            self._do(reply(session, self._message(NotNeeded, session, name)))

    def _refused_session(self, session: TargetSession, message: Refused) -> None:
        self._count(message.code)
        line = self._lines[session.address]
        if session.state is not SessionState.HELLO:
            if message.code == "unknown_session":
                session.forgotten = True
                self._session_over(session, "the peer does not know the session")
                if self._needed(line):
                    self._open(line)
        elif message.code == "draining":
            if self._now - session.since > 2 * self.timers.resend:
                self._fence_unsettled(line)
        elif message.code == "unknown_session":
            self._new_hello(line, session)
        else:
            self._hang_up(line)
            self._fail_waiting(line, f"refused ({message.code}): {message.message}")
            self._retry_later(line)

    def _new_hello(self, line: Line, session: TargetSession) -> None:
        """P takes our session for one that has ended: say `Hello` under another name."""
        del self._sessions[session.id]
        line.session = TargetSession(
            self._new_id(),
            session.link,
            numbers=self._numbers,
            address=line.address,
            since=session.since,
        )
        self._sessions[line.session.id] = line.session
        self._in("hello", line.address, self.timers.resend)

    def _retry_later(self, line: Line) -> None:
        if self._needed(line):
            self._in("reopen", line.address, self.timers.session)

    # --- the end ---

    def _session_over(self, session: TargetSession, why: str) -> None:
        """Fail a session's attempts; it is kept while it has blocks in quarantine."""
        if session.state is SessionState.OVER:
            return
        session.state = SessionState.OVER
        line = self._lines[session.address]
        if line.session is session:
            line.session = None
            self._alarms.keep(line.address, ())
        for record in [r for r in self._live.values() if r.session is session]:
            if record.state is not TargetState.DRAINING:
                self._fail(record, why)
        self._forget_session(session)

    def _forget_session(self, session: TargetSession | None) -> None:
        """Forget a session that is over and has no attempt left."""
        if session is None or session.state is not SessionState.OVER:
            return
        if not any(record.session is session for record in self._live.values()):
            self._sessions.pop(session.id, None)

    def _release_all(self, session: TargetSession) -> None:
        for record in [r for r in self._live.values() if r.session is session]:
            self._drained(record, None)

    def _peer_gone(self, node: NodeId) -> None:
        for session in [s for s in self._sessions.values() if s.node == node]:
            self._session_over(session, "the peer is gone")
        self._lose(node)

    # --- fencing ---

    def _lose(self, node: NodeId) -> None:
        """Fence a generation until that holds, or nothing of it is in quarantine."""
        if node not in self._lost:
            self._lost.add(node)
            self._fence(node)

    def _fence(self, node: NodeId) -> None:
        self._in("fence", node, self.timers.fence_retry)
        self._do(Fence(node))

    def _fence_unsettled(self, line: Line) -> None:
        for record in list(self._live.values()):
            session = record.session
            if session is not None and session is not line.session and session.node is not None:
                if session.address == line.address:
                    self._lose(session.node)

    def _fenced(self, event: Fenced) -> None:
        if event.node not in self._lost:
            return
        self._lost.discard(event.node)
        self._alarms.clear("fence", event.node)
        for session in [s for s in self._sessions.values() if s.node == event.node]:
            self._session_over(session, "the peer is fenced")
            self._release_all(session)

    def _quarantined(self, node: NodeId) -> bool:
        return any(r.session is not None and r.session.node == node for r in self._live.values())

    # --- alarms ---

    def _ring_session(self, name: str, owner: Any) -> None:
        if name == "fence":
            if self._quarantined(owner):
                self._fence(owner)
            else:
                self._lost.discard(owner)
            return
        line = self._lines[owner]
        if name == "session":
            self._fail_waiting(line, f"no answer from {line.address}")
        if name == "reopen":
            if self._needed(line):
                self._open(line)
        elif line.session is not None and self._needed(line):
            if name == "hello":
                self._say_hello(line, line.session)
        else:
            self._hang_up(line)

    # --- for the half that knows attempts ---

    def _reserve(self, record: Incoming, session: TargetSession) -> None:
        raise NotImplementedError

    def _fail(self, record: Incoming, reason: str) -> None:
        raise NotImplementedError

    def _fail_unsent(self, record: Incoming, reason: str) -> None:
        raise NotImplementedError

    def _drained(self, record: Incoming, given: Any) -> None:
        raise NotImplementedError

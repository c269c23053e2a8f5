"""P's sessions: who may talk to us, and when nothing of an old session can land any more.

A session is *up* from its `Welcome` until D opens another one, its peer is gone, nothing was heard
of it for two leases, or a write of it does not end. From then on it is *ending*: nothing is posted;
its connection is closed when its writes are terminal, or at once if they never will be. Then it is
*over*, and remembered: D may ask in any later `Hello` whether its writes can still land, and is
told `SessionDrained` once each of them is terminal. A closed connection is no proof of that: bytes
may be on the wire.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvbaton.connectors.layout import GroupKind
from kvbaton.connectors.protocol.events import (
    Abandon,
    Closed,
    ClosePeer,
    Identity,
    Link,
    OpenPeer,
    Received,
    Send,
)
from kvbaton.connectors.protocol.machine import Context
from kvbaton.connectors.protocol.notice import units_per_notice
from kvbaton.connectors.protocol.outgoing import Outgoing, Write
from kvbaton.connectors.protocol.session import (
    Group,
    NegotiationError,
    Negotiator,
    Session,
    common_unit,
    groups_of,
    refuse_session,
)
from kvbaton.messages.control import Control, Hello, SessionDrained, Welcome
from kvbaton.types import Attempt, NodeId, TransferTimers

MAX_OVER = 4096
"""Sessions that are remembered after their end; of a forgotten one nothing is ever promised."""

MAX_SESSIONS = 4096

IDLE_LEASES = 2
"""A session of which nothing was heard for so many leases ends: its attempts expire before."""


class SessionState(Enum):
    """State of a session on P."""

    UP = "up"
    ENDING = "ending"
    OVER = "over"


@dataclass
class SourceSession(Session):
    """A session with one D.

    Attributes:
        unit: tokens between two borders at which blocks of both sides begin.
        max_tokens: most tokens of a write, a multiple of `unit`: its digests fit into a notice.
        attempts: alive and bound to the session.
        undrained: writes that were not terminal when its connection was closed.
        closing: `ClosePeer` was emitted.
        deserted: it is over, and its D had no session that is up for `tombstone`.
    """

    peer: NodeId = field(kw_only=True)
    unit: int = 1
    max_tokens: int = 1
    state: SessionState = SessionState.UP
    attempts: dict[Attempt, Outgoing] = field(default_factory=dict)
    undrained: set[tuple[Attempt, Write]] = field(default_factory=set)
    closing: bool = False
    deserted: bool = False

    @property
    def drained(self) -> bool:
        """Whether no write of it can land any more, nor ever will."""
        flying = any(record.flying for record in self.attempts.values())
        return self.state is not SessionState.UP and not flying and not self.undrained


class SourceSessions:
    """The part of `Source` that knows sessions.

    Args:
        context: shared with the machine.
        identity: what this side says of itself.
        timers: of the protocol.
        negotiator: decides who pairs.
        max_notice_bytes: of the transport.
        lose: ends an attempt whose session ends, told why.
        settle: ends an attempt that is stopping, if it has no write in flight.
    """

    def __init__(
        self,
        context: Context,
        identity: Identity,
        timers: TransferTimers,
        negotiator: Negotiator,
        *,
        max_notice_bytes: int,
        lose: Callable[[Outgoing, str], None],
        settle: Callable[[Outgoing], None],
    ) -> None:
        self.context = context
        self.identity = identity
        self.timers = timers
        self.negotiator = negotiator
        self.max_notice_bytes = max_notice_bytes
        self.known: dict[bytes, SourceSession] = {}
        self._over: OrderedDict[bytes, SourceSession] = OrderedDict()
        self._heard: OrderedDict[NodeId, int] = OrderedDict()
        self._lose = lose
        self._settle = settle

    def dump(self) -> list[dict[str, Any]]:
        """Sessions that are not over, for diagnosis."""
        return [
            {
                "session": session.id.hex(),
                "node": session.peer.node,
                "generation": session.peer.generation.hex(),
                "state": session.state.value,
                "attempts": len(session.attempts),
                "writes_in_flight": sum(len(r.flying) for r in session.attempts.values()),
            }
            for session in self.known.values()
        ]

    def num_undrained(self) -> int:
        """Writes that outlived their sessions."""
        return sum(len(session.undrained) for session in self._over.values())

    # --- Hello ---

    def hello(self, link: Link, hello: Hello) -> None:
        """Open a session, or say again that it is up; tell what has drained of earlier ones."""
        session = self.known.get(hello.session)
        if hello.session in self._over or (session and session.state is not SessionState.UP):
            self._refuse(link, hello, "unknown_session", "the session is over")
        elif session is not None:
            if self._admit(session, link, hello.seq):
                self._welcome(session)
                self._tell_drained(session, hello.over)
        elif self.is_news(hello.sender, hello.seq):
            self._open(link, hello)
        else:
            self._refuse(link, hello, "unknown_session", "a later session has begun")

    def _admit(self, session: SourceSession, link: Link, seq: int) -> bool:
        if not session.admit(link, seq):
            self.context.count("stale_seq", dropped=True)
            return False
        self.is_news(session.peer, seq)
        self.context.ring_in("idle", session.id, IDLE_LEASES * self.timers.lease)
        return True

    def is_news(self, peer: NodeId, seq: int) -> bool:
        """Whether a message is younger than all heard from that generation, in any session.

        A `Hello` that was overtaken would end its successor.
        """
        if seq <= self._heard.get(peer, -1):
            return False
        self._heard[peer] = seq
        self._heard.move_to_end(peer)
        if len(self._heard) > MAX_OVER:
            self._heard.popitem(last=False)
        return True

    def _open(self, link: Link, hello: Hello) -> None:
        try:
            if len(self.known) >= MAX_SESSIONS:
                raise NegotiationError("too_many", f"{MAX_SESSIONS} sessions are open")
            layouts = self.negotiator.check_hello(hello)
            groups = groups_of(layouts)
            unit = common_unit(self.negotiator.groups, groups)
            max_tokens = unit * self._max_units(unit, groups)
        except NegotiationError as error:
            self._refuse(link, hello, error.code, str(error))
            return
        for older in [s for s in self.known.values() if s.peer == hello.sender]:
            self.end(older, "a new session has begun")
        session = SourceSession(
            hello.session,
            link,
            last_in=hello.seq,
            peer=hello.sender,
            node=hello.sender,
            unit=unit,
            max_tokens=max_tokens,
            groups=groups,
            num_ranks=len(layouts),
            version=self.negotiator.version(hello),
        )
        self.known[session.id] = session
        self.context.ring_in("idle", session.id, IDLE_LEASES * self.timers.lease)
        self.context.do(OpenPeer(session.id, session.peer, hello.ranks))
        self._welcome(session)
        self._tell_drained(session, hello.over)

    def _max_units(self, unit: int, theirs: Sequence[Group]) -> int:
        """Most units of a write.

        Raises:
            NegotiationError: the digests of not even one fit into a notice.
        """
        pairs = zip(self.negotiator.groups, theirs, strict=True)
        values = [
            1 if a.kind is GroupKind.STATE else unit // math.lcm(a.block_size, b.block_size)
            for a, b in pairs
        ]
        units = units_per_notice(self.max_notice_bytes, values)
        if not units:
            raise NegotiationError(
                "layout",
                f"notices of {self.max_notice_bytes} bytes don't hold the {sum(values)} digests "
                f"of {unit} tokens",
            )
        return units

    def _welcome(self, session: SourceSession) -> None:
        own = self.identity
        session.send(
            self.context, Welcome, sender=own.node, version=session.version, ranks=own.ranks
        )

    def _tell_drained(self, session: SourceSession, asked: Sequence[bytes]) -> None:
        """Say which of D's earlier sessions have drained. Of one not remembered nothing is said."""
        over = []
        for name in asked:
            known = self._over.get(name) or self.known.get(name)
            if known is not None and known.peer == session.peer and known.drained:
                over.append(name)
        if over:
            session.send(self.context, SessionDrained, over=tuple(over))

    def _refuse(self, link: Link, message: Control, code: str, why: str) -> None:
        self.context.counters.refused += 1
        self.context.count(code)
        self.context.do(Send(refuse_session(message.session, code, why), link=link))

    # --- messages of a session ---

    def admit(self, event: Received) -> SourceSession | None:
        """The session that a message belongs to; otherwise it is refused or dropped here."""
        session = self.known.get(event.message.session)
        if session is None or session.state is not SessionState.UP:
            self._refuse(event.link, event.message, "unknown_session", "no such session is up")
            return None
        return session if self._admit(session, event.link, event.message.seq) else None

    # --- the end of a session ---

    def end(self, session: SourceSession, why: str, *, now: bool = False) -> None:
        """Post nothing more; close the connection when its writes are terminal, or `now`."""
        if session.state is SessionState.UP:
            session.state = SessionState.ENDING
            self.context.alarms.keep(session.id, ())
            self.context.ring_in("close", session.id, self.timers.lease)
            self.context.do(
                Send(refuse_session(session.id, "unknown_session", why), link=session.link)
            )
            for record in list(session.attempts.values()):
                self._lose(record, why)
        self.close_drained(session, now=now)

    def close_drained(self, session: SourceSession, *, now: bool = False) -> None:
        """Close an ending session's connection, once nothing of it is in flight."""
        if session.state is SessionState.ENDING and (now or session.drained):
            if not session.closing:
                session.closing = True
                self.context.do(ClosePeer(session.id))

    def closed(self, event: Closed) -> None:
        """The connection is closed: our blocks are free, but what was read may still land."""
        session = self.known.get(event.session)
        if session is None or not session.closing:
            return
        for record in list(session.attempts.values()):
            session.undrained |= {(record.name, write) for write in record.flying}
            record.flying.clear()
            self._settle(record)
        del self.known[session.id]
        session.state = SessionState.OVER
        self.context.alarms.keep(session.id, ())
        self.context.ring_in("forget", session.id, self.timers.tombstone)
        self._over[session.id] = session
        if len(self._over) > MAX_OVER:
            self._forget(next(iter(self._over)))
        self._announce_drained(session)

    def _announce_drained(self, session: SourceSession) -> None:
        """Tell D, in the session that is up with it, that an earlier one has drained."""
        for current in self._up_with(session.peer):
            self._tell_drained(current, (session.id,))

    def _up_with(self, peer: NodeId) -> list[SourceSession]:
        sessions = self.known.values()
        return [s for s in sessions if s.peer == peer and s.state is SessionState.UP]

    def write_outlived(self, name: Attempt, write: Write) -> None:
        """A write ended whose session was closed before."""
        for session in self._over.values():
            if (name, write) in session.undrained:
                session.undrained.discard((name, write))
                if session.drained:
                    self._announce_drained(session)
                return

    def has_undrained(self, name: Attempt) -> bool:
        """Whether a write of an attempt that has ended may still land."""
        return any(
            name == attempt for session in self._over.values() for attempt, _ in session.undrained
        )

    def _forget(self, name: bytes) -> None:
        if self._over.pop(name).undrained:
            self.context.do(Abandon(name))
        self.context.alarms.keep(name, ())

    def peer_gone(self, node: NodeId) -> None:
        """End the sessions of a generation whose process is gone."""
        for session in [s for s in self.known.values() if s.peer == node]:
            self.end(session, "the peer is gone", now=True)

    def ring(self, alarm: str, name: bytes) -> None:
        """An alarm of a session."""
        if alarm == "forget":
            session = self._over[name]
            there = bool(self._up_with(session.peer))
            if session.deserted and not there:
                self._forget(name)
            else:
                # Who is not there now is waited for once more: a clock may have jumped.
                session.deserted = not there
                self.context.ring_in("forget", name, self.timers.tombstone)
        else:
            why = "nothing was heard" if alarm == "idle" else "a write does not end"
            self.end(self.known[name], why, now=alarm == "close")

    def validate(self) -> None:
        """Check the invariants; raises `AssertionError`."""
        for session in self.known.values():
            if not session.closing:
                alarm = "idle" if session.state is SessionState.UP else "close"
                assert self.context.alarms.at(alarm, session.id) is not None, f"{session} lasts"

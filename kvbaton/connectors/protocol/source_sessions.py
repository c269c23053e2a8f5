"""P's sessions: which Ds may hand over, and when no write of an old session can land any more.

A session is *up* from its `Welcome` until D opens another one, its peer is gone, nothing was heard
of it for two leases, or one of its writes does not end. Then it is *ending*: nothing is posted any
more. Once its writes are terminal, or at once if they never will be, it is *closing*: its
connections are being closed. Finally it is *over*, and remembered: D may ask in any later `Hello`
whether its writes can still land, and gets `SessionDrained` once all of them are terminal. Closed
connections do not prove that, since bytes may be on the wire.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from kvbaton.connectors.layout import GroupKind
from kvbaton.connectors.protocol import events
from kvbaton.connectors.protocol.machine import Machine, RefusalError, SessionState
from kvbaton.connectors.protocol.notice import units_per_notice
from kvbaton.connectors.protocol.outgoing import Outgoing, SourceSession
from kvbaton.messages import control
from kvbaton.types import Attempt, TransferTimers, clip_text

MAX_OVER = 4096
"""Maximum number of ended sessions remembered; P never says that a forgotten one has drained."""

WRITE_BYTES = 512 << 20
"""Approximate size of a write in bytes of a rank's blocks.

Posting, transfer and verification of successive writes overlap. Each write costs about 1 ms to post
and to verify.
"""

MAX_SESSIONS = 4096
"""Maximum number of sessions that have not ended."""

IDLE_LEASES = 2
"""A session ends after this many leases without a message; its attempts have expired before."""


class SourceSessions(Machine[Outgoing, SourceSession]):
    """The part of `Source` that handles sessions.

    Args:
        identity: How this node identifies itself.
        timers: Timers of the protocol.
        max_notice_bytes: Maximum length of the transport's notices.
    """

    def __init__(
        self, identity: events.Identity, timers: TransferTimers, max_notice_bytes: int
    ) -> None:
        super().__init__(identity, timers)
        self.max_notice_bytes = max_notice_bytes
        self._over: OrderedDict[bytes, SourceSession] = OrderedDict()

    # --- Hello ---

    def hello(self, link: events.Link, hello: control.Hello) -> None:
        """Open a session, or repeat its `Welcome`; report which earlier sessions have drained."""
        session, why = self.known.get(hello.session), ""
        if not self._is_for_us(hello):
            why = "it is with an earlier generation"
        elif hello.session in self._over or (session and session.state is not SessionState.UP):
            why = "the session is over"
        elif session is None and not self.is_news(hello):
            why = "a later session has begun"
        if why:
            self._refuse_session(link, hello.session, "unknown_session", why)
        elif session is None:
            self._open(link, hello)
        elif self._heard(session, link, hello.seq):
            self._welcome(session, hello)

    def _is_for_us(self, message: control.Message) -> bool:
        return message.receiver in (None, self.identity.node)

    def is_news(self, hello: control.Hello) -> bool:
        """Whether it is newer than all messages of that generation, in any session.

        A `Hello` that was overtaken would otherwise end the session that succeeded it.
        """
        sessions = (*self.known.values(), *self._over.values())
        return all(hello.seq > s.last_in for s in sessions if s.node == hello.sender)

    def _open(self, link: events.Link, hello: control.Hello) -> None:
        session = SourceSession(
            hello.session, SessionState.UP, link, hello.sender, last_in=hello.seq
        )
        try:
            if len(self.known) >= MAX_SESSIONS:
                raise RefusalError("too_many", f"{MAX_SESSIONS} sessions are open")
            self.check_hello(hello)
            self.pair_up(session, hello.ranks)
            self._size_writes(session)
        except RefusalError as error:
            self._refuse_session(link, hello.session, error.code, str(error))
            return
        for older in self.sessions_with(hello.sender):
            self.end_session(older, "a new session has begun")
        self.known[session.id] = session
        self.ring_in("deadline", session.id, IDLE_LEASES * self.timers.lease)
        self.do(events.OpenPeer(session.id, hello.sender, hello.ranks, session.pairs))
        self._welcome(session, hello)

    def check_hello(self, hello: control.Hello) -> None:
        """Check that protocol version, identity and transport match.

        Raises:
            RefusalError: They do not match; the message names both values.
        """
        ours = self.identity
        problem = control.version_problem(hello)
        if problem is not None:
            raise RefusalError(*problem)
        if hello.identity != ours.digest:
            theirs = hello.identity_record
            differing = [
                f"{name}: source {ours.record.get(name)!r}, target {theirs.get(name)!r}"
                for name in sorted(ours.record.keys() | theirs.keys())
                if ours.record.get(name) != theirs.get(name)
            ]
            why = "; ".join(differing) or "identity digests differ, records do not"
            raise RefusalError("identity", why)
        if hello.transport != ours.transport:
            why = f"source uses {ours.transport!r}, target {hello.transport!r}"
            raise RefusalError("transport", why)

    def _size_writes(self, session: SourceSession) -> None:
        """Set `unit` and `max_tokens`; a write has at least one unit, whatever its bytes.

        Raises:
            RefusalError: The digests of one unit do not fit into a notice.
        """
        groups = (*self.groups, *session.groups)
        unit = math.lcm(*(g.block_size for g in groups if g.kind is not GroupKind.STATE))
        values = [
            1 if a.kind is GroupKind.STATE else unit // math.lcm(a.block_size, b.block_size)
            for a, b in zip(self.groups, session.groups, strict=True)
        ]
        room = self.max_notice_bytes
        units = units_per_notice(room, values)
        per_unit = unit * sum(g.token_bytes for g in self.groups if g.kind is not GroupKind.STATE)
        most = max(1, WRITE_BYTES // max(1, per_unit))
        session.unit, session.max_tokens = unit, unit * min(units, most)
        if not units:
            why = f"notices of {room} bytes don't hold the {sum(values)} digests of {unit} tokens"
            raise RefusalError("layout", why)

    def _welcome(self, session: SourceSession, hello: control.Hello) -> None:
        node, ranks = self.identity.node, self.identity.ranks
        version = min(control.PROTOCOL_VERSION, hello.max_version)
        self.send(session, control.Welcome, sender=node, version=version, ranks=ranks)
        self._tell_drained(session, hello.over)

    def _tell_drained(self, session: SourceSession, asked: Sequence[bytes]) -> None:
        """Report which of D's earlier sessions have drained; forgotten ones are not mentioned."""
        over = []
        for name in asked:
            known = self._over.get(name) or self.known.get(name)
            if known is not None and known.node == session.node:
                known.asked = True
                if known.drained:
                    over.append(name)
        if over:
            self.send(session, control.SessionDrained, over=tuple(over))

    def _refuse_session(
        self, link: events.Link | None, session: bytes, code: str, why: str
    ) -> None:
        """Refuse a whole session. The message has no number, as it is true whenever it arrives."""
        self.counters.refused += 1
        self.count(code)
        refused = control.Refused(session=session, seq=0, code=code, message=clip_text(why))
        self.do(events.SendMessage(refused, link=link))

    # --- messages of a session ---

    def session_of(self, event: events.Received) -> SourceSession | None:
        """The session of a message; None if the message was refused or dropped here."""
        name = event.message.session
        session = self.known.get(name)
        up = session is not None and session.state is SessionState.UP
        if session is None or not up or not self._is_for_us(event.message):
            self._refuse_session(event.link, name, "unknown_session", "no such session is up")
            return None
        return session if self._heard(session, event.link, event.message.seq) else None

    def _heard(self, session: SourceSession, link: events.Link, seq: int) -> bool:
        """Whether a message is newer than all before it; if so, it keeps the session alive."""
        fresh = self.admit(session, link, seq)
        if fresh:
            self.ring_in("deadline", session.id, IDLE_LEASES * self.timers.lease)
        return fresh

    # --- the end of a session ---

    def end_session(self, session: SourceSession, why: str, *, now: bool = False) -> None:
        """Post nothing more; close the connections once all writes are terminal, or `now`."""
        if session.state is SessionState.UP:
            session.state = SessionState.ENDING
            self.ring_in("deadline", session.id, self.timers.lease)
            self._refuse_session(session.link, session.id, "unknown_session", why)
            for record in list(session.attempts.values()):
                self.apply("session over", record, why)
        self.close_drained(session, now=now)

    def close_drained(self, session: SourceSession, *, now: bool = False) -> None:
        """Close an ending session's connections, once none of its writes is in flight."""
        if session.state is SessionState.ENDING and (now or session.drained):
            session.state = SessionState.CLOSING
            self.clear("deadline", session.id)
            self.do(events.ClosePeer(session.id))

    def closed(self, event: events.Closed) -> None:
        """The connections are closed: P's blocks are free, but bytes on the wire may still land."""
        session = self.known.get(event.session)
        if session is None or session.state is not SessionState.CLOSING:
            return
        session.state = SessionState.OVER
        for record in list(session.attempts.values()):
            self.apply("session closed", record, event)
        self._over[session.id] = self.known.pop(session.id)
        self.ring_in("deadline", session.id, self.timers.tombstone)
        if len(self._over) > MAX_OVER:
            self._forget(next(iter(self._over)))
        self._announce_drained(session)

    def _announce_drained(self, session: SourceSession) -> None:
        """Report to D, in the session that is up with it, that an earlier one has drained."""
        for current in self.sessions_with(session.node):
            if current.state is SessionState.UP:
                self._tell_drained(current, (session.id,))

    def _mark_terminal(self, record: Outgoing, event: events.WriteEnded) -> None:
        """Note that the write is terminal. After its session, `SessionDrained` may follow."""
        write = event.write, event.source_rank, event.target_rank
        for session in (record.session,) if record.session else tuple(self._over.values()):
            in_flight = session.in_flight.get(record.name, set())
            if event.drained and write in in_flight:
                in_flight.discard(write)
                if not in_flight:
                    del session.in_flight[record.name]
                if session.state is SessionState.OVER:
                    self._announce_drained(session)

    def has_undrained(self, name: Attempt) -> bool:
        """Whether a write of an attempt that has ended may still land."""
        return any(name in session.in_flight for session in self._over.values())

    def num_undrained(self) -> int:
        """Number of shares of writes in flight that have outlived their sessions."""
        in_flight = (writes for over in self._over.values() for writes in over.in_flight.values())
        return sum(map(len, in_flight))

    def _forget(self, name: bytes) -> None:
        if self._over.pop(name).in_flight:
            self.do(events.Abandon(name))
        self.clear("deadline", name)

    def peer_gone(self, event: events.PeerGone) -> None:
        """End the sessions of a generation whose process is gone."""
        for session in self.sessions_with(event.node):
            self.end_session(session, "the peer is gone", now=True)

    def ring(self, owner: bytes) -> None:
        """End a silent session, close one that does not drain, or forget one that D forgot."""
        over = self._over.get(owner)
        if over is None:
            session = self.known[owner]
            up = session.state is SessionState.UP
            why = "nothing was heard" if up else "a write does not end"
            self.end_session(session, why, now=not up)
        elif over.asked:
            over.asked = False
            self.ring_in("deadline", owner, self.timers.tombstone)
        else:
            self._forget(owner)

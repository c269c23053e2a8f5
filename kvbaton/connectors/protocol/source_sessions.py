"""P's sessions: who may talk to us, and when an old session has truly ended.

A session is *up* from its `Welcome` until it is superseded, its peer is gone, or a write of it does
not end. From then on it is *closing*: nothing is posted, and it lasts until its `ClosePeer` was
carried out. `Welcome` promises that no write of an earlier session can land in D; a closed peer
does not prove that (bytes may be on the wire), only the end of every write does, or D's own word
that it needs no promise (`Hello.clean`). Writes that outlive their session stay in `_undrained`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvbaton.connectors.layout import GroupKind
from kvbaton.connectors.protocol.events import (
    Closed,
    ClosePeer,
    Identity,
    Link,
    OpenPeer,
    Received,
    Send,
    SourceAction,
    SourceEvent,
)
from kvbaton.connectors.protocol.machine import Machine, reply
from kvbaton.connectors.protocol.notice import units_per_notice
from kvbaton.connectors.protocol.session import (
    Group,
    NegotiationError,
    Pairable,
    Session,
    common_unit,
    groups_of,
    refuse_session,
)
from kvbaton.connectors.protocol.table import SOURCE, SOURCE_ALARMS, SourceState
from kvbaton.messages.control import Control, Hello, RankCard, Reserve, Welcome
from kvbaton.types import Attempt, ChoiceStart, NodeId, Spans, TransferTimers

Write = tuple[int, int, int]
"""Number of a write, source rank, target rank."""


class SessionState(Enum):
    """State of a session on P."""

    OPENING = "opening"
    """Waits until nothing of earlier sessions can land."""
    UP = "up"
    CLOSING = "closing"


@dataclass
class SourceSession(Session):
    """A session with one D.

    Attributes:
        unit: tokens between two borders at which blocks of both sides begin.
        max_tokens: most tokens of a write, a multiple of `unit`: its digests fit into a notice.
    """

    peer: NodeId = field(kw_only=True)
    ranks: tuple[RankCard, ...] = ()
    version: int = 0
    unit: int = 1
    max_tokens: int = 1
    clean: bool = False
    state: SessionState = SessionState.OPENING
    close_sent: bool = False


@dataclass
class Outgoing:
    """One attempt on P.

    Attributes:
        reserve: what D asked for, extensions included.
        engaged: `Engage` was emitted, so a `Release` is owed.
        start: first token of the reservation.
        ready: tokens below this are reported ready.
        posted: tokens below this are posted; never goes back.
        blocks: per group, source block behind each logical block.
        sums: (start, end, sums) of each report.
        writes: (start, end) of each write, by number.
        flying: parts of writes that are not terminal.
        drain_owed: D has sent `Cancel` and gets `Drained` once `flying` is empty.
    """

    name: Attempt
    state: SourceState = SourceState.UNKNOWN
    outcome: str = ""
    prompt_key: bytes = b""
    num_tokens: int = 0
    session: SourceSession | None = None
    reserve: Reserve | None = None
    engaged: bool = False
    start: int = 0
    ready: int = 0
    posted: int = 0
    blocks: list[dict[int, int]] = field(default_factory=list)
    sums: list[tuple[int, int, object]] = field(default_factory=list)
    writes: list[tuple[int, int]] = field(default_factory=list)
    flying: set[Write] = field(default_factory=set)
    choices: tuple[ChoiceStart, ...] | None = None
    cached_tokens: int = 0
    drain_owed: bool = False
    evicted: bool = False

    @property
    def spans(self) -> Spans:
        """Target blocks."""
        assert self.reserve is not None
        return self.reserve.spans


class SourceSessions(Machine[SourceEvent, SourceAction, SourceState, Outgoing]):
    """The half of `Source` that knows sessions."""

    table = SOURCE
    alarms_of = SOURCE_ALARMS
    states = SourceState

    def __init__(
        self,
        identity: Identity,
        timers: TransferTimers,
        *,
        new_id: Callable[[], bytes],
        pairable: Pairable,
        max_notice_bytes: int,
    ) -> None:
        super().__init__(identity, timers, new_id=new_id, pairable=pairable)
        self._max_notice_bytes = max_notice_bytes
        self._sessions: dict[bytes, SourceSession] = {}
        self._over: set[bytes] = set()
        self._heard: dict[str, tuple[NodeId, int]] = {}
        self._undrained: dict[NodeId, set[tuple[Attempt, Write]]] = {}

    def sessions(self) -> list[dict[str, Any]]:
        """Sessions that are not over, for diagnosis."""
        return [
            {
                "session": session.id.hex(),
                "node": session.peer.node,
                "generation": session.peer.generation.hex(),
                "state": session.state.value,
                "attempts": sum(r.session is session for r in self._live.values()),
                "writes_in_flight": self._flying(session),
            }
            for session in self._sessions.values()
        ]

    # --- Hello ---

    def _hello(self, link: Link, hello: Hello) -> None:
        session = self._sessions.get(hello.session)
        if session is None and hello.session not in self._over:
            if self._is_news(hello.sender, hello.seq):
                self._new_session(link, hello)
            else:
                self._refuse_session(link, hello, "unknown_session", "a later session has begun")
        elif session is None or session.state is SessionState.CLOSING:
            self._refuse_session(link, hello, "unknown_session", "the session is over")
        elif session.admit(link, hello.seq):
            self._is_news(hello.sender, hello.seq)
            self._hello_again(session, hello)
        else:
            self._count_dropped("stale_seq")

    def _is_news(self, peer: NodeId, seq: int) -> bool:
        """Whether a message is younger than all heard from that generation, in any session.

        A `Hello` that was overtaken would end its successor, and its `clean` knows nothing of what
        was reserved since.
        """
        known, last = self._heard.get(peer.node, (peer, -1))
        if known == peer and seq <= last:
            return False
        self._heard[peer.node] = (peer, seq)
        return True

    def _new_session(self, link: Link, hello: Hello) -> None:
        try:
            layouts = self._negotiator.check_hello(hello)
            groups = groups_of(layouts)
            unit = common_unit(self._negotiator.groups, groups)
            max_tokens = self._max_tokens(unit, groups)
        except NegotiationError as error:
            self._refuse_session(link, hello, error.code, str(error))
            return
        session = SourceSession(
            hello.session,
            peer=hello.sender,
            node=hello.sender,
            ranks=hello.ranks,
            version=self._negotiator.version(hello),
            unit=unit,
            max_tokens=max_tokens,
            groups=groups,
            num_ranks=len(layouts),
        )
        session.admit(link, hello.seq)
        self._sessions[session.id] = session
        for older in self._others(session):
            self._wind_down(older, "a new session has begun")
        self._hello_again(session, hello)

    def _max_tokens(self, unit: int, theirs: Sequence[Group]) -> int:
        """Most tokens of a write.

        Raises:
            NegotiationError: the digests of not even one unit fit into a notice.
        """
        pairs = zip(self._negotiator.groups, theirs, strict=True)
        values = [
            1 if a.kind is GroupKind.STATE else unit // math.lcm(a.block_size, b.block_size)
            for a, b in pairs
        ]
        units = units_per_notice(self._max_notice_bytes, values)
        if not units:
            raise NegotiationError(
                "layout",
                f"notices of {self._max_notice_bytes} bytes don't hold the {sum(values)} digests "
                f"of {unit} tokens",
            )
        return units * unit

    def _hello_again(self, session: SourceSession, hello: Hello) -> None:
        if session.state is SessionState.UP:
            self._welcome(session)
            return
        session.clean |= hello.clean
        self._try_open(session)
        if session.state is SessionState.OPENING:
            self._do(
                reply(
                    session,
                    refuse_session(
                        session.id, "draining", "earlier writes may still land", retryable=True
                    ),
                )
            )

    def _try_open(self, session: SourceSession) -> None:
        """Let a session go up once nothing of earlier ones can land."""
        for older in self._others(session):
            # Another generation's memory is gone; a clean D has nothing there that is in use.
            self._close(older, force=session.clean or older.peer != session.peer)
        if self._others(session) or (self._undrained.get(session.peer) and not session.clean):
            return
        self._undrained.pop(session.peer, None)
        session.state = SessionState.UP
        self._do(OpenPeer(session.id, session.peer, session.ranks))
        self._welcome(session)

    def _welcome(self, session: SourceSession) -> None:
        message = Welcome(
            session=session.id,
            seq=session.next_seq(),
            sender=self.identity.node,
            version=session.version,
            ranks=self.identity.ranks,
        )
        self._do(reply(session, message))

    def _others(self, session: SourceSession) -> list[SourceSession]:
        return [
            s
            for s in self._sessions.values()
            if s is not session and s.peer.node == session.peer.node
        ]

    def _refuse_session(self, link: Link, message: Control, code: str, why: str) -> None:
        self.counters.refused += 1
        self._count(code)
        self._do(Send(refuse_session(message.session, code, why), link=link))

    # --- messages of a session ---

    def _session_of(self, event: Received) -> SourceSession | None:
        """The session that a message belongs to; otherwise it is refused or dropped here."""
        session = self._sessions.get(event.message.session)
        if session is None or session.state is not SessionState.UP:
            self._refuse_session(
                event.link, event.message, "unknown_session", "no such session is up"
            )
            return None
        if not session.admit(event.link, event.message.seq):
            self._count_dropped("stale_seq")
            return None
        self._is_news(session.peer, event.message.seq)
        return session

    # --- the end of a session ---

    def _wind_down(self, session: SourceSession, why: str) -> None:
        """Post nothing more in a session."""
        if session.state is SessionState.CLOSING:
            return
        opened = session.state is SessionState.UP
        session.state = SessionState.CLOSING
        if not opened:
            self._session_over(session)
            return
        self._in("close", session.id, self.timers.lease)
        for record in [r for r in self._live.values() if r.session is session]:
            self._abandon(record, why)

    def _close(self, session: SourceSession, *, force: bool) -> None:
        """Close a closing session's peer, by force or once its writes are terminal."""
        if session.close_sent or (self._flying(session) and not force):
            return
        session.close_sent = True
        self._do(ClosePeer(session.id))

    def _end_session(self, session: SourceSession, why: str) -> None:
        """End a session without waiting for its writes, and let D know."""
        if session.state is SessionState.UP:
            self._do(reply(session, refuse_session(session.id, "unknown_session", why)))
        self._wind_down(session, why)
        if session.id in self._sessions:
            self._close(session, force=True)

    def _peer_gone(self, node: NodeId) -> None:
        for session in [s for s in self._sessions.values() if s.peer == node]:
            self._end_session(session, "the peer is gone")

    def _closed(self, event: Closed) -> None:
        session = self._sessions.get(event.session)
        if session is None or not session.close_sent:
            return
        for record in [r for r in self._live.values() if r.session is session]:
            if record.flying:
                left = {(record.name, write) for write in record.flying}
                self._undrained.setdefault(session.peer, set()).update(left)
                record.flying.clear()
                record.drain_owed = False
            self._settle(record)
        self._session_over(session)

    def _session_over(self, session: SourceSession) -> None:
        del self._sessions[session.id]
        self._over.add(session.id)
        self._alarms.clear("close", session.id)
        self._in("over", session.id, self.timers.tombstone)
        self._open_waiting()

    def _open_waiting(self) -> None:
        for session in list(self._sessions.values()):
            if session.state is SessionState.OPENING:
                self._try_open(session)

    def _write_outlived(self, name: Attempt, write: Write) -> None:
        """A write ended whose session was closed before."""
        for node, writes in list(self._undrained.items()):
            writes.discard((name, write))
            if not writes:
                del self._undrained[node]
        self._open_waiting()

    def _flying(self, session: SourceSession) -> int:
        return sum(len(r.flying) for r in self._live.values() if r.session is session)

    def _ring_session(self, name: str, owner: bytes) -> None:
        if name == "over":
            self._over.discard(owner)
        elif name == "close":
            self._close(self._sessions[owner], force=True)

    # --- for the half that knows attempts ---

    def _abandon(self, record: Outgoing, why: str) -> None:
        raise NotImplementedError

    def _settle(self, record: Outgoing) -> None:
        raise NotImplementedError

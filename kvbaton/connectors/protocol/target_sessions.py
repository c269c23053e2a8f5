"""D's sessions: one line per address of a P, and what happens to quarantines when a session ends.

A session is *hello* until `Welcome`, then *up*, and *over* for good once P does not know it, its
peer is gone or silent, or another generation answers. One rule applies at its end: stop using it
and open the next at once. Blocks that P knows of from it stay in quarantine until P sends `Drained`
for the attempt or `SessionDrained` for the session (each `Hello`, which is repeated, asks for it),
or until that generation is fenced.

If one generation answers at two addresses, the later line takes over the other, as there is only
one session with a generation. Both addresses use this session until P does not answer there any
more.

A line is kept while it is needed: its node is a member, an attempt waits, or blocks are in
quarantine. Then session, address and connections are forgotten.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from kvbaton.connectors.protocol import events
from kvbaton.connectors.protocol.incoming import Incoming, Line, TargetSession
from kvbaton.connectors.protocol.machine import Machine, RefusalError, SessionState
from kvbaton.messages import control
from kvbaton.types import NodeId, TransferTimers

MAX_LINES = 256
"""Maximum number of addresses in use; those of members are accepted beyond it."""


class TargetSessions(Machine[Incoming, TargetSession]):
    """The part of `Target` that handles sessions.

    Each line has an alarm *resend*, to repeat `Hello`; each generation that is being fenced has
    one, to repeat the fence.

    Args:
        identity: How this node identifies itself.
        timers: Timers of the protocol.
        new_id: Makes 16 random bytes.

    Attributes:
        lines: Lines by address.
    """

    def __init__(
        self, identity: events.Identity, timers: TransferTimers, new_id: Callable[[], bytes]
    ) -> None:
        super().__init__(identity, timers)
        self.lines: dict[str, Line] = {}
        self._same: dict[str, str] = {}
        self._new_id = new_id
        self._numbers = itertools.count()

    # --- lines ---

    def line(self, address: str) -> Line:
        """The line of an address; notes that it is used now."""
        address = self._same.get(address, address)
        if address not in self.lines:
            self.lines[address] = Line(address)
            self.ring_in("resend", address, self.timers.lease)
        line = self.lines[address]
        line.used = self.now
        return line

    def is_crowded(self, address: str) -> bool:
        """Whether an address would be one too many."""
        known = address in self.lines or address in self._same
        return not known and len(self.lines) + len(self._same) >= MAX_LINES

    def set_members(self, event: events.SetMembers) -> None:
        """Open sessions with new members, before they are needed; forget unused former ones."""
        addresses = {self._same.get(address, address) for address in event.addresses}
        for line in list(self.lines.values()):
            if line.member and line.address not in addresses:
                self._let_go(line)
        for address in sorted(event.addresses):
            line = self.line(address)
            line.member = True
            self.open_line(line)

    def unreachable(self, event: events.Unreachable) -> None:
        """The address is invalid: fail what waits for it."""
        line = self.lines.get(event.address)
        if line is not None:
            self._hang_up(line, event.reason)
            self._let_go(line)

    def _let_go(self, line: Line) -> None:
        line.member, line.used = False, -self.timers.lease
        self._tidy(line)

    def _tidy(self, line: Line) -> bool:
        """Forget a line that is not needed; returns whether it stays."""
        asked = line.member or line.unneeded or line.attempts
        if asked or self.now - line.used < self.timers.lease:
            return True
        if self.lines.get(line.address) is line:
            self._forget_line(line, "nobody needs it")
        return False

    def _forget_line(self, line: Line, why: str) -> None:
        del self.lines[line.address]
        self._split(line)
        self.clear("resend", line.address)
        self._leave_session(line, why, fenced=True)
        self.do(events.HangUp(line.address))

    def _take_over(self, line: Line, other: Line) -> None:
        """Merge `other` into `line`: one generation answers at both, with `line`'s session."""
        names = [name for name, address in self._same.items() if address == other.address]
        self._same |= dict.fromkeys((*names, other.address), line.address)
        self._forget_line(other, f"it goes on at {line.address}")
        for record in other.attempts.values():
            record.line = line
        for session in self.known.values():
            if session.line is other:
                session.line = line
        line.attempts |= other.attempts
        line.unneeded += other.unneeded
        line.mismatches += other.mismatches
        line.member |= other.member

    def _split(self, line: Line) -> None:
        """Dial the addresses merged into this line again, as they may lead elsewhere now."""
        self._same = {name: at for name, at in self._same.items() if at != line.address}

    def unneeded(self, event: events.Unneeded) -> None:
        """Send `NotNeeded` to P, now or once the session is up."""
        if self.is_crowded(event.address):
            return  # P's timers forget the request anyway
        line = self.line(event.address)
        line.unneeded.append(event.attempt)
        if line.up is not None:
            self._tell_unneeded(line, line.up)
        else:
            self.open_line(line)

    def _tell_unneeded(self, line: Line, session: TargetSession) -> None:
        while line.unneeded:
            record = Incoming(line.unneeded.popleft(), session=session)
            self.remember(record)
            self._send(record, control.NotNeeded)

    # --- opening ---

    def open_line(self, line: Line) -> None:
        """Open a session with `Hello`, if there is none; at most once per `resend`."""
        now = self.now
        # Compared as the alarm is set: rounded otherwise, it could ring at once, for ever.
        too_soon_s = line.opened + self.timers.resend - now
        if line.session is None and too_soon_s > 0:
            self.ring_in("resend", line.address, too_soon_s)
        elif line.session is None:
            line.opened = now
            line.session = TargetSession(
                self._new_id(),
                SessionState.HELLO,
                numbers=self._numbers,
                address=line.address,
                line=line,
                since=now,
                heard=now,
            )
            self.known[line.session.id] = line.session
            self._say_hello(line, line.session)

    def _say_hello(self, line: Line, session: TargetSession) -> None:
        over = self._plan_hello(line, session)
        own = self.identity
        self.send(
            session,
            control.Hello,
            sender=own.node,
            min_version=control.MIN_PROTOCOL_VERSION,
            max_version=control.PROTOCOL_VERSION,
            identity=own.digest,
            identity_record=own.record,
            transport=own.transport,
            ranks=own.ranks,
            over=tuple(over[-control.MAX_SESSIONS_ASKED :]),
        )

    def _plan_hello(self, line: Line, session: TargetSession) -> list[bytes]:
        """Set when to repeat `Hello`; returns the ended sessions that it should ask about."""
        over = [s.id for s in self.known.values() if s.over and self._may_answer(session, s)]
        seconds = self.timers.resend
        if session.state is SessionState.UP and not over:
            seconds = self.timers.lease / 4
        elif self.now - session.since > self.timers.lease:
            seconds = self.timers.progress_deadline
        self.ring_in("resend", line.address, seconds)
        return over

    @staticmethod
    def _may_answer(session: TargetSession, over: TargetSession) -> bool:
        """Whether the P of a session may be the P of an earlier session."""
        if session.node is not None:
            return session.node == over.node
        return session.address == over.address

    # --- answers to Hello ---

    def welcomed(self, session: TargetSession, message: control.Welcome) -> None:
        """Handle `Welcome`: a session is up, is still up, or another generation answers."""
        if session.over:
            self.count("late_welcome")
        elif session.state is SessionState.HELLO:
            self._up(session.line, session, message)
        elif session.node != message.sender:
            self._replaced(session.line, session.node)

    def _up(self, line: Line, session: TargetSession, message: control.Welcome) -> None:
        try:
            if not control.MIN_PROTOCOL_VERSION <= message.version <= control.PROTOCOL_VERSION:
                raise RefusalError("version", f"source chose version {message.version}")
            self.pair_up(session, message.ranks)
        except RefusalError as error:
            self.count(error.code)
            self._hang_up(line, f"can't pair with {line.address}: {error}")
            return
        node = message.sender
        if self.rings_at("resend", node) is not None:
            # P lives and can drain by itself. But the fence may have succeeded on some ranks, and
            # have cut connections that P has made for this session.
            self.clear("resend", node)
            self.end_session(session, "its peer was being fenced")
            return
        if line.node != node:
            self._split(line)
        session.node = session.receiver = line.node = node
        session.state = SessionState.UP
        self.do(events.OpenPeer(session.id, node, message.ranks, session.pairs))
        for same in [other for other in self.lines.values() if other.node == node]:
            if same is not line:
                self._take_over(line, same)
        for other in list(self.known.values()):
            if other.line is line and other.node not in (None, node):
                self._replaced(line, other.node)
        self._plan_hello(line, session)
        for record in line.waiting():
            self.apply("session up", record, session)
        self._tell_unneeded(line, session)

    def _replaced(self, line: Line, node: NodeId | None) -> None:
        """Handle that another generation answers at an address."""
        assert node is not None, "it was welcomed by one"
        self.lose(node, f"another generation answers at {line.address}")

    def session_drained(self, session: TargetSession, message: control.SessionDrained) -> None:
        """Release the quarantines of ended sessions that the same generation says have drained."""
        for name in message.over:
            over = self.known.get(name)
            if over is not None and over.over and over.node == session.node:
                self._release_all(over)

    def refused(self, session: TargetSession, message: control.Refused) -> None:
        """Handle the refusal of a session: P does not know it, or can't pair."""
        self.count("refused")
        if session.over:
            return
        if message.code == "unknown_session":
            self.end_session(session, "the peer does not know the session")
        else:
            self._hang_up(session.line, f"refused ({message.code}): {message.message}")

    def _hang_up(self, line: Line, reason: str) -> None:
        """Give up a session that can't come up: fail what waits; retry later if still needed."""
        self._leave_session(line, reason)
        self._split(line)
        line.unneeded.clear()
        # Set the alarm first: when the last attempt fails, an unneeded line is forgotten with it.
        self.ring_in("resend", line.address, self.timers.progress_deadline)
        for record in line.waiting():
            self.apply("session over", record, reason)

    # --- the end ---

    def end_session(self, session: TargetSession, why: str, *, fenced: bool = False) -> None:
        """Stop using a session, and open the next at once if the line is needed."""
        line = session.line
        if not session.over:
            self._leave_session(line, why, fenced=fenced)
            if self._tidy(line):
                self.open_line(line)

    def _leave_session(self, line: Line, why: str, *, fenced: bool = False) -> None:
        """Stop using the session of a line, if it has one.

        If it leaves blocks in quarantine, its generation is fenced now, unless it is `fenced`
        already: before the next session is opened, a fence does no harm.
        """
        session, line.session = line.session, None
        if session is None:
            return
        session.state = SessionState.OVER
        for record in list(session.attempts.values()):
            self.apply("session over", record, why)
        if session.attempts and session.node is not None and not fenced:
            self.fence(session.node)
        self.forget_session(session)

    def forget_session(self, session: TargetSession) -> None:
        """Forget a session that is over and has no attempts, and a peer without sessions."""
        if not session.over or session.attempts or session.id not in self.known:
            return
        del self.known[session.id]
        if session.node is not None and not self.sessions_with(session.node):
            self.clear("resend", session.node)
            self.do(events.ForgetPeer(session.node))

    def released(self, record: Incoming) -> None:
        """Remove an ended attempt, whose blocks are free, from its line and session."""
        line, session = record.line, record.session
        del line.attempts[record.name]
        if session is not None:
            session.attempts.pop(record.name, None)
            self.forget_session(session)
        self._tidy(line)

    def _release_all(self, session: TargetSession) -> None:
        for record in list(session.attempts.values()):
            self.apply(control.Drained, record, None)

    def _end_all(self, node: NodeId, why: str, *, fenced: bool = False) -> None:
        for session in self.sessions_with(node):
            if not session.line.member:
                session.line.used = -self.timers.lease
            self.end_session(session, why, fenced=fenced)

    def peer_gone(self, event: events.PeerGone) -> None:
        """The transport reports that a generation is gone."""
        self.lose(event.node, "the peer is gone")

    # --- fencing ---

    def lose(self, node: NodeId, why: str) -> None:
        """Fence a generation until that succeeds, it answers, or it has no blocks in quarantine."""
        self._end_all(node, why)
        if self.rings_at("resend", node) is None:
            self._fence(node)

    def _fence(self, node: NodeId) -> None:
        if any(session.over and session.attempts for session in self.sessions_with(node)):
            self.ring_in("resend", node, self.timers.resend)
            self.fence(node)

    def fence(self, node: NodeId) -> None:
        """Emit `Fence`, at most once per event, even if several alarms ask for it."""
        if events.Fence(node) not in self.actions:
            self.do(events.Fence(node))

    def fencing(self) -> list[NodeId]:
        """Generations that are being fenced."""
        nodes = {session.node for session in self.known.values() if session.node is not None}
        return [node for node in nodes if self.rings_at("resend", node) is not None]

    def fenced(self, event: events.Fenced) -> None:
        """A fence has succeeded: no write of this generation can land any more."""
        self.clear("resend", event.node)
        over = self.sessions_with(event.node)
        self._end_all(event.node, "the peer was fenced", fenced=True)
        for session in over:
            self._release_all(session)
        for greeted in [session.line.session for session in over]:
            if greeted is not None and greeted.state is SessionState.HELLO:
                # P may have connected for this session already, and the fence has cut that.
                self.end_session(greeted, "its peer was fenced")

    def is_silent(self, node: NodeId) -> bool:
        """Whether nothing was heard of a generation for a `lease`."""
        heard = max((session.heard for session in self.sessions_with(node)), default=0.0)
        return self.now - heard >= self.timers.lease

    # --- alarms ---

    def ring(self, owner: str | NodeId) -> None:
        """Fence a generation again, or repeat `Hello` on a line."""
        if isinstance(owner, NodeId):
            self._fence(owner)
            return
        line = self.lines[owner]
        session = line.session
        greets = session if session and session.state is SessionState.HELLO else None
        if greets is not None and self.now - greets.since >= self.timers.total:
            line.unneeded.clear()  # P does not answer, and has forgotten these requests by now
        if not self._tidy(line):
            return
        if session is None:
            self.open_line(line)
        elif session.node is not None and self.is_silent(session.node):
            self.lose(session.node, f"nothing was heard for {self.timers.lease:g} s")
        else:
            if greets is not None:  # P has not answered
                self._split(line)
            self._say_hello(line, session)

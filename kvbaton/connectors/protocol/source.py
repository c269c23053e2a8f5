"""P's side of the hand-over: pushes the KV that the engine computes into blocks reserved by D.

Laws of this machine:

1. P posts only into blocks of a frozen `Reserve`, in a session that is up, and no token twice.
2. `Drained`, `SessionDrained` and `Release` wait until every write is terminal. Only `Release`, and
   only in a session that is ending, may follow once the peer is closed instead.
3. Every `Engage` has one `Release`; nothing is posted after it.
4. Blocks requested by key are pinned or refused at once, and pinned up to a share of the pool only.
   If requests for blocks could wait, two nodes might wait for each other's blocks for ever.

`Source.table` says which rule, a method of this class, applies in which state.
"""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any, ClassVar

from kvbaton.connectors.protocol import events
from kvbaton.connectors.protocol.checks import (
    check_ack,
    check_reserve,
    counted_from,
    first_token,
    is_repetition,
)
from kvbaton.connectors.protocol.machine import (
    Machine,
    Reactions,
    RefusalError,
    SessionState,
    Table,
)
from kvbaton.connectors.protocol.outgoing import Outgoing, SourceSession
from kvbaton.connectors.protocol.outgoing import SourceState as State
from kvbaton.connectors.protocol.source_sessions import SourceSessions
from kvbaton.messages import control
from kvbaton.types import PINNED_SHARE_PER_PEER, Attempt, TransferTimers, clip_text

PINNED_SHARE = 2
"""At most 1 / `PINNED_SHARE` of the pool is pinned by key; see also `PINNED_SHARE_PER_PEER`."""

MAX_IDLE_TOKENS = 1 << 23
"""Maximum tokens of computed but unreserved prompts; beyond it the oldest are forgotten."""
MIN_IDLE_TOKENS = 2048
"""Minimum that each such prompt counts as, which bounds their number."""


class Source(SourceSessions):
    """P's machine.

    Args:
        identity: How this node identifies itself.
        timers: Timers of the protocol.
        max_attempts: Maximum number of live attempts, a quarter of it for one D; more are refused.
        max_notice_bytes: Maximum length of the transport's notices, which hold a write's digests.
    """

    is_source = True
    states = State
    record_type = Outgoing

    def __init__(
        self,
        identity: events.Identity,
        timers: TransferTimers,
        *,
        max_attempts: int = 65_536,
        max_notice_bytes: int = 1 << 16,
    ) -> None:
        super().__init__(identity, timers, max_notice_bytes)
        self._max_attempts = max_attempts
        self._idle: dict[Attempt, int] = {}

    def ledger(self) -> dict[str, Any]:
        """`Machine.ledger`, and leases, pinned blocks and writes that are not terminal."""
        live = self.live.values()
        return {
            **super().ledger(),
            "leases": sum(r.engaged for r in live),
            "held_blocks": sum(int((blocks >= 0).sum()) for r in live for blocks in r.blocks),
            "pinned_by_key": sum(session.pinned for session in self.known.values()),
            "writes_in_flight": sum(len(r.in_flight) for r in live),
            "writes_undrained": self.num_undrained(),
        }

    # --- dispatch ---

    def _received(self, event: events.Received) -> None:
        message = event.message
        if isinstance(message, control.Hello):
            self.hello(event.link, message)
        elif not isinstance(message, control.TransferMessage) or type(message) not in self.table:
            self.count("unexpected")
        elif (session := self.session_of(event)) is not None:
            record = self.record(Attempt(message.transfer_id, message.attempt))
            line = f"< {type(message).__name__} in {record.state.value}"
            record.story.append((self.now, line))
            if len(record.story) == 1:
                self.remember(record)
            if record.session is None:
                record.session = session
            if record.session is session:
                self.apply(type(message), record, message)
                if record.state is State.ANNOUNCED:
                    record.session = None  # only a `Reserve` binds
            else:
                self._foreign(session, record, message)

    def _foreign(
        self, session: SourceSession, record: Outgoing, message: control.TransferMessage
    ) -> None:
        """Answer a message about an attempt bound to another session, without changing it."""
        stranger = Outgoing(record.name, session=session, story=record.story)
        if isinstance(message, control.Reserve):
            refusal = RefusalError("conflict", "the attempt is bound to another session")
            self.refuse(stranger, refusal)
        elif isinstance(message, control.Cancel):
            # True for the sender: nothing was ever accepted from its session.
            self._send(stranger, control.Drained)
        else:
            self.count("foreign")

    def refuse(self, record: Outgoing, refusal: RefusalError) -> None:
        """Count the refusal and answer `Refused`."""
        code, why = refusal.code, clip_text(str(refusal))
        self.counters.refused += 1
        self.count(code)
        record.story.append((self.now, f"refused, {code}: {why}"))
        self._send(record, control.Refused, code=code, message=why, retryable=refusal.retry)

    # --- Reserve ---

    def _reserve_first(self, record: Outgoing, message: control.Reserve) -> None:
        """Check the message, bind the attempt to the session, answer `Accepted`, and wait for the request. With block keys: `Engage` at once."""
        self._check_reserve(record, message)
        if message.keys:
            self._pin(record, message)
            self._bind(record, message)
            self._engage(record)
        else:
            self._bind(record, message)
            self._set_state(record, State.RESERVED)
            self._renew(record)
            self.ring_in("resend", record.name, self.timers.resend)

    def _reserve_announced(self, record: Outgoing, message: control.Reserve) -> None:
        """Check the message and that its prompt is the announced one; bind the attempt to the session, answer `Accepted`, and `Engage` the engine from the first reserved token on."""
        if message.keys:
            raise RefusalError("conflict", "the attempt is of a prompt, not of block keys")
        self._check_reserve(record, message)
        self._check_prompt(record, message)
        self._bind(record, message)
        self._engage(record)

    def _reserve_again(self, record: Outgoing, message: control.Reserve) -> None:
        """If it equals the first `Reserve`, answer `Accepted` and renew the lease; else, or in another session, `Refused(conflict)`."""
        self._check_reserve(record, message)
        if not is_repetition(record.reserve, message):
            raise RefusalError("conflict", "a reservation is frozen once sent")
        if record.state is not State.RESERVED:
            self._renew(record)
        self._send(record, control.Accepted)

    def _reserve_over(self, record: Outgoing, message: control.Reserve) -> None:
        """Answer `Refused`, with code `expired` if the attempt ended so, else `consumed`."""
        code = "expired" if record.outcome == "expired" else "consumed"
        raise RefusalError(code, f"the attempt ended: {record.outcome}")

    def _check_reserve(self, record: Outgoing, message: control.Reserve) -> None:
        """Refuse an invalid reservation, and one beyond the maximum number of attempts."""
        attempts = record.bound_to.attempts
        crowded = record.state is State.UNKNOWN and len(self.live) >= self._max_attempts
        if problem := check_reserve(message, record.bound_to.groups):
            raise RefusalError("malformed", problem)
        if record.name not in attempts and (crowded or 4 * len(attempts) >= self._max_attempts):
            why = f"{len(attempts)} of {len(self.live)} attempts are this target's"
            raise RefusalError("too_many", why, retry=True)

    def _pin(self, record: Outgoing, message: control.Reserve) -> None:
        """Count the blocks to pin; refuse if block sizes differ, or if they exceed the share."""
        session = record.bound_to
        sizes = [[g.block_size for g in groups] for groups in (self.groups, session.groups)]
        if sizes[0] != sizes[1]:
            why = f"source has blocks of {sizes[0]} tokens, target of {sizes[1]}"
            raise RefusalError("layout", why)
        pool = self.groups[0].num_blocks
        if message.num_tokens > (most := pool * max(sizes[0])):
            why = f"blocks of {message.num_tokens} tokens, of which the pool holds {most}"
            raise RefusalError("too_many", why)
        count = sum(len(span.blocks) for spans in message.spans for span in spans)
        of_peer = count + sum(s.pinned for s in self.sessions_with(session.node))
        of_all = count + sum(s.pinned for s in self.known.values())
        if of_all * PINNED_SHARE > pool or of_peer * PINNED_SHARE_PER_PEER > pool:
            why = f"{of_all} of {pool} blocks would be pinned, {of_peer} of them for this target"
            raise RefusalError("too_many", why, retry=True)
        record.pinned = count
        session.pinned += count

    def _check_prompt(
        self, ours: Outgoing | events.Announce, theirs: Outgoing | control.Reserve
    ) -> None:
        """Refuse a reservation of another prompt."""
        if (ours.prompt_key, ours.num_tokens) != (theirs.prompt_key, theirs.num_tokens):
            why = (
                f"source has {ours.num_tokens} tokens with key {ours.prompt_key.hex()[:16]}, "
                f"target {theirs.num_tokens} with {theirs.prompt_key.hex()[:16]}"
            )
            raise RefusalError("prompt", why)

    def _bind(self, record: Outgoing, message: control.Reserve) -> None:
        record.bound_to.attempts[record.name] = record
        record.reserve = message
        record.prompt_key, record.num_tokens = message.prompt_key, message.num_tokens
        record.start = first_token(message.spans, record.bound_to.groups)
        record.until = self.now + message.remaining_ms / 1000
        self._send(record, control.Accepted)

    def _renew(self, record: Outgoing) -> None:
        """Renew the lease, at most until the time limit of D."""
        self.ring_in("deadline", record.name, min(self.timers.lease, record.until - self.now))

    def _engage(self, record: Outgoing) -> None:
        self._idle.pop(record.name, None)
        record.engage(self.groups)
        self._set_state(record, State.ENGAGED)
        self._renew(record)
        self.ring_in("resend", record.name, self.timers.resend)
        theirs = record.bound_to.groups
        counted = counted_from(self.groups, theirs, record.start, record.num_tokens)
        self.do(events.Engage(record.name, record.start, counted, record.reserve.keys))

    # --- Announce ---

    def _announce_first(self, record: Outgoing, event: events.Announce) -> None:
        """Remember the request, without pinning blocks."""
        if len(self.live) >= self._max_attempts:
            self.do(events.RefuseAnnounce(record.name, "too_many"))
            return
        record.prompt_key, record.num_tokens = event.prompt_key, event.num_tokens
        self._set_state(record, State.ANNOUNCED)
        self.ring_in("deadline", record.name, self.timers.total)

    def _announce_reserved(self, record: Outgoing, event: events.Announce) -> None:
        """If the prompt is the reserved one, `Engage`; else answer `Refused(prompt)`, and the request goes on without a hand-over."""
        try:
            self._check_prompt(event, record)
        except RefusalError as refusal:
            self.refuse(record, refusal)
            self._end(record, "failed")
        else:
            self._engage(record)

    def _announce_again(self, record: Outgoing, event: events.Announce) -> None:
        """`RefuseAnnounce`, with code `conflict` for a live attempt, else with a code for how the attempt ended."""
        codes = {name: name for name in ("expired", "cancelled", "not_needed")} | {"": "conflict"}
        self.do(events.RefuseAnnounce(record.name, codes.get(record.outcome, "consumed")))

    def _finish_idle(self, record: Outgoing, event: events.FirstTokens) -> None:
        """The prompt is computed: restart the deadline, since the queue may have been long. Beyond the maximum of computed prompts forget the oldest."""
        self.ring_in("deadline", record.name, self.timers.total)
        self._idle[record.name] = max(record.num_tokens, MIN_IDLE_TOKENS)
        while sum(self._idle.values()) > MAX_IDLE_TOKENS:
            self._expire(self.live[next(iter(self._idle))], None)

    def _finish_late(self, record: Outgoing, event: events.FirstTokens) -> None:
        """The attempt was over before its prompt was computed: the engine forgets the request. With block keys there is none."""
        if event.choices:
            self.do(events.StopSource(record.name))

    # --- pushing ---

    def _blocks_ready(self, record: Outgoing, event: events.BlocksReady) -> None:
        """`Post` what is ready up to the last common block border, or the end of the prompt, in writes whose digests fit into a notice."""
        record.take(event)
        self._push(record)

    def _first_tokens(self, record: Outgoing, event: events.FirstTokens) -> None:
        """Keep the tokens; send `Complete` once all is posted. With block keys: the blocks reported so far are all."""
        record.choices, record.cached_tokens = event.choices, event.cached_tokens
        if record.reserve.keys:
            record.end = record.ready
        self._push(record)

    def _push(self, record: Outgoing) -> None:
        for post in record.posts():
            line = f"post write {post.write}: tokens {post.start} to {post.end}"
            record.story.append((self.now, line))
            self.do(post)
        if record.choices is not None and record.posted == record.end:
            self._set_state(record, State.COMPLETED)
            self.ring_in("resend", record.name, self.timers.resend)
            self._send_complete(record)

    def _send_complete(self, record: Outgoing) -> None:
        self._send(
            record,
            control.Complete,
            num_tokens=record.end,
            num_writes=len(record.writes),
            choices=record.choices,
            cached_tokens=record.cached_tokens,
        )

    def _send_progress(self, record: Outgoing) -> None:
        tokens = max(record.posted - record.start, 0)
        self._send(record, control.Progress, state=record.state.value, tokens_pushed=tokens)

    def _repeat(self, record: Outgoing, given: None) -> None:
        """Send `Progress` until all is posted and every write has ended; in `completed` send `Complete` again."""
        self.ring_in("resend", record.name, self.timers.resend)
        if record.state is not State.COMPLETED or record.in_flight:
            self._send_progress(record)
        if record.state is State.COMPLETED:
            self._send_complete(record)

    # --- writes ---

    def _write_ended(self, record: Outgoing, event: events.WriteEnded) -> None:
        """Note that the write is terminal. If it failed: stop posting and send `Failed`; a range is never posted twice. If the attempt is stopping and this was its last write: `Drained`, `Release`."""
        self._mark_terminal(record, event)
        if not event.ok and record.state is not State.STOPPING:
            self._fail(record, f"write {event.write} failed: {event.error}")
        elif record.state is State.STOPPING:
            self._settle(record)

    # --- the end ---

    def _ack(self, record: Outgoing, message: control.Ack) -> None:
        """`ok`: `Release` once every write is terminal. `mismatch`: evict the ranges, once, and stop. Before anything was pushed or completed: `Refused(conflict)`."""
        if problem := check_ack(message, record.num_tokens):
            raise RefusalError("malformed", problem)
        if message.verdict == "mismatch" and record.engaged:
            self._evict(record, message)
            if record.state is not State.STOPPING:
                self._stop(record, "failed")
        elif record.state is State.COMPLETED:
            self._stop(record, "acked")
        elif record.state is not State.STOPPING:
            raise RefusalError("conflict", "nothing was completed yet")

    def _evict(self, record: Outgoing, message: control.Ack) -> None:
        if not record.evicted:
            record.evicted = True
            self.counters.mismatches += 1
            self.do(events.EvictSource(record.name, message.bad))

    def _cancel(self, record: Outgoing, message: control.Cancel) -> None:
        """Stop posting; the engine stops the request. Once every write is terminal, send `Drained` and `Release`; until then send `Progress`, as a sign of life."""
        if record.state is not State.STOPPING:
            self._stop(record, "cancelled")
        if record.state is State.STOPPING:
            self._send_progress(record)

    def _cancel_over(self, record: Outgoing, message: control.Cancel) -> None:
        """Answer `Drained`, unless a write of the attempt has outlived its session. Remember the attempt, so that a late request is refused."""
        if record.state is State.UNKNOWN:
            self.ended.add(record.name, "cancelled", self.now)
        if not self.has_undrained(record.name):
            self._send(record, control.Drained)

    def _not_needed(self, record: Outgoing, message: control.NotNeeded) -> None:
        """Stop posting; the engine stops the request; `Release` once every write is terminal. Remember the attempt, so that a late request is refused."""
        if record.state is State.UNKNOWN:
            self.ended.add(record.name, "not_needed", self.now)
        else:
            self._stop(record, "not_needed")

    def _stop_all(self, event: events.Stop) -> None:
        for record in list(self.live.values()):
            if record.state is not State.STOPPING:
                self._fail_request(record, events.SourceFailed(record.name, "the node stops"))

    def _fail_request(self, record: Outgoing, event: events.SourceFailed) -> None:
        """Stop posting, send `Failed` if D has reserved; `Drained` and `Release` once every write is terminal."""
        record.choices = record.choices or ()  # the engine knows of it and needs no `StopSource`
        self._fail(record, event.reason, engine=True)

    def _expire(self, record: Outgoing, given: None) -> None:
        """Fail as if the request had failed; the engine stops the request if it is being computed, and forgets it if it was computed."""
        early = record.state is State.RESERVED
        why = "the request did not come in time" if early else "the lease has expired"
        self._fail(record, why, "expired", engine=early)

    def _force_close(self, record: Outgoing, given: None) -> None:
        """A write does not end: close the session's peer. `Closed` then frees P's blocks, but does not mean `Drained`."""
        self.ring_in("deadline", record.name, self.timers.lease)
        self.end_session(record.bound_to, "a write does not end", now=True)

    def _session_lost(self, record: Outgoing, why: str) -> None:
        """Stop: the attempt can't go on in another session."""
        record.story.append((self.now, f"session over: {why}"))
        self._stop(record, "lost")

    def _fail(
        self, record: Outgoing, reason: str, outcome: str = "failed", *, engine: bool = False
    ) -> None:
        if record.session is None:  # only announced: nothing is pinned, and no D waits
            if record.name in self._idle:
                self.do(events.StopSource(record.name))
            self._end(record, outcome)
        else:
            self._send(record, control.Failed, reason=clip_text(reason), engine=engine)
            self._stop(record, outcome)

    def _stop(self, record: Outgoing, outcome: str) -> None:
        """Post nothing more; wait for the writes in flight."""
        record.outcome = outcome
        if record.state is not State.RESERVED and record.choices is None:
            self.do(events.StopSource(record.name))
        self._set_state(record, State.STOPPING)
        self.ring_in("deadline", record.name, self.timers.lease)
        self._settle(record)

    def _settle(self, record: Outgoing, given: object = None) -> None:
        """End the attempt once no write is in flight, or none can read P's memory any more. `Drained` is sent even if D did not ask."""
        session = record.bound_to
        if record.in_flight and session.state is not SessionState.OVER:
            return
        if session.state in (SessionState.UP, SessionState.ENDING) and record.outcome not in (
            "acked",
            "not_needed",
        ):
            self._send(record, control.Drained)
        self._end(record, record.outcome)
        self.close_drained(session)

    def _end(self, record: Outgoing, outcome: str) -> None:
        self._idle.pop(record.name, None)
        if record.engaged:
            self.do(events.Release(record.name, outcome))
        if record.session is not None:
            record.session.attempts.pop(record.name, None)
            record.session.pinned -= record.pinned
        self._finish(record, outcome)

    reactions: ClassVar[Reactions] = {
        events.Received: _received,
        events.PeerGone: SourceSessions.peer_gone,
        events.Closed: SourceSessions.closed,
        events.Stop: _stop_all,
    }
    _drop, _ignore, _mark_terminal = Machine._drop, Machine._ignore, SourceSessions._mark_terminal
    # fmt: off
    table: ClassVar[Table] = {
        #                  unknown          announced           reserved            engaged          completed        stopping         ended
        control.Reserve:          (_reserve_first,  _reserve_announced, _reserve_again,     _reserve_again,  _reserve_again,  _reserve_over,   _reserve_over),
        control.Cancel:           (_cancel_over,    _cancel,            _cancel,            _cancel,         _cancel,         _cancel,         _cancel_over),
        control.NotNeeded:        (_not_needed,     _not_needed,        _not_needed,        _not_needed,     _not_needed,     _drop,           _drop),
        control.Ack:              (_drop,           _ack,               _ack,               _ack,            _ack,            _ack,            _drop),
        events.Announce:         (_announce_first, _announce_again,    _announce_reserved, _announce_again, _announce_again, _announce_again, _announce_again),
        events.BlocksReady:      (_ignore,         _ignore,            _ignore,            _blocks_ready,   _ignore,         _ignore,         _ignore),
        events.FirstTokens:      (_finish_late,    _finish_idle,       _ignore,            _first_tokens,   _ignore,         _ignore,         _finish_late),
        events.SourceFailed:     (_ignore,         _fail_request,      _fail_request,      _fail_request,   _ignore,         _ignore,         _ignore),
        events.WriteEnded:       (_mark_terminal,  _ignore,            _ignore,            _write_ended,    _write_ended,    _write_ended,    _mark_terminal),
        "session over":   (None,            _ignore,            _session_lost,      _session_lost,   _session_lost,   _ignore,         None),
        "session closed": (None,            _ignore,            _ignore,            _ignore,         _ignore,         _settle,         None),
        "resend":         (None,            None,               _repeat,            _repeat,         _repeat,         None,            None),
        "deadline":       (None,            _expire,            _expire,            _expire,         _expire,         _force_close,    None),
    }
    # fmt: on

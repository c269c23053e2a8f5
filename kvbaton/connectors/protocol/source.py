"""P's side of the hand-over: which blocks may be pushed when, and when they may be freed.

The rules that hold here:

1. A target byte is written at most once per attempt: `pushed` only grows, and a failed write ends
   the attempt.
2. Blocks are released exactly once, after no write reads them any more.
3. `Cancel` is always answered `Drained`, and only when no write of the attempt can land any more.
4. A new session of a node gets its `Welcome` only when no write of its old one can land any more.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvbaton.connectors.layout import KVLayout
from kvbaton.connectors.protocol.events import (
    Announce,
    Attempt,
    BlocksReady,
    Closed,
    ClosePeer,
    Counters,
    Engage,
    EvictSource,
    FirstTokens,
    Identity,
    Link,
    OpenPeer,
    PeerGone,
    Post,
    Received,
    RefuseAnnounce,
    Release,
    Send,
    SendPushed,
    SourceAction,
    SourceEvent,
    SourceFailed,
    Spans,
    StopSource,
    Tick,
    TransferTimers,
    WriteEnded,
    spans_slice,
)
from kvbaton.connectors.protocol.session import (
    Pairable,
    Session,
    Stories,
    Timers,
    decode_layouts,
    refusal,
)
from kvbaton.errors import LayoutMismatchError
from kvbaton.wire import (
    Accepted,
    Ack,
    BlockSpan,
    Cancel,
    Complete,
    Drained,
    Failed,
    Hello,
    Message,
    NotNeeded,
    Progress,
    Refused,
    Reserve,
    TransferMessage,
    Welcome,
)

MAX_TOKENS = 1 << 31
MAX_TOMBSTONES = 100_000


class State(enum.Enum):
    """Where an attempt is on P."""

    ANNOUNCED = enum.auto()
    """The request is here; nobody has reserved."""
    RESERVED = enum.auto()
    """D has reserved; the request is not here yet."""
    ENGAGED = enum.auto()
    """Both are here: blocks are pushed as they become ready."""
    COMPLETED = enum.auto()
    """All is posted and `Complete` is sent: D's `Ack` is awaited."""
    ENDING = enum.auto()
    """Over, but writes are still in flight."""


@dataclass
class _Transfer:
    """One attempt.

    Attributes:
        reserve: D's reservation, extensions folded in.
        unit: tokens per digest unit: pushes end at its multiples, or at the end of the prompt.
        blocks: source block by logical block, per group.
        pending: parts of writes in flight: (write, source rank, target rank).
        outcome: why it is ending.
        drain_wanted: D waits for `Drained`.
    """

    attempt: Attempt
    state: State
    announce: Announce | None = None
    reserve: Reserve | None = None
    session: bytes = b""
    unit: int = 1
    pushed: int = 0
    ready: int = 0
    blocks: list[dict[int, int]] = field(default_factory=list)
    num_writes: int = 0
    pending: set[tuple[int, int, int]] = field(default_factory=set)
    first: FirstTokens | None = None
    engaged: bool = False
    outcome: str = ""
    drain_wanted: bool = False


class Source:
    """The machine. See `events` for what goes in and out.

    Args:
        identity: what this node says of itself.
        timers: durations.
        new_id: makes 16 random bytes.
        pairable: raises `LayoutMismatchError` if P's and D's layouts of a group can't meet.
        max_live: most attempts at a time; beyond it a `Reserve` is refused, retryable.
    """

    def __init__(
        self,
        identity: Identity,
        timers: TransferTimers,
        *,
        new_id: Callable[[], bytes],
        pairable: Pairable,
        max_live: int = 4096,
    ) -> None:
        self.identity = identity
        self.timers = timers
        self.counters = Counters()
        self._pairable = pairable
        self._max_live = max_live
        self._layouts = decode_layouts(identity.ranks)
        self._sessions: dict[bytes, Session] = {}
        self._waiting: dict[bytes, tuple[Link, Hello]] = {}
        self._ended_sessions: OrderedDict[bytes, None] = OrderedDict()
        self._transfers: dict[Attempt, _Transfer] = {}
        self._tombstones: OrderedDict[Attempt, str] = OrderedDict()
        self._timers: Timers[tuple[str, Attempt]] = Timers()
        self._stories = Stories()
        self._actions: list[SourceAction] = []
        self._now = 0.0
        self._on: dict[type, Callable[[Any], None]] = {
            Received: self._received,
            PeerGone: self._peer_gone,
            Tick: self._tick,
            Announce: self._announce,
            BlocksReady: self._blocks_ready,
            FirstTokens: self._first_tokens,
            SourceFailed: self._source_failed,
            WriteEnded: self._write_ended,
            Closed: self._closed,
        }
        self._on_message: dict[type, Callable[[Any, Any], None]] = {
            Reserve: self._reserve,
            Ack: self._ack,
            NotNeeded: self._not_needed,
            Cancel: self._cancel,
        }

    # --- the interface ---

    def handle(self, event: SourceEvent, now: float) -> list[SourceAction]:
        """Process one event; returns what is to be done, in order."""
        self._now = now
        self._on[type(event)](event)
        actions, self._actions = self._actions, []
        return actions

    def next_deadline(self) -> float | None:
        """When the next `Tick` is due."""
        return self._timers.next()

    def stories(self) -> dict[Attempt, list[str]]:
        """What happened to the latest attempts, for diagnosis."""
        return self._stories.all()

    def ledger(self) -> dict[str, Any]:
        """Live attempts by state, and the sessions."""
        states: dict[str, int] = {}
        for transfer in self._transfers.values():
            states[transfer.state.name.lower()] = states.get(transfer.state.name.lower(), 0) + 1
        return {
            "sessions": {s.id.hex(): s.node.node for s in self._sessions.values()},
            "attempts": states,
            "engaged": sum(t.engaged for t in self._transfers.values()),
            "writes_in_flight": sum(len(t.pending) for t in self._transfers.values()),
            "counters": msgspec.to_builtins(self.counters),
        }

    def validate(self) -> None:
        """Raise `AssertionError`, with the story, if a law of this file does not hold."""
        for attempt, transfer in self._transfers.items():
            story = self._stories.of(attempt)
            assert attempt not in self._tombstones, story
            assert transfer.pushed <= transfer.ready or not transfer.engaged, story
            timed = self._timers.names()
            assert (
                any(name[1] == attempt for name in timed)
                or transfer.pending
                or (transfer.state is State.ANNOUNCED)
            ), story

    # --- sessions ---

    def _received(self, event: Received) -> None:
        message = event.message
        if isinstance(message, Hello):
            self._hello(event.link, message)
            return
        session = self._sessions.get(message.session)
        if session is None or session.closing:
            self._emit_refusal(event.link, message, "unknown_session", "open a new session")
            return
        if not session.accept(message.seq):
            self.counters.dropped_messages += 1
            return
        session.link = event.link
        handler = self._on_message.get(type(message))
        if handler is None:
            self._emit_refusal(event.link, message, "malformed", "not a message for a source")
        else:
            handler(session, message)

    def _hello(self, link: Link, hello: Hello) -> None:
        known = self._sessions.get(hello.session)
        if hello.session in self._ended_sessions or (known is not None and known.closing):
            self._emit_refusal(link, hello, "unknown_session", "this session has ended")
        elif known is not None:
            if known.accept(hello.seq):
                known.link = link
                self._welcome(known)
        elif (refused := self._objection(hello)) is not None:
            self._emit_refusal(link, hello, *refused)
        else:
            self._replace(link, hello)

    def _objection(self, hello: Hello) -> tuple[str, str] | None:
        """Why this D can't be paired with, as (code, message naming both values)."""
        refused = refusal(self.identity, hello)
        if refused is not None:
            return refused
        try:
            theirs = decode_layouts(hello.ranks)
            self._check_groups(theirs)
        except (LayoutMismatchError, msgspec.DecodeError, ValueError) as error:
            return "layout", str(error)[:4000]
        return None

    def _check_groups(self, theirs: Sequence[Sequence[KVLayout]]) -> None:
        ours = self._layouts
        if len(theirs[0]) != len(ours[0]):
            raise LayoutMismatchError(f"{len(ours[0])} KV groups here, {len(theirs[0])} there")
        for group in range(len(ours[0])):
            self._pairable([rank[group] for rank in ours], [rank[group] for rank in theirs])

    def _replace(self, link: Link, hello: Hello) -> None:
        """Open a session; an older one of the same node must end first (rule 4)."""
        old = [s for s in self._sessions.values() if s.node.node == hello.sender.node]
        if not old:
            self._open(link, hello)
            return
        self._waiting[hello.session] = (link, hello)
        for session in old:
            self._end_session(session)

    def _open(self, link: Link, hello: Hello) -> None:
        session = Session(hello.session, hello.sender, link, hello.ranks)
        session.accept(hello.seq)
        self._sessions[hello.session] = session
        self._do(OpenPeer(hello.session, hello.sender, hello.ranks))
        self._welcome(session)

    def _welcome(self, session: Session) -> None:
        self._send(
            session,
            Welcome,
            sender=self.identity.node,
            version=session.version,
            ranks=self.identity.ranks,
        )

    def _end_session(self, session: Session) -> None:
        if session.closing:
            return
        session.closing = True
        for transfer in list(self._of_session(session.id)):
            self._end(transfer, "lost", tell="")
        self._do(ClosePeer(session.id))

    def _closed(self, event: Closed) -> None:
        session = self._sessions.pop(event.session, None)
        if session is None:
            return
        self._ended_sessions[event.session] = None
        while len(self._ended_sessions) > MAX_TOMBSTONES:
            self._ended_sessions.popitem(last=False)
        for transfer in list(self._of_session(event.session)):
            transfer.pending.clear()
            self._finish_ending(transfer)
        for session_id, (link, hello) in list(self._waiting.items()):
            if hello.sender.node == session.node.node:
                del self._waiting[session_id]
                self._open(link, hello)

    def _peer_gone(self, event: PeerGone) -> None:
        for session in list(self._sessions.values()):
            if session.node == event.node:
                self._end_session(session)

    def _of_session(self, session_id: bytes) -> Iterable[_Transfer]:
        return [t for t in self._transfers.values() if t.session == session_id]

    # --- requests ---

    def _announce(self, event: Announce) -> None:
        attempt = event.attempt
        grave = self._tombstones.get(attempt)
        transfer = self._transfers.get(attempt)
        if grave == "not_needed":
            self._do(StopSource(attempt, "the target has the whole prompt"))
        elif grave is not None or (transfer is not None and transfer.announce is not None):
            self.counters.refused += 1
            self._do(RefuseAnnounce(attempt, grave or "consumed"))
        elif transfer is None:
            self._begin(attempt, State.ANNOUNCED).announce = event
        else:
            transfer.announce = event
            self._meet(transfer)

    def _begin(self, attempt: Attempt, state: State) -> _Transfer:
        transfer = self._transfers[attempt] = _Transfer(attempt, state)
        self.counters.started += 1
        self._tell(attempt, f"begin {state.name}")
        return transfer

    def _source_failed(self, event: SourceFailed) -> None:
        transfer = self._transfers.get(event.attempt)
        if transfer is not None and transfer.state is not State.ENDING:
            self._end(transfer, "failed", tell=event.reason)

    # --- reservations ---

    def _reserve(self, session: Session, message: Reserve) -> None:
        attempt = Attempt(message.transfer_id, message.attempt)
        transfer = self._transfers.get(attempt)
        refused = self._reserve_objection(session, message, transfer)
        if refused is not None:
            self._refuse_transfer(session, message, *refused)
            return
        if transfer is None:
            transfer = self._begin(attempt, State.RESERVED)
        if transfer.reserve is None:
            self._bind(session, message, transfer)
        elif message.spans != transfer.reserve.spans:
            self._extend(transfer, message)
        if transfer.state is not State.RESERVED:
            self._send_transfer(session, Accepted, attempt)

    def _reserve_objection(
        self, session: Session, message: Reserve, transfer: _Transfer | None
    ) -> tuple[str, str] | None:
        attempt = Attempt(message.transfer_id, message.attempt)
        grave = self._tombstones.get(attempt)
        if grave is not None:
            return ("expired" if grave == "expired" else "consumed"), f"this attempt ended: {grave}"
        malformed = self._malformed(session, message)
        if malformed:
            return "malformed", malformed
        if transfer is None:
            full = len(self._transfers) >= self._max_live
            return ("too_many", "too many hand-overs at once; retry") if full else None
        if transfer.state is State.ENDING:
            return "consumed", f"this attempt is ending: {transfer.outcome}"
        if transfer.reserve is not None and not self._same_or_later(transfer, session, message):
            return "conflict", "this attempt was reserved with other content"
        announce = transfer.announce
        if announce is not None and announce.num_tokens != message.num_tokens:
            return "prompt", f"{announce.num_tokens} tokens here, {message.num_tokens} there"
        if announce is not None and announce.prompt_key != message.prompt_key:
            return "prompt", "the prompts differ"
        return None

    def _malformed(self, session: Session, message: Reserve) -> str:
        layouts = decode_layouts(session.ranks)[0]
        if not 0 < message.num_tokens < MAX_TOKENS:
            return f"num_tokens {message.num_tokens} is not within 1 and {MAX_TOKENS - 1}"
        if len(message.spans) != len(layouts):
            return f"{len(message.spans)} groups of spans; the session has {len(layouts)}"
        for group, spans in enumerate(message.spans):
            complaint = self._malformed_spans(spans, layouts[group], message.num_tokens)
            if complaint:
                return f"group {group}: {complaint}"
        return ""

    @staticmethod
    def _malformed_spans(spans: Sequence[BlockSpan], layout: KVLayout, num_tokens: int) -> str:
        position = 0
        seen: set[int] = set()
        last = -(-num_tokens // layout.block_size)
        for span in spans:
            if span.first < position or not span.blocks or span.first + len(span.blocks) > last:
                return f"span at block {span.first} overlaps, is empty or goes beyond the prompt"
            position = span.first + len(span.blocks)
            seen.update(span.blocks)
        count = sum(len(span.blocks) for span in spans)
        if len(seen) != count:
            return "a block is named twice"
        if seen and not (min(seen) >= 1 and max(seen) < layout.num_blocks):
            return f"block ids must be within 1 and {layout.num_blocks - 1}"
        return "" if count else "no blocks"

    @staticmethod
    def _same_or_later(transfer: _Transfer, session: Session, message: Reserve) -> bool:
        old = transfer.reserve
        assert old is not None
        same = (
            transfer.session == session.id
            and old.prompt_key == message.prompt_key
            and old.num_tokens == message.num_tokens
        )
        if not same or old.spans == message.spans:
            return same
        later = all(
            not was or not now or was[-1].first + len(was[-1].blocks) <= now[0].first
            for was, now in zip(old.spans, message.spans, strict=True)
        )
        return old.more and later

    def _bind(self, session: Session, message: Reserve, transfer: _Transfer) -> None:
        transfer.reserve = message
        transfer.session = session.id
        sizes = [layout.block_size for layout in decode_layouts(session.ranks)[0]]
        sizes += [layout.block_size for layout in self._layouts[0]]
        transfer.unit = math.lcm(*sizes)
        starts = [
            spans[0].first * layout.block_size
            for spans, layout in zip(message.spans, decode_layouts(session.ranks)[0], strict=True)
            if spans
        ]
        transfer.pushed = transfer.ready = min(starts)
        transfer.blocks = [{} for _ in message.spans]
        self._timers.arm(("total", transfer.attempt), self._now + message.remaining_ms / 1000)
        self._timers.arm(("progress", transfer.attempt), self._now + self.timers.progress_period)
        self._meet(transfer)

    def _extend(self, transfer: _Transfer, message: Reserve) -> None:
        old = transfer.reserve
        assert old is not None
        spans = tuple((*a, *b) for a, b in zip(old.spans, message.spans, strict=True))
        transfer.reserve = msgspec.structs.replace(old, spans=spans, more=message.more)
        self._push(transfer)

    def _meet(self, transfer: _Transfer) -> None:
        """Engage, once both the request and its reservation are here and agree."""
        announce, reserve = transfer.announce, transfer.reserve
        if announce is None:
            self._timers.arm(("unclaimed", transfer.attempt), self._now + self.timers.unclaimed)
            return
        if reserve is None:
            return
        self._timers.cancel(("unclaimed", transfer.attempt))
        if (announce.prompt_key, announce.num_tokens) != (reserve.prompt_key, reserve.num_tokens):
            self._drop_reservation(transfer)
            return
        transfer.state = State.ENGAGED
        transfer.engaged = True
        self._tell(transfer.attempt, f"engage from {transfer.pushed}")
        self._do(Engage(transfer.attempt, transfer.pushed))
        session = self._sessions.get(transfer.session)
        if session is not None:
            self._send_transfer(session, Accepted, transfer.attempt)

    def _drop_reservation(self, transfer: _Transfer) -> None:
        """The reservation came first and is for another prompt: the request stays, unreserved."""
        session, reserve = self._sessions.get(transfer.session), transfer.reserve
        assert reserve is not None
        transfer.reserve, transfer.session, transfer.state = None, b"", State.ANNOUNCED
        self._timers.cancel_all(transfer.attempt)
        if session is not None:
            self._refuse_transfer(session, reserve, "prompt", "the prompts differ")

    # --- blocks ---

    def _blocks_ready(self, event: BlocksReady) -> None:
        transfer = self._transfers.get(event.attempt)
        if transfer is None or transfer.state is not State.ENGAGED:
            return
        assert event.start <= transfer.ready, self._stories.of(event.attempt)
        transfer.ready = event.end
        for blocks, spans in zip(transfer.blocks, event.spans, strict=True):
            for span in spans:
                blocks.update(enumerate(span.blocks, span.first))
        self._push(transfer)

    def _push(self, transfer: _Transfer) -> None:
        end = min(transfer.ready, self._reserved_end(transfer))
        assert transfer.reserve is not None
        if end < transfer.reserve.num_tokens:
            end -= end % transfer.unit
        session = self._sessions.get(transfer.session)
        if end <= transfer.pushed or session is None or transfer.state is not State.ENGAGED:
            return
        start, transfer.pushed = transfer.pushed, end
        write, transfer.num_writes = transfer.num_writes, transfer.num_writes + 1
        transfer.pending |= {
            (write, s, t)
            for s in range(len(self.identity.ranks))
            for t in range(len(session.ranks))
        }
        source = self._source_spans(transfer, start, end)
        self._tell(transfer.attempt, f"push {write}: [{start}, {end})")
        target = self._target_spans(transfer, session, start, end)
        self._do(Post(session.id, transfer.attempt, write, start, end, source, target))
        self._do(
            SendPushed(
                session.link, session.id, session.next_seq(), transfer.attempt, write, start, end
            )
        )

    def _reserved_end(self, transfer: _Transfer) -> int:
        """Tokens that the target blocks named so far can take."""
        assert transfer.reserve is not None
        if not transfer.reserve.more:
            return transfer.reserve.num_tokens
        layouts = decode_layouts(self._sessions[transfer.session].ranks)[0]
        return min(
            (spans[-1].first + len(spans[-1].blocks)) * layout.block_size
            for spans, layout in zip(transfer.reserve.spans, layouts, strict=True)
        )

    def _source_spans(self, transfer: _Transfer, start: int, end: int) -> Spans:
        spans = []
        for blocks, layout in zip(transfer.blocks, self._layouts[0], strict=True):
            first, last = start // layout.block_size, -(-end // layout.block_size)
            spans.append(
                tuple(BlockSpan(n, (blocks[n],)) for n in range(first, last) if n in blocks)
            )
        return tuple(spans)

    @staticmethod
    def _target_spans(transfer: _Transfer, session: Session, start: int, end: int) -> Spans:
        assert transfer.reserve is not None
        layouts = decode_layouts(session.ranks)[0]
        return tuple(
            spans_slice(spans, start // layout.block_size, -(-end // layout.block_size))
            for spans, layout in zip(transfer.reserve.spans, layouts, strict=True)
        )

    def _first_tokens(self, event: FirstTokens) -> None:
        transfer = self._transfers.get(event.attempt)
        if transfer is None:
            return
        if transfer.state is State.ANNOUNCED:
            self._timers.arm(("unclaimed", transfer.attempt), self._now + self.timers.unclaimed)
        elif transfer.state is State.ENGAGED and self._all_pushed(transfer):
            transfer.first = event
            transfer.state = State.COMPLETED
            self._timers.arm(("lease", transfer.attempt), self._now + self.timers.lease)
            self._complete(transfer)

    @staticmethod
    def _all_pushed(transfer: _Transfer) -> bool:
        """Else these are the first tokens of a run before the reservation: it runs again."""
        return transfer.reserve is not None and transfer.pushed == transfer.reserve.num_tokens

    def _complete(self, transfer: _Transfer) -> None:
        assert transfer.first is not None
        assert transfer.reserve is not None
        self._timers.arm(("complete", transfer.attempt), self._now + self.timers.resend)
        self._send_transfer(
            self._sessions[transfer.session],
            Complete,
            transfer.attempt,
            num_tokens=transfer.reserve.num_tokens,
            num_writes=transfer.num_writes,
            choices=transfer.first.choices,
            cached_tokens=transfer.first.cached_tokens,
        )

    # --- ends ---

    def _write_ended(self, event: WriteEnded) -> None:
        transfer = self._transfers.get(event.attempt)
        if transfer is None:
            return
        if event.drained:
            transfer.pending.discard((event.write, event.source_rank, event.target_rank))
        if not event.ok and transfer.state is not State.ENDING:
            self._end(transfer, "failed", tell=f"a write failed: {event.error}")
        else:
            self._finish_ending(transfer)

    def _ack(self, session: Session, message: Ack) -> None:
        transfer = self._bound(session, message)
        if transfer is None or transfer.state is State.ENDING:
            return
        if message.verdict == "mismatch":
            self.counters.mismatches += 1
            self._do(EvictSource(transfer.attempt, message.bad))
        self._end(transfer, "acked" if message.verdict == "ok" else "failed", tell="")

    def _not_needed(self, session: Session, message: NotNeeded) -> None:
        attempt = Attempt(message.transfer_id, message.attempt)
        transfer = self._transfers.get(attempt)
        if transfer is None:
            if attempt not in self._tombstones:
                self.counters.started += 1
                self.counters.cancelled += 1
                self._bury(attempt, "not_needed")
        elif transfer.state is State.ANNOUNCED or transfer.session == session.id:
            self._do(StopSource(attempt, "the target has the whole prompt"))
            self._end(transfer, "not_needed", tell="")

    def _cancel(self, session: Session, message: Cancel) -> None:
        attempt = Attempt(message.transfer_id, message.attempt)
        transfer = self._bound(session, message)
        if transfer is None:
            unknown = attempt not in self._transfers and attempt not in self._tombstones
            if unknown:
                self.counters.started += 1
                self.counters.cancelled += 1
                self._bury(attempt, "cancelled")
            self._send_transfer(session, Drained, attempt)
            return
        transfer.drain_wanted = True
        if transfer.state is not State.ENDING:
            self._do(StopSource(attempt, "the target has cancelled"))
            self._end(transfer, "cancelled", tell="")
        else:
            self._finish_ending(transfer)

    def _bound(self, session: Session, message: TransferMessage) -> _Transfer | None:
        transfer = self._transfers.get(Attempt(message.transfer_id, message.attempt))
        return transfer if transfer is not None and transfer.session == session.id else None

    def _end(self, transfer: _Transfer, outcome: str, *, tell: str) -> None:
        """Stop posting; blocks are released when the last write has ended."""
        transfer.state = State.ENDING
        transfer.outcome = outcome
        self._tell(transfer.attempt, f"end: {outcome} {tell}")
        self._timers.cancel_all(transfer.attempt)
        session = self._sessions.get(transfer.session)
        if tell and session is not None and not session.closing:
            self._send_transfer(session, Failed, transfer.attempt, reason=tell[:4000])
        self._finish_ending(transfer)

    def _finish_ending(self, transfer: _Transfer) -> None:
        if transfer.state is not State.ENDING or transfer.pending:
            return
        if self._transfers.pop(transfer.attempt, None) is None:
            return
        self._count(transfer.outcome)
        self._bury(transfer.attempt, transfer.outcome)
        session = self._sessions.get(transfer.session)
        if transfer.drain_wanted and session is not None and not session.closing:
            self._send_transfer(session, Drained, transfer.attempt)
        if transfer.engaged:
            self._tell(transfer.attempt, "release")
            self._do(Release(transfer.attempt, transfer.outcome))

    def _count(self, outcome: str) -> None:
        if outcome == "acked":
            self.counters.completed += 1
        elif outcome in ("cancelled", "not_needed"):
            self.counters.cancelled += 1
        else:
            self.counters.failed += 1

    def _bury(self, attempt: Attempt, outcome: str) -> None:
        self._tombstones[attempt] = outcome
        self._timers.arm(("tombstone", attempt), self._now + self.timers.tombstone)
        while len(self._tombstones) > MAX_TOMBSTONES:
            oldest, _ = self._tombstones.popitem(last=False)
            self._timers.cancel_all(oldest)

    # --- time ---

    def _tick(self, event: Tick) -> None:
        for kind, attempt in self._timers.due(self._now):
            transfer = self._transfers.get(attempt)
            if kind == "tombstone":
                self._tombstones.pop(attempt, None)
            elif transfer is None or transfer.state is State.ENDING:
                continue
            elif kind == "progress":
                self._progress(transfer)
            elif kind == "complete":
                self._complete(transfer)
            else:
                self._expire(transfer, kind)

    def _progress(self, transfer: _Transfer) -> None:
        self._timers.arm(("progress", transfer.attempt), self._now + self.timers.progress_period)
        self._send_transfer(
            self._sessions[transfer.session],
            Progress,
            transfer.attempt,
            state=transfer.state.name.lower(),
            tokens_pushed=transfer.pushed,
        )

    def _expire(self, transfer: _Transfer, kind: str) -> None:
        self._end(transfer, "expired", tell=f"the source's timer {kind!r} ran out")
        session = self._sessions.get(transfer.session)
        if transfer.pending and session is not None:
            # Writes to a peer that does not answer: only closing the connection ends them.
            self._end_session(session)

    # --- words ---

    def _do(self, action: SourceAction) -> None:
        self._actions.append(action)

    def _tell(self, attempt: Attempt, what: str) -> None:
        self._stories.add(attempt, self._now, what)

    def _send(self, session: Session, kind: type[Message], **fields: Any) -> None:
        message: Any = kind(session=session.id, seq=session.next_seq(), **fields)
        self._do(Send(message, link=session.link))

    def _send_transfer(
        self, session: Session, kind: type[TransferMessage], attempt: Attempt, **fields: Any
    ) -> None:
        self._send(session, kind, transfer_id=attempt.transfer_id, attempt=attempt.number, **fields)

    def _refuse_transfer(
        self, session: Session, message: TransferMessage, code: str, text: str
    ) -> None:
        self.counters.refused += 1
        self.counters.by_code[code] = self.counters.by_code.get(code, 0) + 1
        self._tell(Attempt(message.transfer_id, message.attempt), f"refused: {code}: {text}")
        self._send(
            session,
            Refused,
            code=code,
            message=text[:4000],
            retryable=code == "too_many",
            transfer_id=message.transfer_id,
            attempt=message.attempt,
        )

    def _emit_refusal(self, link: Link, message: Message, code: str, text: str) -> None:
        """Refuse a session; there is none to number this in, so it repeats the message's number."""
        self.counters.refused += 1
        self.counters.by_code[code] = self.counters.by_code.get(code, 0) + 1
        refused = Refused(session=message.session, seq=message.seq, code=code, message=text[:4000])
        self._do(Send(refused, link=link))

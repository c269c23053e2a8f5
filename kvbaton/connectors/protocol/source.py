"""P's side of the hand-over: pushes what the engine computes into blocks that D has reserved.

Laws of this machine:

1. Nothing is posted but into a frozen `Reserve` of a session that is up, and no token twice.
2. `Drained`, `Welcome` and `Release` wait for every write to be terminal; only for `Release`, and
   only of a session that ends, a closed peer will do.
3. Every `Engage` has one `Release`; nothing is posted after it.

What happens when is in `table.SOURCE`; each rule there is a method here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from kvbaton.connectors.layout import GroupKind
from kvbaton.connectors.protocol.checks import (
    ceil_div,
    check_ack,
    check_reserve,
    covered_end,
    first_token,
    flatten,
    is_extension,
)
from kvbaton.connectors.protocol.events import (
    Announce,
    Attempt,
    BlocksReady,
    Closed,
    Engage,
    EvictSource,
    FirstTokens,
    Identity,
    PeerGone,
    Post,
    Received,
    RefuseAnnounce,
    Release,
    SendPushed,
    SourceEvent,
    SourceFailed,
    Spans,
    StopSource,
    Tick,
    TransferTimers,
    WriteEnded,
    spans_slice,
)
from kvbaton.connectors.protocol.machine import reply
from kvbaton.connectors.protocol.session import Pairable
from kvbaton.connectors.protocol.source_sessions import (
    Outgoing,
    SessionState,
    SourceSession,
    SourceSessions,
)
from kvbaton.connectors.protocol.table import SourceState
from kvbaton.wire import (
    Accepted,
    Ack,
    BlockSpan,
    Cancel,
    Complete,
    Drained,
    Failed,
    Hello,
    NotNeeded,
    Progress,
    Refused,
    Reserve,
    TransferMessage,
)

State = SourceState
_OUTCOME_COUNTER = {"acked": "completed", "not_needed": "completed", "cancelled": "cancelled"}
_PROGRESS_NAME = {
    State.RESERVED: "waiting",
    State.ENGAGED: "computing",
    State.COMPLETED: "writing",
}


class Source(SourceSessions):
    """P's machine.

    Args:
        identity: what this side says of itself.
        timers: of the protocol.
        new_id: makes 16 random bytes.
        pairable: checks layouts, source first; raises `ValueError` naming both values.
        max_attempts: attempts that may be alive at once; more are refused by name.
    """

    def __init__(
        self,
        identity: Identity,
        timers: TransferTimers,
        *,
        new_id: Callable[[], bytes],
        pairable: Pairable,
        max_attempts: int = 65_536,
    ) -> None:
        super().__init__(identity, timers, new_id=new_id, pairable=pairable)
        self._max_attempts = max_attempts

    def ledger(self) -> dict[str, Any]:
        """Attempts alive by state, leases, and writes that are not terminal."""
        live = self._live.values()
        return {
            "attempts": self._states(),
            "leases": sum(r.engaged for r in live),
            "held_blocks": sum(len(blocks) for r in live for blocks in r.blocks),
            "writes_in_flight": sum(len(r.flying) for r in live),
            "writes_undrained": sum(len(writes) for writes in self._undrained.values()),
            "sessions": self.sessions(),
        }

    # --- dispatch ---

    def _react(self, event: SourceEvent) -> None:
        match event:
            case Received():
                self._received(event)
            case Tick():
                self._ring()
            case PeerGone():
                self._peer_gone(event.node)
            case Closed():
                self._closed(event)
            case _:
                self._apply(type(event).__name__, self._record(event.attempt), event)

    def _received(self, event: Received) -> None:
        message = event.message
        if isinstance(message, Hello):
            self._hello(event.link, message)
        elif not isinstance(message, Reserve | Cancel | NotNeeded | Ack):
            self._count_dropped("unexpected")
        elif (session := self._session_of(event)) is not None:
            record = self._record(Attempt(message.transfer_id, message.attempt))
            self._tell(record, f"< {type(message).__name__} in {record.state.value}")
            if record.name in self._live and record.session not in (None, session):
                self._foreign(record, session, message)
            else:
                self._apply(type(message).__name__, record, message)

    def _foreign(self, record: Outgoing, session: SourceSession, message: TransferMessage) -> None:
        """A message about an attempt that is bound to another session: it can't touch it."""
        if isinstance(message, Reserve):
            self._refuse(record, message, "conflict", "the attempt is bound to another session")
        elif isinstance(message, Cancel):
            # True for the asker: nothing was ever accepted from this session.
            self._do(reply(session, self._message(Drained, session, record.name)))
        else:
            self._count_dropped("foreign")

    # --- small helpers ---

    def _new_record(self, name: Attempt) -> Outgoing:
        return Outgoing(name)

    def _enter(self, record: Outgoing, state: SourceState) -> None:
        if record.state is State.UNKNOWN:
            self._live[record.name] = record
            self.counters.started += 1
        self._tell(record, f"{record.state.value} -> {state.value}")
        record.state = state
        self._keep_alarms(record)

    def _send(self, record: Outgoing, kind: type[TransferMessage], **fields: Any) -> None:
        assert record.session is not None
        self._tell(record, f"> {kind.__name__}")
        message = self._message(kind, record.session, record.name, **fields)
        self._do(reply(record.session, message))

    def _refuse(
        self, record: Outgoing, message: TransferMessage, code: str, why: str, retry: bool = False
    ) -> None:
        session = self._sessions[message.session]
        self.counters.refused += 1
        self._count(code)
        self._tell(record, f"> Refused {code}: {why}")
        refused = Refused(
            session=session.id,
            seq=session.next_seq(),
            code=code,
            message=why,
            retryable=retry,
            transfer_id=record.name.transfer_id,
            attempt=record.name.number,
        )
        self._do(reply(session, refused))

    # --- Reserve ---

    def _acceptable(self, record: Outgoing, message: Reserve) -> bool:
        groups = self._sessions[message.session].groups
        problem = check_reserve(message, groups)
        if problem is not None:
            self._refuse(record, message, "malformed", problem)
        elif record.state is State.UNKNOWN and len(self._live) >= self._max_attempts:
            self._refuse(record, message, "too_many", f"{len(self._live)} attempts", retry=True)
            return False
        return problem is None

    def _bind(self, record: Outgoing, message: Reserve) -> None:
        session = self._sessions[message.session]
        record.session, record.reserve = session, message
        record.prompt_key, record.num_tokens = message.prompt_key, message.num_tokens
        record.start = first_token(message.spans, session.groups)
        self._in("total", record.name, message.remaining_ms / 1000)

    def _reserve_first(self, record: Outgoing, message: Reserve) -> None:
        if self._acceptable(record, message):
            self._bind(record, message)
            self._enter(record, State.RESERVED)
            self._in("unclaimed", record.name, self.timers.unclaimed)
            self._in("progress", record.name, self.timers.progress_period)
            self._send(record, Accepted)

    def _reserve_announced(self, record: Outgoing, message: Reserve) -> None:
        if not self._acceptable(record, message):
            return
        if (message.prompt_key, message.num_tokens) != (record.prompt_key, record.num_tokens):
            self._refuse(record, message, "prompt", _prompts(record, message))
            return
        self._bind(record, message)
        self._send(record, Accepted)
        self._engage(record)

    def _reserve_again(self, record: Outgoing, message: Reserve) -> None:
        assert record.reserve is not None
        if not self._acceptable(record, message):
            return
        if not is_extension(record.reserve, message):
            self._refuse(record, message, "conflict", "a reservation is frozen once sent")
            return
        record.reserve = message
        if record.state is not State.RESERVED:
            self._in("lease", record.name, self.timers.lease)
        self._send(record, Accepted)
        if record.state is State.ENGAGED:
            self._push(record)

    def _reserve_over(self, record: Outgoing, message: Reserve) -> None:
        code = "expired" if record.outcome == "expired" else "consumed"
        self._refuse(record, message, code, f"the attempt ended: {record.outcome}")

    def _engage(self, record: Outgoing) -> None:
        record.engaged = True
        record.ready = record.posted = record.start
        record.blocks = [{} for _ in self._negotiator.groups]
        self._enter(record, State.ENGAGED)
        self._in("lease", record.name, self.timers.lease)
        self._in("progress", record.name, self.timers.progress_period)
        self._do(Engage(record.name, record.start))

    # --- Announce ---

    def _announce_first(self, record: Outgoing, event: Announce) -> None:
        if len(self._live) >= self._max_attempts:
            self._do(RefuseAnnounce(record.name, "too_many"))
            return
        record.prompt_key, record.num_tokens = event.prompt_key, event.num_tokens
        self._enter(record, State.ANNOUNCED)
        # The queue may be long, and the entry pins nothing: `unclaimed` starts with the answer.
        self._in("unclaimed", record.name, self.timers.total)

    def _announce_reserved(self, record: Outgoing, event: Announce) -> None:
        if (event.prompt_key, event.num_tokens) == (record.prompt_key, record.num_tokens):
            self._engage(record)
            return
        assert record.reserve is not None
        self._refuse(record, record.reserve, "prompt", _prompts(event, record))
        self._end(record, "failed")

    def _announce_twice(self, record: Outgoing, event: Announce) -> None:
        self._do(RefuseAnnounce(record.name, "conflict"))

    def _announce_over(self, record: Outgoing, event: Announce) -> None:
        known = record.outcome in ("expired", "cancelled", "not_needed")
        self._do(RefuseAnnounce(record.name, record.outcome if known else "consumed"))

    def _finish_idle(self, record: Outgoing, event: FirstTokens) -> None:
        self._in("unclaimed", record.name, self.timers.unclaimed)

    # --- pushing ---

    def _blocks_ready(self, record: Outgoing, event: BlocksReady) -> None:
        assert event.start == record.ready, (
            f"{record.name}: tokens from {event.start} are reported, expected {record.ready}"
        )
        for known, spans in zip(record.blocks, event.spans, strict=True):
            known.update(flatten(spans))
        record.sums.append((event.start, event.end, event.sums))
        record.ready = event.end
        self._push(record)

    def _push(self, record: Outgoing) -> None:
        """Post what is ready and wanted, up to a border at which blocks of both sides begin."""
        session = cast(SourceSession, record.session)
        end = min(record.ready, covered_end(record.spans, session.groups, record.num_tokens))
        if end < record.num_tokens:
            end -= end % session.unit
        if end > record.posted:
            self._post(record, session, record.posted, end)
        self._try_complete(record)

    def _post(self, record: Outgoing, session: SourceSession, start: int, end: int) -> None:
        number = len(record.writes)
        record.writes.append((start, end))
        record.posted = end
        record.flying |= {
            (number, source, target)
            for source in range(len(self.identity.ranks))
            for target in range(session.num_ranks)
        }
        self._tell(record, f"post write {number}: tokens {start} to {end}")
        source, target = self._source_spans(record, start, end), self._target_spans(record, end)
        sums = self._sums(record, start, end)
        self._do(Post(session.id, record.name, number, start, end, source, target, sums))
        self._send_pushed(record, number)

    def _send_pushed(self, record: Outgoing, number: int) -> None:
        session = cast(SourceSession, record.session)
        assert session.link is not None
        start, end = record.writes[number]
        sums = self._sums(record, start, end)
        seq = session.next_seq()
        self._do(SendPushed(session.link, session.id, seq, record.name, number, start, end, sums))

    def _sums(self, record: Outgoing, start: int, end: int) -> tuple[object, ...]:
        return tuple(sums for low, high, sums in record.sums if low < end and start < high)

    def _source_spans(self, record: Outgoing, start: int, end: int) -> Spans:
        cut = []
        for group, known in zip(self._negotiator.groups, record.blocks, strict=True):
            first, last = start // group.block_size, ceil_div(end, group.block_size)
            if group.kind is GroupKind.STATE:
                first, last = (0, 1 << 62) if end == record.num_tokens else (0, 0)
            cut.append(_spans({n: b for n, b in known.items() if first <= n < last}))
        return tuple(cut)

    def _target_spans(self, record: Outgoing, end: int) -> Spans:
        session = cast(SourceSession, record.session)
        start = record.writes[-1][0]
        cut = []
        for group, spans in zip(session.groups, record.spans, strict=True):
            first, last = start // group.block_size, ceil_div(end, group.block_size)
            if group.kind is GroupKind.STATE:
                first, last = (0, 1 << 62) if end == record.num_tokens else (0, 0)
            cut.append(spans_slice(spans, first, last))
        return tuple(cut)

    def _first_tokens(self, record: Outgoing, event: FirstTokens) -> None:
        record.choices, record.cached_tokens = event.choices, event.cached_tokens
        self._try_complete(record)

    def _try_complete(self, record: Outgoing) -> None:
        if record.choices is not None and record.posted == record.num_tokens:
            self._enter(record, State.COMPLETED)
            self._send_complete(record)

    def _send_complete(self, record: Outgoing) -> None:
        self._in("complete", record.name, self.timers.resend)
        self._send(
            record,
            Complete,
            num_tokens=record.num_tokens,
            num_writes=len(record.writes),
            choices=record.choices,
            cached_tokens=record.cached_tokens,
        )

    def _repeat_complete(self, record: Outgoing, given: None) -> None:
        for number in range(len(record.writes)):
            self._send_pushed(record, number)
        self._send_complete(record)

    def _tell_progress(self, record: Outgoing, given: None) -> None:
        if record.state is State.COMPLETED and not record.flying:
            return
        self._in("progress", record.name, self.timers.progress_period)
        state = _PROGRESS_NAME[record.state]
        tokens = max(record.posted - record.start, 0)
        self._send(record, Progress, state=state, tokens_pushed=tokens)

    # --- writes ---

    def _write_ended(self, record: Outgoing, event: WriteEnded) -> None:
        self._strike(record, event)
        if not event.ok:
            self._fail(record, f"write {event.write} failed: {event.error}")

    def _write_stopping(self, record: Outgoing, event: WriteEnded) -> None:
        self._strike(record, event)
        self._settle(record)

    def _write_late(self, record: Outgoing, event: WriteEnded) -> None:
        if event.ok or event.drained:
            write = (event.write, event.source_rank, event.target_rank)
            self._write_outlived(record.name, write)

    def _strike(self, record: Outgoing, event: WriteEnded) -> None:
        if event.ok or event.drained:
            record.flying.discard((event.write, event.source_rank, event.target_rank))

    # --- the end ---

    def _ack(self, record: Outgoing, message: Ack) -> None:
        if not self._check_ack(record, message):
            return
        if message.verdict == "ok":
            self._stop(record, "acked")
        else:
            self._mismatch(record, message)

    def _ack_early(self, record: Outgoing, message: Ack) -> None:
        if not self._check_ack(record, message):
            return
        if message.verdict == "ok" or record.session is None:
            self._refuse(record, message, "conflict", "nothing was completed yet")
        else:
            self._mismatch(record, message)

    def _ack_late(self, record: Outgoing, message: Ack) -> None:
        if self._check_ack(record, message) and message.verdict == "mismatch":
            self._evict(record, message)

    def _check_ack(self, record: Outgoing, message: Ack) -> bool:
        problem = check_ack(message, record.num_tokens)
        if problem is not None:
            self._refuse(record, message, "malformed", problem)
        return problem is None

    def _mismatch(self, record: Outgoing, message: Ack) -> None:
        self._evict(record, message)
        self._stop(record, "failed")

    def _evict(self, record: Outgoing, message: Ack) -> None:
        if not record.evicted and record.engaged:
            record.evicted = True
            self.counters.mismatches += 1
            self._do(EvictSource(record.name, message.bad))

    def _cancel_unknown(self, record: Outgoing, message: Cancel) -> None:
        record.session = self._sessions[message.session]
        self._bury(record, "cancelled")
        self._send(record, Drained)

    def _cancel_idle(self, record: Outgoing, message: Cancel) -> None:
        record.session = self._sessions[message.session]
        record.drain_owed = True
        self._stop(record, "cancelled")

    def _cancel_engaged(self, record: Outgoing, message: Cancel) -> None:
        record.drain_owed = True
        self._stop(record, "cancelled")

    def _cancel_late(self, record: Outgoing, message: Cancel) -> None:
        record.drain_owed = True

    def _cancel_over(self, record: Outgoing, message: Cancel) -> None:
        session = self._sessions[message.session]
        self._do(reply(session, self._message(Drained, session, record.name)))

    def _spare_unknown(self, record: Outgoing, message: NotNeeded) -> None:
        self._bury(record, "not_needed")

    def _spare(self, record: Outgoing, message: NotNeeded) -> None:
        self._stop(record, "not_needed")

    def _fail(self, record: Outgoing, reason: str) -> None:
        self._send(record, Failed, reason=reason[:4000])
        self._stop(record, "failed")

    def _fail_idle(self, record: Outgoing, event: SourceFailed) -> None:
        self._end(record, "failed")

    def _fail_engaged(self, record: Outgoing, event: SourceFailed) -> None:
        self._send(record, Failed, reason=event.reason[:4000])
        self._stop(record, "failed", engine_knows=True)

    def _expire_idle(self, record: Outgoing, given: None) -> None:
        self._end(record, "expired")

    def _expire_reserved(self, record: Outgoing, given: None) -> None:
        self._send(record, Failed, reason="the request did not come in time")
        self._end(record, "expired")

    def _expire_engaged(self, record: Outgoing, given: None) -> None:
        self._send(record, Failed, reason="the lease has expired")
        self._stop(record, "expired")

    def _abandon(self, record: Outgoing, why: str) -> None:
        self._tell(record, f"session over: {why}")
        if record.state is not State.STOPPING:
            self._stop(record, "lost")

    def _stop(self, record: Outgoing, outcome: str, *, engine_knows: bool = False) -> None:
        """Post nothing more; wait for what is in flight."""
        record.outcome = outcome
        if record.state is not State.RESERVED and record.choices is None and not engine_knows:
            self._do(StopSource(record.name, outcome))
        self._enter(record, State.STOPPING)
        self._in("stuck", record.name, self.timers.lease)
        self._settle(record)

    def _settle(self, record: Outgoing) -> None:
        if record.flying or record.state is not State.STOPPING:
            return
        if record.drain_owed:
            self._send(record, Drained)
        session = record.session
        self._end(record, record.outcome)
        if session is not None and session.state is SessionState.CLOSING:
            self._close(session, force=False)

    def _force_close(self, record: Outgoing, given: None) -> None:
        assert record.session is not None
        self._in("stuck", record.name, self.timers.lease)
        self._end_session(record.session, "a write does not end")

    def _end(self, record: Outgoing, outcome: str) -> None:
        record.outcome = outcome
        if record.engaged:
            self._do(Release(record.name, outcome))
        del self._live[record.name]
        counter = _OUTCOME_COUNTER.get(outcome, "failed")
        setattr(self.counters, counter, getattr(self.counters, counter) + 1)
        self._bury(record, outcome)

    def _bury(self, record: Outgoing, outcome: str) -> None:
        """Remember only how an attempt ended."""
        self._tell(record, f"{record.state.value} -> ended: {outcome}")
        tomb = Outgoing(record.name, State.ENDED, outcome, num_tokens=record.num_tokens)
        self._ended[record.name] = tomb
        record.state = State.ENDED
        self._keep_alarms(record)
        self._in("tombstone", record.name, self.timers.tombstone)

    # --- checks ---

    def validate(self) -> None:
        """Check the machine's own invariants; raises `AssertionError` with the story."""
        self._validate((r, problem) for r in self._live.values() if (problem := _wrong(r)))
        for session in self._sessions.values():
            if session.state is SessionState.CLOSING and not session.close_sent:
                assert self._alarms.at("close", session.id) is not None, f"{session} waits for ever"


def _wrong(record: Outgoing) -> str | None:
    if record.engaged != (record.state in (State.ENGAGED, State.COMPLETED)) and (
        record.state is not State.STOPPING
    ):
        return "engaged in a wrong state"
    if record.flying and not record.engaged:
        return "writes without a lease"
    ends = [record.start, *(end for _, end in record.writes)]
    if [start for start, _ in record.writes] != ends[:-1]:
        return f"writes do not join: {record.writes}"
    if record.state is State.STOPPING and not record.flying:
        return "nothing is in flight and it has not ended"
    if record.engaged and not record.posted <= record.ready <= record.num_tokens:
        return f"posted {record.posted}, ready {record.ready} of {record.num_tokens}"
    return None


def _spans(blocks: dict[int, int]) -> tuple[BlockSpan, ...]:
    """Join logical blocks that follow each other into spans."""
    spans: list[BlockSpan] = []
    for number in sorted(blocks):
        if spans and spans[-1].first + len(spans[-1].blocks) == number:
            spans[-1] = BlockSpan(spans[-1].first, (*spans[-1].blocks, blocks[number]))
        else:
            spans.append(BlockSpan(number, (blocks[number],)))
    return tuple(spans)


def _prompts(ours: Outgoing | Announce, theirs: Outgoing | Reserve) -> str:
    return (
        f"source has {ours.num_tokens} tokens with key {ours.prompt_key.hex()[:16]}, "
        f"target {theirs.num_tokens} with {theirs.prompt_key.hex()[:16]}"
    )

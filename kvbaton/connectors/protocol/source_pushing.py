"""P's pushing: what is ready goes out in order, once, up to borders that both sides share."""

from __future__ import annotations

from typing import Any, cast

from kvbaton.connectors.layout import GroupKind
from kvbaton.connectors.protocol.checks import ceil_div, covered_end, flatten
from kvbaton.connectors.protocol.events import (
    BlocksReady,
    FirstTokens,
    Post,
    spans_slice,
)
from kvbaton.connectors.protocol.machine import reply
from kvbaton.connectors.protocol.source_sessions import Outgoing, SourceSession, SourceSessions
from kvbaton.connectors.protocol.table import SourceState
from kvbaton.messages.control import Complete, Progress, Refused, TransferMessage
from kvbaton.types import Attempt, BlockSpan, Spans

State = SourceState
_PROGRESS_NAME = {
    State.RESERVED: "waiting",
    State.ENGAGED: "computing",
    State.COMPLETED: "writing",
}


class SourcePushing(SourceSessions):
    """The part of `Source` that posts."""

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
        while end > record.posted:
            border = record.posted - record.posted % session.unit + session.max_tokens
            self._post(record, session, record.posted, min(end, border))
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
        self._send_complete(record)

    def _tell_progress(self, record: Outgoing, given: None) -> None:
        if record.state is State.COMPLETED and not record.flying:
            return
        self._in("progress", record.name, self.timers.progress_period)
        state = _PROGRESS_NAME[record.state]
        tokens = max(record.posted - record.start, 0)
        self._send(record, Progress, state=state, tokens_pushed=tokens)


def _spans(blocks: dict[int, int]) -> tuple[BlockSpan, ...]:
    """Join logical blocks that follow each other into spans."""
    spans: list[BlockSpan] = []
    for number in sorted(blocks):
        if spans and spans[-1].first + len(spans[-1].blocks) == number:
            spans[-1] = BlockSpan(spans[-1].first, (*spans[-1].blocks, blocks[number]))
        else:
            spans.append(BlockSpan(number, (blocks[number],)))
    return tuple(spans)

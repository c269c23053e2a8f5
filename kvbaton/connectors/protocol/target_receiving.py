"""D's receiving: what P announces, what has landed, what was verified, and when that is all."""

from __future__ import annotations

from typing import Any

import msgspec

from kvbaton.connectors.layout import GroupKind
from kvbaton.connectors.protocol.checks import ceil_div, check_complete, check_pushed
from kvbaton.connectors.protocol.events import Deliver, Landed, Verified, Verify, spans_slice
from kvbaton.connectors.protocol.machine import reply
from kvbaton.connectors.protocol.table import TargetState
from kvbaton.connectors.protocol.target_sessions import Incoming, TargetSessions
from kvbaton.messages.control import Ack, Complete, Pushed, TransferMessage
from kvbaton.types import Attempt, Spans

State = TargetState


class TargetReceiving(TargetSessions):
    """The part of `Target` that decides when the engine may read."""

    def _new_record(self, name: Attempt) -> Incoming:
        return Incoming(name)

    def _enter(self, record: Incoming, state: TargetState) -> None:
        self._tell(record, f"{record.state.value} -> {state.value}")
        record.state = state
        self._keep_alarms(record)

    def _send(self, record: Incoming, kind: type[TransferMessage], **fields: Any) -> None:
        assert record.session is not None
        self._tell(record, f"> {kind.__name__}")
        message = self._message(kind, record.session, record.name, **fields)
        self._do(reply(record.session, message, record.session.address))

    def _heard(self, record: Incoming) -> None:
        self._in("progress_deadline", record.name, self.timers.progress_deadline)

    def _answered(self, record: Incoming) -> None:
        if record.state is State.RESERVED:
            self._enter(record, State.ENGAGED)
            self._in("keepalive", record.name, self.timers.lease / 4)
        self._heard(record)

    # --- bytes ---

    def _pushed(self, record: Incoming, message: Pushed) -> None:
        self._answered_by_new(record, message.write not in record.pushed)
        known = record.pushed.get(message.write)
        if known is not None:
            if msgspec.structs.replace(message, seq=known.seq) != known:
                self._fail(record, f"write {message.write} was announced twice, differently")
            return
        assert record.order is not None
        assert record.session is not None
        pairs = (record.session.num_ranks, len(self.identity.ranks))
        groups = len(self._negotiator.groups)
        problem = check_pushed(message, record.start, record.order.num_tokens, pairs, groups)
        if problem is not None:
            self._malformed(record, problem)
            return
        record.pushed[message.write] = message
        self._try_verify(record, message.write)

    def _answered_by_new(self, record: Incoming, is_new: bool) -> None:
        """What P repeats beside `Complete` is no progress."""
        if is_new or record.state is State.RESERVED:
            self._answered(record)

    def _malformed(self, record: Incoming, problem: str) -> None:
        self._count("malformed")
        self._fail(record, f"the source sent nonsense: {problem}")

    def _landed(self, record: Incoming, event: Landed) -> None:
        assert record.session is not None
        assert record.order is not None
        pair = (event.source_rank, event.target_rank)
        in_range = pair[0] < record.session.num_ranks and pair[1] < len(self.identity.ranks)
        possible = event.write < record.order.num_tokens - record.start
        if event.session != record.session.id or not in_range or not possible:
            self._count_dropped("junk_notice")
            return
        self._answered(record)
        record.landed.setdefault(event.write, set()).add(pair)
        self._try_verify(record, event.write)

    def _try_verify(self, record: Incoming, write: int) -> None:
        """Verify a write once its digests and the notices of all rank pairs are here."""
        assert record.session is not None
        assert record.order is not None
        pushed = record.pushed.get(write)
        pairs = record.session.num_ranks * len(self.identity.ranks)
        if pushed is None or len(record.landed.get(write, ())) < pairs:
            return
        if write in record.verifying:
            return
        record.verifying.add(write)
        target = self._target_spans(record, pushed.start, pushed.end)
        self._do(
            Verify(
                record.session.id,
                record.name,
                write,
                pushed.start,
                pushed.end,
                target,
                pushed.digests,
            )
        )

    def _target_spans(self, record: Incoming, start: int, end: int) -> Spans:
        assert record.order is not None
        cut = []
        for group, spans in zip(self._negotiator.groups, record.order.spans, strict=True):
            first, last = start // group.block_size, ceil_div(end, group.block_size)
            if group.kind is GroupKind.STATE:
                first, last = (0, 1 << 62) if end == record.order.num_tokens else (0, 0)
            cut.append(spans_slice(spans, first, last))
        return tuple(cut)

    def _verified(self, record: Incoming, event: Verified) -> None:
        if event.error:
            self._fail(record, f"write {event.write} can't be verified: {event.error}")
            return
        record.verified[event.write] = event.bad
        self._heard(record)
        if not event.bad:
            self._try_deliver(record)
            return
        assert record.line is not None
        self.counters.mismatches += 1
        record.line.mismatches.append(self._now)
        record.bad = event.bad
        self._fail(record, f"tokens {event.bad} do not match their digests")

    # --- Complete ---

    def _complete(self, record: Incoming, message: Complete) -> None:
        assert record.order is not None
        problem = check_complete(message, record.start, record.order.num_tokens)
        if problem is not None:
            self._malformed(record, problem)
            return
        record.complete = message
        self._answered(record)
        self._enter(record, State.COMPLETING)
        self._try_deliver(record)

    def _complete_again(self, record: Incoming, message: Complete) -> None:
        assert record.complete is not None
        if msgspec.structs.replace(message, seq=record.complete.seq) != record.complete:
            self._malformed(record, "two Complete messages differ")

    def _try_deliver(self, record: Incoming) -> None:
        complete = record.complete
        if complete is None or any(n not in record.verified for n in range(complete.num_writes)):
            return
        assert record.order is not None
        if self._valid_through(record) != record.order.num_tokens:
            self._malformed(record, "its writes do not make up the prompt")
            return
        self._do(Deliver(record.name, complete.choices, complete.cached_tokens))
        self._send(record, Ack, verdict="ok")
        # All rank pairs of all writes have landed, and P posts no range twice: nothing of this
        # attempt is in flight, so its blocks need no `Drained`.
        self._end(record, "delivered")

    def _valid_through(self, record: Incoming) -> int:
        """End of the verified tokens that follow each other from the start of the reservation."""
        end = record.start
        write = 0
        while write in record.verified and not record.verified[write]:
            if record.pushed[write].start != end:
                break
            end = record.pushed[write].end
            write += 1
        return end

    # --- for the rest of the machine ---

    def _end(self, record: Incoming, outcome: str) -> None:
        raise NotImplementedError

"""D's receiving: what has landed, what was verified, and when that is all."""

from __future__ import annotations

from typing import Any

import msgspec

from kvbaton.connectors.layout import GroupKind
from kvbaton.connectors.protocol.checks import ceil_div, check_complete, check_landed
from kvbaton.connectors.protocol.events import Deliver, Landed, Verified, Verify, spans_slice
from kvbaton.connectors.protocol.machine import reply
from kvbaton.connectors.protocol.table import TargetState
from kvbaton.connectors.protocol.target_sessions import Arrival, Incoming, TargetSessions
from kvbaton.messages.control import Ack, Complete, TransferMessage
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

    def _malformed(self, record: Incoming, problem: str) -> None:
        self._count("malformed")
        self._fail(record, f"the source sent nonsense: {problem}")

    def _landed(self, record: Incoming, event: Landed) -> None:
        assert record.session is not None
        assert record.order is not None
        pair = (event.source_rank, event.target_rank)
        ranks = (record.session.num_ranks, len(self.identity.ranks))
        if event.session != record.session.id or pair[0] >= ranks[0] or pair[1] >= ranks[1]:
            self._count_dropped("junk_notice")
            return
        self._answered(record)
        problem = check_landed(
            event, record.start, record.order.num_tokens, len(self._negotiator.groups)
        )
        arrival = record.arrivals.get(event.write)
        if problem is None and arrival is None:
            missing = {(s, t) for s in range(ranks[0]) for t in range(ranks[1])}
            arrival = record.arrivals[event.write] = Arrival(event.start, event.end, missing)
        if arrival is None or (arrival.start, arrival.end) != (event.start, event.end):
            self._malformed(record, problem or f"write {event.write} is told of differently")
            return
        parts = arrival.parts.setdefault(pair, set())
        if event.part in parts:
            self._count_dropped("notice_again")
            return
        parts.add(event.part)
        arrival.digests += event.digests
        if len(parts) == event.parts:
            arrival.missing.discard(pair)
            if not arrival.missing:
                self._verify(record, event.write, arrival)

    def _verify(self, record: Incoming, write: int, arrival: Arrival) -> None:
        assert record.session is not None
        start, end = arrival.start, arrival.end
        target = self._target_spans(record, start, end)
        digests = tuple(arrival.digests)
        self._do(Verify(record.session.id, record.name, write, start, end, target, digests))

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
            if record.arrivals[write].start != end:
                break
            end = record.arrivals[write].end
            write += 1
        return end

    # --- for the rest of the machine ---

    def _end(self, record: Incoming, outcome: str) -> None:
        raise NotImplementedError

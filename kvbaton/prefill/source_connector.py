"""The source of hand-overs: reports computed blocks to the transfer thread, for targets."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
from typing_extensions import override

from kvbaton.connectors.digest import BlockRange, PendingDigests, PendingSums
from kvbaton.connectors.keys import prompt_key
from kvbaton.connectors.layout import GroupKind
from kvbaton.connectors.protocol import events
from kvbaton.connectors.transfer.source_worker import SourceWorker
from kvbaton.connectors.transfer.thread import TransferThread
from kvbaton.connectors.transfer.worker import attempt_name
from kvbaton.engine import request as requests
from kvbaton.engine.block_pool import NULL_BLOCK
from kvbaton.engine.executor import Executor
from kvbaton.engine.kv_connector import HeldBlocks, KVConnector, transfer_consumed
from kvbaton.engine.request import Tables
from kvbaton.engine.scheduler import Scheduler
from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest, Output, TransferSpec
from kvbaton.server.transfer_params import source_params
from kvbaton.types import (
    KEY_BYTES,
    Attempt,
    BlockSpan,
    ChoiceStart,
    NodeId,
    SampledToken,
    Spans,
)

logger = logging.getLogger(__name__)

ELSEWHERE = -1
"""In a block table: a block that the target has already."""

ToSource = (
    events.Engage | events.Release | events.StopSource | events.EvictSource | events.RefuseAnnounce
)


@dataclass
class _Source:
    """One attempt that this node prefills for.

    Attributes:
        request: The client's request; it runs again if a `Reserve` comes late.
        request_id: Id of the run that computes it now.
        num_tokens: Number of prompt tokens to hand over.
        start: First token of the target's reservation; None until it reserves.
        counted: Per group, the first token that digests count.
        reported: Number of tokens that were reported ready.
        last: Report of the prompt's end, which is sent with its first tokens.
        first: First tokens of each choice, as sampled by the current run.
        told: First tokens of each choice that the client got, if they are from an earlier run.
        goes_on: Whether a second token is being sampled, which ends the run.
        result_at: When the core had the result of the step that sampled token 0.
        cached_tokens: Prompt tokens that the first run did not compute.
    """

    attempt: Attempt
    request: AddRequest
    request_id: str
    num_tokens: int
    start: int | None = None
    counted: tuple[int, ...] = ()
    reported: int = 0
    last: events.BlocksReady | None = None
    first: dict[int, ChoiceStart] = field(default_factory=dict)
    told: dict[int, ChoiceStart] = field(default_factory=dict)
    goes_on: bool = False
    result_at: float | None = None
    cached_tokens: int = 0

    @property
    def is_first(self) -> bool:
        """Whether the current run is the client's."""
        return self.request_id == self.request.request_id

    @property
    def has_first_tokens(self) -> bool:
        """Whether all that this node samples was sampled."""
        return len(self.first) == self.request.params.n and not self.goes_on


class PartialSums:
    """Sums of blocks, where the first block counts only from a token inside it.

    A target's own prefix hit may end inside one of our blocks. The sums kept with the block cover
    all of it, so the part is summed again. That counts only if the whole block still matches the
    sums from the step that wrote it: otherwise stale bytes would be signed here.
    """

    def __init__(self, kept: PendingSums, anew: PendingDigests) -> None:
        """`anew` digests the first block twice: whole, and the part that counts."""
        self._kept, self._anew = kept, anew

    def poll(self) -> list[npt.NDArray[np.uint64]] | None:
        """The sums per rank; None while they are not there yet."""
        kept, anew = self._kept.poll(), self._anew.poll()
        if kept is None or anew is None:
            return None
        cut = []
        for of_kept, of_whole, of_part in zip(kept, *anew, strict=True):
            sums = of_kept.copy()
            # A mismatch is made wrong on purpose, so that the target refuses the block.
            sums[0] = np.where(of_kept[0] == of_whole[0], of_part[0], ~of_part[0])
            cut.append(sums)
        return cut


class SourceConnector(KVConnector):
    """Prefills for other nodes: holds final blocks and reports them to the transfer thread."""

    name = "source"
    transfer_role = "source"

    def __init__(
        self,
        transfers: TransferThread,
        executor: Executor,
        scheduler: Scheduler,
        node: NodeId,
    ) -> None:
        assert transfers.sender is not None
        self.transfers = transfers
        self.sender: SourceWorker = transfers.sender
        self.executor = executor
        self.scheduler = scheduler
        self.node = node
        self.control_address = transfers.channel.address
        states = any(group.kind is GroupKind.STATE for group in scheduler.blocks.groups)
        self._sums_come_in_order = executor.in_order and not states
        self.wake_fds = (self.sender.outbox_fd,)
        self.revived = 0
        self.outcomes: dict[str, int] = {}
        self._sources: dict[Attempt, _Source] = {}
        self._by_request: dict[str, _Source] = {}
        self._in_flight: set[Attempt] = set()  # whose last report was made while the step ran
        self._notified_at: float | None = None
        self._held: dict[Attempt, list[Spans]] = {}  # of reserved attempts
        self._outputs: list[Output] = []

    # --- requests ---

    @override
    def accept(self, request: AddRequest) -> AddRequest:
        transfer = self._asked(request)
        if transfer is not None and transfer.name in self._sources:
            raise transfer_consumed(transfer)
        return request

    def _asked(self, request: AddRequest) -> TransferSpec | None:
        """The hand-over that a client asks for; None for our own run for a late reservation."""
        transfer = request.transfer
        if transfer is None or transfer.role != "source" or request.request_id in self._by_request:
            return None
        return transfer

    @override
    def added(self, sequence: requests.Sequence) -> bool:
        request = sequence.request.spec
        transfer = self._asked(request)
        if transfer is None:
            return False
        attempt = transfer.name
        source = _Source(attempt, request, request.request_id, len(sequence.tokens))
        self._sources[attempt] = source
        self._by_request[request.request_id] = source
        root, extras = sequence.request.root, sequence.request.extras
        key = prompt_key(root, sequence.tokens, extras=extras)
        self.transfers.submit(events.Announce(attempt, key, len(sequence.tokens)))
        return False

    def _failed(self, request_id: str, reason: str) -> None:
        source = self._by_request.pop(request_id, None)
        if source is None:
            return
        self.transfers.submit(events.SourceFailed(source.attempt, reason))
        if source.start is None:
            self._sources.pop(source.attempt, None)

    @override
    def emitted(self, outputs: list[Output]) -> list[Output]:
        """Record first tokens; drop outputs of runs that were made for a late `Reserve`."""
        sent = []
        # Looked up first: a failing choice ends the run, but its other outputs here still count.
        sources = [self._by_request.get(output.request_id) for output in outputs]
        for output, source in zip(outputs, sources, strict=True):
            if source is None:
                sent.append(output)
                continue
            if output.token_ids:
                self._sampled(source, output)
            if source.is_first:
                sent.append(self._with_params(output, source))
            if output.finish_reason in ("abort", "error"):
                reason = output.error or "the prefill request was aborted"
                self._failed(output.request_id, reason)
            elif source.has_first_tokens:
                self._by_request.pop(output.request_id, None)
        return sent

    def _sampled(self, source: _Source, output: Output) -> None:
        """Note a token, and report all of them to the transfer thread if it is the last."""
        logprobs = output.logprobs[0] if output.logprobs else None
        # The source stops after these tokens: "length" says nothing about the request.
        reason = None if output.finish_reason == "length" else output.finish_reason
        token = output.token_ids[0], logprobs, reason, output.stop_reason
        if (first := source.first.get(output.choice)) is None:
            source.first[output.choice] = ChoiceStart(*token)
            source.result_at = self.scheduler.result_at
        else:
            more = (*first.more, SampledToken(*token))
            source.first[output.choice] = msgspec.structs.replace(first, more=more)
        source.goes_on &= output.finish_reason is None
        if source.is_first:  # a later run would count what this one left in the cache
            source.cached_tokens = output.cached_tokens
        if source.has_first_tokens:
            known = source.told or source.first
            choices = tuple(known[i] for i in range(source.request.params.n))
            ended = events.FirstTokens(
                source.attempt, choices, source.cached_tokens, source.result_at
            )
            last, source.last = source.last, None
            self.transfers.submit(*(ended,) if last is None else (last, ended))
        elif source.goes_on:
            self.transfers.submit()  # only wakes the thread: the sums of the last blocks are there

    def _with_params(self, output: Output, source: _Source) -> Output:
        """Add to the last output of a choice where its blocks are."""
        if output.finish_reason in (None, "abort", "error"):
            return output
        assert self.control_address is not None
        params = source_params(
            source.attempt.transfer_id,
            source.attempt.number,
            node_id=self.node.node,
            control_address=self.control_address,
            tp_size=len(self.executor.layouts),
            num_tokens=source.num_tokens,
        )
        return msgspec.structs.replace(output, kv_transfer_params=params)

    def _runs(self, source: _Source) -> bool:
        """Whether the prompt of an attempt is being computed."""
        return self._by_request.get(source.request_id) is source

    # --- blocks ---

    @override
    def progressed(self, request: requests.Request) -> None:
        source = self._by_request.get(request.request_id)
        if source is None or source.start is None or source.reported == source.num_tokens:
            return
        self._in_flight.discard(source.attempt)
        computed = self._reportable(source, request.final_tokens())
        if computed > source.reported:
            report = self._report(source, request, computed)
            if computed < source.num_tokens or source.has_first_tokens:
                self.transfers.submit(report)
            else:
                source.last = report
        self._report_in_flight(source, request)
        if source.reported == source.num_tokens and source.attempt in self._in_flight:
            self._go_on(source, request.sequences[0])

    @override
    def launched(self, step: requests.InFlightStep) -> None:
        if not self._by_request:
            return
        for scheduled in step.scheduled:
            self.progressed(scheduled.sequence.request)  # a cached prefix needs no step

    def _go_on(self, source: _Source, sequence: requests.Sequence) -> None:
        """Let an idle node sample a second token, while the prompt's KV crosses.

        Its KV may go to the last block of the prompt. So the sums of that block must be read before
        the next step, as those of a step in flight are.
        """
        transfer = source.request.transfer
        if transfer is not None and transfer.goes_on and source.is_first:
            source.goes_on = self.scheduler.extend_source(sequence)

    def _report_in_flight(self, source: _Source, request: requests.Request) -> None:
        """Report what the newest step computes before it ends, so that writes can be prepared.

        Not if an earlier step in flight has unreported tokens, which would then wait for the newest
        one.
        """
        sequence, steps = request.sequences[0], self.scheduler.in_flight
        if not self._sums_come_in_order or not steps:
            return
        ends = [
            (step, self._reportable(source, min(item.end, request.num_known)))
            for step in steps
            for item in step.scheduled
            if item.sequence is sequence and item.handle == sequence.handle
        ]
        news = [(step, end) for step, end in ends if end > source.reported]
        if len(news) != 1 or news[0][0] is not steps[-1]:
            return
        until = news[0][1]
        sizes = (group.span_tokens for group in self.scheduler.blocks.groups)
        cuts = zip(source.counted, sizes, strict=True)
        if any(max(source.reported, counted) % size for counted, size in cuts):
            return  # a part of a block can't be summed before it is computed
        self._in_flight.add(source.attempt)
        self.transfers.submit(self._report(source, request, until, in_flight=True))

    def _reportable(self, source: _Source, computed: int) -> int:
        """Number of computed tokens to report: whole blocks, except at the prompt's end."""
        if computed < source.num_tokens:
            computed -= computed % self.scheduler.blocks.alignment
        return computed

    def _report(
        self, source: _Source, request: requests.Request, end: int, *, in_flight: bool = False
    ) -> events.BlocksReady:
        """Hold the blocks of unreported tokens up to `end`; return their report."""
        start, source.reported = source.reported, end
        tables = request.sequences[0].tables
        return self._report_blocks(
            source.attempt, tables, start, end, source.counted, in_flight=in_flight
        )

    def _report_blocks(
        self,
        attempt: Attempt,
        tables: Tables,
        start: int,
        end: int,
        counted: tuple[int, ...],
        *,
        in_flight: bool = False,
    ) -> events.BlocksReady:
        """Hold the blocks of tokens [start, end); return the report that they are ready."""
        manager = self.scheduler.blocks
        sizes = [group.span_tokens for group in manager.groups]
        # Only the last blocks of a window, and the last state, are sent; others are not held.
        spans = tuple(
            _spans_slice(held, (first // size, -(-end // size)))
            for held, first, size in zip(
                manager.spans(tables, start, end), counted, sizes, strict=True
            )
        )
        manager.hold_outgoing(spans)
        self._held[attempt].append(spans)
        sums = []
        for group, held in enumerate(spans):
            begin, size = max(start, counted[group]), sizes[group]
            blocks = [block for span in held for block in span.blocks]
            pending: PendingSums = self.executor.sums(group, blocks, in_flight=in_flight)
            if begin % size and blocks:  # only part of the first block counts
                first = begin - begin % size
                past = min(first + size, end)  # the prompt may end in this block
                whole = BlockRange(group, blocks[:1], first, first, past)
                anew = self.executor.digest([whole, whole._replace(start=begin)])
                pending = PartialSums(pending, anew)
            sums.append((held[0].first if held else 0, pending))
        return events.BlocksReady(attempt, start, end, spans, tuple(sums))

    def _send_held(self, action: events.Engage) -> None:
        """Hold the blocks of these keys that are still cached, and report them at once."""
        manager, start = self.scheduler.blocks, action.start
        keys = [action.keys[i : i + KEY_BYTES] for i in range(0, len(action.keys), KEY_BYTES)]
        size = manager.alignment  # of all groups, else `Reserve` with keys is refused
        end = start + len(keys) * size
        hits = []
        for g, group in enumerate(manager.groups):
            by_key = manager.pool.by_key[g]
            if group.kind is GroupKind.FULL:
                found = manager.pool.match(keys, g)
            else:
                found = [by_key.get(key, NULL_BLOCK) for key in keys]
            hits.append([ELSEWHERE] * (start // size) + found)
        held = manager.usable(hits, end + 1)
        if held < end and not all(group.keeps_all for group in manager.groups):
            held = 0  # the target has reserved only what the whole prefix needs
        if held <= start:
            self.transfers.submit(
                events.SourceFailed(action.attempt, "none of it is held any more")
            )
            return
        tables = []
        for group, hit in zip(manager.groups, hits, strict=True):
            first = min(max(start // size, group.first_needed(held)), held // size)
            tables.append([NULL_BLOCK] * first + hit[first : held // size])
        self._held[action.attempt] = []
        report = self._report_blocks(action.attempt, tables, start, held, action.counted)
        self.transfers.submit(report, events.FirstTokens(action.attempt, ()))

    # --- events of the transfer thread ---

    @override
    def poll(self, now: float) -> list[Output]:
        if self._in_flight and self.scheduler.result_at != self._notified_at:
            self._notified_at = self.scheduler.result_at
            self.transfers.submit()  # only wakes the thread: a step has ended
        for action in cast("Iterator[ToSource]", self.sender.take()):
            source = self._sources.get(action.attempt)
            match action:
                case events.Engage() if action.keys:
                    self._send_held(action)
                case events.Engage():
                    self._engage(source, action)
                case events.Release():
                    self.outcomes[action.outcome] = self.outcomes.get(action.outcome, 0) + 1
                    self._in_flight.discard(action.attempt)
                    if source is not None:
                        del self._sources[action.attempt]
                        # A run for a late reservation may be released before it has ended.
                        self._end_run(source)
                    for spans in self._held.pop(action.attempt, ()):
                        self.scheduler.blocks.release_outgoing(spans)
                case events.StopSource() if source is not None:
                    self._end_run(source)
                    if source.start is None:
                        del self._sources[action.attempt]
                case events.EvictSource():
                    for spans in self._held.get(action.attempt, ()):
                        self.scheduler.blocks.evict(spans, action.bad)
                case events.RefuseAnnounce() if source is not None:
                    del self._sources[action.attempt]
                    self._by_request.pop(source.request_id, None)
                    # A target that declined before the request came here is no failure.
                    called_off = action.code in ("not_needed", "cancelled")
                    reason = "abort" if called_off else f"transfer refused: {action.code}"
                    self._outputs += self.scheduler.abort(source.request_id, reason)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _engage(self, source: _Source | None, action: events.Engage) -> None:
        """Handle a reservation: report computed blocks, or run the prompt again if it is late."""
        if source is None:
            self.transfers.submit(events.SourceFailed(action.attempt, "the prompt is gone"))
            return
        source.start = source.reported = action.start
        source.counted = action.counted
        self._held[action.attempt] = []
        if self._runs(source):
            request = self.scheduler.requests.get(source.request_id)
            if request is not None:
                self.progressed(request)
            return
        # Run again: mostly prefix hits. No TTFT objective, since the client has its first token.
        # The target continues from that token: another step might sample a different one.
        self.revived += 1
        source.request_id = f"{source.request.request_id}#{self.revived}"
        source.told, source.first = source.told or source.first, {}
        self._by_request[source.request_id] = source
        # The first run has used up its items' hand-overs.
        items = tuple(msgspec.structs.replace(i, transfer=None) for i in source.request.items)
        again = msgspec.structs.replace(
            source.request, request_id=source.request_id, items=items, ttft_s=0.0, prefill_s=0.0
        )
        try:
            self.scheduler.add(again, served=True)
        except RequestError as error:
            self._failed(source.request_id, error.message)
            logger.warning("can't prefill again for a late reservation: %s", error)

    def _end_run(self, source: _Source) -> None:
        """Abort the run that computes an attempt's prompt, if there is one."""
        if self._runs(source):
            del self._by_request[source.request_id]
            outputs = self.scheduler.abort(source.request_id)
            if source.request_id == source.request.request_id:
                self._outputs += outputs

    # --- audit and metrics ---

    @override
    def awaits(self) -> bool:
        return any(source.start is None for source in self._by_request.values())

    @override
    def busy(self) -> bool:
        return bool(self._held)

    @override
    def held_blocks(self) -> HeldBlocks:
        return HeldBlocks(outgoing=[spans for held in self._held.values() for spans in held])

    @override
    def counters(self) -> dict[str, float]:
        totals = {
            f"kvbaton_transfer_{name}_total": value for name, value in self.sender.published.items()
        }
        for outcome, count in self.outcomes.items():
            totals[f'kvbaton_transfers_total{{role="source",outcome="{outcome}"}}'] = float(count)
        totals["kvbaton_transfers_revived_total"] = float(self.revived)
        totals["kvbaton_control_junk_total"] = float(self.transfers.junk)
        return totals

    @override
    def gauges(self) -> dict[str, float]:
        # An announced transfer holds no blocks: no target has reserved it yet.
        announced = sum(source.start is None for source in self._sources.values())
        return {
            "kvbaton_transfers_live": float(len(self._held)),
            "kvbaton_transfers_announced": float(announced),
            "kvbaton_leases": float(len(self._held)),
            "kvbaton_unhealthy": float(self.transfers.is_unhealthy()),
        }

    @override
    def state(self) -> dict[str, Any]:
        return {
            "failure": self.transfers.failure,
            "live": [
                {
                    "transfer_id": source.attempt.transfer_id.hex(),
                    "attempt": source.attempt.number,
                    "request_id": source.request_id,
                    "reserved_from": source.start,
                    "reported": source.reported,
                    "num_tokens": source.num_tokens,
                    "running": self._runs(source),
                }
                for source in self._sources.values()
            ],
            "pinned": [attempt_name(a) for a in self._held if a not in self._sources],
            **self.transfers.inspect(self.sender.state),
        }

    @override
    def close(self) -> None:
        self.transfers.close()


def _spans_slice(spans: tuple[BlockSpan, ...], cut: tuple[int, int]) -> tuple[BlockSpan, ...]:
    """The part of spans that lies in logical blocks [first, last)."""
    found = []
    for span in spans:
        low, high = max(cut[0], span.first), min(cut[1], span.first + len(span.blocks))
        if low < high:
            found.append(BlockSpan(low, span.blocks[low - span.first : high - span.first]))
    return tuple(found)

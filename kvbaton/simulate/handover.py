"""Transfers between simulated engines: the schedulers' real load path, and wires with a speed.

The real connectors would compute protocol, digests and plans in Python for each block of each
prompt, which takes about as long as a hand-over itself. Here the schedulers load, hold, release and
recompute as with them, and `EngineModel.handover` gives the time on the wire. As there, blocks
leave when the step that computed them has ended, and cached ones when the first step is launched,
if they are reserved by then (if they are reserved during a step, here they leave after it). A
reservation that comes after the prompt was computed runs it again, mostly from the cache. Prefixes
of other engines take as long as a hand-over of as many cached tokens, and are fetched by key, as
there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec
from typing_extensions import override

from kvbaton.connectors.protocol.events import Crossing
from kvbaton.decode.wire_costs import WireCosts
from kvbaton.engine import request as requests
from kvbaton.engine.kv_connector import KVConnector, Load
from kvbaton.engine.scheduler import Scheduler
from kvbaton.messages.engine import AddRequest, Output
from kvbaton.simulate.engine_model import EngineModel
from kvbaton.types import Attempt, BlockSpan, ChoiceStart, Spans


class WiredEngine(Protocol):
    """An engine at one end of a wire."""

    scheduler: Scheduler
    address: str
    wire_costs: WireCosts

    def post(self, job: Callable[[], list[Output] | None]) -> None:
        """Run a job between two steps."""

    def slow(self, cost: tuple[float, float], tokens: int) -> None:
        """Lengthen the next step by a constant, and by seconds per token of KV."""


@dataclass(eq=False)
class WireTransfer:
    """The hand-over of one prompt.

    Attributes:
        source: Engine that computes the prompt; None until it has the request.
        request: The source's request.
        request_id: Id of the run that computes it now; empty if there is none.
        target: Engine that receives it; None until it has the request.
        load: Load with the target's blocks; None without a reservation.
        pushed: Number of tokens that were sent, or were at the target.
        held: Blocks of the source that are held for the transfer.
        first: Output with the first token that the source sampled.
        cached: Number of tokens that the source did not compute.
    """

    source: WiredEngine | None = None
    request: AddRequest | None = None
    request_id: str = ""
    target: WiredEngine | None = None
    load: Load | None = None
    pushed: int = 0
    held: list[Spans] = field(default_factory=list)
    first: Output | None = None
    cached: int = 0

    def release(self) -> None:
        """Release the source's blocks."""
        assert self.source is not None
        for spans in self.held:
            self.source.scheduler.blocks.release_outgoing(spans)
        self.held.clear()


class SimulatedWires:
    """All hand-overs of a cluster.

    Args:
        model: Gives how long they take.
        after: Calls a function after a number of seconds.
        now: The clock, in seconds.

    Attributes:
        transfers: Transfers by name; source or target makes one, whichever comes first.
    """

    def __init__(
        self,
        model: EngineModel,
        after: Callable[[float, Callable[[], None]], object],
        now: Callable[[], float],
    ) -> None:
        self.model, self.now = model, now
        self.transfers = defaultdict[Attempt, WireTransfer](WireTransfer)
        self._after = after
        self.engines: dict[str, WiredEngine] = {}
        self._free_at: dict[WiredEngine, float] = {}

    def engage(self, transfer: WireTransfer) -> None:
        """Start a transfer whose source and reservation are there, or compute its prompt again."""
        source = transfer.source
        if source is None or transfer.load is None:
            return
        running = source.scheduler.requests.get(transfer.request_id)
        if running is not None:
            self.push(transfer, running)
        elif transfer.request is not None and transfer.first is not None:
            transfer.request_id = transfer.request_id + "#"
            transfer.first = None
            again = msgspec.structs.replace(
                transfer.request, request_id=transfer.request_id, ttft_s=0.0, prefill_s=0.0
            )
            source.scheduler.add(again, served=True)

    def push(self, transfer: WireTransfer, request: requests.Request) -> None:
        """Send newly final blocks."""
        source, load = transfer.source, transfer.load
        assert source is not None
        if load is None:
            return
        manager, computed = source.scheduler.blocks, request.final_tokens()
        start = max(transfer.pushed, load.start)
        if computed < load.end:
            computed -= computed % manager.alignment
        if computed <= start:
            return
        spans = manager.spans(request.sequences[0].tables, start, computed)
        manager.hold_outgoing(spans)
        transfer.held.append(spans)
        transfer.pushed, tokens = computed, computed - start
        source.slow(self.model.leaving, tokens)
        seconds = self._cross(source, tokens)
        if computed == load.end:
            began = self.now()
            self._after(seconds, lambda: self._end(transfer, tokens, began))

    def _cross(self, source: WiredEngine, tokens: int) -> float:
        """Occupy an engine's wire for `tokens` tokens; return the seconds until all arrive."""
        now = self.now()
        begin = max(now, self._free_at.get(source, 0.0))
        self._free_at[source] = begin + self.model.handover[1] * tokens
        last_step = min(tokens, self.model.step_tokens)
        return begin - now + self.model.handover_s(tokens, last_step)

    def fetch(self, target: WiredEngine, load: Load, peer: str) -> None:
        """Fill a load with the blocks that another engine has cached."""
        source, began = self.engines[peer], self.now()

        def send() -> None:
            manager = source.scheduler.blocks
            size = manager.alignment
            first = load.start // size
            keys = load.sequence.chain(size)[first : load.end // size]
            found = tuple(manager.pool.match(keys))
            spans: Spans = ((BlockSpan(first, found),) if found else (),)
            manager.hold_outgoing(spans)
            tokens = len(found) * size

            def end() -> None:
                if tokens:
                    crossing = Crossing(peer, True, tokens, began, self.now())
                    target.wire_costs.observe(crossing)
                source.post(partial(manager.release_outgoing, spans))
                target.post(deliver)

            def deliver() -> None:
                target.scheduler.cut_load(load, load.start + tokens)
                target.scheduler.blocks.release_incoming(load.spans)

            self._after(self._cross(source, tokens) if tokens else 0.0, end)

        source.post(send)

    def _end(self, transfer: WireTransfer, tokens: int, began: float) -> None:
        source, target = transfer.source, transfer.target
        load, first = transfer.load, transfer.first
        assert source is not None
        source.post(transfer.release)
        if target is None or load is None or first is None:  # it was cancelled
            return
        # A source stops after one token anyway: only "stop" means that the sequence ends.
        reason = first.finish_reason if first.finish_reason == "stop" else None
        start = ChoiceStart(first.token_ids[0], None, reason, None)
        scheduler = target.scheduler
        target.wire_costs.observe(Crossing(source.address, False, tokens, began, self.now()))

        def deliver() -> list[Output]:
            target.slow(self.model.coming, load.end - load.start)
            outputs = scheduler.finish_load(load, (start,), cached_at_source=transfer.cached)
            if transfer.load is load:
                transfer.load = None
                scheduler.blocks.release_incoming(load.spans)
            return outputs

        target.post(deliver)


class WireSource(KVConnector):
    """Prefills for other engines."""

    name = "source"
    transfer_role = "source"

    def __init__(self, engine: WiredEngine, wires: SimulatedWires) -> None:
        self._engine, self._wires = engine, wires
        self._by_request: dict[str, WireTransfer] = {}

    @override
    def added(self, sequence: requests.Sequence) -> bool:
        spec = sequence.request.spec
        if spec.transfer is None or spec.transfer.role != "source":
            return False
        transfer = self._wires.transfers[spec.transfer.name]
        self._by_request[spec.request_id] = transfer
        if transfer.source is None:
            transfer.source, transfer.request = self._engine, spec
        transfer.request_id = spec.request_id
        return False

    @override
    def launched(self, step: requests.InFlightStep) -> None:
        for scheduled in step.scheduled if self._by_request else ():
            self.progressed(scheduled.sequence.request)  # a cached prefix needs no step

    @override
    def progressed(self, request: requests.Request) -> None:
        transfer = self._by_request.get(request.request_id)
        if transfer is not None:
            self._wires.push(transfer, request)

    @override
    def emitted(self, outputs: list[Output]) -> list[Output]:
        sent = []
        for output in outputs:
            transfer = self._by_request.get(output.request_id)
            if transfer is not None and output.token_ids:
                transfer.first = output
                transfer.cached = transfer.cached or output.cached_tokens
            if output.finish_reason is not None:
                self._by_request.pop(output.request_id, None)
            if transfer is None or not output.request_id.endswith("#"):
                sent.append(output)
        return sent


class WirePrefix(KVConnector):
    """Fetches prefixes from other engines, once per request."""

    name = "prefix"
    medium = "peer"

    def __init__(self, engine: WiredEngine, wires: SimulatedWires) -> None:
        self._engine, self._wires = engine, wires
        self._asked: set[requests.Request] = set()

    @override
    def match(self, sequence: requests.Sequence, num_cached: int) -> int:
        request, size = sequence.request, self._engine.scheduler.blocks.alignment
        transfer = request.spec.transfer
        awaited = transfer is not None and transfer.role == "target"
        if request.spec.prefix is None or awaited or request in self._asked:
            return 0
        end = min(request.spec.prefix.num_tokens, len(sequence.tokens) - 1)
        return max(0, end - end % size - num_cached)

    @override
    def start_load(self, load: Load) -> None:
        request = load.sequence.request
        assert request.spec.prefix is not None, "only what `match` has offered is loaded"
        self._asked.add(request)
        self._wires.fetch(self._engine, load, request.spec.prefix.peer)

    @override
    def finished(self, request: requests.Request) -> None:
        self._asked.discard(request)


class WireTarget(KVConnector):
    """Receives prompts from other engines."""

    name = "target"
    transfer_role = "target"
    medium = "transferred"
    waits_for_room = True

    def __init__(self, engine: WiredEngine, wires: SimulatedWires) -> None:
        self._engine, self._wires = engine, wires
        self._awaited: dict[str, WireTransfer] = {}

    @override
    def added(self, sequence: requests.Sequence) -> bool:
        spec = sequence.request.spec
        if spec.transfer is not None and spec.transfer.role == "target":
            transfer = self._awaited[spec.request_id] = self._wires.transfers[spec.transfer.name]
            transfer.target = self._engine
        return False

    @override
    def match(self, sequence: requests.Sequence, num_cached: int) -> int:
        transfer = self._awaited.get(sequence.request.request_id)
        if transfer is None:
            return 0
        return len(sequence.tokens) - num_cached

    @override
    def start_load(self, load: Load) -> None:
        transfer = self._awaited[load.sequence.request.request_id]
        transfer.load = load
        if transfer.source is not None:
            transfer.source.post(partial(self._wires.engage, transfer))

    @override
    def started(self, sequence: requests.Sequence) -> None:
        transfer = self._awaited.pop(sequence.request.request_id, None)
        if transfer is None or transfer.load is not None:  # its KV has come
            return
        source, transfer.target = transfer.source, None
        if source is not None:
            source.post(lambda: source.scheduler.abort(transfer.request_id))

    @override
    def finished(self, request: requests.Request) -> None:
        transfer = self._awaited.pop(request.request_id, None)
        if transfer is not None and transfer.load is not None:
            self._engine.scheduler.blocks.release_incoming(transfer.load.spans)
            transfer.load = None
            if transfer.source is not None:
                transfer.source.post(transfer.release)
        if request.spec.transfer is not None and request.spec.transfer.role == "target":
            self._wires.transfers.pop(request.spec.transfer.name, None)

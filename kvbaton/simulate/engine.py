"""An engine in virtual time: the real scheduler, block pool, prefix cache and step costs.

What a device would compute takes as long as `EngineModel` says. Steps that only decode are not
planned one by one: as long as nobody comes or ends, the next ones differ from the last in nothing
but lengths, so a run of them is applied at once, and cut off after the step under way when
something happens. That is exact, but that other nodes' routers hear of the blocks of a run
at its end.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.connectors.keys import block_keys
from kvbaton.decode.wire_costs import WireCosts
from kvbaton.engine.block_feed import BlockFeed
from kvbaton.engine.config import SchedulerConfig
from kvbaton.engine.frontends import CachedBlockSource, FrontendServer
from kvbaton.engine.kv_cache_manager import GroupSpec
from kvbaton.engine.kv_connector import Connectors, KVConnector
from kvbaton.engine.outputs import OutputReceiver
from kvbaton.engine.request import Sequence, SequenceState
from kvbaton.engine.scheduler import Scheduler
from kvbaton.engine.step import Sampled, StepPlan, StepResult
from kvbaton.engine.step_costs import Terms, step_costs, terms_of, try_steps
from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest, BlockChange, CachedBlocks, Metrics, Output
from kvbaton.messages.nodes import NodeInfo
from kvbaton.server.node import LoadMeter, wire_failures_of, wires_of
from kvbaton.simulate.engine_model import EngineModel
from kvbaton.simulate.handover import SimulatedWires, WirePrefix, WireSource, WireTarget
from kvbaton.simulate.traces import END_TOKEN, TraceRequest, token_ids
from kvbaton.types import PromptLimits, TokenIds

VOCABULARY = 1 << 31
MOST_STEPS = 64
"""In a run: what it caches is told at its end."""
TELL_S = 0.1
"""So often, and not at each step, the router is told of the tokens of texts that go on."""
REPORT_S = 2.0
"""As `engine.core.METRICS_PERIOD_S`."""
IDENTITY = bytes(32)


class Prompts:
    """The requests of a trace by their ids, with the keys of their blocks, computed once.

    Args:
        root: of the keys.
        block_size: tokens per block.
    """

    def __init__(self, root: bytes, block_size: int) -> None:
        self.root, self.block_size = root, block_size
        self.requests: dict[str, TraceRequest] = {}
        self._keys: dict[str, list[bytes]] = {}

    def add(self, name: str, request: TraceRequest, before: str | None) -> TokenIds:
        """A request begins, perhaps as a session's next turn; returns its prompt."""
        tokens, known = token_ids(request.pieces), list[bytes]()
        if before is not None:
            earlier, keys = self.requests[before], self._keys.pop(before)
            if request.pieces[: len(earlier.pieces)] == earlier.pieces:
                known = keys
        self.requests[name] = request
        self._keys[name] = block_keys(self.root, tokens, self.block_size, parent_keys=known)
        return tokens

    def keys(self, request_id: str) -> list[bytes]:
        """Of the whole blocks of a request's prompt, by its id at the router or at a node.

        None are known of a request that is over for its client.
        """
        return self._keys.get(request_id.partition(".")[0], [])

    def next_token(self, sequence: Sequence) -> int:
        """What a sequence generates next."""
        request = self.requests[sequence.request.request_id.partition(".")[0]]
        return request.output if self.left(sequence) > 1 else END_TOKEN

    def left(self, sequence: Sequence) -> int:
        """Tokens that a sequence is yet to generate."""
        request = self.requests[sequence.request.request_id.partition(".")[0]]
        return request.output_tokens - sequence.num_generated

    def forget(self, name: str) -> None:
        """A request is over for its client, and no other one follows it."""
        del self._keys[name]


class KnownKeys(KVConnector):
    """Gives sequences the keys of their prompts, which `Prompts` has."""

    name = "known_keys"

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts

    def added(self, sequence: Sequence) -> bool:
        """See `KVConnector.added`."""
        keys = self._prompts.keys(sequence.request.request_id)
        sequence.chains[self._prompts.block_size] = keys  # `Sequence.chain` adds what is missing
        return False


@dataclass
class Run:
    """Steps under way: one that was planned, and more like it.

    Attributes:
        plan: of the first.
        terms: of the first.
        begin: of the first.
        ends: of each.
        sequences: who decodes in them; empty if the plan does more than that.
        steps: that are to be applied.
        timer: calls their end.
    """

    plan: StepPlan
    terms: Terms
    begin: float
    ends: npt.NDArray[np.float64]
    sequences: list[Sequence]
    steps: int
    timer: Any = None


@dataclass
class TokenTimes:
    """When a request's tokens came at its engine.

    Attributes:
        ends: times, in pieces.
        sent: index of the next token that the router is to be told.
        unsent: tokens that it has not been told.
    """

    ends: list[npt.NDArray[np.float64]] = field(default_factory=list)
    sent: int = 0
    unsent: list[int] = field(default_factory=list)


class ModeledEngine:
    """An engine core and its frontend's end of the socket.

    Args:
        name: of the node.
        role: what it may do.
        model: its size and speed.
        loop: virtual time.
        wires: between engines.
        prompts: of all requests.
        tell_blocks: is told what its prefix cache holds.
        seed: of jitter.

    Attributes:
        busy_s: seconds of steps.
        timings: per live request that generates here.
        on_tokens: called with (request id, times) when a request's last token was made.
    """

    def __init__(
        self,
        name: str,
        role: str,
        model: EngineModel,
        loop: asyncio.AbstractEventLoop,
        wires: SimulatedWires,
        prompts: Prompts,
        tell_blocks: Callable[[NodeInfo, CachedBlocks], None],
        seed: int,
    ) -> None:
        self.name, self.role, self.model, self.loop = name, role, model, loop
        self.busy_s = 0.0
        self.on_tokens: Callable[[str, npt.NDArray[np.float64]], None] = lambda name, times: None
        self.dead: str | None = None
        self._prompts, self._tell_blocks = prompts, tell_blocks
        self._rng = np.random.default_rng(seed)
        self._costs, self._meter = step_costs(), LoadMeter()
        self._step_tokens = 0
        self._report_at = self._tell_at = 0.0
        blocks = model.kv_tokens // model.block_size + 1
        self.scheduler = Scheduler(
            SchedulerConfig(
                groups=(GroupSpec(model.block_size, blocks),),
                max_model_len=model.max_model_len,
                vocab_size=VOCABULARY,
                max_num_seqs=model.max_num_seqs,
                max_num_batched_tokens=model.step_tokens,
                max_num_mixed_tokens=model.mixed_tokens,
                eos_token_ids=(END_TOKEN,),
            ),
            root_key=lambda salt: prompts.root,
            clock=loop.time,
        )
        self.scheduler.both_sides = role == "any"
        limits = self.scheduler.prompt_limits()
        if role == "prefill":
            limits = PromptLimits(limits.computed, lent=limits.lent)
        self._limits = limits
        self.address = f"tcp://{name}:1"
        self.wire_costs = WireCosts()
        wires.engines[self.address] = self
        self._costs.start(try_steps(self._try_step, self.scheduler.config))
        self._report = self._measure()
        self.info = self._describe()
        self.block_watchers = {self: None}
        feed = BlockFeed(self.scheduler.blocks, cast(FrontendServer, self))
        ways = [WireSource(self, wires), WireTarget(self, wires), WirePrefix(self, wires)]
        parts = [KnownKeys(prompts), *ways, feed]
        for part in parts:
            part.contained = False  # what it raises is our fault
        self.connectors = self.scheduler.connectors = Connectors(parts)
        self._numbers = 0
        self._receivers: dict[str, OutputReceiver] = {}
        self._timings = defaultdict[str, TokenTimes](TokenTimes)
        self._inbox: list[Callable[[], list[Output] | None]] = []
        self._run: Run | None = None
        self._slower_s = 0.0
        self._turns = False

    # --- its node's heartbeats ---

    def _describe(self) -> NodeInfo:
        return NodeInfo(
            node_id=self.name,
            generation="1",
            role=self.role,
            url=f"http://{self.name}",
            model="simulated",
            control_address=self.address,
            identity=IDENTITY.hex(),
            transport="simulated",
            block_size=self.model.block_size,
            max_model_len=self.model.max_model_len,
            vocab_size=VOCABULARY,
            num_blocks=self.model.kv_tokens // self.model.block_size,
            load=self._meter.measure(self._report),
            wires=wires_of(self._report),
            wire_failures=wire_failures_of(self._report),
            prompt_limits=self._limits,
        )

    def heartbeat(self) -> NodeInfo:
        """What the node says of itself now; its engine reports less often."""
        if self.loop.time() >= self._report_at:
            self._report_at = self.loop.time() + REPORT_S
            self._report = self._measure()
        self.info = self._describe()
        return self.info

    def _measure(self) -> Metrics:
        """As `EngineCore.metrics`, what a node passes on of it."""
        costs = self._costs.costs().items()
        return Metrics(
            counters={
                "kvbaton_step_seconds_total": self.busy_s,
                "kvbaton_step_tokens_total": float(self._step_tokens),
            },
            gauges={
                "kvbaton_prompt_tokens_waiting": float(self.scheduler.lacking_tokens()),
                "kvbaton_step_token_budget": float(self.model.step_tokens),
                "kvbaton_mixed_step_token_budget": float(self.model.mixed_tokens),
                "kvbaton_blocks_available": float(self.scheduler.blocks.pool.num_free),
                **{f'kvbaton_step_cost_seconds{{term="{t}"}}': cost for t, cost in costs},
                **self.wire_costs.gauges(self.loop.time()),
            },
        )

    def _try_step(self, plan: StepPlan) -> float:
        return float(self.model.step_s(terms_of(plan.steps)) * self._jitter(1)[0])

    def _jitter(self, count: int) -> npt.NDArray[np.float64]:
        """Of so many steps."""
        return np.exp(self.model.jitter * self._rng.standard_normal(count))

    # --- what a router sees of it: an `EngineClient` ---

    def submit(self, request: AddRequest, receiver: OutputReceiver) -> None:
        """As `EngineClient.submit`."""
        self._receivers[request.request_id] = receiver

        def add() -> list[Output]:
            if request.request_id in self._receivers:
                try:
                    self.scheduler.add(request)
                except RequestError as raised:
                    error = raised
                    self._later(lambda: self._end(request.request_id, error))
            return []

        self._later(lambda: self.post(add))

    def cancel(self, request_id: str) -> None:
        """As `EngineClient.cancel`; nothing is sent for what is over."""
        if self._receivers.pop(request_id, None) is not None:
            self._later(lambda: self.post(lambda: self.scheduler.abort(request_id)))

    def _later(self, act: Callable[[], None]) -> None:
        """A message is on its way."""
        self.loop.call_later(self.model.message_s, act)

    def _end(self, request_id: str, error: RequestError | None) -> None:
        receiver = self._receivers.pop(request_id, None)
        if receiver is not None:
            receiver.end(error)
            receiver.flush()

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            receiver = self._receivers.get(output.request_id)
            if receiver is not None:
                receiver.put(output)
                if output.finish_reason is not None:
                    self._end(output.request_id, None)
                else:
                    receiver.flush()

    # --- what a prefix index sees of it: a `FrontendServer` ---

    def tell_watchers(self, changes: tuple[BlockChange, ...], source: CachedBlockSource) -> None:
        """As `FrontendServer.tell_watchers`."""
        number, self._numbers = self._numbers, self._numbers + 1
        if changes or not number:
            message = CachedBlocks(number=number, changes=changes)
            if not number:
                message = CachedBlocks.beginning(source.groups, changes)
            self._later(lambda: self._tell_blocks(self.info, message))

    # --- the core's loop ---

    def post(self, job: Callable[[], list[Output] | None]) -> None:
        """Have something done after the step under way, before its result is applied."""
        self._inbox.append(job)
        if (run := self._run) is not None:
            under_way = int(np.searchsorted(run.ends, self.loop.time(), side="right"))
            if under_way + 1 < run.steps:
                run.steps = under_way + 1
                run.timer.cancel()
                run.timer = self.loop.call_at(float(run.ends[under_way]), self._turn)
        elif not self._turns:
            self._turns = True
            self.loop.call_soon(self._turn)

    def slow(self, cost: tuple[float, float], tokens: int) -> None:
        """As `WiredEngine.slow`."""
        self._slower_s += cost[0] + cost[1] * tokens

    def _turn(self) -> None:
        """Carry out what was posted, apply what is over, plan what is next."""
        run, self._run, self._turns = self._run, None, True
        if run is not None:  # what was posted since has none of the blocks of these steps
            for sequence in run.sequences:
                start = sequence.num_scheduled
                self.scheduler.blocks.extend(sequence.tables, start + run.steps - 1, start=start)
        inbox, self._inbox = self._inbox, []
        for job in inbox:
            self._send(job() or [])
        if run is not None:
            self._send(self._apply(run))
        self._launch()
        self._tell()
        self.connectors.call(KVConnector.flush)
        assert not self._inbox, "an engine posts to others in its turn, and not to itself"
        self._turns = False

    def _launch(self) -> None:
        plan = self.scheduler.plan()
        self._send(self.scheduler.expire(-1.0))  # what could never fit
        if plan is not None:
            self.connectors.call(KVConnector.launched, self.scheduler.in_flight[-1])
        slower_s, self._slower_s = self._slower_s, 0.0
        if plan is None:
            return
        terms, now = terms_of(plan.steps), self.loop.time()
        sequences, more = self._more_steps()
        first = self.model.step_s(terms)
        # Each further step has one token more of context for each sequence.
        each = self.model.costs[4] * terms[3] / 1000
        seconds = first + each * np.arange(1 + more)
        seconds *= self._jitter(1 + more)
        seconds[0] += slower_s
        ends = now + np.cumsum(seconds)
        self._run = Run(plan, terms, now, ends, sequences, 1 + more)
        self._run.timer = self.loop.call_at(float(ends[-1]), self._turn)

    def _more_steps(self) -> tuple[list[Sequence], int]:
        """How many steps could follow the one just planned that differ in lengths alone.

        Returns:
            Who decodes in them, and their number; nobody and 0 if any but decoding goes on.
        """
        (*_, step) = self.scheduler.in_flight
        nobody: list[Sequence] = []
        if len(step.scheduled) != len(self.scheduler.running):
            return nobody, 0
        more, sequences = MOST_STEPS - 1, [scheduled.sequence for scheduled in step.scheduled]
        for scheduled, sequence in zip(step.scheduled, sequences, strict=True):
            decodes = scheduled.end - scheduled.start == 1 and scheduled.targets
            # Second tokens are told at once; last ones come of a step of their own.
            if not decodes or sequence.num_generated < 2:
                return nobody, 0
            more = min(more, self._prompts.left(sequence) - 2)
        blocks, need = self.scheduler.blocks, 0
        if more < 1 or not sequences:
            return nobody, 0
        for sequence in sequences:
            need += blocks.need(sequence.tables, len(sequence.tokens) + more)
        return (sequences, more) if blocks.fits(need) else (nobody, 0)

    def _apply(self, run: Run) -> list[Output]:
        """The steps of a run are over."""
        more = run.steps - 1
        seconds = np.diff(run.ends[: run.steps], prepend=run.begin)
        for number, took in enumerate(seconds.tolist()):
            kv = run.terms[4] + number * run.terms[3] / 1000
            self._costs.observe((*run.terms[:4], kv), took)
            self.scheduler.chunk_limit.observe(run.terms, took)
        self.busy_s += float(run.ends[more]) - run.begin
        self._step_tokens += run.plan.num_tokens + more * len(run.sequences)
        (step, *_) = self.scheduler.in_flight
        sampled = tuple(
            Sampled(
                scheduled.handle,
                tuple(self._prompts.next_token(target) for target in scheduled.targets),
            )
            for scheduled in step.scheduled
            if scheduled.targets
        )
        outputs = self.scheduler.update(StepResult(run.plan.number, sampled))
        first = run.ends[:1]
        for output in outputs:
            self._timings[output.request_id].ends.append(first)
        if more:
            for sequence in run.sequences:
                if sequence.state is SequenceState.RUNNING:
                    self._decode(sequence, more)
                    timing = self._timings[sequence.request.request_id]
                    timing.ends.append(run.ends[1 : run.steps])
        return outputs

    def _decode(self, sequence: Sequence, count: int) -> None:
        """What so many steps make of a decoding sequence, none of them its last."""
        scheduler, start = self.scheduler, sequence.num_scheduled
        tokens = [self._prompts.next_token(sequence)] * count
        self._timings[sequence.request.request_id].unsent += tokens
        sequence.tokens.extend(tokens)
        sequence.sent = [len(table) for table in sequence.tables]
        sequence.num_scheduled = sequence.num_computed = start + count
        scheduler.totals.generated += count
        scheduler.commit(sequence)

    # --- what goes out ---

    def _send(self, outputs: list[Output]) -> None:
        """Tell the router of first, second and last tokens, of those between now and then."""
        for connector in self.connectors:
            outputs = connector.emitted(outputs)
        sent = []
        for output in outputs:
            timing = self._timings.get(output.request_id)
            if timing is None:
                sent.append(output)
            elif output.finish_reason is not None:
                del self._timings[output.request_id]
                if timing.unsent:
                    ids = (*timing.unsent, *output.token_ids)
                    output = msgspec.structs.replace(
                        output, token_ids=ids, index=output.index - len(timing.unsent)
                    )
                times = np.concatenate(timing.ends)
                self.on_tokens(output.request_id, times)
                sent.append(output)
            elif output.index < 2:
                timing.sent = output.index + len(output.token_ids)
                sent.append(output)
            else:
                timing.unsent += output.token_ids
        if sent:
            self._later(lambda: self._deliver(sent))

    def _tell(self) -> None:
        """Tell the router of tokens between."""
        if self.loop.time() < self._tell_at:
            return
        self._tell_at = self.loop.time() + TELL_S
        sent = []
        for request_id, timing in self._timings.items():
            if ids := tuple(timing.unsent):
                sent.append(Output(request_id=request_id, token_ids=ids, index=timing.sent))
                timing.sent += len(ids)
                timing.unsent.clear()
        if sent:
            self._later(lambda: self._deliver(sent))

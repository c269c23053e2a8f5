"""An engine in virtual time: the real scheduler, block pool, prefix cache and step costs.

A step takes as long as `EngineModel` says. Decode-only steps are not planned one by one: until a
request comes or ends, they differ only in sequence lengths. So a run of them is applied at once,
and cut off after the current step when something happens. That is exact, except that routers learn
of the blocks of a run only at its end.
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
MAX_STEPS = 64
"""Maximum number of steps in a run: its cached blocks are reported at its end."""
TELL_S = 0.1
"""Seconds between outputs to the router; second and last tokens are sent at once."""
REPORT_S = 2.0
"""As `engine.core.METRICS_PERIOD_S`."""
IDENTITY = bytes(32)


class Prompts:
    """The requests of a trace by id, with the keys of their blocks, computed once.

    Args:
        root: Root of the keys.
        block_size: Tokens per KV block.
    """

    def __init__(self, root: bytes, block_size: int) -> None:
        self.root, self.block_size = root, block_size
        self.requests: dict[str, TraceRequest] = {}
        self._keys: dict[str, list[bytes]] = {}

    def add(self, name: str, request: TraceRequest, before: str | None) -> TokenIds:
        """Add a request, perhaps a session's next turn; return its prompt."""
        tokens, known = token_ids(request.pieces), list[bytes]()
        if before is not None:
            earlier, keys = self.requests[before], self._keys.pop(before)
            if request.pieces[: len(earlier.pieces)] == earlier.pieces:
                known = keys
        self.requests[name] = request
        self._keys[name] = block_keys(self.root, tokens, self.block_size, parent_keys=known)
        return tokens

    def keys(self, request_id: str) -> list[bytes]:
        """Keys of the whole blocks of a request's prompt, by its id at the router or at a node.

        There are none once the request has ended for its client.
        """
        return self._keys.get(request_id.partition(".")[0], [])

    def next_token(self, sequence: Sequence) -> int:
        """The next token that a sequence generates."""
        request = self.requests[sequence.request.request_id.partition(".")[0]]
        return request.output if self.left(sequence) > 1 else END_TOKEN

    def left(self, sequence: Sequence) -> int:
        """Number of tokens that a sequence has yet to generate."""
        request = self.requests[sequence.request.request_id.partition(".")[0]]
        return request.output_tokens - sequence.num_generated

    def forget(self, name: str) -> None:
        """Forget a request that has ended for its client, and is followed by no other turn."""
        del self._keys[name]


class KnownKeys(KVConnector):
    """Gives sequences the keys of their prompts, which `Prompts` has computed."""

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
    """Steps in progress: a planned one, and further ones like it.

    Attributes:
        plan: Plan of the first step.
        terms: Terms of the first step.
        begin: When the first step began.
        ends: When each step ends.
        sequences: Decoding sequences; empty if the first step does more than decode.
        steps: Number of steps that will be applied.
        timer: Timer of their end.
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
    """When a request's tokens were made at its engine.

    Attributes:
        ends: Times, in chunks.
        sent: Index of the next token to send to the router.
        unsent: Tokens that were not sent to the router yet.
    """

    ends: list[npt.NDArray[np.float64]] = field(default_factory=list)
    sent: int = 0
    unsent: list[int] = field(default_factory=list)


class ModeledEngine:
    """An engine core, and its frontend's end of the socket.

    Args:
        name: Id of the node.
        role: Its role.
        model: Its size and speed.
        loop: Virtual time.
        wires: Wires between engines.
        prompts: Prompts of all requests.
        tell_blocks: Called with changes of its prefix cache.
        seed: Seed of the jitter.

    Attributes:
        busy_s: Seconds of steps.
        on_tokens: Called with (request id, times) when a request's last token was made.
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
            part.contained = False  # its errors are bugs of the simulation
        self.connectors = self.scheduler.connectors = Connectors(parts)
        self._numbers = 0
        self._receivers: dict[str, OutputReceiver] = {}
        self._timings = defaultdict[str, TokenTimes](TokenTimes)
        self._inbox: list[Callable[[], list[Output] | None]] = []
        self._run: Run | None = None
        self._slower_s = 0.0
        self._turns = False

    # --- heartbeats of its node ---

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
        """The node's report now; its engine's figures are updated less often."""
        if self.loop.time() >= self._report_at:
            self._report_at = self.loop.time() + REPORT_S
            self._report = self._measure()
        self.info = self._describe()
        return self.info

    def _measure(self) -> Metrics:
        """As `EngineCore.metrics`, with what a node reports of it."""
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
        """Random factors of `count` steps."""
        return np.exp(self.model.jitter * self._rng.standard_normal(count))

    # --- its interface to a router: an `EngineClient` ---

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
        """As `EngineClient.cancel`; nothing is sent for a request that has ended."""
        if self._receivers.pop(request_id, None) is not None:
            self._later(lambda: self.post(lambda: self.scheduler.abort(request_id)))

    def _later(self, act: Callable[[], None]) -> None:
        """Act after a message's time on the way."""
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

    # --- its interface to a prefix index: a `FrontendServer` ---

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
        """Run a job after the current step, before its result is applied."""
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
        """Run posted jobs, apply finished steps, and plan the next one."""
        run, self._run, self._turns = self._run, None, True
        if run is not None:  # before posted jobs can take blocks of these steps
            for sequence in run.sequences:
                start = sequence.num_scheduled
                self.scheduler.blocks.extend(sequence.tables, start + run.steps - 1, start=start)
        inbox, self._inbox = self._inbox, []
        for job in inbox:
            self._send(job() or [])
        if run is not None:
            self._send(self._apply(run))
        self._launch()
        self._send_unsent()
        self.connectors.call(KVConnector.flush)
        assert not self._inbox, "an engine posts to others in its turn, and not to itself"
        self._turns = False

    def _launch(self) -> None:
        plan = self.scheduler.plan()
        self._send(self.scheduler.expire(-1.0))  # requests that can never fit
        if plan is not None:
            self.connectors.call(KVConnector.launched, self.scheduler.in_flight[-1])
        slower_s, self._slower_s = self._slower_s, 0.0
        if plan is None:
            return
        terms, now = terms_of(plan.steps), self.loop.time()
        sequences, more = self._more_steps()
        first = self.model.step_s(terms)
        # Each further step has one more token of context per sequence.
        each = self.model.costs[4] * terms[3] / 1000
        seconds = first + each * np.arange(1 + more)
        seconds *= self._jitter(1 + more)
        seconds[0] += slower_s
        ends = now + np.cumsum(seconds)
        self._run = Run(plan, terms, now, ends, sequences, 1 + more)
        self._run.timer = self.loop.call_at(float(ends[-1]), self._turn)

    def _more_steps(self) -> tuple[list[Sequence], int]:
        """How many steps could follow the planned one that differ only in lengths.

        Returns:
            Their decoding sequences, and their number; none and 0 if there is work besides
            decoding.
        """
        (*_, step) = self.scheduler.in_flight
        none: list[Sequence] = []
        if len(step.scheduled) != len(self.scheduler.running):
            return none, 0
        more, sequences = MAX_STEPS - 1, [scheduled.sequence for scheduled in step.scheduled]
        for scheduled, sequence in zip(step.scheduled, sequences, strict=True):
            decodes = scheduled.end - scheduled.start == 1 and scheduled.targets
            # Second tokens are sent at once; last ones come from a step of their own.
            if not decodes or sequence.num_generated < 2:
                return none, 0
            more = min(more, self._prompts.left(sequence) - 2)
        blocks, need = self.scheduler.blocks, 0
        if more < 1 or not sequences:
            return none, 0
        for sequence in sequences:
            need += blocks.need(sequence.tables, len(sequence.tokens) + more)
        return (sequences, more) if blocks.fits(need) else (none, 0)

    def _apply(self, run: Run) -> list[Output]:
        """Apply the finished steps of a run."""
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
        """Add the tokens of `count` steps to a decoding sequence, none of them its last one."""
        scheduler, start = self.scheduler, sequence.num_scheduled
        tokens = [self._prompts.next_token(sequence)] * count
        self._timings[sequence.request.request_id].unsent += tokens
        sequence.tokens.extend(tokens)
        sequence.sent = [len(table) for table in sequence.tables]
        sequence.num_scheduled = sequence.num_computed = start + count
        scheduler.totals.generated += count
        scheduler.commit(sequence)

    # --- outputs to the router ---

    def _send(self, outputs: list[Output]) -> None:
        """Send first, second and last tokens to the router; others are sent from time to time."""
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

    def _send_unsent(self) -> None:
        """Send the other tokens to the router, if it is time."""
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

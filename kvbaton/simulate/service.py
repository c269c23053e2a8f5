"""Clients, a router and its nodes in virtual time.

The router's dispatcher, relay, policies, cost model and prefix index are the real ones, on the
virtual clock; the nodes' engines are `ModeledEngine`. Nodes exist from the start, and send a
heartbeat every second.
"""

from __future__ import annotations

import asyncio
import random
import re
import selectors
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry
from typing_extensions import override

from kvbaton.connectors.keys import root_key
from kvbaton.engine.client import EngineClient
from kvbaton.errors import ConfigError, RequestError
from kvbaton.messages.engine import AddRequest, Output, SamplingParams
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.chooser import Decision, RouteChooser
from kvbaton.router.config import RelayTimers, RoutingPolicy
from kvbaton.router.costs import CostModel
from kvbaton.router.dispatch import Dispatcher, RetryBudget
from kvbaton.router.loads import NodeLoads
from kvbaton.router.membership import Membership
from kvbaton.router.metrics import RouterMetrics
from kvbaton.router.nodes import EngineClients, KnownNodes
from kvbaton.router.policies import load_policy
from kvbaton.router.prefix_index import PrefixIndex
from kvbaton.simulate.engine import IDENTITY, ModeledEngine, Prompts
from kvbaton.simulate.engine_model import EngineModel
from kvbaton.simulate.handover import SimulatedWires
from kvbaton.simulate.traces import TraceRequest

T = TypeVar("T")

MAX_TOKENS = 4096
"""`max_tokens` of requests, or their output if longer: routers do not know output lengths in
advance."""
ROLES = {"P": "prefill", "D": "decode", "A": "any"}
MOST_NODES = 64


@dataclass
class RequestRecord:
    """The record of one request.

    Attributes:
        request: The request of the trace.
        begin: When it came.
        ttft_s: Seconds until its first token; None if it had none.
        gaps: Seconds between its tokens.
        cached: Prompt tokens that its prefill node had cached.
        error: Why it failed.
        done: Whether it has ended.
    """

    request: TraceRequest
    begin: float
    ttft_s: float | None = None
    gaps: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    cached: int = 0
    error: str | None = None
    done: bool = False

    def itl_of(self, percentile: float | None = None) -> float:
        """A percentile of the seconds between tokens, or their mean; 0 if there was one token."""
        if not len(self.gaps):
            return 0.0
        return float(
            self.gaps.mean() if percentile is None else np.percentile(self.gaps, percentile)
        )


@dataclass(frozen=True)
class ServiceReport:
    """The result of a simulation.

    Attributes:
        outcomes: Records of all requests, in order.
        seconds: Seconds from the first arrival to the last end.
        busy: By node, share of that time in which it computed.
        decisions: Decisions of the router, in order.
        preemptions: Number of preemptions in all engines.
        leaked: Number of blocks, requests and hand-overs that engines still hold at the end; always
            0.
    """

    outcomes: list[RequestRecord]
    seconds: float
    busy: dict[str, float]
    decisions: list[Decision]
    preemptions: int
    leaked: int


class _NoWait(selectors.SelectSelector):
    """Advances virtual time instead of waiting for descriptors, none of which gets readable."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    @override
    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing is left to happen, and somebody waits")
        if timeout > 0:
            self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`asyncio`'s event loop in virtual seconds from 0; only timers and callbacks work."""

    def __init__(self) -> None:
        self._virtual = _NoWait()
        super().__init__(self._virtual)

    @override
    def time(self) -> float:
        return self._virtual.now


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def parse_nodes(text: str) -> list[str]:
    """Roles of nodes: ``2P2D`` (2 prefill, 2 decode), ``4A`` (any) or both; ``4`` is ``4A``.

    Raises:
        ConfigError: The text is none of these, or names no nodes or too many.
    """
    whole = text if text[-1:] in ROLES else text + "A"
    if not re.fullmatch(r"(\d{1,9}[PDA])+", whole):
        raise ConfigError("--nodes", f"{text!r} is not like 2P2D, 4A or 2P2D1A")
    roles: list[str] = []
    for count, letter in re.findall(r"(\d+)(\D)", whole):
        roles += [ROLES[letter]] * min(int(count), MOST_NODES + 1)
    if not 0 < len(roles) <= MOST_NODES:
        raise ConfigError("--nodes", f"{text!r} are not 1 to {MOST_NODES} nodes")
    return roles


class KnownPrefixIndex(PrefixIndex):
    """A `PrefixIndex` that takes the keys of prompts from `Prompts`."""

    def __init__(self, prompts: Prompts) -> None:
        super().__init__()
        self._prompts = prompts

    @override
    def keys(self, request: AddRequest, root: bytes, block_size: int) -> Iterator[bytes]:
        return iter(self._prompts.keys(request.request_id))


class ModeledEngines(EngineClients):
    """`EngineClients` of simulated engines."""

    def __init__(self, engines: Sequence[ModeledEngine]) -> None:
        super().__init__(None, lambda node, reason: None)
        self._engines = {engine.name: engine for engine in engines}

    @override
    def get(self, node: NodeInfo) -> EngineClient:
        return self._engines[node.node_id]  # type: ignore[return-value]


class SteadyNodes(KnownNodes):
    """Nodes that do not fail."""

    def __init__(self, engines: Sequence[ModeledEngine], index: PrefixIndex | None) -> None:
        super().__init__(Membership(loopback_only=False), None, index)
        self.engines = ModeledEngines(engines)
        for engine in (*engines, *engines):  # the second time, each is told all others
            self.membership.register(engine.info, 0.0)
            self.membership.probed(engine.name, engine.info.generation, None, 0.0)

    @override
    def unreachable(self, node: NodeInfo, error: str) -> None:
        raise AssertionError(f"{node.node_id} can't be reached: {error}")


class _Client:
    """The client of one request: an `OutputReceiver`."""

    def __init__(self, service: _Service, index: int, outcome: RequestRecord) -> None:
        self._service, self._index, self.outcome = service, index, outcome
        self.first_at = 0.0
        self.tokens = 0

    def put(self, output: Output) -> None:
        """See `OutputReceiver`."""
        outcome = self.outcome
        if output.token_ids and outcome.ttft_s is None:
            self.first_at = self._service.loop.time()
            outcome.ttft_s = self.first_at - outcome.begin
        self.tokens += len(output.token_ids)
        outcome.cached = max(outcome.cached, output.cached_tokens)

    def flush(self) -> None:
        """See `OutputReceiver`."""

    def end(self, error: Exception | None) -> None:
        """See `OutputReceiver`."""
        outcome = self.outcome
        assert not outcome.done, "a request ends once"
        outcome.done = True
        if error is not None:
            outcome.error = str(error)
        elif self.tokens != outcome.request.output_tokens:
            outcome.error = f"{self.tokens} tokens instead of {outcome.request.output_tokens}"
        self._service.ended(self._index)


class _Service:
    """A running simulation."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        roles: Sequence[str],
        model: EngineModel,
        settings: RoutingPolicy,
        seed: int,
        deadline_s: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop, self._trace = loop, trace
        self._deadline_s = deadline_s
        self._rng = random.Random(seed)
        self._prompts = Prompts(root_key(IDENTITY, ""), model.block_size)
        wires = self._wires = SimulatedWires(model, loop.call_later, loop.time)
        self.seconds = 0.0
        index = KnownPrefixIndex(self._prompts)
        self.engines = [
            ModeledEngine(
                f"{role}-{number}",
                role,
                model,
                loop,
                wires,
                self._prompts,
                index.take,
                seed + number,
            )
            for number, role in enumerate(roles)
        ]
        costs = CostModel(clock=loop.time)
        policy = load_policy(settings, costs)
        self._nodes = SteadyNodes(self.engines, index if policy.uses_prefixes else None)
        metrics, loads = RouterMetrics(CollectorRegistry()), NodeLoads(clock=loop.time)
        chooser = RouteChooser(self._nodes, loads, policy, metrics, remembered=None)
        self.decisions = chooser.decisions
        timers = RelayTimers(idle_s=1e9, max_retries=0)  # some tokens are sent late
        retries = RetryBudget(settings.retry_budget, loop.time)
        self._dispatcher = Dispatcher(self._nodes, metrics, loads, chooser, timers, retries)
        self.outcomes: dict[int, RequestRecord] = {}
        self._clients: dict[int, _Client] = {}
        self._followers = {r.after: i for i, r in enumerate(trace) if r.after is not None}
        self._left = len(trace)
        self._over = asyncio.Event()
        self._error: BaseException | None = None
        for engine in self.engines:
            engine.on_tokens = self._tokens_made

    async def run(self) -> None:
        """Serve all of the trace."""
        for engine in self.engines:
            self.loop.call_later(self._rng.random(), self._heartbeat, engine)
        for index, request in enumerate(self._trace):
            if request.after is None:
                self.loop.call_at(request.at, self._submit, index)
        self.loop.set_exception_handler(self._broken)
        await self._over.wait()
        if self._error is not None:
            raise self._error
        self.seconds = self.loop.time()
        await asyncio.sleep(1.0)  # messages between engines that are still on the way

    def leaked(self) -> int:
        """See `ServiceReport`."""
        pools = [engine.scheduler.blocks.pool for engine in self.engines]
        return (
            sum(pool.usable - pool.num_free for pool in pools)
            + sum(len(engine.scheduler.requests) for engine in self.engines)
            + len(self._wires.transfers)
        )

    def _heartbeat(self, engine: ModeledEngine) -> None:
        membership = self._nodes.membership
        membership.register(engine.heartbeat(), self.loop.time())
        membership.tick(self.loop.time())
        period = membership.timers.heartbeat_s
        self.loop.call_later(period, self._heartbeat, engine)

    def _broken(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the simulation for a policy's bug: requests that it did not place would never end."""
        self._error = context.get("exception") or RuntimeError(context["message"])
        self._over.set()

    def _submit(self, index: int) -> None:
        request = self._trace[index]
        outcome = self.outcomes[index] = RequestRecord(request, self.loop.time())
        before = None if request.after is None else str(request.after)
        tokens = self._prompts.add(str(index), request, before)
        client = self._clients[index] = _Client(self, index, outcome)
        params = SamplingParams(max_tokens=max(MAX_TOKENS, request.output_tokens), seed=index)
        try:
            self._dispatcher.submit(
                AddRequest(
                    request_id=str(index),
                    token_ids=tokens,
                    params=params,
                    deadline_s=self._deadline_s,
                ),
                client,
            )
        except RequestError as error:
            client.end(error)

    def _tokens_made(self, request_id: str, times: npt.NDArray[np.float64]) -> None:
        """Record token times when an engine has made the last token of its part of a request."""
        client = self._clients.get(int(request_id.partition(".")[0]))
        if client is None:
            return
        wanted = client.outcome.request.output_tokens
        if len(times) == wanted - 1:  # another engine made the first one
            message_s = self.engines[0].model.message_s
            times = np.concatenate(([client.first_at - message_s], times))
        if len(times) == wanted:
            client.outcome.gaps = np.diff(times)

    def ended(self, index: int) -> None:
        """Handle a request's end: the session's next turn may come."""
        del self._clients[index]
        self._left -= 1
        follower = self._followers.get(index)
        failed = self.outcomes[index].error is not None
        while failed and follower is not None:  # a session ends with a request that fails
            self._left -= 1
            follower = self._followers.get(follower)
        if follower is None:
            self._prompts.forget(str(index))
        else:
            self.loop.call_later(self._trace[follower].at, self._submit, follower)
        if not self._left:
            self._over.set()


def simulate(
    trace: Sequence[TraceRequest],
    roles: Sequence[str],
    model: EngineModel,
    settings: RoutingPolicy,
    *,
    seed: int = 0,
    deadline_s: float = 600.0,
) -> ServiceReport:
    """Serve a trace in virtual time.

    Args:
        trace: Requests of clients.
        roles: Roles of the nodes.
        model: Model of each node's engine.
        settings: Policy and objectives.
        seed: Seed of steps' jitter and of heartbeats' phases.
        deadline_s: Seconds after which a request fails.
    """
    services: list[_Service] = []  # not returned: asyncio would print it

    async def serve() -> None:
        services.append(_Service(trace, roles, model, settings, seed, deadline_s))
        await services[0].run()

    run_virtually(serve())
    (service,) = services
    return ServiceReport(
        [service.outcomes[index] for index in sorted(service.outcomes)],
        service.seconds,
        {e.name: e.busy_s / (service.seconds or 1.0) for e in service.engines},
        list(service.decisions),
        sum(engine.scheduler.totals.preemptions for engine in service.engines),
        service.leaked(),
    )

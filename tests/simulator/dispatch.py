"""The simulator's other router: the real one's dispatch, under clients whose requests move.

Real are dispatcher, relay, chooser, table of nodes and engine clients; made up are the policy,
which chooses at random, probes, heartbeats and connections. As requests come, nodes are drained,
paused, told to move what they generate, and cut off from the router, and the router is killed.

What is held beside the laws of nodes:

- A client gets each token once, in order, with its log probabilities, and they are those of an
  undisturbed run, to the same end. It is told the end once.
- Who generates is stopped only after another node has said what follows, or has failed itself.
- What the relay does not heed any more is cancelled at its node.
- In calm weather no request fails, though nodes refuse some of those that are to go on there.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from typing_extensions import override

from kvbaton.engine.client import EngineClient
from kvbaton.errors import RequestError
from kvbaton.messages.engine import (
    AbortRequest,
    AddRequest,
    FromCore,
    Output,
    Outputs,
    SamplingParams,
    ToCore,
)
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.chooser import RouteChooser
from kvbaton.router.config import MembershipTimers, RelayTimers, RoutingPolicy
from kvbaton.router.costs import CostModel
from kvbaton.router.dispatch import Dispatcher, RetryBudget
from kvbaton.router.loads import NodeLoads
from kvbaton.router.membership import Change, Member, Membership
from kvbaton.router.metrics import RouterMetrics
from kvbaton.router.nodes import EngineClients, Nodes
from kvbaton.router.policies import Policy
from kvbaton.router.route import Options, Route
from tests.simulator.executor import logprobs_of, next_token
from tests.simulator.links import EngineLink, SimulatedLoop
from tests.simulator.node import SimulatedNode
from tests.simulator.world import SimulatedWorld

HOST = "router"
CALM_DEADLINE_S = 120.0
MEMBERSHIP = MembershipTimers(heartbeat_s=0.5, probe_period_s=0.5, failures=2, forget_s=20.0)
TIMERS = RelayTimers(idle_s=2.0, finish_grace_s=0.5, move_s=1.5)
CALM_TIMERS = RelayTimers(move_s=5.0)
ENDS_BADLY = frozenset({"timeout", "no_node_ready", "node_failed", "draining"})
"""Codes with which a request may fail where nodes do."""


class RandomPolicy(Policy):
    """Any pair, or any node."""

    uses_prefixes = False

    def __init__(self, world: SimulatedWorld, costs: CostModel) -> None:
        super().__init__(RoutingPolicy(min_fetch_tokens=1), costs)
        self._world = world

    @override
    def choose(self, options: Options) -> Route:
        rng = self._world.rng
        pairs = list(options.pairs)
        if pairs and (not options.singles or rng.random() < 0.4):
            source, target = rng.choice(pairs)
            return Route(target, source)
        return Route(rng.choice(options.singles))


class SimulatedClients(EngineClients):
    """`EngineClients` over simulated connections."""

    def __init__(self) -> None:
        super().__init__(None, lambda node, reason: None)

    def connected(self, node: NodeInfo, client: EngineClient) -> None:
        """There is a connection."""
        self.retire(node.node_id)
        self._clients[node.node_id] = node, client

    def are_idle(self) -> bool:
        """Whether nothing is asked over any, those of nodes that have left included."""
        clients = [*self._retired, *(client for _, client in self._clients.values())]
        return all(client.idle for client in clients)


class SimulatedMembers(Nodes):
    """`Nodes` that are probed in the world."""

    def __init__(self, router: SimulatedDispatch) -> None:
        super().__init__(Membership(MEMBERSHIP, loopback_only=False), cast(Any, None), None)
        self.engines = self.clients = SimulatedClients()
        self._router = router

    def turn(self) -> None:
        """As `_watch` does in each period."""
        self._announce(self.membership.tick(self._router.loop.time()))
        for member in self.membership.probe_targets():
            self._probe_soon(member)

    @override
    def _probe_soon(self, member: Member) -> None:
        self._router.loop.call_later(
            self._router.world.rng.expovariate(100.0), self._probe_now, member.info
        )

    def _probe_now(self, asked: NodeInfo) -> None:
        error = self._router.reach(asked)
        self._announce(
            self.membership.probed(
                asked.node_id,
                asked.generation,
                error,
                self._router.loop.time(),
                answered=False,
            )
        )

    @override
    def _announce(self, changes: list[Change]) -> None:
        for change in changes:
            self._router.world.note(HOST, change.describe())
            if change.lost:
                self._router.given_up.add(change.node_id)
        super()._announce(changes)


class SimulatedClient:
    """Who asked one request, and knows what must come: an `OutputReceiver`."""

    def __init__(self, world: SimulatedWorld, request: AddRequest, model: int) -> None:
        self.world, self.request = world, request
        self.over = False
        self.error: RequestError | None = None
        self.got: list[list[int]] = [[] for _ in range(request.params.n)]
        self.due: list[str | None] = [None] * request.params.n
        self.finished: list[str | None] = [None] * request.params.n
        self._model = model

    def put(self, output: Output) -> None:
        """See `OutputReceiver`."""
        got, params, prompt = self.got[output.choice], self.request.params, self.request.token_ids
        if self.over or self.finished[output.choice] is not None:
            self._fail(f"{output} comes after the end")
        if output.token_ids and output.index != len(got):
            self._fail(f"{output} comes after {len(got)} tokens")
        logprobs = output.logprobs or ()
        if params.logprobs is not None and len(logprobs) != len(output.token_ids):
            self._fail(f"{len(logprobs)} log probabilities of {len(output.token_ids)} tokens")
        for i, token in enumerate(output.token_ids):
            if self.due[output.choice] is not None:
                self._fail(f"{output} goes on after its end")
            known = (*prompt, *got)
            wanted = next_token(known, output.choice, self._model, params, len(prompt))
            if token != wanted:
                self._fail(f"goes on after {len(got)} tokens with {token}, not {wanted}")
            got.append(token)
            if params.logprobs is not None and logprobs[i] != logprobs_of((*known, token)):
                self._fail(f"token {len(got)} has the log probability of another")
            if token in params.stop_token_ids and len(got) >= params.min_tokens:
                self.due[output.choice] = "stop"
            elif len(got) == params.max_tokens:
                self.due[output.choice] = "length"
        # The end may come after the last token, once the target has confirmed it.
        if output.finish_reason not in (None, self.due[output.choice]):
            self._fail(f"{output} does not end as {self.due[output.choice]}")
        self.finished[output.choice] = output.finish_reason

    def flush(self) -> None:
        """See `OutputReceiver`."""

    def end(self, error: Exception | None) -> None:
        """See `OutputReceiver`."""
        if self.over:
            self._fail("ends twice")
        self.over = True
        if error is None and not all(self.finished):
            self._fail(f"ends after {self.got}")
        if error is not None:
            self.world.note(self.request.request_id, error)
            assert isinstance(error, RequestError), f"a client is told {error!r}"
            self.error = error

    def _fail(self, what: str) -> None:
        self.world.fail(f"request {self.request.request_id}: {what}")


class SimulatedDispatch:
    """One life of the router.

    Args:
        world: its time and its luck.
        nodes: that live now, by name.
        later: does something later; there is no rest before.

    Attributes:
        clients: who asked something, by request id.
        given_up: nodes that were taken for lost.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        nodes: Mapping[str, SimulatedNode],
        later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self.world, self._nodes, self._later = world, nodes, later
        self.clients: dict[str, SimulatedClient] = {}
        self.totals = Counter[str]()
        self._num_links = 0
        self._begin()

    def _begin(self) -> None:
        """A life begins."""
        self.given_up: set[str] = set()
        self.links: dict[str, EngineLink] = {}
        self._unheard: dict[str, float] = {}
        self.loop = SimulatedLoop(self.world)  # type: ignore[abstract]
        asyncio.events._set_running_loop(self.loop)
        self.members = SimulatedMembers(self)
        metrics, loads = RouterMetrics(CollectorRegistry()), NodeLoads(clock=self.loop.time)
        policy = RandomPolicy(self.world, CostModel(clock=self.loop.time))
        chooser = RouteChooser(self.members, loads, policy, metrics)
        timers = CALM_TIMERS if self.world.weather.calm else TIMERS
        budget = RetryBudget(1.0, self.loop.time)
        self.dispatcher = Dispatcher(self.members, metrics, loads, chooser, timers, budget)
        self._told_at: dict[tuple[EngineLink, str], float] = {}
        self._next: dict[tuple[EngineLink, str, int], int] = {}
        self._over: set[tuple[EngineLink, str]] = set()
        self._turn(self.loop)

    def _turn(self, loop: SimulatedLoop) -> None:
        """Hear of all nodes, and probe them, once in a period."""
        for name in self._nodes:
            self.heartbeat(name)
        self.members.turn()
        loop.call_later(MEMBERSHIP.probe_period_s, self._turn, loop)

    def heartbeat(self, name: str) -> None:
        """A node introduces itself, if it can."""
        node = self._nodes[name]
        if not self._is_there(node) or self.world.now < self._unheard.get(name, 0.0):
            return
        roles = {(True, True): "any", (True, False): "prefill", (False, True): "decode"}
        info = NodeInfo(
            node_id=name,
            generation=str(node.generation),
            role=roles[node.shape.is_source, node.shape.is_target],
            url=f"http://127.0.0.1/{name}",
            model="simulated",
            control_address=node.address,
            identity=node.identity.hex(),
            transport="simulated",
            block_size=node.shape.groups[0][0],
            state="draining" if node.draining else "ready",
        )
        try:
            told = self.members.register(info)
        except RequestError as error:  # it was removed, or its former life is not over yet
            self.world.note(name, error)
            return
        self.world.soon(lambda: node.set_members(list(told.control_addresses)), 0.01)

    def _is_there(self, node: SimulatedNode) -> bool:
        until = self.world.cut_until.get(frozenset((HOST, node.host)), 0.0)
        return node.alive and not node.stopped and until <= self.world.now

    def reach(self, info: NodeInfo) -> str | None:
        """Probe a node, and connect to its engine; why that failed, if it did."""
        node = self._nodes[info.node_id]
        if str(node.generation) != info.generation or not self._is_there(node):
            return "no answer to a probe in time"
        if not self.members.clients.reached(info):
            self._num_links += 1
            members, number = self.members, self._num_links

            def lost(reason: str) -> None:
                members.unreachable(info, reason)

            link = EngineLink(self.world, self.loop, HOST, node, number, lost)
            link.asked, link.hears, link.heard = self._asked, self._hears, self._heard
            self.links[info.node_id] = link
            members.clients.connected(info, link.client)
            self.given_up.discard(info.node_id)
        return None

    # --- what happens ---

    def plan(self) -> None:
        """Draw requests, moves and faults, and when they come."""
        rng, weather = self.world.rng, self.world.weather
        bases = [tuple(rng.randrange(50) for _ in range(12)) for _ in range(2)]
        bursts = [rng.uniform(0.0, weather.heal_at * 0.6) for _ in range(2)]
        for number in range(rng.randint(4, 9)):
            tokens = (*rng.choice(bases)[: rng.choice([0, 6, 12])], rng.randrange(50))
            tokens += tuple(rng.randrange(50) for _ in range(rng.randint(0, 6)))
            penalties = rng.choice([0.0, 0.5, 1.5]), rng.choice([0.0, 0.7])
            params = SamplingParams(
                max_tokens=rng.randint(4, 28),
                n=rng.choice([1] * 9 + [2]),
                seed=rng.choice([None, 1, 7, 8]),
                temperature=rng.choice([0.0, 0.7]),
                presence_penalty=penalties[0],
                frequency_penalty=penalties[1],
                repetition_penalty=rng.choice([1.0, 1.3]),
                top_k=rng.choice([0, 0, 2, 3]),
                stop_token_ids=rng.choice([(), (1,), tuple(range(40, 48))]),
                min_tokens=rng.choice([0, 0, 4]),
                logprobs=rng.choice([None, 1]),
            )
            deadline_s = CALM_DEADLINE_S if weather.calm else rng.choice([4.0, 8.0])
            request = AddRequest(
                request_id=f"r{number}",
                token_ids=array("I", tokens),
                params=params,
                deadline_s=deadline_s,
            )
            at = 0.2 + rng.choice(bursts)
            self._later(at, lambda request=request: self._submit(request))  # type: ignore[misc]
            if rng.random() < 0.25:
                at += rng.expovariate(2.0)
                self._later(at, lambda request=request: self._cancel(request))  # type: ignore[misc]
        for _ in range(rng.randint(6, 14)):
            self._later(0.2 + rng.choice(bursts) + rng.expovariate(1.0), self._move)
        at = 0.0
        while weather.violence and at < weather.heal_at:
            at += rng.expovariate(weather.violence / 2)
            self.world.after(min(at, weather.heal_at), self._strike)

    def _submit(self, request: AddRequest) -> None:
        self.world.offset = 0.0
        if request.params.seed is None:  # it mints one of its own, which nobody could repeat
            seed = self.world.rng.randrange(2, 1 << 30)
            request = replace(request, params=replace(request.params, seed=seed))
        model = next(iter(self._nodes.values())).shape.model
        client = self.clients[request.request_id] = SimulatedClient(self.world, request, model)
        self.world.note(HOST, request)
        try:
            self.dispatcher.submit(request, client)
        except RequestError as error:
            client.end(error)

    def _cancel(self, request: AddRequest) -> None:
        client = self.clients.get(request.request_id)
        if client is not None and not client.over:
            self.world.offset = 0.0
            self.world.note(HOST, f"the client of {request.request_id} leaves")
            client.over = True
            self.world.clients_left += 1
            self.dispatcher.cancel(request.request_id)

    def _move(self) -> None:
        """An operator wants something of a node."""
        rng, name = self.world.rng, self.world.rng.choice(list(self._nodes))
        targets = [running.relay.target for running in self.dispatcher.running.values()]
        busy = [asked.node.node_id for asked in targets if asked is not None]
        if busy and rng.random() < 0.8:
            name = rng.choice(busy)
        what = rng.choice(["migrate"] * 6 + ["drain", "pause", "resume", "resume"])
        self.world.offset = 0.0
        self.world.note(HOST, f"{what} {name}")
        try:
            if what == "migrate":
                self.members.migrate(name)
            elif what == "drain" and not self.world.weather.calm:
                self.members.drain(name)
                if rng.random() < 0.5:  # an operator who asks twice
                    self._later(rng.uniform(0.0, 0.5), lambda: self._drain_again(name))
            elif what in ("pause", "resume"):
                self.members.pause(name, paused=what == "pause" and not self.world.weather.calm)
        except RequestError as error:  # no such node, yet or any more
            self.world.note(HOST, error)

    def _drain_again(self, name: str) -> None:
        if name in self.members.membership.members:
            self.world.offset = 0.0
            self.members.drain(name)

    def _strike(self) -> None:
        """Something befalls the router, or one of its connections."""
        world, rng = self.world, self.world.rng
        name = rng.choice(list(self._nodes))
        kind = rng.choice(["cut off", "cut off", "break", "lose heartbeats", "kill"])
        if world.now >= world.weather.heal_at:
            return
        world.note(HOST, (kind, name))
        link = self.links.get(name)
        if kind == "cut off":
            seconds = rng.uniform(0.1, 3.0)
            world.cut_until[frozenset((HOST, name))] = world.now + seconds
            if link is not None:
                link.silent(seconds)
        elif kind == "break" and link is not None:
            link.sever()
        elif kind == "lose heartbeats":
            self._unheard[name] = world.now + rng.uniform(0.5, 4.0)
        elif kind == "kill" and rng.random() < 0.3:
            self._die()

    def _die(self) -> None:
        """The router is killed; its clients see that, and another life of it begins."""
        self.loop.alive = False
        for link in self.links.values():
            link.sever()
        for client in self.clients.values():
            client.over = True
        self._count_moves()
        self._begin()

    # --- laws ---

    def _asked(self, link: EngineLink, message: ToCore) -> None:
        """The router asks a node something: see that it stops nobody too early."""
        self.world.note(HOST, (link.node.name, message))
        if not isinstance(message, AbortRequest):
            return
        name, _, number = message.request_id.rpartition(".")
        running, key = self.dispatcher.running.get(name), (link, message.request_id)
        if running is None or running.relay.done or key not in self._told_at:
            return
        if key in self._over or link.node.name in self.given_up:
            return
        if self.loop.time() - self._told_at[key] >= self.dispatcher.timers.idle_s:
            return
        asked = next(a for a in running._calls if a.request.request_id == message.request_id)
        later = [told.rpartition(".") for _, told in self._told_at]
        follows = any(one == name and int(other) > int(number) for one, _, other in later)
        if asked.side == "target" and not follows:
            self.world.fail(f"{message.request_id} generates, and is stopped before another does")

    def _hears(self, link: EngineLink, message: FromCore) -> None:
        """The router is about to read what a node says."""
        self.world.note(f"{link.node.name} to {HOST}", message)
        if isinstance(message, Outputs):
            for output in message.outputs:
                key = link, output.request_id
                place = *key, output.choice
                if output.token_ids:
                    self._told_at[key] = self.loop.time()
                skipped = output.index > self._next.get(place, output.index)
                if output.finish_reason is not None or skipped:
                    self._over.add(key)  # what was lost on the way nobody can go on from
                self._next[place] = output.index + len(output.token_ids)

    def _heard(self) -> None:
        """The router has read what a node said: nobody is left to do what nobody heeds."""
        for name, running in self.dispatcher.running.items():
            if any("the router failed" in line for line in running.relay.story):
                self.world.fail(f"{name}: {running.relay.story}")
            heeded = running.relay._open
            for asked, call in running._calls.items():
                if not call.done and asked not in heeded:
                    self.world.fail(f"{name}: {asked.side} {asked.node.node_id} goes on unheeded")

    def unrest(self) -> list[str]:
        """What is left to happen, or to be let go of."""
        open_now = [name for name, client in self.clients.items() if not client.over]
        found = [f"clients without an answer: {open_now}"] if open_now else []
        places = {
            "requests": self.dispatcher.running,
            "nodes that are being left": self.dispatcher._leaving,
            "load": self.dispatcher.loads.own,
        }
        found += [f"the router's {name}: {what}" for name, what in places.items() if what]
        if not self.members.clients.are_idle():
            found.append("the router waits for answers of nodes")
        return found

    def check_ends(self) -> None:
        """See that requests failed only where they may."""
        weather = self.world.weather
        for name, client in self.clients.items():
            error = client.error
            if error is None:
                self.totals["finished"] += all(client.finished)
            elif weather.calm:
                self.world.fail(f"request {name} fails with no reason to: {error!r}")
            elif error.code not in ENDS_BADLY:
                self.world.fail(f"request {name} fails with code {error.code}: {error!r}")
            else:
                self.totals[error.code] += 1
        self._count_moves()

    def _count_moves(self) -> None:
        for (outcome,), count in self.dispatcher.metrics.moves.counts.items():
            self.totals[f"moves {outcome}"] += int(count)

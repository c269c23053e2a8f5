"""Which nodes a request is given to: one small class per policy, found by name (``--policy``).

Others come as entry points of group ``kvbaton.policies``, or by a dotted path
``package.module:Class``; each is a `Policy`.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from typing import ClassVar

from typing_extensions import override

from kvbaton.errors import ConfigError
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.config import RoutingPolicy
from kvbaton.router.costs import CostModel, Decode, Prefill
from kvbaton.router.route import Options, Pair, Route

BUILT_IN = {
    "cost": "kvbaton.router.policies:LeastCost",
    "least-loaded": "kvbaton.router.policies:LeastLoaded",
    "prefix-aware": "kvbaton.router.policies:PrefixAware",
    "round-robin": "kvbaton.router.policies:RoundRobin",
    "sticky": "kvbaton.router.policies:Sticky",
    "threshold": "kvbaton.router.policies:Threshold",
}
GROUP = "kvbaton.policies"
SATURATED_TOKENS = 8192
"""`Sticky` leaves a node that has so many more prompt tokens queued than the least loaded one,"""
SATURATED_SEQUENCES = 16
"""or so many more sequences."""
MISSED_S = 30.0
"""A request that misses an objective counts as so many seconds."""
CERTAINTY = 8.0
"""What is expected to take half its objective misses it once in 2 to this power."""
NO_ROOM_S = 5.0
"""What a node without room for a request costs it."""


class Policy(ABC):
    """Chooses.

    Args:
        settings: as the user decided them.
        costs: what nodes say of their speed, and what was observed.

    Attributes:
        uses_prefixes: `Options.cached` is filled in.
    """

    uses_prefixes: ClassVar[bool] = True

    def __init__(self, settings: RoutingPolicy, costs: CostModel) -> None:
        self.settings = settings
        self.costs = costs

    @abstractmethod
    def choose(self, options: Options) -> Route:
        """The nodes for one request."""


class LeastLoaded(Policy):
    """The pair with the fewest tokens to prefill, then the fewest sequences.

    A node of a pair that does both counts what it has of the other kind last.
    """

    uses_prefixes = False

    @override
    def choose(self, options: Options) -> Route:
        if options.pairs and options.num_tokens >= self.settings.min_handover_tokens:
            source, target = min(options.pairs, key=lambda pair: self.pair_rank(options, pair))
            return Route(target, source, cached=options.hit(source))
        node = min(options.singles, key=lambda node: self.single_rank(options, node))
        return Route(node, cached=options.hit(node))

    def pair_rank(self, options: Options, pair: Pair) -> tuple[float | str, ...]:
        """The lowest is chosen."""
        source, target = map(options.load, pair)
        ids = pair[0].node_id, pair[1].node_id
        there = target.prompt_tokens, target.sequences, target.tokens
        return source.prompt_tokens, *there, source.sequences, *ids

    def single_rank(self, options: Options, node: NodeInfo) -> tuple[float | str, ...]:
        """The lowest is chosen."""
        load, other_role = options.load(node), node.role == "prefill"
        return other_role, load.sequences, load.prompt_tokens, load.tokens, node.node_id


class RoundRobin(Policy):
    """One after the other."""

    uses_prefixes = False

    def __init__(self, settings: RoutingPolicy, costs: CostModel) -> None:
        super().__init__(settings, costs)
        self._turn = -1

    @override
    def choose(self, options: Options) -> Route:
        self._turn += 1
        if options.pairs and options.num_tokens >= self.settings.min_handover_tokens:
            sources = _by_id({source.node_id: source for source, _ in options.pairs})
            source = sources[self._turn % len(sources)]
            targets = _by_id({d.node_id: d for s, d in options.pairs if s is source})
            # Both go round; with equal numbers of them each would always meet the same.
            target = targets[(self._turn + self._turn // len(sources)) % len(targets)]
            return Route(target, source)
        singles = _by_id({node.node_id: node for node in options.singles})
        return Route(singles[self._turn % len(singles)])


def _by_id(nodes: Mapping[str, NodeInfo]) -> list[NodeInfo]:
    return [nodes[node_id] for node_id in sorted(nodes)]


class PrefixAware(LeastLoaded):
    """As `LeastLoaded`, by the tokens to prefill with this request: what is cached is none."""

    uses_prefixes = True

    @override
    def pair_rank(self, options: Options, pair: Pair) -> tuple[float | str, ...]:
        source, target = map(options.load, pair)
        to_do = source.prompt_tokens + options.new(pair[0])
        ids = pair[0].node_id, pair[1].node_id
        there = target.prompt_tokens, target.sequences, target.tokens - options.hit(pair[1])
        return to_do, *there, source.sequences, *ids

    @override
    def single_rank(self, options: Options, node: NodeInfo) -> tuple[float | str, ...]:
        load, other_role = options.load(node), node.role == "prefill"
        to_do = load.prompt_tokens + options.new(node)
        return other_role, to_do, load.sequences, load.tokens, node.node_id


class Sticky(LeastLoaded):
    """The node that has most of the prompt cached, until it is saturated."""

    uses_prefixes = True

    @override
    def choose(self, options: Options) -> Route:
        held = dict(options.cached)
        for node_id in self._saturated(options):
            held.pop(node_id, None)
        return super().choose(replace(options, cached=held))

    @staticmethod
    def _saturated(options: Options) -> Iterator[str]:
        """Nodes that have much more to do than another of their role."""
        least: dict[str, tuple[int, int]] = {}
        for node in options.singles:
            load = options.load(node)
            tokens, sequences = least.get(node.role, (load.prompt_tokens, load.sequences))
            least[node.role] = min(tokens, load.prompt_tokens), min(sequences, load.sequences)
        for node in options.singles:
            load, (tokens, sequences) = options.load(node), least[node.role]
            beyond = load.prompt_tokens - tokens, load.sequences - sequences
            if beyond[0] >= SATURATED_TOKENS or beyond[1] >= SATURATED_SEQUENCES:
                yield node.node_id

    @override
    def pair_rank(self, options: Options, pair: Pair) -> tuple[float | str, ...]:
        held = -options.hit(pair[0]), -options.hit(pair[1])
        return *held, *super().pair_rank(options, pair)

    @override
    def single_rank(self, options: Options, node: NodeInfo) -> tuple[float | str, ...]:
        return -options.hit(node), *super().single_rank(options, node)


class Threshold(PrefixAware):
    """A pair for prompts of which `min_handover_tokens` or more are new everywhere, else one node.

    Without that setting it is 512.
    """

    MIN_TOKENS = 512

    @override
    def choose(self, options: Options) -> Route:
        limit = self.settings.min_handover_tokens or self.MIN_TOKENS
        node = min(options.singles, key=lambda node: self.single_rank(options, node), default=None)
        if options.pairs and (node is None or options.new(node) >= limit):
            source, target = min(options.pairs, key=lambda pair: self.pair_rank(options, pair))
            return Route(target, source, cached=options.hit(source))
        assert node is not None, "there is a pair or a node"
        return Route(node, cached=options.hit(node))


class LeastCost(Policy):
    """The least seconds for the request and for those already there, as `CostModel` predicts them.

    A request waits for its first token and for as many more as requests have of late. With
    objectives (``--ttft-slo``, ``--itl-slo``) each request that is expected to miss one counts as
    many seconds more, by how likely that is; so a request that is late anyway goes where it makes
    nobody else late. While no node has measured anything it chooses as `PrefixAware`.
    """

    def __init__(self, settings: RoutingPolicy, costs: CostModel) -> None:
        super().__init__(settings, costs)
        self._unmeasured = PrefixAware(settings, costs)

    @override
    def choose(self, options: Options) -> Route:
        if not options.measured:
            return self._unmeasured.choose(options)
        costs, output_tokens = self.costs, options.output_tokens(self.costs)
        ttft_slo, itl_slo = self.settings.ttft_slo, self.settings.itl_slo
        least_pair, least_single = math.inf, math.inf
        pair: Pair | None = None
        single: NodeInfo | None = None
        # What does not depend on the other node of a pair, once per node.
        prefills: dict[str, tuple[Prefill, float]] = {}
        delays: dict[str, float] = {}
        held: dict[str, float] = {}

        def prefill(node: NodeInfo) -> tuple[Prefill, float]:
            if node.node_id not in prefills:
                expected = options.prefill(costs, node)
                # Whoever comes next waits for this prompt, too.
                cost = expected.ttft_s + expected.work_s + _missed(expected.ttft_s, ttft_slo)
                prefills[node.node_id] = expected, cost
            return prefills[node.node_id]

        def generate(decode: Decode, work_s: float) -> float:
            # For the request, and for the sequences there, which may wait for its prompt.
            cost = output_tokens * decode.itl_s
            cost += (_missed(decode.itl_s, itl_slo) + self._missed_if_short(decode)) / 2
            if decode.sequences:
                cost += decode.sequences * self._delay(decode, decode.slower_s, work_s)
            return cost + (0.0 if decode.room else NO_ROOM_S)

        def delay(node: NodeInfo, expected: Prefill) -> float:
            # Of sequences where the prompt of a pair is computed.
            if not expected.decoding:
                return 0.0
            if node.node_id not in delays:
                there = options.decode(costs, node, math.inf)
                each = self._delay(there, 0.0, expected.work_s)
                delays[node.node_id] = expected.decoding * each
            return delays[node.node_id]

        for source, target in options.pairs:
            expected, cost = prefill(source)
            cost += delay(source, expected) + costs.handover(source, target)
            cost += generate(options.decode(costs, target, expected.ttft_s), 0.0)
            if target.node_id not in held:
                held[target.node_id] = options.held_s(costs, target)
            cost += max(0.0, held[target.node_id] - expected.ttft_s)
            if cost < least_pair:
                least_pair, pair = cost, (source, target)
        others = [node for node in options.singles if node.role != "prefill"]
        for node in others or options.singles:  # a prefill node generates if nobody else can
            expected, cost = prefill(node)
            cost += generate(options.decode(costs, node, math.inf), expected.work_s)
            if cost < least_single:
                least_single, single = cost, node
        short = options.num_tokens < self.settings.min_handover_tokens
        if pair is not None and (single is None or (least_pair <= least_single and not short)):
            chosen = Route(pair[1], pair[0])
        else:
            assert single is not None, "there is a pair or a node"
            chosen = Route(single)
        return replace(
            chosen,
            cached=options.hit(chosen.prefills),
            pair_cost_s=least_pair if pair is not None else None,
            single_cost_s=least_single if single is not None else None,
        )

    def _missed_if_short(self, decode: Decode) -> float:
        """Of a text of few tokens, which come all beside prompts, or none of them."""
        slo, share = self.settings.itl_slo, decode.prefill_share
        between = decode.step_s + decode.backlog_s / self.costs.short_output
        return share * _missed(decode.chunk_s, slo) + (1 - share) * _missed(between, slo)

    def _delay(self, there: Decode, slower_s: float, work_s: float) -> float:
        """What it costs a sequence that steps take longer, and that it waits for a prompt once."""
        tokens, slo, itl_s = self.costs.output_tokens, self.settings.itl_slo, there.others_s
        missed = _missed(itl_s + slower_s + work_s / tokens, slo) - _missed(itl_s, slo)
        return tokens * slower_s + work_s + missed


def _missed(seconds: float, objective_ms: float | None) -> float:
    """What it costs that something is expected to take so long: likelihood of a miss times cost."""
    if objective_ms is None:
        return 0.0
    return MISSED_S / (1.0 + math.pow(objective_ms / 1e3 / max(seconds, 1e-6), CERTAINTY))


def load_policy(settings: RoutingPolicy, costs: CostModel) -> Policy:
    """The policy that ``--policy`` names.

    Raises:
        ConfigError: there is none of that name, or it can't be imported.
    """
    name = settings.policy
    points = {point.name: point.value for point in entry_points(group=GROUP)}
    path = {**points, **BUILT_IN}.get(name, name)
    module, _, attribute = path.partition(":")
    try:
        if not attribute:
            raise ImportError(f"known: {sorted({**points, **BUILT_IN})}, or package.module:Class")
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError("--policy", f"{name!r} can't be loaded: {error}") from error
    if not isinstance(found, type) or not issubclass(found, Policy):
        raise ConfigError("--policy", f"{path} is no Policy")
    return found(settings, costs)

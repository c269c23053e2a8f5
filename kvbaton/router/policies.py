"""Which nodes a request is given to: one small class per policy, found by name (``--policy``).

Others come as entry points of group ``kvbaton.policies``, or by a dotted path
``package.module:Class``; each is a `Policy`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from operator import itemgetter
from typing import Any, ClassVar

from msgspec.structs import replace
from typing_extensions import override

from kvbaton.engine.chunk_limit import AIM, IN_TIME
from kvbaton.errors import ConfigError, import_failure
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.config import RoutingPolicy
from kvbaton.router.costs import CostModel
from kvbaton.router.objectives import (
    MISSED_S,
    ItlObjective,
    MeanItl,
    PercentileItl,
    likely,
    missed_s,
)
from kvbaton.router.predictions import Decode, Prefill
from kvbaton.router.role_plan import RolePlan
from kvbaton.router.route import Options, Pair, Route

GROUP = "kvbaton.policies"
SATURATED_TOKENS = 8192
"""`Sticky` leaves a node that has so many more prompt tokens queued than the least loaded one,"""
SATURATED_SEQUENCES = 16
"""or so many more sequences."""
NO_ROOM_S = 5.0
"""What a node without room for a request costs it."""

Rank = tuple[Any, ...]
"""Numbers, then ids of nodes."""


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
        if options.pairs.sources and options.num_tokens >= self.settings.min_handover_tokens:
            source, target = self.best_pair(options)
            return Route(target, source, cached=options.hit(source))
        node = min(options.singles, key=lambda node: self.single_rank(options, node))
        return Route(node, cached=options.hit(node))

    def best_pair(self, options: Options) -> Pair:
        """The pair of the lowest rank. Which target is best for a source is the same for all."""
        ranked = options.pairs.targets
        if len(ranked) > 1:
            ranks = ((*self.target_rank(options, node), node.node_id, node) for node in ranked)
            ranked = [rank[-1] for rank in sorted(ranks)]
        return min(options.pairs.best(ranked), key=partial(self.pair_rank, options))

    def target_rank(self, options: Options, target: NodeInfo) -> Rank:
        """What `pair_rank` has of the target but its id, in that order."""
        load = options.load(target)
        return load.prompt_tokens, load.sequences, load.tokens

    def pair_rank(self, options: Options, pair: Pair) -> Rank:
        """The lowest is chosen."""
        load, there = options.load(pair[0]), self.target_rank(options, pair[1])
        ids = pair[0].node_id, pair[1].node_id
        return load.prompt_tokens, *there, load.sequences, *ids

    def single_rank(self, options: Options, node: NodeInfo) -> Rank:
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
        if options.pairs.sources and options.num_tokens >= self.settings.min_handover_tokens:
            sources = sorted(options.pairs.sources, key=lambda source: source[0].node_id)
            source, able = sources[self._turn % len(sources)]
            targets = _by_id(node for node in options.pairs.targets if node.node_id in able)
            # Both go round; with equal numbers of them each would always meet the same.
            target = targets[(self._turn + self._turn // len(sources)) % len(targets)]
            return Route(target, source)
        singles = _by_id(options.singles)
        return Route(singles[self._turn % len(singles)])


def _by_id(nodes: Iterable[NodeInfo]) -> list[NodeInfo]:
    return sorted(nodes, key=lambda node: node.node_id)


class PrefixAware(LeastLoaded):
    """As `LeastLoaded`, by the tokens to prefill with this request: what is cached is none."""

    uses_prefixes = True

    @override
    def target_rank(self, options: Options, target: NodeInfo) -> Rank:
        load = options.load(target)
        return load.prompt_tokens, load.sequences, load.tokens - options.hit(target)

    @override
    def pair_rank(self, options: Options, pair: Pair) -> Rank:
        to_do, *rest = super().pair_rank(options, pair)
        return to_do + options.new(pair[0]), *rest

    @override
    def single_rank(self, options: Options, node: NodeInfo) -> Rank:
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
    def target_rank(self, options: Options, target: NodeInfo) -> Rank:
        return -options.hit(target), *super().target_rank(options, target)

    @override
    def pair_rank(self, options: Options, pair: Pair) -> Rank:
        to_do, held, *rest = super().pair_rank(options, pair)
        return -options.hit(pair[0]), held, to_do, *rest

    @override
    def single_rank(self, options: Options, node: NodeInfo) -> Rank:
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
        if options.pairs.sources and (node is None or options.new(node) >= limit):
            source, target = self.best_pair(options)
            return Route(target, source, cached=options.hit(source))
        assert node is not None, "there is a pair or a node"
        return Route(node, cached=options.hit(node))


class _KeptApart(PrefixAware):
    """Where nodes may do both, those that generate compute no prompts as long as others can."""

    @override
    def target_rank(self, options: Options, target: NodeInfo) -> Rank:
        load = options.load(target)
        goes_on = target.role == "any" and 0 < load.sequences < SATURATED_SEQUENCES
        return bool(load.prompt_tokens), not goes_on, *super().target_rank(options, target)

    @override
    def pair_rank(self, options: Options, pair: Pair) -> Rank:
        return options.load(pair[0]).sequences > 0, *super().pair_rank(options, pair)


class LeastCost(Policy):
    """The least seconds for the request and for those already there, as `CostModel` predicts them.

    A request waits for its first token and for as many more as requests have of late. With
    objectives (``--ttft-slo``, ``--itl-slo``) each request that is expected to miss one counts as
    many seconds more, by how likely that is; so a request that is late anyway goes where it makes
    nobody else late. While no node has measured anything it chooses as `PrefixAware`, and keeps
    nodes apart that generate.
    """

    def __init__(self, settings: RoutingPolicy, costs: CostModel) -> None:
        super().__init__(settings, costs)
        self._unmeasured = _KeptApart(settings, costs)
        self._itl: ItlObjective | None = None
        if slo_s := _seconds(settings.itl_slo):
            self._itl = MeanItl(slo_s, costs)
            if settings.itl_percentile is not None:
                self._itl = PercentileItl(slo_s, settings.itl_percentile, costs)
            chunks = AIM * costs.max_itl_s, IN_TIME * costs.ttft_slo_s
            costs.roles = RolePlan(slo_s, self._itl.forgiven, *chunks)

    @override
    def choose(self, options: Options) -> Route:
        if not options.measured:
            return self._unmeasured.choose(options)
        self.costs.plan_roles(options.loads, options.num_tokens)
        prices = _Prices(options, self.costs, self.settings, self._itl)
        least_pair, pair = prices.cheapest_pair()
        least_single, single = prices.cheapest_single()
        short = options.num_tokens < self.settings.min_handover_tokens
        source: NodeInfo | None = None
        if pair is not None and (single is None or (least_pair <= least_single and not short)):
            source, target = pair
        else:
            assert single is not None, "there is a pair or a node"
            target = single
        return prices.route(
            source,
            target,
            least_pair if pair is not None else None,
            least_single if single is not None else None,
        )


class _Prices:
    """What the nodes that there are would cost one request, each part computed once.

    Args:
        options: of the request.
        costs: of nodes.
        settings: with the objective of first tokens.
        itl: the objective of those after it, if there is one.
    """

    def __init__(
        self,
        options: Options,
        costs: CostModel,
        settings: RoutingPolicy,
        itl: ItlObjective | None,
    ) -> None:
        self._options = options
        self._costs = costs
        self._ttft_slo, self._itl = _seconds(settings.ttft_slo), itl
        self._output_tokens = options.output_tokens
        self._generating = costs.roles.generating if costs.roles is not None else frozenset[str]()
        self._prefills: dict[str, tuple[Prefill, float]] = {}
        self._decodes: dict[str, tuple[Decode, float, float, float]] = {}
        self._targets: dict[str, tuple[float, float, float]] = {}
        self._besides: dict[str, float] = {}

    def cheapest_pair(self) -> tuple[float, Pair | None]:
        """The cheapest pair and its seconds; of several the first.

        A pair costs at least what its source does without delaying others, and what its target
        does if neither a hand-over nor prompts there delay anything. Likely sources and cheap
        targets come first, so that most sources and pairs are left out by that bound.
        """
        options, costs = self._options, self._costs
        targets = [
            (*self._target(node), place, node) for place, node in enumerate(options.pairs.targets)
        ]
        targets.sort(key=_bound_and_place)
        least = targets[0][0] if targets else 0.0
        if self._itl is not None:  # who is late anyway misses nothing more
            least = min((bound - missed for bound, _, missed, _, _ in targets), default=0.0)
        # Who waits least, and then has most of it, first: most others need not be asked.
        sources = [
            (options.wait_s(costs, node), options.new(node), place, node, able)
            for place, (node, able) in enumerate(options.pairs.sources)
        ]
        sources.sort(key=itemgetter(0, 1, 2))
        cheapest, place_of = math.inf, (0, 0)
        pair: Pair | None = None
        for wait_s, _, place, source, able in sources:
            if wait_s + least > cheapest:
                break
            expected, cost = self._prefill(source)
            late = expected.late
            if cost + (least if late else targets[0][0]) > cheapest:
                continue
            delay = self._delay(source, expected.decoding, 0.0, expected.work_s)
            before, ttft_s = cost + delay, expected.ttft_s
            for after, others, missed, spot, target in targets:
                bound = before + after - (missed if late else 0.0)
                if bound > cheapest:
                    if late:  # they are in order of costs with what it would miss
                        continue
                    break
                if target.node_id not in able or (bound == cheapest and (place, spot) > place_of):
                    continue
                total = cost + (delay + costs.handover(source, target))
                total += self._beside(source) + self._beside(target)
                decode, own_s, _, _ = self._decode(target)
                if decode.queued_s > ttft_s:  # what is left of it then comes in between
                    own_s, missed = self._own(target, options.decode(costs, target, ttft_s))
                total += own_s + others
                total += self._room(target, ttft_s) if late else missed
                # Its last blocks come while the target is in a step, and then wait for the next.
                wire_s = costs.wire_s(source, target, options.new(target), expected)
                total += max(wire_s, options.held_s(costs, target) - ttft_s)
                if total < cheapest or (total == cheapest and (place, spot) < place_of):
                    cheapest, pair, place_of = total, (source, target), (place, spot)
        return cheapest, pair

    def cheapest_single(self) -> tuple[float, NodeInfo | None]:
        """The cheapest node that serves alone and its seconds; of several the first.

        It costs at least what it does as a target, so that most need not be asked for the prompt.
        """
        singles, cheapest, place_of = self._options.singles, math.inf, 0
        single: NodeInfo | None = None
        others = [node for node in singles if node.role != "prefill"]
        # A prefill node generates if nobody else can.
        ordered = [
            (*self._target(node), place, node) for place, node in enumerate(others or singles)
        ]
        ordered.sort(key=_bound_and_place)
        for bound, _, missed, place, node in ordered:
            if bound - missed > cheapest:
                continue
            expected, cost = self._prefill(node)
            decode, own, _, _ = self._decode(node)
            if decode.queued_s > expected.ttft_s:  # late ones, which come after it
                after = self._options.decode(self._costs, node, expected.ttft_s)
                own, missed = self._own(node, after)
            if not expected.late:
                own += missed
            cost += own + self._delay(node, decode.sequences, decode.slower_s, expected.work_s)
            if cost < cheapest or (cost == cheapest and place < place_of):
                cheapest, single, place_of = cost, node, place
        return cheapest, single

    def route(
        self,
        source: NodeInfo | None,
        target: NodeInfo,
        pair_s: float | None,
        single_s: float | None,
    ) -> Route:
        """With what is expected of it, and what the best pair and the best single node cost."""
        prefill, _ = self._prefill(source or target)
        options, holder, held = self._options, prefill.holder, prefill.held
        margins = [] if prefill.saved_s is None else [abs(prefill.saved_s)]
        if pair_s is not None and single_s is not None:
            margins.append(single_s - pair_s if source is not None else pair_s - single_s)
        margin_s = min(margins, default=None)
        route = Route(
            target,
            source,
            cached=options.hit(source or target),
            holder=holder,
            held=held,
            margin_s=margin_s,
            pair_cost_s=pair_s,
            single_cost_s=single_s,
        )
        return replace(route, predicted=options.predict(self._costs, route, prefill))

    def _prefill(self, node: NodeInfo) -> tuple[Prefill, float]:
        """Of a node that computes the prompt, and its cost: whoever comes next waits, too.

        Without an objective so do all who come while this one waits. Where nodes only generate, the
        texts to come miss as much as if one missed its objective.
        """
        found = self._prefills.get(node.node_id)
        if found is None:
            expected = self._options.prefill(self._costs, node)
            cost = expected.ttft_s + expected.work_s + missed_s(expected.risk_s, self._ttft_slo)
            if self._ttft_slo is None:
                cost += expected.work_s * expected.wait_s * self._costs.prompts_per_s(node)
            if node.node_id in self._generating:
                cost += MISSED_S
            found = self._prefills[node.node_id] = expected, cost
        return found

    def _decode(self, node: NodeInfo) -> tuple[Decode, float, float, float]:
        """Of a node that generates once all prompts there are computed.

        Returns:
            What is expected, what it costs the request in seconds and in what it misses, and what
            a sequence there may miss anyway.
        """
        found = self._decodes.get(node.node_id)
        if found is None:
            decode = self._options.decode(self._costs, node, math.inf)
            anyway = self._itl.there(decode) if self._itl is not None else 0.0
            found = self._decodes[node.node_id] = decode, *self._own(node, decode), anyway
        return found

    def _target(self, node: NodeInfo) -> tuple[float, float, float]:
        """What generating on a node costs at least.

        Returns:
            All; of that, others, whose steps it slows; and what the request misses.
        """
        found = self._targets.get(node.node_id)
        if found is None:
            decode, own, missed, _ = self._decode(node)
            others = self._delay(node, decode.sequences, decode.slower_s, 0.0)
            found = self._targets[node.node_id] = own + missed + others, others, missed
        return found

    def _own(self, node: NodeInfo, decode: Decode) -> tuple[float, float]:
        """What it costs a request to be generated for on a node: seconds, and what it misses.

        The latter is nothing to one whose first token is late: it has missed its objectives. Where
        nothing is generated prompts to come are computed first, however few came there of late,
        unless some nodes only generate.
        """
        cost, itl, options = self._output_tokens * decode.itl_s, self._itl, self._options
        missed = itl.own(decode) if itl is not None else 0.0
        free = node.role == "any" and options.loads and not options.load(node).sequences
        if itl is not None and free and not self._generating:
            missed += itl.met(decode)
        if decode.room:
            return cost, missed
        if itl is not None:
            missed = max(missed, itl.waiting(NO_ROOM_S, self._output_tokens))
        return cost + NO_ROOM_S, missed

    def _room(self, target: NodeInfo, seconds: float) -> float:
        """What it costs others that a prompt has room at a target for as long as it is late.

        Those that are given to it meanwhile may find none.
        """
        load = self._options.load(target)
        none_left = likely(load.taken(target, self._options.num_tokens), 1.0)
        none_left -= likely(load.taken(target), 1.0)
        each, itl = NO_ROOM_S, self._itl
        if itl is not None:
            each += itl.waiting(NO_ROOM_S, self._costs.output_tokens)
        return seconds * self._costs.targets_per_s(target) * none_left * each

    def _beside(self, node: NodeInfo) -> float:
        """What it costs the sequences of a node that the prompt's KV leaves it, or comes there."""
        found = self._besides.get(node.node_id)
        if found is None:
            there, found = self._decode(node)[0], 0.0
            if there.sequences:
                each = slower_s = self._costs.beside_s(node, self._options.num_tokens)
                if self._itl is not None:
                    each += self._itl.coming(there, 0.0, slower_s)
                found = there.sequences * each
            self._besides[node.node_id] = found
        return found

    def _delay(self, node: NodeInfo, sequences: float, slower_s: float, work_s: float) -> float:
        """What it costs sequences that steps take longer, and that they wait for one more prompt.

        That is, after those that they wait for anyway: prompts of which each alone would make
        nobody miss an objective do so together. As many wait as are there, and as come while the
        prompt is computed, half of it on average: of short texts these are far more. Beside who
        decodes a prompt is computed for about twice as long as it takes. Where chunks of it fit,
        nobody waits for it.
        """
        if self._costs.chunks_fit:
            work_s = 0.0
        coming = work_s * self._costs.targets_per_s(node) if work_s else 0.0
        if not sequences and not coming:
            return 0.0
        there, _, _, anyway = self._decode(node)
        each, itl = self._costs.output_tokens * slower_s + work_s, self._itl
        if itl is None:
            return (sequences + coming) * each
        cost = sequences * (each + itl.there(there, slower_s, work_s) - anyway)
        return cost + coming * itl.coming(there, slower_s, work_s / 2) if coming else cost


_bound_and_place = itemgetter(0, 3)


def _seconds(objective_ms: float | None) -> float | None:
    return None if objective_ms is None else objective_ms / 1e3


BUILT_IN: dict[str, type[Policy]] = {
    "cost": LeastCost,
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
    "round-robin": RoundRobin,
    "sticky": Sticky,
    "threshold": Threshold,
}


def load_policy(settings: RoutingPolicy, costs: CostModel) -> Policy:
    """The policy that ``--policy`` names.

    Raises:
        ConfigError: there is none of that name, or it can't be imported.
    """
    name = settings.policy
    found: Any = BUILT_IN.get(name)
    if found is None:  # to find others the metadata of all packages is read
        points = {point.name: point for point in entry_points(group=GROUP)}
        if name not in points and ":" not in name:
            known = ", ".join(sorted({*BUILT_IN, *points}))
            problem = f"unknown policy {name!r}; known are {known}, or package.module:Class"
            raise ConfigError("--policy", problem)
        try:
            found = points.get(name, EntryPoint(name, name, GROUP)).load()
        except (Exception, SystemExit) as error:  # whatever its module does when it is imported
            problem = f"can't load {name}: {import_failure(error)}"
            raise ConfigError("--policy", problem) from error
    if not isinstance(found, type) or not issubclass(found, Policy):
        raise ConfigError("--policy", f"{name} is no Policy")
    costs.ttft_slo_s = _seconds(settings.ttft_slo) or math.inf
    costs.max_itl_s = _seconds(settings.max_itl) or math.inf
    return found(settings, costs)

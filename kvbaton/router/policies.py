"""Routing policies: one small class per value of ``--policy``, each choosing nodes for a request.

Others are entry points of group ``kvbaton.policies``, or named by a dotted path
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

from kvbaton.errors import ConfigError, import_failure
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.config import RoutingPolicy
from kvbaton.router.costs import CostModel
from kvbaton.router.predictions import Decode, Prefill
from kvbaton.router.route import Options, Pair, Route

GROUP = "kvbaton.policies"
SATURATED_TOKENS = 8192
"""`Sticky` leaves a node that has this many more queued prompt tokens than the least loaded one."""
SATURATED_SEQUENCES = 16
"""`Sticky` leaves a node that has this many more sequences than the least loaded one."""
NO_ROOM_S = 5.0
"""Cost in seconds of a node that has no room for a request."""
MISSED_S = 30.0
"""Cost of a request that misses an objective, in seconds."""
CERTAINTY = 8.0
"""Exponent of the miss probability: a prediction of half the objective misses it about once in 2 to
this power."""

Rank = tuple[Any, ...]
"""Numbers, then node ids; the lowest rank is chosen."""


class Policy(ABC):
    """Chooses nodes for requests.

    Args:
        settings: Settings of the router's user.
        costs: Step costs that nodes report, and what was observed.

    Attributes:
        uses_prefixes: Whether `Options.cached` is to be filled in.
    """

    uses_prefixes: ClassVar[bool] = True

    def __init__(self, settings: RoutingPolicy, costs: CostModel) -> None:
        self.settings = settings
        self.costs = costs

    @abstractmethod
    def choose(self, options: Options) -> Route:
        """Choose the nodes for one request."""


class LeastLoaded(Policy):
    """The pair with the fewest tokens to prefill, then the fewest sequences.

    For a node of role ``any``, load of the other kind (decoding on the source, prompts on the
    target) only breaks ties.
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
        """The pair of the lowest rank; the order of targets is the same for all sources."""
        ranked = options.pairs.targets
        if len(ranked) > 1:
            ranks = ((*self.target_rank(options, node), node.node_id, node) for node in ranked)
            ranked = [rank[-1] for rank in sorted(ranks)]
        return min(options.pairs.best(ranked), key=partial(self.pair_rank, options))

    def target_rank(self, options: Options, target: NodeInfo) -> Rank:
        """The target's part of `pair_rank`, in that order, without its id."""
        load = options.load(target)
        return load.prompt_tokens, load.sequences, load.tokens

    def pair_rank(self, options: Options, pair: Pair) -> Rank:
        """Rank of a pair."""
        load, target_rank = options.load(pair[0]), self.target_rank(options, pair[1])
        ids = pair[0].node_id, pair[1].node_id
        return load.prompt_tokens, *target_rank, load.sequences, *ids

    def single_rank(self, options: Options, node: NodeInfo) -> Rank:
        """Rank of a node that serves the request alone."""
        load, other_role = options.load(node), node.role == "prefill"
        return other_role, load.sequences, load.prompt_tokens, load.tokens, node.node_id


class RoundRobin(Policy):
    """Sources, targets and single nodes take turns."""

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
            # Both rotate: with equal numbers, each source would always get the same target.
            target = targets[(self._turn + self._turn // len(sources)) % len(targets)]
            return Route(target, source)
        singles = _by_id(options.singles)
        return Route(singles[self._turn % len(singles)])


def _by_id(nodes: Iterable[NodeInfo]) -> list[NodeInfo]:
    return sorted(nodes, key=lambda node: node.node_id)


class PrefixAware(LeastLoaded):
    """As `LeastLoaded`, by the tokens to prefill with this request; cached ones do not count."""

    uses_prefixes = True

    @override
    def target_rank(self, options: Options, target: NodeInfo) -> Rank:
        load = options.load(target)
        return load.prompt_tokens, load.sequences, load.tokens - options.hit(target)

    @override
    def pair_rank(self, options: Options, pair: Pair) -> Rank:
        to_prefill, *rest = super().pair_rank(options, pair)
        return to_prefill + options.new(pair[0]), *rest

    @override
    def single_rank(self, options: Options, node: NodeInfo) -> Rank:
        load, other_role = options.load(node), node.role == "prefill"
        to_prefill = load.prompt_tokens + options.new(node)
        return other_role, to_prefill, load.sequences, load.tokens, node.node_id


class Sticky(LeastLoaded):
    """The node that has most of the prompt cached, unless it is saturated."""

    uses_prefixes = True

    @override
    def choose(self, options: Options) -> Route:
        held = dict(options.cached)
        for node_id in self._saturated(options):
            held.pop(node_id, None)
        return super().choose(replace(options, cached=held))

    @staticmethod
    def _saturated(options: Options) -> Iterator[str]:
        """Ids of nodes that have much more to do than another node of their role."""
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
        to_prefill, held, *rest = super().pair_rank(options, pair)
        return -options.hit(pair[0]), held, to_prefill, *rest

    @override
    def single_rank(self, options: Options, node: NodeInfo) -> Rank:
        return -options.hit(node), *super().single_rank(options, node)


class Threshold(PrefixAware):
    """A pair for prompts with `min_handover_tokens` or more tokens that no node has, else one node.

    The default of that setting is 512 here.
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
    """As `PrefixAware`, but nodes of role ``any`` that decode get no prompts while others can."""

    @override
    def target_rank(self, options: Options, target: NodeInfo) -> Rank:
        load = options.load(target)
        decodes = target.role == "any" and 0 < load.sequences < SATURATED_SEQUENCES
        return bool(load.prompt_tokens), not decodes, *super().target_rank(options, target)

    @override
    def pair_rank(self, options: Options, pair: Pair) -> Rank:
        return options.load(pair[0]).sequences > 0, *super().pair_rank(options, pair)


class LeastCost(Policy):
    """The route with the least seconds for the request and for those in flight, by `CostModel`.

    A request waits for its first token and for as many more as recent requests generated. With
    objectives (``--ttft-slo``, ``--itl-slo``) a predicted miss costs seconds in proportion to its
    probability. So a request that is late anyway goes where it makes no other request late. With an
    ITL objective, nodes compute prompts in chunks that keep it (`engine.chunk_limit`), so no prompt
    makes a sequence miss it: only too many sequences at a node do. Until nodes have measured their
    steps, it chooses as `PrefixAware` and keeps prompts from nodes that decode.
    """

    def __init__(self, settings: RoutingPolicy, costs: CostModel) -> None:
        super().__init__(settings, costs)
        self._unmeasured = _KeptApart(settings, costs)

    @override
    def choose(self, options: Options) -> Route:
        if not options.measured:
            return self._unmeasured.choose(options)
        prices = _Prices(options, self.costs, self.settings)
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
    """Costs of one request at the nodes, each part computed once.

    Args:
        options: Options of the request.
        costs: Costs of nodes.
        settings: Settings, with the objectives.
    """

    def __init__(self, options: Options, costs: CostModel, settings: RoutingPolicy) -> None:
        self._options = options
        self._costs = costs
        self._ttft_slo, self._itl_slo = _seconds(settings.ttft_slo), _seconds(settings.itl_slo)
        self._output_tokens = options.output_tokens
        self._prefills: dict[str, tuple[Prefill, float]] = {}
        self._decodes: dict[str, tuple[Decode, float, float, float]] = {}
        self._targets: dict[str, tuple[float, float, float]] = {}
        self._handover_costs: dict[str, float] = {}

    def cheapest_pair(self) -> tuple[float, Pair | None]:
        """Cost in seconds of the cheapest pair, and that pair; the first of several.

        Lower bounds prune the search: a source costs at least its prefill without delays to others,
        a target at least its decoding if neither a hand-over nor queued prompts delay anything.
        Promising sources and cheap targets come first, so most others are never priced in full.
        """
        options, costs = self._options, self._costs
        targets = [
            (*self._target(node), place, node) for place, node in enumerate(options.pairs.targets)
        ]
        targets.sort(key=_bound_and_place)
        least = targets[0][0] if targets else 0.0
        if self._itl_slo is not None:  # a request that is late anyway misses nothing more
            least = min((bound - missed for bound, _, missed, _, _ in targets), default=0.0)
        # Where chunks keep the ITL objective, hand-overs between nodes of role any would only even
        # out queues, and sequences would gather at one node, until its chunks are too small.
        alone = self._itl_slo is not None and options.singles
        # Least wait first, then most of the prompt cached: most other sources are left out.
        sources = [
            (options.wait_s(costs, node), options.new(node), place, node, able)
            for place, (node, able) in enumerate(options.pairs.sources)
            if not alone or node.role == "prefill"
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
            delay = self._delay_cost(source, expected.decoding, 0.0, expected.work_s)
            before, ttft_s = cost + delay, expected.ttft_s
            for after, others, missed, target_place, target in targets:
                bound = before + after - (missed if late else 0.0)
                if bound > cheapest:
                    if late:  # targets are sorted by costs that include misses
                        continue
                    break
                if target.node_id not in able or (
                    bound == cheapest and (place, target_place) > place_of
                ):
                    continue
                total = cost + (delay + costs.handover(source, target))
                total += self._handover_cost(source) + self._handover_cost(target)
                decode, own_s, _, _ = self._decode(target)
                if decode.queued_s > ttft_s:  # the rest of that prefill delays the sequence
                    own_s, missed = self._own_cost(options.decode(costs, target, ttft_s))
                total += own_s + others
                total += self._held_room_cost(target, ttft_s) if late else missed
                # The last blocks come while the target runs a step, and wait for the next one.
                wire_s = costs.wire_s(source, target, options.new(target), expected)
                total += max(wire_s, options.step_wait_s(costs, target) - ttft_s)
                if total < cheapest or (total == cheapest and (place, target_place) < place_of):
                    cheapest, pair, place_of = total, (source, target), (place, target_place)
        return cheapest, pair

    def cheapest_single(self) -> tuple[float, NodeInfo | None]:
        """Cost in seconds of the cheapest single node, and that node; the first of several.

        A node costs at least what it costs as a target, so prefill is predicted at few of them.
        """
        singles, cheapest, place_of = self._options.singles, math.inf, 0
        single: NodeInfo | None = None
        others = [node for node in singles if node.role != "prefill"]
        # A prefill node decodes only if no other node can.
        ordered = [
            (*self._target(node), place, node) for place, node in enumerate(others or singles)
        ]
        ordered.sort(key=_bound_and_place)
        for bound, _, missed, place, node in ordered:
            if bound - missed > cheapest:
                continue
            expected, cost = self._prefill(node)
            decode, own, _, _ = self._decode(node)
            if decode.queued_s > expected.ttft_s:  # deferred prompts, which are computed later
                after = self._options.decode(self._costs, node, expected.ttft_s)
                own, missed = self._own_cost(after)
            if not expected.late:
                own += missed
            cost += own + self._delay_cost(node, decode.sequences, decode.slower_s, expected.work_s)
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
        """The route with its prediction and the costs of the best pair and best single node."""
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
        """Prediction for a node that computes the prompt, and its cost to this and later requests.

        The prompt delays the next request by its own work; without a TTFT objective, all requests
        that come while it waits.
        """
        found = self._prefills.get(node.node_id)
        if found is None:
            expected = self._options.prefill(self._costs, node)
            missed = expected.late_share * miss_cost(expected.risk_s, self._ttft_slo)
            cost = expected.ttft_s + expected.work_s + missed
            if self._ttft_slo is None:
                cost += expected.work_s * expected.wait_s * self._costs.prompts_per_s(node)
            found = self._prefills[node.node_id] = expected, cost
        return found

    def _decode(self, node: NodeInfo) -> tuple[Decode, float, float, float]:
        """Prediction for a node that decodes after all prompts that are queued there.

        Returns:
            The prediction; its cost to the request, in seconds and in misses; and the misses of a
            sequence that is there already.
        """
        found = self._decodes.get(node.node_id)
        if found is None:
            decode = self._options.decode(self._costs, node, math.inf)
            present = miss_cost(decode.others_s, self._itl_slo) if decode.sequences else 0.0
            found = self._decodes[node.node_id] = decode, *self._own_cost(decode), present
        return found

    def _target(self, node: NodeInfo) -> tuple[float, float, float]:
        """Lower bound for the cost of decoding on a node.

        Returns:
            Total; of that, the cost to other sequences, whose steps get longer; and the request's
            misses.
        """
        found = self._targets.get(node.node_id)
        if found is None:
            decode, own, missed, _ = self._decode(node)
            others = self._delay_cost(node, decode.sequences, decode.slower_s, 0.0)
            found = self._targets[node.node_id] = own + missed + others, others, missed
        return found

    def _own_cost(self, decode: Decode) -> tuple[float, float]:
        """Cost to a request of decoding on a node: seconds, and misses.

        Misses do not count if the first token is late: the request has missed its objectives then.
        """
        cost, missed = self._output_tokens * decode.itl_s, miss_cost(decode.step_s, self._itl_slo)
        if decode.room:
            return cost, missed
        stalled = miss_cost(NO_ROOM_S / self._output_tokens, self._itl_slo)
        return cost + NO_ROOM_S, max(missed, stalled)

    def _held_room_cost(self, target: NodeInfo, seconds: float) -> float:
        """Cost to others of the room that a late prompt holds at a target for `seconds`.

        Sequences that are given to the target meanwhile may find none.
        """
        load = self._options.load(target)
        none_left = exceed_probability(load.taken(target, self._options.num_tokens), 1.0)
        none_left -= exceed_probability(load.taken(target), 1.0)
        each = NO_ROOM_S + miss_cost(NO_ROOM_S / self._costs.output_tokens, self._itl_slo)
        return seconds * self._costs.targets_per_s(target) * none_left * each

    def _handover_cost(self, node: NodeInfo) -> float:
        """Cost to the sequences of a node of the prompt's KV that leaves it or comes to it."""
        found = self._handover_costs.get(node.node_id)
        if found is None:
            (decode, _, _, present), found = self._decode(node), 0.0
            if decode.sequences:
                each = slower_s = self._costs.handover_slowdown_s(node, self._options.num_tokens)
                each += miss_cost(decode.others_s + slower_s, self._itl_slo) - present
                found = decode.sequences * each
            self._handover_costs[node.node_id] = found
        return found

    def _delay_cost(
        self, node: NodeInfo, sequences: float, slower_s: float, work_s: float
    ) -> float:
        """Cost to a node's sequences of longer steps and, without an ITL objective, of a prompt.

        Sequences that arrive while it is computed wait, too, for half of it on average; if
        sequences are short, most of those that wait arrive so. These count with all of its work:
        beside decoding, prefill takes about twice as long.
        """
        each = self._costs.output_tokens * slower_s
        if self._itl_slo is None:
            arriving = work_s * self._costs.targets_per_s(node) if work_s else 0.0
            return (sequences + arriving) * (each + work_s)
        if not sequences or not slower_s:
            return 0.0
        decode, _, _, present = self._decode(node)
        return sequences * (each + miss_cost(decode.others_s + slower_s, self._itl_slo) - present)


_bound_and_place = itemgetter(0, 3)


def miss_cost(seconds: float, objective_s: float | None) -> float:
    """Cost of something predicted to take `seconds`: probability of a miss times `MISSED_S`."""
    return 0.0 if objective_s is None else MISSED_S * exceed_probability(seconds, objective_s)


def exceed_probability(seconds: float, objective_s: float) -> float:
    """Probability that what is predicted to be `seconds` exceeds an objective."""
    if seconds < 1e-6:
        return 0.0
    return 1.0 / (1.0 + math.pow(min(objective_s / seconds, 1e9), CERTAINTY))


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
        ConfigError: There is no policy of that name, or it can't be imported.
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

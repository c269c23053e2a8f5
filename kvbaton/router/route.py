"""The nodes of one attempt, and what there was to choose from."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set

from msgspec import Struct
from msgspec.structs import replace
from typing_extensions import override

from kvbaton.errors import RequestError
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.costs import CostModel
from kvbaton.router.loads import IDLE, NodeLoad
from kvbaton.router.predictions import Decode, Prediction, Prefill

MAX_HOLDERS = 2
"""So many are compared, if several could send a prefix."""
Pair = tuple[NodeInfo, NodeInfo]
"""Source and target."""


class Pairs(Collection[Pair]):
    """Who can hand over to whom.

    Args:
        sources: each with the ids of those that it can hand over to; one without any is left out.
        targets: all of those; pairs come by source, and in this order.

    Attributes:
        count: of pairs.
    """

    def __init__(
        self, sources: Sequence[tuple[NodeInfo, Set[str]]], targets: Sequence[NodeInfo]
    ) -> None:
        self.sources = [(source, able) for source, able in sources if able]
        wanted = set[str]().union(*(able for _, able in self.sources))
        self.targets = [node for node in targets if node.node_id in wanted]
        self.count = sum(map(len, (able for _, able in self.sources)))

    def without(self, avoid: Set[str], targets: Set[str] = frozenset()) -> Pairs:
        """Those in which no node of these ids takes part, and of the others' none is the target."""
        out = avoid | targets
        left = [(node, able - out) for node, able in self.sources if node.node_id not in avoid]
        return Pairs(left, self.targets)

    def best(self, ranked: Sequence[NodeInfo]) -> Iterator[Pair]:
        """Of each source the pair with the first of its targets in `ranked`, which has them all."""
        for source, able in self.sources:
            yield source, next(node for node in ranked if node.node_id in able)

    @override
    def __contains__(self, pair: object) -> bool:
        return any(pair == known for known in self)

    @override
    def __iter__(self) -> Iterator[Pair]:
        for source, able in self.sources:
            for target in self.targets:
                if target.node_id in able:
                    yield source, target

    @override
    def __len__(self) -> int:
        return self.count


class Route(Struct, frozen=True):
    """The nodes that serve one attempt.

    Attributes:
        target: the node that generates.
        source: the node that prefills for it; None if the target serves the request alone.
        encoders: per item of the prompt, the node that encodes it; None where the one that
            prefills does so, or has the output already. Empty is None for all.
        cached: tokens of the prompt that the node which prefills is known to hold.
        holder: another node that has more, from which it is to fetch them; None if it needs none.
        held: tokens of the prompt that the holder is known to hold.
        predicted: what is expected of it; None while no node has measured anything.
        margin_s: what the next best way would have cost more: without the prefix that is fetched
            (or with it, if it is not), or by a single node instead of a pair (or the other way
            round), by a policy that counts in seconds; None if there is no other way.
        pair_cost_s: of the cheapest pair, by a policy that counts in seconds.
        single_cost_s: of the cheapest single node, likewise.
    """

    target: NodeInfo
    source: NodeInfo | None = None
    encoders: tuple[NodeInfo | None, ...] = ()
    cached: int = 0
    holder: NodeInfo | None = None
    held: int = 0
    predicted: Prediction | None = None
    margin_s: float | None = None
    pair_cost_s: float | None = None
    single_cost_s: float | None = None

    @property
    def prefills(self) -> NodeInfo:
        """The node that computes the prompt."""
        return self.source or self.target

    def having(self, num_tokens: int) -> Route:
        """The same once the node that prefills has so many tokens."""
        return replace(self, cached=num_tokens, holder=None, held=0, predicted=None)


def no_node_ready() -> RequestError:
    """Nobody is left to choose: 503."""
    return RequestError(
        "No node is ready to serve this request; retry shortly.", status=503, code="no_node_ready"
    )


class Options(Struct, frozen=True):
    """What there is to choose from, for one request.

    Attributes:
        pairs: (source, target) that can hand over.
        singles: nodes that may serve it alone; there is one, or a pair.
        loads: in flight, by node id; a node without an entry is idle.
        num_tokens: of the prompt, with what was generated elsewhere.
        output_tokens: that the request is expected to generate.
        cached: tokens of the prompt that nodes hold, by node id; empty for a policy that does not
            use prefixes.
        since: by node id, when it began the prompt that it computes, on the monotonic clock.
        holders: nodes of which some of the prompt may be fetched, most of it first: with ids of
            those that may fetch it, and the tokens that they hold.
        min_fetch_tokens: fewer that need not be computed are not worth it.
        measured: nodes have said how fast they are, so that what they do can be predicted.
    """

    pairs: Pairs
    singles: Sequence[NodeInfo]
    loads: Mapping[str, NodeLoad]
    num_tokens: int
    output_tokens: float
    cached: Mapping[str, int] = {}
    since: Mapping[str, float] = {}
    measured: bool = False
    holders: Sequence[tuple[NodeInfo, Set[str], int]] = ()
    min_fetch_tokens: int = 0

    def load(self, node: NodeInfo) -> NodeLoad:
        """What a node has in flight."""
        return self.loads.get(node.node_id, IDLE)

    def hit(self, node: NodeInfo) -> int:
        """Tokens that a node holds; the last one is computed in any case."""
        return min(self.cached.get(node.node_id, 0), self.num_tokens - 1) if self.cached else 0

    def new(self, node: NodeInfo) -> int:
        """Tokens that a node would compute."""
        return self.num_tokens - self.hit(node)

    def wait_s(self, costs: CostModel, node: NodeInfo) -> float:
        """Until a first token at least, by the prompts that a node has already."""
        load = self.loads.get(node.node_id)
        if load is None or not load.prefill_us:
            return 0.0
        return costs.wait_s(node, load, self.since.get(node.node_id))

    def prefill(self, costs: CostModel, node: NodeInfo) -> Prefill:
        """What is expected of a node that computes the prompt."""
        since, hit = self.since.get(node.node_id), self.hit(node)
        others = self.holders_for(node) if self.holders else ()
        return costs.prefill(node, self.load(node), since, self.num_tokens - hit, hit, others)

    def holders_for(self, node: NodeInfo) -> list[tuple[NodeInfo, int]]:
        """Of whom a node may fetch enough of a prompt to be worth it, and what it has then."""
        name = node.node_id
        own = self.cached.get(name, 0)
        least, found = own + self.min_fetch_tokens, []
        for holder, able, held in self.holders:
            if held < least:
                break
            limits = holder.prompt_limits
            if limits is not None and limits.lent is not None:
                held = min(held, own + limits.lent)
            if name in able and held >= least:
                found.append((holder, held))
                if len(found) == MAX_HOLDERS:
                    break
        return found

    def decode(self, costs: CostModel, node: NodeInfo, after_s: float) -> Decode:
        """What is expected of a node that generates once the prompt is computed."""
        load, since, alone = self.load(node), self.since.get(node.node_id), not self.loads
        tokens, expected = self.num_tokens, self.output_tokens
        return costs.decode(node, load, since, tokens, expected, after_s=after_s, alone=alone)

    def held_s(self, costs: CostModel, node: NodeInfo) -> float:
        """Until a node that generates can take a sequence into a step."""
        return costs.held_s(node, self.load(node), self.since.get(node.node_id))

    def predict(self, costs: CostModel, route: Route, prefill: Prefill) -> Prediction:
        """What is expected of a route.

        Args:
            costs: of nodes.
            route: the nodes.
            prefill: what is expected of the one that prefills.
        """
        decode, wire_s = self.decode(costs, route.target, prefill.ttft_s), 0.0
        delay_s = decode.sequences * decode.slower_s * self.output_tokens
        if route.source is not None:
            wire_s = costs.wire_s(route.source, route.target, self.new(route.target), prefill)
        else:  # the node's other sequences wait for the prompt
            delay_s += prefill.decoding * prefill.work_s
        return Prediction(
            prefill.ttft_s,
            decode.itl_s,
            decode.step_s,
            delay_s,
            prefill.model_s,
            prefill.wait_s,
            prefill.work_s,
            prefill.fetch_s,
            wire_s,
            full=prefill.risk_s > costs.ttft_slo_s,
            late=prefill.late,
        )

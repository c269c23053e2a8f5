"""Chooses nodes for requests, keeps the reasons, and feeds observed times back to the policy."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest, Item
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.choose import Wanted, choose, successor
from kvbaton.router.encoded_items import EncodedItems
from kvbaton.router.loads import IDLE, NodeLoads
from kvbaton.router.metrics import RouterMetrics
from kvbaton.router.nodes import KnownNodes
from kvbaton.router.policies import Policy
from kvbaton.router.predictions import Prediction
from kvbaton.router.route import Route

MAX_RETRY_AFTER_S = 60.0
REMEMBERED = 256
"""Number of decisions that are kept for `GET /debug/routes`."""
PARTS_OF_TTFT = ("model_s", "wait_s")
"""Fields of a decision that its one-line description leaves out."""
NAMED = 4
"""Maximum number of left-out nodes that are named in a header."""


class Decision(Struct, kw_only=True):
    """Why a request went to its nodes, and how far off the predictions were.

    Attributes:
        request_id: Id of the request at nodes.
        policy: Policy that chose.
        target: Id of the node that decodes.
        source: Id of the node that prefills for it; None if the target does.
        num_tokens: Tokens of the prompt.
        cached_tokens: Prompt tokens that the prefill node is known to hold.
        holder: Id of the node that it fetches a prefix from; None if it fetches none.
        held_tokens: Prompt tokens that the holder is known to hold.
        pairs: Number of pairs to choose from.
        singles: Number of single nodes to choose from.
        too_large: Ids of nodes left out because their KV cache can't hold the prompt.
        too_large_as_target: Ids of nodes left out because they do not take such a long prompt from
            another node.
        ttft_s: Predicted TTFT; None while no node has measured anything.
        itl_s: Predicted ITL.
        delay_s: Predicted delay of other requests, summed over them.
        model_s: Part of `ttft_s` from nodes' step costs; the rest was learned by this router.
        wait_s: Part of `model_s` for work that was queued already.
        fetch_s: Part of `model_s` for fetching a prefix.
        wire_s: Predicted seconds from the first token until a pair's target has the whole prompt.
        margin_s: Seconds that the next best alternative would have cost more (`Route.margin_s`).
        pair_cost_s: Cost of the cheapest pair; None under a policy that does not count in seconds.
        single_cost_s: Cost of the cheapest single node, likewise.
        observed_ttft_s: Observed TTFT; None until there is a token.
        observed_itl_s: Observed mean ITL from the target's first token on; None until the end, and
            for fewer than two tokens from there on.
        observed_late_s: Of a pair: seconds that the target's first token of its own, the second or
            third, came later than steps of the target explain.
        regret_s: Seconds that this route cost more than the next best one, judged by the first
            token: how much later it came than predicted, less `margin_s`; 0 if nothing is
            regretted.
    """

    request_id: str
    policy: str
    target: str
    source: str | None
    num_tokens: int
    cached_tokens: int
    pairs: int
    singles: int
    holder: str | None = None
    held_tokens: int = 0
    ttft_s: float | None = None
    itl_s: float | None = None
    delay_s: float | None = None
    model_s: float | None = None
    wait_s: float | None = None
    fetch_s: float | None = None
    wire_s: float | None = None
    margin_s: float | None = None
    pair_cost_s: float | None = None
    single_cost_s: float | None = None
    observed_ttft_s: float | None = None
    observed_itl_s: float | None = None
    observed_late_s: float | None = None
    regret_s: float | None = None
    too_large: list[str] = []
    too_large_as_target: list[str] = []

    def describe(self) -> str:
        """The decision in one line."""
        nodes = self.target if self.source is None else f"{self.source}>{self.target}"
        parts = [
            f"policy={self.policy}",
            f"nodes={nodes}",
            f"cached={self.cached_tokens}/{self.num_tokens}",
            f"pairs={self.pairs}",
            f"singles={self.singles}",
        ]
        for name, left_out in (
            ("too-large", self.too_large),
            ("too-large-as-target", self.too_large_as_target),
        ):
            if left_out:
                more = f"+{len(left_out) - NAMED}" if len(left_out) > NAMED else ""
                parts.append(f"{name}={','.join(left_out[:NAMED])}{more}")
        if self.holder is not None:
            parts.append(f"prefix={self.held_tokens}@{self.holder}")
        for name in self.__struct_fields__:
            if name.endswith("_s") and name not in PARTS_OF_TTFT:
                seconds: float | None = getattr(self, name)
                if seconds is not None:
                    shown = name.removesuffix("_s").replace("_", "-")
                    parts.append(f"{shown}={seconds * 1e3:.1f}ms")
        return "; ".join(parts)


@dataclass(slots=True)
class _Open:
    """A decision whose request is in flight.

    Attributes:
        step_wait_s: Seconds from the first token until the target's next step.
    """

    decision: Decision
    route: Route
    request: AddRequest
    step_wait_s: float = 0.0


class RouteChooser:
    """Applies a policy to requests.

    Args:
        nodes: Known nodes.
        loads: Their loads.
        policy: The policy.
        metrics: Metrics to update.
        remembered: Number of decisions to keep; None keeps all.

    Attributes:
        decisions: The last decisions, oldest first.
    """

    def __init__(
        self,
        nodes: KnownNodes,
        loads: NodeLoads,
        policy: Policy,
        metrics: RouterMetrics,
        *,
        remembered: int | None = REMEMBERED,
    ) -> None:
        self.policy = policy
        self.decisions: deque[Decision] = deque(maxlen=remembered)
        self._nodes, self._loads, self._metrics = nodes, loads, metrics
        self._open: dict[str, _Open] = {}
        self._encoded = EncodedItems()

    def route(
        self, request: AddRequest, num_tokens: int, items: Sequence[Item], avoid: frozenset[str]
    ) -> Route | None:
        """Nodes for an attempt by what is known now, or None if there are none.

        Args:
            request: The client's request.
            num_tokens: Tokens to prefill, those generated by earlier attempts included.
            items: Items of the prompt.
            avoid: Ids of nodes that already failed this request.

        Raises:
            RequestError: Its first token would come too late (429), or no node can hold its prompt
                (400).
        """
        membership, index = self._nodes.membership, self._nodes.index
        ready = membership.ready()
        cached = index.cached(request) if index is not None else {}
        wanted = Wanted(
            num_tokens, request.params.max_tokens, items, cached, request.params.n,
            lambda node: self._encoded.at(node, request.cache_salt, items),
        )  # fmt: skip
        route = choose(ready, self._loads, self.policy, wanted, avoid=avoid)
        if route is None:
            if not avoid:
                self._check_length(num_tokens)
            return None
        if self._loads.queues or self._loads.other_queues:
            route = self._in_order(request, num_tokens, route)
        predicted = route.predicted
        pairs, singles = ready.pairs, len(ready.serving)
        too_large, as_target = ready.too_large(num_tokens, request.params.n)
        if too_large or as_target:
            pairs, singles = pairs.without(too_large, as_target), singles - len(too_large)
        decision = self._decision(request, route, num_tokens, pairs.count, singles)
        decision.too_large, decision.too_large_as_target = sorted(too_large), sorted(as_target)
        again = avoid or num_tokens != len(request.token_ids)
        if predicted is not None and not again:  # a retry is never refused
            self._check_soon(request, predicted)
            costs, prefills = self.policy.costs, route.prefills
            costs.assigned(prefills, route.target, predicted)
            costs.queued(request.request_id, prefills, predicted)
            if route.holder is not None:
                costs.wires.sent(route.holder, prefills, route.held - route.cached)
            if route.source is not None:
                lacking = num_tokens - min(cached.get(route.target.node_id, 0), num_tokens - 1)
                costs.handover_begun(route.source, route.target, lacking)
        membership.sent(route)
        self.decisions.append(decision)
        if again:
            self.policy.costs.computed(request.request_id)
            self._open.pop(request.request_id, None)  # its times say nothing about this route
        else:
            self._open[request.request_id] = _Open(decision, route, request)
        return route

    def _in_order(self, request: AddRequest, num_tokens: int, route: Route) -> Route:
        """The route with its prediction corrected for queued prompts that are served after it."""
        node, predicted = route.prefills, route.predicted
        queue = request.priority, request.tenant
        ahead = self._loads.ahead(node.node_id, queue, num_tokens)
        if predicted is None or ahead == 1.0:
            return route
        load, since = self._loads.get(node.node_id, IDLE), self._loads.prefill_since
        hit = min(route.cached, num_tokens - 1)
        held = () if route.holder is None else ((route.holder, route.held),)
        how = load, since.get(node.node_id), num_tokens - hit, hit, held, ahead
        found = self.policy.costs.prefill(node, *how)
        waits = {"ttft_s": found.ttft_s, "model_s": found.model_s, "wait_s": found.wait_s}
        return replace(route, predicted=replace(predicted, **waits))

    def successor(self, request: AddRequest, num_tokens: int, holder: NodeInfo) -> Route | None:
        """The node that continues a request from another node, or None if there is none.

        Args:
            request: The client's request.
            num_tokens: Tokens of the prompt and generated ones.
            holder: Node that decodes it now.
        """
        membership, index = self._nodes.membership, self._nodes.index
        receivers = membership.receivers(holder)
        cached = index.cached(request) if index is not None else {}
        left = len(request.token_ids) + request.params.max_tokens - num_tokens
        wanted = Wanted(num_tokens, left, request.items, cached)
        route = successor(holder, receivers, membership.ready(), self._loads, self.policy, wanted)
        if route is not None:
            self._open.pop(request.request_id, None)  # its prediction no longer holds
            membership.sent(route)
            self.decisions.append(self._decision(request, route, num_tokens, 0, len(receivers)))
        return route

    def _decision(
        self, request: AddRequest, route: Route, num_tokens: int, pairs: int, singles: int
    ) -> Decision:
        predicted = route.predicted
        decision = Decision(
            request_id=request.request_id,
            policy=self.policy.settings.policy,
            target=route.target.node_id,
            source=None if route.source is None else route.source.node_id,
            num_tokens=num_tokens,
            cached_tokens=route.cached,
            pairs=pairs,
            singles=singles,
            holder=None if route.holder is None else route.holder.node_id,
            held_tokens=route.held,
            margin_s=route.margin_s,
            pair_cost_s=route.pair_cost_s,
            single_cost_s=route.single_cost_s,
        )
        if predicted is not None:
            decision.ttft_s, decision.itl_s = predicted.ttft_s, predicted.itl_s
            decision.delay_s, decision.model_s = predicted.delay_s, predicted.model_s
            decision.wait_s = predicted.wait_s
            decision.fetch_s = predicted.fetch_s if route.holder is not None else None
            decision.wire_s = predicted.wire_s if route.source is not None else None
        return decision

    def _check_length(self, num_tokens: int) -> None:
        """Refuse a prompt that none of the nodes could ever hold, whatever their states."""
        members = self._nodes.membership.members.values()
        infos = [member.info for member in members if member.info.role != "encode"]
        longest = [info.prompt_limits.computed for info in infos if info.prompt_limits is not None]
        if len(longest) == len(infos) and num_tokens > max(longest, default=num_tokens):
            raise RequestError(
                f"the prompt is too long: it has {num_tokens} tokens, but {max(longest)} is the "
                "most that the KV cache of any node holds",
                param="prompt",
                code="context_length_exceeded",
            )

    def _check_soon(self, request: AddRequest, predicted: Prediction) -> None:
        """Refuse a request that would wait too long now: later it would have delayed others."""
        most = request.deadline_s
        if self.policy.settings.max_ttft is not None:
            most = min(most, self.policy.settings.max_ttft / 1e3)
        if predicted.ttft_s > most and predicted.ttft_s > 2 * predicted.work_s:
            raise RequestError(
                f"All nodes are busy: the first token is expected in {predicted.ttft_s:.2g} s, "
                f"allowed are {most:g} s; retry later.",
                status=429,
                code="overloaded",
                retry_after_s=min(predicted.ttft_s - predicted.work_s, MAX_RETRY_AFTER_S),
            )

    def first_token(self, request_id: str, ttft_s: float) -> None:
        """Record that the client of a request has its first token."""
        in_order = self.policy.costs.computed(request_id)
        known = self._open.get(request_id)
        if known is None:
            return
        route, target, costs = known.route, known.route.target.node_id, self.policy.costs
        known.decision.observed_ttft_s = ttft_s
        if items := known.request.items:
            self._encoded.computed(route.prefills, known.request.cache_salt, items)
        if route.predicted is not None:
            if route.source is not None:
                load, since = self._loads.get(target, IDLE), self._loads.prefill_since.get(target)
                known.step_wait_s = costs.step_wait_s(route.target, load, since)
            if in_order:
                costs.observed(route.prefills.node_id, route.predicted, ttft_s)
            later = ttft_s - route.predicted.ttft_s
            if route.margin_s is not None:
                known.decision.regret_s = max(0.0, later - route.margin_s)
                self._metrics.regret.observe(known.decision.regret_s)
            error = abs(later)
            self._metrics.ttft_error.observe(error)
            self._metrics.ttft_relative_error.observe(error / max(ttft_s, 1e-6))

    def handed_over(self, request_id: str, seconds: float, steps: int = 1) -> None:
        """Record that a target's first token of its own came so long after the request's first one.

        Args:
            request_id: The request.
            seconds: Seconds since the first token.
            steps: Number of tokens since then.
        """
        known = self._open.get(request_id)
        if known is None:
            return
        route = known.route
        if route.source is not None and route.predicted is not None:
            late = seconds - steps * route.predicted.step_s
            known.decision.observed_late_s = max(0.0, late)
            unexplained = max(0.0, late - max(known.step_wait_s, route.predicted.wire_s))
            self.policy.costs.handed_over(route.source, route.target, unexplained)

    def ended(self, request_id: str, generated: int, itl_s: float | None) -> None:
        """Record the end of a request after `generated` tokens, with their mean ITL if known."""
        self.policy.costs.computed(request_id)
        known = self._open.pop(request_id, None)
        if known is None or not generated:
            return
        route = known.route
        known.decision.observed_itl_s = itl_s
        if itl_s is not None and route.predicted is not None:
            error = abs(route.predicted.itl_s - itl_s)
            self._metrics.itl_relative_error.observe(error / max(itl_s, 1e-6))

    def explain(self, request_id: str) -> str | None:
        """One line per decision about a client's request; None if none is remembered."""
        # Node request ids are the answer's kind, the client's id, and a unique suffix.
        named = [
            decision
            for decision in self.decisions
            if f"-{decision.request_id}".rpartition("-")[0].endswith(f"-{request_id}")
        ]
        return " | ".join(decision.describe() for decision in named[-8:]) or None

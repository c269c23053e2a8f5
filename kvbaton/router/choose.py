"""Which nodes serve a request, and who encodes its items: pure functions over what is known now.

An item goes to an encoder node, or is left to the node that prefills its prompt,
wherever it is estimated to be done first. Of several encoder nodes, equal items go to the same one,
which finds them in its cache, as long as that one is not overloaded: rendezvous hashing (Thaler and
Ravishankar, 1998) with a bounded load (Mirrokni, Thorup and Zadimoghaddam, 2018).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from msgspec import Struct

from kvbaton.errors import RequestError
from kvbaton.messages.engine import Item
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.config import RoutingPolicy
from kvbaton.router.membership import ReadyNodes

BOUND = 1.25
"""An encoder node may have this much more queued than the average one, and one item."""
HANDOVER_S = 0.005
"""What an encoder node's answer needs to get there, beyond being encoded."""
PREFILL_TIME = 2.0
"""A node that encodes computes no prompt meanwhile: its time counts so many times."""
UNMEASURED_ROWS = 64
"""While nobody has measured anything, encoder nodes get items of at least so many rows."""
ROW_S, TOKEN_S = "encoder_row_s", "prompt_token_s"
"""Entries of `NodeInfo.load`."""


class NodeLoad(Struct, frozen=True):
    """What the router has in flight at a node.

    Attributes:
        prompt_tokens: of prompts that the node is still prefilling for us.
        sequences: requests that it generates for.
        tokens: prompt and generated tokens of those.
        rows: of items that it is to encode for us.
    """

    prompt_tokens: int = 0
    sequences: int = 0
    tokens: int = 0
    rows: int = 0

    def plus(self, other: NodeLoad, sign: int = 1) -> NodeLoad:
        """The sum, or the difference if `sign` is -1."""
        return NodeLoad(
            self.prompt_tokens + sign * other.prompt_tokens,
            self.sequences + sign * other.sequences,
            self.tokens + sign * other.tokens,
            self.rows + sign * other.rows,
        )


IDLE = NodeLoad()


class NodeLoads(Mapping[str, NodeLoad]):
    """In-flight work by node id.

    Attributes:
        own: of this process; nodes without any have no entry.
        others: what other workers of this router have in flight; added to ours.
    """

    def __init__(self) -> None:
        self.own: dict[str, NodeLoad] = {}
        self.others: Mapping[str, NodeLoad] = {}

    def change(self, node_id: str, old: NodeLoad, new: NodeLoad) -> None:
        """What one request is to a node has changed; `IDLE` is what it is before and after."""
        total = self.own.get(node_id, IDLE).plus(new).plus(old, -1)
        if total == IDLE:
            self.own.pop(node_id, None)
        else:
            self.own[node_id] = total

    def __getitem__(self, node_id: str) -> NodeLoad:
        if node_id not in self.others:
            return self.own[node_id]
        return self.own.get(node_id, IDLE).plus(self.others[node_id])

    def __iter__(self) -> Iterator[str]:
        return iter({**self.own, **self.others})

    def __len__(self) -> int:
        return len({**self.own, **self.others})


@dataclass(frozen=True)
class Route:
    """The nodes that serve one attempt.

    Attributes:
        target: the node that generates.
        source: the node that prefills for it; None if the target serves the request alone.
        encoders: per item of the prompt, the node that encodes it; None where the one that
            prefills does so, or has the output already. Empty is None for all.
    """

    target: NodeInfo
    source: NodeInfo | None = None
    encoders: tuple[NodeInfo | None, ...] = ()

    @property
    def prefills(self) -> NodeInfo:
        """The node that computes the prompt."""
        return self.source or self.target


def no_node_ready() -> RequestError:
    """Nobody is left to choose: 503."""
    return RequestError(
        "No node is ready to serve this request; retry shortly.", status=503, code="no_node_ready"
    )


def choose(
    ready: ReadyNodes,
    loads: Mapping[str, NodeLoad],
    num_tokens: int,
    items: Sequence[Item] = (),
    *,
    avoid: Set[str] = frozenset(),
    policy: RoutingPolicy,
) -> Route | None:
    """The least loaded pair, or one node alone, or None if nobody is left.

    Args:
        ready: nodes that may get requests.
        loads: by node id; a node without an entry is idle.
        num_tokens: of the prompt.
        items: of the prompt.
        avoid: ids of nodes that already failed this request.
        policy: what the user decided.
    """

    def pair_cost(pair: tuple[NodeInfo, NodeInfo]) -> tuple[int, int, int, str, str]:
        p, d = pair[0].node_id, pair[1].node_id
        source, target = loads.get(p, IDLE), loads.get(d, IDLE)
        return source.prompt_tokens, target.sequences, target.tokens, p, d

    def single_cost(node: NodeInfo) -> tuple[bool, int, int, int, str]:
        load = loads.get(node.node_id, IDLE)
        other_role = node.role != "decode"
        return other_role, load.sequences, load.prompt_tokens, load.tokens, node.node_id

    pairs, singles = ready.pairs, ready.serving
    if avoid:
        pairs = [pair for pair in pairs if avoid.isdisjoint((pair[0].node_id, pair[1].node_id))]
        singles = [node for node in singles if node.node_id not in avoid]
    if pairs and num_tokens >= policy.min_handover_tokens:
        source, target = min(pairs, key=pair_cost)
        route = Route(target, source)
    elif singles:
        route = Route(min(singles, key=single_cost))
    else:
        return None
    if not items:
        return route
    return with_encoders(route, items, ready, loads, avoid=avoid, min_rows=policy.min_encode_rows)


# --- items ---


def with_encoders(
    route: Route,
    items: Sequence[Item],
    ready: ReadyNodes,
    loads: Mapping[str, NodeLoad],
    *,
    avoid: Set[str] = frozenset(),
    min_rows: int | None = None,
) -> Route:
    """A route that also says who encodes each item.

    Args:
        route: of the prompt.
        items: of the prompt; the second of two equal ones needs no encoder.
        ready: nodes that may get requests.
        loads: by node id.
        avoid: ids of nodes that already failed this request.
        min_rows: items of fewer rows are encoded where their prompt is prefilled, all others by
            encoder nodes; None estimates for each where it is done first.
    """
    prefills = route.prefills
    encoders = [
        encoder
        for encoder, node in ready.encoder_pairs
        if node.node_id == prefills.node_id and encoder.node_id not in avoid
    ]
    # Rows that are to be encoded for us, with what this request has been given already.
    queued = {n.node_id: loads.get(n.node_id, IDLE).rows for n in (prefills, *encoders)}
    prompt_s = loads.get(prefills.node_id, IDLE).prompt_tokens * prefills.load.get(TOKEN_S, 0.0)
    chosen: dict[bytes, NodeInfo | None] = {}
    places: list[NodeInfo | None] = []
    for item in items:
        if item.digest in chosen:
            places.append(None)
            continue
        encoder = _encoder_for(item, encoders, queued)
        if encoder is not None and prefills.encodes:
            if min_rows is not None:
                stays = item.length < min_rows
            else:
                stays = _is_faster_here(item, prefills, encoder, queued, prompt_s)
            encoder = None if stays else encoder
        queued[(encoder or prefills).node_id] += item.length
        chosen[item.digest] = encoder
        places.append(encoder)
    return Route(route.target, route.source, tuple(places))


def _encoder_for(
    item: Item, encoders: Sequence[NodeInfo], queued: Mapping[str, int]
) -> NodeInfo | None:
    """The node that equal items go to, or the least loaded one if that has too much to do."""
    able = [e for e in encoders if not e.max_model_len or e.max_model_len > item.padded_rows]
    if not able:
        return None

    def score(node: NodeInfo) -> bytes:
        key = item.digest[:64]
        return hashlib.blake2b(node.node_id.encode(), key=key, digest_size=8).digest()

    favourite = max(able, key=score)
    average = sum(queued[node.node_id] for node in able) / len(able)
    if queued[favourite.node_id] <= BOUND * average + item.length:
        return favourite
    return min(able, key=lambda node: (queued[node.node_id], node.node_id))


def _is_faster_here(
    item: Item, prefills: NodeInfo, encoder: NodeInfo, queued: Mapping[str, int], prompt_s: float
) -> bool:
    """Whether the node that prefills, with `prompt_s` seconds of prompts queued, is first."""
    there = encoder.load.get(ROW_S)
    here = prefills.load.get(ROW_S, there)  # as good a guess as any, until it has encoded something
    if here is None:
        return item.length < UNMEASURED_ROWS
    if there is None:
        there = here
    local = prompt_s + (queued[prefills.node_id] + item.length) * here
    remote = (queued[encoder.node_id] + item.length) * there + HANDOVER_S
    return PREFILL_TIME * local < remote

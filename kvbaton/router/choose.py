"""Which nodes serve a request, and who encodes its items: pure functions over what is known now.

An item goes to an encoder node, or is left to the node that prefills its prompt,
wherever it is estimated to be done first. Of several encoder nodes, equal items go to the same one,
which finds them in its cache, as long as that one is not overloaded: rendezvous hashing (Thaler and
Ravishankar, 1998) with a bounded load (Mirrokni, Thorup and Zadimoghaddam, 2018).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence, Set
from operator import itemgetter

from msgspec import Struct
from msgspec.structs import replace

from kvbaton.messages.engine import Item
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.loads import IDLE, NodeLoad, NodeLoads
from kvbaton.router.membership import ReadyNodes
from kvbaton.router.policies import Policy
from kvbaton.router.route import Options, Pairs, Route

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


class Wanted(Struct, frozen=True):
    """What a request asks of its nodes.

    Attributes:
        num_tokens: of the prompt, with what was generated elsewhere.
        max_tokens: most that is to be generated.
        items: of the prompt.
        cached: tokens of the prompt that nodes hold, by node id.
        choices: that are to be generated.
        held_items: digests of those of `items` whose outputs a node is likely to hold.
    """

    num_tokens: int
    max_tokens: int = 16
    items: Sequence[Item] = ()
    cached: Mapping[str, int] = {}
    choices: int = 1
    held_items: Callable[[NodeInfo], Set[bytes]] = lambda _: frozenset()


def choose(
    ready: ReadyNodes,
    loads: NodeLoads,
    policy: Policy,
    wanted: Wanted,
    *,
    avoid: Set[str] = frozenset(),
) -> Route | None:
    """The nodes for a request as a policy chooses them, or None if nobody is left.

    Whoever can't have its prompt is left out, and as a target who would decline it.

    Args:
        ready: nodes that may get requests.
        loads: in flight.
        policy: chooses.
        wanted: what is asked.
        avoid: ids of nodes that already failed this request.
    """
    pairs, singles, senders = ready.pairs, ready.serving, ready.senders
    if avoid:
        senders = [(node, able) for node, able in senders if node.node_id not in avoid]
    too_large, as_target = ready.too_large(wanted.num_tokens, wanted.choices)
    if out := avoid | too_large:
        singles = [node for node in singles if node.node_id not in out]
    if out or as_target:
        pairs = pairs.without(out, as_target)
    if not pairs.sources and not singles:
        return None
    holders = holders_of(senders, loads, wanted, policy.settings.min_fetch_tokens, ready)
    route = choose_among(pairs, singles, holders, ready, loads, policy, wanted)
    if not wanted.items:
        return route
    min_rows = policy.settings.min_encode_rows
    held = wanted.held_items(route.prefills)
    return with_encoders(
        route, wanted.items, ready, loads, avoid=avoid, min_rows=min_rows, held=held
    )


def choose_among(
    pairs: Pairs,
    singles: Sequence[NodeInfo],
    holders: Sequence[tuple[NodeInfo, Set[str], int]],
    ready: ReadyNodes,
    loads: NodeLoads,
    policy: Policy,
    wanted: Wanted,
) -> Route:
    """What a policy chooses, with whom the node that prefills fetches from, and what is expected.

    Args:
        pairs: see `Options`, as for the next two.
        singles: one, or a pair, is there.
        holders: of a prefix.
        ready: all nodes that may get requests.
        loads: in flight.
        policy: chooses.
        wanted: what is asked.
    """
    costs = policy.costs
    options = Options(
        pairs,
        singles,
        loads.now(),
        wanted.num_tokens,
        min(costs.output_tokens, float(wanted.max_tokens)),
        wanted.cached,
        loads.prefill_since,
        costs.learn(ready.serving, loads),
        holders,
        policy.settings.min_fetch_tokens,
    )
    route = policy.choose(options)
    if not options.measured:
        for holder, held in options.holders_for(route.prefills):
            return replace(route, holder=holder, held=held)
    elif route.predicted is None:
        prefill = options.prefill(costs, route.prefills)
        margin_s = None if prefill.saved_s is None else abs(prefill.saved_s)
        route = replace(route, holder=prefill.holder, held=prefill.held, margin_s=margin_s)
        route = replace(route, predicted=options.predict(costs, route, prefill))
    return route


def successor(
    holder: NodeInfo,
    receivers: Sequence[NodeInfo],
    ready: ReadyNodes,
    loads: NodeLoads,
    policy: Policy,
    wanted: Wanted,
) -> Route | None:
    """The node that goes on with what another one generates; None if there is none for it.

    Args:
        holder: generates, and has the KV of all tokens.
        receivers: nodes that can fetch from it.
        ready: nodes that may get requests.
        loads: in flight.
        policy: chooses.
        wanted: what is left of the request.
    """
    too_large, _ = ready.too_large(wanted.num_tokens, wanted.choices)
    out = too_large | ready.declining(wanted.num_tokens, wanted.num_tokens, wanted.choices)
    able = [n for n in receivers if n.node_id not in out and (n.encodes or not wanted.items)]
    if not able or not policy.settings.min_fetch_tokens:
        return None
    holders = [(holder, {node.node_id for node in able}, wanted.num_tokens)]
    route = choose_among(Pairs((), ()), able, holders, ready, loads, policy, wanted)
    # The client waits for no first token, so nothing can be learned of how wrong that is.
    own = wanted.cached.get(route.target.node_id, 0)
    return replace(route, cached=own, predicted=None)


def holders_of(
    senders: Sequence[tuple[NodeInfo, Set[str]]],
    loads: Mapping[str, NodeLoad],
    wanted: Wanted,
    min_tokens: int,
    ready: ReadyNodes,
) -> Sequence[tuple[NodeInfo, Set[str], int]]:
    """See `Options.holders`; `senders` as in `ReadyNodes`. Who has no room fetches nothing."""
    if not min_tokens or not wanted.cached:
        return ()
    cached, num_tokens, choices = wanted.cached, wanted.num_tokens, wanted.choices
    found = [
        (held, -loads.get(source.node_id, IDLE).prompt_tokens, source.node_id, source, able)
        for source, able in senders
        if (held := cached.get(source.node_id, 0)) >= min_tokens
    ]
    found.sort(key=itemgetter(0, 1, 2), reverse=True)
    holders = []
    for held, _, _, source, able in found:
        out = ready.declining(min(held, num_tokens - 1), num_tokens, choices)
        holders.append((source, able - out if out else able, held))
    return holders


# --- items ---


def with_encoders(
    route: Route,
    items: Sequence[Item],
    ready: ReadyNodes,
    loads: Mapping[str, NodeLoad],
    *,
    avoid: Set[str] = frozenset(),
    min_rows: int | None = None,
    held: Set[bytes] = frozenset(),
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
        held: digests of items whose outputs the node that prefills is likely to hold: there they
            are first.
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
                stays = item.digest in held or _is_faster_here(
                    item, prefills, encoder, queued, prompt_s
                )
            encoder = None if stays else encoder
        queued[(encoder or prefills).node_id] += item.length
        chosen[item.digest] = encoder
        places.append(encoder)
    return replace(route, encoders=tuple(places))


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

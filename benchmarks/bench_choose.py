"""CPU time of a router's choice of nodes, by policy and number of nodes.

    python benchmarks/bench_choose.py

There are as many prefill as decode nodes. Each has some work in flight and a part of a 1,000-block
prompt cached; hand-overs were observed for half of the pairs. A decision is `choose` with its
prediction. The prefix lookup before it is a separate figure. The *table* of possible pairs is built
anew after each heartbeat of any node.
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.bench_router import LOAD
from kvbaton.bench.report import publish
from kvbaton.connectors.keys import block_keys, root_key
from kvbaton.messages.engine import (
    BLOCK_HASH_BYTES,
    AddRequest,
    BlockChange,
    CachedBlocks,
    CachedGroup,
    SamplingParams,
)
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.choose import Wanted, choose
from kvbaton.router.config import RoutingPolicy
from kvbaton.router.costs import CostModel
from kvbaton.router.loads import NodeLoad, NodeLoads
from kvbaton.router.membership import Member, NodeState, ReadyNodes
from kvbaton.router.policies import load_policy
from kvbaton.router.prefix_index import PrefixIndex

BLOCK_SIZE, BLOCKS = 16, 1000
GROUPS = (CachedGroup(BLOCK_SIZE),)
ROUNDS = 7
SPEED = {**LOAD, "free_blocks": 1e5}


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, nargs="+", default=[1, 4, 8, 32], help="node pairs")
    parser.add_argument("--policies", nargs="+", default=["cost", "prefix-aware", "least-loaded"])
    parser.add_argument("--roles", nargs=2, default=["prefill", "decode"], help="of a pair's nodes")
    parser.add_argument("--repeat", type=int, default=50)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    for count in args.pairs:
        for what, call in calls(count, args.roles, args.policies):
            us = round(least_s(call, args.repeat) * 1e6, 1)
            rows.append({"figure": f"{count} + {count}: {what}, us", "value": us})
    publish("choose", {"roles": " ".join(args.roles)}, rows, args.out)


def calls(
    count: int, roles: Sequence[str], policies: Sequence[str]
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls to measure for `count` pairs of nodes, by name."""
    chance = random.Random(count)
    names = [(f"{role}{i}{place}", role) for i in range(count) for place, role in enumerate(roles)]
    members = [_member(name, role) for name, role in names]
    nodes = [member.info for member in members]
    tokens = [chance.randrange(100_000) for _ in range(BLOCK_SIZE * BLOCKS)]
    index = _index(nodes, tokens, chance)
    request = AddRequest(request_id="r", token_ids=array("I", tokens), params=SamplingParams())
    loads = NodeLoads()
    for place, node in enumerate(nodes):
        queued = chance.randrange(20_000) if node.role != "decode" else 0
        load = NodeLoad(queued, chance.randrange(64), 50_000, 0, 0, queued * 20)
        loads.own.update({node.node_id: load} if place % 4 else {})
    ready, cached = ReadyNodes(members), index.cached(request)
    yield "table", lambda: ReadyNodes(members)
    yield "cached", lambda: index.cached(request)
    wanted = Wanted(len(tokens), 128, (), cached)
    for name in policies:
        costs = CostModel()
        policy = load_policy(RoutingPolicy(policy=name), costs)
        for place, (source, target) in enumerate(ready.pairs):
            if place % 2:
                costs.handed_over(source, target, chance.random() / 100)
        yield name, partial(choose, ready, loads, policy, wanted)


def _member(name: str, role: str) -> Member:
    info = NodeInfo(
        node_id=name,
        generation="1",
        role=role,
        url="",
        model="m",
        control_address=f"tcp://{name}:1",
        identity="00" * 32,
        load=dict(SPEED),
    )
    return Member(info, static=True, heard_at=0.0, state=NodeState.READY)


def _index(nodes: list[NodeInfo], tokens: list[int], chance: random.Random) -> PrefixIndex:
    index = PrefixIndex()
    keys = block_keys(root_key(bytes(32), ""), tokens, BLOCK_SIZE)
    known = b"".join(key[-BLOCK_HASH_BYTES:] for key in keys)
    for place, node in enumerate(nodes):
        index.take(node, CachedBlocks.beginning(GROUPS))
        part = known if not place else known[: BLOCK_HASH_BYTES * chance.randint(1, BLOCKS)]
        index.take(node, CachedBlocks(number=1, changes=(BlockChange(0, True, part),)))
    return index


def least_s(call: Callable[[], object], repeat: int) -> float:
    """CPU time of a call in seconds: the least of `repeat` rounds."""
    took = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        for _ in range(repeat):
            call()
        took.append((time.process_time() - begin) / repeat)
    return min(took)


if __name__ == "__main__":
    main()

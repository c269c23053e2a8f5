"""The router's prefix index: bytes per block, and time to match a prompt.

    python benchmarks/bench_prefix_index.py

The index has one million blocks of 64 nodes; of each chain of 1,000 blocks, every node holds a
prefix of random length. A prompt of 1,000 blocks is matched against all nodes, once with given
hashes, and once from its tokens (hashed only as far as any node holds them).
"""

from __future__ import annotations

import argparse
import random
import statistics
import struct
import time
import tracemalloc
from array import array
from pathlib import Path

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
from kvbaton.router.prefix_index import HASH_SHIFT, PrefixIndex

BLOCK_SIZE, CHAIN = 16, 1000
GROUPS = (CachedGroup(BLOCK_SIZE),)


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=200)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rng = random.Random(0)
    identity = bytes(32)
    tokens = [rng.randrange(100_000) for _ in range(BLOCK_SIZE * CHAIN)]
    keys = block_keys(root_key(identity, ""), tokens, BLOCK_SIZE)
    known = b"".join(key[-BLOCK_HASH_BYTES:] for key in keys)
    chains = [known] + [rng.randbytes(8 * CHAIN) for _ in range(args.blocks // CHAIN - 1)]
    nodes = [
        NodeInfo(
            node_id=f"n{i}", generation="1", role="decode", url="", model="m", identity="00" * 32
        )
        for i in range(args.nodes)
    ]
    tracemalloc.start()
    index = PrefixIndex()
    for node in nodes:
        index.take(node, CachedBlocks.beginning(GROUPS))
    since, told = time.perf_counter(), 0
    for c, chain in enumerate(chains):
        holders = rng.sample(nodes, 4) if c else nodes
        for place, node in enumerate(holders):
            part = chain if not place else chain[: 8 * rng.randint(1, CHAIN)]
            told += len(part) // 8
            change = BlockChange(0, True, part)
            index.take(node, CachedBlocks(number=1, changes=(change,)))
    seconds = time.perf_counter() - since
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    hashes = [number >> HASH_SHIFT for number in struct.unpack(f"<{CHAIN}Q", known)]
    bits = sum(told.bit for told in index.nodes.values())
    request = AddRequest(request_id="r", token_ids=array("I", tokens), params=SamplingParams())
    fresh = AddRequest(request_id="f", token_ids=array("I", tokens[::-1]), params=SamplingParams())
    times: dict[str, list[float]] = {"hashes": [], "tokens": [], "unknown": []}
    for _ in range(args.repeat):
        for name, call in (
            ("hashes", lambda: index.match(iter(hashes), GROUPS, bits, len(tokens))),
            ("tokens", lambda: index.cached(request)),
            ("unknown", lambda: index.cached(fresh)),
        ):
            begin = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - begin) * 1e6)
    assert len(index.cached(request)) == args.nodes
    rows = [
        row("bytes per block", size / len(index)),
        row("take a block in, us (traced)", seconds / told * 1e6),
        row(f"match {CHAIN} blocks, {args.nodes} nodes, us", statistics.median(times["hashes"])),
        row("the same from tokens, us", statistics.median(times["tokens"])),
        row("a prompt that nobody holds, us", statistics.median(times["unknown"])),
    ]
    config = {"nodes": str(args.nodes), "blocks": str(len(index))}
    publish("prefix_index", config, rows, args.out)


def row(what: str, value: float) -> dict[str, object]:
    """Row of one figure."""
    return {"figure": what, "value": round(value, 2)}


if __name__ == "__main__":
    main()

"""The ledger: recomputes from scratch who owns every block, and counts what does not agree."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvbaton.engine.block_pool import NULL_BLOCK, BlockPool
from kvbaton.engine.kv_cache_manager import KVCacheManager
from kvbaton.engine.scheduler import Scheduler
from kvbaton.types import Spans

Counts = npt.NDArray[np.int64]
"""One number per block of a group, int64 [num_blocks]."""


def audit(
    scheduler: Scheduler, *, incoming: Iterable[Spans] = (), outgoing: Iterable[Spans] = ()
) -> dict[str, int]:
    """Compare the pools with what requests and hand-overs say they hold.

    Args:
        scheduler: whose block tables say what requests hold, and whose `pinned` what others do.
        incoming: spans of every load that may still be written.
        outgoing: spans of every hold that a transfer has.

    Returns:
        discrepancies by kind, all zero when the ledger balances: ``references``, ``incoming`` and
        ``outgoing`` count blocks whose counter is not what the holders sum up to; ``lists`` counts
        blocks that are not on exactly the one list where an unowned block belongs; ``keys`` counts
        blocks and keys of the prefix cache that do not point at each other.
    """
    blocks = scheduler.blocks
    incoming, outgoing = list(incoming), list(outgoing)
    found = dict.fromkeys(("references", "incoming", "outgoing", "lists", "keys"), 0)
    for g, pool in enumerate(blocks.pools):
        held = {
            "references": _references(scheduler, g),
            "incoming": _marks(blocks, incoming, g),
            "outgoing": _marks(blocks, outgoing, g),
        }
        for kind, counts in zip(held, _counters(pool), strict=True):
            found[kind] += int(np.count_nonzero(held[kind] != counts))
        found["lists"] += _misplaced(pool, sum(held.values(), start=_zeros(pool)) > 0)
        found["keys"] += _unpaired(pool)
    return found


def _zeros(pool: BlockPool) -> Counts:
    return np.zeros(pool.num_blocks, np.int64)


def _counters(pool: BlockPool) -> tuple[Counts, Counts, Counts]:
    return (
        np.frombuffer(pool.refs, np.int64),
        np.frombuffer(pool.incoming, np.int64),
        np.frombuffer(pool.outgoing, np.int64),
    )


def _references(scheduler: Scheduler, g: int) -> Counts:
    tables = [block for s in scheduler.sequences() for block in s.tables[g]]
    tables += [block for pinned in scheduler.pinned() for block in pinned[g]]
    counts = np.bincount(np.array(tables, np.int64), minlength=scheduler.blocks.pools[g].num_blocks)
    counts[NULL_BLOCK] = 0
    return counts


def _marks(blocks: KVCacheManager, all_spans: Iterable[Spans], g: int) -> Counts:
    marked = [block for spans in all_spans for span in spans[g] for block in span.blocks]
    return np.bincount(np.array(marked, np.int64), minlength=blocks.pools[g].num_blocks)


def _misplaced(pool: BlockPool, owned: npt.NDArray[np.bool_]) -> int:
    """Blocks that are on no list though unowned, on one though owned, or on the wrong one."""
    keyed = np.zeros(pool.num_blocks, np.bool_)
    keyed[list(pool.by_key.values())] = True
    waiting = np.frombuffer(pool.fences, np.int64) > pool.updated
    unowned = ~owned
    unowned[NULL_BLOCK] = False
    wanted = {
        "free": unowned & ~waiting & ~keyed,
        "cached": unowned & ~waiting & keyed,
        "fenced": unowned & waiting,
    }
    wrong = np.zeros(pool.num_blocks, np.bool_)
    for name, listed in pool.lists().items():
        times = np.bincount(np.array(listed, np.int64), minlength=pool.num_blocks)
        wrong |= times != wanted[name]
    return int(np.count_nonzero(wrong))


def _unpaired(pool: BlockPool) -> int:
    one_way = sum(pool.keys[block] != key for key, block in pool.by_key.items())
    keyed = sum(key is not None for key in pool.keys)
    return one_way + abs(keyed - len(pool.by_key))

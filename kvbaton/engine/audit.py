"""The ledger: recomputes from scratch who owns every block, and counts discrepancies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import ne

import numpy as np
import numpy.typing as npt

from kvbaton.engine.block_pool import NULL_BLOCK, BlockPool
from kvbaton.engine.kv_cache_manager import blocks_of
from kvbaton.engine.live_requests import LiveRequests
from kvbaton.engine.request import Tables
from kvbaton.types import Spans


def audit(
    scheduler: LiveRequests, *, incoming: Iterable[Spans] = (), outgoing: Iterable[Spans] = ()
) -> dict[str, int]:
    """Compare the pool's counters with the blocks that requests and hand-overs hold.

    Args:
        scheduler: Its requests' block tables, and its `pinned`, are what requests and others hold.
        incoming: Spans of every load that may still be written.
        outgoing: Spans of every hold of a transfer.

    Returns:
        Discrepancies by kind, all zero if the ledger balances. ``references``, ``incoming`` and
        ``outgoing`` count blocks whose counter differs from the sum over the holders; ``groups``
        counts blocks in a table of another group than they were allocated for; ``lists`` counts
        blocks that are not on exactly the list where an unowned block belongs; ``keys`` counts
        blocks and keys of the prefix cache that do not refer to each other.
    """
    kinds = ("references", "incoming", "outgoing", "groups", "lists", "keys")
    found = dict.fromkeys(kinds, 0)
    pool = scheduler.blocks.pool
    held_tables = [sequence.tables for sequence in scheduler.sequences()]
    held_tables += scheduler.pinned()
    for copy in scheduler.forked_states:
        tables: Tables = scheduler.blocks.empty()
        tables[copy.group] += [copy.source, copy.target]
        held_tables.append(tables)
    references = np.zeros(pool.num_blocks, np.int64)
    strangers = np.zeros(pool.num_blocks, np.bool_)
    for g in range(len(scheduler.blocks.groups)):
        held = _times(pool, chain.from_iterable(tables[g] for tables in held_tables))
        references += held
        strangers |= (held > 0) & (np.frombuffer(pool.group, np.int64) != g)
    references[NULL_BLOCK] = strangers[NULL_BLOCK] = 0
    found["groups"] += int(np.count_nonzero(strangers))
    marks = {
        "references": (references, pool.refs),
        "incoming": (_times(pool, _blocks(incoming)), pool.incoming),
        "outgoing": (_times(pool, _blocks(outgoing)), pool.outgoing),
    }
    owned = np.zeros(pool.num_blocks, np.bool_)
    for kind, (held, counter) in marks.items():
        found[kind] += int(np.count_nonzero(held != np.frombuffer(counter, np.int64)))
        owned |= held > 0
    owned[NULL_BLOCK] = True  # it is on no list
    # Vectorised with NumPy, since a pool has 50,000 blocks and the core waits for this.
    names = list(chain.from_iterable(pool.by_key))
    cached = list(chain.from_iterable(by_key.values() for by_key in pool.by_key))
    keyed = _times(pool, cached) > 0
    waiting = np.frombuffer(pool.fences, np.int64) > pool.updated
    wanted = {
        "free": ~owned & ~waiting & ~keyed,
        "cached": ~owned & ~waiting & keyed,
        "fenced": ~owned & waiting,
    }
    wrong = np.zeros(pool.num_blocks, np.bool_)
    for name, listed in pool.lists().items():
        wrong |= _times(pool, listed) != wanted[name]
    found["lists"] += int(np.count_nonzero(wrong))
    one_way = sum(map(ne, map(pool.keys.__getitem__, cached), names))
    named = len(pool.keys) - pool.keys.count(None)
    marked = np.frombuffer(pool.keyed, np.bool_)
    found["keys"] += one_way + abs(named - len(cached)) + int(np.count_nonzero(keyed != marked))
    return found


def _blocks(holds: Iterable[Spans]) -> Iterator[int]:
    return (block for spans in holds for block in blocks_of(spans))


def _times(pool: BlockPool, blocks: Iterable[int]) -> npt.NDArray[np.int64]:
    """Number of occurrences of each block of a pool, int64 [num_blocks]."""
    return np.bincount(np.fromiter(blocks, np.int64), minlength=pool.num_blocks)

"""Contents of the prefix cache for frontends: routers choose nodes by them.

Unlike KV events (`kv_events.py`), which are for other projects' indexers and contain tokens, this
feed uses the frontends' own authenticated socket and contains only hashes. A frontend that watches
gets a snapshot, then the changes. One that reads too slowly gets nothing until it has caught up,
and then a new snapshot; so does one that asks again because it misses a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from typing_extensions import override

from kvbaton.connectors.layout import GroupKind
from kvbaton.engine.frontends import FrontendServer
from kvbaton.engine.kv_cache_manager import KVCacheManager
from kvbaton.engine.kv_connector import KVConnector
from kvbaton.engine.request import Sequence
from kvbaton.messages.engine import BLOCK_HASH_BYTES, BlockChange, CachedGroup

SNAPSHOT_BLOCKS = 1 << 15
"""Number of blocks per message of a snapshot."""


class BlockFeed(KVConnector):
    """Collects changes of the prefix caches while any frontend watches.

    Args:
        blocks: The KV cache manager.
        frontends: Server of the frontends that may watch.
    """

    name = "block_feed"

    def __init__(self, blocks: KVCacheManager, frontends: FrontendServer) -> None:
        self.groups = tuple(
            CachedGroup(group.block_size, group.window, group.kind is GroupKind.CHUNK)
            for group in blocks.groups
        )
        self._blocks = blocks
        self._frontends = frontends
        self._changes: list[tuple[int, bool, bytearray]] = []
        blocks.pool.on_forget.append(self._forgotten)

    @override
    def committed(self, sequence: Sequence, g: int, first: int, end: int) -> None:
        if self._frontends.block_watchers:
            by_key = self._blocks.pool.by_key[g]
            chain = sequence.chain(self._blocks.groups[g].block_size)
            self._note(g, True, b"".join(_hash(key) for key in chain[first:end] if key in by_key))

    def _forgotten(self, g: int, key: bytes) -> None:
        """Note that a block left a prefix cache."""
        if self._frontends.block_watchers:
            self._note(g, False, _hash(key))

    def _note(self, g: int, stored: bool, hashes: bytes) -> None:
        if self._changes and self._changes[-1][:2] == (g, stored):
            self._changes[-1][2].extend(hashes)
        else:
            self._changes.append((g, stored, bytearray(hashes)))

    @override
    def flush(self) -> None:
        if self._frontends.block_watchers:
            changes, self._changes = self._changes, []
            told = tuple(BlockChange(g, stored, bytes(h)) for g, stored, h in changes if h)
            self._frontends.tell_watchers(told, self)

    def snapshot(self) -> Iterator[tuple[BlockChange, ...]]:
        """Yield all blocks that are cached now, in messages of bounded size."""
        for g, by_key in enumerate(self._blocks.pool.by_key):
            keys = iter(by_key)
            while hashes := b"".join(map(_hash, islice(keys, SNAPSHOT_BLOCKS))):
                yield (BlockChange(g, True, hashes),)


def _hash(key: bytes) -> bytes:
    return key[-BLOCK_HASH_BYTES:]

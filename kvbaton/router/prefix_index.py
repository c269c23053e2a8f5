"""Which node holds which prefix: an index by block hash over all nodes, fed by their engines.

An entry is a block and the set of nodes that hold it, as a bit mask in one number. Equal sets are
one object, so an entry costs about as much as its hash. A lost node's bit is retired; `sweep` then
removes it from the entries, a few at a time, before another node gets it.

The index may be late or wrong: nodes look up prefixes again themselves. A wrong entry costs a
request some time, never its tokens.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvbaton.connectors.keys import iter_block_keys, root_key
from kvbaton.engine.request import extras_of
from kvbaton.messages.engine import BLOCK_HASH_BYTES, AddRequest, CachedBlocks, CachedGroup
from kvbaton.messages.nodes import NodeInfo
from kvbaton.types import KEY_BYTES, first_attended

logger = logging.getLogger(__name__)

MAX_BLOCKS = 4 << 20
"""Maximum number of entries; further blocks are not indexed."""
MAX_NODE_BLOCKS = 1 << 20
"""Maximum number of entries of one node."""
MAX_GROUPS = 64
SWEPT_AT_ONCE = 2048
"""Entries that are swept before other tasks may run."""
HASH_SHIFT = 4
"""60 of the 64 bits are kept: CPython's integers take 32 bytes with two digits, 48 with three."""
MAX_SETS = 1 << 16
"""Maximum number of different sets of nodes that are kept as one object each."""


_hash_of = struct.Struct(f"<{KEY_BYTES - BLOCK_HASH_BYTES}xQ").unpack
"""Last bytes of a key, as a number."""


@dataclass(eq=False)
class NodeBlocks:
    """What one generation of a node has reported.

    Attributes:
        node: The node.
        bit: Its bit in the sets of entries.
        identity: Digest of its identity record, 32 bytes.
        root: Root of the keys of blocks without a cache salt.
        groups: Its KV groups.
        num_blocks: Number of its blocks in the index.
    """

    node: NodeInfo
    bit: int
    identity: bytes
    root: bytes
    groups: tuple[CachedGroup, ...]
    num_blocks: int = 0


class PrefixIndex:
    """Blocks by hash, each with the nodes that hold it.

    Attributes:
        nodes: Nodes whose blocks are known, by node id.
        dropped: Number of blocks that were not indexed for lack of room.
    """

    def __init__(
        self, *, max_blocks: int = MAX_BLOCKS, max_node_blocks: int = MAX_NODE_BLOCKS
    ) -> None:
        self.nodes: dict[str, NodeBlocks] = {}
        self.dropped = 0
        self._max_blocks, self._max_node_blocks = max_blocks, max_node_blocks
        self._tables: list[dict[int, int]] = []
        self._sets: dict[int, int] = {}
        self._retired = 0
        self._alike: dict[tuple[bytes, tuple[CachedGroup, ...]], list[NodeBlocks]] | None = None

    def __len__(self) -> int:
        return sum(map(len, self._tables))

    # --- reports of nodes ---

    def take(self, node: NodeInfo, message: CachedBlocks) -> None:
        """Take in a node's report of changes to its prefix caches; inconsistent parts are left out.

        Raises nothing, whatever the report holds.
        """
        if message.number == 0:
            self._begin(node, message.cached_groups())
        known = self.nodes.get(node.node_id)
        if known is None or known.node.generation != node.generation:
            return
        for change in message.changes:
            data = change.hashes
            if change.group >= len(known.groups) or len(data) % BLOCK_HASH_BYTES:
                logger.warning("%s tells of blocks that can't be", node.node_id)
                continue
            numbers = struct.unpack(f"<{len(data) // BLOCK_HASH_BYTES}Q", data)
            (self._store if change.stored else self._remove)(known, change.group, numbers)

    def _begin(self, node: NodeInfo, groups: tuple[CachedGroup, ...]) -> None:
        self.drop(node.node_id)
        try:
            identity = bytes.fromhex(node.identity)
            root = root_key(identity, "")
        except ValueError:  # it has no KV to share
            return
        if not 0 < len(groups) <= MAX_GROUPS or any(group.block_size < 1 for group in groups):
            logger.warning("%s tells of KV groups that can't be: %s", node.node_id, groups[:4])
            return
        taken = self._retired | sum(known.bit for known in self.nodes.values())
        bit = ~taken & (taken + 1)  # the lowest free bit
        self.nodes[node.node_id] = NodeBlocks(node, bit, identity, root, groups)
        self._alike = None
        self._tables += [{} for _ in range(len(groups) - len(self._tables))]

    def _store(self, known: NodeBlocks, group: int, numbers: Sequence[int]) -> None:
        table, bit, sets = self._tables[group], known.bit, self._sets
        if len(sets) > MAX_SETS:
            sets.clear()
        room = self._max_blocks - len(self)
        for number in numbers:
            name = number >> HASH_SHIFT
            old = table.get(name, 0)
            if old & bit:
                continue
            if known.num_blocks >= self._max_node_blocks or (not old and room <= 0):
                self.dropped += 1
                continue
            room -= not old
            new = old | bit
            table[name] = sets.setdefault(new, new)
            known.num_blocks += 1

    def _remove(self, known: NodeBlocks, group: int, numbers: Sequence[int]) -> None:
        table, bit = self._tables[group], known.bit
        for number in numbers:
            name = number >> HASH_SHIFT
            old = table.get(name, 0)
            if old & bit:
                known.num_blocks -= 1
                self._keep(table, name, old ^ bit)

    def _keep(self, table: dict[int, int], name: int, nodes: int) -> None:
        if nodes:
            table[name] = self._sets.setdefault(nodes, nodes)
        else:
            del table[name]

    def drop(self, node_id: str) -> None:
        """Forget a node's blocks."""
        known = self.nodes.pop(node_id, None)
        if known is not None:
            self._retired |= known.bit
            self._alike = None

    async def sweep(self) -> None:
        """Remove dropped nodes from the entries, yielding to other tasks in between."""
        gone = self._retired
        if not gone:
            return
        for table in self._tables:
            for done, name in enumerate(list(table)):
                held = table.get(name, 0)
                if held & gone:
                    self._keep(table, name, held & ~gone)
                if not done % SWEPT_AT_ONCE:
                    await asyncio.sleep(0)
        self._retired &= ~gone

    # --- lookups ---

    def cached(self, request: AddRequest) -> dict[str, int]:
        """Prompt tokens that nodes hold as a prefix which they can use, by node id.

        Nodes that hold none are left out. The last token counts, too, though it is always computed.
        """
        if self._alike is None:
            self._alike = {}
            for known in self.nodes.values():
                self._alike.setdefault((known.identity, known.groups), []).append(known)
        found: dict[str, int] = {}
        for (identity, groups), nodes in self._alike.items():
            sizes = {group.block_size for group in groups}
            if len(sizes) > 1:
                continue  # no engine has such groups: prefixes would end inside blocks
            (size,) = sizes
            salt = request.cache_salt
            root = root_key(identity, salt) if salt else nodes[0].root
            keys = self.keys(request, root, size)
            hashes = (_hash_of(key)[0] >> HASH_SHIFT for key in keys)
            bits = sum(known.bit for known in nodes)
            held = self.match(hashes, groups, bits, len(request.token_ids))
            for known in nodes:
                if known.bit in held:
                    found[known.node.node_id] = held[known.bit] * size
        return found

    def keys(self, request: AddRequest, root: bytes, block_size: int) -> Iterator[bytes]:
        """Keys of the whole blocks of a prompt, in order."""
        extras = extras_of(request.items)
        return iter_block_keys(root, request.token_ids, block_size, extras=extras)

    def match(
        self, hashes: Iterator[int], groups: tuple[CachedGroup, ...], nodes: int, num_tokens: int
    ) -> dict[int, int]:
        """Number of blocks of the longest prefix that each node can use, by bit, without zeros.

        Args:
            hashes: Hashes of the prompt's blocks, consumed no further than needed.
            groups: KV groups of the nodes, all of one block size.
            nodes: Bits of the nodes to look up.
            num_tokens: Number of prompt tokens.
        """
        size = groups[0].block_size
        full = [self._tables[g].get for g, group in enumerate(groups) if not group.window]
        windows = [(self._tables[g].get, group) for g, group in enumerate(groups) if group.window]
        seen: list[int] = []
        ends: list[tuple[int, int]] = []  # number of blocks, and nodes that have exactly that many
        have, last, count = _all_of(full), -1, 0
        for name in hashes:
            if windows:
                seen.append(name)
            held = have(name, 0)
            if held is not last:  # mostly it is the same set again
                last, left = held, held & nodes
                if left != nodes:
                    ends.append((count, nodes ^ left))
                    nodes = left
                    if not nodes:
                        break
            count += 1
        ends.append((count, nodes))
        found: dict[int, int] = {}
        for count, some in ends:
            while some:
                usable, rest = _usable(seen, count, some, windows, size, num_tokens)
                some ^= rest
                while rest:
                    bit = rest & -rest
                    rest ^= bit
                    if usable:
                        found[bit] = usable
        return found


def _all_of(tables: Sequence[Callable[[int, int], int]]) -> Callable[[int, int], int]:
    """Lookup of the nodes that have a block in all of these groups; all nodes without groups."""
    if len(tables) == 1:
        return tables[0]

    def have(name: int, _: int) -> int:
        held = -1
        for get in tables:
            held &= get(name, 0)
        return held

    return have


def _usable(
    seen: Sequence[int],
    count: int,
    nodes: int,
    windows: Sequence[tuple[Callable[[int, int], int], CachedGroup]],
    size: int,
    num_tokens: int,
) -> tuple[int, int]:
    """As `KVCacheManager.usable`: blocks of the longest usable prefix, and the nodes it is for.

    First come the nodes that have all blocks that windows need, together; then one at a time.
    """
    alone = False
    while count:
        held, hole = nodes, -1
        position = min(count * size, num_tokens - 1)
        for get, group in windows:
            first = first_attended(position, group.window, group.chunked) // size
            for i in range(count - 1, first - 1, -1):
                left = held & get(seen[i], 0)
                if not left:
                    hole = i
                    break
                held = left
            if hole >= 0:
                break
        if hole < 0:
            return count, held
        if not alone:
            nodes, alone = nodes & -nodes, True
            continue
        count = hole
    return 0, nodes

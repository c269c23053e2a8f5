"""The physical blocks that all KV groups of an engine share: who owns each, and which are free.

Blocks of all groups have the same number of bytes (`engine.kv_groups`), so any free block may serve
any group. A block belongs to the group that it was last allocated for.

Laws of this file:

1. Block 0 is the null block. It is never allocated, and references to it are not counted.
2. A block is allocated only if no request refers to it, no remote writer may write it, no
   transfer may read it, and the last step that may touch it is over (its *fence* has passed).
3. A block with a key is immutable. Without owner it stays in the prefix cache; when free blocks run
   out, the least recently used cached block is evicted first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

NULL_BLOCK = 0


class BlockPool:
    """Reference counts and free lists of physical blocks.

    Attributes:
        num_blocks: Blocks in memory, null block included.
        group: Per block, the group that it was last allocated for.
        refs: Per block, number of references from block tables of requests.
        incoming: Per block, number of hand-overs that may still write it.
        outgoing: Per block, number of transfers that may still read it.
        fences: Per block, number of the last step that may touch it.
        keys: Per block, its key in the prefix cache, or None.
        keyed: Per block, 1 if it has a key, else 0.
        by_key: Per group, block by key.
        launched: Number of the last step planned, which may touch blocks given back from now on.
        updated: Number of the last step that is over.
        on_forget: Callbacks for each (group, key) that leaves the prefix cache.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        assert num_blocks > 1, "a pool needs a block beside the null block"
        self.num_blocks = num_blocks
        self.group = array("q", bytes(8 * num_blocks))
        self.refs = array("q", bytes(8 * num_blocks))
        self.incoming = array("q", bytes(8 * num_blocks))
        self.outgoing = array("q", bytes(8 * num_blocks))
        self.fences = array("q", bytes(8 * num_blocks))
        self.keys: list[bytes | None] = [None] * num_blocks
        self.keyed = bytearray(num_blocks)
        self.by_key: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self.launched = 0
        self.updated = 0
        self.on_forget: list[Callable[[int, bytes], None]] = []
        self._free = deque(range(1, num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._fenced: dict[int, None] = {}

    # --- what there is ---

    @property
    def usable(self) -> int:
        """Number of blocks that requests can have in all."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Number of blocks that `allocate` could return now, unowned cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_uncached(self) -> int:
        """Number of free blocks without cached content."""
        return len(self._free)

    @property
    def num_fenced(self) -> int:
        """Number of blocks that become free when the steps in flight are over."""
        return len(self._fenced)

    def lists(self) -> dict[str, list[int]]:
        """Blocks without owner, by the list that contains them (for the ledger)."""
        return {
            "free": list(self._free),
            "cached": list(self._cached),
            "fenced": list(self._fenced),
        }

    def match(self, keys: Iterable[bytes], group: int = 0) -> list[int]:
        """Cached blocks of a group for the longest prefix of `keys`."""
        blocks, by_key = [], self.by_key[group]
        for key in keys:
            block = by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def evictable(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are unowned and cached, so that `num_free` counts them."""
        return sum(block in self._cached for block in blocks)

    # --- references of requests ---

    def allocate(self, count: int, group: int = 0) -> list[int]:
        """Allocate `count` blocks for a group, each with one reference; uncached ones first.

        They are sorted by number, since contiguous blocks are transferred in one piece.
        """
        assert count <= self.num_free, f"asked for {count} blocks of {self.num_free} free ones"
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.popleft()
            else:
                block = self._cached.popitem(last=False)[0]
                self._forget(block)
            self.refs[block], self.group[block] = 1, group
            blocks.append(block)
        blocks.sort()
        return blocks

    def ref(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that are cached or already referenced."""
        refs = self.refs  # a local: a long prompt has thousands of blocks
        for block in blocks:
            if refs[block]:
                refs[block] += 1
            elif block != NULL_BLOCK:
                self._own(block)
                refs[block] = 1

    def deref(self, blocks: Sequence[int]) -> None:
        """Drop references. A sequence's last block is evicted before its first."""
        refs, fences, launched = self.refs, self.fences, self.launched
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            assert refs[block] > 0, f"block {block} has no reference to give back"
            refs[block] -= 1
            fences[block] = launched
            if not refs[block]:
                self._disown(block)

    # --- holds of transfers ---

    def hold_outgoing(self, blocks: Iterable[int]) -> None:
        """Keep blocks unchanged until `release_outgoing`, since a transfer may read them."""
        for block in blocks:
            self._own(block)
            self.outgoing[block] += 1

    def release_outgoing(self, blocks: Iterable[int]) -> None:
        """Undo one `hold_outgoing`."""
        for block in blocks:
            assert self.outgoing[block] > 0, f"block {block} is not held for a transfer"
            self.outgoing[block] -= 1
            self._disown(block)

    def hold_incoming(self, blocks: Iterable[int]) -> None:
        """Mark newly allocated blocks of one request that a remote writer may write."""
        for block in blocks:
            assert self.refs[block] == 1, f"block {block} is not private to one request"
            assert self.keys[block] is None, f"block {block} is in the prefix cache"
            assert not self.outgoing[block], f"block {block} is being sent"
            self.incoming[block] += 1

    def release_incoming(self, blocks: Iterable[int]) -> None:
        """Undo one `hold_incoming`, once no write can land any more."""
        for block in blocks:
            assert self.incoming[block] > 0, f"block {block} awaits no writer"
            self.incoming[block] -= 1
            self._disown(block)

    # --- the prefix cache ---

    def commit(self, block: int, key: bytes) -> None:
        """Put a full, final block into the prefix cache; a key that exists keeps its block."""
        by_key = self.by_key[self.group[block]]
        if block != NULL_BLOCK and key not in by_key:
            assert self.refs[block] > 0, f"block {block} belongs to no request"
            assert self.keys[block] is None, f"block {block} is cached under another key"
            by_key[key] = block
            self.keys[block], self.keyed[block] = key, 1

    def evict(self, blocks: Iterable[int]) -> int:
        """Remove blocks from the prefix cache, owned or not; returns how many were in it."""
        dropped = 0
        for block in blocks:
            if self.keys[block] is None:
                continue
            dropped += 1
            self._forget(block)
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)
        return dropped

    def reset_cache(self) -> int:
        """Remove all blocks from the prefix cache; returns how many there were."""
        return self.evict([block for by_key in self.by_key for block in by_key.values()])

    def _forget(self, block: int) -> None:
        key = self.keys[block]
        assert key is not None, f"block {block} has no key"
        group = self.group[block]
        del self.by_key[group][key]
        self.keys[block], self.keyed[block] = None, 0
        for listener in self.on_forget:
            listener(group, key)

    # --- steps ---

    def settle(self, number: int) -> None:
        """Note that a step is over: blocks fenced only by it become free."""
        self.updated = number
        for block in [block for block in self._fenced if self.fences[block] <= number]:
            del self._fenced[block]
            self._disown(block)

    # --- from owned to unowned and back ---

    def _own(self, block: int) -> None:
        """Take a block that is about to get an owner off the lists of unowned blocks."""
        if not (self.refs[block] or self.incoming[block] or self.outgoing[block]):
            assert self.keys[block] is not None, f"block {block} is free, not cached"
            self._cached.pop(block, None)
            self._fenced.pop(block, None)

    def _disown(self, block: int) -> None:
        """Put a block that has lost its last owner on the list where it belongs."""
        if self.refs[block] or self.incoming[block] or self.outgoing[block]:
            return
        if self.fences[block] > self.updated:
            self._fenced[block] = None
        elif self.keys[block] is not None:
            self._cached[block] = None
        else:
            self._free.append(block)

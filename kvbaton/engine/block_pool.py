"""The blocks that all KV groups of an engine share: who owns each one, and which may be handed out.

Blocks of all groups are equal in bytes (`engine.kv_groups`), so any block may serve any group: what
one group does not need, the others have. It belongs to the group that it was handed out for until
it is handed out again.

Laws of this file:

1. Block 0 is the null block. It is never handed out, and references to it are not counted.
2. A block is handed out only if no request refers to it, no remote writer may write it, no
   transfer may read it, and the last step that may touch it is over (its *fence* has passed).
3. A block with a key is immutable. When nobody owns it, it stays as cache, and the one that was
   used longest ago goes first when blocks run out.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

NULL_BLOCK = 0


class BlockPool:
    """Counts and lists of blocks.

    Attributes:
        num_blocks: blocks in memory, the null block included.
        group: per block, the group that it was handed out for last.
        refs: per block, references from block tables of requests.
        incoming: per block, hand-overs that may still write it.
        outgoing: per block, transfers that may still read it.
        fences: per block, number of the last step that may touch it.
        keys: per block, its key in the prefix cache, or None.
        keyed: per block, 1 if it has one.
        by_key: per group, the block of each key.
        launched: number of the last step planned, which may touch blocks given back from now on.
        updated: number of the last step that is over.
        on_forget: called with each group and key that leaves the prefix cache.
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
        """Blocks that a request could ever get."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_uncached(self) -> int:
        """Those among them that hold nothing."""
        return len(self._free)

    @property
    def num_fenced(self) -> int:
        """Blocks that become free when the steps in flight are over."""
        return len(self._fenced)

    def lists(self) -> dict[str, list[int]]:
        """Blocks without owner, by the list that they are on (for the ledger)."""
        return {
            "free": list(self._free),
            "cached": list(self._cached),
            "fenced": list(self._fenced),
        }

    def match(self, keys: Iterable[bytes], group: int = 0) -> list[int]:
        """Blocks of the longest prefix of `keys` that a group has cached."""
        blocks, by_key = [], self.by_key[group]
        for key in keys:
            block = by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def evictable(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are unowned cache, so that `num_free` counts them."""
        return sum(block in self._cached for block in blocks)

    # --- references of requests ---

    def allocate(self, count: int, group: int = 0) -> list[int]:
        """Hand out `count` blocks to a group, each with one reference; uncached ones first.

        In order of their numbers: what lies together is moved in one piece.
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
        """Refer to blocks once more: cached ones, or ones that another request refers to."""
        refs = self.refs  # of a long prompt's thousands of blocks, before its first step
        for block in blocks:
            if refs[block]:
                refs[block] += 1
            elif block != NULL_BLOCK:
                self._own(block)
                refs[block] = 1

    def deref(self, blocks: Sequence[int]) -> None:
        """Give references back. A sequence's last block becomes the first to be evicted."""
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
        """Keep blocks as they are until `release_outgoing`: a transfer may read them."""
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
        """Mark fresh blocks of a request: a remote writer may write them."""
        for block in blocks:
            assert self.refs[block] == 1, f"block {block} is not private to one request"
            assert self.keys[block] is None, f"block {block} is in the prefix cache"
            assert not self.outgoing[block], f"block {block} is being sent"
            self.incoming[block] += 1

    def release_incoming(self, blocks: Iterable[int]) -> None:
        """Undo one `hold_incoming`: no write can land any more."""
        for block in blocks:
            assert self.incoming[block] > 0, f"block {block} awaits no writer"
            self.incoming[block] -= 1
            self._disown(block)

    # --- the prefix cache ---

    def commit(self, block: int, key: bytes) -> None:
        """Put a full, final block into the prefix cache. A key that is there keeps its block."""
        by_key = self.by_key[self.group[block]]
        if block != NULL_BLOCK and key not in by_key:
            assert self.refs[block] > 0, f"block {block} belongs to no request"
            assert self.keys[block] is None, f"block {block} is cached under another key"
            by_key[key] = block
            self.keys[block], self.keyed[block] = key, 1

    def evict(self, blocks: Iterable[int]) -> int:
        """Take blocks out of the prefix cache, owned or not; returns how many were in it."""
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
        """Take all blocks out of the prefix cache; returns how many there were."""
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
        """A step is over: blocks that only waited for it become free."""
        self.updated = number
        for block in [block for block in self._fenced if self.fences[block] <= number]:
            del self._fenced[block]
            self._disown(block)

    # --- from owned to unowned and back ---

    def _own(self, block: int) -> None:
        """About to get an owner: take it off the lists of unowned blocks."""
        if not (self.refs[block] or self.incoming[block] or self.outgoing[block]):
            assert self.keys[block] is not None, f"block {block} is free, not cached"
            self._cached.pop(block, None)
            self._fenced.pop(block, None)

    def _disown(self, block: int) -> None:
        """Lost an owner: if it was the last one, put it on the list where it belongs."""
        if self.refs[block] or self.incoming[block] or self.outgoing[block]:
            return
        if self.fences[block] > self.updated:
            self._fenced[block] = None
        elif self.keys[block] is not None:
            self._cached[block] = None
        else:
            self._free.append(block)

"""The KV cache with digest sums that a step keeps on the device, without the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvbaton.engine.cache import KVCache
from kvbaton.engine.cuda.staging import fetch, upload, upload_ids
from kvbaton.kernels.digest import block_sums
from kvbaton.kernels.running_sums import add_sums, start_sums


class CudaKVCache(KVCache):
    """As `KVCache`; every method enqueues on the current stream and returns at once."""

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks with their sums."""
        assert 0 not in targets, "the null block is never written"
        source, target = (upload_ids(ids, self.data.device) for ids in (sources, targets))
        self.data.index_copy_(0, target, self.data.index_select(0, source))
        self.counted[list(targets)] = self.counted[list(sources)]
        if self.sums is not None:
            self.sums.index_copy_(0, target, self.sums.index_select(0, source))

    def note_writes(
        self,
        blocks: npt.NDArray[np.int64],
        offsets: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
    ) -> None:
        """Before a step writes tokens: account for them, and take out counted ones they replace.

        Args:
            blocks: [tokens], sequence after sequence.
            offsets: [tokens], slot in the block.
            positions: [tokens], absolute.
        """
        if self.sums is None:
            return
        first = np.flatnonzero(np.diff(blocks, prepend=0))
        self.counted[blocks[first][offsets[first] == 0]] = 0
        for index in first[offsets[first] < self.counted[blocks[first]]]:
            self._take_out(int(blocks[index]), int(offsets[index]), int(positions[index]))
        np.maximum.at(self.counted, blocks, offsets + 1)

    def _take_out(self, block: int, offset: int, position: int) -> None:
        """Subtract a block's counted slots from `offset` on; that one's token is at `position`."""
        assert self.sums is not None
        offsets = np.arange(offset, int(self.counted[block]))
        slots, positions = upload(
            [block * self.block_size + offsets, offsets - offset + position], self.data.device
        )
        add_sums(self.sums, self.data, slots, positions, -1)
        self.counted[block] = offset

    def start_sums(self, slot_mapping: Tensor) -> None:
        """On the device: sums of blocks whose first slot is about to be written begin anew."""
        if self.sums is not None:
            start_sums(self.sums, slot_mapping, self.block_size)

    def add_sums(self, slot_mapping: Tensor, positions: Tensor) -> None:
        """On the device: add the tokens that were just written."""
        if self.sums is not None:
            add_sums(self.sums, self.data, slot_mapping, positions)

    def fetch_kept_sums(self, blocks: Sequence[int]) -> Tensor:
        """Sums kept with blocks, on their way into pinned memory: [blocks, layers, kv, heads]."""
        assert self.sums is not None, "this executor was started without digest sums"
        return fetch(self.sums.index_select(0, upload_ids(blocks, self.data.device)))

    def fetch_digest(
        self, blocks: Sequence[int], first_position: int, start: int, end: int
    ) -> Tensor:
        """Sums recomputed from memory, on their way; see `Executor.digest`."""
        ids = upload_ids(blocks, self.data.device)
        return fetch(block_sums(self.data, ids, first_position, start, end))

"""One rank's paged KV cache: writing tokens, reading pages, and keeping digest sums up to date."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvbaton.connectors.layout import LAYER, KVLayout
from kvbaton.engine.block_memory import BlockMemory, BlockView
from kvbaton.engine.collectives import Shard
from kvbaton.engine.kv_groups import KVGroup, block_bytes
from kvbaton.engine.state_blocks import StateBlocks
from kvbaton.engine.upload import fetch, upload, upload_ids
from kvbaton.kernels.digest import add_sums, block_sums, start_sums
from kvbaton.kernels.rope_write import narrow

LONG_RUN = 4
"""Length of a run of tokens from which on reading whole blocks is cheaper than single tokens."""


class TokenView(BlockView):
    """Blocks as tokens of K and V, or of latent rows, of some heads and layers.

    Args:
        blocks: Blocks of the pool.
        groups: KV groups, all of one shape.
        block_size: Tokens per block.
        dtype: dtype in which K and V are stored.
        compute_dtype: dtype in which they are read.
        shard: The rank's share.
        track_sums: Whether to keep digest sums.

    Attributes:
        shape: Shape of a block.
    """

    def __init__(
        self,
        blocks: Tensor,
        groups: Sequence[KVGroup],
        block_size: int,
        dtype: str,
        compute_dtype: torch.dtype,
        *,
        shard: Shard,
        track_sums: bool,
    ) -> None:
        first = groups[0]
        head_start, heads = shard.kv_heads(first.heads)
        layers = max(len(group.layers) for group in groups)
        self.shape = heads, layers, first.planes, block_size, first.head_dim
        super().__init__(
            blocks,
            self.shape,
            dtype,
            head_start=head_start,
            head_total=first.heads,
            track_sums=track_sums,
        )
        self.block_size, self.compute_dtype = block_size, compute_dtype
        self._value_dim = first.value_dim
        # Torch supports indexing of float8 in some functions only.
        items = blocks if self.data.element_size() == 1 else blocks.view(self.data.dtype)
        self._tokens = items.view(-1, first.head_dim)
        self._pages = items.view(-1, block_size * first.head_dim)
        self._pages_per_block = len(self._pages) // len(blocks)
        self._heads = torch.arange(heads, device=blocks.device) * (layers * first.planes)

    def token_rows(self, slots: Tensor) -> Tensor:
        """Rows of K at place 0, in the pool as rows of one token and head: [tokens * heads].

        Args:
            slots: [tokens] int64: block * block_size + offset.
        """
        size = self.block_size
        pages = (slots // size)[:, None] * self._pages_per_block + self._heads
        return (pages * size + (slots % size)[:, None]).flatten()

    def write(self, place: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Write a layer's scaled K and V, each [tokens, heads, head_dim], at `token_rows`.

        For latent rows, `value` is ignored.
        """
        planes = self.shape[2]
        for kv, x in enumerate((key, value)[:planes]):
            step = (place * planes + kv) * self.block_size
            kept = narrow(x, self.data.dtype).reshape(-1, x.shape[-1])
            self._tokens.index_copy_(0, rows + step, kept.view(self._tokens.dtype))

    def page_rows(self, tables: Tensor) -> Tensor:
        """Rows of K at place 0, as rows of one block and head: [sequences, heads, blocks].

        Args:
            tables: [sequences, blocks] int64, padded with 0.
        """
        return tables[:, None] * self._pages_per_block + self._heads[:, None]

    def read(self, place: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Read copies of K and V at `page_rows`: each [sequences, heads, blocks * size, head_dim].

        For latent rows, V is a view of K.
        """
        flat, shape, planes = rows.flatten(), (*rows.shape[:2], -1, self.shape[-1]), self.shape[2]
        key, *values = (
            self._pages.index_select(0, flat + (place * planes + kv))
            .view(self.data.dtype)
            .to(self.compute_dtype)
            .view(shape)
            for kv in range(planes)
        )
        return key, values[0] if values else key[..., : self._value_dim]

    def read_rows(self, place: int, rows: Tensor) -> Tensor:
        """Read copies of K at `token_rows`: [rows, head_dim]."""
        found = self._tokens.index_select(0, rows + place * self.shape[2] * self.block_size)
        return found.view(self.data.dtype).to(self.compute_dtype)


class KVCache(BlockMemory):
    """Blocks of K and V, or of latent rows; each belongs to one KV group at a time.

    The key of a latent row is the whole row, its value the first features (`KVGroup.value_dim`).
    Groups of one shape share a view of the blocks.

    Writing slot 0 of a block restarts its sum. Writing another slot that is covered first removes
    that slot and all later ones from the sum. On a GPU, only `kept_sums` and `digest` wait for the
    device.

    Args:
        groups: See `kv_groups`: groups of one shape are consecutive, groups of states come last.
        dtype: dtype in which K and V are stored, perhaps float8_e4m3fn.
        compute_dtype: dtype in which K and V are read; None for `dtype`.
        scales: Per layer, scales of K and V for FP8, equal for a latent row; 1 if left out.
        num_blocks: Number of blocks of the pool, null block included.
        block_size: Tokens per block.
        device: Device of the pool.
        shard: The rank's share.
        track_sums: Whether to keep digest sums.
        flag: Flag that set the number of blocks, for errors.
        blocks: See `BlockMemory`.

    Attributes:
        groups: The KV groups.
        num_kv_groups: Number of groups with K and V.
        token_views: View of each of these groups.
        states: View of the groups of states; None if there are none.
        places: Per layer, its group (among those with K and V, or those of states), and its place
            among the layers of a block.
        compute_dtype: dtype in which K and V are read.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        *,
        dtype: str,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        shard: Shard,
        track_sums: bool,
        compute_dtype: str | None = None,
        scales: Mapping[int, tuple[float, float]] | None = None,
        flag: str = "--num-blocks",
        blocks: Tensor | None = None,
    ) -> None:
        num_bytes = block_bytes(groups, block_size, shard.size, dtype)
        super().__init__(num_blocks, num_bytes, block_size, device, flag, blocks)
        of_states = [group for group in groups if group.state_rows]
        self.groups = tuple(groups)
        self.num_kv_groups = len(groups) - len(of_states)
        self.places = {
            layer: (g if g < self.num_kv_groups else g - self.num_kv_groups, place)
            for g, group in enumerate(groups)
            for place, layer in enumerate(group.layers)
        }
        self.compute_dtype: torch.dtype = getattr(torch, compute_dtype or dtype)
        self.token_views: list[TokenView] = []
        for _, alike in groupby(groups[: self.num_kv_groups], lambda group: group.shape):
            same = list(alike)
            view = TokenView(
                self.blocks,
                same,
                block_size,
                dtype,
                self.compute_dtype,
                shard=shard,
                track_sums=track_sums,
            )
            self.token_views += [view] * len(same)
        self.states = StateBlocks(self.blocks, of_states, shard, track_sums) if of_states else None
        self.views = [*self.token_views, *(self.states for _ in of_states if self.states)]
        self.data, self.sums = self.views[0].data, self.views[0].sums
        self.layouts = [
            _layout_of(view.layout, g, group)
            for g, (view, group) in enumerate(zip(self.views, groups, strict=True))
        ]
        self._scales = scales or {}

    def scales(self, layer: int) -> tuple[float, float]:
        """Scales that K and V of a layer are divided by before they are stored."""
        return self._scales.get(layer, (1.0, 1.0))

    def kept(self, x: Tensor) -> Tensor:
        """Scaled K or V as it will be read: rounded to the cache's dtype."""
        return x if x.dtype == self.data.dtype else narrow(x, self.data.dtype).to(x.dtype)

    def _parts(self, slots: Tensor) -> Iterator[tuple[TokenView, Tensor, slice]]:
        """Views with sums, and the part of `slots` (group after group) that belongs to each."""
        each, first = len(slots) // self.num_kv_groups, 0
        for view, alike in groupby(self.token_views):
            past = first + each * len(list(alike))
            if view.sums is not None:
                yield view, view.sums, slice(first, past)
            first = past

    # --- digest sums ---

    def note_writes(
        self,
        blocks: npt.NDArray[np.int64],
        offsets: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
    ) -> None:
        """Account for tokens that a step will write, and remove covered ones that they replace.

        Args:
            blocks: [tokens], group after group, sequence after sequence.
            offsets: [tokens], slot within the block.
            positions: [tokens], absolute.
        """
        if self.sums is None:
            return
        each = max(1, len(blocks) // self.num_kv_groups)
        first = np.flatnonzero(np.diff(blocks, prepend=0))
        self.counted[blocks[first][offsets[first] == 0]] = 0
        for index in first[offsets[first] < self.counted[blocks[first]]]:
            block, offset = int(blocks[index]), int(offsets[index])
            replaced = np.arange(offset, int(self.counted[block]))
            slots, at = upload(
                [block * self.block_size + replaced, replaced - offset + int(positions[index])],
                self.data.device,
            )
            view = self.token_views[int(index) // each]
            assert view.sums is not None
            add_sums(view.sums, view.data, slots, at, -1)
            self.counted[block] = offset
        np.maximum.at(self.counted, blocks, offsets + 1)

    def start_sums(self, slots: Tensor) -> None:
        """Restart the sums of blocks whose first slot is about to be written.

        Args:
            slots: [groups of K and V * tokens] int64, group after group.
        """
        for _, sums, part in self._parts(slots):
            start_sums(sums, slots[part], self.block_size)

    def add_sums(self, slots: Tensor, positions: Tensor) -> None:
        """Add tokens that were just written to the sums.

        Args:
            slots: [groups of K and V * tokens] int64, group after group: block * block_size +
                offset; on a GPU -1 for none.
            positions: Absolute positions, shaped alike, int64.
        """
        for view, sums, part in self._parts(slots):
            if view.data.is_cuda:
                add_sums(sums, view.data, slots[part], positions[part])
            else:
                self._add_sums(view.data, sums, slots[part], positions[part])

    def _add_sums(self, data: Tensor, sums: Tensor, slots: Tensor, positions: Tensor) -> None:
        # Starts of runs: tokens that do not follow their predecessor in its block or the next.
        blocks, offsets = np.divmod(slots.numpy(), self.block_size)
        follows = np.diff(positions.numpy(), prepend=-2) == 1
        follows &= (np.diff(blocks, prepend=-1) == 0) | (offsets == 0)
        borders = np.append(np.flatnonzero(~follows), len(slots))
        lengths = np.diff(borders)
        for start, end in pairwise(borders.tolist()):
            if end - start >= LONG_RUN:  # one sequence: sum whole blocks
                held = blocks[start:end]
                ids = torch.from_numpy(held[np.flatnonzero(np.diff(held, prepend=-1))])
                position = int(positions[start])
                first = position - int(offsets[start])
                found = block_sums(data, ids, first, position, position + end - start)
                sums.index_add_(0, ids, found)
        apart = torch.from_numpy(np.flatnonzero(np.repeat(lengths < LONG_RUN, lengths)))
        if len(apart):
            add_sums(sums, data, slots[apart], positions[apart])

    def fetch_kept_sums(
        self, group: int, blocks: Sequence[int], *, stream: torch.cuda.Stream | None = None
    ) -> Tensor:
        """Start to fetch sums kept with blocks to the host: [blocks, layers, kv, heads].

        They are read on the current stream, and fetched on another one if `stream` is given.
        """
        sums = self.group_sums(group).index_select(0, upload_ids(blocks, self.data.device))
        if stream is None:
            return fetch(sums)
        stream.wait_stream(torch.cuda.current_stream(self.data.device))
        sums.record_stream(stream)
        with torch.cuda.stream(stream):
            return fetch(sums)


def _layout_of(whole: KVLayout, number: int, group: KVGroup) -> KVLayout:
    """Layout of a group's blocks, a part of the layout of whole blocks."""
    (plane,) = whole.planes
    shape = (*plane.shape[:LAYER], len(group.layers), *plane.shape[LAYER + 1 :])
    plane = msgspec.structs.replace(plane, shape=shape, layers=group.layers)
    return msgspec.structs.replace(
        whole, group=number, kind=group.kind, window=group.window, planes=(plane,)
    )

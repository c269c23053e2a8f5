"""One rank's paged KV cache: writing tokens, reading pages, and what that does to the sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from kvbaton.connectors.layout import LAYER, KVLayout
from kvbaton.engine.block_memory import BlockMemory
from kvbaton.engine.collectives import Shard
from kvbaton.engine.kv_groups import KVGroup, block_layers
from kvbaton.engine.state_blocks import StateBlocks
from kvbaton.engine.upload import fetch, upload, upload_ids
from kvbaton.kernels.digest import block_sums
from kvbaton.kernels.rope_write import narrow
from kvbaton.kernels.running_sums import add_sums, start_sums

LONG_RUN = 4
"""Tokens in a row from which on reading their blocks whole is cheaper than token by token."""


class KVCache(BlockMemory):
    """Blocks of K and V, or of latent rows, each of one KV group at a time, as block tables say.

    The key of a latent row is all of it, its value the first features (`KVGroup.value_dim`).

    Writing slot 0 of a block starts its sum anew; writing another slot that is counted takes that
    and all later ones out first. On a GPU nothing but `kept_sums`, `digest` and `adopt` waits for
    the device.

    Args:
        groups: all of equal heads, head_dim and value_dim, but for those of states, which come
            last.
        dtype: of K and V as they lie there, float8_e4m3fn too.
        compute_dtype: of K and V as they are read; None for `dtype`.
        scales: per layer those of K and V, for FP8, of a latent row equal; 1 where there are none.
        num_blocks: of the pool, the null block included.
        block_size: tokens per block.
        device: where it lies.
        shard: the rank's share.
        track_sums: keep digest sums.

    Attributes:
        groups: those.
        num_kv_groups: how many of them have K and V.
        states: the others' states; None if there are none.
        places: per layer its group, among those of K and V or of states, and its place among the
            layers of a block.
        compute_dtype: of K and V as they are read.
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
    ) -> None:
        of_states = [group for group in groups if group.state_rows]
        ((total, head_dim, self._value_dim),) = {
            (g.heads, g.head_dim, g.value_dim) for g in groups if not g.state_rows
        }
        planes = self._planes = groups[0].planes
        head_start, heads = shard.kv_heads(total)
        super().__init__(
            (num_blocks, heads, block_layers(groups), planes, block_size, head_dim),
            dtype=dtype,
            device=device,
            head_start=head_start,
            head_total=total,
            track_sums=track_sums,
        )
        self.groups = tuple(groups)
        self.num_kv_groups = len(groups) - len(of_states)
        self.places = {
            layer: (g if g < self.num_kv_groups else g - self.num_kv_groups, place)
            for g, group in enumerate(groups)
            for place, layer in enumerate(group.layers)
        }
        (layout,) = self.layouts
        self.states = StateBlocks(self.data, of_states, shard, track_sums) if of_states else None
        self.layouts = [
            _layout_of(self.states.layout if group.state_rows and self.states else layout, g, group)
            for g, group in enumerate(groups)
        ]
        self.group_data = [
            (self.states.data if group.state_rows and self.states else self.data)[
                :, :, : self.num_layers(g)
            ]
            for g, group in enumerate(groups)
        ]
        self.compute_dtype: torch.dtype = getattr(torch, compute_dtype or dtype)
        self._scales = scales or {}
        # Torch indexes float8 in part of its functions only.
        data = self.data.view(torch.uint8) if self.data.element_size() == 1 else self.data
        self._tokens = data.view(-1, head_dim)
        self._pages = data.view(-1, block_size * head_dim)
        self._heads = torch.arange(heads, device=device)

    @override
    def group_sums(self, group: int) -> Tensor:
        if self.states is None or group < self.num_kv_groups:
            return super().group_sums(group)
        assert self.states.sums is not None, "this executor was started without digest sums"
        return self.states.sums[:, : self.num_layers(group)]

    @override
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        super().copy(sources, targets)
        if self.states is not None:
            self.states.copy_sums(sources, targets)

    def token_rows(self, slots: Tensor) -> Tensor:
        """Row of K of place 0, in the pool as rows of one token and head: [tokens * heads].

        Args:
            slots: [tokens] int64: block * block_size + offset.
        """
        _, heads, layers, _, size, _ = self.shape
        blocks = (slots // size)[:, None] * heads + self._heads
        return (blocks * (layers * self._planes * size) + (slots % size)[:, None]).flatten()

    def scales(self, layer: int) -> tuple[float, float]:
        """What K and V of a layer are divided by before they are kept."""
        return self._scales.get(layer, (1.0, 1.0))

    def kept(self, x: Tensor) -> Tensor:
        """Scaled K or V as it will be read: rounded to the cache's dtype."""
        return x if x.dtype == self.data.dtype else narrow(x, self.data.dtype).to(x.dtype)

    def write(self, place: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Store a layer's scaled K and V, each [tokens, heads, head_dim], at `token_rows`.

        Of latent rows only `key` is looked at.
        """
        for kv, x in enumerate((key, value)[: self._planes]):
            step = (place * self._planes + kv) * self.block_size
            kept = narrow(x, self.data.dtype).reshape(-1, x.shape[-1])
            self._tokens.index_copy_(0, rows + step, kept.view(self._tokens.dtype))

    def page_rows(self, tables: Tensor) -> Tensor:
        """Row of K of place 0, as rows of one block and head: [sequences, heads, blocks].

        Args:
            tables: [sequences, blocks] int64, padded with 0.
        """
        _, heads, layers, _, _, _ = self.shape
        return (tables[:, None] * heads + self._heads[:, None]) * (layers * self._planes)

    def read(self, place: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """K and V at `page_rows`, copied: each [sequences, heads, blocks * size, head_dim].

        V of latent rows is a view of K.
        """
        flat, shape = rows.flatten(), (*rows.shape[:2], -1, self.shape[-1])
        key, *values = (
            self._pages.index_select(0, flat + (place * self._planes + kv))
            .view(self.data.dtype)
            .to(self.compute_dtype)
            .view(shape)
            for kv in range(self._planes)
        )
        return key, values[0] if values else key[..., : self._value_dim]

    def read_rows(self, place: int, rows: Tensor) -> Tensor:
        """K at `token_rows`, copied: [rows, head_dim]."""
        found = self._tokens.index_select(0, rows + place * self._planes * self.block_size)
        return found.view(self.data.dtype).to(self.compute_dtype)

    # --- digest sums ---

    def note_writes(
        self,
        blocks: npt.NDArray[np.int64],
        offsets: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
    ) -> None:
        """Before a step writes tokens: account for them, and take out counted ones they replace.

        Args:
            blocks: [tokens], group after group, sequence after sequence.
            offsets: [tokens], slot in the block.
            positions: [tokens], absolute.
        """
        if self.sums is None:
            return
        first = np.flatnonzero(np.diff(blocks, prepend=0))
        self.counted[blocks[first][offsets[first] == 0]] = 0
        for index in first[offsets[first] < self.counted[blocks[first]]]:
            block, offset = int(blocks[index]), int(offsets[index])
            replaced = np.arange(offset, int(self.counted[block]))
            slots, at = upload(
                [block * self.block_size + replaced, replaced - offset + int(positions[index])],
                self.data.device,
            )
            add_sums(self.sums, self.data, slots, at, -1)
            self.counted[block] = offset
        np.maximum.at(self.counted, blocks, offsets + 1)

    def start_sums(self, slots: Tensor) -> None:
        """Sums of blocks whose first slot is about to be written begin anew."""
        if self.sums is not None:
            start_sums(self.sums, slots, self.block_size)

    def add_sums(self, slots: Tensor, positions: Tensor) -> None:
        """Add the tokens that were just written.

        Args:
            slots: [tokens] int64: block * block_size + offset; on a GPU -1 for none.
            positions: [tokens] int64, absolute.
        """
        if self.sums is None:
            return
        if self.data.is_cuda:
            add_sums(self.sums, self.data, slots, positions)
            return
        # Where tokens begin that do not follow their predecessor in its block or the next one.
        blocks, offsets = np.divmod(slots.numpy(), self.block_size)
        follows = np.diff(positions.numpy(), prepend=-2) == 1
        follows &= (np.diff(blocks, prepend=-1) == 0) | (offsets == 0)
        borders = np.append(np.flatnonzero(~follows), len(slots))
        lengths = np.diff(borders)
        for start, end in pairwise(borders.tolist()):
            if end - start >= LONG_RUN:  # of one sequence: whole blocks at a time
                held = blocks[start:end]
                ids = torch.from_numpy(held[np.flatnonzero(np.diff(held, prepend=-1))])
                position = int(positions[start])
                first = position - int(offsets[start])
                sums = block_sums(self.data, ids, first, position, position + end - start)
                self.sums.index_add_(0, ids, sums)
        apart = torch.from_numpy(np.flatnonzero(np.repeat(lengths < LONG_RUN, lengths)))
        if len(apart):
            add_sums(self.sums, self.data, slots[apart], positions[apart])

    def fetch_kept_sums(self, group: int, blocks: Sequence[int]) -> Tensor:
        """Sums kept with blocks, on their way into host memory: [blocks, layers, kv, heads]."""
        sums = self.group_sums(group).index_select(0, upload_ids(blocks, self.data.device))
        return fetch(sums.contiguous())

    def fetch_digest(
        self, group: int, blocks: Sequence[int], first_position: int, start: int, end: int
    ) -> Tensor:
        """Sums recomputed from memory, on their way; see `Executor.digest`."""
        ids = upload_ids(blocks, self.data.device)
        return fetch(block_sums(self.group_data[group], ids, first_position, start, end))


def _layout_of(whole: KVLayout, number: int, group: KVGroup) -> KVLayout:
    """What a group's blocks hold, of the layout of whole ones."""
    (plane,) = whole.planes
    shape = (*plane.shape[:LAYER], len(group.layers), *plane.shape[LAYER + 1 :])
    plane = msgspec.structs.replace(plane, shape=shape, layers=group.layers)
    return msgspec.structs.replace(
        whole, group=number, kind=group.kind, window=group.window, planes=(plane,)
    )

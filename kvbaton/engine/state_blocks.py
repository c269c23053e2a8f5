"""States of layers without K and V, one per block: where they are, and which ones a step updates.

A state summarises all tokens before. Block i of a sequence is overwritten by each of its tokens;
once full, it stays as a snapshot (`kv_cache_manager`). So a step reads the state in the block of
the last computed token, and writes to the block of its own last token. In between it leaves a
snapshot in the last block that it fills, if that block is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvbaton.connectors.layout import GroupKind
from kvbaton.engine.block_memory import BlockView
from kvbaton.engine.collectives import Shard
from kvbaton.engine.kv_groups import STATE_DTYPE, KVGroup
from kvbaton.engine.upload import upload
from kvbaton.kernels.delta_rule import LayerStates, PromptRows, cut
from kvbaton.kernels.digest import add_sums


class StateBlocks(BlockView):
    """Blocks as states; the null block is the state before all tokens: zeros.

    Data is [blocks, heads, layers, rows, 1, features]; smaller groups use only the first layers.
    Sums are those of a single token: the last one that the state includes.

    Args:
        blocks: Blocks of the pool; each has room for a state of the largest group.
        groups: Groups of states, all of equal shape.
        shard: This rank's share.
        track_sums: Whether to keep digest sums.
    """

    def __init__(
        self, blocks: Tensor, groups: Sequence[KVGroup], shard: Shard, track_sums: bool
    ) -> None:
        ((total, rows, features),) = {(g.heads, g.state_rows, g.head_dim) for g in groups}
        layers = max(len(group.layers) for group in groups)
        head_start, heads = shard.span(total)
        super().__init__(
            blocks,
            (heads, layers, rows, 1, features),
            STATE_DTYPE,
            name="state",
            kind=GroupKind.STATE,
            head_start=head_start,
            head_total=total,
            track_sums=track_sums,
        )


@dataclass(frozen=True)
class StateBatch:
    """The states that a step updates, one per row: decoding sequences, then parts of prompts.

    Attributes:
        states: The pool's states.
        places: Per layer, its group among those of states, and its place among a block's layers.
        reads: [groups, rows] int64, block with the state before a row's tokens.
        writes: [groups, rows] int64, block for the state after them.
        ends: [rows] int64, position of a row's last token.
        num_decodes: Number of rows with one token, which come first, in the batch too.
        prompts: The other rows; None if there are none.
        live: [rows], False for padding; None if there is none.
    """

    states: StateBlocks
    places: Mapping[int, tuple[int, int]]
    reads: Tensor
    writes: Tensor
    ends: Tensor
    num_decodes: int
    prompts: PromptRows | None = None
    live: Tensor | None = None

    def of(self, layer: int) -> LayerStates:
        """States of a layer."""
        group, place = self.places[layer]
        data = self.states.data[:, :, place, :, 0]
        return LayerStates(
            data, self.reads[group], self.writes[group], self.num_decodes, self.prompts
        )

    def sign(self) -> None:
        """Store the sums of what was written, after all layers."""
        if self.states.sums is None:
            return
        for writes in self.writes:
            self.states.sums.index_fill_(0, writes, 0)  # the null block's are 0 in any case
            slots = writes if self.live is None else torch.where(self.live, writes, -1)
            add_sums(self.states.sums, self.states.data, slots, self.ends)


def step_states(
    states: StateBlocks,
    places: Mapping[int, tuple[int, int]],
    block_size: int,
    starts: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    tables: npt.NDArray[np.int64],
) -> StateBatch:
    """Determine the states that a step updates.

    Args:
        states: The pool's states.
        places: See `StateBatch`.
        block_size: Tokens per block.
        starts: [sequences], position of each sequence's first token.
        counts: [sequences], number of tokens of each.
        tables: [sequences, groups of states, blocks].
    """
    num_decodes = int(np.argmax(counts > 1)) if (counts > 1).any() else len(counts)
    ends, first = starts + counts, np.cumsum(counts) - counts
    rows, bounds = list[tuple[int, int, int]](), list[int]()
    for i, (start, end, at) in enumerate(np.stack((starts, ends, first), 1).tolist()):
        border, cuts = end - end % block_size, [start, end]
        if start < border < end and tables[i, :, border // block_size - 1].all():
            cuts = [start, border, end]
        for low, high in pairwise(cuts):
            rows.append((i, low, high))
            bounds.append(at + low - start)
    of, low, high = np.array(rows, np.int64).T
    reads = np.where(low > 0, tables[of, :, np.maximum(low - 1, 0) // block_size].T, 0)
    writes = tables[of, :, (high - 1) // block_size].T
    assert writes.all(), "a step has no block for its states"
    arrays = [reads, writes, high - 1]
    if num_decodes < len(counts):
        spans = np.array([*bounds, counts.sum()], np.int64)
        sequences = np.searchsorted(of, np.arange(num_decodes, len(counts) + 1))
        chunks, pieces = cut(spans[num_decodes:]), cut(spans[sequences])
        arrays += [spans, sequences, chunks, pieces]
    sent = upload(arrays, states.data.device)
    read, write, last, *rest = (x.view(y.shape) for x, y in zip(sent, arrays, strict=True))
    prompts = PromptRows(*rest) if rest else None
    return StateBatch(states, places, read, write, last, num_decodes, prompts)

"""Plans of copies: which byte ranges move tokens of a KV group from one side to the other.

Planning is a pure function of the layouts and uses only their strides. It has three stages, all
vectorised over blocks:

1. *Segments*: tokens [start, end) are cut where a block of either side ends, so each segment lies
   in one block of each side. Segments that are adjacent in memory on both sides are merged.
2. *Runs*: within a segment, axes that are contiguous on both sides are merged into one run of
   bytes. A box of runs remains, with a source and a target stride per axis; axes that continue each
   other on both sides are merged.
3. *Rows*: the longest axis of the box becomes `COUNT`, and each place along the other axes becomes
   a row. Blocks that are adjacent in memory on both sides lengthen the run, or raise the count.

A state group has blocks of one token: the snapshot after n tokens is logical block n - 1. It moves
with the range that holds token n - 1, if both sides list that block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvbaton.connectors.base import RangeColumn, Ranges
from kvbaton.connectors.layout import BLOCK, FEATURE, HEAD, KV, LAYER, TOKEN, KVLayout, Plane
from kvbaton.connectors.pairing import GroupPairing, PlaneShare
from kvbaton.errors import LayoutMismatchError
from kvbaton.types import Spans

Ints = npt.NDArray[np.int64]

BlockTable = Ints
"""Physical block id of each logical block of a prompt, int64 [n]; -1 where there is none."""


class Step(NamedTuple):
    """One axis of a box of runs: its size, and its stride in bytes on each side."""

    size: int
    source: int
    target: int


class TokenSegments(NamedTuple):
    """Segments of the token range that lie in one block of each side; int64 [n] each.

    `source_slot` and `target_slot` are the positions of a segment's first token in its two blocks.
    """

    source_block: Ints
    source_slot: Ints
    target_block: Ints
    target_slot: Ints
    tokens: Ints


def block_tables(spans: Spans, groups: Sequence[KVLayout], num_tokens: int) -> list[BlockTable]:
    """Per group, the block table of a prompt; blocks beyond the prompt's end are left out."""
    tables = []
    for group, group_spans in zip(groups, spans, strict=True):
        table = np.full(-(-num_tokens // group.block_size), -1, np.int64)
        for span in group_spans:
            size = max(0, min(len(span.blocks), len(table) - span.first))
            table[span.first : span.first + size] = span.blocks[:size]
        tables.append(table)
    return tables


def plan(
    pairing: GroupPairing, source_table: BlockTable, target_table: BlockTable, start: int, end: int
) -> dict[tuple[int, int], Ranges]:
    """Plan the copy of tokens [start, end) of one group.

    Tokens without a block on either side are not moved.

    Args:
        pairing: Pairing of the group.
        source_table: Block table of the sequence on the source, the same on every rank.
        target_table: Likewise on the target.
        start: First token.
        end: One past the last token.

    Returns:
        For each (source rank, target rank) pair that shares bytes, the ranges to copy, int64
        [n, 8]. All ranges together write each target byte at most once.

    Raises:
        LayoutMismatchError: A table names a block outside of the pool.
    """
    if start >= end:
        return {}
    layouts = pairing.sources[0], pairing.targets[0]
    sizes = layouts[0].block_size, layouts[1].block_size
    borders = np.arange(start // sizes[0] * sizes[0], end, sizes[0])
    if sizes[0] != sizes[1]:
        others = np.arange(start // sizes[1] * sizes[1], end, sizes[1])
        borders = np.union1d(borders, others)
    starts = np.unique(np.maximum(borders, start))
    tokens = np.diff(starts, append=end)
    source, target = source_table[starts // sizes[0]], target_table[starts // sizes[1]]
    for side, blocks, layout in zip(("source", "target"), (source, target), layouts, strict=True):
        if blocks.max() >= layout.num_blocks:
            raise LayoutMismatchError(
                f"group {layout.group}: the {side} names block {blocks.max()}, its pool has "
                f"{layout.num_blocks} blocks"
            )
    listed = (source >= 0) & (target >= 0)
    slots = starts % sizes[0], starts % sizes[1]
    whole = TokenSegments(source, slots[0], target, slots[1], tokens)
    segments = whole if listed.all() else TokenSegments(*(column[listed] for column in whole))
    planned: dict[tuple[int, int], Ranges] = {}
    if len(segments.tokens):
        for pair, shares in pairing.shares.items():
            rows: list[Ranges] = []
            for share in shares:
                rows += _rows_of(share, segments)
            planned[pair] = np.concatenate(rows)
    return planned


def total_bytes(ranges: Ranges) -> int:
    """Bytes that ranges move."""
    return int((ranges[:, RangeColumn.LENGTH] * ranges[:, RangeColumn.COUNT]).sum())


def needed_bytes(
    pairing: GroupPairing, target_table: BlockTable, start: int, end: int, num_tokens: int
) -> int:
    """Minimum bytes to transfer: each token of [start, end) once per target rank that stores it.

    In the first block of a window only tokens that the next token attends to count; a plan also
    moves the tokens before them, if the source has them.

    Args:
        pairing: Pairing of the group.
        target_table: Block table of the wanted blocks.
        start: First token.
        end: One past the last token.
        num_tokens: Length of the whole prompt.
    """
    layout = pairing.targets[0]
    if layout.window:
        start = max(start, layout.kind.first_attended(num_tokens, layout.window))
    if start >= end:
        return 0
    size = layout.block_size
    wanted = np.flatnonzero(target_table[start // size : -(-end // size)] >= 0) + start // size
    tokens = np.minimum((wanted + 1) * size, end) - np.maximum(wanted * size, start)
    return int(tokens.sum()) * sum(target.token_bytes for target in pairing.targets)


def swap(ranges: Ranges) -> Ranges:
    """The same copies in the other direction."""
    column = RangeColumn
    order = [
        column.TARGET_REGION,
        column.TARGET_OFFSET,
        column.SOURCE_REGION,
        column.SOURCE_OFFSET,
        column.LENGTH,
        column.COUNT,
        column.TARGET_STRIDE,
        column.SOURCE_STRIDE,
    ]
    return ranges[:, order]


# --- runs ---


class Box(NamedTuple):
    """The copy of one segment: a run of `length` bytes, repeated along `steps`.

    `steps` are sorted by size, the longest last.
    """

    length: int
    steps: tuple[Step, ...]


@lru_cache(maxsize=4096)
def _box(steps: tuple[Step, ...], item_size: int) -> Box:
    """Merge contiguous steps into one run, and the remaining steps where one continues another."""
    length, left = item_size, [step for step in steps if step.size > 1]
    while touching := [step for step in left if step.source == step.target == length]:
        left.remove(touching[0])
        length *= touching[0].size
    left.sort(key=lambda step: step.source)
    merged: list[Step] = []
    for step in left:
        inner = merged[-1] if merged else None
        if inner and (step.source, step.target) == (
            inner.source * inner.size,
            inner.target * inner.size,
        ):
            merged[-1] = inner._replace(size=inner.size * step.size)
        else:
            merged.append(step)
    return Box(length, tuple(sorted(merged, key=lambda step: step.size)))


@lru_cache(maxsize=1024)
def _layer_steps(
    source: Plane, target: Plane, layers: tuple[int, ...]
) -> tuple[tuple[int, int, Step], ...]:
    """Cut shared layers into evenly spaced series: source offset, target offset and step each."""
    source_at = [source.layers.index(layer) * source.strides[LAYER] for layer in layers]
    target_at = [target.layers.index(layer) * target.strides[LAYER] for layer in layers]
    series = []
    begin = 0
    while begin < len(layers):
        size, source_step, target_step = 1, 0, 0
        while begin + size < len(layers):
            here = begin + size
            steps = source_at[here] - source_at[here - 1], target_at[here] - target_at[here - 1]
            if size > 1 and steps != (source_step, target_step):
                break
            source_step, target_step = steps
            size += 1
        series.append((source_at[begin], target_at[begin], Step(size, source_step, target_step)))
        begin += size
    return tuple(series)


# --- rows ---


def _rows_of(share: PlaneShare, segments: TokenSegments) -> list[Ranges]:
    """Rows that copy a share of a plane: a table [n, 8] per segment length and layer series."""
    source, target = share.source, share.target
    heads = share.head_end - share.head_start
    source_at = source.offset + (share.head_start - source.head_start) * source.strides[HEAD]
    target_at = target.offset + (share.head_start - target.head_start) * target.strides[HEAD]
    tokens, steps = segments.tokens, (source.strides[TOKEN], target.strides[TOKEN])
    source_base = segments.source_block * source.strides[BLOCK] + segments.source_slot * steps[0]
    target_base = segments.target_block * target.strides[BLOCK] + segments.target_slot * steps[1]
    joined = (np.diff(source_base) == tokens[:-1] * steps[0]) & (
        np.diff(target_base) == tokens[:-1] * steps[1]
    )
    if joined.any():  # merge neighbours whose tokens are adjacent in memory on both sides
        firsts = np.flatnonzero(np.concatenate(([True], ~joined)))
        tokens = np.add.reduceat(tokens, firsts)
        source_base, target_base = source_base[firsts], target_base[firsts]
    fixed = tuple(
        Step(size, source.strides[axis], target.strides[axis])
        for axis, size in ((HEAD, heads), (KV, source.shape[KV]), (FEATURE, source.shape[FEATURE]))
    )
    block = Step(0, source.strides[BLOCK], target.strides[BLOCK])
    rows = []
    for count in np.unique(tokens):
        chosen = tokens == count
        bases = source_base[chosen] + source_at, target_base[chosen] + target_at
        token = Step(int(count), source.strides[TOKEN], target.strides[TOKEN])
        for source_layer, target_layer, layer in _layer_steps(source, target, share.layers):
            box = _box((*fixed, token, layer), source.item_size)
            table = _box_rows(box, bases[0] + source_layer, bases[1] + target_layer, block)
            table[:, RangeColumn.SOURCE_REGION] = source.region
            table[:, RangeColumn.TARGET_REGION] = target.region
            rows.append(table)
    return rows


def _box_rows(box: Box, source: Ints, target: Ints, block: Step) -> Ranges:
    """Rows that copy one box at each base offset, in the form that takes the fewest rows."""
    follows = (np.diff(source) == block.source) & (np.diff(target) == block.target)
    firsts = np.flatnonzero(np.concatenate(([True], ~follows)))
    sizes = np.diff(firsts, append=len(source))
    outer, inner = box.steps[:-1], box.steps[-1] if box.steps else Step(1, 0, 0)
    if block.source == block.target == box.length:  # blocks touch: longer runs
        return _rows(source[firsts], target[firsts], box.length * sizes, inner.size, inner, outer)
    if (block.source, block.target) == (inner.source * inner.size, inner.target * inner.size):
        # the blocks continue the series of runs within them: one long series
        counts = inner.size * sizes
        return _rows(source[firsts], target[firsts], box.length, counts, inner, outer)
    if len(firsts) * inner.size < len(source):  # counting blocks takes fewer rows
        return _rows(source[firsts], target[firsts], box.length, sizes, block, box.steps)
    return _rows(source, target, box.length, inner.size, inner, outer)


def _rows(
    source: Ints,
    target: Ints,
    length: Ints | int,
    count: Ints | int,
    counted: Step,
    outer: tuple[Step, ...],
) -> Ranges:
    """One row for each base and each position along the outer steps; the regions are left 0."""
    source_at = target_at = np.zeros(1, np.int64)
    for step in outer:
        places = np.arange(step.size)
        source_at = (source_at[:, None] + places * step.source).ravel()
        target_at = (target_at[:, None] + places * step.target).ravel()
    table = np.zeros((len(source), len(source_at), len(RangeColumn)), np.int64)
    repeated = np.reshape(count, (-1, 1))
    table[..., RangeColumn.SOURCE_OFFSET] = source[:, None] + source_at
    table[..., RangeColumn.TARGET_OFFSET] = target[:, None] + target_at
    table[..., RangeColumn.LENGTH] = np.reshape(length, (-1, 1))
    table[..., RangeColumn.COUNT] = repeated
    table[..., RangeColumn.SOURCE_STRIDE] = np.where(repeated > 1, counted.source, 0)
    table[..., RangeColumn.TARGET_STRIDE] = np.where(repeated > 1, counted.target, 0)
    return table.reshape(-1, len(RangeColumn))

"""Sharing the keys of a decode step among programs: parts of about one size, whatever the lengths.

A sequence that is far longer than the others has more parts, and few sequences have several each.
The device decides, so that replays of a CUDA graph follow the lengths; all layers that see the same
tokens share the decision. Sources: Ye et al., "FlashInfer", arXiv 2501.01005, section 3.3; Dao et
al., "Flash-Decoding for long-context inference" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbaton.kernels.jit import cdiv, jit, launch_next, next_power_of_2, tl
from kvbaton.kernels.paged_attention import first_key

LEAST, MOST_LEAST = 64, 768
"""Tokens: no part is shorter, unless its sequence is; with many programs the second."""

MERGED_PARTS = 16
"""Parts that are merged at a time."""


@dataclass(frozen=True)
class Parts:
    """Who computes what, decided for some lengths.

    Attributes:
        plan: [batch + 1 + items] int32. The first item of each sequence, and behind the last one
            how many there are; then the sequence of each item, or -1.
        items: parts that there can be.
        tile: tokens, of which parts are multiples.
    """

    plan: torch.Tensor
    items: int
    tile: int


def spare_parts(batch: int, heads: int, places: int) -> int:
    """How many more parts than sequences there may be.

    Where the sequences fill at least half of the GPU, each is best left whole, unless it is longer
    than 1.6 times the mean; but if they fill it just once, whoever comes last would run alone.
    Measured on an H100.

    Args:
        batch: sequences.
        heads: programs of each part.
        places: programs that a GPU runs at a time.
    """
    at_once = max(places // heads, 1)
    if 2 * batch < at_once:
        return 2 * at_once
    just_over = at_once < batch < 1.36 * at_once
    return 3 * at_once if just_over else cdiv(5 * batch, 8)


def share_keys(
    context_lens: torch.Tensor,
    heads: int,
    tile: int,
    *,
    places: int,
    window: int = 0,
    chunked: bool = False,
    spare: int | None = None,
) -> Parts:
    """Decide who computes what.

    Args:
        context_lens: [batch] int32: tokens of each sequence; 0 is padding, which has a part too.
        heads: programs of each part.
        tile: tokens that a program computes at a time.
        places: programs that a GPU runs at a time.
        window: keys at positions > own position - window only; 0: all.
        chunked: instead those of the own chunk of `window` tokens.
        spare: more parts than sequences, at least 1; None takes `spare_parts`.
    """
    batch = len(context_lens)
    spare = spare or spare_parts(batch, heads, places)
    items = batch + spare
    plan = torch.empty(batch + 1 + items, dtype=torch.int32, device=context_lens.device)
    least = min(max(next_power_of_2(2 * batch * heads), LEAST), MOST_LEAST)
    _kernel[(1,)](
        context_lens,
        plan,
        batch,
        spare,
        max(least // tile, 1),
        BATCH=next_power_of_2(batch),
        ITEMS=next_power_of_2(items),
        TILE=tile,
        WINDOW=window,
        CHUNKED=chunked,
        num_warps=4,
    )
    return Parts(plan, items, tile)


@jit("batch", "spare", "least")
def _kernel(
    context_lens: tl.tensor,
    plan: tl.tensor,
    batch: tl.tensor,
    spare: tl.tensor,
    least: tl.tensor,
    BATCH: tl.constexpr,
    ITEMS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
) -> None:
    """The one program: as many parts of a size as there may be."""
    launch_next()
    sequence = tl.arange(0, BATCH)
    length = tl.load(context_lens + sequence, mask=sequence < batch, other=0)
    _first, _tile_first, tiles = tiles_in_sight(length, TILE, WINDOW, CHUNKED)
    size = tl.maximum(tl.cdiv(tl.sum(tiles, 0), spare), least)
    parts = tl.where(sequence < batch, tl.maximum(tl.cdiv(tiles, size), 1), 0)
    begin, total = tl.cumsum(parts, 0) - parts, tl.sum(parts, 0)
    tl.store(plan + sequence, begin, mask=sequence < batch)
    tl.store(plan + batch, total)
    items, item = plan + batch + 1, tl.arange(0, ITEMS)
    tl.store(items + item, -1, mask=(item >= total) & (item < batch + spare))
    for part in tl.range(0, tl.max(parts, 0)):
        tl.store(items + begin + part, sequence, mask=part < parts)


@jit()
def tiles_in_sight(
    length: tl.tensor, TILE: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr
) -> tl.tensor:
    """First key, first tile and number of tiles that the last token sees."""
    first = length * 0
    if WINDOW > 0:
        first = first_key(tl.maximum(length - 1, 0), WINDOW, CHUNKED)
    tile_first = first // TILE
    return first, tile_first, tl.cdiv(length, TILE) - tile_first


@jit()
def part_of(
    plan: tl.tensor,
    batch: tl.tensor,
    context_lens: tl.tensor,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
) -> tl.tensor:
    """What the programs of item `program_id(1)` compute.

    Returns:
        The sequence, or -1; its length, its first key, the first tile and the one after the last;
        which part of it this is, and of how many.
    """
    item = tl.program_id(1)
    sequence = tl.load(plan + batch + 1 + item)
    of = tl.maximum(sequence, 0)
    begin = tl.load(plan + of)
    used, number = tl.load(plan + of + 1) - begin, item - begin
    length = tl.load(context_lens + of)
    first, tile_first, tiles = tiles_in_sight(length, TILE, WINDOW, CHUNKED)
    share = tl.cdiv(tiles, used)
    start = tile_first + number * share
    end = tl.minimum(start + share, tile_first + tiles)
    return sequence, length, first, start, end, number, used


@jit()
def merge_kernel(
    parts: tl.tensor,
    lse: tl.tensor,
    out: tl.tensor,
    plan: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """One program merges the parts of BLOCK_D features of a sequence's head; lse is to base 2."""
    launch_next()
    sequence, heads, head = tl.program_id(0).to(tl.int64), tl.num_programs(1), tl.program_id(1)
    begin = tl.load(plan + sequence)
    used = tl.load(plan + sequence + 1) - begin
    if used == 1:
        return
    column = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < HEAD_DIM
    top = tl.full([BLOCK_P], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_P], tl.float32)
    merged = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    for start in tl.range(0, used, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        place = (begin + part).to(tl.int64) * heads + head
        level = tl.load(lse + place, mask=part < used, other=float("-inf"))
        mask = (part < used)[:, None] & inside[None, :]
        state = tl.load(parts + place[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)
        higher = tl.maximum(top, level)
        settled = tl.where(higher == float("-inf"), 0.0, higher)
        fade, weight = tl.exp2(top - settled), tl.exp2(level - settled)
        total = total * fade + weight
        merged = merged * fade[:, None] + state * weight[:, None]
        top = higher
    weight = tl.exp2(top - tl.max(top, 0))
    merged = tl.sum(merged * weight[:, None], 0) / tl.sum(total * weight, 0)
    target = out + (sequence * heads + head) * HEAD_DIM + column
    tl.store(target, merged.to(out.dtype.element_ty), mask=inside)

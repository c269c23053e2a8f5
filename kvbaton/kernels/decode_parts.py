"""Splits the keys of a decode step into parts of about equal size, one program each.

A sequence far longer than the others gets more parts; in a small batch each sequence gets several.
The device computes the split, so that it follows the lengths when a CUDA graph is replayed. Layers
that attend to the same tokens share one split. Sources: Ye et al., "FlashInfer", arXiv 2501.01005,
section 3.3; Dao et al., "Flash-Decoding for long-context inference" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbaton.kernels.jit import (
    cdiv,
    jit,
    launch_next,
    next_power_of_2,
    tl,
    use_triton,
    wait_for_inputs,
)
from kvbaton.kernels.paged_attention import first_key

LEAST, MOST_LEAST = 64, 768
"""Least length of a part in tokens (unless its sequence is shorter), by the number of programs.

It is LEAST for the fewest programs, and grows with their number up to MOST_LEAST.
"""

FIELDS = 6
"""Number of fields of a part: sequence, length of the sequence, first tile, end tile (exclusive),
index of the part in its sequence, and number of parts of the sequence."""

CLEARED_PARTS = 256
"""Number of unused parts, or of counters, that are cleared at a time."""

MERGED_PARTS = 16
"""Number of parts that are merged at a time."""


@dataclass(frozen=True)
class Parts:
    """A split of the keys of a batch into parts, for given sequence lengths.

    Attributes:
        begins: [batch + 1] int32, index of each sequence's first part; then the number of parts.
        fields: [number, FIELDS] int32; after the last part, the sequence is -1.
        counters: [batch, heads] int32, zero between launches.
    """

    begins: torch.Tensor
    fields: torch.Tensor
    counters: torch.Tensor


def spare_parts(batch: int, heads: int, places: int) -> tuple[int, bool]:
    """Choose how many parts there may be beyond one per sequence, and whether sequences stay whole.

    Sequences of similar length (the longest at most 1.6 times the mean) stay whole if they are
    slightly more than the GPU runs at a time. Measured on an H100.

    Args:
        batch: Number of sequences.
        heads: Number of programs of each part.
        places: Number of programs that the GPU runs at a time.
    """
    at_once = max(places // heads, 1)
    if 2 * batch < at_once:
        return max(at_once, 8 * batch), False
    return 3 * at_once, not at_once < batch < 1.36 * at_once


def share_keys(
    context_lens: torch.Tensor,
    heads: int,
    tile: int,
    *,
    places: int,
    window: int = 0,
    chunked: bool = False,
    spare: int | None = None,
    pads: bool = True,
) -> Parts:
    """Split the keys of a batch into parts.

    Args:
        context_lens: [batch] int32: tokens of each sequence; 0 is padding.
        heads: Number of programs of each part.
        tile: Tokens that a program computes at a time.
        places: Number of programs that the GPU runs at a time.
        window: Only keys at positions > own position - window count; 0 for all keys.
        chunked: Only keys of the query's own chunk of `window` tokens count instead.
        spare: Number of parts beyond one per sequence, at least 1; None for `spare_parts`.
        pads: Whether padding gets a part too, so that zeros are written for it.
    """
    batch, whole = len(context_lens), False
    if spare is None:
        spare, whole = spare_parts(batch, heads, places)
    least = max(min(max(next_power_of_2(2 * batch * heads), LEAST), MOST_LEAST) // tile, 1)
    if not use_triton(context_lens):
        return share_keys_reference(
            context_lens, heads, tile, spare, least,
            whole=whole, window=window, chunked=chunked, pads=pads,
        )  # fmt: skip
    number = batch + spare
    sizes = [batch + 1, FIELDS * number, batch * heads]
    made = torch.empty(sum(sizes), dtype=torch.int32, device=context_lens.device)
    begins, fields, counters = torch.split(made, sizes)
    parts = Parts(begins, fields.view(number, FIELDS), counters.view(batch, heads))
    _kernel[(1,)](
        context_lens,
        parts.begins,
        parts.fields,
        parts.counters,
        parts.counters.numel(),
        batch,
        spare,
        least,
        int(whole),
        int(pads),
        BATCH=next_power_of_2(batch),  # the only compile-time argument that differs between steps
        STRIDE=FIELDS,
        CLEARED=CLEARED_PARTS,
        TILE=tile,
        WINDOW=window,
        CHUNKED=chunked,
        num_warps=4,
    )
    return parts


def share_keys_reference(
    context_lens: torch.Tensor,
    heads: int,
    tile: int,
    spare: int,
    least: int,
    *,
    whole: bool = False,
    window: int = 0,
    chunked: bool = False,
    pads: bool = True,
) -> Parts:
    """Plain torch for `share_keys`; `least` is the least number of tiles of a part."""
    last, batch = (context_lens - 1).clamp(min=0), len(context_lens)
    first = torch.zeros_like(context_lens)
    if window:
        first = last // window * window if chunked else (last - window + 1).clamp(min=0)
    first = first // tile
    tiles = (context_lens + tile - 1) // tile - first
    total, longest = int(tiles.sum()), int(tiles.max())
    size = max(-(-total // spare), least)
    if whole and longest * 5 * batch <= total * 8:
        size = max(longest, 1)
    used = ((tiles + size - 1) // size).clamp(min=int(pads))
    begins = torch.nn.functional.pad(used.cumsum(0), (1, 0)).int()
    of = torch.arange(batch, device=used.device).repeat_interleave(used)
    part = torch.arange(len(of), device=used.device) - begins[of]
    share = ((tiles + used - 1) // used.clamp(min=1))[of]
    start = first[of] + part * share
    end = torch.minimum(start + share, (first + tiles)[of])
    fields = torch.full((batch + spare, FIELDS), -1, dtype=torch.int32, device=used.device)
    fields[: len(of)] = torch.stack((of, context_lens[of], start, end, part, used[of]), 1).int()
    return Parts(begins, fields, begins.new_zeros(batch, heads))


@jit("fields", "counters", "counted", "batch", "spare", "least", "whole", "pads")
def _kernel(
    context_lens: tl.tensor,
    begins: tl.tensor,
    fields: tl.tensor,
    counters: tl.tensor,
    counted: tl.tensor,
    batch: tl.tensor,
    spare: tl.tensor,
    least: tl.tensor,
    whole: tl.tensor,
    pads: tl.tensor,
    BATCH: tl.constexpr,
    STRIDE: tl.constexpr,
    CLEARED: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
) -> None:
    """The one program: as many parts of a size as there may be."""
    launch_next()
    sequence = tl.arange(0, BATCH)
    length = tl.load(context_lens + sequence, mask=sequence < batch, other=0)
    first = tl.zeros_like(length)
    if WINDOW > 0:
        first = first_key(tl.maximum(length - 1, 0), WINDOW, CHUNKED) // TILE
    tiles = tl.cdiv(length, TILE) - first
    total, longest = tl.sum(tiles, 0), tl.max(tiles, 0)
    size = tl.maximum(tl.cdiv(total, spare), least)
    alike = (whole != 0) & (longest * 5 * batch <= total * 8)
    size = tl.where(alike, tl.maximum(longest, 1), size)
    used = tl.where(sequence < batch, tl.maximum(tl.cdiv(tiles, size), pads), 0)
    begin, parts = tl.cumsum(used, 0) - used, tl.sum(used, 0)
    tl.store(begins + sequence, begin, mask=sequence < batch)
    tl.store(begins + batch, parts)
    for behind in tl.range(parts, batch + spare, CLEARED):
        unused = behind + tl.arange(0, CLEARED)
        tl.store(fields + unused * STRIDE, -1, mask=unused < batch + spare)
    for at in tl.range(0, counted, CLEARED):
        counter = at + tl.arange(0, CLEARED)
        tl.store(counters + counter, 0, mask=counter < counted)
    share = tl.cdiv(tiles, tl.maximum(used, 1))
    for part in tl.range(0, tl.max(used, 0)):
        inside = part < used
        place = fields + (begin + part) * STRIDE
        start = first + part * share
        tl.store(place, sequence, mask=inside)
        tl.store(place + 1, length, mask=inside)
        tl.store(place + 2, start, mask=inside)
        tl.store(place + 3, tl.minimum(start + share, first + tiles), mask=inside)
        tl.store(place + 4, tl.zeros_like(used) + part, mask=inside)
        tl.store(place + 5, used, mask=inside)


@jit()
def part_at(fields: tl.tensor, STRIDE: tl.constexpr, number: tl.tensor) -> tl.tensor:
    """The fields of a part."""
    at = fields + number * STRIDE
    sequence, length, start = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    return sequence, length, start, tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)


def merge_parts(
    states: torch.Tensor, lse: torch.Tensor, parts: Parts, out: torch.Tensor, features: int
) -> torch.Tensor:
    """Merge the parts of each sequence that has more than one.

    Args:
        states: [number of parts, heads, N] float32.
        lse: [number of parts, heads] float32, to base 2.
        parts: Parts of the sequences.
        out: [batch, heads, N], contiguous: the output tensor.
        features: Number of features per program, a power of two.

    Returns:
        `out`.
    """
    batch, heads, size = out.shape
    _merge_kernel[(batch, heads, cdiv(size, features))](
        states, lse, out, parts.begins,
        HEAD_DIM=size, BLOCK_D=features, BLOCK_P=MERGED_PARTS, num_warps=4,
    )  # fmt: skip
    return out


@jit(early=True)
def _merge_kernel(
    parts: tl.tensor,
    lse: tl.tensor,
    out: tl.tensor,
    begins: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """One program merges the parts of BLOCK_D features of a sequence's head; lse is to base 2."""
    wait_for_inputs()
    sequence, heads, head = tl.program_id(0).to(tl.int64), tl.num_programs(1), tl.program_id(1)
    begin = tl.load(begins + sequence)
    used = tl.load(begins + sequence + 1) - begin
    if used <= 1:
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

"""Weights in MXFP4: e2m1 numbers of 4 bits; each 32 of a row share a scale, a power of two.

Source: OCP Microscaling Formats (MX) Specification v1.0. A checkpoint's bytes are rearranged as it
is loaded, so that a kernel widens them with few operations: at the rate at which a Hopper GPU reads
them, each multiprocessor has time for less than two integer operations per number.

Columns are in *blocks* of `COLUMNS`; the last block is padded with zeros. A row of a block has 32
words of 16 bits. Word i holds the numbers of columns i, 32 + i, 64 + i and 96 + i, so that the
numbers at the same place of all words share a scale, and meet 32 adjacent inputs. The places:

| number | sign | exponent and mantissa |
| --- | --- | --- |
| 1st | bit 15 | bits 8, 7, 6 |
| 2nd | bit 12 | bits 5, 4, 3 |
| 3rd | bit 9 | bits 2, 1, 0 |
| 4th | bit 14 | bits 13, 11, 10 |

So one shift (three for the fourth number) and one mask make a bfloat16 of 2^-126 times the number;
0.5 becomes subnormal. Scales are stored with 126 added to their exponents: as exponents of a
bfloat16 they are the factors that undo it. Two words are widened at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbaton.kernels.jit import jit, tl

GROUP = 32
"""Columns of a row that share a scale."""

COLUMNS = 4 * GROUP
"""Columns per block."""

WORDS = torch.int16
"""dtype of packed weights."""

MOST = 128
"""Largest scale of a checkpoint (e8m0): 2^1. 2^126 times it is bfloat16's largest power of two."""

_SIGN_AND_NUMBER = 0x81C0


def pack_mxfp4(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Rearrange a checkpoint's weight for `fused_moe`.

    Args:
        blocks: uint8 [..., rows, groups, 16]; a byte holds two numbers, the first in its low half.
        scales: uint8 [..., rows, groups], e8m0: 2^(scale - 127); at most `MOST`.

    Returns:
        Words, int16 [..., blocks, rows, 32], and scales, int32 [..., blocks, rows], four in each.
    """
    missing = -scales.shape[-1] % 4
    codes = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2).int()
    codes = pad(codes, (0, 0, 0, missing)).reshape(*codes.shape[:-2], -1, 4, GROUP)
    sign, number = codes >> 3, codes & 7
    words = sign[..., 0, :] << 15 | number[..., 0, :] << 6
    words |= sign[..., 1, :] << 12 | number[..., 1, :] << 3
    words |= sign[..., 2, :] << 9 | number[..., 2, :]
    last = number[..., 3, :]
    words |= sign[..., 3, :] << 14 | last >> 2 << 13 | (last & 3) << 10
    factors = pad(scales.long() + 126, (0, missing)).reshape(*scales.shape[:-1], -1, 4)
    shifts = torch.arange(0, 32, 8, device=scales.device)
    packed = (factors << shifts).sum(-1).to(torch.int32)
    return words.to(WORDS).transpose(-2, -3).contiguous(), packed.transpose(-1, -2).contiguous()


def unpack_mxfp4(words: Tensor, scales: Tensor) -> Tensor:
    """Dequantise the result of `pack_mxfp4` to float32 [..., rows, blocks * `COLUMNS`]."""
    wide = words.int()
    last = wide << 1 & 0x8000 | wide >> 4 & 0xC0 | wide >> 5 & 0x100
    bits = torch.stack([*(wide << shift & _SIGN_AND_NUMBER for shift in (0, 3, 6)), last], dim=-2)
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=words.device)
    factors = (scales[..., None] >> shifts & 0xFF) << 23
    numbers = (bits << 16).view(torch.float32) * factors.view(torch.float32)[..., None]
    return numbers.transpose(-3, -4).flatten(-3)


def quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise to the nearest; the scale takes a group's largest magnitude to between 4 and 8.

    This is the specification's rule; numbers beyond 6 saturate.

    Args:
        x: float32 [..., groups * 32].

    Returns:
        `blocks` and `scales` for `pack_mxfp4`.
    """
    groups = x.contiguous().view(*x.shape[:-1], -1, GROUP)
    largest = groups.abs().amax(-1).clamp(min=2.0**-120)
    exponents = torch.floor(torch.log2(largest)).int() - 2
    scaled = torch.ldexp(groups, -exponents[..., None])
    between = torch.tensor((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), device=x.device)
    codes = torch.bucketize(scaled.abs(), between) + 8 * (scaled < 0)
    return (codes[..., ::2] + 16 * codes[..., 1::2]).byte(), (exponents + 127).byte()


@jit()
def widen_mxfp4(words: tl.tensor, scales: tl.tensor, like: tl.tensor, PLACE: tl.constexpr) -> Any:
    """The numbers of one place of [rows, words], in the dtype of `like`; scales are [rows]."""
    factor = (scales >> (8 * PLACE)) & 0xFF
    if like.dtype == tl.bfloat16:  # of two words at a time; Triton would take them one by one
        twice = (factor * 0x00800080)[:, None]
        shift: tl.constexpr = "0" if PLACE == 0 else ("3" if PLACE == 1 else "6")
        take: tl.constexpr = (
            "shl.b32 t, $1, " + shift + "; and.b32 t, t, 0x81C081C0;"
            if PLACE < 3
            else "shl.b32 t, $1, 1; shr.u32 u, $1, 4; shr.u32 v, $1, 5; and.b32 t, t, 0x80008000;"
            "and.b32 u, u, 0x00C000C0; and.b32 v, v, 0x01000100; or.b32 t, t, u; or.b32 t, t, v;"
        )
        # Compute capability 8 has no product of bfloat16 without a sum, here with -0.
        asm: tl.constexpr = (
            "{.reg .b32 t, u, v; " + take + "mov.b32 u, 0x80008000; fma.rn.bf16x2 $0, t, $2, u;}"
        )
        operands = [words, twice]
        return tl.inline_asm_elementwise(
            asm, "=r,r,r,r", operands, tl.bfloat16, is_pure=True, pack=2
        )
    else:
        wide = words.to(tl.int32)
        if PLACE == 3:
            bits = ((wide << 1) & 0x8000) | ((wide >> 4) & 0xC0) | ((wide >> 5) & 0x100)
        else:
            bits = (wide << (3 * PLACE)) & 0x81C0
        number = (bits << 16).to(tl.float32, bitcast=True)
        return (number * (factor << 23).to(tl.float32, bitcast=True)[:, None]).to(like.dtype)


@jit()
def mxfp4_sums(
    inputs: tl.tensor,
    there: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    height: tl.constexpr,
    to_up: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    SWAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> Any:
    """Products of inputs with packed rows: float32 [BLOCK_M, BLOCK_N], and those of up's rows.

    Args:
        inputs: pointers to the first input of each token, [BLOCK_M, 1].
        there: which tokens there are, likewise.
        weight: packed, of all experts.
        scales: likewise.
        row: [BLOCK_N]: where in the first block of columns, in rows.
        inside: [BLOCK_N]: which of them there are.
        height: rows of a block.
        to_up: how far a row of up is from that of gate.
        DEPTH: inputs of a token, whole groups.
        GATED: there are rows of up; else both results are the same.
        SWAPPED: the weight is the left factor, which tensor cores take from registers.
        BLOCK_M: tokens.
        BLOCK_N: rows.
    """
    if SWAPPED:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    word = tl.arange(0, 32)
    words = weight + row[:, None] * 32 + word[None, :]
    factors = scales + row
    for block in tl.range(0, (DEPTH + 127) // 128):
        at = block * height
        w = tl.load(words + at * 32, mask=inside[:, None], other=0)
        of_w = tl.load(factors + at, mask=inside, other=0)
        if GATED:
            w_up = tl.load(words + (at + to_up) * 32, mask=inside[:, None], other=0)
            of_up = tl.load(factors + at + to_up, mask=inside, other=0)
        for place in tl.static_range(4):
            k = block * 128 + place * 32
            a = tl.load(inputs + (k + word)[None, :], mask=there & (k < DEPTH), other=0.0)
            acc = _added(acc, a, widen_mxfp4(w, of_w, a, place), SWAPPED)
            if GATED:
                up = _added(up, a, widen_mxfp4(w_up, of_up, a, place), SWAPPED)
    if SWAPPED:
        acc, up = tl.trans(acc), tl.trans(up)
    return acc, up


@jit()
def _added(acc: tl.tensor, a: tl.tensor, w: tl.tensor, SWAPPED: tl.constexpr) -> Any:
    if SWAPPED:
        return tl.dot(w, tl.trans(a), acc, input_precision="ieee")
    else:
        return tl.dot(a, tl.trans(w), acc, input_precision="ieee")

"""Digest sums: 64-bit fingerprints of KV that add up over tokens, in any block size.

The bytes of one token's feature row in one (layer, K or V, head) are read as little-endian unsigned
words, 32 bits wide, or the widest of 16 and 8 bits that divides the row. Then

    sum(layer, kv, head) = sum over tokens t and words j of (word[t, j] + 1) * a(t) * b(kv, j)

mod 2^64, with a(t) = mix(absolute position of t) | 1 and b(kv, j) = mix(~(kv * 2^32 + j)) | 1.
The weight is a product, so that a word costs one multiplication. Both factors are odd, so that any
change of a single word changes the sum. `+ 1` makes a missing token differ from one that is all
zero. Words are half as wide as weights, so that even the top bit of a word meets 33 bits of its
weight: bit i of a word as wide as the weight would meet only 64 - i, and damage to the same high
bit of many words (a lost sign) would often cancel. The sums detect accidents (stale, swapped,
shifted, partial or corrupt bytes, stuck lines), not forgery.

`mix` is SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA
2014. Multilinear hashing, and why words are half as wide as weights: Lemire, Kaser, "Strongly
universal string hashing is fast", 2014.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvbaton.kernels.jit import cdiv, jit, next_power_of_2, tl, use_triton

WORD_TYPES = {4: torch.uint32, 2: torch.uint16, 1: torch.uint8}
TOKENS_PER_PROGRAM = 16
WORDS_PER_PROGRAM = 4096
"""Most words that a program reads at a time: rows of latents and encoder outputs are long."""
WORDS_PER_TILE = 2048
"""Most words that a program of `TableSums` reads at a time, unless those of one head are more."""
TILES_PER_PROGRAM = 16
"""Maximum number of such tiles that a program sums."""


def token_sums(x: Tensor, positions: Tensor) -> Tensor:
    """Digest sum of each single token, on the CPU. NumPy is faster than torch on integers.

    Args:
        x: [T, H, L, KV, D], any dtype of a KV cache, any strides.
        positions: [T], int64, absolute positions.

    Returns:
        [T, L, KV, H] int64: the bits of the unsigned sums.
    """
    words = _words(x).numpy()
    weights = plane_weights(words.shape[-1], words.shape[-2], x.device)
    rows = np.einsum("thlkw,kw->tlkh", words, _unsigned(weights)).view(np.int64)
    # The sum of the weights accounts for the `+ 1`.
    sums = torch.from_numpy(rows) + weights.sum(1)[:, None]
    return sums * _position_weights(positions)[:, None, None, None]


def block_sums(cache: Tensor, blocks: Tensor, first_position: int, start: int, end: int) -> Tensor:
    """Digest sums of consecutive logical blocks of one sequence, read in place.

    Args:
        cache: [num_blocks, H, L, KV, block_size, D]; on a GPU the last axis must be contiguous and
            the other strides whole words.
        blocks: [n] int32 or int64, physical blocks in logical order.
        first_position: Absolute position of the first token of ``blocks[0]``.
        start: First absolute position to include.
        end: Absolute position after the last one to include.

    Returns:
        [n, L, KV, H] int64: the bits of the unsigned sums over tokens [start, end).

    Raises:
        ValueError: A GPU can't read `cache` as words, because of its strides.
    """
    table = range_table(blocks, first_position, start, end, cache.shape[-2])
    return TableSums(cache)(table, empty_sums(cache, len(table), cache.device))


def range_table(
    blocks: Tensor, first_position: int, start: int, end: int, block_size: int
) -> Tensor:
    """Table for `TableSums` of consecutive logical blocks of one sequence."""
    positions = first_position + block_size * torch.arange(len(blocks), device=blocks.device)
    rest = (torch.full_like(positions, value) for value in (start, end, -1, 0, 0, 0))
    return torch.stack([blocks.long(), positions, *rest], 1)  # no device synchronisation


def empty_sums(cache: Tensor, count: int, device: torch.device) -> Tensor:
    """Memory for the sums of `count` blocks of a cache: pinned if the host has it for a GPU."""
    _, heads, layers, planes, *_ = cache.shape
    pin = cache.is_cuda and device.type == "cpu"
    shape = (count, layers, planes, heads)
    return torch.empty(shape, dtype=torch.int64, device=device, pin_memory=pin)


class TableSums:
    """Digest sums of any blocks of one cache.

    To find the compiled kernel, Triton looks at each argument in Python, which takes 0.3 ms in a
    thread that has rested: caches are cold then. So all but the table are bound here, and the
    kernel that the first launch found is launched again.

    Args:
        cache: As in `block_sums`.
        kept: [blocks, L, KV, H] int64, contiguous, on the cache's device: the blocks' kept sums.

    Raises:
        ValueError: A GPU can't read `cache` as words, because of its strides.
    """

    def __init__(self, cache: Tensor, kept: Tensor | None = None) -> None:
        self._cache, self._kept = cache, kept
        self._compiled: Any = None
        if not use_triton(cache):
            return
        words = _words_in_place(cache)
        if words is None:
            raise ValueError(
                f"cache: strides {cache.stride()} do not let rows of {cache.shape[-1]} elements be "
                f"read as words of {_word_bytes(cache)} bytes"
            )
        _, heads, layers, planes, block_size, num_words = words.shape
        block_t, block_w = tokens_together(block_size, num_words), next_power_of_2(num_words)
        block_h = min(next_power_of_2(heads), max(1, WORDS_PER_TILE // (block_t * block_w)))
        self._words, self._weights = words, plane_weights(num_words, planes, cache.device)
        self._sizes = heads, layers, planes, *words.stride()[:5]
        tiles = min(layers * planes, TILES_PER_PROGRAM)
        self._programs = cdiv(heads, block_h) * cdiv(layers * planes, tiles)
        self._constants = {
            "BLOCK_SIZE": block_size,
            "NUM_WORDS": num_words,
            "BLOCK_H": block_h,
            "BLOCK_T": block_t,
            "BLOCK_W": block_w,
            "TILES": tiles,
        }

    def __call__(
        self, table: Tensor, sums: Tensor, stream: torch.cuda.Stream | None = None
    ) -> Tensor:
        """Sum blocks, in the order of the stream.

        Args:
            table: [n, 8] int64, contiguous, on the device or in memory of the host that it can
                access: physical block, absolute position of its first token, first position to
                include, position after the last one to include, and the block whose kept sums are
                set, or -1; the rest is ignored.
            sums: [n, L, KV, H] int64, contiguous, also in one of these memories: set to the sums.
            stream: Stream of a GPU; None is the current one. Its device must be the current one.

        Returns:
            `sums`.
        """
        if not use_triton(self._cache):
            sums.copy_(table_sums_reference(self._cache, table))
            kept_at = table[:, 4]
            if self._kept is not None:
                self._kept[kept_at[kept_at >= 0]] = sums[kept_at >= 0]
            return sums
        if not len(table):
            return sums
        grid = len(table) * self._programs, 1, 1
        kept = sums if self._kept is None else self._kept
        args = self._words, table, self._weights, sums, kept, *self._sizes
        if self._compiled is not None and stream is not None:
            self._compiled[grid](*args, *self._constants.values(), stream=stream.cuda_stream)
        else:
            with torch.cuda.stream(stream):
                self._compiled = _block_kernel[grid](*args, **self._constants)
        return sums


def table_sums_reference(cache: Tensor, table: Tensor) -> Tensor:
    """`TableSums` on the CPU: one product reads each block once, in place.

    The product is NumPy's, since torch is five times slower on strided integers.
    """
    in_place, (blocks, first, start, end, *_) = _words_in_place(cache), table.t()
    if in_place is None:
        in_place, blocks = _words(cache[blocks.long()]), torch.arange(len(blocks))
    words = in_place.numpy()
    _, heads, layers, planes, block_size, num_words = words.shape
    positions = first[:, None] + torch.arange(block_size)
    counted = (positions >= start[:, None]) & (positions < end[:, None])
    of_tokens = _unsigned(_position_weights(positions) * counted)[..., None]
    device = torch.device("cpu")
    of_words = _unsigned(plane_weights(num_words, planes, device))[:, None]  # b(kv, j)
    weights = np.empty((planes, block_size, num_words), np.uint64)
    sums = np.empty((len(blocks), heads * layers, planes), np.uint64)
    for n, block in enumerate(blocks.tolist()):
        np.multiply(of_tokens[n], of_words, out=weights)
        rows = words[block].reshape(heads * layers, planes, -1)
        np.einsum("rkw,kw->rk", rows, weights.reshape(planes, -1), out=sums[n])
    sums += of_tokens.sum(1)[:, None] * of_words.sum((1, 2))  # for the `+ 1`
    by_head = torch.from_numpy(sums.view(np.int64)).view(-1, heads, layers, planes)
    return by_head.permute(0, 2, 3, 1).contiguous()


def _unsigned(x: Tensor) -> npt.NDArray[np.uint64]:
    return x.numpy().view(np.uint64)


@cache
def word_weights(num_words: int, kv: int, device: torch.device) -> Tensor:
    """b(kv, j) of all words of a row: [num_words] int64."""
    words = torch.arange(num_words, dtype=torch.int64, device=device)
    return mix(~(words + (kv << 32))) | 1


@cache
def plane_weights(num_words: int, planes: int, device: torch.device) -> Tensor:
    """b(kv, j) of K and V: [planes, num_words] int64. Not to be called during graph capture."""
    return torch.stack([word_weights(num_words, kv, device) for kv in range(planes)])


def _position_weights(positions: Tensor) -> Tensor:
    return mix(positions.long()) | 1


WEYL = 0x9E3779B97F4A7C15 - (1 << 64)
"""SplitMix64's step, as int64."""


def mix(x: Tensor) -> Tensor:
    """SplitMix64's step and finalizer on int64; products wrap like unsigned ones."""
    # Masks clear the sign bits that `>>` on int64 repeats; 2^64 is subtracted from the factors.
    x = x + WEYL
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ (x >> 31 & (1 << 33) - 1)


def _words(x: Tensor) -> Tensor:
    """View the last axis as words; copies if the memory layout does not allow a view."""
    words = _words_in_place(x)
    if words is None:
        # `contiguous` would keep the odd strides of axes of length 1.
        words = word_view(x.clone(memory_format=torch.contiguous_format))
    return words


def word_view(x: Tensor) -> Tensor:
    """View the last axis as words, without a copy."""
    return x.view(WORD_TYPES[_word_bytes(x)])


def _word_bytes(x: Tensor) -> int:
    row = x.shape[-1] * x.element_size()
    return next(size for size in WORD_TYPES if row % size == 0)


def _words_in_place(x: Tensor) -> Tensor | None:
    """Like `word_view`, but None if the memory layout does not allow it."""
    size = _word_bytes(x)
    ratio = size // x.element_size()
    starts = (*x.stride()[:-1], x.storage_offset())
    readable = x.stride(-1) == 1 and all(start % ratio == 0 for start in starts)
    return x.view(WORD_TYPES[size]) if readable else None


# --- Triton ---


def tokens_together(block_size: int, num_words: int) -> int:
    """Number of tokens that a program reads at a time: a power of two."""
    most = max(1, WORDS_PER_PROGRAM // next_power_of_2(num_words))
    return min(TOKENS_PER_PROGRAM, next_power_of_2(block_size), most)


@jit("table", "sums", "kept")
def _block_kernel(
    words: tl.tensor,
    table: tl.tensor,
    word_weights: tl.tensor,
    sums: tl.tensor,
    kept: tl.tensor,
    heads: tl.tensor,
    layers: tl.tensor,
    planes: tl.tensor,
    stride_block: tl.tensor,
    stride_head: tl.tensor,
    stride_layer: tl.tensor,
    stride_kv: tl.tensor,
    stride_token: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """One program sums one block in BLOCK_H heads of TILES planes of layers."""
    number = tl.program_id(0).to(tl.int64)
    parts = tl.cdiv(heads, BLOCK_H)
    tiles = layers * planes
    first_head = number % parts * BLOCK_H
    first_tile = number // parts % tl.cdiv(tiles, TILES) * TILES
    index = number // (parts * tl.cdiv(tiles, TILES))
    # One read, since each is slow from memory of the host.
    field = tl.arange(0, 8)
    fields = tl.load(table + 8 * index + field)
    block = tl.sum(tl.where(field == 0, fields, 0), axis=0)
    first_position = tl.sum(tl.where(field == 1, fields, 0), axis=0)
    start = tl.sum(tl.where(field == 2, fields, 0), axis=0)
    end = tl.sum(tl.where(field == 3, fields, 0), axis=0)
    kept_block = tl.sum(tl.where(field == 4, fields, 0), axis=0)
    row = tl.arange(0, BLOCK_H * BLOCK_T)
    head = first_head + row // BLOCK_T
    summed_head = first_head + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_W)
    for nth in range(TILES):
        tile = first_tile + nth
        layer, kv = tile // planes, tile % planes
        weight = tl.load(word_weights + kv * NUM_WORDS + column, mask=column < NUM_WORDS, other=0)
        base = words + block * stride_block + layer * stride_layer + kv * stride_kv
        total = tl.zeros([BLOCK_H * BLOCK_T], dtype=tl.int64)
        for first in range(0, BLOCK_SIZE, BLOCK_T):
            token = first + (row % BLOCK_T).to(tl.int64)
            position = first_position + token
            counted = (token < BLOCK_SIZE) & (position >= start) & (position < end)
            counted &= (head < heads) & (tile < tiles)
            mask = counted[:, None] & (column < NUM_WORDS)[None, :]
            place = (head * stride_head + token * stride_token)[:, None] + column[None, :]
            data = tl.load(base + place, mask=mask, other=0).to(tl.int64)
            rows = tl.sum((data + 1) * weight[None, :], axis=1)
            total += tl.where(counted, rows * position_weight(position), 0)
        of_heads = tl.sum(tl.reshape(total, [BLOCK_H, BLOCK_T]), axis=1)
        place = tile * heads + summed_head
        there = (summed_head < heads) & (tile < tiles)
        tl.store(sums + index * tiles * heads + place, of_heads, mask=there)
        tl.store(
            kept + kept_block * tiles * heads + place, of_heads, mask=there & (kept_block >= 0)
        )


@jit()
def position_weight(position: tl.tensor) -> tl.tensor:
    """`_position_weights` in Triton."""
    x = position.to(tl.uint64) + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return ((x ^ (x >> 31)) | 1).to(tl.int64)


# --- incremental sums, updated as tokens are written, without the host: for CUDA graphs ---


BLOCK_T = 16


def start_sums(sums: Tensor, slot_mapping: Tensor, block_size: int) -> None:
    """Zero the sums of every block whose first slot is in `slot_mapping`.

    Args:
        sums: [num_blocks, layers, kv, heads] int64, contiguous.
        slot_mapping: [T] int64: block * block_size + offset, or -1 for none.
        block_size: Tokens per block.
    """
    if not use_triton(sums):
        first = (slot_mapping >= 0) & (slot_mapping % block_size == 0)
        sums[slot_mapping[first] // block_size] = 0
    elif len(slot_mapping):
        size = sums[0].numel()
        _start_kernel[(len(slot_mapping),)](
            sums, slot_mapping, size, BLOCK_SIZE=block_size, BLOCK=next_power_of_2(size)
        )


def add_sums(
    sums: Tensor, cache: Tensor, slot_mapping: Tensor, positions: Tensor, sign: int = 1
) -> None:
    """Add the digest sums of tokens, as they are in the cache now, to the sums of their blocks.

    Args:
        sums: [num_blocks, layers, kv, heads] int64, contiguous.
        cache: [num_blocks, heads, layers, kv, block_size, D]; last axis contiguous, the other
            strides whole words.
        slot_mapping: [T] int64: block * block_size + offset, or -1 for none.
        positions: [T] int64, absolute.
        sign: 1 to add, -1 to subtract them again.
    """
    if not use_triton(sums):
        add_sums_reference(sums, cache, slot_mapping, positions, sign)
        return
    words = word_view(cache)
    _, heads, layers, planes, block_size, num_words = words.shape
    tokens = len(slot_mapping)
    if not tokens:
        return
    weights = [word_weights(num_words, kv, cache.device) for kv in range(planes)]
    block_t = tokens_together(BLOCK_T, num_words)
    _kernel[(cdiv(tokens, block_t) * heads * layers * planes,)](
        words,
        torch.stack(weights),
        sums,
        slot_mapping,
        positions,
        tokens,
        sign,
        heads,
        layers,
        planes,
        *words.stride()[:5],
        BLOCK_SIZE=block_size,
        NUM_WORDS=num_words,
        BLOCK_T=block_t,
        BLOCK_W=next_power_of_2(num_words),
    )


def add_sums_reference(
    sums: Tensor, cache: Tensor, slot_mapping: Tensor, positions: Tensor, sign: int
) -> None:
    """Plain torch for `add_sums`."""
    there = slot_mapping >= 0
    slots, positions = slot_mapping[there], positions[there]
    size = cache.shape[-2]
    blocks = slots // size
    rows = token_sums(cache[blocks, :, :, :, slots % size], positions)
    sums.index_add_(0, blocks, rows, alpha=sign)


@jit("slot_mapping")
def _start_kernel(
    sums: tl.tensor,
    slot_mapping: tl.tensor,
    size: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: one token."""
    slot = tl.load(slot_mapping + tl.program_id(0)).to(tl.int64)
    if (slot >= 0) & (slot % BLOCK_SIZE == 0):
        column = tl.arange(0, BLOCK)
        place = sums + slot // BLOCK_SIZE * size + column
        tl.store(place, tl.zeros([BLOCK], tl.int64), mask=column < size)


@jit("slot_mapping", "positions", "tokens", "sign")
def _kernel(
    words: tl.tensor,
    word_weights: tl.tensor,
    sums: tl.tensor,
    slot_mapping: tl.tensor,
    positions: tl.tensor,
    tokens: tl.tensor,
    sign: tl.tensor,
    heads: tl.tensor,
    layers: tl.tensor,
    planes: tl.tensor,
    stride_block: tl.tensor,
    stride_head: tl.tensor,
    stride_layer: tl.tensor,
    stride_kv: tl.tensor,
    stride_token: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    """One program: BLOCK_T tokens of one (head, layer, kv)."""
    number = tl.program_id(0).to(tl.int64)
    kv = number % planes
    layer = number // planes % layers
    head = number // (planes * layers) % heads
    token = number // (planes * layers * heads) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(slot_mapping + token, mask=token < tokens, other=-1).to(tl.int64)
    there = slot >= 0
    slot = tl.maximum(slot, 0)
    block = slot // BLOCK_SIZE
    place = block * stride_block + head * stride_head + layer * stride_layer + kv * stride_kv
    place += slot % BLOCK_SIZE * stride_token
    column = tl.arange(0, BLOCK_W)
    mask = there[:, None] & (column < NUM_WORDS)[None, :]
    data = tl.load(words + place[:, None] + column[None, :], mask=mask, other=0).to(tl.int64)
    weight = tl.load(word_weights + kv * NUM_WORDS + column, mask=column < NUM_WORDS, other=0)
    rows = tl.sum((data + 1) * weight[None, :], axis=1)
    rows *= position_weight(tl.load(positions + token, mask=there, other=0)) * sign
    target = sums + ((block * layers + layer) * planes + kv) * heads + head
    tl.atomic_add(target, rows, mask=there, sem="relaxed")

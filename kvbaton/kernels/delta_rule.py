"""The gated delta rule on states in the pool: a step's decoding sequences and its prompts.

Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464. For a head with state S [keys,
values], decay g, strength b, query q, key k and value v:

    S = exp(g) S;  S = S + k (b (v - k S));  out = q S

Decoding is bound by the memory traffic of the states: each is read and written once here, and
eleven times in plain torch. Prefill takes two kernels. The first solves all chunks in parallel: the
update by a token depends on those of earlier tokens of its chunk, a triangular system (section
3.3). The second carries each state over its chunks; a program holds some values of a head in
registers.

Products take operands of the model's dtype and accumulate in float32, as attention does. A float32
product is made of three TF32 products, since one alone is a thousand times less exact. States,
decays and the solutions of the system are always computed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvbaton.kernels.jit import cdiv, jit, next_power_of_2, tl, use_triton

CHUNK = 64
"""Tokens per chunk: the size of a triangular system."""

BLOCK = 16
"""Tokens per block of a chunk: solved row by row; blocks are combined by matrix products."""

BLOCK_V = 32
"""Values of a head per program of the decode kernel."""

SOLVE = {2: {"num_warps": 4, "num_stages": 1}, 4: {"num_warps": 8, "num_stages": 1}}
SCAN = {
    2: {"BLOCK_V": 64, "num_warps": 4, "num_stages": 3},
    4: {"BLOCK_V": 32, "num_warps": 4, "num_stages": 1},  # two stages would not fit
}
"""Launch options of the two prefill kernels, by element size in bytes; measured on an H100."""

LONE_BLOCK_V = 32
"""Values of a head per program of the scan of a lone prompt: smaller, for more programs."""


@dataclass(frozen=True)
class PromptRows:
    """Positions of a step's prompts in its batch and in the rows of `LayerStates`.

    Each row of a prompt is a *stretch*: tokens up to one after which the state is kept. A stretch
    starts from the state of the previous one.

    Attributes:
        bounds: [rows + 1] int64: first token of each row, including decoding rows; then the end.
        sequences: [prompts + 1] int64: first row of each prompt; then the end.
        chunks: [3, chunks] int64: all stretches, cut by `cut`.
        pieces: [3, pieces] int64: all prompts, cut by `cut`.
    """

    bounds: Tensor
    sequences: Tensor
    chunks: Tensor
    pieces: Tensor


@dataclass(frozen=True)
class LayerStates:
    """A layer's states, and those that a batch reads and writes: one per row.

    Attributes:
        data: [blocks, key heads, rows of a state, values] float32, the last two axes contiguous.
            A state ends with [keys, values] for each value head of its key head; before that is
            the state of the convolution (`delta_rule_inputs`).
        reads: [rows] int64, block of each row's state before its tokens.
        writes: [rows] int64, block for the state after them: the one read, or one that no other
            row uses; 0 to drop the state.
        num_decodes: Number of decoding rows, of one token each; they come first, in the batch too.
        prompts: The other rows; None if there are none.
    """

    data: Tensor
    reads: Tensor
    writes: Tensor
    num_decodes: int
    prompts: PromptRows | None = None


def cut(bounds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Cut spans of tokens into pieces of at most CHUNK tokens.

    Args:
        bounds: [spans + 1], start of each span; then the end.

    Returns:
        [3, pieces]: first token, end, and index of the span.
    """
    counts = -(-np.diff(bounds) // CHUNK)
    of = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = bounds[of] + CHUNK * within
    return np.stack((begins, np.minimum(begins + CHUNK, bounds[of + 1]), of))


def delta_rule(mixed: Tensor, decay: Tensor, beta: Tensor, states: LayerStates) -> Tensor:
    """Apply the tokens of a batch to the states, and compute their outputs.

    Args:
        mixed: [tokens, key heads, channels]: per key head the query, the key, and the value of each
            of its value heads; contiguous.
        decay: [tokens, heads] float32: g; contiguous.
        beta: [tokens, heads] float32: b; contiguous.
        states: States of all rows; those to write are updated in place.

    Returns:
        [tokens, heads, values], dtype of `mixed`.
    """
    if not use_triton(mixed):
        return delta_rule_reference(mixed, decay, beta, states)
    (tokens, key_heads, channels), heads = mixed.shape, decay.shape[1]
    values, n, prompts = states.data.shape[-1], states.num_decodes, states.prompts
    per_key = heads // key_heads
    keys = (channels - per_key * values) // 2
    data = states.data[:, :, -per_key * keys :]
    out = torch.empty((tokens, heads, values), dtype=mixed.dtype, device=mixed.device)
    shape = {"HEADS": heads, "PER_KEY": per_key, "KEYS": keys, "VALUES": values}
    rows = (data, states.reads, states.writes)
    strides = data.stride()[:2]
    if n:
        block_v = min(BLOCK_V, next_power_of_2(values))
        _decode_kernel[(n * heads, cdiv(values, block_v))](
            mixed,
            decay,
            beta,
            *rows,
            out,
            *strides,
            **shape,
            BLOCK_K=next_power_of_2(keys),
            BLOCK_V=block_v,
            num_warps=4,
        )
    if prompts is None:
        return out
    count, size = prompts.chunks.shape[1], mixed.element_size()
    solved, within = torch.empty(
        (2, tokens, heads, CHUNK), dtype=mixed.dtype, device=mixed.device
    ).unbind()
    totals = torch.empty_like(decay)
    tile = {"CHUNK": CHUNK, "BLOCK_K": max(16, next_power_of_2(keys))}
    _solve_kernel[(count, heads)](
        mixed,
        decay,
        beta,
        prompts.chunks,
        count,
        solved,
        within,
        totals,
        **shape,
        **tile,
        BLOCK=BLOCK,
        **SOLVE[size],
    )
    number = len(prompts.sequences) - 1
    block_v = SCAN[size]["BLOCK_V"] if number > 1 else LONE_BLOCK_V
    launch = SCAN[size] | {"BLOCK_V": max(16, min(block_v, next_power_of_2(values)))}
    _scan_kernel[(heads * number, cdiv(values, launch["BLOCK_V"]))](
        mixed,
        solved,
        within,
        totals,
        *rows,
        prompts.bounds,
        prompts.sequences,
        out,
        *strides,
        **shape,
        **tile,
        **launch,
    )
    return out


def delta_rule_reference(mixed: Tensor, decay: Tensor, beta: Tensor, states: LayerStates) -> Tensor:
    """Plain torch for `delta_rule`, computed in the dtype of the states."""
    data, n, heads = states.data, states.num_decodes, decay.shape[1]
    values, per_key = data.shape[-1], heads // mixed.shape[1]
    keys = (mixed.shape[-1] - per_key * values) // 2
    data = data[:, :, -per_key * keys :]
    *both, value = mixed.to(data.dtype).tensor_split((keys, 2 * keys), dim=-1)
    query, key = (x.repeat_interleave(per_key, dim=1) for x in both)
    value = value.reshape(*query.shape[:2], values)
    inputs = (query, key, value, decay, beta)
    out = torch.empty_like(value)
    if n:
        before = data.index_select(0, states.reads[:n]).view(n, heads, keys, values)
        q, k, v, g, b = (x[:n] for x in inputs)
        out[:n], after = delta_rule_step(q, k, v, g, b, before)
        there = states.writes[:n] != 0
        data[states.writes[:n][there]] = after[there].view(-1, *data.shape[1:])
    if states.prompts is not None:
        for row, (begin, end) in enumerate(pairwise(states.prompts.bounds[n:].tolist()), n):
            before = data[states.reads[row]].reshape(heads, keys, values)
            q, k, v, g, b = (x[begin:end].transpose(0, 1) for x in inputs)
            found, after = chunk_delta_rule(q, k, v, g, b, before)
            out[begin:end] = found.transpose(0, 1)
            data[states.writes[row]] = after.view(data.shape[1:])
    return out.to(mixed.dtype)


def delta_rule_step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply one token of each sequence; all tensors have one dtype.

    Args:
        query: [n, heads, keys].
        key: [n, heads, keys].
        value: [n, heads, values].
        decay: [n, heads]: g.
        beta: [n, heads]: b.
        state: [n, heads, keys, values].

    Returns:
        Outputs, shaped like `value`, and the new states.
    """
    state = state * decay.exp()[..., None, None]
    known = (key[..., None, :] @ state)[..., 0, :]
    fresh = (value - known) * beta[..., None]
    state = state + key[..., None] * fresh[..., None, :]
    return (query[..., None, :] @ state)[..., 0, :], state


def chunk_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply consecutive tokens of one sequence, chunk by chunk (section 3.3 of the paper).

    Within a chunk, the update by each token depends on the updates by earlier tokens: a triangular
    system with ones on its diagonal. Its right side is the values less what the state before the
    chunk holds for the keys. All tensors have one dtype.

    Args:
        query: [heads, tokens, keys].
        key: [heads, tokens, keys].
        value: [heads, tokens, values].
        decay: [heads, tokens]: g.
        beta: [heads, tokens]: b.
        state: [heads, keys, values].

    Returns:
        Outputs, shaped like `value`, and the new state.
    """
    out = torch.empty_like(value)
    for begin in range(0, key.shape[1], CHUNK):
        part = slice(begin, begin + CHUNK)
        q, k, b = query[:, part], key[:, part], beta[:, part, None]
        total = decay[:, part].cumsum(-1)
        between = (total[..., :, None] - total[..., None, :]).exp().tril()
        grown = total.exp()[..., None]
        system = (k @ k.mT) * between * b
        right = (value[:, part] - (k @ state) * grown) * b
        fresh = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        out[:, part] = (q @ state) * grown + ((q @ k.mT) * between) @ fresh
        to_end = (total[..., -1:] - total).exp()[..., None]
        state = state * grown[:, -1:] + (k * to_end).mT @ fresh
    return out, state


@jit("reads", "writes")
def _decode_kernel(
    mixed: tl.tensor,
    decay: tl.tensor,
    beta: tl.tensor,
    states: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    out: tl.tensor,
    stride_block: tl.tensor,
    stride_head: tl.tensor,
    HEADS: tl.constexpr,
    PER_KEY: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """One program: BLOCK_V values of one head of one sequence."""
    row = tl.program_id(0).to(tl.int64)
    head = row % HEADS
    read = tl.load(reads + row // HEADS).to(tl.int64)
    write = tl.load(writes + row // HEADS).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (k < KEYS)[:, None] & (v < VALUES)[None, :]
    place = head // PER_KEY * stride_head
    place += (head % PER_KEY * KEYS + k)[:, None] * VALUES + v[None, :]
    state = tl.load(states + read * stride_block + place, mask=inside, other=0.0)
    inputs = mixed + row // PER_KEY * (2 * KEYS + PER_KEY * VALUES)
    query = tl.load(inputs + k, mask=k < KEYS, other=0.0).to(tl.float32)
    key = tl.load(inputs + KEYS + k, mask=k < KEYS, other=0.0).to(tl.float32)
    inputs += 2 * KEYS + head % PER_KEY * VALUES
    value = tl.load(inputs + v, mask=v < VALUES, other=0.0).to(tl.float32)
    state *= tl.exp(tl.load(decay + row))
    fresh = (value - tl.sum(state * key[:, None], axis=0)) * tl.load(beta + row)
    state += key[:, None] * fresh[None, :]
    found = tl.sum(state * query[:, None], axis=0).to(out.dtype.element_ty)
    tl.store(out + row * VALUES + v, found, mask=v < VALUES)
    tl.store(states + write * stride_block + place, state, mask=inside & (write != 0))


@jit("chunks", "count")
def _solve_kernel(
    mixed: tl.tensor,
    decay: tl.tensor,
    beta: tl.tensor,
    chunks: tl.tensor,
    count: tl.tensor,
    solved: tl.tensor,
    within: tl.tensor,
    totals: tl.tensor,
    HEADS: tl.constexpr,
    PER_KEY: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One program: one head of one chunk, before any state is known.

    Of token i and those up to it: `solved` [CHUNK], what it adds of the right sides of their
    system; `within` [CHUNK], what it reads of what they add; `totals`, decays from the first on.
    """
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    dtype: tl.constexpr = solved.dtype.element_ty
    # What is rounded to half precision later on needs no more than one TF32 product.
    precision: tl.constexpr = "tf32x3" if dtype == tl.float32 else "tf32"
    begin = tl.load(chunks + tl.program_id(0))
    end = tl.load(chunks + count + tl.program_id(0))
    head = tl.program_id(1)
    t, k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    live = begin + t < end
    row = (begin + t) * HEADS + head
    place = (begin + t) * (HEADS // PER_KEY) + head // PER_KEY
    inputs = mixed + place[:, None] * (2 * KEYS + PER_KEY * VALUES) + k[None, :]
    inside = live[:, None] & (k < KEYS)[None, :]
    query = tl.load(inputs, mask=inside, other=0.0)
    key = tl.load(inputs + KEYS, mask=inside, other=0.0)
    strength = tl.load(beta + row, mask=live, other=0.0)
    total = tl.cumsum(tl.load(decay + row, mask=live, other=0.0), axis=0)
    tl.store(totals + row, total, mask=live)
    earlier = t[:, None] - t[None, :]
    between = tl.exp(tl.where(earlier >= 0, total[:, None] - total[None, :], -float("inf")))
    read = tl.dot(query, tl.trans(key), input_precision="tf32x3") * between
    place = row[:, None] * CHUNK + t[None, :]
    tl.store(within + place, read.to(dtype), mask=live[:, None])
    system = tl.dot(key, tl.trans(key), input_precision="tf32x3") * between * strength[:, None]
    system = tl.where(earlier > 0, system, 0.0)
    # Blocks on the diagonal: token by token, in all of them at once, less the unit matrix.
    b, i = tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    diagonal = b[:, None, None, None] == b[None, None, :, None]
    wide = tl.reshape(system, (BLOCKS, BLOCK, BLOCKS, BLOCK))
    own = -tl.sum(tl.where(diagonal, wide, 0.0), axis=2)
    for token in range(1, BLOCK):
        this = (i == token)[None, :, None]
        line = tl.sum(tl.where(this, own, 0.0), axis=1)
        line += tl.sum(line[:, :, None] * own, axis=1)
        own = tl.where(this, line[:, None, :], own)
    own += tl.where(i[:, None] == i[None, :], 1.0, 0.0)[None, :, :]
    wide = tl.where(diagonal, own[:, :, None, :], 0.0)
    inverse = tl.reshape(wide, (CHUNK, CHUNK))
    # The rest N, seen through them, is nilpotent: 1 / (1 + N) = 1 - N (1 - N (1 - ...)).
    others = tl.where(t[:, None] // BLOCK > t[None, :] // BLOCK, system, 0.0)
    others = tl.dot(inverse, others, input_precision=precision)
    unit = tl.where(earlier == 0, 1.0, 0.0)
    series = unit - others
    for _ in tl.static_range(BLOCKS - 2):
        series = unit - tl.dot(others, series, input_precision=precision)
    inverse = tl.dot(series, inverse, input_precision=precision) * strength[None, :]
    tl.store(solved + place, inverse.to(dtype), mask=live[:, None])


@jit("reads", "writes", "bounds", "sequences")
def _scan_kernel(
    mixed: tl.tensor,
    solved: tl.tensor,
    within: tl.tensor,
    totals: tl.tensor,
    states: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    bounds: tl.tensor,
    sequences: tl.tensor,
    out: tl.tensor,
    stride_block: tl.tensor,
    stride_head: tl.tensor,
    HEADS: tl.constexpr,
    PER_KEY: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """One program: BLOCK_V values of one head of one prompt, chunk after chunk."""
    dtype: tl.constexpr = mixed.dtype.element_ty
    sequence, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    t, k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    keys_in, values_in = (k < KEYS)[None, :], (v < VALUES)[None, :]
    inside = (k < KEYS)[:, None] & values_in
    place = states + head // PER_KEY * stride_head
    place += (head % PER_KEY * KEYS + k)[:, None] * VALUES + v[None, :]
    first, last = tl.load(sequences + sequence), tl.load(sequences + sequence + 1)
    read = tl.load(reads + first).to(tl.int64)
    state = tl.load(place + read * stride_block, mask=inside, other=0.0)
    for row in range(first.to(tl.int32), last.to(tl.int32)):
        end = tl.load(bounds + row + 1).to(tl.int32)
        for begin in range(tl.load(bounds + row).to(tl.int32), end, CHUNK):
            live = (begin + t < end)[:, None]
            token = (begin + t).to(tl.int64)
            of_key = token * (HEADS // PER_KEY) + head // PER_KEY
            inputs = mixed + of_key[:, None] * (2 * KEYS + PER_KEY * VALUES)
            key = tl.load(inputs + KEYS + k[None, :], mask=live & keys_in, other=0.0)
            query = tl.load(inputs + k[None, :], mask=live & keys_in, other=0.0)
            inputs += 2 * KEYS + head % PER_KEY * VALUES
            value = tl.load(inputs + v[None, :], mask=live & values_in, other=0.0)
            of_head = token * HEADS + head
            square = of_head[:, None] * CHUNK + t[None, :]
            solution = tl.load(solved + square, mask=live, other=0.0)
            reading = tl.load(within + square, mask=live, other=0.0)
            total = tl.load(totals + of_head, mask=begin + t < end, other=0.0)
            last_token = (tl.minimum(begin + CHUNK, end) - 1).to(tl.int64)
            final = tl.load(totals + last_token * HEADS + head)
            grown = tl.exp(total)[:, None]
            kept = state.to(dtype)
            known = tl.dot(key, kept, input_precision="tf32x3") * grown
            right = (value.to(tl.float32) - known).to(dtype)
            fresh = tl.dot(solution, right, input_precision="tf32x3")
            found = tl.dot(query, kept, input_precision="tf32x3") * grown
            found += tl.dot(reading, fresh.to(dtype), input_precision="tf32x3")
            target = out + of_head[:, None] * VALUES + v[None, :]
            tl.store(target, found.to(dtype), mask=live & values_in)
            fresh = (fresh * tl.exp(final - total)[:, None]).to(dtype)
            state *= tl.exp(final)
            state += tl.dot(tl.trans(key), fresh, input_precision="tf32x3")
        write = tl.load(writes + row).to(tl.int64)
        tl.store(place + write * stride_block, state, mask=inside & (write != 0))

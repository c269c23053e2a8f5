"""The gated delta rule: a token of each sequence, on states in the pool; or a prompt's chunks.

Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464. Of a head with state S [keys,
values], decay g, strength b, query q, key k and value v:

    S = exp(g) S;  S = S + k (b (v - k S));  out = q S

A step is as fast as its states are read and written: once each here, eleven times in plain torch.
A prompt is one launch over all of its chunks, instead of some for each: states stay in registers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbaton.kernels.jit import cdiv, jit, next_power_of_2, tl, use_triton

BLOCK_V = 32
"""Values of a head per program, whose part of the state stays in registers."""


def delta_rule_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    reads: Tensor,
    writes: Tensor,
) -> Tensor:
    """Move states on by a token each.

    Args:
        query: [n, heads, keys] float32, contiguous, as all up to `beta`.
        key: likewise.
        value: [n, heads, values] float32.
        decay: [n, heads] float32: g.
        beta: [n, heads] float32: b.
        states: [blocks, key heads, heads per key head * keys, values] float32, of which the last
            two axes are contiguous.
        reads: [n] int64, block of each state before the token.
        writes: [n] int64, where it goes; may be the same, no other's; 0 for nowhere.

    Returns:
        [n, heads, values] float32.
    """
    if not use_triton(states):
        return delta_rule_decode_reference(query, key, value, decay, beta, states, reads, writes)
    (n, heads, keys), values = key.shape, value.shape[-1]
    out = torch.empty_like(value)
    block_v = min(BLOCK_V, next_power_of_2(values))
    if n:
        _kernel[(n * heads, cdiv(values, block_v))](
            query,
            key,
            value,
            decay,
            beta,
            states,
            reads,
            writes,
            out,
            heads,
            states.stride(0),
            states.stride(1),
            PER_KEY=heads // states.shape[1],
            KEYS=keys,
            VALUES=values,
            BLOCK_K=next_power_of_2(keys),
            BLOCK_V=block_v,
            num_warps=4,
        )
    return out


def delta_rule_decode_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    reads: Tensor,
    writes: Tensor,
) -> Tensor:
    """Plain torch for `delta_rule_decode`."""
    before = states.index_select(0, reads).view(*key.shape, value.shape[-1])
    out, after = delta_rule_step(query, key, value, decay, beta, before)
    there = writes != 0
    states[writes[there]] = after[there].view(-1, *states.shape[1:])
    return out


def delta_rule_step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`delta_rule_decode` on states at hand: [n, heads, keys, values]; returns those after, too."""
    state = state * decay.exp()[..., None, None]
    known = (key[..., None, :] @ state)[..., 0, :]
    fresh = (value - known) * beta[..., None]
    state = state + key[..., None] * fresh[..., None, :]
    return (query[..., None, :] @ state)[..., 0, :], state


def delta_rule_scan(
    query: Tensor,
    key: Tensor,
    added: Tensor,
    erased: Tensor,
    within: Tensor,
    left: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Carry a state over chunks of tokens whose own systems are solved (section 3.3).

    Of each chunk, with S the state before it:

        fresh = added - erased S;  out = query S + within fresh;  S = left S + key^T fresh

    Args:
        query: [heads, chunks, tokens, keys] float32, decayed from the chunk's start.
        key: likewise, decayed to its end.
        added: [heads, chunks, tokens, values] float32.
        erased: [heads, chunks, tokens, keys] float32.
        within: [heads, chunks, tokens, tokens] float32.
        left: [heads, chunks] float32: what a chunk leaves of the state.
        state: [heads, keys, values] float32.

    Returns:
        out, as `added`, and the last state.
    """
    if not use_triton(state):
        return delta_rule_scan_reference(query, key, added, erased, within, left, state)
    (heads, chunks, tokens, keys), values = key.shape, added.shape[-1]
    inputs = (x.contiguous() for x in (query, key, added, erased, within, left, state))
    out = torch.empty((heads, chunks, tokens, values), dtype=torch.float32, device=state.device)
    after = torch.empty((heads, keys, values), dtype=torch.float32, device=state.device)
    block_v = max(16, min(BLOCK_V, next_power_of_2(values)))
    _scan_kernel[(heads, cdiv(values, block_v))](
        *inputs,
        out,
        after,
        chunks,
        TOKENS=tokens,
        KEYS=keys,
        VALUES=values,
        BLOCK_T=max(16, next_power_of_2(tokens)),
        BLOCK_K=max(16, next_power_of_2(keys)),
        BLOCK_V=block_v,
        num_warps=4,
        num_stages=1,  # two chunks at a time would not fit
    )
    return out, after


def delta_rule_scan_reference(
    query: Tensor,
    key: Tensor,
    added: Tensor,
    erased: Tensor,
    within: Tensor,
    left: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Plain torch for `delta_rule_scan`."""
    out = torch.empty_like(added)
    for i in range(key.shape[1]):
        fresh = added[:, i] - erased[:, i] @ state
        out[:, i] = query[:, i] @ state + within[:, i] @ fresh
        state = state * left[:, i, None, None] + key[:, i].mT @ fresh
    return out, state


@jit("reads", "writes")
def _kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    decay: tl.tensor,
    beta: tl.tensor,
    states: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    stride_block: tl.tensor,
    stride_head: tl.tensor,
    PER_KEY: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """One program: BLOCK_V values of one head of one sequence."""
    row = tl.program_id(0).to(tl.int64)
    head = row % heads
    read = tl.load(reads + row // heads).to(tl.int64)
    write = tl.load(writes + row // heads).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (k < KEYS)[:, None] & (v < VALUES)[None, :]
    place = head // PER_KEY * stride_head
    place += (head % PER_KEY * KEYS + k)[:, None] * VALUES + v[None, :]
    state = tl.load(states + read * stride_block + place, mask=inside, other=0.0)
    keys = tl.load(key + row * KEYS + k, mask=k < KEYS, other=0.0)
    queries = tl.load(query + row * KEYS + k, mask=k < KEYS, other=0.0)
    values = tl.load(value + row * VALUES + v, mask=v < VALUES, other=0.0)
    state *= tl.exp(tl.load(decay + row))
    fresh = (values - tl.sum(state * keys[:, None], axis=0)) * tl.load(beta + row)
    state += keys[:, None] * fresh[None, :]
    tl.store(out + row * VALUES + v, tl.sum(state * queries[:, None], axis=0), mask=v < VALUES)
    tl.store(states + write * stride_block + place, state, mask=inside & (write != 0))


@jit("chunks")
def _scan_kernel(
    query: tl.tensor,
    key: tl.tensor,
    added: tl.tensor,
    erased: tl.tensor,
    within: tl.tensor,
    left: tl.tensor,
    state: tl.tensor,
    out: tl.tensor,
    after: tl.tensor,
    chunks: tl.tensor,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """One program: BLOCK_V values of one head, chunk after chunk."""
    head = tl.program_id(0).to(tl.int64)
    t, k = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    of_keys = t[:, None] * KEYS + k[None, :]
    of_values = t[:, None] * VALUES + v[None, :]
    of_tokens = t[:, None] * TOKENS + t[None, :]
    keys_in = (t < TOKENS)[:, None] & (k < KEYS)[None, :]
    values_in = (t < TOKENS)[:, None] & (v < VALUES)[None, :]
    tokens_in = (t < TOKENS)[:, None] & (t < TOKENS)[None, :]
    place = head * KEYS * VALUES + k[:, None] * VALUES + v[None, :]
    inside = (k < KEYS)[:, None] & (v < VALUES)[None, :]
    kept = tl.load(state + place, mask=inside, other=0.0)
    for i in range(chunks):
        chunk = head * chunks + i
        keys_at = chunk * TOKENS * KEYS + of_keys
        values_at = chunk * TOKENS * VALUES + of_values
        gone = tl.load(erased + keys_at, mask=keys_in, other=0.0)
        fresh = tl.load(added + values_at, mask=values_in, other=0.0)
        fresh -= tl.dot(gone, kept, input_precision="tf32x3")
        q = tl.load(query + keys_at, mask=keys_in, other=0.0)
        w = tl.load(within + chunk * TOKENS * TOKENS + of_tokens, mask=tokens_in, other=0.0)
        read = tl.dot(q, kept, input_precision="tf32x3")
        read += tl.dot(w, fresh, input_precision="tf32x3")
        tl.store(out + values_at, read, mask=values_in)
        keys = tl.load(key + keys_at, mask=keys_in, other=0.0)
        kept *= tl.load(left + chunk)
        kept += tl.dot(tl.trans(keys), fresh, input_precision="tf32x3")
    tl.store(after + place, kept, mask=inside)

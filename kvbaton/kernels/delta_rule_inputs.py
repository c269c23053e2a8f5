"""Inputs of the gated delta rule from a layer's projections: a launch each for decode and prefill.

A causal convolution mixes each channel over its last tokens; the state keeps those that the next
token needs (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464, section 3.4). SiLU
follows; then queries and keys are normalised to length 1, and queries scaled as in attention.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbaton.kernels.delta_rule import LayerStates
from kvbaton.kernels.jit import jit, next_power_of_2, tl, use_triton

LAUNCH = {"BLOCK_T": 16, "num_warps": 4}
"""Launch options for prompts: tokens that a program holds in registers, and its warps."""


def delta_rule_inputs(
    projected: Tensor, rates: Tensor, weight: Tensor, decays: Tensor, states: LayerStates
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the inputs of `delta_rule`, and update the convolution's part of the states.

    Args:
        projected: [tokens, key heads, channels]: per key head the query, the key and the values;
            last axis contiguous.
        rates: [tokens, key heads, 2, values per key head], contiguous: logits of the strengths,
            then steps of the decays.
        weight: [key heads, channels, taps], contiguous: weight of the convolution; the last tap is
            for the token itself.
        decays: [2, heads] float32: a, b of each head; its decay is -exp(a) * softplus(step + b).
        states: States of all rows. A state starts with the last [channels, taps - 1] inputs of its
            key head, padded with zeros to whole rows.

    Returns:
        mixed, decay and beta, as in `delta_rule`.
    """
    if not use_triton(projected):
        return delta_rule_inputs_reference(projected, rates, weight, decays, states)
    (tokens, key_heads, channels), (_, _, _, per_key) = projected.shape, rates.shape
    data, prompts, values = states.data, states.prompts, states.data.shape[-1]
    keys, taps = (channels - per_key * values) // 2, weight.shape[-1]
    mixed = torch.empty(projected.shape, dtype=projected.dtype, device=projected.device)
    decay, beta = torch.empty(
        (2, tokens, key_heads * per_key), dtype=torch.float32, device=projected.device
    ).unbind()
    unused = (states.reads,) * 3
    one = {"BLOCK_T": 1, "num_warps": 1}
    launches = [(states.num_decodes, one, unused)] if states.num_decodes else []
    if prompts is not None:
        tables = (prompts.bounds, prompts.sequences, prompts.pieces)
        launches.append((prompts.pieces.shape[1], LAUNCH, tables))
    for count, launch, tables in launches:
        _kernel[(count, key_heads * (2 + per_key))](
            projected,
            rates,
            weight,
            decays,
            data,
            states.reads,
            states.writes,
            *tables,
            count,
            mixed,
            decay,
            beta,
            *projected.stride()[:2],
            *data.stride()[:2],
            KEY_HEADS=key_heads,
            PER_KEY=per_key,
            KEYS=keys,
            VALUES=values,
            TAPS=taps,
            PADDING=-channels * (taps - 1) % values,
            BLOCK_D=next_power_of_2(max(keys, values)),
            **launch,
        )
    return mixed, decay, beta


def delta_rule_inputs_reference(
    projected: Tensor, rates: Tensor, weight: Tensor, decays: Tensor, states: LayerStates
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain torch for `delta_rule_inputs`, computed in the dtype of the states."""
    data, n, (tokens, heads, channels) = states.data, states.num_decodes, projected.shape
    dtype, before = data.dtype, weight.shape[-1] - 1
    keys = (channels - rates.shape[-1] * data.shape[-1]) // 2
    kept = data[:, :, : -(-channels * before // data.shape[-1])]
    mixed = torch.empty((tokens, heads, channels), dtype=projected.dtype, device=data.device)
    pieces = [(slice(0, n), slice(0, n), n)] if n else []
    if states.prompts is not None:
        bounds = pairwise(states.prompts.bounds[n:].tolist())
        pieces += [(slice(row, row + 1), slice(*both), 1) for row, both in enumerate(bounds, n)]
    for rows, part, count in pieces:
        fresh = projected[part].reshape(count, -1, heads, channels).permute(0, 2, 3, 1)
        state = kept.index_select(0, states.reads[rows]).flatten(2)[..., : channels * before]
        state = state.reshape(count, heads, channels, before)
        window = torch.cat((state, fresh.to(dtype)), dim=-1)
        last = F.pad(window[..., -before:].flatten(2), (0, -channels * before % data.shape[-1]))
        there = states.writes[rows] != 0
        kept[states.writes[rows][there]] = last.view(count, *kept.shape[1:])[there]
        total = (window.unfold(-1, before + 1, 1) * weight.to(dtype)[:, :, None]).sum(-1)
        found = F.silu(total.to(projected.dtype)).permute(0, 3, 1, 2).flatten(0, 1).to(dtype)
        for x, scale in ((found[..., :keys], keys**-0.5), (found[..., keys : 2 * keys], 1.0)):
            x *= torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) * scale
        mixed[part] = found.to(mixed.dtype)
    beta, step = (x.flatten(1) for x in rates.unbind(2))
    decay = -decays[0].exp() * F.softplus(step.to(decays.dtype) + decays[1])
    return mixed, decay, beta.sigmoid().to(decays.dtype)


@jit("reads", "writes", "bounds", "sequences", "pieces", "count")
def _kernel(
    projected: tl.tensor,
    rates: tl.tensor,
    weight: tl.tensor,
    decays: tl.tensor,
    states: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    bounds: tl.tensor,
    sequences: tl.tensor,
    pieces: tl.tensor,
    count: tl.tensor,
    mixed: tl.tensor,
    decay: tl.tensor,
    beta: tl.tensor,
    stride_token: tl.tensor,
    stride_head: tl.tensor,
    stride_block: tl.tensor,
    stride_state: tl.tensor,
    KEY_HEADS: tl.constexpr,
    PER_KEY: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    TAPS: tl.constexpr,
    PADDING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program: the query, the key or a value of one key head, of a row's token or a chunk's."""
    CHANNELS: tl.constexpr = 2 * KEYS + PER_KEY * VALUES
    BEFORE: tl.constexpr = TAPS - 1
    number = tl.program_id(0).to(tl.int64)
    head, part = tl.program_id(1) // (2 + PER_KEY), tl.program_id(1) % (2 + PER_KEY)
    if BLOCK_T == 1:
        begin, end, start, row, last_row = number, number + 1, number, number, number + 1
    else:
        begin, end = tl.load(pieces + number), tl.load(pieces + count + number)
        sequence = tl.load(pieces + 2 * count + number)
        row, last_row = tl.load(sequences + sequence), tl.load(sequences + sequence + 1)
        start = tl.load(bounds + row)
    dtype: tl.constexpr = mixed.dtype.element_ty
    d, is_value = tl.arange(0, BLOCK_D), part >= 2
    inside = d < tl.where(is_value, VALUES, KEYS)
    channel = tl.where(is_value, 2 * KEYS + (part - 2) * VALUES, part * KEYS) + d
    inputs = projected + head * stride_head + channel
    state = states + head * stride_state + channel * BEFORE
    # Before the sequence's first token, the inputs of BEFORE tokens.
    kept = state + tl.load(reads + row).to(tl.int64) * stride_block + BEFORE
    taps = weight + (head * CHANNELS + channel) * TAPS
    of_head = head * PER_KEY + tl.maximum(part - 2, 0)
    rate, bias = -tl.exp(tl.load(decays + of_head)), tl.load(decays + KEY_HEADS * PER_KEY + of_head)
    for tile in range(tl.cdiv(end - begin, BLOCK_T)):
        t = begin + tile * BLOCK_T + tl.arange(0, BLOCK_T)
        live = (t < end)[:, None] & inside[None, :]
        total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        for tap in tl.static_range(TAPS):
            seen = t - BEFORE + tap
            place = inputs[None, :] + seen[:, None] * stride_token
            x = tl.load(place, mask=live & (seen >= start)[:, None], other=0.0).to(tl.float32)
            total += x * tl.load(taps + tap, mask=inside, other=0.0).to(tl.float32)[None, :]
        if begin + tile * BLOCK_T < start + BEFORE:
            for i in range(BEFORE):
                past = t - BEFORE + i - start
                old = kept[None, :] + past[:, None]
                old = tl.load(old, mask=live & (past < 0)[:, None], other=0.0)
                total += old * tl.load(taps + i, mask=inside, other=0.0).to(tl.float32)[None, :]
        wide = total.to(dtype).to(tl.float32)
        wide = (wide / (1.0 + tl.exp(-wide))).to(dtype).to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, axis=1) + 1e-6) * tl.where(part == 0, KEYS**-0.5, 1.0)
        wide *= tl.where(is_value, 1.0, factor)[:, None]
        place = mixed + (t * KEY_HEADS + head)[:, None] * CHANNELS + channel[None, :]
        tl.store(place, wide.to(dtype), mask=live)
        if is_value:
            logit = rates + (t * KEY_HEADS + head) * (2 * PER_KEY) + part - 2
            strength = tl.load(logit, mask=t < end, other=0.0).to(tl.float32)
            strength = (1.0 / (1.0 + tl.exp(-strength))).to(dtype).to(tl.float32)
            step = bias + tl.load(logit + PER_KEY, mask=t < end, other=0.0).to(tl.float32)
            # log(1 + e), exact where e is small (Kahan): e / (1 + e - 1) makes up for rounding.
            small = tl.exp(tl.minimum(step, 20.0))
            rounded = 1.0 + small - 1.0
            log = tl.log(1.0 + small) * (small / tl.where(rounded == 0.0, 1.0, rounded))
            log = tl.where(rounded == 0.0, small, log)
            target = t * (KEY_HEADS * PER_KEY) + of_head
            tl.store(decay + target, rate * tl.where(step > 20.0, step, log), mask=t < end)
            tl.store(beta + target, strength, mask=t < end)
    if begin == start:
        # All states of this sequence: the last first, since the first may take the place of what is
        # read; of each the oldest input first, since that of the next moves to its place.
        for back in range(last_row - row):
            one = last_row - 1 - back
            write = tl.load(writes + one).to(tl.int64)
            stop = number + 1 if BLOCK_T == 1 else tl.load(bounds + one + 1)
            there = inside & (write != 0)
            for i in tl.static_range(BEFORE):
                at = stop - BEFORE + i
                fresh = tl.load(inputs + at * stride_token, mask=inside & (at >= start), other=0.0)
                value = tl.load(kept + (at - start), mask=inside & (at < start), other=0.0)
                tl.debug_barrier()
                value += fresh.to(tl.float32)
                tl.store(state + write * stride_block + i, value, mask=there)
                tl.debug_barrier()
            if PADDING and part == 1 + PER_KEY:
                pad = states + head * stride_state + write * stride_block + CHANNELS * BEFORE
                tl.store(
                    pad + d, tl.zeros((BLOCK_D,), tl.float32), mask=(d < PADDING) & (write != 0)
                )

"""One token per row of logits: a draw from the softmax, or the best one, in one pass over them.

A draw is ``argmax(logits / temperature + Gumbel noise)`` (Gumbel 1954; Maddison et al., arXiv
1411.0030); the noise is that of `philox.gumbel_noise`, made where it is added, so that neither it
nor the logits in fp32 ever lie in memory.
"""

from __future__ import annotations

import torch

from kvbaton.kernels.jit import cdiv, jit, next_power_of_2, tl, use_triton, wait_for_inputs
from kvbaton.kernels.philox import PURPOSE_SAMPLE, gumbel_noise

BLOCK = 2048


def sample_tokens(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    choices: torch.Tensor,
) -> torch.Tensor:
    """Choose a token for each row; the lowest id of equals.

    Args:
        logits: [rows, vocab], rows contiguous.
        temperatures: [rows] float64; 0 takes the best token.
        seeds: [rows] int64, the bits of a 64-bit seed.
        positions: [rows] int64, absolute position of the token to choose.
        choices: [rows] int64, index of the choice.

    Returns:
        [rows] int64.
    """
    if not use_triton(logits):
        return sample_tokens_reference(logits, temperatures, seeds, positions, choices)
    rows, vocab = logits.shape
    parts = cdiv(vocab, BLOCK)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    best = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    _kernel[(rows, parts)](
        logits,
        temperatures,
        seeds,
        positions,
        choices,
        best,
        ids,
        vocab,
        logits.stride(0),
        BLOCK=BLOCK,
        PURPOSE=PURPOSE_SAMPLE,
        num_warps=4,
    )
    _merge_kernel[(rows,)](best, ids, out, parts, BLOCK=next_power_of_2(parts), num_warps=1)
    return out


def sample_tokens_reference(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    choices: torch.Tensor,
) -> torch.Tensor:
    """Plain torch for `sample_tokens`."""
    drawn = (temperatures > 0)[:, None]
    scale = torch.where(temperatures > 0, temperatures, 1.0).float()[:, None]
    noise = gumbel_noise(seeds, positions, choices, logits.shape[1], PURPOSE_SAMPLE)
    return (logits.float() / scale + torch.where(drawn, noise, 0.0)).argmax(-1)


@jit("temperatures", "seeds", "positions", "choices", early=True)
def _kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    choices: tl.tensor,
    best: tl.tensor,
    ids: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
    PURPOSE: tl.constexpr,
) -> None:
    """One program: BLOCK ids of one row."""
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    value = tl.load(logits + row * stride + column, mask=inside, other=float("-inf"))
    value = value.to(tl.float32)
    temperature = tl.load(temperatures + row).to(tl.float32)
    if temperature > 0.0:
        quad = part * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        position = tl.load(positions + row).to(tl.int32)
        choice = tl.load(choices + row).to(tl.int32)
        w0, w1, w2, w3 = tl.philox(tl.load(seeds + row), quad, position, PURPOSE, choice)
        words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
        uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32
        noise = -tl.log(-tl.log(uniform))
        value = tl.div_rn(value, temperature) + noise.to(tl.float32)
    top, place = tl.max(value, 0, return_indices=True)
    tl.store(best + row * tl.num_programs(1) + part, top)
    tl.store(ids + row * tl.num_programs(1) + part, tl.minimum(part * BLOCK + place, vocab - 1))


@jit(early=True)
def _merge_kernel(
    best: tl.tensor, ids: tl.tensor, out: tl.tensor, parts: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """One program: the best of one row's parts."""
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    value = tl.load(best + row * parts + part, mask=part < parts, other=float("-inf"))
    _, place = tl.max(value, 0, return_indices=True)
    tl.store(out + row, tl.load(ids + row * parts + place).to(tl.int64))

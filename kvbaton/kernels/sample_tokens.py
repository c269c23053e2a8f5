"""One token per row of logits: a draw from the softmax, or the best one, in one pass over them.

A draw is ``argmax(logits / temperature + Gumbel noise)`` (Gumbel 1954; Maddison et al., arXiv
1411.0030); the noise is that of `gumbel_noise`, made where it is added, so that neither it nor the
logits in fp32 ever lie in memory.

Random numbers depend on a counter alone: they are equal on every rank, node and device for equal
arguments. Philox4x32-10 from Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2,
3" (SC 2011), in 64-bit integer arithmetic of plain torch: words are int64 in [0, 2^32).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbaton.kernels.jit import cdiv, jit, next_power_of_2, tl, use_triton, wait_for_inputs

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

PURPOSE_SAMPLE = 0
"""The noise that chooses the next token."""


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x32 over tensors of 32-bit words that broadcast with each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # The product of two 32-bit words wraps in int64 but keeps its 64 bits.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & MASK) ^ c1 ^ k0,
            p1 & MASK,
            ((p0 >> 32) & MASK) ^ c3 ^ k1,
            p0 & MASK,
        )
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def gumbel_noise(
    seeds: Tensor, positions: Tensor, choices: Tensor, vocab_size: int, purpose: int
) -> Tensor:
    """Standard Gumbel noise for every vocabulary id of every row; always finite.

    The counter is (id // 4, position, purpose, choice), the id modulo 4 picks the word of its
    output, the key is the seed. A word w becomes u = (w + 1/2) / 2^32 and the noise is
    -log(-log(u)), in float64, so that a last-bit difference between two devices' logarithms does
    not survive the rounding to float32, and u is never 0 or 1.

    Args:
        seeds: [rows] int64, the bits of a 64-bit seed.
        positions: [rows] int64, absolute position of the token to choose.
        choices: [rows] int64, index of the choice.
        vocab_size: ids.
        purpose: what the noise is for (`PURPOSE_SAMPLE`).

    Returns:
        [rows, vocab_size] float32.
    """
    quads = torch.arange((vocab_size + 3) // 4, device=seeds.device)
    words = philox4x32(
        (quads, (positions & MASK)[:, None], torch.full_like(quads, purpose), choices[:, None]),
        ((seeds & MASK)[:, None], ((seeds >> 32) & MASK)[:, None]),
    )
    uniform = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]
    uniform = uniform.double().add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_().float()


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

"""Counter-based random numbers: equal on every rank, node and device for equal arguments.

Philox4x32-10 from Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011), in 64-bit integer arithmetic of plain torch: words are int64 in [0, 2^32).
"""

from __future__ import annotations

import torch
from torch import Tensor

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

"""Repetition, presence and frequency penalties on logits.

    l' = l / r or, where l < 0, l r: for tokens of the prompt or output (Keskar et al., "CTRL",
        arXiv 1909.05858)
    l'' = l' - f n - p: for tokens that were generated n > 0 times (OpenAI's API)

Tokens are counted anew in each step, so that no state of a sequence can become stale after a draft,
a preemption or a hand-over. A count costs one read of the sequence's tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvbaton.kernels.jit import jit, tl, wait_for_inputs

PROGRAMS = 8
"""Number of programs per row."""
BLOCK = 1024
"""Number of tokens that a program reads at a time."""


class Penalties(NamedTuple):
    """Penalties of each row; all are [rows], except tokens and counts.

    Attributes:
        repetitions: float64; 0 for a row without any penalty.
        presences: float64.
        frequencies: float64.
        num_prompt: int64, number of prompt tokens.
        lengths: int64, number of tokens, including the prompt.
        of: int64, index of the sequence's row in `tokens`.
        tokens: [any, >= longest] int32; entries past a row's length are ignored.
        counts: [>= rows, vocab] int32, scratch of the kernels: zero before and after. It may have
            fewer rows if no row has a penalty.
    """

    repetitions: torch.Tensor
    presences: torch.Tensor
    frequencies: torch.Tensor
    num_prompt: torch.Tensor
    lengths: torch.Tensor
    of: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor


def penalize(logits: torch.Tensor, how: Penalties) -> None:
    """Apply penalties to logits [rows, vocab] float32, in place, in plain torch."""
    index = how.repetitions.nonzero()[:, 0]
    *floats, num_prompt, lengths, of = (x[index] for x in how[:6])
    repetition, presence, frequency = (x.float()[:, None] for x in floats)
    tokens, part = how.tokens[of].long(), logits[index]
    at = torch.arange(tokens.shape[1], device=tokens.device)
    known = at < lengths[:, None]
    generated = known & (at >= num_prompt[:, None])
    seen, times = (
        torch.zeros_like(part).scatter_add_(1, tokens.masked_fill(~counted, 0), counted.float())
        for counted in (known, generated)
    )
    factor = torch.where(part > 0, 1 / repetition, repetition)
    part = torch.where(seen > 0, part * factor, part)
    logits[index] = part - frequency * times - presence * (times > 0)


def count_tokens(how: Penalties) -> None:
    """Count the tokens of rows with penalties into `counts`, for `penalized` to read."""
    _kernel[(len(how.lengths), PROGRAMS)](
        how.repetitions,
        how.num_prompt,
        how.lengths,
        how.of,
        how.tokens,
        how.counts,
        how.counts.shape[1],
        how.tokens.stride(0),
        BLOCK=BLOCK,
        num_warps=4,
    )


@jit("repetitions", "num_prompt", "lengths", "of", "stride", early=True)
def _kernel(
    repetitions: tl.tensor,
    num_prompt: tl.tensor,
    lengths: tl.tensor,
    of: tl.tensor,
    tokens: tl.tensor,
    counts: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program: every n-th block of tokens of one row.

    A token's count is how often it was generated; bit 30 says that the prompt has it.
    """
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    if tl.load(repetitions + row) > 0.0:
        tokens += tl.load(of + row) * stride
        counts += row * vocab
        prompt = tl.load(num_prompt + row).to(tl.int32)
        length = tl.load(lengths + row).to(tl.int32)
        first, step = tl.program_id(1) * BLOCK, tl.num_programs(1) * BLOCK
        for start in tl.range(first, length, step):
            at = start + tl.arange(0, BLOCK)
            token = tl.load(tokens + at, mask=at < length, other=-1)
            known = (token >= 0) & (token < vocab)
            tl.atomic_or(counts + token, 1 << 30, mask=known & (at < prompt), sem="relaxed")
            tl.atomic_add(counts + token, 1, mask=known & (at >= prompt), sem="relaxed")


@jit()
def penalized(
    logits: tl.tensor,
    counts: tl.tensor,
    repetition: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
) -> tl.tensor:
    """Logits less the penalties of a row that has some, by the counts of their tokens."""
    factor = tl.where(logits > 0.0, tl.div_rn(1.0, repetition), repetition)
    logits = tl.where(counts != 0, logits * factor, logits)
    times = (counts & ((1 << 30) - 1)).to(tl.float32)
    return logits - frequency * times - tl.where(times > 0.0, presence, 0.0)

"""What tokens so far take from their logits: repetition, presence and frequency penalty.

    l' = l / r or, where l < 0, l r: of tokens so far (Keskar et al., "CTRL", arXiv 1909.05858)
    l'' = l' - f n - p: of tokens that were generated n > 0 times (OpenAI's API)

How often each token came is counted anew in each step, so that there is no state of a sequence that
a draft, a preemption or another node could leave behind: the work is that of its tokens, and what
its logits ask for is the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvbaton.kernels.jit import jit, tl, wait_for_inputs

PROGRAMS = 8
"""Of a row; and how many of its tokens one looks at together."""
BLOCK = 1024


class Penalties(NamedTuple):
    """Those of each row, [rows] each but for tokens and counts.

    Attributes:
        repetitions: float64; 0 for a row without any penalty.
        presences: float64.
        frequencies: float64.
        num_prompt: int64, how many of the tokens so far are the prompt.
        lengths: int64, tokens so far.
        of: int64, which row of `tokens` they are.
        tokens: [any, >= longest] int32; what stands past a row's length is not looked at.
        counts: [>= rows, vocab] int32, for the kernels: zero before and after. It may have fewer
            rows if none has a penalty.
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
    """Take penalties from logits [rows, vocab] float32, in place, in plain torch."""
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
    """Count tokens so far, of rows with penalties; `penalized` knows how to read it."""
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

"""A first prompt and a first token that nobody asked for.

Torch sets up a lot at first use (thread pools, kernels, code pages); so the first request does not
pay for it.
"""

from __future__ import annotations

from kvbaton.engine.runner import Runner
from kvbaton.engine.step import NewSequence, SequenceStep, StepPlan
from kvbaton.messages.engine import SamplingParams

HANDLE = 0
"""A scheduler's handles begin at 1."""

BLOCK = 1
"""Belongs to nobody yet; what stays in it is overwritten like any free block's content."""


def warm_up(runner: Runner, max_model_len: int) -> None:
    """Run all that a prompt, its hand-over and a token run, within one block."""
    cache = runner.cache
    tokens = min(cache.block_size, max_model_len)
    prompt = max(1, tokens - 1)
    new = NewSequence(HANDLE, (0,) * prompt, prompt, 0, SamplingParams(seed=0))
    runner.run(
        StepPlan(0, new=(new,), steps=(SequenceStep(HANDLE, 0, prompt, ((BLOCK,),), 1),))
    ).result()
    if tokens > prompt:
        runner.run(StepPlan(0, steps=(SequenceStep(HANDLE, prompt, 1, ((),), 1),))).result()
    runner.run(StepPlan(0, ended=(HANDLE,)))
    cache.digest([BLOCK], 0, 0, tokens)
    if cache.sums is not None:
        cache.kept_sums([BLOCK])

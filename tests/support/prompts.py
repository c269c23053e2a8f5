"""Prompts that differ from their first token on, so that none hits another's cache by chance."""

from __future__ import annotations

import numpy as np

VOCAB = 384


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """So many tokens, made from a seed."""
    return tuple(np.random.default_rng([seed, length]).integers(3, VOCAB, length).tolist())

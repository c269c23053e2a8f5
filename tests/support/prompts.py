"""Prompts that differ from their first token on, so that none has a prefix hit by chance."""

from __future__ import annotations

import numpy as np

VOCAB = 384


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """`length` tokens, from a seed."""
    return tuple(random_tokens(np.random.default_rng([seed, length]), length))


def random_tokens(rng: np.random.Generator, count: int) -> list[int]:
    """`count` tokens that are not special."""
    ids: list[int] = rng.integers(3, VOCAB, count).tolist()
    return ids

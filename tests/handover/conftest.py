from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engine_pair import Pair, expected, few_trial_steps, make_pair

__all__ = ["expected", "few_trial_steps", "make_pair"]


@pytest.fixture(scope="session")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint()


@pytest.fixture
def pair(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair()

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvbaton.types import TransferTimers
from tests.support.engine_pair import Pair, expected, make_pair
from tests.support.waiting import promised

__all__ = ["expected", "make_pair"]


@pytest.fixture(scope="session")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint()


@pytest.fixture
def pair(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair()


@pytest.fixture
def brisk(make_pair: Callable[..., Pair]) -> Pair:
    """Its deadlines are such that a test can wait for them, and a busy machine keeps them."""
    deadline = promised(0.5)
    timers = TransferTimers(
        resend=0.1, progress_deadline=deadline, total=2 * deadline, lease=deadline
    )
    return make_pair(timers=timers)

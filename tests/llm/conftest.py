"""Engines forked off one process that has imported torch, for which each of them takes 1.5 s.

Those of the scripts that tests run as they stand are spawned, as everybody's are.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _forked_engines() -> Iterator[None]:
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(["tests.support.forked_engine"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda method: forked)
        yield

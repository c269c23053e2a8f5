"""Launchers of kernels are made by one thread at a time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from kvbaton.kernels.jit import make_launchers_one_by_one


def test_no_two_threads_make_launchers_at_once() -> None:
    both, together = threading.Barrier(2), list[str]()

    class Launcher:
        def __init__(self, source: str, metadata: str) -> None:
            self.made_of = source, metadata
            with suppress(threading.BrokenBarrierError):
                both.wait(0.2)
                together.append(source)

    driver: Any = SimpleNamespace(launcher_cls=Launcher)
    make_launchers_one_by_one(driver)
    once = driver.launcher_cls
    make_launchers_one_by_one(driver)
    assert driver.launcher_cls is once
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(driver.launcher_cls, ["a", "b"], ["x", "y"]))
    assert [launcher.made_of for launcher in made] == [("a", "x"), ("b", "y")]
    assert not together


def test_this_triton_makes_them_by_its_driver() -> None:
    """Another one may ask for something else than `launcher_cls`."""
    from inspect import getsource

    compiler = pytest.importorskip("triton.compiler.compiler")
    assert "driver.active.launcher_cls(" in getsource(compiler.CompiledKernel)

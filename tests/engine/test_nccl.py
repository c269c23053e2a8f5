"""What goes to NCCL, told by a library that stands in for it; test_tensor_parallel_gpu has GPUs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbaton.engine.collectives import AbortedError
from kvbaton.engine.cuda import nccl
from kvbaton.engine.cuda.nccl import NcclCollectives, NcclError
from tests.support.waiting import PATIENCE_S


class Library:
    """Notes calls; `ncclCommAbort` ends when it is told to, as with graphs that are still there."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.code = 0
        self.graphs_gone = threading.Event()
        self.aborting = threading.Event()

    def ncclGetErrorString(self, code: int) -> bytes:
        return b"unhandled system error"

    def ncclCommInitRank(self, made: Any, size: int, told: Any, rank: int) -> int:
        self.calls.append(f"connect {rank} of {size}, {bytes(told)[:2]!r}")
        made._obj.value = 7
        return 0

    def ncclAllGather(self, *args: Any) -> int:
        self.calls.append(f"gather {args[2].value} by {args[-2].value}")
        return self.code

    def ncclCommAbort(self, handle: Any) -> int:
        self.aborting.set()
        assert self.graphs_gone.wait(PATIENCE_S)
        self.calls.append(f"abort {handle.value}")
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    found = Library()
    monkeypatch.setattr(nccl, "_library", lambda: found)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=1))
    yield found
    found.graphs_gone.set()


def test_calls_go_to_the_communicator(library: Library) -> None:
    collectives = NcclCollectives(1, 2, b"id" + bytes(126), None)
    collectives.connect()
    for _ in range(2):
        assert collectives.all_gather(torch.zeros(3, 4)).shape == (3, 8)
    assert library.calls == ["connect 1 of 2, b'id'", *["gather 12 by 7"] * 2]


def test_an_error_is_told(library: Library) -> None:
    library.code = 2
    with pytest.raises(NcclError, match="unhandled system error"):
        NcclCollectives(0, 2, bytes(128), None).all_gather(torch.zeros(1, 1))


def test_after_an_abort_no_call_waits_for_it(library: Library) -> None:
    """NCCL comes back from it only once all graphs with its kernels are gone."""
    collectives = NcclCollectives(0, 2, bytes(128), None)
    collectives.connect()
    collectives.abort()
    collectives.abort()
    assert library.aborting.wait(PATIENCE_S)
    refused = threading.Event()

    def call() -> None:
        with pytest.raises(AbortedError):
            collectives.all_gather(torch.zeros(1, 1))
        refused.set()

    threading.Thread(target=call, daemon=True).start()
    assert refused.wait(PATIENCE_S)
    library.graphs_gone.set()


def test_what_was_never_connected_is_given_back(library: Library) -> None:
    NcclCollectives(0, 2, bytes(128), None).close()
    assert not library.calls

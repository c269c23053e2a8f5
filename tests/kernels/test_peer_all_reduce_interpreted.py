"""Sums between ranks without GPUs: processes that interpret the kernels over shared memory.

It shows the rounds, flags and areas of the inboxes for any number of ranks; what the memory of GPUs
adds to that, test_peer_all_reduce.py shows.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbaton.kernels import few_rows_all_reduce, peer_memory
from kvbaton.kernels import peer_all_reduce as sums
from kvbaton.kernels.jit import INTERPRETED
from kvbaton.kernels.rms_norm import rms_norm_reference

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="triton is not installed, or runs on a GPU here"),
    pytest.mark.filterwarnings("ignore"),  # of numpy
]
PROGRAMS, ROW_BYTES = 6, 256
PATIENCE_S = 120.0


class HostMemory(peer_memory.PeerMemory):
    """`PeerMemory` of a process; all have mapped the same memory at the same addresses."""

    def __init__(
        self, rank: int, inboxes: list[Tensor], flags: list[Tensor], rounds: Tensor, waiting: Tensor
    ) -> None:
        self.rank, self.size, self.programs = rank, len(inboxes), PROGRAMS
        self.inboxes, self.flags, self.rounds, self.waiting = inboxes, flags, rounds, waiting
        self.flags_at = torch.tensor([each.data_ptr() for each in flags])
        self._views: dict[torch.dtype, tuple[Tensor, ...]] = {}


def shared(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.full(shape, 0 if dtype == torch.int32 else torch.nan, dtype=dtype)
    return made.share_memory_()  # type: ignore[no-any-return, no-untyped-call]


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[HostMemory]]:
    small = {"PROGRAMS": PROGRAMS, "ROW_BYTES": ROW_BYTES, "BLOCK": 64, "SHARE": 32, "FEW_ROWS": 2}
    for name, value in (small | {"SHARED_FROM": 128, "MOST_SHARED": 384}).items():
        for module in (sums, few_rows_all_reduce, peer_memory):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)

    def make(size: int) -> list[HostMemory]:
        inboxes = [shared(peer_memory.inbox_size(size)) for _ in range(size)]
        flags = [shared(PROGRAMS * size, dtype=torch.int32) for _ in range(size)]
        rounds = [shared(PROGRAMS + 2, dtype=torch.int32) for _ in range(size)]
        waiting = shared(1, dtype=torch.int32)
        waiting.fill_(1)
        made = [HostMemory(rank, inboxes, flags, rounds[rank], waiting) for rank in range(size)]
        for inbox in made[0].few_rows:
            inbox.zero_()
        return made

    return make


def together(memories: list[HostMemory], work: Callable[[HostMemory], None]) -> None:
    """Run a function on all ranks; no rank may fail, or wait for ever."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=work, args=(memory,), daemon=True) for memory in memories]
    for process in processes:
        process.start()
    deadline = time.monotonic() + PATIENCE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * len(processes)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rounds_of_many_sizes(size: int, memories: Callable[[int], list[HostMemory]]) -> None:
    """Also of more rows than programs, and of both kinds in turn."""
    ranks, rng = memories(size), np.random.default_rng(size)
    most = [1, 40, 64, 100, 128] + ([1000, 777] if size == 2 else [129, 250, 384])
    torch.manual_seed(size)
    given, norms, outs = [], [], []
    for _ in range(24):
        width = int(rng.choice([0, 16, 40]))  # 0: not normalised
        rows = int(rng.integers(1, 20 if size == 2 else 4)) if width else 1
        shape = (rows, width or int(rng.choice(most)))
        given.append([torch.randn(shape) for _ in ranks])
        stream = torch.randn(shape)
        norms.append((stream, torch.randn(width), float(rng.choice([0.0, 1.0]))) if width else None)
        outs.append([(shared(*shape), shared(*shape).copy_(stream)) for _ in ranks])

    def work(memory: HostMemory) -> None:
        torch.set_num_threads(1)
        late = np.random.default_rng(memory.rank)
        for tensors, norm, out in zip(given, norms, outs, strict=True):
            if late.random() < 0.3:
                time.sleep(0.01)
            own, (target, stream) = tensors[memory.rank], out[memory.rank]
            if norm is None:
                assert memory.fits(own)
                target.copy_(sums.peer_all_reduce(own, memory))
            else:
                assert memory.fits_norm(own)
                _, weight, offset = norm
                normed = sums.peer_all_reduce_norm(own, memory, stream, weight, 1e-5, offset)
                target.copy_(normed)

    together(ranks, work)
    for tensors, norm, out in zip(given, norms, outs, strict=True):
        expected = sums.peer_all_reduce_reference(tensors)
        for target, stream in out:
            if norm is None:
                assert torch.equal(target, expected)
            else:
                before, weight, offset = norm
                after = before.clone()
                normed = rms_norm_reference(
                    expected, weight, 1e-5, residual=after, weight_offset=offset
                )
                assert torch.equal(stream, after)
                torch.testing.assert_close(target, normed, rtol=1e-5, atol=1e-6)


def test_who_waits_in_vain_is_set_free(memories: Callable[[int], list[HostMemory]]) -> None:
    first, _ = memories(2)

    def work(memory: HostMemory) -> None:
        sums.peer_all_reduce(torch.ones(1000), memory)

    context = multiprocessing.get_context("fork")
    process = context.Process(target=work, args=(first,), daemon=True)
    process.start()
    process.join(1.0)
    assert process.is_alive()
    first.waiting.zero_()
    process.join(PATIENCE_S)
    assert process.exitcode == 0

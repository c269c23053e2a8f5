"""Sums between GPUs: right in every round, equal on all, in graphs, and given up when told to.

Four ranks are tested on two devices too, where each runs in a stream of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvbaton.engine.executor import WorkerGroup, rank_threads
from kvbaton.kernels.peer_all_reduce import (
    BLOCK,
    MOST_SHARED,
    PROGRAMS,
    SHARED_FROM,
    peer_all_reduce,
    peer_all_reduce_norm,
    peer_all_reduce_reference,
    peer_memories,
)
from kvbaton.kernels.rms_norm import rms_norm_reference

DEVICES = torch.cuda.device_count()
pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(DEVICES < 2, reason="fewer than two CUDA devices"),
]
SIZES = [1, 7, 4096, BLOCK * 3 + 5, SHARED_FROM, SHARED_FROM + 5, MOST_SHARED // 8]
LONGER = [PROGRAMS * BLOCK + 5, 3 * PROGRAMS * BLOCK, 8 * PROGRAMS * BLOCK + 5]
"""Those of two ranks, in many rounds."""


class Ranks:
    """Ranks in a thread each; more than there are devices share these."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.devices = [torch.device("cuda", rank % DEVICES) for rank in range(size)]
        self.memory = peer_memories(self.devices)
        self.group = WorkerGroup(rank_threads(size))
        self.group.call(self._begin)

    def _begin(self, rank: int) -> None:
        torch.cuda.set_device(self.devices[rank])
        torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]

    def together(self, work: Callable[[int], Any]) -> list[Any]:
        """Run a function on all ranks."""
        if self.size > DEVICES:
            self._rehearse(work)
        return self.group.call(work)

    def _rehearse(self, work: Callable[[int], Any]) -> None:
        """Run it on one rank at a time, without waiting.

        The driver loads a kernel, and allocates memory, only once the device's other kernels have
        ended; but these would wait for the rank that needs it.
        """
        for each in self.memory:
            each.waiting.zero_()
        for rank, thread in enumerate(self.group.threads):
            thread.submit(work, rank).result()
        for device in self.devices:
            torch.cuda.synchronize(device)
        for each in self.memory:
            each.rounds.zero_()
            each.flags[each.rank].zero_()
            each.waiting.fill_(1)
        for device in self.devices:
            torch.cuda.synchronize(device)

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
        """A tensor per rank."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator).to(dtype) for _ in range(self.size)]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(request.param)
    yield ranks
    for thread in ranks.group.threads:
        thread.shutdown()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounds_of_many_sizes(dtype: torch.dtype, ranks: Ranks) -> None:
    sizes = SIZES + LONGER * (ranks.size == 2)
    rounds = [sizes[i] for i in np.random.default_rng(0).integers(0, len(sizes), 60)]
    given = [ranks.parts((size,), dtype, seed) for seed, size in enumerate(rounds)]

    def work(rank: int) -> list[torch.Tensor]:
        late, found = np.random.default_rng(rank), []
        for tensors in given:
            if late.random() < 0.2:
                time.sleep(0.003)
            found.append(peer_all_reduce(tensors[rank].cuda(), ranks.memory[rank]))
        return [tensor.cpu() for tensor in found]

    first, *others = ranks.together(work)
    for number, tensors in enumerate(given):
        assert torch.equal(first[number], peer_all_reduce_reference(tensors))
        assert all(torch.equal(first[number], other[number]) for other in others)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_sum_that_is_normalised(dtype: torch.dtype, offset: float, ranks: Ranks) -> None:
    shapes = [(1, 4096), (3, 64), (80, 2880), (64, 4096), (7, 1000), (130, 2000)]
    if ranks.size == 2:
        shapes += [(PROGRAMS + 1, 4096), (3000, 1024)]
    rounds = [shapes[i] for i in np.random.default_rng(1).integers(0, len(shapes), 40)]
    given = [ranks.parts(shape, dtype, seed) for seed, shape in enumerate(rounds)]
    stream = [ranks.parts(shape, dtype, 100 + seed)[0] for seed, shape in enumerate(rounds)]
    weights = [ranks.parts(shape[1:], dtype, 200 + seed)[0] for seed, shape in enumerate(rounds)]

    def work(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        late, found = np.random.default_rng(rank), []
        for tensors, before, weight in zip(given, stream, weights, strict=True):
            if late.random() < 0.2:
                time.sleep(0.003)
            memory, own, after = ranks.memory[rank], tensors[rank].cuda(), before.cuda()
            assert memory.fits_norm(own)
            normed = peer_all_reduce_norm(own, memory, after, weight.cuda(), 1e-5, offset)
            found.append((normed, after))
        return [(normed.cpu(), after.cpu()) for normed, after in found]

    first, *others = ranks.together(work)
    for number, (normed, after) in enumerate(first):
        total = peer_all_reduce_reference(given[number])
        expected = rms_norm_reference(
            total, weights[number], 1e-5, residual=stream[number], weight_offset=offset
        )
        assert torch.equal(after, stream[number])
        torch.testing.assert_close(normed, expected, rtol=2**-6, atol=1e-6)  # rounded twice
        for other in others:
            assert torch.equal(normed, other[number][0])
            assert torch.equal(after, other[number][1])


def test_replays_of_a_graph(ranks: Ranks) -> None:
    if ranks.size > DEVICES:
        pytest.skip("a capture allocates memory while kernels wait")
    given = [ranks.parts((20_000,), torch.bfloat16, seed) for seed in range(40)]

    def work(rank: int) -> list[torch.Tensor]:
        memory = ranks.memory[rank]
        tensor, found = torch.zeros(20_000, dtype=torch.bfloat16, device="cuda"), []
        peer_all_reduce(tensor, memory)
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            out = peer_all_reduce(peer_all_reduce(tensor, memory), memory)
            graph.capture_end()
        for tensors in given:
            tensor.copy_(tensors[rank])
            graph.replay()
            found.append(out.cpu())
        return found

    for found in ranks.together(work):
        for number, tensors in enumerate(given):
            once = peer_all_reduce_reference(tensors)
            assert torch.equal(found[number], peer_all_reduce_reference([once] * ranks.size))


@pytest.mark.parametrize("size", [10, SHARED_FROM + 5, LONGER[-1]])
@pytest.mark.parametrize("number", [2, 4])
def test_who_waits_in_vain_is_set_free(size: int, number: int) -> None:
    memory = peer_memories([torch.device("cuda", rank % DEVICES) for rank in range(number)])[0]
    torch.cuda.set_device(0)
    tensor = torch.ones(size, device="cuda")
    if not memory.fits(tensor):
        pytest.skip("NCCL sums it")
    peer_all_reduce(tensor, memory)
    over = torch.cuda.Event()  # type: ignore[no-untyped-call]
    over.record()
    time.sleep(0.2)
    assert not over.query()  # type: ignore[no-untyped-call]
    memory.abort()
    deadline = time.monotonic() + 5
    while not over.query():  # type: ignore[no-untyped-call]
        assert time.monotonic() < deadline, "it still waits"
        time.sleep(0.01)


def test_what_fits(ranks: Ranks) -> None:
    memory = ranks.memory[0]
    assert memory.fits(torch.empty(MOST_SHARED, device="meta"))
    assert memory.fits(torch.empty(MOST_SHARED + 1, device="meta")) == (ranks.size == 2)
    assert memory.fits_norm(torch.empty(2, 8192, dtype=torch.bfloat16, device="meta"))
    assert not memory.fits_norm(torch.empty(2, 8192, device="meta"))
    assert memory.fits_norm(torch.empty(65, 4096, device="meta")) == (ranks.size == 2)

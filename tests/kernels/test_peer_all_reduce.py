"""Sums between GPUs: right in every round, equal on all, in graphs, and given up when told to.

Four ranks, and ranks without a GPU: test_peer_all_reduce_interpreted.py.
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
    peer_all_reduce,
    peer_all_reduce_norm,
    peer_all_reduce_reference,
)
from kvbaton.kernels.peer_memory import (
    FEW_ROWS,
    MOST_SHARED,
    PROGRAMS,
    SHARED_FROM,
    PeerMemory,
    peer_memories,
)
from kvbaton.kernels.rms_norm import rms_norm_reference

RANKS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(RANKS < 2, reason="fewer than two CUDA devices"),
]
SIZES = [1, 7, 4096, BLOCK * 3 + 5, SHARED_FROM, SHARED_FROM + 5, MOST_SHARED]
SHAPES = [(1, 4096), (3, 64), (80, 2880), (64, 4096), (7, 1000), (FEW_ROWS, 2048), (130, 2000)]
if RANKS == 2:  # in many rounds
    SIZES += [PROGRAMS * BLOCK + 5, 3 * PROGRAMS * BLOCK, 8 * PROGRAMS * BLOCK + 5]
    SHAPES += [(PROGRAMS + 1, 4096), (3000, 1024)]
Together = Callable[[Callable[[int], Any]], list[Any]]


@pytest.fixture(scope="module")
def memory() -> list[PeerMemory]:
    return peer_memories([torch.device("cuda", rank) for rank in range(RANKS)])


@pytest.fixture
def together() -> Iterator[Together]:
    """Runs a function on all ranks, each in its thread and on its device."""
    group = WorkerGroup(rank_threads(RANKS))
    group.call(torch.cuda.set_device)
    yield group.call
    for thread in group.threads:
        thread.shutdown()


def parts(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(RANKS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounds_of_many_sizes(
    dtype: torch.dtype, memory: list[PeerMemory], together: Together
) -> None:
    rounds = [SIZES[i] for i in np.random.default_rng(0).integers(0, len(SIZES), 60)]
    given = [parts((size,), dtype, seed) for seed, size in enumerate(rounds)]

    def work(rank: int) -> list[torch.Tensor]:
        late, found = np.random.default_rng(rank), []
        for tensors in given:
            if late.random() < 0.2:
                time.sleep(0.003)
            found.append(peer_all_reduce(tensors[rank].cuda(), memory[rank]))
        return [tensor.cpu() for tensor in found]

    first, *others = together(work)
    for number, tensors in enumerate(given):
        assert torch.equal(first[number], peer_all_reduce_reference(tensors))
        assert all(torch.equal(first[number], other[number]) for other in others)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_sum_that_is_normalised(
    dtype: torch.dtype, offset: float, memory: list[PeerMemory], together: Together
) -> None:
    rounds = [SHAPES[i] for i in np.random.default_rng(1).integers(0, len(SHAPES), 40)]
    given = [parts(shape, dtype, seed) for seed, shape in enumerate(rounds)]
    stream = [parts(shape, dtype, 100 + seed)[0] for seed, shape in enumerate(rounds)]
    weights = [parts(shape[1:], dtype, 200 + seed)[0] for seed, shape in enumerate(rounds)]

    def work(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        late, found = np.random.default_rng(rank), []
        for tensors, before, weight in zip(given, stream, weights, strict=True):
            if late.random() < 0.2:
                time.sleep(0.003)
            own, after, scale = tensors[rank].cuda(), before.cuda(), weight.cuda()
            assert memory[rank].fits_norm(own)
            normed = peer_all_reduce_norm(own, memory[rank], after, scale, 1e-5, offset)
            found.append((normed, after))
        return [(normed.cpu(), after.cpu()) for normed, after in found]

    first, *others = together(work)
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


def test_replays_of_a_graph(memory: list[PeerMemory], together: Together) -> None:
    given = [parts((20_000,), torch.bfloat16, seed) for seed in range(40)]

    def work(rank: int) -> list[torch.Tensor]:
        tensor, found = torch.zeros(20_000, dtype=torch.bfloat16, device="cuda"), []
        peer_all_reduce(tensor, memory[rank])
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            out = peer_all_reduce(peer_all_reduce(tensor, memory[rank]), memory[rank])
            graph.capture_end()
        for tensors in given:
            tensor.copy_(tensors[rank])
            graph.replay()
            found.append(out.cpu())
        return found

    for found in together(work):
        for number, tensors in enumerate(given):
            once = peer_all_reduce_reference(tensors)
            assert torch.equal(found[number], peer_all_reduce_reference([once] * RANKS))


@pytest.mark.parametrize("size", [10, SHARED_FROM + 5, max(SIZES)])
def test_who_waits_in_vain_is_set_free(size: int) -> None:
    memory = peer_memories([torch.device("cuda", rank) for rank in range(RANKS)])[0]
    torch.cuda.set_device(0)
    peer_all_reduce(torch.ones(size, device="cuda"), memory)
    over = torch.cuda.Event()  # type: ignore[no-untyped-call]
    over.record()
    time.sleep(0.2)
    assert not over.query()  # type: ignore[no-untyped-call]
    memory.abort()
    deadline = time.monotonic() + 5
    while not over.query():  # type: ignore[no-untyped-call]
        assert time.monotonic() < deadline, "it still waits"
        time.sleep(0.01)


def test_what_fits(memory: list[PeerMemory]) -> None:
    assert memory[0].fits(torch.empty(MOST_SHARED, device="meta"))
    assert memory[0].fits(torch.empty(MOST_SHARED + 1, device="meta")) == (RANKS == 2)
    assert memory[0].fits_norm(torch.empty(2, 8192, dtype=torch.bfloat16, device="meta"))
    assert not memory[0].fits_norm(torch.empty(2, 8192, device="meta"))
    assert memory[0].fits_norm(torch.empty(65, 4096, device="meta")) == (RANKS == 2)

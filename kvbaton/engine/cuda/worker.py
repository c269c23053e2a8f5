"""A worker on a CUDA device of this process.

Steps run in order on the device's default stream. Sums are read and digests computed on their own
streams, beside the steps. The blocks concerned are final when the call is made; sums of steps in
flight are read on the default stream, and fetched on another.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TypeVar

import torch
from msgspec.structs import replace

from kvbaton.connectors.digest import BlockRange, Sums
from kvbaton.engine.cuda.runner import CudaRunner
from kvbaton.engine.cuda.warm_up import (
    GRAPHS_AND_LIBRARIES,
    fill_allocators,
    measure_activations,
    warm_up,
)
from kvbaton.engine.pending import Pending
from kvbaton.engine.runner import StepOutput
from kvbaton.engine.sampler import Logprobs
from kvbaton.engine.step import StepPlan, StepResult
from kvbaton.engine.upload import fetch
from kvbaton.engine.worker import ModelWorker, WorkerSettings, pool_blocks
from kvbaton.engine.worker_process import PATIENCE_S
from kvbaton.kernels.digest import unsigned

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 20e-6
"""Seconds between checks whether a step of several ranks is over."""


def timed_event() -> torch.cuda.Event:
    """An event that can measure the time to another one."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def enqueued(
    take: Callable[[], T],
    *,
    patience_s: float | None = None,
    over: torch.cuda.Event | None = None,
    stream: torch.cuda.Stream | None = None,
) -> Pending[T]:
    """A result that is ready once all work enqueued on a stream so far is done.

    Args:
        take: Returns the result then.
        patience_s: Longest wait in seconds; None waits for the driver without a limit.
        over: Event to use; None makes one.
        stream: The stream; None is the current one.
    """
    over = over or torch.cuda.Event()  # type: ignore[no-untyped-call]
    over.record(stream)

    def ready() -> bool:
        return bool(over.query())  # type: ignore[no-untyped-call]

    def wait() -> None:
        if patience_s is None:
            over.synchronize()
            return
        deadline = time.monotonic() + patience_s
        while not ready():
            if time.monotonic() > deadline:
                raise TimeoutError(f"a step took longer than {patience_s:g} s")
            time.sleep(LOOK_S)

    return Pending(ready, take, wait)


def fetched(output: StepOutput) -> StepOutput:
    """Start to copy a step's output into pinned memory."""
    if output.tokens is not None:
        output.tokens = fetch(output.tokens)
    if output.logprobs is not None:
        columns = (getattr(output.logprobs, field.name) for field in fields(Logprobs))
        output.logprobs = Logprobs(*(fetch(column) for column in columns))
    return output


class CudaWorker(ModelWorker):
    """`Worker` on a GPU."""

    runner: CudaRunner

    def __init__(self, settings: WorkerSettings) -> None:
        torch.cuda.set_device(settings.device)
        began = time.monotonic()
        super().__init__(settings)
        log.info("weights: loaded in %.1f s", time.monotonic() - began)
        self._sums_stream = _urgent_stream(settings.device)
        self._later_sums_stream = _urgent_stream(settings.device)
        self._digest_stream = _urgent_stream(settings.device)
        self._device = torch.cuda.device(settings.device)
        # Held until they are ready, see `BlockMemory.fetch_digest`.
        self._digests, self._digests_lock = deque[Pending[list[Sums]]](), threading.Lock()

    def fit(self) -> int:
        """See `Worker.fit`; connects the ranks only now, when all of them are made."""
        self.settings.shard.collectives.connect()
        began = time.monotonic()
        self._activations = measure_activations(self.settings, self.model)
        torch.cuda.empty_cache()
        log.info("memory: measured in %.1f s", time.monotonic() - began)
        token_counts = 4 * self.settings.config.max_num_seqs * self.settings.model.vocab_size
        reserve = self._activations + token_counts + GRAPHS_AND_LIBRARIES
        return pool_blocks(self.settings, reserve=reserve)

    def make_runner(self) -> CudaRunner:
        """See `ModelWorker.make_runner`."""
        config = self.settings.config
        return CudaRunner(
            self.model,
            self.cache,
            max_model_len=self.settings.max_model_len,
            max_num_seqs=config.max_num_seqs,
            use_graphs=not config.enforce_eager,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )

    def warm_up(self) -> None:
        """See `ModelWorker.warm_up`."""
        streams = self._sums_stream, self._later_sums_stream, self._digest_stream
        fill_allocators(self._activations, streams)
        warm_up(self.runner, self.settings.config)
        for group, layout in enumerate(self.cache.layouts):
            self.digest([BlockRange(group, [1], 0, 0, layout.block_size)])
        torch.cuda.synchronize(self.settings.device)

    def run(self, plan: StepPlan) -> Pending[StepResult]:
        """See `Worker.run`; returns when the step is enqueued."""
        began, over = timed_event(), timed_event()
        began.record()
        output = fetched(self.runner.run(plan))

        def take() -> StepResult:
            taken_ms: float = began.elapsed_time(over)
            return replace(output.result(), device_s=taken_ms / 1000)

        alone = self.settings.shard.size == 1
        return enqueued(take, patience_s=None if alone else PATIENCE_S, over=over)

    def sums(self, group: int, blocks: Sequence[int], *, in_flight: bool = False) -> Pending[Sums]:
        """See `Worker.sums`."""
        with torch.inference_mode():
            if in_flight:
                # Read between two steps, as the next one may write to the last block. Fetched on a
                # stream of its own, so that sums of final blocks wait for no step.
                stream = self._later_sums_stream
                sums = self.cache.fetch_kept_sums(group, blocks, stream=stream)
            else:
                stream = self._sums_stream
                with torch.cuda.stream(stream):
                    sums = self.cache.fetch_kept_sums(group, blocks)
        return enqueued(lambda: unsigned(sums), stream=stream)

    def digest(self, ranges: Sequence[BlockRange], *, keep: bool = False) -> Pending[list[Sums]]:
        """See `Worker.digest`; kept sums are in place once the result is ready."""
        with self._digests_lock, self._device:
            while self._digests and self._digests[0].ready():
                self._digests.popleft()
            stream = self._digest_stream
            found = self.cache.fetch_digest(ranges, keep=keep, stream=stream)
            pending = enqueued(lambda: list(map(unsigned, found)), stream=stream)
            self._digests.append(pending)
            return pending

    def close(self) -> None:
        """See `Worker.close`; waits for the steps in flight."""
        torch.cuda.synchronize(self.settings.device)
        if hasattr(self, "runner"):  # there is none if the start failed early
            # Graphs that call NCCL must be destroyed before it.
            self.runner.graphs = self.runner.prompt_graphs = None


def _urgent_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream whose kernels take precedence over those of steps."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

"""The ranks of one node as one: their workers, their common failure, and their gathered results.

On CPUs, ranks are threads of this process, so collectives are plain additions. On GPUs, all but the
first are processes (`worker_process`), since threads of one interpreter launch one after the other.
The memory of all pools belongs to this process in both cases, so one transfer thread moves the
blocks of all ranks. Every rank runs every step and samples the same tokens from the same gathered
logits, so ranks exchange only partial sums and logits. A worker's inputs and outputs are plain data
(plans, block numbers, sums); it knows the other ranks only through `Shard.collectives`.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from concurrent.futures import Executor as Thread
from functools import partial
from typing import Any, TypeVar

from kvbaton.connectors.base import Memory
from kvbaton.connectors.digest import BlockRange, Sums
from kvbaton.connectors.layout import KVLayout
from kvbaton.connectors.objects import ObjectForm
from kvbaton.engine.block_memory import BlockMemory
from kvbaton.engine.block_staging import (
    BlockStaging,
    CpuBlockStaging,
    DeviceBlockStaging,
    PinnedBlockStaging,
)
from kvbaton.engine.collectives import AbortedError
from kvbaton.engine.config import SchedulerConfig
from kvbaton.engine.encoder.pool import EncoderPool
from kvbaton.engine.pending import Pending, join
from kvbaton.engine.step import StepPlan, StepResult
from kvbaton.engine.step_costs import Terms, try_steps
from kvbaton.messages.engine import AddRequest

T = TypeVar("T")

ROOT_CAUSE_S = 5.0
"""Seconds to wait for the first failing rank's error, once another failed because of it."""


class CallerThread(Thread):
    """An executor that runs a submitted call at once, in the submitting thread."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """See `concurrent.futures.Executor.submit`."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def rank_threads(size: int) -> list[Thread]:
    """One thread per rank."""
    return [ThreadPoolExecutor(1, thread_name_prefix=f"rank{rank}") for rank in range(size)]


class Worker(ABC):
    """One rank. It is made in its own thread, which also enqueues or runs its steps.

    Attributes:
        cache: Its KV pool, once started.
        wake_fd: Descriptor for `Executor.wake_fds`; None if the core waits for steps.
    """

    cache: BlockMemory
    wake_fd: int | None = None

    @abstractmethod
    def fit(self) -> int:
        """Number of blocks that its pool could have."""

    @abstractmethod
    def start(self, num_blocks: int) -> None:
        """Allocate the pool and warm up."""

    def attach_encoder(self, pool: EncoderPool) -> None:  # noqa: B027
        """See `Executor.attach_encoder`; nothing for workers that compute encoder outputs."""

    def expect(self, request: AddRequest) -> None:  # noqa: B027
        """See `Executor.expect`; nothing if prompts need no work but steps."""

    def forget(self) -> None:  # noqa: B027
        """Forget which tokens of blocks the kept sums cover; nothing if blocks are always full."""

    def check(self) -> None:  # noqa: B027
        """See `Executor.check`; nothing for a thread of this process."""

    @abstractmethod
    def run(self, plan: StepPlan) -> Pending[StepResult]:
        """Run a step, or enqueue it on the device."""

    @abstractmethod
    def sums(self, group: int, blocks: Sequence[int], *, in_flight: bool = False) -> Pending[Sums]:
        """See `Executor.sums`; with `in_flight`, called in the rank's thread."""

    @abstractmethod
    def digest(self, ranges: Sequence[BlockRange], *, keep: bool = False) -> Pending[list[Sums]]:
        """See `Executor.digest`."""

    def counters(self) -> dict[str, float]:
        """See `Executor.counters`."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Release all resources, after the rank's thread has ended."""


class WorkerGroup:
    """The threads of all ranks; when one rank fails, none waits for it for ever.

    Args:
        threads: One per rank. Only one thread may submit work for all of them.
        abort: Makes ranks fail that wait for others; idempotent.
        release: Releases what ranks share, after they were closed.
        patience_s: Longest wait in seconds for a step, where `abort` can't tell that a rank is
            missing.
    """

    def __init__(
        self,
        threads: Sequence[Thread],
        *,
        abort: Callable[[], None] = lambda: None,
        release: Callable[[], None] = lambda: None,
        patience_s: float | None = None,
    ) -> None:
        self.threads, self.abort, self.patience_s = threads, abort, patience_s
        self._release = release

    def start(self, work: Callable[[int], T]) -> list[Future[T]]:
        """Start the same work on every rank."""

        def guarded(rank: int) -> T:
            try:
                return work(rank)
            except BaseException:
                self.abort()
                raise

        return [thread.submit(guarded, rank) for rank, thread in enumerate(self.threads)]

    def call(self, work: Callable[[int], T]) -> list[T]:
        """Run the same work on every rank, and wait for all."""
        return self.gather(self.start(work))

    def gather(self, futures: Sequence[Future[T]], patience_s: float | None = None) -> list[T]:
        """Results in the order of ranks.

        Raises:
            Exception: A rank's error, of the first rank that failed if that is known.
            TimeoutError: The ranks took longer than `patience_s`.
        """
        done, waiting = wait(futures, patience_s, FIRST_EXCEPTION)
        if waiting:
            if not any(future.exception() for future in done):
                self.abort()
                raise TimeoutError(f"a rank did not finish within {patience_s} s")
            done, _ = wait(futures, ROOT_CAUSE_S)
        errors = [error for future in futures if future in done if (error := future.exception())]
        if errors:
            raise next((e for e in errors if not isinstance(e, AbortedError)), errors[0])
        return [future.result() for future in futures]

    def close(self, workers: Sequence[Worker]) -> None:
        """End the threads after the steps in flight, then close workers and what they share."""
        for thread in self.threads:
            thread.shutdown()
        for worker in workers:
            worker.close()
        self._release()


class Executor:
    """All ranks of one node, as one.

    Args:
        group: Threads of the ranks.
        make: Makes the worker of a rank, in the rank's thread.

    Attributes:
        wake_fds: Descriptors that are readable while a step's result can be taken; empty if the
            core waits for steps. With a descriptor, steps may be long: the core asks `ready` and
            does not wait.

    Raises:
        ConfigError: A setting, the model folder or the size of the pool is wrong.
    """

    def __init__(self, group: WorkerGroup, make: Callable[[int], Worker]) -> None:
        self.group, self.workers = group, list[Worker]()
        try:
            self.workers = group.call(make)
            num_blocks = min(group.call(lambda rank: self.workers[rank].fit()))
            group.call(lambda rank: self.workers[rank].start(num_blocks))
        except BaseException:
            self.close()
            raise
        own = self.workers[0].wake_fd
        self.wake_fds = () if own is None else (own,)

    @property
    def in_order(self) -> bool:
        """Whether a rank handles requests after the steps launched before them.

        It also means that no step fails for some of its sequences, as an encoder's step may for an
        image; so a request behind a step finds all blocks of the step computed.
        """
        return not self.wake_fds

    @property
    def layouts(self) -> list[list[KVLayout]]:
        """Per rank, one layout per group; `Plane.region` indexes the rank's `memories`."""
        return [worker.cache.layouts for worker in self.workers]

    @property
    def memories(self) -> list[list[Memory]]:
        """Per rank, the memory of its pool, which all groups share."""
        return [[worker.cache.memory] for worker in self.workers]

    def attach_encoder(self, pool: EncoderPool) -> None:
        """Set the pool that `SequenceStep.items` refers to, before any request.

        Rows that a step reads must be in it, on the device too, when the step is launched.
        """
        self.group.call(lambda rank: self.workers[rank].attach_encoder(pool))

    def expect(self, request: AddRequest) -> None:
        """Start the work without steps of a new request with items that is not fully cached."""
        for worker in self.workers:
            worker.expect(request)

    def try_steps(self, limits: SchedulerConfig) -> list[tuple[Terms, float]]:
        """Run trial steps before any request; see `step_costs.try_steps`."""

        def run(plan: StepPlan) -> float:
            began = time.perf_counter()
            self.launch(plan).result()
            return time.perf_counter() - began

        tried = try_steps(run, limits)
        for worker in self.workers:
            worker.forget()
        return tried

    def check(self) -> None:
        """Raise `RuntimeError` if a rank has ended unasked."""
        for worker in self.workers:
            worker.check()

    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        """Start a step; at most two are in flight. Its result raises what a rank raised."""
        _ = plan.columns  # computed once, before the ranks' threads use it
        steps = self.group.start(lambda rank: self.workers[rank].run(plan))
        return Pending(
            lambda: all(f.done() and (f.exception() or f.result().ready()) for f in steps),
            partial(self._finish, steps),
        )

    def _finish(self, steps: Sequence[Future[Pending[StepResult]]]) -> StepResult:
        try:
            parts = self.group.gather(steps, self.group.patience_s)
            try:
                for part in parts[1:]:  # before our own, since a wait for the driver has no limit
                    part.result()
                result = parts[0].result()
            except BaseException:
                self.group.abort()
                raise
            return result
        finally:
            for fd in self.wake_fds:
                os.eventfd_read(fd)

    def sums(
        self, group: int, blocks: Sequence[int], *, in_flight: bool = False
    ) -> Pending[list[Sums]]:
        """Digest sums of blocks, kept since the steps that wrote the blocks.

        Once the sums are there, those steps are over on the device too, so this also serves as the
        ready event of the blocks.

        Args:
            group: KV group.
            blocks: Blocks of the group, written by steps whose results were taken, unless
                `in_flight`.
            in_flight: Read the sums after all steps launched so far; only if `in_order`.

        Returns:
            Per rank, see `connectors.digest.Sums`.
        """
        if not in_flight:
            return join(self._ask(lambda worker: worker.sums(group, blocks)), list)
        asked = self.group.start(
            lambda rank: self.workers[rank].sums(group, blocks, in_flight=True)
        )
        return Pending(
            lambda: all(f.done() and f.result().ready() for f in asked),
            lambda: [f.result().result() for f in asked],
        )

    def digest(
        self, ranges: Sequence[BlockRange], *, keep: bool = False
    ) -> Pending[list[list[Sums]]]:
        """Digest sums recomputed from the bytes in memory now: per range, as `sums`.

        May be called from another thread than `launch`.

        Args:
            ranges: Ranges of blocks to sum.
            keep: Also keep the sums with their blocks, as if a step had written these. For arrived
                blocks that no step in flight touches; if the sums prove wrong, the caller must not
                cache the blocks.
        """
        of_ranks = self._ask(lambda worker: worker.digest(ranges, keep=keep))
        return join(of_ranks, lambda found: list(map(list, zip(*found, strict=True))))

    def _ask(self, call: Callable[[Worker], Pending[T]]) -> list[Pending[T]]:
        """Results of all ranks, asked in reverse order, since only the first rank's call blocks."""
        return [call(worker) for worker in reversed(self.workers)][::-1]

    def staging(self, forms: Sequence[ObjectForm], reached: Collection[str] = ()) -> BlockStaging:
        """Staging of blocks' bytes for a store.

        Args:
            forms: One per group.
            reached: Kinds of devices whose memory the store can access.
        """
        pools = [worker.cache.blocks for worker in self.workers]
        if not pools[0].is_cuda:
            return CpuBlockStaging(forms, self.memories)
        if "cuda" in reached and not any(form.replicas for form in forms):
            return DeviceBlockStaging(forms, self.memories)
        return PinnedBlockStaging(forms, pools)

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill blocks with NaN (debugging), and wait until it is done."""
        for worker in self.workers:
            worker.cache.poison(blocks)

    def counters(self) -> dict[str, float]:
        """Monotonic totals by Prometheus name; the core counts steps and tokens itself."""
        return self.workers[0].counters()

    def close(self) -> None:
        """Wait for the steps in flight, and release all resources."""
        self.group.close(self.workers)

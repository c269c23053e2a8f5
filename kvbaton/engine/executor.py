"""The ranks of one node as one: workers, what lets them fail together, and what gathers from them.

On a CPU ranks are threads of this process, so collectives are plain additions; on GPUs all but the
first are processes (`worker_process`), since threads of one interpreter launch one after the other.
The memory of all pools belongs to this process in any case, so that one transfer thread moves the
blocks of all ranks. Every rank runs every step: it samples the same tokens from the same gathered
logits, so nothing but partial sums and logits ever passes between them. What goes into a worker and
comes out is plain data (plans, block numbers, sums), and it knows nothing of the others but by
`Shard.collectives`.
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
"""For the rank that failed first to say why, after another one fell over its absence."""


class CallerThread(Thread):
    """Does at once what is submitted, in the thread that submits it."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """See `concurrent.futures.Executor.submit`."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def rank_threads(size: int) -> list[Thread]:
    """A thread for each rank."""
    return [ThreadPoolExecutor(1, thread_name_prefix=f"rank{rank}") for rank in range(size)]


class Worker(ABC):
    """One rank. It is made in its thread, where also all is called that enqueues or runs steps.

    Attributes:
        cache: its pool, once started.
        wake_fd: one of `Executor.wake_fds`; None if its steps are waited for.
    """

    cache: BlockMemory
    wake_fd: int | None = None

    @abstractmethod
    def fit(self) -> int:
        """Blocks that its pool could have."""

    @abstractmethod
    def start(self, num_blocks: int) -> None:
        """Allocate the pool and warm up."""

    def attach_encoder(self, pool: EncoderPool) -> None:  # noqa: B027
        """See `Executor.attach_encoder`; nothing for who computes the outputs itself."""

    def expect(self, request: AddRequest) -> None:  # noqa: B027
        """See `Executor.expect`; nothing where all that a prompt needs is its steps."""

    def forget(self) -> None:  # noqa: B027
        """Forget what kept sums count of which blocks; nothing where all blocks are whole."""

    def check(self) -> None:  # noqa: B027
        """See `Executor.check`; nothing for a thread of ours."""

    @abstractmethod
    def run(self, plan: StepPlan) -> Pending[StepResult]:
        """Run a step, or enqueue it."""

    @abstractmethod
    def sums(self, group: int, blocks: Sequence[int], *, in_flight: bool = False) -> Pending[Sums]:
        """See `Executor.sums`; with `in_flight` in the rank's thread."""

    @abstractmethod
    def digest(self, ranges: Sequence[BlockRange], *, keep: bool = False) -> Pending[list[Sums]]:
        """See `Executor.digest`."""

    def counters(self) -> dict[str, float]:
        """See `Executor.counters`."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Give everything back; its thread has ended."""


class WorkerGroup:
    """The threads of all ranks: when one rank fails, none waits for it.

    Args:
        threads: one per rank; what is done together is submitted by one thread only.
        abort: makes ranks fail that wait for others; idempotent.
        release: gives back what the ranks share; after they were closed.
        patience_s: for a step, where `abort` can't know by itself that a rank does not come.
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
        """Let every rank begin the same."""

        def guarded(rank: int) -> T:
            try:
                return work(rank)
            except BaseException:
                self.abort()
                raise

        return [thread.submit(guarded, rank) for rank, thread in enumerate(self.threads)]

    def call(self, work: Callable[[int], T]) -> list[T]:
        """Let every rank do the same, and wait for all."""
        return self.gather(self.start(work))

    def gather(self, futures: Sequence[Future[T]], patience_s: float | None = None) -> list[T]:
        """Results in the order of ranks.

        Raises:
            Exception: what a rank raised, if possible the first to fail.
            TimeoutError: they took longer than `patience_s`.
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
        """End the threads, after the steps in flight; then the workers, and what they share."""
        for thread in self.threads:
            thread.shutdown()
        for worker in workers:
            worker.close()
        self._release()


class Executor:
    """All ranks of one node, as one.

    Args:
        group: the ranks' threads.
        make: makes a rank's worker, in its thread.

    Attributes:
        wake_fds: readable while a step is over whose result was not taken; none if steps are waited
            for. With a descriptor, steps may be long: who launches them asks `ready`, and does not
            wait.

    Raises:
        ConfigError: a setting, the model folder or the size of the pool is wrong.
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
        """Whether what a rank is asked for comes after the steps that were launched before.

        And no step fails for some of its sequences, as an encoder's may for an image: then what is
        asked for behind a step is of blocks that it has computed.
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
        """Name the pool that `SequenceStep.items` are about; before any request.

        What a step reads of it must be there, on the device too, when the step is launched.
        """
        self.group.call(lambda rank: self.workers[rank].attach_encoder(pool))

    def expect(self, request: AddRequest) -> None:
        """A request with items has come that lacks some blocks: begin what needs no step."""
        for worker in self.workers:
            worker.expect(request)

    def try_steps(self, limits: SchedulerConfig) -> list[tuple[Terms, float]]:
        """What steps take by what is in them, see `step_costs`; before any request."""

        def run(plan: StepPlan) -> float:
            began = time.perf_counter()
            self.launch(plan).result()
            return time.perf_counter() - began

        tried = try_steps(run, limits)
        for worker in self.workers:
            worker.forget()
        return tried

    def check(self) -> None:
        """Raise `RuntimeError` if a rank has ended by itself."""
        for worker in self.workers:
            worker.check()

    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        """Start a step. At most two are in flight. Its result raises what a rank raised."""
        _ = plan.columns  # once, before the ranks' threads ask for it
        steps = self.group.start(lambda rank: self.workers[rank].run(plan))
        return Pending(
            lambda: all(f.done() and (f.exception() or f.result().ready()) for f in steps),
            partial(self._finish, steps),
        )

    def _finish(self, steps: Sequence[Future[Pending[StepResult]]]) -> StepResult:
        try:
            parts = self.group.gather(steps, self.group.patience_s)
            try:
                for part in parts[1:]:  # before ours, for which a driver waits as long as it takes
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
        """Digest sums kept with these blocks since the steps that wrote them.

        Once the sums are there, those steps are over on the device too: so this is the ready event
        of the blocks.

        Args:
            group: KV group.
            blocks: of it; of steps whose results have been taken, unless `in_flight`.
            in_flight: read them when all steps are over that are launched by now; only if steps are
                `in_order`.

        Returns:
            Per rank, what `connectors.digest.Sums` says.
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
        """Digest sums recomputed from the bytes in memory now, per range as `sums`.

        May be called from another thread than `launch`.

        Args:
            ranges: what to sum.
            keep: keep the sums with their blocks too, as if a step had written these: of blocks
                that have arrived, which no step in flight touches. Whoever finds them wrong caches
                nothing of them.
        """
        of_ranks = self._ask(lambda worker: worker.digest(ranges, keep=keep))
        return join(of_ranks, lambda found: list(map(list, zip(*found, strict=True))))

    def _ask(self, call: Callable[[Worker], Pending[T]]) -> list[Pending[T]]:
        """What all ranks give, the last one asked first: ours is the only one that keeps us."""
        return [call(worker) for worker in reversed(self.workers)][::-1]

    def staging(self, forms: Sequence[ObjectForm], reached: Collection[str] = ()) -> BlockStaging:
        """Bytes of blocks for a store.

        Args:
            forms: one per group.
            reached: kinds of devices whose memory the store takes.
        """
        pools = [worker.cache.blocks for worker in self.workers]
        if not pools[0].is_cuda:
            return CpuBlockStaging(forms, self.memories)
        if "cuda" in reached and not any(form.replicas for form in forms):
            return DeviceBlockStaging(forms, self.memories)
        return PinnedBlockStaging(forms, pools)

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill blocks with NaN (debugging); done when it returns."""
        for worker in self.workers:
            worker.cache.poison(blocks)

    def counters(self) -> dict[str, float]:
        """Monotonic totals by Prometheus name; the core counts steps and tokens itself."""
        return self.workers[0].counters()

    def close(self) -> None:
        """Give everything back; waits for the steps in flight."""
        self.group.close(self.workers)

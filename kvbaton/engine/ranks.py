"""An executor whose ranks are threads of this process, each with a share of model and KV pool.

Threads, since a rank does little on the host (a step is one CUDA graph, or some hundred launches),
and one address space lets one transfer thread move the blocks of all ranks, and collectives of
a CPU be plain additions. Every rank runs every step: it samples the same tokens from the same
gathered logits, so nothing but partial sums and logits ever passes between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from concurrent.futures import Executor as Lane
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvbaton.connectors.base import Memory
from kvbaton.connectors.layout import KVLayout
from kvbaton.engine.block_memory import BlockMemory
from kvbaton.engine.collectives import DisbandedError
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.encoder.pool import EncoderPool
from kvbaton.engine.loader import load_model
from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.models.llama import LlamaForCausalLM
from kvbaton.engine.shard import Shard
from kvbaton.engine.step import PendingStep, PendingSums, StepPlan, StepResult
from kvbaton.messages.engine import AddRequest

T = TypeVar("T")
Sums = npt.NDArray[np.uint64]

ROOT_CAUSE_S = 5.0
"""For the rank that failed first to say why, after another one fell over its absence."""


@dataclass(frozen=True)
class RankSettings:
    """All that a rank is made of.

    Attributes:
        config: the engine's settings.
        model: the model.
        shard: this rank's share.
        device: where it lives.
        max_model_len: longest sequence.
        track_sums: keep digest sums with the blocks.
        lane: the thread in which it runs steps.
    """

    config: EngineConfig
    model: ModelConfig
    shard: Shard
    device: torch.device
    max_model_len: int
    track_sums: bool
    lane: Lane

    def load(self) -> LlamaForCausalLM:
        """The rank's share of the model."""
        return load_model(
            self.model,
            device=self.device,
            load_format=self.config.load_format,
            seed=self.config.seed,
            shard=self.shard,
        )


class RankStep(PendingStep, Protocol):
    """One rank's part of a step; `result` says what it sampled."""

    def wait(self) -> None:
        """Wait until it is over."""
        ...


class RankSums(Protocol):
    """One rank's digest sums on their way."""

    def poll(self) -> Sums | None:
        """Sums of the blocks asked for, [blocks, layers, kv, heads]; None: not yet."""
        ...


class Rank(Protocol):
    """One rank. `fit`, `start` and `run` are called in its lane, on all ranks at the same time."""

    @property
    def cache(self) -> BlockMemory:
        """Its pool, once started."""
        ...

    def fit(self) -> int:
        """Blocks that its pool could have."""
        ...

    def start(self, num_blocks: int) -> None:
        """Allocate the pool and warm up."""
        ...

    def run(self, plan: StepPlan) -> RankStep:
        """Run a step, or enqueue it."""
        ...

    def sums(self, blocks: Sequence[int]) -> RankSums:
        """See `Executor.sums`."""
        ...

    def digest(self, blocks: Sequence[int], first_position: int, start: int, end: int) -> RankSums:
        """See `Executor.digest`."""
        ...

    def close(self) -> None:
        """Give everything back; its lane has ended."""
        ...


class Inline(Lane):
    """Does at once what is submitted, in the thread that submits it."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """See `concurrent.futures.Executor.submit`."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Team:
    """The lanes of all ranks: when one rank fails, none waits for it.

    Args:
        lanes: one per rank; what is done together is submitted by one thread only.
        disband: makes ranks fail that wait for others.
        patience_s: for a step, where `disband` can't know by itself that a rank does not come.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        disband: Callable[[], None],
        *,
        patience_s: float | None = None,
    ) -> None:
        self.lanes, self.disband, self.patience_s = lanes, disband, patience_s

    def start(self, work: Callable[[int], T]) -> list[Future[T]]:
        """Let every rank begin the same."""
        return [lane.submit(self._guard, work, rank) for rank, lane in enumerate(self.lanes)]

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
                self.disband()
                raise TimeoutError(f"a rank did not finish within {patience_s} s")
            done, _ = wait(futures, ROOT_CAUSE_S)
        errors = [error for future in futures if future in done if (error := future.exception())]
        if errors:
            raise next((e for e in errors if not isinstance(e, DisbandedError)), errors[0])
        return [future.result() for future in futures]

    def _guard(self, work: Callable[[int], T], rank: int) -> T:
        try:
            return work(rank)
        except BaseException:
            self.disband()
            raise


class Step:
    """`PendingStep` of all ranks."""

    def __init__(self, futures: Sequence[Future[RankStep]], team: Team) -> None:
        self._futures, self._team = futures, team

    def ready(self) -> bool:
        """See `PendingStep.ready`."""
        return all(f.done() and (f.exception() or f.result().ready()) for f in self._futures)

    def result(self) -> StepResult:
        """See `PendingStep.result`; raises what a rank raised."""
        steps = self._team.gather(self._futures, self._team.patience_s)
        try:
            for step in steps:
                step.wait()
        except BaseException:
            self._team.disband()
            raise
        return steps[0].result()


class AllSums:
    """`PendingSums` of all ranks.

    Attributes:
        counted: [blocks], how many first slots of each block the sums cover.
    """

    def __init__(
        self, sums: Sequence[RankSums], counted: npt.NDArray[np.int64] | None = None
    ) -> None:
        self._sums, self.counted = sums, counted

    def poll(self) -> list[Sums] | None:
        """See `PendingSums.poll`; raises what the computation raised."""
        found = [sums for pending in self._sums if (sums := pending.poll()) is not None]
        return found if len(found) == len(self._sums) else None


class RankedExecutor:
    """`Executor` over ranks in this process.

    Args:
        team: their lanes.
        make: makes a rank, in its lane.

    Raises:
        ConfigError: a setting, the model folder or the size of the pool is wrong.
    """

    ranks: Sequence[Rank]
    wake_fd: int | None = None

    def __init__(self, team: Team, make: Callable[[int], Rank]) -> None:
        self._team, self.ranks = team, ()
        try:
            self.ranks = team.call(make)
            num_blocks = min(team.call(lambda rank: self.ranks[rank].fit()))
            team.call(lambda rank: self.ranks[rank].start(num_blocks))
        except BaseException:
            self.close()
            raise

    @property
    def layouts(self) -> Sequence[Sequence[KVLayout]]:
        """See `Executor.layouts`."""
        return [[rank.cache.layout] for rank in self.ranks]

    @property
    def memories(self) -> Sequence[Sequence[Memory]]:
        """See `Executor.memories`."""
        return [[rank.cache.memory] for rank in self.ranks]

    def attach_encoder(self, pool: EncoderPool) -> None:
        """See `Executor.attach_encoder`; not for ranks that compute the outputs themselves."""

    def expect(self, request: AddRequest) -> None:
        """See `Executor.expect`; all that a prompt needs is its steps."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """See `Executor.launch`."""
        return Step(self._team.start(lambda rank: self.ranks[rank].run(plan)), self._team)

    def sums(self, group: int, blocks: Sequence[int]) -> PendingSums:
        """See `Executor.sums`."""
        return AllSums([rank.sums(blocks) for rank in self.ranks])

    def digest(
        self, group: int, blocks: Sequence[int], first_position: int, start: int, end: int
    ) -> PendingSums:
        """See `Executor.digest`."""
        size = self.ranks[0].cache.block_size
        firsts = first_position + size * np.arange(len(blocks))
        return AllSums(
            [rank.digest(blocks, first_position, start, end) for rank in self.ranks],
            np.clip(end - firsts, 0, size),
        )

    def adopt(self, group: int, blocks: Sequence[int], sums: PendingSums) -> None:
        """See `Executor.adopt`; `sums` are from `digest`, from the first block's start on.

        No step in flight touches blocks that are only arriving.
        """
        assert isinstance(sums, AllSums), "only sums of this executor's digest can be adopted"
        values = sums.poll()
        assert values is not None, "sums that are not there yet can't have been verified"
        assert sums.counted is not None, "kept sums belong to their blocks already"
        for rank, of_rank in zip(self.ranks, values, strict=True):
            rank.cache.adopt(blocks, of_rank, sums.counted)

    def poison(self, group: int, blocks: Sequence[int]) -> None:
        """See `Executor.poison`."""
        for rank in self.ranks:
            rank.cache.poison(blocks)

    def counters(self) -> dict[str, float]:
        """See `Executor.counters`; the core counts steps and tokens itself."""
        return {}

    def close(self) -> None:
        """See `Executor.close`; waits for the steps in flight."""
        for lane in self._team.lanes:
            lane.shutdown()
        for rank in self.ranks:
            rank.close()


def lanes(size: int) -> list[Lane]:
    """A thread for each rank."""
    return [ThreadPoolExecutor(1, thread_name_prefix=f"rank{rank}") for rank in range(size)]

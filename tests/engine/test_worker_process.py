"""A worker in a process of its own gives what one in ours gives; if it ends, we do not."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbaton.connectors.digest import BlockRange
from kvbaton.engine.collectives import AbortedError
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.executor import Executor, WorkerGroup, rank_threads
from kvbaton.engine.model_config import load_model_config
from kvbaton.engine.pending import Pending
from kvbaton.engine.step import NewSequence, SequenceStep, StepPlan
from kvbaton.engine.worker import CpuWorker, cpu_executor
from kvbaton.engine.worker_process import STEPS, WorkerProcess
from kvbaton.errors import ConfigError
from kvbaton.messages.engine import SamplingParams
from tests.support.making import making
from tests.support.waiting import PATIENCE_S

SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=64)
PROMPT = tuple(range(5, 45))
BLOCKS = (7, 3, 9, 4)


class Started(CpuWorker):
    """Has started when it is made."""

    def start(self, num_blocks: int, blocks: torch.Tensor | None = None) -> None:
        assert blocks is None
        assert num_blocks == self.cache.num_blocks


def make_worker(folder: Path) -> Any:
    config = EngineConfig(
        model=str(folder), device="cpu", num_blocks=32, max_model_len=128, num_threads=1
    )
    (worker,) = cpu_executor(config, load_model_config(folder, config.dtype)).workers
    worker.__class__ = Started
    return worker


def refuse() -> Any:
    raise ConfigError("--num-blocks", "must be 3")


@pytest.fixture(scope="session")
def make(checkpoint: Callable[..., Path]) -> Callable[[], Any]:
    return partial(make_worker, checkpoint())


@pytest.fixture
def start(make: Callable[[], Any]) -> Iterator[Callable[[], WorkerProcess]]:
    """Starts processes, and ends them."""
    with making(lambda: WorkerProcess(make, "rank 1"), WorkerProcess.close) as started:
        yield started


@pytest.fixture(scope="session")
def running(make: Callable[[], Any]) -> Iterator[WorkerProcess]:
    """For tests that end none: each takes 2 s, for torch."""
    process = WorkerProcess(make, "rank 1")
    yield process
    process.close()
    assert process._process.returncode == 0


@pytest.fixture
def process(running: WorkerProcess, make: Callable[[], Any]) -> WorkerProcess:
    """The one that runs, with a worker that has run nothing."""
    running._ask("make", make).result()
    return running


def plan(handle: int, start: int, count: int, *, blocks: tuple[int, ...] = ()) -> StepPlan:
    new = (NewSequence(handle, array("I", PROMPT), len(PROMPT), 0, SAMPLED),) if start == 0 else ()
    return StepPlan(start, new=new, steps=(SequenceStep(handle, start, count, (blocks,), 1),))


def steps() -> list[StepPlan]:
    """A prompt, and ten tokens."""
    first = plan(1, 0, len(PROMPT), blocks=BLOCKS)
    return [first, *(plan(1, len(PROMPT) + n, 1) for n in range(10))]


def test_steps_sums_and_digests_are_those_of_a_worker_here(
    process: WorkerProcess, make: Callable[[], Any]
) -> None:
    """The KV of ten tokens says which ones it sampled."""
    ours = make()
    assert process.fit() == ours.fit()
    process.start(ours.fit())
    process.forget()
    pending = [process.run(step) for step in steps()]
    early = process.sums(0, BLOCKS, in_flight=True)
    for step in steps():
        ours.run(step).result()
    wanted = ours.sums(0, BLOCKS).result()
    assert np.array_equal(early.result(), wanted)
    assert all(each.ready() for each in pending), "they were asked for before"
    assert np.array_equal(process.sums(0, BLOCKS).result(), wanted)
    held = [BlockRange(0, list(BLOCKS), 0, 0, len(PROMPT) + 10)]
    (again,) = process.digest(held, keep=True).result()
    assert np.array_equal(again, wanted)
    ours.close()


def test_what_it_raises_is_told_and_ends_nothing(process: WorkerProcess) -> None:
    first, *rest = steps()
    broken = process.run(rest[0])  # of a sequence that nobody knows
    after = process.run(first)
    with pytest.raises(RuntimeError, match="KeyError"):
        broken.result()
    after.result()
    process.check()


def lack_a_file() -> Any:
    raise FileNotFoundError("model.safetensors")


def test_why_none_can_be_made_is_told_and_is_not_taken_for_the_end_of_its_parent(
    running: WorkerProcess,
) -> None:
    process = running
    process._made = process._ask("make", refuse)
    with pytest.raises(ConfigError, match=r"^--num-blocks: must be 3$") as found:
        process.wait_made()
    assert found.value.field == "--num-blocks"
    with pytest.raises(RuntimeError, match=r"FileNotFoundError: model\.safetensors"):
        process._ask("make", lack_a_file).result()
    process.check()


def test_one_that_dies_is_noticed(start: Callable[[], WorkerProcess]) -> None:
    process = start()
    process.check()
    os.kill(process.pid, signal.SIGSTOP)
    asked: list[Pending[Any]] = [
        process.run(steps()[0]),
        process.sums(0, BLOCKS),
        process.digest([]),
    ]
    os.kill(process.pid, signal.SIGKILL)
    for each in asked:
        with pytest.raises(RuntimeError, match="rank 1 ended with code -9"):
            each.result()
    with pytest.raises(RuntimeError, match="rank 1 ended"):
        process.run(steps()[0]).result()
    with pytest.raises(RuntimeError, match="rank 1 ended"):
        process.check()


def test_one_that_does_not_answer_is_given_up_and_may_answer_later(
    process: WorkerProcess,
) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    channel = process._channels[STEPS]
    late = channel.ask("fit", patience_s=0.2)
    assert not late.ready()
    with pytest.raises(TimeoutError, match="fit"):
        late.result()
    os.kill(process.pid, signal.SIGCONT)
    process.run(steps()[0]).result()
    assert late.ready()


def test_calls_of_several_threads_get_their_own_answers(process: WorkerProcess) -> None:
    for step in steps():
        process.run(step).wait()
    wanted = {block: process.sums(0, [block]).result() for block in BLOCKS}

    def ask(block: int) -> bool:
        return all(
            np.array_equal(process.sums(0, [block]).result(), wanted[block]) for _ in range(50)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, BLOCKS))


def hold_interpreter() -> Any:
    """As a launch does whose queue is full: none of its threads hears anything."""
    print("made", flush=True)
    ctypes.PyDLL(None).sleep(600)


def say() -> Any:
    print("made", flush=True)


class Digesting:
    """Digests of so many layers that one fills the socket."""

    def digest(self, ranges: list[BlockRange], *, keep: bool) -> list[Any]:
        return [np.full(1 << 17, held.start) for held in ranges]

    def close(self) -> None:
        """Nothing is left."""


def test_answers_that_nobody_reads_yet_hold_up_no_further_calls(running: WorkerProcess) -> None:
    """Neither end may wait until the other has read: the transfer thread asks, then it reads."""
    process = running
    process._ask("make", Digesting).result()
    asked = list[Pending[Any]]()

    def ask() -> None:
        for start in range(200):
            held = BlockRange(0, list(range(2000)), 0, start, start + 1)
            asked.append(process.digest([held]))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    assert not asking.is_alive(), f"it hangs after {len(asked)}"
    assert [each.result()[0][0] for each in asked] == [*range(200)]


def test_it_ends_when_its_parent_is_killed() -> None:
    text = """
import time
from kvbaton.engine.worker_process import WorkerProcess
from tests.engine.test_worker_process import hold_interpreter, say
processes = [WorkerProcess(make, "rank 1") for make in (say, hold_interpreter)]
print(*(process.pid for process in processes), flush=True)
time.sleep(600)
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", text]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout is not None
        pids = map(int, parent.stdout.readline().split())
        assert [parent.stdout.readline() for _ in range(2)] == ["made\n"] * 2
        parent.kill()
    deadline = time.monotonic() + PATIENCE_S
    for status in (Path(f"/proc/{pid}/status") for pid in pids):
        while status.exists() and "zombie" not in status.read_text():
            assert time.monotonic() < deadline, "it has outlived its parent"
            time.sleep(0.01)


def test_an_executor_of_two_ends_the_other_when_one_dies(
    start: Callable[[], WorkerProcess], make: Callable[[], Any]
) -> None:
    aborted = threading.Event()
    process = start()
    made = [make(), process]
    executor = Executor(WorkerGroup(rank_threads(2), abort=aborted.set), lambda rank: made[rank])
    first, second, *_ = steps()
    (sampled,) = executor.launch(first).result().sampled
    assert len(sampled.token_ids) == 1
    ours, theirs = executor.sums(0, BLOCKS).result()
    assert np.array_equal(ours, theirs)
    executor.check()
    assert not aborted.is_set()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="rank 1 ended with code -9"):
        executor.launch(second).result()
    assert aborted.is_set()
    with pytest.raises(RuntimeError, match="rank 1 ended"):
        executor.check()
    executor.close()


def test_what_was_killed_is_told_apart(start: Callable[[], WorkerProcess]) -> None:
    process = start()
    os.kill(process.pid, signal.SIGSTOP)
    asked = process.run(steps()[0])
    process.kill()
    with pytest.raises(AbortedError):
        asked.result()

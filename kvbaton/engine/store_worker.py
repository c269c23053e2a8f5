"""The thread that makes all calls on the store, and checks what comes from it.

An order (`LookUp`, `LoadBlocks`, `SaveBlocks`) goes to the thread, which fills in what came of it,
and comes back. What it takes is a generator that yields what it waits for; the thread goes on with
those whose wait is over. It decides nothing: `store_connector.py` does.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from kvbaton.connectors.objects import HEADER_BYTES, ObjectForm
from kvbaton.connectors.store import Store
from kvbaton.engine.block_staging import StagedBlocks
from kvbaton.engine.executor import Executor
from kvbaton.errors import ConfigError, StoreError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Wait = Future[Any] | Callable[[], bool]
"""What a job waits for: a future, or something to be asked again and again."""
Job = Generator[Wait, None, T]

LOOK_S = 0.0005
"""From a first look at what can't wake the thread, sums and copies of a device, to the second."""
LOOK_GROWTH = 1.25
"""Each pause is so much longer than the one before: every look disturbs the steps."""
MOST_LOOK_S = 0.02
CLOSE_S = 10.0
WARN_S = 10.0
"""Between two lines in the log about failures."""


class BlockRun(NamedTuple):
    """Consecutive blocks of one sequence in one group.

    Attributes:
        group: which.
        first: logical number of the first block, as in spans; of a look-up a run of states may have
            several, of which this is the first.
        blocks: physical ones.
        keys: of their objects.
    """

    group: int
    first: int
    blocks: tuple[int, ...]
    keys: tuple[bytes, ...]


class BlockSave(NamedTuple):
    """One block to save.

    Attributes:
        group: which.
        number: its logical number, as in spans.
        block: the physical one.
        key: of its object.
        summed: whether the step that wrote the block left sums; else they are made from memory.
    """

    group: int
    number: int
    block: int
    key: bytes
    summed: bool


@dataclass(eq=False, kw_only=True)
class LookUp:
    """Ask which objects are there, and under which pins; `error` says why nothing is known."""

    keys: tuple[bytes, ...]
    present: list[bool] = field(default_factory=list)
    pins: list[int] = field(default_factory=list)
    error: str | None = None


@dataclass(eq=False, kw_only=True)
class LoadBlocks:
    """Fill blocks and verify them. Once this is back, the store touches them no more.

    Attributes:
        runs: which.
        cancelled: nobody wants it any more.
        good: per block of all runs, whether it is there and verified.
        corrupt: how many were there, but not what they should be.
        seconds: that it took.
        error: why nothing came.
    """

    runs: tuple[BlockRun, ...]
    cancelled: bool = False
    good: list[bool] = field(default_factory=list)
    corrupt: int = 0
    seconds: float = 0.0
    error: str | None = None


@dataclass(eq=False, kw_only=True)
class SaveBlocks:
    """Keep blocks; `stored` says per block whether the store has it."""

    saves: tuple[BlockSave, ...]
    stored: list[bool] = field(default_factory=list)
    seconds: float = 0.0
    error: str | None = None


Order = LookUp | LoadBlocks | SaveBlocks


class StoreWorker:
    """Carries orders out.

    Args:
        store: not open yet; from now on it belongs to the thread.
        executor: has the blocks.
        forms: of objects, one per KV group.
        identity: of the engine, 32 bytes.

    Attributes:
        wake_fd: readable when `take` has something.
        failure: why the thread has ended by itself; None while all is well.
    """

    def __init__(
        self, store: Store, executor: Executor, forms: tuple[ObjectForm, ...], identity: bytes
    ) -> None:
        self.store = store
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.name = store.name
        self.failure: str | None = None
        self._executor = executor
        self.forms = forms
        self.identity = identity
        self._staging = executor.staging(forms)
        self._inbox: deque[Callable[[], object]] = deque()
        self._outbox: deque[Order] = deque()
        self._wake = threading.Event()
        self._pause_s = LOOK_S
        self._stopping = False
        self._jobs: dict[Job[None], Wait] = {}
        self._loads: dict[LoadBlocks, Future[list[bool]]] = {}
        self._warn_at = 0.0
        self._thread = threading.Thread(target=self._run, name="kvbaton-store", daemon=True)

    # --- called by the core's thread ---

    def start(self) -> None:
        """Open the store and begin.

        Raises:
            ConfigError: the store can't be opened.
        """
        opened: Future[None] = Future()
        self._opened = opened
        self._thread.start()
        try:
            opened.result()
        except StoreError as error:
            raise ConfigError("--store", f"can't open {self.name}: {error}") from error

    def submit(self, order: Order) -> None:
        """Have an order carried out; `take` gives it back."""
        match order:
            case LookUp():
                job = self._look_up(order)
            case LoadBlocks():
                job = self._load(order)
            case SaveBlocks():
                job = self._save(order)
        self._post(lambda: self._go_on(job))

    def cancel(self, order: LoadBlocks) -> None:
        """Nobody wants a load any more; it comes back all the same."""
        order.cancelled = True
        self._post(lambda: order in self._loads and self._loads[order].cancel())

    def release(self, pins: Sequence[int]) -> None:
        """Give pins of a lookup back."""
        for pin in pins:
            self._post(partial(self.store.release, pin))

    def _post(self, call: Callable[[], object]) -> None:
        self._inbox.append(call)
        self._wake.set()

    def take(self) -> list[Order]:
        """Orders that were carried out since the last call."""
        try:
            os.eventfd_read(self.wake_fd)
        except BlockingIOError:
            return []
        return [self._outbox.popleft() for _ in range(len(self._outbox))]

    def gauges(self) -> dict[str, float]:
        """Values now by Prometheus name; what the store can't tell is left out."""
        usage = self.store.usage()
        unhealthy = self.failure is not None or self.store.health() is not None
        values = {
            "unhealthy": float(unhealthy),
            "objects": usage.objects,
            "used_bytes": usage.num_bytes,
            "capacity_bytes": usage.capacity,
        }
        label = f'{{store="{self.name}"}}'
        return {f"kvbaton_store_{n}{label}": float(v) for n, v in values.items() if v is not None}

    def state(self) -> dict[str, Any]:
        """The debugging dump."""
        return {
            "name": self.name,
            "failure": self.failure,
            "health": self.store.health(),
            "jobs": len(self._jobs),
        }

    def close(self) -> None:
        """End what runs, and close the store."""
        self._stopping = True
        self._wake.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("the store %s does not close", self.name)
        else:
            os.close(self.wake_fd)

    # --- the thread ---

    def _run(self) -> None:
        try:
            self.store.open()
        except BaseException as error:
            self._opened.set_exception(error)
            return
        self._opened.set_result(None)
        if self.store.capabilities.synthetic:
            logger.warning("%s makes KV up: answers are noise, good for benchmarks only", self.name)
        try:
            while not self._stopping:
                asked = any(not isinstance(wait, Future) for wait in self._jobs.values())
                woken = self._wake.wait(self._pause_s if asked else None)
                self._pause_s = LOOK_S if woken else min(self._pause_s * LOOK_GROWTH, MOST_LOOK_S)
                self._wake.clear()
                while self._inbox:
                    call = self._inbox.popleft()
                    try:
                        call()
                    except Exception as error:
                        self._warn("a call", error)
                for job, wait in list(self._jobs.items()):
                    if wait.done() if isinstance(wait, Future) else wait():
                        self._go_on(job)
        except BaseException as error:
            logger.exception("the store's thread has ended")
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            self.store.close()

    def _go_on(self, job: Job[None]) -> None:
        """Run a job up to the next thing that it really has to wait for."""
        self._jobs.pop(job, None)
        for wait in job:
            if wait.done() if isinstance(wait, Future) else wait():
                continue
            self._jobs[job] = wait
            if isinstance(wait, Future):
                wait.add_done_callback(lambda _: self._wake.set())
            return

    def _done(self, order: Order) -> None:
        self._outbox.append(order)
        os.eventfd_write(self.wake_fd, 1)

    def _warn(self, what: str, error: Exception) -> str:
        text = f"{type(error).__name__}: {error}"
        if time.monotonic() >= self._warn_at:
            self._warn_at = time.monotonic() + WARN_S
            logger.warning("%s at %s failed: %s", what, self.name, text)
        return text

    # --- lookups ---

    def _look_up(self, order: LookUp) -> Job[None]:
        abilities = self.store.capabilities
        try:
            for keys in _batched(order.keys, abilities.max_keys):
                future = self.store.lookup(keys, pin=abilities.pins)
                yield future
                found = future.result()
                order.present += found.present
                if found.ticket is not None:
                    order.pins.append(found.ticket)
        except Exception as error:
            for pin in order.pins:
                self.store.release(pin)
            order.pins, order.error = [], self._warn("a lookup", error)
        self._done(order)

    # --- loads ---

    def _load(self, order: LoadBlocks) -> Job[None]:
        began = time.monotonic()
        corrupt: list[bytes] = []
        for run in order.runs:
            start = 0
            for keys in _batched(run.keys, self._most_blocks()):
                blocks = run.blocks[start : start + len(keys)]
                some = BlockRun(run.group, run.first + start, blocks, keys)
                right = [False] * len(keys)
                if order.error is None and not order.cancelled:
                    try:
                        right, bad = yield from self._load_some(order, some)
                        corrupt += bad
                    except Exception as error:
                        order.error = self._warn("a load", error)
                order.good += right
                start += len(keys)
        order.corrupt, order.seconds = len(corrupt), time.monotonic() - began
        self._done(order)
        if self.store.capabilities.deletes:
            try:
                for bad_keys in _batched(tuple(corrupt), self.store.capabilities.max_keys):
                    deletion = self.store.delete(bad_keys)
                    yield deletion
                    deletion.result()
            except Exception as error:
                self._warn("a deletion", error)

    def _most_blocks(self) -> int:
        return min(self.store.capabilities.max_keys, self._staging.max_blocks)

    def _load_some(self, order: LoadBlocks, run: BlockRun) -> Job[tuple[list[bool], list[bytes]]]:
        """Per block whether it is right; and keys of those that are there, but wrong."""
        headers = [memoryview(bytearray(HEADER_BYTES)) for _ in run.keys]
        batch = yield from _borrow(lambda: self._staging.lend(run.group, run.blocks))
        try:
            targets = [[h, *pieces] for h, pieces in zip(headers, batch.pieces, strict=True)]
            future = self._loads[order] = self.store.load(run.keys, targets)
            yield future
            there = future.result()
            batch.write_back()
            yield batch.ready
        finally:
            self._loads.pop(order, None)
            batch.release()
        if order.cancelled or not any(there):
            return [False] * len(run.keys), []
        form = self.forms[run.group]
        start, end = (form.block_size * (run.first + i) for i in (0, len(run.blocks)))
        sums = self._executor.digest(run.group, run.blocks, start, start, end)
        yield sums.ready
        # They are kept with the blocks, as if a step had written these.
        self._executor.adopt(run.group, run.blocks, sums.result(), end - start)
        if self.store.capabilities.synthetic:
            return there, []
        right, bad = [], []
        values = form.digests(sums.result())
        for key, header, value, is_there in zip(run.keys, headers, values, there, strict=True):
            claimed = form.header(self.identity, key).check(header)
            right.append(is_there and claimed == value)
            if is_there and claimed != value:
                bad.append(key)
        return right, bad

    # --- saves ---

    def _save(self, order: SaveBlocks) -> Job[None]:
        began = time.monotonic()
        stored: dict[bytes, bool] = {}
        for group, saves in itertools.groupby(sorted(order.saves), key=lambda save: save.group):
            for some in _batched(tuple(saves), self._most_blocks()):
                try:
                    answers = yield from self._save_some(group, some)
                    stored |= dict(zip((save.key for save in some), answers, strict=True))
                except Exception as error:
                    order.error = self._warn("a save", error)
        order.stored = [stored.get(save.key, False) for save in order.saves]
        order.seconds = time.monotonic() - began
        self._done(order)

    def _save_some(self, group: int, saves: Sequence[BlockSave]) -> Job[list[bool]]:
        form = self.forms[group]
        blocks = [save.block for save in saves]
        batch = yield from _borrow(lambda: self._staging.fetch(group, blocks))
        try:
            sums = []
            for run in _runs(saves):
                held = [save.block for save in run]
                if run[0].summed:
                    sums.append(self._executor.sums(group, held))
                else:
                    start = run[0].number * form.block_size
                    end = start + len(run) * form.block_size
                    sums.append(self._executor.digest(group, held, start, start, end))
            yield lambda: batch.ready() and all(found.ready() for found in sums)
            values = [value for found in sums for value in form.digests(found.result())]
            keys = [save.key for save in saves]
            sources = [
                [memoryview(form.header(self.identity, key).pack(value)), *pieces]
                for key, value, pieces in zip(keys, values, batch.pieces, strict=True)
            ]
            future = self.store.store(keys, sources)
            yield future
            return future.result()
        finally:
            batch.release()


def _borrow(lend: Callable[[], StagedBlocks | None]) -> Job[StagedBlocks]:
    """Wait until there is memory."""
    lent: list[StagedBlocks | None] = [None]

    def is_lent() -> bool:
        lent[0] = lend()
        return lent[0] is not None

    while lent[0] is None:
        yield is_lent
    return lent[0]


def _runs(saves: Sequence[BlockSave]) -> list[list[BlockSave]]:
    """Neighbours whose sums were kept; and those of which they are made, if they are consecutive.

    `number` and `key` tell no sequence, so two that happen to follow each other in number may be of
    different ones: their tokens' places in the sum, all that counts, are right all the same.
    """
    runs: list[list[BlockSave]] = []
    for save in saves:
        last = runs[-1][-1] if runs else None
        follows = last is not None and last.summed == save.summed
        if follows and (save.summed or (last is not None and last.number + 1 == save.number)):
            runs[-1].append(save)
        else:
            runs.append([save])
    return runs


def _batched(items: tuple[T, ...], size: int) -> Generator[tuple[T, ...]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]

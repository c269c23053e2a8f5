"""The thread that makes all calls on the store, and checks what comes from it.

What an order takes is a generator that yields what it waits for; the thread goes on with those
whose wait is over. It decides nothing: `stash.py` does.
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
from typing import Any, TypeVar

from kvbaton.connectors.objects import HEADER_BYTES, ObjectForm
from kvbaton.connectors.store import Store
from kvbaton.engine.executor import Executor
from kvbaton.engine.pending import Pending
from kvbaton.engine.staging import Batch
from kvbaton.engine.store_requests import (
    Answer,
    CancelLoad,
    LoadBlocks,
    Loaded,
    LookedUp,
    LookUp,
    Order,
    Part,
    ReleasePins,
    Save,
    SaveBlocks,
    Saved,
)
from kvbaton.engine.worker import Sums
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
        self._inbox: deque[Order] = deque()
        self._outbox: deque[Answer] = deque()
        self._wake = threading.Event()
        self._pause_s = LOOK_S
        self._stopping = False
        self._jobs: dict[Job[None], Wait] = {}
        self._loads: dict[int, Future[list[bool]]] = {}
        self._cancelled: set[int] = set()
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

    def submit(self, orders: Sequence[Order]) -> None:
        """Have orders carried out."""
        if orders:
            self._inbox.extend(orders)
            self._wake.set()

    def take(self) -> list[Answer]:
        """Answers since the last call."""
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
                self._turn()
        except BaseException as error:
            logger.exception("the store's thread has ended")
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            self.store.close()

    def _turn(self) -> None:
        asked = any(not isinstance(wait, Future) for wait in self._jobs.values())
        woken = self._wake.wait(self._pause_s if asked else None)
        self._pause_s = LOOK_S if woken else min(self._pause_s * LOOK_GROWTH, MOST_LOOK_S)
        self._wake.clear()
        while self._inbox:
            self._begin(self._inbox.popleft())
        for job, wait in list(self._jobs.items()):
            if wait.done() if isinstance(wait, Future) else wait():
                self._go_on(job)

    def _begin(self, order: Order) -> None:
        match order:
            case LookUp():
                self._go_on(self._look_up(order))
            case LoadBlocks():
                self._go_on(self._load(order))
            case SaveBlocks():
                self._go_on(self._save(order))
            case CancelLoad(ticket):
                self._cancelled.add(ticket)
                if ticket in self._loads:
                    self._loads[ticket].cancel()
            case ReleasePins(pins):
                for pin in pins:
                    self.store.release(pin)

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

    def _answer(self, answer: Answer) -> None:
        self._outbox.append(answer)
        os.eventfd_write(self.wake_fd, 1)

    def _warn(self, what: str, error: Exception) -> str:
        text = f"{type(error).__name__}: {error}"
        if time.monotonic() >= self._warn_at:
            self._warn_at = time.monotonic() + WARN_S
            logger.warning("%s at %s failed: %s", what, self.name, text)
        return text

    # --- lookups ---

    def _look_up(self, order: LookUp) -> Job[None]:
        present: list[bool] = []
        pins: list[int] = []
        abilities = self.store.capabilities
        try:
            for keys in _batched(order.keys, abilities.max_keys):
                future = self.store.lookup(keys, pin=abilities.pins)
                yield future
                found = future.result()
                present += found.present
                if found.ticket is not None:
                    pins.append(found.ticket)
        except Exception as error:
            for pin in pins:
                self.store.release(pin)
            self._answer(LookedUp(order.ticket, error=self._warn("a lookup", error)))
            return
        self._answer(LookedUp(order.ticket, tuple(present), tuple(pins)))

    # --- loads ---

    def _load(self, order: LoadBlocks) -> Job[None]:
        began, error = time.monotonic(), None
        good: list[bool] = []
        corrupt: list[bytes] = []
        for part in self._cut(order.parts):
            right = [False] * len(part.keys)
            if error is None and order.ticket not in self._cancelled:
                try:
                    right, bad = yield from self._load_part(order.ticket, part)
                    corrupt += bad
                except Exception as failure:
                    error = self._warn("a load", failure)
            good += right
        self._cancelled.discard(order.ticket)
        seconds = time.monotonic() - began
        self._answer(Loaded(order.ticket, tuple(good), len(corrupt), seconds, error))
        if corrupt and self.store.capabilities.deletes:
            yield from self._delete(corrupt)

    def _cut(self, parts: Sequence[Part]) -> Generator[Part]:
        """Parts of as many blocks as one call may have."""
        for part in parts:
            start = 0
            for keys in _batched(part.keys, self._most_blocks()):
                blocks = part.blocks[start : start + len(keys)]
                yield Part(part.group, part.first + start, blocks, keys)
                start += len(keys)

    def _most_blocks(self) -> int:
        return min(self.store.capabilities.max_keys, self._staging.max_blocks)

    def _load_part(self, ticket: int, part: Part) -> Job[tuple[list[bool], list[bytes]]]:
        """Per block whether it is right; and keys of those that are there, but wrong."""
        headers = [memoryview(bytearray(HEADER_BYTES)) for _ in part.keys]
        batch = yield from _borrow(lambda: self._staging.lend(part.group, part.blocks))
        try:
            targets = [[h, *pieces] for h, pieces in zip(headers, batch.pieces, strict=True)]
            future = self._loads[ticket] = self.store.load(part.keys, targets)
            yield future
            there = future.result()
            batch.land()
            yield batch.ready
        finally:
            self._loads.pop(ticket, None)
            batch.release()
        if ticket in self._cancelled or not any(there):
            return [False] * len(part.keys), []
        values = yield from self._values_of(part)
        if self.store.capabilities.synthetic:
            return there, []
        form = self.forms[part.group]
        right, bad = [], []
        for key, header, value, is_there in zip(part.keys, headers, values, there, strict=True):
            claimed = form.header(self.identity, key).check(header)
            right.append(is_there and claimed == value)
            if is_there and claimed != value:
                bad.append(key)
        return right, bad

    def _values_of(self, part: Part) -> Job[list[int]]:
        """Digests of what is in memory now; their sums are kept with the blocks."""
        size = self.forms[part.group].block_size
        start, end = part.first * size, (part.first + len(part.blocks)) * size
        sums = self._executor.digest(part.group, part.blocks, start, start, end)
        yield lambda: sums.poll() is not None
        values = _there(sums)
        self._executor.adopt(part.group, part.blocks, values, end - start)
        return self.forms[part.group].digests(values)

    def _delete(self, keys: Sequence[bytes]) -> Job[None]:
        try:
            for some in _batched(tuple(keys), self.store.capabilities.max_keys):
                future = self.store.delete(some)
                yield future
                future.result()
        except Exception as error:
            self._warn("a deletion", error)

    # --- saves ---

    def _save(self, order: SaveBlocks) -> Job[None]:
        began, error = time.monotonic(), None
        stored: dict[bytes, bool] = {}
        for group, saves in itertools.groupby(sorted(order.saves), key=lambda save: save.group):
            for some in _batched(tuple(saves), self._most_blocks()):
                try:
                    answers = yield from self._save_some(group, some)
                    stored |= dict(zip((save.key for save in some), answers, strict=True))
                except Exception as failure:
                    error = self._warn("a save", failure)
        answer = tuple(stored.get(save.key, False) for save in order.saves)
        self._answer(Saved(order.ticket, answer, time.monotonic() - began, error))

    def _save_some(self, group: int, saves: Sequence[Save]) -> Job[list[bool]]:
        form = self.forms[group]
        blocks = [save.block for save in saves]
        batch = yield from _borrow(lambda: self._staging.fetch(group, blocks))
        try:
            sums = [self._sums(group, tuple(run)) for run in _runs(saves)]
            yield lambda: batch.ready() and all(found.poll() is not None for found in sums)
            values = [value for found in sums for value in form.digests(_there(found))]
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

    def _sums(self, group: int, run: Sequence[Save]) -> Pending[list[Sums]]:
        """Sums of saves that `_runs` has put together."""
        blocks = [save.block for save in run]
        if run[0].summed:
            return self._executor.sums(group, blocks)
        size = self.forms[group].block_size
        start = run[0].number * size
        return self._executor.digest(group, blocks, start, start, start + len(run) * size)


def _borrow(lend: Callable[[], Batch | None]) -> Job[Batch]:
    """Wait until there is memory."""
    batch: list[Batch] = []

    def try_again() -> bool:
        lent = lend()
        if lent is not None:
            batch.append(lent)
        return lent is not None

    yield try_again
    return batch[0]


def _runs(saves: Sequence[Save]) -> list[list[Save]]:
    """Neighbours whose sums were kept; and those of which they are made, if they are consecutive.

    `number` and `key` tell no sequence, so two that happen to follow each other in number may be of
    different ones: their tokens' places in the sum, all that counts, are right all the same.
    """
    runs: list[list[Save]] = []
    for save in saves:
        last = runs[-1][-1] if runs else None
        follows = last is not None and last.summed == save.summed
        if follows and (save.summed or (last is not None and last.number + 1 == save.number)):
            runs[-1].append(save)
        else:
            runs.append([save])
    return runs


def _there(sums: Pending[list[Sums]]) -> list[Sums]:
    found = sums.poll()
    assert found is not None, "asked for sums that are not there yet"
    return found


def _batched(items: tuple[T, ...], size: int) -> Generator[tuple[T, ...]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]

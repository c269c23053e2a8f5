"""The thread that makes all calls on the store, and checks what comes from it.

An order (`LookUp`, `LoadBlocks`, `SaveBlocks`) goes to the thread, which fills in what came of it,
and comes back. What it takes is a job (`store_calls.py`). The thread decides nothing:
`store_connector.py` and `store_saves.py` do.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from kvbaton.connectors.base import Device
from kvbaton.connectors.digest import BlockRange
from kvbaton.connectors.layout import GroupKind
from kvbaton.connectors.objects import HEADER_BYTES, ObjectForm
from kvbaton.connectors.registry import as_told, as_written
from kvbaton.connectors.store import Forgetting, Hints, Registering
from kvbaton.engine.block_staging import BlockStaging, StagedBlocks
from kvbaton.engine.executor import Executor
from kvbaton.engine.store_calls import Job, JobLoop, StoreCalls, StoreStatus
from kvbaton.errors import ConfigError, StoreError

logger = logging.getLogger(__name__)

T = TypeVar("T")

OPEN_S = 60.0
REGISTER_S = 600.0
"""To pin memory takes about a second for some gigabytes."""
CLOSE_S = 3.0
"""A store that closes no sooner is left behind."""
NAMESPACE_DIGITS = 16
PROBE_BYTES = 8 << 20
"""Of the objects that a probe loads, if there are more than one."""


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
        hints: for the store.
    """

    group: int
    number: int
    block: int
    key: bytes
    summed: bool
    hints: Hints


@dataclass(eq=False, kw_only=True)
class Order:
    """What the thread is to do, and what came of it.

    Attributes:
        deadline: when it is late, for whoever has ordered it.
        seconds: that it took.
        error: why it went wrong, at least in part.
    """

    deadline: float = math.inf
    seconds: float = 0.0
    error: str | None = None


@dataclass(eq=False, kw_only=True)
class LookUp(Order):
    """Ask which objects are there, and under which pins; with an error nothing is known.

    `present` tells of the blocks of all runs. What comes after a gap in a run of which only a whole
    prefix is of use may be told to be absent though it is there.
    """

    runs: tuple[BlockRun, ...]
    present: list[bool] = field(default_factory=list)
    pins: list[int] = field(default_factory=list)


@dataclass(eq=False, kw_only=True)
class LoadBlocks(Order):
    """Fill blocks and verify them. Once this is back, the store touches them no more.

    Attributes:
        runs: which.
        cancelled: nobody wants it any more.
        good: per block of all runs, whether it is there and verified.
        corrupt: how many were there, but not what they should be.
        unanswered: of how many the store did not say whether it has them.
    """

    runs: tuple[BlockRun, ...]
    cancelled: bool = False
    good: list[bool] = field(default_factory=list)
    corrupt: int = 0
    unanswered: int = 0


@dataclass(eq=False, kw_only=True)
class ProbeStore(Order):
    """Look objects up and load a few into memory of nobody: do calls work again?

    Attributes:
        runs: which objects; blocks don't matter. `seconds` are of the lookups.
    """

    runs: tuple[BlockRun, ...]


@dataclass(eq=False, kw_only=True)
class SaveBlocks(Order):
    """Keep blocks.

    Attributes:
        saves: which.
        stored: per block, whether the store has it.
        left: how many of them others have saved, or are about to: nothing was moved.
    """

    saves: tuple[BlockSave, ...]
    stored: list[bool] = field(default_factory=list)
    left: set[bytes] = field(default_factory=set)


@dataclass(eq=False, kw_only=True)
class Forgotten:
    """These objects left the store by themselves. Nobody orders it."""

    keys: tuple[bytes, ...]


@dataclass(eq=False, kw_only=True)
class ClearStore(Order):
    """Forget all objects of this engine's namespace; `done` gets how many there were."""

    done: Future[int]


class StoreWorker:
    """Carries orders out.

    Args:
        calls: of a store that is not open yet; from now on it belongs to the thread.
        executor: has the blocks.
        forms: of objects, one per KV group.
        identity: of the engine, 32 bytes.

    Attributes:
        namespace: of the engine's objects, see `Hints`.
        wake_fd: readable when `take` has something.
        failure: why the thread has ended by itself; None while all is well.
    """

    def __init__(
        self, calls: StoreCalls, executor: Executor, forms: tuple[ObjectForm, ...], identity: bytes
    ) -> None:
        self.namespace = identity.hex()[:NAMESPACE_DIGITS]
        self.calls = calls
        self.status = StoreStatus(self.calls)
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.name = calls.name
        self.failure: str | None = None
        self._executor = executor
        self.forms = forms
        self.identity = identity
        self._outbox: deque[Order | Forgotten] = deque()
        self._loop = JobLoop()
        self._loads: dict[LoadBlocks, set[Future[list[bool]]]] = {}
        self._forgotten = deque[bytes]()
        self._telling = False
        self._storing: set[bytes] = set()
        if isinstance(calls.plugin, Forgetting):
            calls.plugin.on_forget = self._forget
        self._thread = threading.Thread(target=self._run, name="kvbaton-store", daemon=True)

    # --- called by the core's thread ---

    def start(self) -> None:
        """Open the store and begin.

        Raises:
            ConfigError: the store can't be opened.
        """
        self._opened, self._ready = Future[None](), Future[None]()
        self._thread.start()
        for step, limit in ((self._opened, OPEN_S), (self._ready, REGISTER_S)):
            try:
                step.result(limit)
            except ConfigError as error:
                raise as_told("--store", self.name, error) from None
            except BaseException as error:
                if not step.done():  # a store's own TimeoutError is told as what it is
                    text = f"{self.name} was not open within {limit:g} s"
                    raise ConfigError("--store", text) from error
                told = "" if isinstance(error, StoreError) else f"{type(error).__name__}: "
                text = f"can't open {self.name}: {told}{error}"
                shown = as_written(text)
                raise ConfigError("--store", shown) from (error if shown == text else None)
        self.status.start()

    def submit(self, order: Order) -> None:
        """Have an order carried out; `take` gives it back."""
        match order:
            case LookUp():
                job = self._look_up(order)
            case LoadBlocks():
                job = self._load(order)
            case SaveBlocks():
                job = self._save(order)
            case ProbeStore():
                job = self._probe(order)
            case ClearStore():
                job = self._clear(order)
        self._loop.post(lambda: self._loop.go_on(job))

    def cancel(self, order: LoadBlocks) -> None:
        """Nobody wants a load any more; it comes back all the same."""
        order.cancelled = True
        self._loop.post(lambda: self._cancel(order))

    def release(self, pins: Sequence[int]) -> None:
        """Give pins of a lookup back."""
        for pin in pins:
            self._loop.post(partial(self.calls.release, pin))

    def take(self) -> list[Order | Forgotten]:
        """Orders that were carried out since the last call, and what was forgotten."""
        try:
            os.eventfd_read(self.wake_fd)
        except BlockingIOError:
            return []
        return [self._outbox.popleft() for _ in range(len(self._outbox))]

    def gauges(self) -> dict[str, float]:
        """Values now by Prometheus name; what the store can't tell is left out."""
        self.status.refresh()
        unhealthy = self.failure is not None or self.status.trouble is not None
        label = f'{{store="{self.name}"}}'
        return {f"kvbaton_store_unhealthy{label}": float(unhealthy), **self.status.gauges()}

    def state(self) -> dict[str, Any]:
        """The debugging dump."""
        return {
            "name": self.name,
            "failure": self.failure,
            "health": self.status.trouble,
            "errors": self.calls.errors,
            "jobs": self._loop.num_jobs,
        }

    def close(self) -> None:
        """End what runs, and close the store; one that hangs is left behind."""
        self.status.close()
        self._loop.stop()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self.calls.note("close", TimeoutError(f"not within {CLOSE_S:g} s; it is left behind"))
        else:
            os.close(self.wake_fd)

    # --- the thread ---

    def _run(self) -> None:
        try:
            self.calls.plugin.open()
        except BaseException as error:
            self._opened.set_exception(error)
            return
        self._opened.set_result(None)
        try:
            self._staging = self._stage()
        except BaseException as error:
            self._ready.set_exception(error)
            self.calls.close()
            return
        self._ready.set_result(None)
        if self.calls.capabilities.synthetic:
            logger.warning("%s makes KV up: answers are noise, good for benchmarks only", self.name)
        try:
            self._loop.run()
        except BaseException as error:
            logger.exception("the store's thread has ended")
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            self.calls.close()

    def _stage(self) -> BlockStaging:
        """Where the store finds blocks: it is told of that memory here."""
        told = isinstance(self.calls.plugin, Registering)
        reached = self.calls.capabilities.devices if told else frozenset[Device]()
        staging = self._executor.staging(self.forms, reached)
        if self.calls.register(staging.regions) or not reached:
            return staging
        return self._executor.staging(self.forms)

    def _done(self, order: Order | Forgotten) -> None:
        self._outbox.append(order)
        os.eventfd_write(self.wake_fd, 1)

    def _told(self, what: str, error: Exception) -> str:
        """What went wrong; if that was not at the store, it is logged here."""
        if not isinstance(error, StoreError):
            logger.warning("%s from or to %s failed", what, self.name, exc_info=error)
        return f"{type(error).__name__}: {error}"

    # --- lookups ---

    def _look_up(self, order: LookUp) -> Job[None]:
        try:
            for keys, prefix in self._questions(order.runs):
                answered = len(order.present)
                for some in _batched(keys, self.calls.capabilities.max_keys):
                    found = yield from self.calls.lookup(some, prefix=prefix, pin=True)
                    order.present += found.present
                    if found.ticket is not None:
                        order.pins.append(found.ticket)
                    if prefix and not all(found.present):
                        break
                order.present += [False] * (answered + len(keys) - len(order.present))
        except StoreError as error:
            for pin in order.pins:
                self.calls.release(pin)
            order.pins, order.error = [], str(error)
        self._done(order)

    def _questions(self, runs: Sequence[BlockRun]) -> Iterator[tuple[tuple[bytes, ...], bool]]:
        """What to look up together, and whether what comes after a gap is of no use."""
        if not self.calls.capabilities.prefix:
            yield tuple(key for run in runs for key in run.keys), False
            return
        for run in runs:
            yield run.keys, self.forms[run.group].kind is GroupKind.FULL

    def _probe(self, order: ProbeStore) -> Job[None]:
        left = PROBE_BYTES
        try:
            for run in order.runs:
                num_bytes = HEADER_BYTES + self.forms[run.group].num_bytes
                for keys in _batched(run.keys, self.calls.capabilities.max_keys):
                    asked = time.monotonic()
                    found = yield from self.calls.lookup(keys)
                    order.seconds += time.monotonic() - asked
                    there = [key for key, ok in zip(keys, found.present, strict=True) if ok]
                    some = there[: max(left // num_bytes, left == PROBE_BYTES)]
                    left -= len(some) * num_bytes
                    if some:
                        targets = [[memoryview(bytearray(num_bytes))] for _ in some]
                        yield from self.calls.load(some, targets)
        except StoreError as error:
            order.error = str(error)
        self._done(order)

    # --- loads ---

    def _load(self, order: LoadBlocks) -> Job[None]:
        began = time.monotonic()
        most = self._most_blocks()
        parts = [
            BlockRun(
                run.group, run.first + at, run.blocks[at : at + most], run.keys[at : at + most]
            )
            for run in order.runs
            for at in range(0, len(run.keys), most)
        ]
        answers = [[False] * len(part.keys) for part in parts]
        corrupt: list[bytes] = []

        def load(number: int) -> Job[None]:
            if order.error is None and not order.cancelled:
                try:
                    right, bad = yield from self._load_some(order, parts[number])
                except Exception as error:
                    order.error = self._told("a load", error)
                else:
                    corrupt.extend(bad)
                    if not order.cancelled:
                        answers[number] = right
                        return
            order.unanswered += len(parts[number].keys)

        jobs = map(load, range(len(parts)))
        yield from self._loop.side_by_side(jobs, self._staging.loads_together)
        self._loads.pop(order, None)
        order.good += itertools.chain.from_iterable(answers)
        order.corrupt, order.seconds = len(corrupt), time.monotonic() - began
        if corrupt:
            self.calls.note_corrupt(corrupt)
        if self.calls.capabilities.deletes:  # first, or it could hit what is saved in their stead
            with suppress(StoreError):  # it is counted and logged
                for bad_keys in _batched(tuple(corrupt), self.calls.capabilities.max_keys):
                    yield from self.calls.delete(bad_keys)
        self._done(order)

    def _most_blocks(self) -> int:
        return min(self.calls.capabilities.max_keys, self._staging.max_blocks)

    def _cancel(self, order: LoadBlocks) -> None:
        for future in self._loads.get(order, ()):
            try:
                future.cancel()
            except BaseException as error:
                self.calls.note("load", error)

    def _load_some(self, order: LoadBlocks, run: BlockRun) -> Job[tuple[list[bool], list[bytes]]]:
        """Per block whether it is right; and keys of those that are there, but wrong."""
        headers = [memoryview(bytearray(HEADER_BYTES)) for _ in run.keys]
        batch = yield from _borrow(lambda: self._staging.lend(run.group, run.blocks))
        futures = self._loads.setdefault(order, set())
        try:
            targets = [[h, *pieces] for h, pieces in zip(headers, batch.pieces, strict=True)]
            there = yield from self.calls.load(
                run.keys, targets, begun=futures.add, cancelled=lambda: order.cancelled
            )
            batch.write_back()
            yield batch.ready
        finally:
            batch.release()
        if order.cancelled or not any(there):
            return [False] * len(run.keys), []
        form = self.forms[run.group]
        start, end = (form.block_size * (run.first + i) for i in (0, len(run.blocks)))
        ranges = [BlockRange(run.group, run.blocks, start, start, end)]
        pending = self._executor.digest(ranges, keep=True)
        yield pending.ready
        (sums,) = pending.result()
        if self.calls.capabilities.synthetic:
            return there, []
        right, bad = [], []
        values = form.digests(sums)
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
        self._storing.update(save.key for save in order.saves)
        for group, saves in itertools.groupby(sorted(order.saves), key=lambda save: save.group):
            for some in _batched(tuple(saves), self._most_blocks()):
                try:
                    some = yield from self._unsaved(some, order, stored)
                    if some:
                        answers = yield from self._save_some(group, some)
                        stored |= dict(zip((save.key for save in some), answers, strict=True))
                except Exception as error:
                    order.error = self._told("a save", error)
        order.stored = [stored.get(save.key, False) for save in order.saves]
        order.seconds = time.monotonic() - began
        self._done(order)
        self._storing.difference_update(save.key for save in order.saves)
        self._tell_forgotten()

    def _unsaved(
        self, saves: tuple[BlockSave, ...], order: SaveBlocks, stored: dict[bytes, bool]
    ) -> Job[tuple[BlockSave, ...]]:
        """Those that nobody else has saved to a shared store, nor is about to."""
        keys, able = [save.key for save in saves], self.calls.capabilities
        if able.claims:
            wanted = yield from self.calls.claim(keys)
        elif able.shared:
            found = yield from self.calls.lookup(keys)
            wanted = [not there for there in found.present]
            stored |= {key: True for key, there in zip(keys, found.present, strict=True) if there}
        else:
            return saves
        order.left.update(key for key, ours in zip(keys, wanted, strict=True) if not ours)
        return tuple(save for save, ours in zip(saves, wanted, strict=True) if ours)

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
                    again = self._executor.digest([BlockRange(group, held, start, start, end)])
                    sums.append(again.then(lambda found: found[0]))
            yield lambda: batch.ready() and all(found.ready() for found in sums)
            values = [value for found in sums for value in form.digests(found.result())]
            keys = [save.key for save in saves]
            sources = [
                [memoryview(form.header(self.identity, key).pack(value)), *pieces]
                for key, value, pieces in zip(keys, values, batch.pieces, strict=True)
            ]
            return (yield from self.calls.store(keys, sources, [save.hints for save in saves]))
        finally:
            batch.release()

    # --- what is forgotten ---

    def _forget(self, keys: Sequence[bytes]) -> None:
        """The store tells that objects are gone, in any thread.

        Raises:
            TypeError: what it tells are no keys; it comes where the store has called.
        """
        gone = [bytes(memoryview(key)) for key in keys]
        self._forgotten.extend(gone)
        if not self._telling:
            self._telling = True
            self._loop.post(self._tell_forgotten)

    def _tell_forgotten(self) -> None:
        """That an object is gone is told after it was told that it is there."""
        self._telling = False  # before the look: what comes after that posts another one
        keys = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        gone = tuple(key for key in keys if key not in self._storing)
        self._forgotten.extend(key for key in keys if key in self._storing)
        if gone:
            self._done(Forgotten(keys=gone))

    def _clear(self, order: ClearStore) -> Job[None]:
        try:
            order.done.set_result((yield from self.calls.clear(self.namespace)))
        except StoreError as error:
            order.done.set_exception(error)
        self._done(order)


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
        if last and last.summed == save.summed and (save.summed or last.number + 1 == save.number):
            runs[-1].append(save)
        else:
            runs.append([save])
    return runs


def _batched(items: tuple[T, ...], size: int) -> list[tuple[T, ...]]:
    return [items[start : start + size] for start in range(0, len(items), size)]

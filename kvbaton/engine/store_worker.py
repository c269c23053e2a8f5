"""The thread that makes all calls on the store, and verifies what is loaded.

The core submits an order (`LookUp`, `LoadBlocks`, `SaveBlocks`), the thread carries it out as a job
(`store_calls.py`), fills in the result and gives the order back. The thread decides nothing:
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
"""Seconds to register memory with the store: pinning some gigabytes takes about a second."""
CLOSE_S = 3.0
"""Seconds to close the store; one that takes longer is left behind."""
NAMESPACE_DIGITS = 16
PROBE_BYTES = 8 << 20
"""Maximum number of bytes that a probe loads, beyond one object."""


class BlockRun(NamedTuple):
    """Consecutive blocks of one sequence in one group.

    Attributes:
        group: KV group.
        first: Number of the first block, as in spans. In a look-up, a run of states may be several
            runs in spans; this is the first block's number.
        blocks: Physical blocks.
        keys: Keys of the blocks' objects.
    """

    group: int
    first: int
    blocks: tuple[int, ...]
    keys: tuple[bytes, ...]


class BlockSave(NamedTuple):
    """One block to save.

    Attributes:
        group: KV group.
        number: Logical number, as in spans.
        block: Physical block.
        key: Key of the object.
        summed: Whether the step that wrote the block kept digest sums; else they are computed.
        hints: Hints for the store.
    """

    group: int
    number: int
    block: int
    key: bytes
    summed: bool
    hints: Hints


@dataclass(eq=False, kw_only=True)
class Order:
    """A task for the thread, and its result.

    Attributes:
        deadline: Time after which the core no longer waits for it.
        seconds: How long it took.
        error: Why at least part of it failed; None if nothing did.
    """

    deadline: float = math.inf
    seconds: float = 0.0
    error: str | None = None


@dataclass(eq=False, kw_only=True)
class LookUp(Order):
    """Look up which objects the store has, and pin them; after an error, nothing is known.

    `present` is per block of all runs. After a gap in a run of which only a prefix is of use,
    objects may be reported absent although they exist.
    """

    runs: tuple[BlockRun, ...]
    present: list[bool] = field(default_factory=list)
    pins: list[int] = field(default_factory=list)


@dataclass(eq=False, kw_only=True)
class LoadBlocks(Order):
    """Fill blocks and verify them. Once the order is back, the store does not write them any more.

    Attributes:
        runs: Blocks to fill.
        cancelled: Whether the result is no longer wanted.
        good: Per block of all runs, whether it was loaded and verified.
        corrupt: Number of blocks that were loaded but failed verification.
        unanswered: Number of blocks for which the store did not say whether it has them.
    """

    runs: tuple[BlockRun, ...]
    cancelled: bool = False
    good: list[bool] = field(default_factory=list)
    corrupt: int = 0
    unanswered: int = 0


@dataclass(eq=False, kw_only=True)
class ProbeStore(Order):
    """Look objects up, and load a few into scratch memory, to see whether calls work again.

    Attributes:
        runs: Objects to look up; `blocks` are ignored. `seconds` is the time of the lookups.
    """

    runs: tuple[BlockRun, ...]


@dataclass(eq=False, kw_only=True)
class SaveBlocks(Order):
    """Save blocks.

    Attributes:
        saves: Blocks to save.
        stored: Per block, whether the store has it.
        left: Keys of blocks not moved, since others have saved them or are about to.
    """

    saves: tuple[BlockSave, ...]
    stored: list[bool] = field(default_factory=list)
    left: set[bytes] = field(default_factory=set)


@dataclass(eq=False, kw_only=True)
class Forgotten:
    """Notice that objects left the store; it answers no order."""

    keys: tuple[bytes, ...]


@dataclass(eq=False, kw_only=True)
class ClearStore(Order):
    """Delete all objects of this engine's namespace; `done` gets how many there were."""

    done: Future[int]


class StoreWorker:
    """Carries orders out.

    Args:
        calls: Calls of a store that is not open yet; from now on, only the thread may use it.
        executor: Owner of the blocks.
        forms: Forms of objects, one per KV group.
        identity: Identity of the engine, 32 bytes.

    Attributes:
        namespace: Namespace of the engine's objects, see `Hints`.
        wake_fd: Readable when `take` has something to return.
        failure: Why the thread has ended unasked; None while it runs.
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
        """Open the store and start the thread.

        Raises:
            ConfigError: The store can't be opened.
        """
        self._opened, self._ready = Future[None](), Future[None]()
        self._thread.start()
        for step, limit in ((self._opened, OPEN_S), (self._ready, REGISTER_S)):
            try:
                step.result(limit)
            except ConfigError as error:
                raise as_told("--store", self.name, error) from None
            except BaseException as error:
                if not step.done():  # else the TimeoutError is the store's own
                    text = f"{self.name} was not open within {limit:g} s"
                    raise ConfigError("--store", text) from error
                told = "" if isinstance(error, StoreError) else f"{type(error).__name__}: "
                text = f"can't open {self.name}: {told}{error}"
                shown = as_written(text)
                raise ConfigError("--store", shown) from (error if shown == text else None)
        self.status.start()

    def submit(self, order: Order) -> None:
        """Have an order carried out; `take` returns it afterwards."""
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
        """Cancel a load; the order comes back all the same."""
        order.cancelled = True
        self._loop.post(lambda: self._cancel(order))

    def release(self, pins: Sequence[int]) -> None:
        """Release pins of a lookup."""
        for pin in pins:
            self._loop.post(partial(self.calls.release, pin))

    def take(self) -> list[Order | Forgotten]:
        """Orders carried out, and objects forgotten, since the last call."""
        try:
            os.eventfd_read(self.wake_fd)
        except BlockingIOError:
            return []
        return [self._outbox.popleft() for _ in range(len(self._outbox))]

    def gauges(self) -> dict[str, float]:
        """Current values by Prometheus name; without those that the store can't tell."""
        self.status.refresh()
        unhealthy = self.failure is not None or self.status.trouble is not None
        label = f'{{store="{self.name}"}}'
        return {f"kvbaton_store_unhealthy{label}": float(unhealthy), **self.status.gauges()}

    def state(self) -> dict[str, Any]:
        """Contents of the debugging dump."""
        return {
            "name": self.name,
            "failure": self.failure,
            "health": self.status.trouble,
            "errors": self.calls.errors,
            "jobs": self._loop.num_jobs,
        }

    def close(self) -> None:
        """End all jobs and close the store; a store that hangs is left behind."""
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
        """Staging memory of blocks, which is registered with the store here."""
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
        """Text of an error, which is logged here unless it comes from the store."""
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
        """Keys to look up together, and whether results after a gap are of no use."""
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
        if self.calls.capabilities.deletes:  # before the blocks can be saved again
            with suppress(StoreError):  # already counted and logged
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
        """Per block, whether it is verified; and keys of loaded blocks that are wrong."""
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
        """Blocks that no other node has saved to a shared store, or is about to save."""
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
        """Take the store's notice that objects are gone; in any thread.

        Raises:
            TypeError: The keys are not bytes; raised to the store, which has called.
        """
        gone = [bytes(memoryview(key)) for key in keys]
        self._forgotten.extend(gone)
        if not self._telling:
            self._telling = True
            self._loop.post(self._tell_forgotten)

    def _tell_forgotten(self) -> None:
        """Report that objects are gone, but only after it was reported that they exist."""
        self._telling = False  # first: a notice that comes later has to post another call
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
    """Wait until staging memory is free."""
    lent: list[StagedBlocks | None] = [None]

    def is_lent() -> bool:
        lent[0] = lend()
        return lent[0] is not None

    while lent[0] is None:
        yield is_lent
    return lent[0]


def _runs(saves: Sequence[BlockSave]) -> list[list[BlockSave]]:
    """Split saves into runs that are summed alike; runs without kept sums must be consecutive.

    `number` and `key` do not name the sequence, so blocks with consecutive numbers may belong to
    different ones. That is harmless: the sums depend only on the tokens' positions.
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

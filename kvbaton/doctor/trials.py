"""What the doctor tries: a transport between two processes, and a store.

Each is loaded, used, verified and timed step by step, by the workers and the loops that the
conformance kit and the benchmarks use, too; the first step that fails is told.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from statistics import median
from typing import TypeVar

import numpy as np
from msgspec import Struct

from kvbaton.connectors.base import Device, Ranges
from kvbaton.connectors.registry import load_store, load_transport
from kvbaton.connectors.store import KEY_BYTES
from kvbaton.errors import StoreError, TransportError
from kvbaton.testing.kit import CaseFailure, KitBroke
from kvbaton.testing.remote import start_worker
from kvbaton.testing.remote_worker import QUIET
from kvbaton.testing.transport_rig import Buffer, fresh_name, timed_write

NUM_BYTES = 64 << 20
RUN_BYTES = 64 << 10
"""Of one block in the test pattern; every second block goes to another place."""
SMALL_BYTES = 4 << 10
REPEATS = 5
OBJECT_BYTES = 1 << 20
NUM_OBJECTS = 32
STEP_S = 30.0

T = TypeVar("T")


class ConnectorTrial(Struct, kw_only=True):
    """How far a connector came.

    Attributes:
        failed_at: the step that failed; None if all went well.
        error: why.
    """

    failed_at: str | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether every step went well."""
        return self.failed_at is None

    def take(self, names: Sequence[str], steps: Generator[None]) -> None:
        """Take named steps up to the first that fails; never raises for what a connector does."""
        try:
            with closing(steps):
                for name in names:
                    self.failed_at = name
                    next(steps)
                self.failed_at = None
        # Of the remote process: no errors of ours by type.
        except (CaseFailure, KitBroke) as failure:
            self.error = str(failure)
        except (Exception, SystemExit) as error:
            self.error = f"{type(error).__name__}: {error}"


# --- a transport ---


class TransportTrial(ConnectorTrial, kw_only=True):
    """How a transport did.

    Attributes:
        transport: its name.
        device: of the memory at both ends.
        gib_per_s: of 64 KiB runs, the best of a few writes of 64 MiB.
        small_us: of one write of 4 KiB until it is known to have landed, in microseconds.
        host_staged: whether these bytes passed through memory of the host on their way.
    """

    transport: str
    device: str
    gib_per_s: float = 0.0
    small_us: float = 0.0
    host_staged: bool = False


def try_transport(spec: str, device: Device) -> TransportTrial:
    """Move bytes of a device into another process."""
    trial = TransportTrial(transport=spec.partition(":")[0], device=device)
    names = ("load", "register", "connect", "move", "verify", "time")
    trial.take(names, _transport_steps(spec, device, trial))
    return trial


def _transport_steps(spec: str, device: Device, trial: TransportTrial) -> Generator[None]:
    """Does a step, then yields."""
    with ExitStack() as ending:
        near = load_transport(spec, name=fresh_name())
        ending.callback(near.shutdown)
        yield
        ours = Buffer(device, NUM_BYTES, None)  # a transport need not keep it alive
        near.register(ours.memory)
        trial.host_staged = device in near.capabilities.host_staged
        yield
        poll: Callable[[], object] | None = None  # of a far side within this process
        if near.capabilities.processes:
            remote = start_worker("transport", spec, NUM_BYTES, device, patience=STEP_S)
            ending.enter_context(remote)
            card = remote.card()
        else:
            far, buffer = load_transport(spec, name=fresh_name()), Buffer(device, NUM_BYTES, 0)
            ending.callback(far.shutdown)
            far.register(buffer.memory)
            card, poll = far.card(), far.notices
        peer = near.connect(card)
        yield

        def seconds(ranges: Ranges, notice: bytes) -> float:
            return timed_write(near, peer, ranges, notice, poll=poll, patience=STEP_S)

        count = NUM_BYTES // RUN_BYTES
        large = np.zeros((count, 8), np.int64)
        large[:, 1] = np.arange(count) * RUN_BYTES
        large[:, 3] = (np.arange(count) ^ 1) * RUN_BYTES  # each run swapped with its neighbour
        large[:, 4], large[:, 5] = RUN_BYTES, 1
        seconds(large, b"check")
        yield
        local = not near.capabilities.processes
        found = buffer.digest() if local else remote.line("notice", idle=near.notices)[-1]
        wanted = Buffer("cpu", NUM_BYTES, None)
        pairs = np.asarray(wanted.memory.owner).reshape(-1, 2, RUN_BYTES)
        pairs[:] = pairs[:, ::-1].copy()
        if found != wanted.digest():
            raise TransportError(f"the far side holds {found}, but {wanted.digest()} was sent")
        yield
        small = np.array([[0, 0, 0, 0, SMALL_BYTES, 1, 0, 0]], np.int64)
        best = min(seconds(large, QUIET) for _ in range(REPEATS))
        trial.gib_per_s = NUM_BYTES / best / 2**30
        trial.small_us = 1e6 * median(seconds(small, QUIET) for _ in range(10 * REPEATS))
        yield


def copy_rate() -> float:
    """GiB/s of a plain copy in memory, to compare with."""
    source, target = np.ones(NUM_BYTES, np.uint8), np.zeros(NUM_BYTES, np.uint8)
    each = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        np.copyto(target, source)
        each.append(time.perf_counter() - start)
    return NUM_BYTES / min(each) / 2**30


# --- a store ---


class StoreTrial(ConnectorTrial, kw_only=True):
    """How a store did.

    Attributes:
        store: its name.
        store_gib_per_s: of 32 objects of 1 MiB in one call.
        load_gib_per_s: of the same, just stored.
        lookup_us: of one lookup of the 32 keys, in microseconds.
        warnings: what the store, or one of its tiers, works without.
    """

    store: str
    store_gib_per_s: float = 0.0
    load_gib_per_s: float = 0.0
    lookup_us: float = 0.0
    warnings: list[str] = []


def try_store(spec: str) -> StoreTrial:
    """Fill a store, read back what it keeps, and empty it."""
    trial = StoreTrial(store=spec.partition(":")[0])
    trial.take(("load", "open", "store", "lookup", "verify", "delete"), _store_steps(spec, trial))
    return trial


def _store_steps(spec: str, trial: StoreTrial) -> Generator[None]:
    """Does a step, then yields."""
    store = load_store(spec)
    yield
    store.open()
    with closing(store):
        yield
        keys = [os.urandom(KEY_BYTES) for _ in range(NUM_OBJECTS)]
        sent = np.random.default_rng(1).integers(0, 256, (NUM_OBJECTS, OBJECT_BYTES), np.uint8)
        kept, seconds = _answer(lambda: store.store(keys, [[memoryview(row)] for row in sent]))
        trial.store_gib_per_s = sent.nbytes / seconds / 2**30
        if not all(kept):
            raise StoreError(f"it has room for {sum(kept)} of {NUM_OBJECTS} objects of 1 MiB")
        yield
        found, seconds = _answer(lambda: store.lookup(keys))
        trial.lookup_us = 1e6 * seconds
        if not all(found.present):
            raise StoreError(f"it finds {sum(found.present)} of {NUM_OBJECTS} objects it keeps")
        yield
        came = np.zeros_like(sent)
        loaded, seconds = _answer(lambda: store.load(keys, [[memoryview(row)] for row in came]))
        trial.load_gib_per_s = sent.nbytes / seconds / 2**30
        if not all(loaded):
            raise StoreError(f"it gives {sum(loaded)} of {NUM_OBJECTS} objects it keeps")
        if wrong := int((came != sent).any(axis=1).sum()):
            raise StoreError(f"{wrong} of {NUM_OBJECTS} objects came back with other bytes")
        yield
        if store.capabilities.deletes:
            _answer(lambda: store.delete(keys))
        outages: dict[str, str] = getattr(store, "outages", dict)()
        reasons = [f"{tier} is passed over: {why}" for tier, why in outages.items()]
        if (health := store.health()) is not None:
            reasons.append(health)
        trial.warnings = [f"{trial.store}: {reason}" for reason in reasons]
        yield


def _answer(call: Callable[[], Future[T]]) -> tuple[T, float]:
    """What a store answers, and after how many seconds."""
    began = time.perf_counter()
    try:
        return call().result(STEP_S), time.perf_counter() - began
    except TimeoutError as error:
        raise StoreError(f"no answer within {STEP_S:g} s") from error

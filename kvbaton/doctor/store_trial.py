"""One store: loaded, opened, filled, asked, read back, verified, timed and emptied."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct

from kvbaton.connectors.registry import load_store
from kvbaton.connectors.store import KEY_BYTES, Pieces, Store
from kvbaton.errors import KvbatonError, StoreError

T = TypeVar("T")
OBJECT_BYTES = 1 << 20
NUM_OBJECTS = 32
STEP_S = 30.0
STEPS = ("load", "open", "store", "lookup", "verify", "delete")


class StoreTrial(Struct, kw_only=True):
    """How a store did.

    Attributes:
        store: its name.
        failed_at: the step of `STEPS` that failed; None if all went well.
        error: why.
        store_gib_per_s: of 32 objects of 1 MiB in one call.
        load_gib_per_s: of the same, just stored.
        lookup_us: of one lookup of the 32 keys, in microseconds.
        warnings: what the store says of itself.
    """

    store: str
    failed_at: str | None = None
    error: str = ""
    store_gib_per_s: float = 0.0
    load_gib_per_s: float = 0.0
    lookup_us: float = 0.0
    warnings: list[str] = []

    @property
    def ok(self) -> bool:
        """Whether every step went well."""
        return self.failed_at is None


def try_store(spec: str) -> StoreTrial:
    """Run all steps; never raises for what a store does."""
    trial = StoreTrial(store=spec.partition(":")[0])
    steps = iter(STEPS)
    trial.failed_at = next(steps)
    try:
        for _ in _steps(spec, trial):
            trial.failed_at = next(steps, None)
    except (KvbatonError, OSError, RuntimeError, ValueError, ImportError) as error:
        trial.error = f"{type(error).__name__}: {error}"
    return trial


def _steps(spec: str, trial: StoreTrial) -> Iterator[None]:
    """Does a step, then yields."""
    store = load_store(spec)
    yield
    store.open()
    try:
        yield
        keys = [os.urandom(KEY_BYTES) for _ in range(NUM_OBJECTS)]
        sent = np.random.default_rng(1).integers(0, 256, (NUM_OBJECTS, OBJECT_BYTES), np.uint8)
        kept, trial.store_gib_per_s = _moved(lambda: store.store(keys, _pieces(sent)))
        if not all(kept):
            raise StoreError(f"it has room for {sum(kept)} of {NUM_OBJECTS} objects of 1 MiB")
        yield
        began = time.perf_counter()
        found = _wait(store.lookup(keys))
        trial.lookup_us = 1e6 * (time.perf_counter() - began)
        if not all(found.present):
            raise StoreError(f"it finds {sum(found.present)} of {NUM_OBJECTS} objects it keeps")
        yield
        trial.load_gib_per_s = _verified(store, keys, sent)
        yield
        if store.capabilities.deletes:
            _wait(store.delete(keys))
        trial.warnings = _warnings(trial.store, store)
        yield
    finally:
        store.close()


def _verified(store: Store, keys: list[bytes], sent: np.ndarray[Any, Any]) -> float:
    """Read everything back; returns GiB/s.

    Raises:
        StoreError: an object is missing or has other bytes.
    """
    came = np.zeros_like(sent)
    answers, rate = _moved(lambda: store.load(keys, _pieces(came)))
    if not all(answers):
        raise StoreError(f"it gives {sum(answers)} of {NUM_OBJECTS} objects it keeps")
    if wrong := int((came != sent).any(axis=1).sum()):
        raise StoreError(f"{wrong} of {NUM_OBJECTS} objects came back with other bytes")
    return rate


def _moved(call: Callable[[], Future[T]]) -> tuple[T, float]:
    began = time.perf_counter()
    answer = _wait(call())
    return answer, NUM_OBJECTS * OBJECT_BYTES / (time.perf_counter() - began) / 2**30


def _wait(future: Future[T]) -> T:
    try:
        return future.result(STEP_S)
    except TimeoutError as error:
        raise StoreError(f"no answer within {STEP_S:g} s") from error


def _pieces(array: np.ndarray[Any, Any]) -> list[Pieces]:
    return [[memoryview(row)] for row in array]


def _warnings(name: str, store: Store) -> list[str]:
    """What it works without: itself, or one of its tiers."""
    outages: dict[str, str] = getattr(store, "outages", dict)()
    reasons = [f"{tier} is passed over: {why}" for tier, why in outages.items()]
    if (health := store.health()) is not None:
        reasons.append(health)
    return [f"{name}: {reason}" for reason in reasons]

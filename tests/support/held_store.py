"""A store over a dictionary that a test controls: it can hold, fail and damage it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kvbaton.connectors.store import Pieces, StoreCapabilities, Usage
from kvbaton.connectors.stores.threaded import ThreadedStore
from kvbaton.errors import StoreError
from tests.support.waiting import PATIENCE_S

HOLD_S = 2 * PATIENCE_S


class Box:
    """Content of a `HeldStore`, and its faults.

    Attributes:
        spec: Spec of a store over this box.
        objects: Objects by key.
        calls: Number of objects by kind of call: ``lookup``, ``load``, ``store``, ``delete``.
        failing: Kinds of calls that raise.
        lost: Keys that a lookup finds and a load misses.
    """

    def __init__(self, name: str) -> None:
        self.spec = f'{__name__}:HeldStore:{{"box": "{name}"}}'
        self.objects: dict[bytes, bytes] = {}
        self.calls: Counter[str] = Counter()
        self.failing: set[str] = set()
        self.lost: set[bytes] = set()
        self.room = True
        self._gates = {kind: threading.Event() for kind in ("lookup", "load", "store", "delete")}
        self._waiting: Counter[str] = Counter()
        self._lock = threading.Lock()
        for gate in self._gates.values():
            gate.set()

    @contextmanager
    def held(self, kind: str) -> Iterator[None]:
        """Hold calls of a kind until the end of the block."""
        self._gates[kind].clear()
        try:
            yield
        finally:
            self._gates[kind].set()

    def is_waiting(self, kind: str) -> bool:
        """Whether a call is being held."""
        return self._waiting[kind] > 0

    def enter(self, kind: str, count: int = 1) -> None:
        """Count a call, wait while it is held, and fail if it has to; all calls use this."""
        with self._lock:
            self.calls[kind] += count
            self._waiting[kind] += 1
        if kind in self._gates:
            self._gates[kind].wait(HOLD_S)
        with self._lock:
            self._waiting[kind] -= 1
        if kind in self.failing:
            raise StoreError(f"{kind} fails, as told")

    def corrupt(self, keys: Sequence[bytes], place: int = -1) -> None:
        """Change one byte of objects."""
        for key in keys:
            data = bytearray(self.objects[key])
            data[place] ^= 0x10
            self.objects[key] = bytes(data)


BOXES: dict[str, Box] = {}
"""Boxes by name, so that a node's spec can refer to one."""


class Backend:
    """As `connectors.stores.threaded.Backend`, over a box."""

    capabilities = StoreCapabilities(persistent=True, shared=True, pins=False, max_keys=16)

    def __init__(self, box: Box, *, shared: bool = True) -> None:
        self.box = box
        self.capabilities = replace(self.capabilities, shared=shared)

    def open(self) -> None:
        """Nothing to do."""

    def health(self) -> str | None:
        """Always healthy."""
        return None

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self.box.enter("lookup", len(keys))
        return [key in self.box.objects for key in keys]

    def get(self, key: bytes, target: Pieces) -> bool:
        self.box.enter("load")
        data = self.box.objects.get(key)
        if data is None or key in self.box.lost or len(data) != sum(map(len, target)):
            return False
        at = 0
        for piece in target:
            piece[:] = data[at : at + len(piece)]
            at += len(piece)
        return True

    def put(self, key: bytes, source: Pieces) -> bool:
        self.box.enter("store")
        if self.box.room:
            self.box.objects[key] = b"".join(source)
        return self.box.room

    def remove(self, keys: Sequence[bytes]) -> int:
        self.box.enter("delete", len(keys))
        return sum(self.box.objects.pop(key, None) is not None for key in keys)

    def usage(self) -> Usage:
        """Usage of the box."""
        return Usage(len(self.box.objects), sum(map(len, self.box.objects.values())))

    def close(self) -> None:
        """The box stays."""


class HeldStore(ThreadedStore):
    """A box as a store."""

    def __init__(self, name: str, *, box: str, threads: int = 4, shared: bool = True) -> None:
        super().__init__(name, Backend(BOXES[box], shared=shared), threads=threads)

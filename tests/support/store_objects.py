"""Objects for tests of stores."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from kvbaton.connectors.store import KEY_BYTES, Found, Pieces, Store
from kvbaton.connectors.stores.memory import MemoryStore

T = TypeVar("T")
WAIT_S = 60.0


def make_objects(count: int, num_bytes: int = 1_001, seed: int = 0) -> dict[bytes, bytes]:
    draw = random.Random(seed)
    return {draw.randbytes(KEY_BYTES): draw.randbytes(num_bytes) for _ in range(count)}


def pieces(data: bytes) -> Pieces:
    """Bytes as writable memory in three pieces."""
    whole = memoryview(bytearray(data))
    third = len(whole) // 3
    return [whole[:third], whole[third : third + 1], whole[third + 1 :]]


def wait(future: Future[T]) -> T:
    return future.result(WAIT_S)


def save(store: Store, objects: dict[bytes, bytes]) -> list[bool]:
    return wait(store.store(list(objects), [pieces(data) for data in objects.values()]))


def read(store: Store, objects: dict[bytes, bytes]) -> list[bytes | None]:
    """Loaded objects; None for a miss."""
    targets = [pieces(bytes(len(data))) for data in objects.values()]
    answers = wait(store.load(list(objects), targets))
    return [b"".join(t) if ok else None for t, ok in zip(targets, answers, strict=True)]


def find(store: Store, keys: Sequence[bytes], **options: Any) -> Found:
    return wait(store.lookup(list(keys), **options))


class HeldStore(MemoryStore):
    """Reads at once, but completes loads only when the gate is open."""

    gate = threading.Event()

    def load(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> Future[list[bool]]:
        answers = wait(super().load(keys, targets))
        held: Future[list[bool]] = Future()
        held.set_running_or_notify_cancel()

        def pass_on() -> None:
            self.gate.wait(WAIT_S)
            held.set_result(answers)

        threading.Thread(target=pass_on).start()
        return held

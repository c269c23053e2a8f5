"""The rig of store cases: the store under test, fresh keys, and calls in one line."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np

from kvbaton.connectors.base import Memory
from kvbaton.connectors.registry import load_store
from kvbaton.connectors.store import (
    AnyPieces,
    Forgetting,
    Found,
    Piece,
    Pieces,
    Registering,
    Store,
    Usage,
)
from kvbaton.errors import StoreError
from kvbaton.testing.kit import (
    SLOWER,
    Answers,
    CaseFailure,
    Kit,
    checked,
    kind,
    require,
    require_answer,
)

T = TypeVar("T")
STORE_KIT = Kit["StoreRig"]()
case = STORE_KIT.case

SMALL_CAPACITY = 128 << 20
"""Maximum capacity in bytes of stores that the kit fills up."""
MANY_BYTES = 1 << 20
"""Minimum bytes of a store call for its pace to be measured."""
MIN_CAPACITY = 16_000_000
"""Minimum capacity in bytes, for the objects that cases keep at a time."""
MIN_KEYS = 4
"""Minimum of `max_keys`: cases pass at least as many keys in one call."""


_PER_KEY = {"lookup": Found, "load": list, "store": list, "claim": list}
_RESULTS = _PER_KEY | {"delete": int, "clear": int, "namespaces": dict}
"""Types of the results of these methods' futures."""
_ASKED = WeakKeyDictionary[Any, tuple[str, int]]()
"""The method that returned each future, and the number of keys of the call."""


def _is_future(name: str) -> Callable[..., bool]:
    def is_one(answer: Any, keys: Sequence[bytes] = (), *_: object) -> bool:
        if isinstance(answer, Future):
            _ASKED[answer] = name, len(keys)
        return isinstance(answer, Future)

    return is_one


def require_result(name: str, answer: object, num_keys: int) -> None:
    """Raise `CaseFailure` unless the result of a method's future has the right type and length."""
    wanted = _RESULTS[name]
    right, what = isinstance(answer, wanted) and type(answer) is not bool, wanted.__name__
    if name in _PER_KEY:
        what += f" with a bool for each of {num_keys} keys"
        flags: Any = answer.present if isinstance(answer, Found) else answer
        listed = isinstance(flags, tuple if wanted is Found else list)
        right = right and listed and [*map(type, flags)] == [bool] * num_keys
    require_answer(name, answer, f"of type {what}", right)


_FUTURE = "a concurrent.futures.Future"
ANSWERS: Answers = {name: (_FUTURE, _is_future(name)) for name in _RESULTS} | {
    "usage": ("a Usage", kind(Usage)),
    "health": ("a text or None", kind(str, type(None))),
}
"""Expected results of a store's methods."""


class BackDoor(Protocol):
    """Access to a store's objects past the store, to catch one that only agrees with itself.

    Its class is called with the opened store. It may lack any of these methods; cases that need
    them are then skipped.
    """

    def get(self, key: bytes) -> bytes | None:
        """The bytes of an object as the back end holds them, or None."""

    def put(self, key: bytes, data: bytes) -> None:
        """Write an object to the back end, as the store would."""

    def cut(self, key: bytes, num_bytes: int) -> None:
        """Truncate an object in the back end to its first bytes."""

    def spoil(self, key: bytes) -> None:
        """Change one byte of an object in the back end, if the store detects that."""

    def fail(self, failing: bool) -> None:
        """Make all accesses of the store to its back end fail, or end that."""


_folders: set[tempfile.TemporaryDirectory[str]] = set()
"""Temporary folders of all open rigs."""


def remove_folders() -> None:
    """Remove the folders of open rigs, before a process with a hung case exits without clean-up."""
    for folder in tuple(_folders):
        shutil.rmtree(folder.name, ignore_errors=True)


class StoreRig:
    """One opened store with a folder of its own.

    Args:
        spec: Spec of the store; ``{tmp}`` in it becomes the folder.
        back_door: Makes a back door from the opened store; None if there is none.
        seed: Seed of `random`.
        depth: Factor on the number of examples and repetitions, and on durations.
        patience: Seconds to wait for each answer.

    Attributes:
        folder: The folder that replaces ``{tmp}`` in the spec.
        spec: The spec with the folder filled in, which opens the same store again.
        store: The opened store, named ``kit``.
    """

    def __init__(
        self,
        spec: str,
        *,
        back_door: Callable[[Any], BackDoor] | None = None,
        seed: int = 0,
        depth: int = 1,
        patience: float = 20.0,
    ) -> None:
        self.spec, self.depth, self.patience = spec, depth, patience
        self._back_door = back_door
        self.random = np.random.default_rng(seed)
        self._nonce = os.urandom(16)
        self._numbers = itertools.count()
        self._opened: list[Store] = []
        self._seconds_per_byte = 0.0
        """Slowest pace of a store call in this case."""

    def __enter__(self) -> Self:
        self._temporary = tempfile.TemporaryDirectory(prefix="kvbaton-kit-")
        _folders.add(self._temporary)
        self.folder = Path(self._temporary.name)
        self.spec = self.spec.replace("{tmp}", str(self.folder))
        try:
            self.store = self.open("kit")
        except BaseException:
            self._clean_up()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        raised: list[BaseException] = []
        while self._opened:
            try:
                self._opened.pop().close()
            except BaseException as error:
                raised.append(error)
        self._clean_up()
        if raised and exception == (None, None, None):
            raise CaseFailure(f"close raised {raised[0]!r}") from raised[0]

    def _clean_up(self) -> None:
        _folders.discard(self._temporary)
        self._temporary.cleanup()

    def make(self, name: str = "kit") -> Store:
        """Another instance of the store, not opened."""
        return checked(load_store(self.spec, name=name), ANSWERS)

    def open(self, name: str = "kit") -> Store:
        """Another opened instance of the store; closed at the end of the case."""
        store = self.make(name)
        store.open()
        self._opened.append(store)
        return store

    def close(self, store: Store) -> None:
        """Close one of the opened instances now."""
        store.close()
        self._opened = [other for other in self._opened if other is not store]

    def reopen(self) -> None:
        """Close the store and open it again, so that its objects come from its back end."""
        self.close(self.store)
        self.store = self.open()

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Context in which another process uses the store; closes it here unless it is `shared`."""
        if self.store.capabilities.shared:
            yield
            return
        self.close(self.store)
        yield
        self.store = self.open()

    def lacks(self, need: str) -> str | None:
        """See `Rig.lacks`.

        A need is a capability, ``door.METHOD``, ``small``, ``registers``, ``forgets`` or
        ``hypothesis``.
        """
        if need == "hypothesis":
            ready = find_spec("hypothesis") is not None
            return None if ready else "hypothesis is missing: pip install 'kvbaton[testing]'"
        if need == "small":
            capacity = self.store.usage().capacity
            small = capacity is not None and capacity <= SMALL_CAPACITY
            wanted = f"{MIN_CAPACITY} to {SMALL_CAPACITY} bytes by its own option"
            return None if small else f"no small capacity (it is {capacity}; {wanted})"
        if need == "registers":
            return None if isinstance(self.store, Registering) else "not declared: register"
        if need == "forgets":
            return None if isinstance(self.store, Forgetting) else "not declared: on_forget"
        if need.startswith("door."):
            method = need.removeprefix("door.")
            missing = f"no back door (--back-door with a method {method})"
            return None if self._back_door and hasattr(self.door, method) else missing
        return None if getattr(self.store.capabilities, need) else f"not declared: {need}"

    @property
    def door(self) -> BackDoor:
        """The back door of the store, for cases that declare the need."""
        assert self._back_door is not None, "the case does not say that it needs a back door"
        return self._back_door(self.store)

    # --- keys and bytes ---

    def key(self) -> bytes:
        """A key that was never used."""
        number = next(self._numbers).to_bytes(8, "little")
        return hashlib.blake2b(self._nonce + number, digest_size=32).digest()

    def noise(self, num_bytes: int) -> bytes:
        """Random bytes."""
        return self.random.bytes(num_bytes)

    def at_once(self, keys: int) -> int:
        """`keys`, or the maximum number of keys of a call if that is less."""
        return min(keys, self.store.capabilities.max_keys)

    def calls(self, keys: Iterable[bytes]) -> Iterator[list[bytes]]:
        """Keys, split by the maximum number of keys of a call."""
        every = list(keys)
        for start in range(0, len(every), limit := self.store.capabilities.max_keys):
            yield every[start : start + limit]

    def objects(self, sizes: Iterable[int]) -> dict[bytes, bytes]:
        """Random objects of these sizes under fresh keys, not stored yet."""
        return {self.key(): self.noise(size) for size in sizes}

    def cut(self, data: bytearray | bytes, pieces: int) -> Pieces:
        """The same memory cut into `pieces` pieces of uneven lengths, some maybe empty."""
        inner = sorted(self.random.integers(0, len(data) + 1, pieces - 1).tolist())
        ends = [0, *inner, len(data)]
        view = memoryview(data)
        return [view[low:high] for low, high in itertools.pairwise(ends)]

    # --- calls ---

    def wait(self, future: Future[T], what: str, within: float | None = None) -> T:
        """Wait for a future's result; errors of the store pass through.

        Raises:
            CaseFailure: It is not done in time, or the result has a wrong type or length.
        """
        self.settle([future], what, within)
        answer = future.result()
        if (asked := _ASKED.get(future)) is not None:
            name, num_keys = asked
            require_result(name, answer, num_keys)
        return answer

    def settle(self, futures: Sequence[Future[T]], what: str, within: float | None = None) -> None:
        """Wait until all futures are done, with a result or not, for `within` or `patience`."""
        patience = within or self.patience
        deadline = time.monotonic() + patience
        for future in futures:
            # `futures.wait` does not treat a future as done after `cancel` alone.
            done = threading.Event()
            future.add_done_callback(lambda _, done=done: done.set())  # type: ignore[misc]
            in_time = done.wait(max(0.0, deadline - time.monotonic()))
            require(in_time, f"{what}: a future is not done after {patience:.3g} s")

    def ask_store(self, objects: Mapping[bytes, bytes], store: Store | None = None) -> list[bool]:
        """Store objects, in as many calls as necessary; returns the answers.

        The time limit is `patience`, or `SLOWER` times the time at the slowest pace so far if that
        is more.
        """
        answers = list[bool]()
        for keys in self.calls(objects):
            data = [objects[key] for key in keys]
            num_bytes, start = sum(map(len, data)), time.monotonic()
            within = max(self.patience, SLOWER * num_bytes * self._seconds_per_byte)
            kept = self.wait((store or self.store).store(keys, views(data)), "store", within)
            answers += kept
            if num_bytes >= MANY_BYTES:
                taken = (time.monotonic() - start) / num_bytes
                self._seconds_per_byte = max(self._seconds_per_byte, taken)
        return answers

    def put(self, objects: Mapping[bytes, bytes], store: Store | None = None) -> None:
        """Store objects; all must be stored."""
        answers = self.ask_store(objects, store)
        require(answers == [True] * len(objects), f"store of {len(objects)} objects said {answers}")

    def stored(self, sizes: Iterable[int], store: Store | None = None) -> dict[bytes, bytes]:
        """Random objects of these sizes, which are stored."""
        objects = self.objects(sizes)
        self.put(objects, store)
        return objects

    def get(self, key: bytes, num_bytes: int, store: Store | None = None) -> bytes | None:
        """Load an object; None for a miss."""
        target = bytearray(b"\xa5") * num_bytes
        answer = self.wait((store or self.store).load([key], [[memoryview(target)]]), "load")
        require(answer in ([True], [False]), f"load of one object said {answer!r}")
        return bytes(target) if answer[0] else None

    def load(self, objects: Mapping[bytes, bytes]) -> tuple[list[bool], list[bytearray]]:
        """Load objects in one call; returns the answers and the targets."""
        targets = targets_for(objects)
        return self.wait(self.store.load(list(objects), views(targets)), "load"), targets

    def every_call(self, objects: Mapping[bytes, bytes]) -> dict[str, Callable[[], Future[Any]]]:
        """Calls by name: they store, load, look up and delete all of the objects."""
        keys, targets = list(objects), views(targets_for(objects))
        return {
            "store": partial(self.store.store, keys, views(objects.values())),
            "load": partial(self.store.load, keys, targets),
            "lookup": partial(self.store.lookup, keys),
            "delete": partial(self.store.delete, keys),
        }

    def store_each(self, objects: Mapping[bytes, bytes]) -> list[Future[list[bool]]]:
        """Start to store each object in a call of its own; returns the futures."""
        return [self.store.store([key], views([data])) for key, data in objects.items()]

    def load_each(
        self, objects: Mapping[bytes, bytes]
    ) -> tuple[list[Future[list[bool]]], list[bytearray]]:
        """Start to load each object in a call of its own; returns the futures and the targets."""
        targets = targets_for(objects)
        pairs = zip(objects, views(targets), strict=True)
        return [self.store.load([key], [target]) for key, target in pairs], targets

    def drop(self, keys: Iterable[bytes], store: Store | None = None) -> None:
        """Delete objects, if the store can."""
        if self.lacks("deletes") is None:
            for some in self.calls(keys):
                self.wait((store or self.store).delete(some), "delete")

    def found(self, keys: Sequence[bytes], store: Store | None = None) -> tuple[bool, ...]:
        """Look keys up; per key, whether its object is there."""
        calls = map((store or self.store).lookup, self.calls(keys))
        return tuple(there for call in calls for there in self.wait(call, "lookup").present)

    def expect(self, objects: Mapping[bytes, bytes], when: str, store: Store | None = None) -> None:
        """Load objects; all must be there, byte for byte."""
        for key, data in objects.items():
            self.compare(self.get(key, len(data), store), data, when)

    def expect_in(self, target: AnyPieces, key: bytes, data: bytes, when: str) -> None:
        """Load an object into given pieces; it must be there, byte for byte."""
        loaded = self.wait(self.store.load([key], [cast(Pieces, target)]), "load")
        self.compare(b"".join(map(view_of, target)) if loaded[0] else None, data, when)

    def expect_whole(self, objects: Mapping[bytes, bytes], when: str) -> list[bytes]:
        """Load objects; each must be right or a miss. Returns the keys of those that are there."""
        there: list[bytes] = []
        for key, data in objects.items():
            if (found := self.get(key, len(data))) is not None:
                self.compare(found, data, when)
                there.append(key)
        return there

    def compare(self, found: bytes | None, data: bytes, when: str) -> None:
        """Raise `CaseFailure` unless both are equal; None is a miss."""
        if found is None:
            raise CaseFailure(f"{when}: an object of {len(data)} bytes is gone")
        if found != data:
            wrong = np.flatnonzero(np.frombuffer(found, "u1") != np.frombuffer(data, "u1"))
            raise CaseFailure(
                f"{when}: {len(wrong)} of {len(data)} bytes are wrong, the first at {wrong[0]}"
            )

    def compare_each(
        self,
        loads: Iterable[Future[list[bool]]],
        targets: Iterable[bytearray],
        objects: Mapping[bytes, bytes],
        when: str,
    ) -> None:
        """Check loads that are done: each must have found its object."""
        for load, target, data in zip(loads, targets, objects.values(), strict=True):
            self.compare(bytes(target) if load.result()[0] else None, data, when)

    def compare_hits(
        self,
        answers: Sequence[bool],
        targets: Sequence[bytearray],
        objects: Mapping[bytes, bytes],
        when: str,
    ) -> None:
        """Check the hits of a load; `answers` is empty if the load was cancelled."""
        for there, target, data in zip(answers, targets, objects.values(), strict=bool(answers)):
            if there:
                self.compare(bytes(target), data, when)

    def eventually(self, holds: Callable[[], bool]) -> bool:
        """Poll until `holds` is True, for at most `patience`; returns whether it became True."""
        deadline = time.monotonic() + self.patience
        while not holds():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


def targets_for(objects: Mapping[bytes, bytes]) -> list[bytearray]:
    """A buffer for each object."""
    return [bytearray(len(data)) for data in objects.values()]


def views(buffers: Iterable[Any]) -> list[Pieces]:
    """Each buffer as an object of one piece."""
    return [[memoryview(buffer)] for buffer in buffers]


def timed_call(call: Callable[[], Future[T]], patience: float) -> tuple[T, float]:
    """The answer to a call of a store, and the seconds that it took.

    Raises:
        StoreError: It failed, or took longer than `patience` seconds.
    """
    began = time.perf_counter()
    try:
        return call().result(patience), time.perf_counter() - began
    except TimeoutError as error:
        raise StoreError(f"a call is not done within {patience:g} s") from error


def view_of(piece: Piece) -> memoryview:
    """A view of a piece in host memory."""
    return piece.view() if isinstance(piece, Memory) else piece

"""What a store's cases drive: the store under test, fresh keys, and ways to ask in one line."""

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
"""The kit fills a store only if it holds no more than this."""
MANY_BYTES = 1 << 20
"""A store of so many tells how long others take."""
LEAST_CAPACITY = 16_000_000
"""A store that holds less has no room for what the cases keep at a time."""
LEAST_KEYS = 4
"""What cases give a store in one call, at least."""


_PER_KEY = {"lookup": Found, "load": list, "store": list, "claim": list}
_RESULTS = _PER_KEY | {"delete": int, "clear": int, "namespaces": dict}
"""What the futures of these methods end with; some with a bool for each key."""
_ASKED = WeakKeyDictionary[Any, tuple[str, int]]()
"""Of a future, which method made it, and for how many keys."""


def _is_future(name: str) -> Callable[..., bool]:
    def is_one(answer: Any, keys: Sequence[bytes] = (), *_: object) -> bool:
        if isinstance(answer, Future):
            _ASKED[answer] = name, len(keys)
        return isinstance(answer, Future)

    return is_one


def require_result(name: str, answer: object, num_keys: int) -> None:
    """Raise `CaseFailure` unless the future of a method may end like that."""
    wanted = _RESULTS[name]
    right, what = isinstance(answer, wanted) and type(answer) is not bool, wanted.__name__
    if name in _PER_KEY:
        what += f" with a bool for each of {num_keys} keys"
        flags: Any = answer.present if isinstance(answer, Found) else answer
        listed = isinstance(flags, tuple if wanted is Found else list)
        right = right and listed and [*map(type, flags)] == [bool] * num_keys
    require_answer(name, answer, f"of type {what}", right)


ANSWERS: Answers = {name: ("a Future", _is_future(name)) for name in _RESULTS} | {
    "usage": ("a Usage", kind(Usage)),
    "health": ("a text or None", kind(str, type(None))),
}
"""Of a store's methods."""


class BackDoor(Protocol):
    """A way to a store's objects that leaves the store out, so that a symmetric liar is caught.

    Its class is called with the opened store. It may lack any of these methods: what needs them is
    then skipped by name.
    """

    def get(self, key: bytes) -> bytes | None:
        """The bytes of an object as they are kept, or None."""

    def put(self, key: bytes, data: bytes) -> None:
        """Keep an object as the store would."""

    def cut(self, key: bytes, num_bytes: int) -> None:
        """Leave only the first bytes of what is kept of an object."""

    def spoil(self, key: bytes) -> None:
        """Change one byte of what is kept of an object, if the store notices such things."""

    def fail(self, failing: bool) -> None:
        """Make all that the store does at its back end an error, until told that it is over."""


_folders: set[tempfile.TemporaryDirectory[str]] = set()
"""Of all rigs that are open."""


def remove_folders() -> None:
    """Remove those of cases that hang, for a process that ends without any clean-up."""
    for folder in tuple(_folders):
        shutil.rmtree(folder.name, ignore_errors=True)


class StoreRig:
    """One opened store with a folder of its own.

    Args:
        spec: of the store; ``{tmp}`` in it becomes the folder.
        back_door: makes the back door of the opened store; None if it has none.
        seed: of `random`.
        depth: multiplies examples, repetitions and seconds.
        patience: seconds for which any one answer is waited for.

    Attributes:
        folder: what ``{tmp}`` in the spec stands for.
        spec: with it filled in: who opens it again has the same store.
        store: opened, named ``kit``.
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
        """Of the slowest that the store has kept in this case."""

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
        """The store once more, not opened."""
        return checked(load_store(self.spec, name=name), ANSWERS)

    def open(self, name: str = "kit") -> Store:
        """The store once more, opened; closed at the end of the case."""
        store = self.make(name)
        store.open()
        self._opened.append(store)
        return store

    def close(self, store: Store) -> None:
        """Close one of them now."""
        store.close()
        self._opened = [other for other in self._opened if other is not store]

    def reopen(self) -> None:
        """Close the store and open it again: what it then has comes from where it keeps things."""
        self.close(self.store)
        self.store = self.open()

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """While others have the store: one that is not `shared` is closed here meanwhile."""
        if self.store.capabilities.shared:
            yield
            return
        self.close(self.store)
        yield
        self.store = self.open()

    def lacks(self, need: str) -> str | None:
        """See `Rig`.

        Needs are capabilities, ``door.METHOD``, ``small``, ``registers``, ``forgets`` or
        ``hypothesis``.
        """
        if need == "hypothesis":
            ready = find_spec("hypothesis") is not None
            return None if ready else "hypothesis is missing: pip install 'kvbaton[testing]'"
        if need == "small":
            capacity = self.store.usage().capacity
            small = capacity is not None and capacity <= SMALL_CAPACITY
            wanted = f"{LEAST_CAPACITY} to {SMALL_CAPACITY} bytes by its own option"
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
        """The back door of the store, for cases that need one."""
        assert self._back_door is not None, "the case does not say that it needs a back door"
        return self._back_door(self.store)

    # --- keys and bytes ---

    def key(self) -> bytes:
        """A key that nobody has used."""
        number = next(self._numbers).to_bytes(8, "little")
        return hashlib.blake2b(self._nonce + number, digest_size=32).digest()

    def noise(self, num_bytes: int) -> bytes:
        """Noise."""
        return self.random.bytes(num_bytes)

    def at_once(self, keys: int) -> int:
        """So many, or as many as one call takes."""
        return min(keys, self.store.capabilities.max_keys)

    def calls(self, keys: Iterable[bytes]) -> Iterator[list[bytes]]:
        """Keys, as many at a time as one call takes."""
        every = list(keys)
        for start in range(0, len(every), limit := self.store.capabilities.max_keys):
            yield every[start : start + limit]

    def objects(self, sizes: Iterable[int]) -> dict[bytes, bytes]:
        """Objects of those sizes under fresh keys; nobody has stored them yet."""
        return {self.key(): self.noise(size) for size in sizes}

    def cut(self, data: bytearray | bytes, pieces: int) -> Pieces:
        """The same memory in that many pieces of uneven lengths, some of them empty."""
        inner = sorted(self.random.integers(0, len(data) + 1, pieces - 1).tolist())
        ends = [0, *inner, len(data)]
        view = memoryview(data)
        return [view[low:high] for low, high in itertools.pairwise(ends)]

    # --- questions with answers ---

    def wait(self, future: Future[T], what: str, within: float | None = None) -> T:
        """The answer; errors of the store pass through.

        Raises:
            CaseFailure: there is none in time.
        """
        self.settle([future], what, within)
        answer = future.result()
        if (asked := _ASKED.get(future)) is not None:
            name, num_keys = asked
            require_result(name, answer, num_keys)
        return answer

    def settle(self, futures: Sequence[Future[T]], what: str, within: float | None = None) -> None:
        """Wait until all are done, however they end: `patience`, or so many seconds."""
        patience = within or self.patience
        deadline = time.monotonic() + patience
        for future in futures:
            # Not `futures.wait`: to that, a future is not done by `cancel` alone.
            done = threading.Event()
            future.add_done_callback(lambda _, done=done: done.set())  # type: ignore[misc]
            in_time = done.wait(max(0.0, deadline - time.monotonic()))
            require(in_time, f"{what}: a future is not done after {patience:.3g} s")

    def ask_store(self, objects: Mapping[bytes, bytes], store: Store | None = None) -> list[bool]:
        """Store objects, in as many calls as it takes; the answers.

        If at the pace of what the store kept before they take long, they get that time `SLOWER`
        times, rather than `patience`.
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
        """Store objects; all must be kept."""
        answers = self.ask_store(objects, store)
        require(answers == [True] * len(objects), f"store of {len(objects)} objects said {answers}")

    def get(self, key: bytes, num_bytes: int, store: Store | None = None) -> bytes | None:
        """An object's bytes, or None for a miss."""
        target = bytearray(b"\xa5") * num_bytes
        answer = self.wait((store or self.store).load([key], [[memoryview(target)]]), "load")
        require(answer in ([True], [False]), f"load of one object said {answer!r}")
        return bytes(target) if answer[0] else None

    def load(self, objects: Mapping[bytes, bytes]) -> tuple[list[bool], list[bytearray]]:
        """Load all in one call: the answers, and what came."""
        targets = targets_for(objects)
        return self.wait(self.store.load(list(objects), views(targets)), "load"), targets

    def store_each(self, objects: Mapping[bytes, bytes]) -> list[Future[list[bool]]]:
        """Begin a store of each object, without waiting."""
        return [self.store.store([key], views([data])) for key, data in objects.items()]

    def load_each(
        self, objects: Mapping[bytes, bytes]
    ) -> tuple[list[Future[list[bool]]], list[bytearray]]:
        """Begin a load of each object, without waiting: the futures, and the targets."""
        targets = targets_for(objects)
        pairs = zip(objects, views(targets), strict=True)
        return [self.store.load([key], [target]) for key, target in pairs], targets

    def drop(self, keys: Iterable[bytes], store: Store | None = None) -> None:
        """Delete objects, if the store can."""
        if self.lacks("deletes") is None:
            for some in self.calls(keys):
                self.wait((store or self.store).delete(some), "delete")

    def found(self, keys: Sequence[bytes], store: Store | None = None) -> tuple[bool, ...]:
        """Which are there."""
        calls = map((store or self.store).lookup, self.calls(keys))
        return tuple(there for call in calls for there in self.wait(call, "lookup").present)

    def expect(self, objects: Mapping[bytes, bytes], when: str, store: Store | None = None) -> None:
        """All objects must be there, byte for byte."""
        for key, data in objects.items():
            self.compare(self.get(key, len(data), store), data, when)

    def expect_in(self, target: AnyPieces, key: bytes, data: bytes, when: str) -> None:
        """An object must come, byte for byte, into pieces of the case's own."""
        loaded = self.wait(self.store.load([key], [cast(Pieces, target)]), "load")
        self.compare(b"".join(map(view_of, target)) if loaded[0] else None, data, when)

    def expect_whole(self, objects: Mapping[bytes, bytes], when: str) -> list[bytes]:
        """Each object must be there byte for byte, or not at all; the keys of those that are."""
        there: list[bytes] = []
        for key, data in objects.items():
            if (found := self.get(key, len(data))) is not None:
                self.compare(found, data, when)
                there.append(key)
        return there

    def compare(self, found: bytes | None, data: bytes, when: str) -> None:
        """Both must be equal; None is a miss, which is a failure."""
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
        """Each of these loads is done, and must have found its object."""
        for load, target, data in zip(loads, targets, objects.values(), strict=True):
            self.compare(bytes(target) if load.result()[0] else None, data, when)

    def compare_hits(
        self,
        answers: Sequence[bool],
        targets: Sequence[bytearray],
        objects: Mapping[bytes, bytes],
        when: str,
    ) -> None:
        """What a load of these objects said it found must be right; one cancelled says nothing."""
        for there, target, data in zip(answers, targets, objects.values(), strict=bool(answers)):
            if there:
                self.compare(bytes(target), data, when)

    def eventually(self, holds: Callable[[], bool]) -> bool:
        """Ask again until it holds, or patience ends."""
        deadline = time.monotonic() + self.patience
        while not holds():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


def targets_for(objects: Mapping[bytes, bytes]) -> list[bytearray]:
    """Memory for each object."""
    return [bytearray(len(data)) for data in objects.values()]


def views(buffers: Iterable[bytearray | bytes]) -> list[Pieces]:
    """Each buffer as an object in one piece."""
    return [[memoryview(buffer)] for buffer in buffers]


def view_of(piece: Piece) -> memoryview:
    """The bytes of a piece in host memory."""
    return piece.view() if isinstance(piece, Memory) else piece

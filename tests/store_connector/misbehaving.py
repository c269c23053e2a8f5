"""Stores as a plug-in with one bug each has them; what they keep is right."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from kvbaton.connectors.store import Found, Hints, Pieces, StoreCapabilities, Usage
from kvbaton.connectors.stores.threaded import ThreadedStore
from kvbaton.errors import ConfigError, StoreError
from tests.support.held_store import Backend, Box

SLOW_S = 3.0
HUNG = threading.Event()
"""What hangs waits for it."""


class Sound(ThreadedStore):
    """As it is here, nothing is wrong."""

    def __init__(self, name: str) -> None:
        super().__init__(name, Backend(Box(name)))


class ShortLookup(Sound):
    """Answers for one key too few."""

    def lookup(
        self, keys: Sequence[bytes], *, pin: bool = False, prefix: bool = False
    ) -> Future[Found]:
        return self._pool("lookup").submit(
            lambda: Found(tuple(self.backend.contains(list(keys)))[:-1])
        )


class ListLookup(Sound):
    """Answers what its backend does."""

    def lookup(self, keys: Sequence[bytes], *, pin: bool = False, prefix: bool = False) -> Any:
        return self._pool("lookup").submit(lambda: self.backend.contains(list(keys)))


class NoneLoad(Sound):
    """Forgets to return an answer."""

    def load(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> Any:
        inner, outer = super().load(keys, targets), Future[None]()
        inner.add_done_callback(lambda _: outer.set_result(None))
        return outer


class ShortContains(Sound):
    """The same, by its backend."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        contains = self.backend.contains
        self.backend.contains = lambda keys: contains(keys)[:-1]  # type: ignore[method-assign]


class ShortLoad(Sound):
    """Answers for one object too few."""

    def load(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> Any:
        inner, outer = super().load(keys, targets), Future[list[bool]]()
        inner.add_done_callback(lambda done: outer.set_result(done.result()[:-1]))
        return outer


class ShortStore(Sound):
    """Answers nothing."""

    def store(
        self,
        keys: Sequence[bytes],
        sources: Sequence[Pieces],
        *,
        hints: Sequence[Hints] | None = None,
    ) -> Any:
        inner, outer = super().store(keys, sources), Future[list[bool]]()
        inner.add_done_callback(lambda _: outer.set_result([]))
        return outer


class PutsNone(Sound):
    """Its backend forgets to return an answer."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        put = self.backend.put

        def puts(key: bytes, source: Pieces) -> Any:
            put(key, source)

        self.backend.put = puts  # type: ignore[method-assign]


class WritesSources(Sound):
    """Encrypts what it is given in place, say."""

    def store(
        self,
        keys: Sequence[bytes],
        sources: Sequence[Pieces],
        *,
        hints: Sequence[Hints] | None = None,
    ) -> Any:
        for _, *pieces in sources:
            for piece in pieces:
                piece[:] = bytes(len(piece))
        return super().store(keys, sources)


class NoFuture(Sound):
    """Answers lookups at once."""

    def lookup(self, keys: Sequence[bytes], *, pin: bool = False, prefix: bool = False) -> Any:
        return Found((True,) * len(keys))


class RaisesInLookup(Sound):
    def lookup(
        self, keys: Sequence[bytes], *, pin: bool = False, prefix: bool = False
    ) -> Future[Found]:
        raise KeyError("a bug")


class ExitsInLoad(Sound):
    """Some libraries end the process when they are at a loss."""

    def load(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> Any:
        sys.exit("out of luck")


class NoAnswer(Exception):
    """Its text is no better than the call that raises it."""

    def __str__(self) -> str:
        raise AttributeError("code")


class GeneratorExitInLoad(Sound):
    """What a generator of its client's raises while it is being closed."""

    def load(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> Any:
        done = Future[list[bool]]()
        done.set_exception(GeneratorExit())
        return done


class NoTextInLookup(Sound):
    def lookup(
        self, keys: Sequence[bytes], *, pin: bool = False, prefix: bool = False
    ) -> Future[Found]:
        raise NoAnswer


class NoTextInUsage(Sound):
    def usage(self) -> Usage:
        raise NoAnswer


class OddFuture(Future[list[bool]]):
    """Overrides what it should leave alone."""

    def done(self) -> bool:
        sys.exit("a bug")

    def cancel(self) -> bool:
        sys.exit("a bug")


class OddFutureOfLoad(Sound):
    """One that is never done, and can't be cancelled."""

    def load(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> Any:
        return OddFuture()


class ForgetsWhatIsNoKey(Sound):
    """Tells of what it has forgotten as its client gives it."""

    on_forget: Any = None

    def load(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> Any:
        self.on_forget([key.hex() for key in keys])
        return super().load(keys, targets)


class ForgetsMutableKeys(Sound):
    """Bytes all the same, in another type."""

    on_forget: Any = None

    def load(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> Any:
        self.on_forget([bytearray(key) for key in keys])
        return super().load(keys, targets)


class RaisesInUsage(Sound):
    def usage(self) -> Usage:
        raise ZeroDivisionError("a bug")


class RaisesInHealth(Sound):
    def health(self) -> str | None:
        raise AttributeError("a bug")


class SlowUsage(Sound):
    def usage(self) -> Usage:
        time.sleep(SLOW_S)
        return super().usage()


class WrongUsage(Sound):
    def usage(self) -> Any:
        return {"objects": "many"}


class HangsInLookup(Sound):
    """Does not even return a future."""

    def lookup(
        self, keys: Sequence[bytes], *, pin: bool = False, prefix: bool = False
    ) -> Future[Found]:
        HUNG.wait()
        return super().lookup(keys, pin=pin)


class HangsAtStop(Sound):
    """A thread of its own, which the interpreter waits for at its end, and `close` as well."""

    def open(self) -> None:
        super().open()
        self._pool("store").submit(HUNG.wait)


class RaisesInClose(Sound):
    def close(self) -> None:
        super().close()
        raise OSError("a bug")


class NoCapabilities(Sound):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.capabilities: Any = {"pins": True}


class NoKeys(Sound):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.capabilities = StoreCapabilities(True, True, False, max_keys=0)


class OwnName(Sound):
    """Tells more of itself than it was named."""

    def __init__(self, name: str) -> None:
        super().__init__(f'{name} "shelf"')


class NoName(Sound):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name: Any = None


class RoundKeys(Sound):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        keys: Any = 16.0
        self.capabilities = StoreCapabilities(True, True, False, max_keys=keys)


class OpenTimesOut(Sound):
    def open(self) -> None:
        raise TimeoutError("no answer from 10.0.0.7:6379")


class OpenRaises(Sound):
    def open(self) -> None:
        raise TypeError("'str' and 'int' can't be compared")


class TellsItsPassword(Sound):
    """Puts it into what it raises: of `open` as a wrong option, or of each lookup."""

    def __init__(self, name: str, *, password: str, opens: bool = False) -> None:
        super().__init__(name)
        self._password, self._opens = password, opens
        self.backend.contains = self._contains  # type: ignore[method-assign]

    def open(self) -> None:
        if not self._opens:
            raise ConfigError("password", f"{self._password!r} is too short")
        super().open()

    def _contains(self, keys: Sequence[bytes]) -> list[bool]:
        raise StoreError(f"{self._password!r} is no longer right")


class BuildRaises(Sound):
    def __init__(self, name: str) -> None:
        super().__init__(os.environ["HOME_OF_VENDOR"])


BUGS = (
    ShortLookup,
    ListLookup,
    NoneLoad,
    PutsNone,
    ShortContains,
    ShortLoad,
    ShortStore,
    WritesSources,
    NoFuture,
    RaisesInLookup,
    ExitsInLoad,
    GeneratorExitInLoad,
    NoTextInLookup,
    NoTextInUsage,
    OddFutureOfLoad,
    ForgetsWhatIsNoKey,
    ForgetsMutableKeys,
    RaisesInUsage,
    RaisesInHealth,
    SlowUsage,
    WrongUsage,
    HangsInLookup,
    HangsAtStop,
    RaisesInClose,
)
"""What a node must live with."""

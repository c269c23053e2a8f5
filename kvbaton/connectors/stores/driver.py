"""Stores composed of other stores, and the thread on which they run."""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, TypeVar

from kvbaton.connectors.store import NO_HINTS, AnyPieces, Found, Hints, Pieces, Registering, Store
from kvbaton.errors import StoreError

T = TypeVar("T")
logger = logging.getLogger(__name__)

LAST_S = 0.1
"""Seconds that running calls get to end by themselves once the inner stores are closed."""


class Driver:
    """The one thread that makes all calls of the inner stores.

    A composed store answers each call with a coroutine, which this thread runs and which awaits the
    inner stores' futures. The answers can't be cancelled: until an inner store is done, it may
    still access a buffer.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                return self._loop.run_forever()
            except SystemExit:  # raised by an inner store; asyncio lets it end the loop
                logger.exception("an inner store would end the process")

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine; coroutines start in the order of submission."""
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()

        async def settle() -> None:
            try:
                answer.set_result(await work)
            except asyncio.CancelledError:
                answer.set_exception(StoreError("the store was closed"))
            except (Exception, SystemExit) as error:
                answer.set_exception(error)

        def start() -> None:
            task = self._loop.create_task(settle())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(start)
        return answer

    def post(self, action: Callable[..., object], *arguments: object) -> None:
        """Call a function on the thread, without waiting for it."""
        self._loop.call_soon_threadsafe(action, *arguments)

    def close(self, action: Callable[[], None]) -> None:
        """Call a last function, which closes the inner stores, and end the thread.

        Coroutines that still wait after it fail with `StoreError`.
        """

        async def run() -> None:
            try:
                action()
            finally:
                if waiting := asyncio.all_tasks() - {asyncio.current_task()}:
                    _, late = await asyncio.wait(waiting, timeout=LAST_S)
                    for task in late:
                        task.cancel()
                    await asyncio.gather(*waiting, return_exceptions=True)

        try:
            self.submit(run()).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class ComposedStore(ABC):
    """A store whose calls are coroutines on a `Driver`, in which they await the inner stores.

    Args:
        name: See `Store.name`.
        stores: The inner stores.
    """

    def __init__(self, name: str, stores: Sequence[Store]) -> None:
        self.name = name
        self.stores = tuple(stores)
        self.driver: Driver | None = None

    def open(self) -> None:
        """See `Store.open`; opens all inner stores, or none if one raises."""
        driver = Driver(self.name)
        try:
            driver.submit(self._open_all()).result()
        except BaseException:
            driver.close(lambda: None)
            raise
        self.driver = driver

    def register(self, regions: AnyPieces) -> None:
        """See `Registering.register`; passed on to the inner stores that have it."""
        self.submit(self._register_all(regions)).result()

    def lookup(
        self, keys: Sequence[bytes], *, pin: bool = False, prefix: bool = False
    ) -> Future[Found]:
        """See `Store.lookup`."""
        return self.submit(self.on_lookup(list(keys), pin, prefix))

    def release(self, ticket: int) -> None:
        """See `Store.release`."""
        if self.driver is not None:
            self.driver.post(self.on_release, ticket)

    def load(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> Future[list[bool]]:
        """See `Store.load`."""
        _check_lengths(keys, targets)
        return self.submit(self.on_load(list(keys), list(targets)))

    def store(
        self,
        keys: Sequence[bytes],
        sources: Sequence[Pieces],
        *,
        hints: Sequence[Hints] | None = None,
    ) -> Future[list[bool]]:
        """See `Store.store`."""
        _check_lengths(keys, sources)
        given = [NO_HINTS] * len(keys) if hints is None else list(hints)
        return self.submit(self.on_store(list(keys), list(sources), given))

    def delete(self, keys: Sequence[bytes]) -> Future[int]:
        """See `Store.delete`."""
        return self.submit(self.on_delete(list(keys)))

    def close(self) -> None:
        """See `Store.close`; calls that still wait fail."""
        driver, self.driver = self.driver, None
        if driver is not None:
            driver.close(self._close_all)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the driver. Raises `StoreError` if the store is not open."""
        if self.driver is None:
            work.close()
            raise StoreError(f"store {self.name} is not open")
        return self.driver.submit(work)

    # --- on the driver's thread ---

    async def _open_all(self) -> None:
        with ExitStack() as opened:
            for store in self.stores:
                store.open()
                opened.callback(store.close)
            opened.pop_all()

    async def _register_all(self, regions: AnyPieces) -> None:
        for store in self.stores:
            if isinstance(store, Registering):
                store.register(regions)

    def _close_all(self) -> None:
        with ExitStack() as opened:  # closes all, even if one raises
            for store in reversed(self.stores):
                opened.callback(store.close)

    @abstractmethod
    async def on_lookup(self, keys: list[bytes], pin: bool, prefix: bool) -> Found:
        """Answer `lookup`."""

    @abstractmethod
    def on_release(self, ticket: int) -> None:
        """Carry out `release`."""

    @abstractmethod
    async def on_load(self, keys: list[bytes], targets: list[Pieces]) -> list[bool]:
        """Answer `load`."""

    @abstractmethod
    async def on_store(
        self, keys: list[bytes], sources: list[Pieces], hints: list[Hints]
    ) -> list[bool]:
        """Answer `store`."""

    @abstractmethod
    async def on_delete(self, keys: list[bytes]) -> int:
        """Answer `delete`."""


def _check_lengths(keys: Sequence[bytes], objects: Sequence[Pieces]) -> None:
    if len(keys) != len(objects):
        raise ValueError(f"{len(keys)} keys and {len(objects)} objects")

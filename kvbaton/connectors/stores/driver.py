"""A thread for stores that are made of other stores."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from kvbaton.errors import StoreError

T = TypeVar("T")
LAST_S = 0.1
"""For calls to end by themselves, once the inner stores are closed."""


class Driver:
    """One thread, and so the one that makes all calls of the inner stores.

    What a composed store does to answer a call is a coroutine, which the thread runs and which
    awaits the inner stores' futures. The answers can't be cancelled: whether an inner store still
    touches a buffer is not known here before it is done.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine; those submitted first begin first."""
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()

        async def settle() -> None:
            try:
                answer.set_result(await work)
            except asyncio.CancelledError:
                answer.set_exception(StoreError("the store was closed"))
            except Exception as error:
                answer.set_exception(error)

        def start() -> None:
            task = self._loop.create_task(settle())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(start)
        return answer

    def call(self, action: Callable[[], T]) -> T:
        """Call a function there and wait for its result."""

        async def run() -> T:
            return action()

        return self.submit(run()).result()

    def post(self, action: Callable[..., object], *arguments: object) -> None:
        """Call a function there, without waiting."""
        self._loop.call_soon_threadsafe(action, *arguments)

    def close(self, action: Callable[[], None]) -> None:
        """Call a last function, which closes the inner stores, and end the thread.

        What still waits after it fails with `StoreError`.
        """

        async def run() -> None:
            action()
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

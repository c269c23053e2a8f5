"""The engine's future: a step's result, or digest sums, that a thread or a device computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


class Pending(Generic[T]):
    """A result being computed by a thread or a device; used by one thread at a time.

    Args:
        ready: Whether the computation is over, successfully or not; returns at once.
        take: Returns the result once it is ready, or without `wait`, waits for it; raises the
            computation's error.
        wait: Returns when the result is ready.
    """

    def __init__(
        self,
        ready: Callable[[], bool],
        take: Callable[[], T],
        wait: Callable[[], object] | None = None,
    ) -> None:
        self.ready, self._take, self._wait = ready, take, wait

    @classmethod
    def of(cls, value: T) -> Pending[T]:
        """A result that is ready."""
        return cls(lambda: True, lambda: value)

    def wait(self) -> None:
        """Wait for the result, without bringing it to the host."""
        if self._wait is not None:
            self._wait()
        else:
            self._take()

    def result(self) -> T:
        """Wait for the result; raises the computation's error."""
        if self._wait is not None:
            self._wait()
        return self._take()

    def poll(self) -> T | None:
        """The result, or None while it is not ready; raises the computation's error."""
        return self._take() if self.ready() else None

    def then(self, change: Callable[[T], U]) -> Pending[U]:
        """The result changed by a function, once it is ready."""
        return Pending(self.ready, lambda: change(self._take()), self._wait)


def join(parts: Sequence[Pending[T]], change: Callable[[list[T]], U]) -> Pending[U]:
    """One result made from the results of all parts, in order, once they are ready."""
    if len(parts) == 1:
        (only,) = parts
        return Pending(only.ready, lambda: change([only._take()]), only._wait)
    return Pending(
        lambda: all(part.ready() for part in parts),
        lambda: change([part.result() for part in parts]),
    )

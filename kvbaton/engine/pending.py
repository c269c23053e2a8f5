"""The one future of the engine: what a step sampled, or digest sums, on their way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


class Pending(Generic[T]):
    """A result on its way, from a thread or from a device; asked by one thread at a time.

    Args:
        ready: whether it is there, or what it raised; returns at once.
        take: gives it, once it is there or, without `wait`, when it is; raises what its
            computation raised.
        wait: returns when it is there.
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
        """What is there already."""
        return cls(lambda: True, lambda: value)

    def wait(self) -> None:
        """Wait until it is there, without taking it to the host."""
        if self._wait is not None:
            self._wait()
        else:
            self._take()

    def result(self) -> T:
        """Wait for it; raises what its computation raised."""
        if self._wait is not None:
            self._wait()
        return self._take()

    def poll(self) -> T | None:
        """The result, or None while it is on its way; raises what its computation raised."""
        return self._take() if self.ready() else None

    def then(self, change: Callable[[T], U]) -> Pending[U]:
        """What is made of it once it is there."""
        return Pending(self.ready, lambda: change(self._take()), self._wait)


def join(parts: Sequence[Pending[T]], change: Callable[[list[T]], U]) -> Pending[U]:
    """What is made of the results of all parts, in their order, once they are there."""
    if len(parts) == 1:
        (only,) = parts
        return Pending(only.ready, lambda: change([only._take()]), only._wait)
    return Pending(
        lambda: all(part.ready() for part in parts),
        lambda: change([part.result() for part in parts]),
    )

"""Factory fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def making(make: Callable[P, T], end: Callable[[T], object]) -> Iterator[Callable[P, T]]:
    """A factory like `make`; all results are ended with the block, in order of creation."""
    made: list[T] = []

    def one(*args: P.args, **kwargs: P.kwargs) -> T:
        made.append(make(*args, **kwargs))
        return made[-1]

    yield one
    for each in made:
        end(each)

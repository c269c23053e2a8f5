"""What passes between the decisions about a store (`stash.py`) and its thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# --- orders to the thread ---


class Part(NamedTuple):
    """Consecutive blocks of one sequence in one group.

    Attributes:
        group: which.
        first: logical number of the first block.
        blocks: physical ones.
        keys: of their objects.
    """

    group: int
    first: int
    blocks: tuple[int, ...]
    keys: tuple[bytes, ...]


class Save(NamedTuple):
    """One block to save.

    Attributes:
        group: which.
        number: its logical number.
        block: the physical one.
        key: of its object.
        summed: whether the step that wrote the block left sums; else they are made from memory.
    """

    group: int
    number: int
    block: int
    key: bytes
    summed: bool


@dataclass(frozen=True)
class LookUp:
    """Ask which objects are there."""

    ticket: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True)
class LoadBlocks:
    """Fill blocks and verify them."""

    ticket: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class CancelLoad:
    """Nobody wants a load any more; it is answered all the same."""

    ticket: int


@dataclass(frozen=True)
class SaveBlocks:
    """Keep blocks."""

    ticket: int
    saves: tuple[Save, ...]


@dataclass(frozen=True)
class ReleasePins:
    """Give pins of a lookup back."""

    pins: tuple[int, ...]


Order = LookUp | LoadBlocks | CancelLoad | SaveBlocks | ReleasePins


# --- answers of the thread ---


@dataclass(frozen=True)
class LookedUp:
    """What is there, and under which pins; `error` says why nothing is known."""

    ticket: int
    present: tuple[bool, ...] = ()
    pins: tuple[int, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Loaded:
    """The store is done with a load's blocks.

    Attributes:
        ticket: of the order.
        good: per block of all parts, whether it is there and verified.
        corrupt: how many were there, but not what they should be.
        seconds: that it took.
        error: why nothing came.
    """

    ticket: int
    good: tuple[bool, ...]
    corrupt: int = 0
    seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class Saved:
    """The store is done with the blocks of a save; per block whether it has it."""

    ticket: int
    stored: tuple[bool, ...]
    seconds: float = 0.0
    error: str | None = None


Answer = LookedUp | Loaded | Saved

"""What transports share: regions and ranges (numbering, bounds, single copies), cards, handles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.connectors.base import Memory, Peer, RangeColumn, Ranges, Region, Status
from kvbaton.errors import TransportError
from kvbaton.messages import UNREADABLE

Int64s = npt.NDArray[np.int64]

MAX_COPIES = 1 << 24
"""Most single copies that one write may come to."""
MAX_NOTICE_BYTES = 1 << 16

T = TypeVar("T")


def own_peer(peer: Peer, kind: type[T], transport: str) -> T:
    """A peer as its transport made it. Raises `ValueError` if another one has."""
    if not isinstance(peer, kind):
        raise ValueError(f"{peer!r} is not a peer of the {transport} transport")
    return peer


def check_notice(notice: bytes) -> None:
    """Raise `ValueError` for one that is too long."""
    if len(notice) > MAX_NOTICE_BYTES:
        raise ValueError(f"notice has {len(notice)} bytes, at most {MAX_NOTICE_BYTES}")


def decode_card(card: bytes, decoder: msgspec.msgpack.Decoder[T], transport: str) -> T:
    """What a card says. Raises `TransportError` if it is none of such a transport.

    Args:
        card: as a peer sent it.
        decoder: made when its module is imported. msgspec 0.22 takes a type apart when it first
            decodes one, and a second thread that finds it half done crashes the process.
        transport: its name.
    """
    try:
        return decoder.decode(card)
    except UNREADABLE as error:
        raise TransportError(f"not a card of the {transport} transport: {error}") from error


class BaseHandle:
    """A `Handle` that has nothing to give back."""

    _status = Status.PENDING
    _error: str | None = None

    def status(self) -> Status:
        """State now."""
        return self._status

    def error(self) -> str | None:
        """Why it failed."""
        return self._error

    def release(self) -> None:
        """Nothing to give back."""


class Copies(NamedTuple):
    """A write as single copies: five int64 arrays of shape [n]; offsets and lengths in bytes."""

    source_region: Int64s
    source_offset: Int64s
    target_region: Int64s
    target_offset: Int64s
    length: Int64s

    def take(self, start: int, stop: int) -> Copies:
        """Copies [start, stop)."""
        if start == 0 and stop >= len(self.length):
            return self
        return Copies(*(column[start:stop] for column in self))

    def by_region(self) -> Copies:
        """Ordered by source region, then by target region; within both as they were."""
        order = np.lexsort((self.target_region, self.source_region))
        return Copies(*(column[order] for column in self))


class RegionTable:
    """Regions of one transport, numbered in order of registration.

    Attributes:
        sizes: bytes of each region by number; 0 for those removed. Replaced, never changed.
    """

    def __init__(self) -> None:
        self._regions: list[Region | None] = []
        self.sizes: tuple[int, ...] = ()

    def add(self, memory: Memory) -> Region:
        """Give memory the next number."""
        region = Region(len(self._regions), memory)
        self._regions.append(region)
        self.sizes += (memory.num_bytes,)
        return region

    def remove(self, region: Region) -> None:
        """Forget a region; its number is not given again.

        Raises:
            ValueError: it is not in this table.
        """
        if region.index >= len(self._regions) or self._regions[region.index] != region:
            raise ValueError(f"region {region.index} is not registered with this transport")
        self._regions[region.index] = None
        self.sizes = (*self.sizes[: region.index], 0, *self.sizes[region.index + 1 :])

    def addresses(self) -> tuple[int, ...]:
        """First byte of each region by number; 0 for those removed."""
        return tuple(region.memory.address if region else 0 for region in self._regions)

    def memories(self) -> tuple[Memory | None, ...]:
        """Memory of each region by number; None for those removed."""
        return tuple(region.memory if region else None for region in self._regions)


def expand(ranges: Ranges, source_sizes: Sequence[int], target_sizes: Sequence[int]) -> Copies:
    """Check packed ranges against the regions of both sides and make single copies of them.

    Args:
        ranges: int64 of shape [n, 8], see `RangeColumn`.
        source_sizes: bytes of each of our regions.
        target_sizes: bytes of each of the peer's regions.

    Raises:
        ValueError: a row is malformed or leaves a region; the message names the row.
    """
    if ranges.ndim != 2 or ranges.shape[1] != len(RangeColumn) or ranges.dtype != np.int64:
        raise ValueError(f"ranges must be int64 of shape [n, 8], not {ranges.dtype}{ranges.shape}")
    _check(ranges, source_sizes, target_sizes)
    rows = ranges.copy()
    count = rows[:, RangeColumn.COUNT]
    strides = rows[:, [RangeColumn.SOURCE_STRIDE, RangeColumn.TARGET_STRIDE]]
    dense = np.all(strides == rows[:, [RangeColumn.LENGTH]], axis=1)  # pieces touch on both sides
    rows[dense, RangeColumn.LENGTH] *= count[dense]
    rows[dense, RangeColumn.COUNT] = 1
    if int(np.minimum(count, MAX_COPIES + 1).sum()) > MAX_COPIES:
        raise ValueError(f"ranges come to more than {MAX_COPIES} copies; split the write")
    ends = np.cumsum(count)
    piece = np.arange(int(count.sum())) - np.repeat(ends - count, count)
    each = np.repeat(rows, count, axis=0)
    return Copies(
        each[:, RangeColumn.SOURCE_REGION],
        each[:, RangeColumn.SOURCE_OFFSET] + piece * each[:, RangeColumn.SOURCE_STRIDE],
        each[:, RangeColumn.TARGET_REGION],
        each[:, RangeColumn.TARGET_OFFSET] + piece * each[:, RangeColumn.TARGET_STRIDE],
        each[:, RangeColumn.LENGTH],
    )


def _check(rows: Ranges, source_sizes: Sequence[int], target_sizes: Sequence[int]) -> None:
    """Refuse malformed rows and those that leave a region, without any overflow."""
    column = RangeColumn
    length, count = rows[:, column.LENGTH], rows[:, column.COUNT]
    bad = {
        "has a negative number": np.any(rows < 0, axis=1),
        "has length 0": length < 1,
        "has count 0": count < 1,
    }
    for side, sizes, region, stride in (
        ("source", source_sizes, column.SOURCE_REGION, column.SOURCE_STRIDE),
        ("target", target_sizes, column.TARGET_REGION, column.TARGET_STRIDE),
    ):
        number, offset = rows[:, region], rows[:, region + 1]
        known = (number >= 0) & (number < len(sizes))
        bad[f"names a {side} region that does not exist"] = ~known
        room = np.array([*sizes, 0], np.int64)[np.where(known, number, len(sizes))]
        room = room - np.maximum(length, 0)
        bad[f"leaves its {side} region"] = (room < 0) | (offset > room)
        strided = (count > 1) & (rows[:, stride] > 0)
        steps = (room - np.maximum(offset, 0)) // np.maximum(rows[:, stride], 1)
        bad[f"leaves its {side} region by its stride"] = strided & (count - 1 > steps)
    for what, found in bad.items():
        if found.any():
            index = int(np.argmax(found))
            raise ValueError(f"range {index} {what}: {rows[index].tolist()}")

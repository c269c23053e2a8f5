"""Shared code of transports: regions, ranges (bounds checks, single copies), cards, handles."""

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
"""Maximum number of single copies of one write."""
MAX_NOTICE_BYTES = 1 << 16
"""Maximum length of a notice in bytes."""

T = TypeVar("T")


def own_peer(peer: Peer, kind: type[T], transport: str) -> T:
    """The peer as an object of class `kind`. Raises `ValueError` if another transport made it."""
    if not isinstance(peer, kind):
        raise ValueError(f"{peer!r} is not a peer of the {transport} transport")
    return peer


def check_notice(notice: bytes) -> None:
    """Raise `ValueError` for a notice that is too long."""
    if len(notice) > MAX_NOTICE_BYTES:
        raise ValueError(f"notice has {len(notice)} bytes, at most {MAX_NOTICE_BYTES}")


def decode_card(card: bytes, decoder: msgspec.msgpack.Decoder[T], transport: str) -> T:
    """Decode a card. Raises `TransportError` if it is not a card of this transport.

    Args:
        card: The card, as a peer sent it.
        decoder: A decoder that was made when its module was imported. msgspec 0.22 inspects a type
            lazily at first use, and crashes if two threads do so at the same time.
        transport: Name of the transport, for the error.
    """
    try:
        return decoder.decode(card)
    except UNREADABLE as error:
        raise TransportError(f"not a card of the {transport} transport: {error}") from error


class BaseHandle:
    """A `Handle` without resources to free."""

    _status = Status.PENDING
    _error: str | None = None

    def status(self) -> Status:
        """The current state."""
        return self._status

    def error(self) -> str | None:
        """Why the write failed."""
        return self._error

    def release(self) -> None:
        """Do nothing."""


class Copies(NamedTuple):
    """A write as n single copies: int64 arrays of shape [n]; offsets and lengths in bytes."""

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
        """The copies sorted by source region, then by target region; the sort is stable."""
        order = np.lexsort((self.target_region, self.source_region))
        return Copies(*(column[order] for column in self))


class RegionTable:
    """Regions of one transport, numbered in order of registration.

    Attributes:
        sizes: Bytes of each region by number; 0 for removed ones. Replaced, never changed.
    """

    def __init__(self) -> None:
        self._regions: list[Region | None] = []
        self.sizes: tuple[int, ...] = ()

    def add(self, memory: Memory) -> Region:
        """Add memory under the next number."""
        region = Region(len(self._regions), memory)
        self._regions.append(region)
        self.sizes += (memory.num_bytes,)
        return region

    def remove(self, region: Region) -> None:
        """Remove a region; its number is not used again.

        Raises:
            ValueError: The region is not in this table.
        """
        if region.index >= len(self._regions) or self._regions[region.index] != region:
            raise ValueError(f"region {region.index} is not registered with this transport")
        self._regions[region.index] = None
        self.sizes = (*self.sizes[: region.index], 0, *self.sizes[region.index + 1 :])

    def addresses(self) -> tuple[int, ...]:
        """Address of each region by number; 0 for removed ones."""
        return tuple(region.memory.address if region else 0 for region in self._regions)

    def memories(self) -> tuple[Memory | None, ...]:
        """Memory of each region by number; None for removed ones."""
        return tuple(region.memory if region else None for region in self._regions)


def expand(ranges: Ranges, source_sizes: Sequence[int], target_sizes: Sequence[int]) -> Copies:
    """Check packed ranges against the regions of both sides, and expand them into single copies.

    Args:
        ranges: int64 of shape [n, 8], see `RangeColumn`.
        source_sizes: Bytes of each local region.
        target_sizes: Bytes of each of the peer's regions.

    Raises:
        ValueError: A row is malformed or exceeds a region; the message names the row.
    """
    if ranges.ndim != 2 or ranges.shape[1] != len(RangeColumn) or ranges.dtype != np.int64:
        raise ValueError(f"ranges must be int64 of shape [n, 8], not {ranges.dtype}{ranges.shape}")
    _check(ranges, source_sizes, target_sizes)
    rows = ranges.copy()
    count = rows[:, RangeColumn.COUNT]
    strides = rows[:, [RangeColumn.SOURCE_STRIDE, RangeColumn.TARGET_STRIDE]]
    dense = np.all(strides == rows[:, [RangeColumn.LENGTH]], axis=1)  # contiguous on both sides
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
    """Refuse malformed rows and rows that exceed a region; no arithmetic overflows."""
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

"""The free bytes of an arena."""

from __future__ import annotations

from bisect import bisect_left, insort

Extent = tuple[int, int]
"""First byte and length."""


class FreeList:
    """Free bytes, all of which can be taken, in one run where there is one and else in several.

    So an arena is never too fragmented for an object that fits. Objects of one size always get one
    run. Best fit, coalescing; the cost grows with the number of holes, not of objects.

    Args:
        num_bytes: all of them free.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = 0
        self._by_length: list[Extent] = []
        """Length and first byte of each hole, ascending."""
        self._lengths: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        """First byte of the hole that ends before a byte."""
        self.give([(0, num_bytes)])

    def take(self, num_bytes: int) -> list[Extent]:
        """Take that many bytes, of those that are free."""
        assert num_bytes <= self.num_bytes, f"{num_bytes} bytes of {self.num_bytes} free ones"
        taken = []
        while num_bytes:
            fits = bisect_left(self._by_length, (num_bytes, 0))
            length, start = self._by_length[min(fits, len(self._by_length) - 1)]
            self._remove(start, length)
            used = min(length, num_bytes)
            self._add(start + used, length - used)
            taken.append((start, used))
            num_bytes -= used
        return taken

    def give(self, extents: list[Extent]) -> None:
        """Give bytes back that were taken."""
        for start, length in extents:
            end = start + length
            if (after := self._lengths.get(end)) is not None:
                self._remove(end, after)
                end += after
            if (before := self._starts.get(start)) is not None:
                self._remove(before, start - before)
                start = before
            self._add(start, end - start)

    def _add(self, start: int, length: int) -> None:
        if length:
            insort(self._by_length, (length, start))
            self._lengths[start] = length
            self._starts[start + length] = start
            self.num_bytes += length

    def _remove(self, start: int, length: int) -> None:
        del self._by_length[bisect_left(self._by_length, (length, start))]
        del self._lengths[start], self._starts[start + length]
        self.num_bytes -= length

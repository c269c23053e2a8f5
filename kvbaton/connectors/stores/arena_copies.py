"""Copies of objects between an arena in host memory and pieces in host or GPU memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvbaton.connectors.base import Memory
from kvbaton.connectors.cuda_copies import CopyRun, CudaCopies
from kvbaton.connectors.store import AnyPieces, Piece, Pieces

LARGE_BYTES = 256 << 10
"""Minimum size of copies that release the GIL; for smaller ones that costs more than it saves."""

Extent = tuple[int, int]
"""A run of bytes of the arena: first byte and length."""


class ArenaCopies:
    """Copies objects between an arena, which it pins, and pieces; GPUs use their copy engines.

    Args:
        arena: Memory of the objects.
        devices: CUDA ordinals of the GPUs.

    Raises:
        StoreError: There is no CUDA, or the arena can't be pinned.
    """

    def __init__(self, arena: Memory, devices: Iterable[int]) -> None:
        self._arena, self._host = arena, arena.view()
        self._copies = CudaCopies()
        # A stream per direction, so that both directions of the bus are used at the same time.
        self._incoming = {index: self._copies.stream(index) for index in devices}
        self._outgoing = {index: self._copies.stream(index) for index in devices}
        self._copies.pin(self._arena.address, self._arena.num_bytes)

    def close(self) -> None:
        """Unpin the arena; called when no copies run any more."""
        self._copies.unpin(self._arena.address)

    def load(self, objects: Sequence[tuple[AnyPieces, Sequence[Extent]]]) -> None:
        """Copy objects into pieces; returns when all copies are done. Raises `StoreError`."""
        self._move(objects, self._incoming, to_pieces=True)

    def store(self, objects: Sequence[tuple[AnyPieces, Sequence[Extent]]]) -> None:
        """Copy pieces into the arena; returns when all copies are done. Raises `StoreError`."""
        self._move(objects, self._outgoing, to_pieces=False)

    def _move(
        self,
        objects: Sequence[tuple[AnyPieces, Sequence[Extent]]],
        streams: Mapping[int, Any],
        *,
        to_pieces: bool,
    ) -> None:
        runs = dict[int, list[CopyRun]]()
        for pieces, extents in objects:
            for piece, start in _in_extents(pieces, extents):
                if isinstance(piece, Memory):
                    ends = piece.address, self._arena.address + start
                    run = CopyRun(*(ends if to_pieces else ends[::-1]), len(piece))
                    runs.setdefault(piece.device_index, []).append(run)
                else:
                    sides = [piece], [self._host[start : start + len(piece)]]
                    copy(*(sides if to_pieces else sides[::-1]))
        begun = [streams[index] for index in runs]
        try:
            over = [self._copies.begin(some, streams[index]) for index, some in runs.items()]
            for event in over:
                event.synchronize()
        except BaseException:
            for stream in begun:  # buffers are borrowed: no copy may still run
                stream.synchronize()
            raise


def _in_extents(pieces: AnyPieces, extents: Sequence[Extent]) -> Iterator[tuple[Piece, int]]:
    """Cut pieces into parts that are contiguous in the arena: each part and its offset there."""
    rest = iter(extents)
    start = left = 0
    for piece in pieces:
        if isinstance(piece, Memory) and piece.device == "cpu":
            piece = piece.view()
        done = 0
        while done < len(piece):
            if not left:
                start, left = next(rest)
            run = min(len(piece) - done, left)
            if run == len(piece):
                yield piece, start
            elif isinstance(piece, Memory):
                yield piece.part(done, done + run), start
            else:
                yield piece[done : done + run], start
            start, left, done = start + run, left - run, done + run


def copy(targets: Iterable[Piece], sources: Iterable[Piece]) -> None:
    """Copy the bytes of `sources` into `targets`, in order; both have the same total length."""
    rest, source = iter(sources), memoryview(b"")
    for piece in targets:
        target = piece.view() if isinstance(piece, Memory) else piece
        while target:
            while not source:
                given = next(rest)
                source = given.view() if isinstance(given, Memory) else given
            run = min(len(target), len(source))
            if run < LARGE_BYTES:
                target[:run] = source[:run]
            else:
                np.copyto(
                    np.frombuffer(target[:run], np.uint8), np.frombuffer(source[:run], np.uint8)
                )
            target, source = target[run:], source[run:]


def cut(pieces: Pieces, start: int, num_bytes: int) -> list[memoryview]:
    """Bytes [start, start + num_bytes) of some pieces, truncated at their end."""
    parts = []
    for piece in pieces:
        part = piece[min(start, len(piece)) : start + num_bytes]
        start = max(start - len(piece), 0)
        num_bytes -= len(part)
        parts.append(part)
    return parts

"""What a vision tower derives from the sizes of images alone: order, positions, who sees whom.

Patches come in *units*: the square of patches that becomes one row. A unit is the smallest thing
that is put in another place. Attention runs within *segments* (windows, or whole frames), and units
are ordered so that segments of equal length lie side by side and can be computed as one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvbaton.engine.cuda.staging import upload
from kvbaton.engine.vision_config import VisionConfig

Array = npt.NDArray[Any]
Grid = tuple[int, int, int]
"""Frames, rows and columns of patches of an item."""


@dataclass(frozen=True)
class Segments:
    """Attention within consecutive segments of patches.

    Attributes:
        runs: number and length, in patches, of the segments of each length.
        order: [units] int64, the units as the segments need them, by their place in the plan's
            order; None if that is the same.
        inverse: the way back.
    """

    runs: tuple[tuple[int, int], ...]
    order: Tensor | None = None
    inverse: Tensor | None = None


@dataclass(frozen=True)
class Plan:
    """How a tower runs over some images.

    Attributes:
        order: [units] int64: which unit of the input is at each place; None if nothing moves.
        inverse: [units] int64, the way back; None likewise.
        positions: [patches, 2] int64, row and column of the patch at each place, in its frame.
        sizes: [patches, 2] int64, rows and columns of that frame.
        frames: attention within whole frames.
        windows: attention within windows; as `frames` if the tower has none.
    """

    order: Tensor | None
    inverse: Tensor | None
    positions: Tensor
    sizes: Tensor
    frames: Segments
    windows: Segments


def make_plan(config: VisionConfig, grids: Sequence[Grid], device: torch.device) -> Plan:
    """Plan a call over the items of these grids, on `device`, without waiting for it."""
    merge, area = config.merge_size, config.merge_size**2
    frames = [(rows, columns) for frames, rows, columns in grids for _ in range(frames)]
    sizes, places, frame = _units(frames, merge)
    window = _windows(config, sizes, places, frame) if config.window_size else frame
    order, window_runs = _sorted(window, area)
    by_frame, frame_runs = _sorted(frame[order], area)
    step = np.stack(np.divmod(np.arange(area), merge), axis=1)
    positions = (places[order][:, None] * merge + step).reshape(-1, 2)
    arrays = [*_both(order), *_both(by_frame), positions, np.repeat(sizes[order], area, axis=0)]
    out, back, out_frames, back_frames, *rest = _upload(arrays, device)
    return Plan(
        order=out,
        inverse=back,
        positions=rest[0].view(-1, 2),
        sizes=rest[1].view(-1, 2),
        frames=Segments(frame_runs, out_frames, back_frames),
        windows=Segments(window_runs),
    )


def _units(frames: Sequence[tuple[int, int]], merge: int) -> tuple[Array, Array, Array]:
    """Per unit the size of its frame in patches, its row and column, its frame's number."""
    counts = [rows * columns // merge**2 for rows, columns in frames]
    sizes = np.repeat(np.array(frames), counts, axis=0)
    number = np.concatenate([np.arange(count) for count in counts])
    places = np.stack(np.divmod(number, sizes[:, 1] // merge), axis=1)
    return sizes, places, np.repeat(np.arange(len(frames)), counts)


def _windows(config: VisionConfig, sizes: Array, places: Array, frame: Array) -> Array:
    """Per unit a number that the units of its window share; ascending by frame, row, column."""
    side = config.window_size // (config.merge_size * config.patch_size)
    most = int(sizes.max()) // config.merge_size // side + 1
    row, column = (places // side).T
    window: Array = (frame * most + row) * most + column
    return window


def _sorted(segment: Array, area: int) -> tuple[Array, tuple[tuple[int, int], ...]]:
    """Order units by the length of their segment, longest first; runs as in `Segments`.

    Units of one segment keep their order, so that nothing moves if there is but one.
    """
    _, index, lengths = np.unique(segment, return_inverse=True, return_counts=True)
    order = np.lexsort((index, -lengths[index]))
    numbers = zip(*np.unique(lengths, return_counts=True), strict=True)
    return order, tuple((int(count), int(length) * area) for length, count in numbers)[::-1]


def _both(order: Array) -> tuple[Array | None, Array | None]:
    """A permutation and its inverse; nothing for one that moves nothing."""
    if np.array_equal(order, np.arange(len(order))):
        return None, None
    return order, np.argsort(order)


def _upload(arrays: Sequence[Array | None], device: torch.device) -> list[Any]:
    """Each on the device, flat; None stays None."""
    sent = iter(upload([array for array in arrays if array is not None], device))
    return [None if array is None else next(sent) for array in arrays]

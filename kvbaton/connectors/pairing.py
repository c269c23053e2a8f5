"""Pairing of ranks: which source rank sends which heads and layers to which target rank.

Ranks of a side with equal layers and heads are replicas. Every target rank gets each of its layers
and heads from exactly one source rank; if replicas hold them, the target ranks are spread over the
replicas in turn. Plans (`connectors.plan`) and digests (`connectors.digest`) both follow a
`GroupPairing`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvbaton.connectors.layout import AXES, HEAD, ITEM_SIZE, GroupKind, KVLayout, Plane
from kvbaton.errors import LayoutMismatchError

Columns = slice | npt.NDArray[np.int64]
"""Indices of a share's digest sums among all sums of a block, in the order [layer, kv, head]."""


class PlaneShare(NamedTuple):
    """The part of one plane that one source rank sends to one target rank.

    Attributes:
        source_rank: Rank that sends.
        target_rank: Rank that receives.
        source: The plane on the source rank.
        target: The plane on the target rank.
        head_start: First global head.
        head_end: One past the last global head.
        layers: Global layer ids, in the target's order.
        source_columns: Indices of the share's sums among a block's sums on the source rank.
        target_columns: Likewise on the target rank.
    """

    source_rank: int
    target_rank: int
    source: Plane
    target: Plane
    head_start: int
    head_end: int
    layers: tuple[int, ...]
    source_columns: Columns
    target_columns: Columns


class GroupPairing:
    """How the ranks of two sides share one KV group; computed once per session.

    Args:
        sources: The group's layout on each source rank.
        targets: The group's layout on each target rank.

    Attributes:
        unit: Tokens of a digest unit: a whole number of blocks of either side.
        shares: For each (source rank, target rank) pair that shares bytes, one share per plane.

    Raises:
        LayoutMismatchError: The targets can't be filled from the sources; the message names both
            values.
    """

    def __init__(self, sources: Sequence[KVLayout], targets: Sequence[KVLayout]) -> None:
        self.sources, self.targets = tuple(sources), tuple(targets)
        first = sources[0]
        for side, layouts in (("source", sources), ("target", targets)):
            for rank, layout in enumerate(layouts):
                where = f"{side} rank {rank}"
                _check_layout(where, layout, first)
                _same("block size", where, layouts[0].block_size, layout.block_size)
        self.unit = math.lcm(first.block_size, targets[0].block_size)
        self.shares: dict[tuple[int, int], list[PlaneShare]] = {}
        for plane in first.planes:
            shares = self._shares(plane.name)
            _check_covered(plane.name, shares, planes_named(plane.name, targets))
            for share in shares:
                self.shares.setdefault((share.source_rank, share.target_rank), []).append(share)

    def _shares(self, name: str) -> list[PlaneShare]:
        sources, targets = planes_named(name, self.sources), planes_named(name, self.targets)
        replicas: dict[tuple[tuple[int, int], tuple[int, ...]], list[int]] = {}
        for rank, plane in enumerate(sources):
            replicas.setdefault((head_range(plane), plane.layers), []).append(rank)
        found = []
        for ((first, past), layers), ranks in replicas.items():
            turn = 0
            for target_rank, target in enumerate(targets):
                low, high = max(first, head_range(target)[0]), min(past, head_range(target)[1])
                common = tuple(layer for layer in target.layers if layer in layers)
                if low < high and common:
                    rank = ranks[turn % len(ranks)]
                    source = sources[rank]
                    columns = (
                        _columns(self.sources[rank], source, common, low, high),
                        _columns(self.targets[target_rank], target, common, low, high),
                    )
                    found.append(
                        PlaneShare(rank, target_rank, source, target, low, high, common, *columns)
                    )
                    turn += 1
        return found


def _columns(
    layout: KVLayout, plane: Plane, layers: Sequence[int], head_start: int, head_end: int
) -> Columns:
    """Indices of the sums of some layers and heads of a plane among all sums of a block."""
    start = 0
    for other in layout.planes:
        _, heads, num_layers, kv, _, _ = other.shape
        if other.name == plane.name:
            break
        start += heads * num_layers * kv
    sums = np.arange(start, start + heads * num_layers * kv).reshape(num_layers, kv, heads)
    rows = [plane.layers.index(layer) for layer in layers]
    chosen = sums[rows, :, head_start - plane.head_start : head_end - plane.head_start].ravel()
    whole = len(chosen) == sums.size and bool((np.diff(chosen) == 1).all())
    return slice(start, start + sums.size) if whole else chosen


def head_range(plane: Plane) -> tuple[int, int]:
    """Global heads [first, end) that a plane holds."""
    return plane.head_start, plane.head_start + plane.shape[HEAD]


def pair_groups(
    sources: Sequence[Sequence[KVLayout]], targets: Sequence[Sequence[KVLayout]]
) -> list[GroupPairing]:
    """Pair the ranks of two sides for each group; checks that every byte can be transferred.

    Args:
        sources: Per source rank, one layout per group.
        targets: Per target rank, one layout per group.

    Raises:
        LayoutMismatchError: The targets can't be filled from the sources; the message names both
            values.
    """
    counts = {len(rank) for rank in (*sources, *targets)}
    if not sources or not targets or len(counts) != 1:
        raise LayoutMismatchError(
            f"number of groups per rank: {[len(rank) for rank in sources]} at the source, "
            f"{[len(rank) for rank in targets]} at the target"
        )
    return [
        _paired(tuple(rank[group] for rank in sources), tuple(rank[group] for rank in targets))
        for group in range(counts.pop())
    ]


_paired = lru_cache(maxsize=64)(GroupPairing)
"""Cached `GroupPairing`: sessions with peers of equal layouts share their pairings."""


def planes_named(name: str, layouts: Sequence[KVLayout]) -> list[Plane]:
    """The plane called `name` on each rank."""
    return [next(plane for plane in layout.planes if plane.name == name) for layout in layouts]


def _same(what: str, rank: str, first: object, value: object) -> None:
    if first != value:
        raise LayoutMismatchError(f"{what}: {first!r} on source rank 0, {value!r} on {rank}")


def _check_covered(name: str, shares: Sequence[PlaneShare], targets: Sequence[Plane]) -> None:
    """Check that every head of every layer of a target comes from exactly one source rank."""
    given: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for share in shares:
        for layer in share.layers:
            heads = (share.head_start, share.head_end)
            given.setdefault((share.target_rank, layer), []).append(heads)
    for rank, target in enumerate(targets):
        low, high = head_range(target)
        for layer in target.layers:
            held = sorted(given.get((rank, layer), []))
            if [low, *(end for _, end in held)] != [*(start for start, _ in held), high]:
                raise LayoutMismatchError(
                    f"plane {name!r}, layer {layer}: target rank {rank} holds heads "
                    f"[{low}, {high}), of which the source's ranks hold {held}; "
                    f"each must be held exactly once (or by replicas)"
                )


def _check_layout(rank: str, layout: KVLayout, first: KVLayout) -> None:
    """Check that a layout, which may come from a peer, is consistent, also with other ranks'."""
    where = f"{rank}, group {layout.group}"
    if layout.block_size < 1 or layout.num_blocks < 1 or not layout.planes:
        raise LayoutMismatchError(
            f"{where}: {layout.block_size} tokens per block, {layout.num_blocks} blocks, "
            f"{len(layout.planes)} planes; each must be positive"
        )
    if layout.kind is GroupKind.STATE:
        _agree(where, "block_size of a state group", layout.block_size, 1)
    names = {plane.name for plane in layout.planes}
    _agree(where, "number of different plane names", len(names), len(layout.planes))
    for plane in layout.planes:
        _check_plane(f"{where}, plane {plane.name!r}", layout, plane)
    _same("group", rank, first.group, layout.group)
    where = f"group {first.group}: "
    _same(where + "kind", rank, first.kind.value, layout.kind.value)
    _same(where + "window", rank, first.window, layout.window)
    _same(where + "planes", rank, *(sorted(p.name for p in x.planes) for x in (first, layout)))
    for plane in first.planes:
        mine, theirs = planes_named(plane.name, (first, layout))
        named = f"{where}plane {plane.name!r}: "
        _same(named + "dtype", rank, mine.dtype, theirs.dtype)
        _same(named + "heads of the model", rank, mine.head_total, theirs.head_total)
        for axis in ("kv", "feature"):
            index = AXES.index(axis)
            _same(f"{named}size of axis {axis!r}", rank, mine.shape[index], theirs.shape[index])


def _check_plane(where: str, layout: KVLayout, plane: Plane) -> None:
    if plane.dtype not in ITEM_SIZE:
        raise LayoutMismatchError(f"{where}: dtype {plane.dtype!r}, must be in {list(ITEM_SIZE)}")
    size = dict(zip(AXES, plane.shape, strict=True))
    _agree(where, "size of axis 'token'", size["token"], layout.block_size)
    _agree(where, "size of axis 'block'", size["block"], layout.num_blocks)
    _agree(where, "size of axis 'layer'", size["layer"], len(plane.layers))
    _agree(where, "number of different layers", len(set(plane.layers)), len(plane.layers))
    if not all(0 <= layer < 1 << 32 for layer in plane.layers):
        raise LayoutMismatchError(f"{where}: layers {plane.layers}, must be in [0, 2**32)")
    low, high = head_range(plane)
    if min(plane.shape) < 1 or low < 0 or high > plane.head_total:
        raise LayoutMismatchError(
            f"{where}: shape {plane.shape} with heads [{low}, {high}) of {plane.head_total}"
        )
    steps = zip(plane.shape, plane.strides, strict=True)
    last = plane.offset + sum((count - 1) * stride for count, stride in steps)
    if min(*plane.strides, plane.offset, plane.region) < 0 or last >= 1 << 62:
        raise LayoutMismatchError(
            f"{where}: region {plane.region}, offset {plane.offset}, strides {plane.strides}: "
            f"none may be negative, nor reach past 2**62"
        )


def _agree(where: str, what: str, value: int, expected: int) -> None:
    if value != expected:
        raise LayoutMismatchError(f"{where}: {what} is {value}, must be {expected}")

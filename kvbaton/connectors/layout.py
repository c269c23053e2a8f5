"""Where the bytes of a KV group lie in memory: planes of named axes with byte strides.

A *group* is a set of layers that share one block table (full attention; a window; state).
Every rank of a node holds one `KVLayout` per group; it travels in the session's cards, so that a
peer can plan transfers into memory that it can't see. Nothing here knows a model.

The order of the default layout, ``[block, head, layer, kv, token, feature]``, makes a block one
contiguous run and a head range of a block one run too (FlowKV, arXiv 2504.03775, reports the gain
of block-major KV; head-first is ours, for re-sharding). Everything else uses strides only.
"""

from __future__ import annotations

import enum
import math
from typing import Literal

import msgspec

from kvbaton.types import first_attended

Axis = Literal["block", "head", "layer", "kv", "token", "feature"]
AXES: tuple[Axis, ...] = ("block", "head", "layer", "kv", "token", "feature")
"""Order of the default layout, outermost first."""
BLOCK, HEAD, LAYER, KV, TOKEN, FEATURE = range(len(AXES))
"""Places of the axes in `Plane.shape` and `Plane.strides`."""

ALIGNMENT = 128
"""Bytes to which blocks and regions are aligned."""

ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}
"""Bytes per element of each dtype that a plane may have."""


class GroupKind(enum.Enum):
    """What one block of a group means."""

    FULL = "full"
    """Block i holds tokens [i * block_size, (i + 1) * block_size)."""
    WINDOW = "window"
    """As FULL, but only the blocks of the last `window` tokens are needed."""
    CHUNK = "chunk"
    """As FULL, but only the blocks of tokens from the last multiple of `window` on are needed."""
    STATE = "state"
    """One snapshot for the whole prefix; `token` has size 1."""

    def first_attended(self, position: int, window: int) -> int:
        """First token that one at `position` needs; of a state the one before it."""
        if self is GroupKind.STATE:
            return max(0, position - 1)
        first: int = first_attended(position, window, self is GroupKind.CHUNK)
        return first


class Plane(msgspec.Struct, frozen=True):
    """One strided array of a group: data, scales, conv state or ssm state.

    Attributes:
        name: ``"data"``, ``"scales"``, ``"conv"``, ``"ssm"``: equal names meet in a plan.
        dtype: a key of `ITEM_SIZE`.
        shape: elements along each axis of `AXES`, in that order; an axis that the plane lacks is 1.
        strides: bytes from one index to the next along each axis of `AXES`; any order of memory.
        region: index of the transport region that holds it.
        offset: bytes from the region's start to the element at index 0 of every axis.
        layers: global ids of the layers along the layer axis.
        head_start: global id of the first head along the head axis.
        head_total: heads of the whole model; with `head_start` and ``shape[head]`` it says which
            heads this rank holds. Ranks with equal ranges are replicas of each other.
    """

    name: str
    dtype: str
    shape: tuple[int, int, int, int, int, int]
    strides: tuple[int, int, int, int, int, int]
    region: int
    offset: int
    layers: tuple[int, ...]
    head_start: int
    head_total: int

    @property
    def item_size(self) -> int:
        """Bytes per element."""
        return ITEM_SIZE[self.dtype]


class KVLayout(msgspec.Struct, frozen=True):
    """One KV group on one rank.

    Attributes:
        group: number of the group; equal on both sides of a transfer.
        kind: see `GroupKind`.
        block_size: tokens per block.
        num_blocks: blocks in the pool, the null block 0 included.
        planes: what makes up a block.
        window: tokens of the sliding window or of a chunk; 0 unless `kind` is WINDOW or CHUNK.
    """

    group: int
    kind: GroupKind
    block_size: int
    num_blocks: int
    planes: tuple[Plane, ...]
    window: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all planes; of a state all of it."""
        return sum(
            math.prod(plane.shape[HEAD : KV + 1]) * plane.shape[FEATURE] * plane.item_size
            for plane in self.planes
        )


def contiguous_plane(
    *,
    num_blocks: int,
    block_size: int,
    num_heads: int,
    head_dim: int,
    layers: tuple[int, ...],
    dtype: str,
    region: int = 0,
    offset: int = 0,
    head_start: int = 0,
    head_total: int | None = None,
    kv: int = 2,
    order: tuple[Axis, ...] = AXES,
    name: str = "data",
) -> Plane:
    """Build a plane that is contiguous in `order` (outermost first).

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        num_heads: KV heads of this rank.
        head_dim: elements per head.
        layers: global layer ids.
        dtype: a key of `ITEM_SIZE`.
        region: transport region.
        offset: bytes into the region.
        head_start: global id of the first head.
        head_total: heads of the model; `num_heads` if not given.
        kv: 2 for K and V, 1 for a latent row (MLA).
        order: order in memory.
        name: name of the plane.
    """
    size: dict[Axis, int] = {
        "block": num_blocks,
        "head": num_heads,
        "layer": len(layers),
        "kv": kv,
        "token": block_size,
        "feature": head_dim,
    }
    stride: dict[Axis, int] = {}
    step = ITEM_SIZE[dtype]
    for axis in reversed(order):
        stride[axis] = step
        step *= size[axis]
    return Plane(
        name=name,
        dtype=dtype,
        shape=tuple(size[axis] for axis in AXES),  # type: ignore[arg-type]
        strides=tuple(stride[axis] for axis in AXES),  # type: ignore[arg-type]
        region=region,
        offset=offset,
        layers=layers,
        head_start=head_start,
        head_total=head_total if head_total is not None else num_heads,
    )

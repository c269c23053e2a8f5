"""The memory layout of a KV group: planes of named axes with byte strides.

A *group* is a set of layers that share one block table (full attention, a sliding window, or
state). Every rank of a node has one `KVLayout` per group. Layouts travel in the session's cards, so
that a peer can plan transfers into memory that it can't see. Nothing here depends on a model.

In the default layout, ``[block, head, layer, kv, token, feature]``, each block is one contiguous
run of bytes, and so is a range of heads of a block. (FlowKV, arXiv 2504.03775, reports the gain of
block-major KV; heads come first here for re-sharding.) All other code uses only strides.
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
"""Indices of the axes in `Plane.shape` and `Plane.strides`."""

ALIGNMENT = 128
"""Alignment of blocks and regions in bytes."""

ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}
"""Bytes per element of each dtype that a plane may have."""


class GroupKind(enum.Enum):
    """What one block of a group means."""

    FULL = "full"
    """Block i holds tokens [i * block_size, (i + 1) * block_size)."""
    WINDOW = "window"
    """Like FULL, but only the blocks of the last `window` tokens are needed."""
    CHUNK = "chunk"
    """Like FULL, but only the blocks of tokens from the last multiple of `window` on are needed."""
    STATE = "state"
    """Each block is one snapshot of the whole prefix; axis `token` has size 1."""

    def first_attended(self, position: int, window: int) -> int:
        """First token that the token at `position` attends to; for STATE, the previous token."""
        if self is GroupKind.STATE:
            return max(0, position - 1)
        first: int = first_attended(position, window, self is GroupKind.CHUNK)
        return first


class Plane(msgspec.Struct, frozen=True):
    """One strided array of a group: data, scales, conv state or ssm state.

    Attributes:
        name: ``"data"``, ``"scales"``, ``"conv"`` or ``"ssm"``; plans match planes by name.
        dtype: A key of `ITEM_SIZE`.
        shape: Elements along each axis of `AXES`, in that order; 1 where the plane lacks an axis.
        strides: Bytes between neighbours along each axis of `AXES`; any order in memory is allowed.
        region: Index of the transport region that holds the plane.
        offset: Bytes from the start of the region to the element at index 0 of every axis.
        layers: Global ids of the layers along the layer axis.
        head_start: Global id of the first head along the head axis.
        head_total: Number of heads of the whole model. This rank holds the heads
            [head_start, head_start + shape[head]); ranks with equal ranges are replicas.
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
        group: Number of the group; equal on both sides of a transfer.
        kind: What a block holds, see `GroupKind`.
        block_size: Tokens per block.
        num_blocks: Blocks in the pool, the null block 0 included.
        planes: The planes of a block.
        window: Tokens of the sliding window or of a chunk; 0 unless `kind` is WINDOW or CHUNK.
    """

    group: int
    kind: GroupKind
    block_size: int
    num_blocks: int
    planes: tuple[Plane, ...]
    window: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all planes; for STATE, bytes of a whole snapshot."""
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
        num_blocks: Blocks in the pool.
        block_size: Tokens per block.
        num_heads: KV heads of this rank.
        head_dim: Elements per head.
        layers: Global layer ids.
        dtype: A key of `ITEM_SIZE`.
        region: Index of the transport region.
        offset: Offset in the region in bytes.
        head_start: Global id of the first head.
        head_total: Heads of the model; `num_heads` if not given.
        kv: 2 for K and V, 1 for a latent row (MLA).
        order: Order of the axes in memory.
        name: Name of the plane.
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

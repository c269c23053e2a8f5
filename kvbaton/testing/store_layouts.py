"""L1 of stores: objects of real KV layouts, from memory of one sharding into another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvbaton.connectors.layout import AXES, ITEM_SIZE, Axis, GroupKind, KVLayout, contiguous_plane
from kvbaton.connectors.objects import HEADER_BYTES, ObjectForm
from kvbaton.connectors.store import Pieces
from kvbaton.testing.kit import require
from kvbaton.testing.store_rig import StoreRig, case

NUM_BLOCKS = 4
TOKEN_FIRST: tuple[Axis, ...] = ("layer", "kv", "block", "token", "head", "feature")
"""An order in which a block is many short runs."""


@dataclass(frozen=True)
class Shape:
    """One form of KV.

    Attributes:
        dtype: of the data.
        kind: of the group.
        ranks: how many ranks share the heads.
        order: of the axes in memory.
        kv: 2, or 1 for a latent row.
        scales: whether a plane of scales goes with it.
        heads: of all ranks.
        tokens: of a block; 1 for a state.
        width: elements of a head.
    """

    dtype: str
    kind: GroupKind = GroupKind.FULL
    ranks: int = 1
    order: tuple[Axis, ...] = AXES
    kv: int = 2
    scales: bool = False
    heads: int = 4
    tokens: int = 16
    width: int = 24


class _Pool:
    """The KV memory of an engine's ranks, filled with noise."""

    def __init__(self, rig: StoreRig, shape: Shape) -> None:
        self.layouts = [_layout(shape, rank) for rank in range(shape.ranks)]
        self.form = ObjectForm(self.layouts)
        self.memory = [
            [rig.random.integers(0, 256, _num_bytes(plane.shape, plane.item_size), dtype=np.uint8)
             for plane in layout.planes]
            for layout in self.layouts
        ]  # fmt: skip

    def pieces(self, header: bytearray, block: int) -> Pieces:
        """The object of a block, in the memory where it lies."""
        views = [memoryview(header)]
        for run in self.form.runs:
            start = run.offset + block * run.stride
            views.append(self.memory[run.rank][run.region].data[start : start + run.length])
        return views

    def elements(self, block: int) -> list[bytes]:
        """What a block holds by plane, ranks side by side: read element by element by strides."""
        found = []
        for number in range(len(self.layouts[0].planes)):
            parts = []
            for rank, layout in enumerate(self.layouts):
                of = layout.planes[number]
                kind = np.dtype((np.void, of.item_size))
                buffer = self.memory[rank][number].data
                parts.append(np.ndarray(of.shape, kind, buffer, 0, of.strides)[block])
            found.append(np.concatenate(parts, axis=0).tobytes())
        return found


def _layout(shape: Shape, rank: int) -> KVLayout:
    heads = shape.heads // shape.ranks
    tokens = 1 if shape.kind is GroupKind.STATE else shape.tokens
    planes = [("data", shape.dtype, shape.width)] + [("scales", "float32", 1)] * shape.scales
    return KVLayout(
        group=0,
        kind=shape.kind,
        block_size=tokens,
        num_blocks=NUM_BLOCKS,
        window=32 if shape.kind is GroupKind.WINDOW else 0,
        planes=tuple(
            contiguous_plane(
                num_blocks=NUM_BLOCKS,
                block_size=tokens,
                num_heads=heads,
                head_dim=width,
                layers=(0, 1, 2),
                dtype=dtype,
                region=region,
                head_start=rank * heads,
                head_total=shape.heads,
                kv=shape.kv,
                order=shape.order,
                name=name,
            )
            for region, (name, dtype, width) in enumerate(planes)
        ),
    )


def _num_bytes(shape: tuple[int, ...], item_size: int) -> int:
    return int(np.prod(shape)) * item_size


def _move(rig: StoreRig, source: _Pool, target: _Pool, what: str) -> None:
    """Store every block of one pool and load it into another block of the other one."""
    require(source.form.layout == target.form.layout, f"{what}: shardings have other names")
    length = HEADER_BYTES + source.form.num_bytes
    for block in range(1, NUM_BLOCKS):
        key, there = rig.key(), NUM_BLOCKS - block
        sent = bytearray(source.form.header(bytes(32), key).pack(block))
        stored = rig.wait(rig.store.store([key], [source.pieces(sent, block)]), "store")
        header = bytearray(HEADER_BYTES)
        loaded = rig.wait(rig.store.load([key], [target.pieces(header, there)]), "load")
        require(stored == loaded == [True], f"{what}: {length} bytes: {stored}, {loaded}")
        require(header == sent, f"{what}: the header is wrong")
        same = source.elements(block) == target.elements(there)
        require(same, f"{what}: elements of block {block} are wrong")


@case(1)
def dtypes(rig: StoreRig) -> None:
    """Blocks of every dtype, with scales beside them or not, come back element by element."""
    for dtype in ITEM_SIZE:
        for scales in (False, True):
            shape = Shape(dtype, scales=scales)
            _move(rig, _Pool(rig, shape), _Pool(rig, shape), f"{dtype}, scales: {scales}")


@case(1)
def group_kinds(rig: StoreRig) -> None:
    """Blocks of full attention, windows, states and latent rows come back element by element."""
    for kind in GroupKind:
        for kv in (1, 2):
            shape = Shape("bfloat16", kind, kv=kv)
            _move(rig, _Pool(rig, shape), _Pool(rig, shape), f"{kind.value}, kv {kv}")


@case(1)
def encoder_outputs(rig: StoreRig) -> None:
    """Rows of an encoder with its levels come back element by element."""
    for dtype in ("bfloat16", "float32"):
        shape = Shape(dtype, kv=1, heads=1, tokens=32, width=72)
        _move(rig, _Pool(rig, shape), _Pool(rig, shape), f"encoder output, {dtype}")


@case(1)
def layouts(rig: StoreRig) -> None:
    """What one sharding and order of memory has stored, every other one can load."""
    shapes = [Shape("float16", ranks=n, order=o) for n in (1, 2, 4) for o in (AXES, TOKEN_FIRST)]
    for source in shapes:
        for target in shapes:
            what = f"TP {source.ranks} to TP {target.ranks}"
            _move(rig, _Pool(rig, source), _Pool(rig, target), what)

"""L1 and L4 of stores: an engine's objects, their layouts and their keys.

Objects have real KV layouts, and are moved from the memory of one sharding into that of another. A
store sees only keys, so sharing is checked for keys and store together: keys depend on the identity
of the engine, on the request's salt and adapter, and on the layout of the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec import structs

from kvbaton.connectors.keys import Extra, IdentityRecord, block_keys, root_key
from kvbaton.connectors.layout import AXES, ITEM_SIZE, Axis, GroupKind, KVLayout, contiguous_plane
from kvbaton.connectors.objects import HEADER_BYTES, ObjectForm
from kvbaton.connectors.store import Pieces
from kvbaton.testing.kit import require
from kvbaton.testing.store_rig import StoreRig, case

NUM_BLOCKS = 4
TOKEN_FIRST: tuple[Axis, ...] = ("layer", "kv", "block", "token", "head", "feature")
"""An order of axes in which a block is many short runs."""


@dataclass(frozen=True)
class Shape:
    """Parameters of a KV layout.

    Attributes:
        dtype: Data type.
        kind: Kind of the group.
        ranks: Number of ranks that share the heads.
        order: Order of the axes in memory.
        kv: 2, or 1 for a latent row.
        scales: Whether there is a plane of scales.
        heads: Number of heads of all ranks.
        tokens: Tokens per block; 1 for a state.
        width: Elements per head.
        layers: Ids of the layers.
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
    layers: tuple[int, ...] = (0, 1, 2)

    def layouts(self) -> tuple[KVLayout, ...]:
        """The layout of each rank."""
        return tuple(_layout(self, rank) for rank in range(self.ranks))


class _Pool:
    """The KV memory of an engine's ranks, filled with noise."""

    def __init__(self, rig: StoreRig, shape: Shape) -> None:
        self.layouts = shape.layouts()
        self.form = ObjectForm(self.layouts)
        self.memory = [
            [rig.random.integers(0, 256, math.prod(plane.shape) * plane.item_size, dtype=np.uint8)
             for plane in layout.planes]
            for layout in self.layouts
        ]  # fmt: skip

    def pieces(self, header: bytearray, block: int) -> Pieces:
        """The pieces of a block's object: a header, and views of the pool's memory."""
        views = [memoryview(header)]
        for run in self.form.runs:
            start = run.offset + block * run.stride
            views.append(self.memory[run.rank][run.region].data[start : start + run.length])
        return views

    def elements(self, block: int) -> list[bytes]:
        """Elements of a block, per plane and with the ranks' heads joined, read by strides."""
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
                layers=shape.layers,
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


def _move(rig: StoreRig, source: _Pool, target: _Pool, what: str) -> None:
    """Store every block of one pool, and load it into another block of the other pool."""
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
    """Blocks of every dtype, with and without scales, are loaded as stored, by element."""
    for dtype in ITEM_SIZE:
        for scales in (False, True):
            shape = Shape(dtype, scales=scales)
            _move(rig, _Pool(rig, shape), _Pool(rig, shape), f"{dtype}, scales: {scales}")


@case(1)
def group_kinds(rig: StoreRig) -> None:
    """Blocks of full attention, windows, states and latent rows are loaded as stored."""
    for kind in GroupKind:
        for kv in (1, 2):
            shape = Shape("bfloat16", kind, kv=kv)
            _move(rig, _Pool(rig, shape), _Pool(rig, shape), f"{kind.value}, kv {kv}")


@case(1)
def encoder_outputs(rig: StoreRig) -> None:
    """Rows of an encoder's output, with several levels, are loaded as stored."""
    for dtype in ("bfloat16", "float32"):
        shape = Shape(dtype, kv=1, heads=1, tokens=32, width=72)
        _move(rig, _Pool(rig, shape), _Pool(rig, shape), f"encoder output, {dtype}")


@case(1)
def layouts(rig: StoreRig) -> None:
    """Objects stored from one sharding and memory order can be loaded into every other."""
    shapes = [Shape("float16", ranks=n, order=o) for n in (1, 2, 4) for o in (AXES, TOKEN_FIRST)]
    for source in shapes:
        for target in shapes:
            what = f"TP {source.ranks} to TP {target.ranks}"
            _move(rig, _Pool(rig, source), _Pool(rig, target), what)


# --- L4: sharing ---


TOKENS = tuple(range(100, 164))
OWNED = Shape("bfloat16")
"""Layout of owners' objects, unless a case changes it."""


@dataclass(frozen=True)
class Owner:
    """Everything that determines which objects a request with the tokens `TOKENS` may use.

    Attributes:
        record: Identity record of the engine.
        salt: Cache salt of the request.
        adapter: Adapter digest of the request.
        layouts: Layouts of the engine's ranks.
        items: Multimodal items of the prompt.
    """

    record: IdentityRecord
    salt: str
    adapter: bytes
    layouts: tuple[KVLayout, ...]
    items: tuple[Extra, ...] = ()

    def keys(self) -> list[bytes]:
        """Keys of the objects of the prompt `TOKENS`."""
        form = ObjectForm(self.layouts)
        root = root_key(self.record.digest(), self.salt, self.adapter)
        keys = block_keys(root, TOKENS, form.block_size, extras=self.items)
        return [form.key(key) for key in keys]


def make_owner(weights: str) -> Owner:
    """An owner that differs from others only in the weights."""
    record = IdentityRecord(
        weights=weights,
        revision="main",
        rope="",
        dtype="bfloat16",
        kv_dtype="bfloat16",
        kv_scales="",
        adapter="",
        encoder="",
        draft="",
    )
    return Owner(record, "", b"", OWNED.layouts())


SIZE = 3000


@case(4)
def equals_share(rig: StoreRig) -> None:
    """Owners of equal identity, salt, adapter and layout share objects, whatever their sharding."""
    owner = make_owner(weights=rig.key().hex())
    objects = {key: rig.noise(SIZE) for key in owner.keys()}
    rig.put(objects)
    if rig.store.capabilities.persistent:
        rig.reopen()
    twin = make_owner(weights=owner.record.weights)
    for other in (twin, replace(twin, layouts=replace(OWNED, ranks=2).layouts())):
        keys = other.keys()
        require(all(rig.found(keys)), "equals do not find each other's objects")
        rig.expect(dict(zip(keys, objects.values(), strict=True)), "stored by an equal")


def _must_be_apart(rig: StoreRig, record: Mapping[str, str] = {}, **changes: Any) -> None:
    """Check that an owner that differs in one field shares no objects with another one.

    Args:
        rig: The rig.
        record: Changed fields of the other owner's identity record.
        changes: Changed fields of the other owner.
    """
    owner = make_owner(weights=rig.key().hex())
    ours = {key: rig.noise(SIZE) for key in owner.keys()}
    rig.put(ours)
    keys = replace(owner, record=structs.replace(owner.record, **record), **changes).keys()
    require(not any(rig.found(keys)), "lookup finds the objects of another")
    loaded = [rig.get(key, SIZE) for key in keys]
    require(loaded == [None] * len(keys), "load gives the objects of another")
    theirs = {key: rig.noise(SIZE) for key in keys}
    rig.put(theirs)
    rig.expect(ours, "beside the objects of another")
    rig.expect(theirs, "beside the objects of another")


@case(4)
def another_salt(rig: StoreRig) -> None:
    """Requests with different cache salts never share."""
    for salt in ("a", " ", "\0"):
        _must_be_apart(rig, salt=salt)


@case(4)
def another_adapter(rig: StoreRig) -> None:
    """Requests with different adapters never share, nor do engines with different merged ones."""
    _must_be_apart(rig, adapter=b"\1" * 32)
    _must_be_apart(rig, {"adapter": "merged"})


@case(4)
def another_model(rig: StoreRig) -> None:
    """Engines with other weights, or another revision of them, never share."""
    _must_be_apart(rig, {"weights": rig.key().hex()})
    _must_be_apart(rig, {"revision": "v2"})


@case(4)
def another_item(rig: StoreRig) -> None:
    """Prompts of equal tokens share only if their images and the images' positions are equal.

    Nor do prompts share across different encoders or processors.
    """
    image, other = Extra(0, 60, rig.key()), Extra(0, 60, rig.key())
    for items in ((image,), (other, Extra(60, 4, image.digest)), (image._replace(length=61),)):
        _must_be_apart(rig, items=items)
    _must_be_apart(rig, {"encoder": "another"})


@case(4)
def another_dtype(rig: StoreRig) -> None:
    """Engines that compute or keep KV in different data types never share."""
    _must_be_apart(rig, {"dtype": "float16"})
    _must_be_apart(rig, {"kv_dtype": "float8_e4m3fn"})


@case(4)
def another_layout(rig: StoreRig) -> None:
    """Objects of different layouts (dtype, block size, layers, width) are different objects."""
    changes: dict[str, Any] = {"dtype": "float16", "tokens": 32, "layers": (0, 1), "width": 16}
    for name, value in changes.items():
        _must_be_apart(rig, layouts=replace(OWNED, **{name: value}).layouts())

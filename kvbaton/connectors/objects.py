"""What a store keeps of KV: one object per block, the same bytes whatever the sharding.

An object is a header of `HEADER_BYTES` and the block's bytes in *canonical order*: plane after
plane by name, each ``[head, layer, kv, token, feature]`` with all heads and layers of the model. So
ranks of any tensor parallelism read and write the same object; on one rank with the default layout
a block is one run of memory, and so is a head range of it.

The key of an object covers the block's chained key (tokens, identity, salt, adapter: `keys.py`),
all of the layout that its bytes depend on, and the version of this format. The header names what
the object is, with a digest of the KV sums that the step which wrote the block left (`digest.py`):
whoever loads an object recomputes them from memory, and takes any difference for a miss. Only full
blocks become objects.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from kvbaton.connectors.base import RangeColumn, Ranges
from kvbaton.connectors.digest import Sums, whole_values
from kvbaton.connectors.layout import BLOCK, FEATURE, KV, KVLayout, Plane, contiguous_plane
from kvbaton.connectors.pairing import GroupPairing, planes_named
from kvbaton.connectors.plan import plan, swap
from kvbaton.connectors.store import KEY_BYTES
from kvbaton.errors import LayoutMismatchError

HEADER_BYTES = 128
MAGIC = b"kvbaton\0"
VERSION = 2
"""Of digest and header. Part of the keys: what another version wrote is absent, not wrong."""

_FIELDS = struct.Struct("<8sII32s32sQQ16x")
"""Magic, version, valid tokens, identity, key, payload bytes, digest; zeros for later versions."""
_CHECK_BYTES = HEADER_BYTES - _FIELDS.size


@dataclass(frozen=True)
class ObjectHeader:
    """What an object says of itself.

    Attributes:
        identity: `IdentityRecord.digest` of the engine that computed it, 32 bytes.
        key: the object's own.
        num_bytes: of the payload.
        tokens: valid ones: all of a block.
    """

    identity: bytes
    key: bytes
    num_bytes: int
    tokens: int

    def pack(self, digest: int) -> bytes:
        """The header, `HEADER_BYTES` long.

        Args:
            digest: of the payload, from `ObjectForm.digests`.
        """
        data = _FIELDS.pack(
            MAGIC, VERSION, self.tokens, self.identity, self.key, self.num_bytes, digest
        )
        check = hashlib.blake2b(data, digest_size=_CHECK_BYTES, person=b"kvbaton-header")
        return data + check.digest()

    def check(self, data: bytes | bytearray | memoryview) -> int | None:
        """The digest that a header claims; None if it is torn or another object's.

        Args:
            data: any bytes, from any source.
        """
        if len(data) != HEADER_BYTES:
            return None
        raw = bytes(data)
        digest: int = _FIELDS.unpack(raw[: _FIELDS.size])[-1]
        return digest if raw == self.pack(digest) else None


class BlockBytes(NamedTuple):
    """Bytes of each block that lie in one piece: in block b at ``offset + b * stride``.

    Attributes:
        rank: whose memory.
        region: index of its `Memory`.
        offset: of block 0, in bytes.
        stride: from block to block, in bytes.
        length: in bytes.
    """

    rank: int
    region: int
    offset: int
    stride: int
    length: int


class ObjectForm:
    """The form of the objects of one KV group: which runs of the ranks' memories make one up.

    Args:
        layouts: the group's layout on each rank; together they hold all heads and layers.

    Attributes:
        group: number of the KV group.
        kind: of the group.
        block_size: tokens of an object.
        layout: digest of all that decides what the payload's bytes mean, 32 bytes.
        num_bytes: of the payload.
        runs: of a block, in canonical order.
        replicas: runs (from, to): what further ranks hold of the same bytes, to be copied after a
            load.

    Raises:
        LayoutMismatchError: heads are missing, or replicas are cut into other runs.
    """

    def __init__(self, layouts: Sequence[KVLayout]) -> None:
        first = layouts[0]
        self.group, self.kind, self.block_size = first.group, first.kind, first.block_size
        self._layouts = tuple(layouts)
        self._canonical = _canonical(layouts)
        self._pairing = GroupPairing(layouts, [self._canonical])
        said = msgspec.json.encode(self._canonical, order="deterministic")
        digest = hashlib.blake2b(said, digest_size=KEY_BYTES, person=b"kvbaton-layout")
        self.layout = digest.digest()
        planes = self._canonical.planes
        self.num_bytes = sum(plane.strides[0] for plane in planes)
        runs: list[BlockBytes] = []
        replicas: list[tuple[BlockBytes, BlockBytes]] = []
        for plane in planes:
            held, copies = self._plane_runs(plane)
            runs += held
            replicas += copies
        self.runs, self.replicas = tuple(runs), tuple(replicas)

    def key(self, block_key: bytes) -> bytes:
        """Key of a block's object, 32 bytes.

        Args:
            block_key: of `keys.block_keys`, 32 bytes.

        Raises:
            ValueError: it has another length.
        """
        if len(block_key) != KEY_BYTES:
            raise ValueError(f"a block's key must have {KEY_BYTES} bytes, not {len(block_key)}")
        data = block_key + self.layout + struct.pack("<QQ", self.group, VERSION)
        return hashlib.blake2b(data, digest_size=KEY_BYTES, person=b"kvbaton-object").digest()

    def header(self, identity: bytes, key: bytes) -> ObjectHeader:
        """What the object under `key` must say of itself."""
        return ObjectHeader(identity, key, self.num_bytes, self.block_size)

    def digests(self, sums: Sequence[Sums]) -> list[int]:
        """One 64-bit value per block, equal whatever the sharding.

        Args:
            sums: per rank, of any full blocks, see `digest.Sums`.
        """
        values: list[int] = whole_values(self._pairing, sums, VERSION).tolist()
        return values

    def _plane_runs(
        self, plane: Plane
    ) -> tuple[list[BlockBytes], list[tuple[BlockBytes, BlockBytes]]]:
        """Runs of a plane in canonical order, and those of its replicas."""
        name = plane.name
        own = planes_named(name, self._layouts)
        ranks = [
            msgspec.structs.replace(layout, planes=(of,))
            for layout, of in zip(self._layouts, own, strict=True)
        ]
        whole = msgspec.structs.replace(self._canonical, planes=(plane,))
        block = np.zeros(1, np.int64)
        there = plan(GroupPairing(ranks, [whole]), block, block, 0, self.block_size)
        back = plan(GroupPairing([whole], ranks), block, block, 0, self.block_size)
        held = {
            at: BlockBytes(rank, region, offset, own[rank].strides[BLOCK], length)
            for (rank, _), ranges in there.items()
            for at, region, offset, length in _spread(ranges)
        }
        copies = []
        for (_, rank), ranges in back.items():
            for at, region, offset, length in _spread(swap(ranges)):
                run = BlockBytes(rank, region, offset, own[rank].strides[BLOCK], length)
                if held.get(at, run).length != length or at not in held:
                    raise LayoutMismatchError(f"plane {name!r}: replicas must be laid out alike")
                if held[at] != run:
                    copies.append((held[at], run))
        return [held[at] for at in sorted(held)], copies


def _spread(ranges: Ranges) -> list[tuple[int, int, int, int]]:
    """Every single run: offset in the object, source region, source offset, length."""
    column = RangeColumn
    return [
        (
            row[column.TARGET_OFFSET] + i * row[column.TARGET_STRIDE],
            row[column.SOURCE_REGION],
            row[column.SOURCE_OFFSET] + i * row[column.SOURCE_STRIDE],
            row[column.LENGTH],
        )
        for row in ranges.tolist()
        for i in range(row[column.COUNT])
    ]


def _canonical(layouts: Sequence[KVLayout]) -> KVLayout:
    """The layout of a pool of one object."""
    planes, offset = [], 0
    for name in sorted(plane.name for plane in layouts[0].planes):
        mine = planes_named(name, layouts)
        plane = contiguous_plane(
            num_blocks=1,
            block_size=layouts[0].block_size,
            num_heads=mine[0].head_total,
            head_dim=mine[0].shape[FEATURE],
            layers=tuple(sorted({layer for plane in mine for layer in plane.layers})),
            dtype=mine[0].dtype,
            offset=offset,
            kv=mine[0].shape[KV],
            name=name,
        )
        offset += plane.strides[0]
        planes.append(plane)
    return msgspec.structs.replace(layouts[0], num_blocks=1, planes=tuple(planes))

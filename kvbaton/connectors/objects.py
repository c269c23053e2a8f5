"""The format of KV blocks in a store: one object per full block, independent of the sharding.

An object is a header of `HEADER_BYTES` and the block's bytes in *canonical order*: plane after
plane by name, each ``[head, layer, kv, token, feature]`` with all heads and layers of the model. So
ranks of any tensor parallelism read and write the same object. On one rank with the default layout
a block is one run of memory, and so is a range of its heads.

The key of an object covers the block's chained key (tokens, identity, salt, adapter: `keys.py`),
everything in the layout that determines the bytes, and the version of this format. The header holds
the identity and key of the object, and a digest of the sums of its KV from the step that computed
the block (`digest.py`). After a load the sums are recomputed from memory, and a difference counts
as a miss.
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
"""Version of digest and header. It is part of the keys: objects of other versions are misses."""

_FIELDS = struct.Struct("<8sII32s32sQQ16x")
"""Magic, version, valid tokens, identity, key, payload bytes, digest; zeros are reserved."""
_CHECK_BYTES = HEADER_BYTES - _FIELDS.size


@dataclass(frozen=True)
class ObjectHeader:
    """The header of an object.

    Attributes:
        identity: `IdentityRecord.digest` of the engine that computed the block, 32 bytes.
        key: Key of the object, 32 bytes.
        num_bytes: Bytes of the payload.
        tokens: Valid tokens: all of the block.
    """

    identity: bytes
    key: bytes
    num_bytes: int
    tokens: int

    def pack(self, digest: int) -> bytes:
        """The encoded header, `HEADER_BYTES` long.

        Args:
            digest: Digest of the payload, from `ObjectForm.digests`.
        """
        data = _FIELDS.pack(
            MAGIC, VERSION, self.tokens, self.identity, self.key, self.num_bytes, digest
        )
        check = hashlib.blake2b(data, digest_size=_CHECK_BYTES, person=b"kvbaton-header")
        return data + check.digest()

    def check(self, data: bytes | bytearray | memoryview) -> int | None:
        """The digest in an encoded header; None if the header is torn or belongs to another object.

        Args:
            data: Untrusted bytes of any length.
        """
        if len(data) != HEADER_BYTES:
            return None
        raw = bytes(data)
        digest: int = _FIELDS.unpack(raw[: _FIELDS.size])[-1]
        return digest if raw == self.pack(digest) else None


class BlockBytes(NamedTuple):
    """A contiguous run of bytes of every block: in block b it begins at ``offset + b * stride``.

    Attributes:
        rank: Rank that holds the run.
        region: Index of the rank's `Memory`.
        offset: Offset of the run in block 0, in bytes.
        stride: Bytes from one block to the next.
        length: Length of the run in bytes.
    """

    rank: int
    region: int
    offset: int
    stride: int
    length: int


class ObjectForm:
    """The objects of one KV group: which runs of the ranks' memories make up one object.

    Args:
        layouts: The group's layout on each rank; together they hold all heads and layers.

    Attributes:
        group: Number of the KV group.
        kind: Kind of the group.
        block_size: Tokens of an object.
        layout: Digest of everything that determines the meaning of the payload, 32 bytes.
        num_bytes: Bytes of the payload.
        runs: Runs of a block, in canonical order.
        replicas: Pairs of runs (from, to): replicas on further ranks, to be copied after a load.

    Raises:
        LayoutMismatchError: Heads are missing, or replicas are cut into different runs.
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
            block_key: Key of the block from `keys.block_keys`, 32 bytes.

        Raises:
            ValueError: The key has another length.
        """
        if len(block_key) != KEY_BYTES:
            raise ValueError(f"a block's key must have {KEY_BYTES} bytes, not {len(block_key)}")
        data = block_key + self.layout + struct.pack("<QQ", self.group, VERSION)
        return hashlib.blake2b(data, digest_size=KEY_BYTES, person=b"kvbaton-object").digest()

    def header(self, identity: bytes, key: bytes) -> ObjectHeader:
        """The header that the object under `key` must have."""
        return ObjectHeader(identity, key, self.num_bytes, self.block_size)

    def digests(self, sums: Sequence[Sums]) -> list[int]:
        """One 64-bit digest per block, independent of the sharding.

        Args:
            sums: Per rank, the sums of some full blocks, see `digest.Sums`.
        """
        values: list[int] = whole_values(self._pairing, sums, VERSION).tolist()
        return values

    def _plane_runs(
        self, plane: Plane
    ) -> tuple[list[BlockBytes], list[tuple[BlockBytes, BlockBytes]]]:
        """Runs of a plane in canonical order, and pairs of runs (from, to) of its replicas."""
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
    """All runs, one by one: offset in the object, source region, source offset, length."""
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
    """The layout of a pool that holds one block, in canonical order with all heads and layers."""
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

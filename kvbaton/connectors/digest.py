"""Digests of a write: how a source computes the claimed values, and how a target checks them.

`kernels.digest` gives one 64-bit sum per (block, plane, layer, K or V, head). Both sides add the
sums of blocks into *units* of lcm(both block sizes) tokens. All sums of a unit that one rank sends
to another, over all planes, are folded into one value, keyed by transfer, attempt, group and unit,
and by plane, layer, K or V and head:

    value(unit) = sum over planes of
        u(plane, unit) * sum over (layer, kv, head) of (s ^ (s >> 32)) * p(plane, layer, kv, head)

mod 2^64, with u and p odd. `s ^ (s >> 32)` is a bijection that lets the top bits of s affect more
than the top bits of the product. So bytes of another transfer, unit, plane, layer or head give
another value, whatever the sharding of either side.

`mix` is SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), seeded by BLAKE2b of transfer, attempt, group
and plane.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvbaton.connectors.layout import HEAD, KV, KVLayout
from kvbaton.connectors.pairing import GroupPairing, PlaneShare
from kvbaton.messages.control import DigestRun
from kvbaton.types import Attempt

Sums = npt.NDArray[np.uint64]
"""Digest sums, uint64 [blocks or units, ...].

The shape is [blocks, layers, kv, heads] for a group of one plane. For several planes it is
[blocks, n]: the flat sums of each plane, [layers, kv, heads], in the layout's order.
"""


T_co = TypeVar("T_co", covariant=True)


class PendingResult(Protocol[T_co]):
    """A result that is being copied from a device."""

    def poll(self) -> T_co | None:
        """The result, or None while it is not there yet."""


PendingSums = PendingResult[list[Sums]]
"""Per rank, digest sums of the blocks asked for; available once the blocks are final."""
PendingDigests = PendingResult[list[list[Sums]]]
"""Digest sums of several ranges, per range and rank."""


class BlockRange(NamedTuple):
    """Consecutive logical blocks of one sequence, and the tokens of them to be summed.

    Attributes:
        group: Number of the KV group.
        blocks: Physical block ids.
        first_position: Absolute position of the first token of ``blocks[0]``.
        start: First absolute position to sum.
        end: One past the last absolute position to sum.
    """

    group: int
    blocks: Sequence[int]
    first_position: int
    start: int
    end: int


def unit_sums(sums: Sums, first_block: int, block_size: int, unit: int) -> tuple[int, Sums]:
    """Add the sums of consecutive blocks into units.

    Args:
        sums: Sums [blocks, ...].
        first_block: Logical number of the first block.
        block_size: Tokens per block.
        unit: Tokens per unit, a multiple of `block_size`.

    Returns:
        The number of the first unit, and the sums [units, ...].
    """
    assert unit % block_size == 0, f"units of {unit} tokens cut blocks of {block_size}"
    per_unit = unit // block_size
    first_unit, lead = divmod(first_block, per_unit)
    if per_unit == 1:
        return first_unit, sums
    num_units = -(-(lead + len(sums)) // per_unit)
    padded = np.zeros((num_units * per_unit, *sums.shape[1:]), np.uint64)
    padded[lead : lead + len(sums)] = sums
    return first_unit, padded.reshape(num_units, per_unit, *sums.shape[1:]).sum(1)


def fold(
    sums: Sums,
    *,
    attempt: Attempt,
    group: int,
    plane: str,
    first_unit: int,
    layers: Sequence[int],
    head_start: int,
) -> npt.NDArray[np.uint64]:
    """One value per unit of one plane, keyed by everything that identifies its bytes.

    Args:
        sums: Sums [units, layers, kv, heads].
        attempt: The attempt: transfer id of 16 bytes and attempt number.
        group: Number of the KV group.
        plane: Name of the plane.
        first_unit: Number of the first unit.
        layers: Global ids along the layer axis.
        head_start: Global id of the first head.

    Returns:
        uint64 [units].
    """
    name = attempt.transfer_id + struct.pack("<QQ", attempt.number, group) + plane.encode()
    plane_seed, unit_seed = struct.unpack("<QQ", hashlib.blake2b(name, digest_size=16).digest())
    numbers = np.arange(first_unit, first_unit + len(sums), dtype=np.uint64)
    keys = _mix(numbers + np.uint64(unit_seed)) | np.uint64(1)
    return _folded(sums, plane_seed, layers, head_start) * keys


def _folded(
    sums: Sums, seed: int, layers: Sequence[int], head_start: int
) -> npt.NDArray[np.uint64]:
    """One value per unit, not yet keyed by the unit's number: uint64 [units]."""
    _, _, planes, heads = sums.shape
    mixed = (sums >> np.uint64(32)).reshape(len(sums), -1)
    np.bitwise_xor(mixed, sums.reshape(mixed.shape), out=mixed)
    keys = _fold_keys(seed, tuple(layers), planes, head_start, heads)
    totals: npt.NDArray[np.uint64] = np.einsum("us,s->u", mixed, keys)  # matmul takes twice as long
    return totals


@lru_cache(maxsize=256)
def _fold_keys(
    seed: int, layers: tuple[int, ...], planes: int, head_start: int, heads: int
) -> npt.NDArray[np.uint64]:
    """p(plane, layer, kv, head) of one plane, flat. Cached: equal for all writes of an attempt."""
    keys = _mix(np.asarray(layers, np.uint64) + np.uint64(seed))[:, None]
    kinds: Sums = np.arange(planes, dtype=np.uint64)
    ids: Sums = np.arange(head_start, head_start + heads, dtype=np.uint64)
    found: npt.NDArray[np.uint64] = _mix(_mix(keys + kinds)[..., None] + ids) | np.uint64(1)
    return found.ravel()


def whole_values(pairing: GroupPairing, sums: Sequence[Sums], seed: int) -> npt.NDArray[np.uint64]:
    """One value per block over all planes, layers and heads, independent of the sharding.

    Args:
        pairing: Pairing of the group, with one target rank that holds everything.
        sums: Per source rank, the sums of some blocks, [blocks, ...].
        seed: Separates the values of one purpose from those of another.

    Returns:
        uint64 [blocks].
    """
    total = np.zeros(len(sums[0]), np.uint64)
    for (rank, _), shares in pairing.shares.items():
        flat = sums[rank].reshape(len(sums[rank]), -1)
        for share in shares:
            name = struct.pack("<Q", seed) + share.source.name.encode()
            key = hashlib.blake2b(name, digest_size=8).digest()
            kinds = share.source.shape[KV]
            mine = flat[:, share.source_columns].reshape(len(flat), len(share.layers), kinds, -1)
            total += _folded(mine, int.from_bytes(key, "little"), share.layers, share.head_start)
    return total


def claims(
    pairing: GroupPairing, sums: Sequence[Sums], *, first_block: int, attempt: Attempt
) -> list[DigestRun]:
    """The source's digests of a write in one group: a run per pair of ranks that share bytes.

    Args:
        pairing: Pairing of the group.
        sums: Per source rank, the sums of consecutive blocks, [blocks, ...], over exactly the
            tokens that the write moves.
        first_block: Logical number of the first of the source's blocks.
        attempt: The attempt of the write.
    """
    runs = []
    for (source, target), shares in pairing.shares.items():
        layout = pairing.sources[source]
        where = first_block, pairing.unit, attempt
        first_unit, values = _values(sums[source], layout, shares, True, *where)
        data = values.astype("<u8").tobytes()
        runs.append(DigestRun(source, target, layout.group, first_unit, data))
    return runs


def mismatches(
    pairing: GroupPairing,
    sums: Sequence[Sums],
    runs: Iterable[DigestRun],
    *,
    first_block: int,
    start: int,
    end: int,
    attempt: Attempt,
) -> list[tuple[int, int]]:
    """Token ranges of a landed write whose digests differ from the source's, in one group.

    If the run of a pair is missing, repeated or unknown, the whole write is bad. Values of units
    for which the target has no block are ignored.

    Args:
        pairing: Pairing of the group.
        sums: Per target rank, the sums of consecutive blocks, [blocks, ...], recomputed from memory
            over the tokens that the write moved.
        runs: The source's digests; those of other groups are ignored.
        first_block: Logical number of the first of the target's blocks.
        start: First token of the write.
        end: One past the last token of the write.
        attempt: The attempt of the write.

    Returns:
        Ranges [start, end), sorted and disjoint; empty if all digests match.
    """
    claimed: dict[tuple[int, int], DigestRun] = {}
    for run in runs:
        if run.group == pairing.targets[0].group:
            if (run.source_rank, run.target_rank) in claimed:
                return [(start, end)]
            claimed[run.source_rank, run.target_rank] = run
    if claimed.keys() != pairing.shares.keys():
        return [(start, end)]
    bad = set[int]()
    for pair, shares in pairing.shares.items():
        layout, where = pairing.targets[pair[1]], (first_block, pairing.unit, attempt)
        first, values = _values(sums[pair[1]], layout, shares, False, *where)
        run = claimed[pair]
        given = np.frombuffer(run.values[: len(run.values) // 8 * 8], "<u8")
        differs = np.ones(len(values), np.bool_)  # a unit without a claimed value is bad
        low = max(first, run.first_unit)
        past = min(first + len(values), run.first_unit + len(given))
        if low < past:
            theirs = given[low - run.first_unit : past - run.first_unit]
            differs[low - first : past - first] = values[low - first : past - first] != theirs
        bad.update((np.flatnonzero(differs) + first).tolist())
    ranges: list[tuple[int, int]] = []
    for unit in sorted(bad):
        low, high = max(start, unit * pairing.unit), min(end, (unit + 1) * pairing.unit)
        if ranges and ranges[-1][1] == low:
            low = ranges.pop()[0]
        ranges.append((low, high))
    return ranges


def _values(
    sums: Sums,
    layout: KVLayout,
    shares: Sequence[PlaneShare],
    of_source: bool,
    first_block: int,
    unit: int,
    attempt: Attempt,
) -> tuple[int, npt.NDArray[np.uint64]]:
    """The first unit and the values of a pair's shares, from the sums of all planes of one rank."""
    flat = sums.reshape(len(sums), -1)  # all sums of a block in a row
    width = sum(math.prod(plane.shape[HEAD : KV + 1]) for plane in layout.planes)
    assert flat.shape[1] == width, f"{flat.shape[1]} sums a block, of planes of {width}"
    first_unit, units = unit_sums(flat, first_block, layout.block_size, unit)
    total = np.zeros(len(units), np.uint64)
    for share in shares:
        mine = units[:, share.source_columns if of_source else share.target_columns]
        total += fold(
            mine.reshape(len(mine), len(share.layers), share.source.shape[KV], -1),
            attempt=attempt,
            group=layout.group,
            plane=share.source.name,
            first_unit=first_unit,
            layers=share.layers,
            head_start=share.head_start,
        )
    return first_unit, total


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

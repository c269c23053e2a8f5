"""Digests on the wire: what a source claims of a write, and what a target makes of it.

`kernels.digest` gives one 64-bit sum per (block, layer, K or V, head). Both sides add blocks into
*units* of lcm(both block sizes) tokens, and fold all sums of a unit that one rank sends to another
into one value, keyed by transfer, attempt, group and unit, and by layer, K or V and head:

    value(unit) = u(unit) * sum over (layer, kv, head) of (s ^ (s >> 32)) * p(layer, kv, head)

mod 2^64, u and p odd. `s ^ (s >> 32)` is one-to-one and lets top bits count in full. So bytes of
another transfer, place, layer or head differ in value, whatever the sharding of either side.

`mix` is SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), seeded by BLAKE2b of transfer, attempt and
group.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvbaton.connectors.layout import KVLayout, Plane
from kvbaton.connectors.pairing import Share, shares
from kvbaton.messages.control import DigestRun

Sums = npt.NDArray[np.uint64]
"""[blocks or units, layers, kv, heads]."""


def unit_tokens(source: KVLayout, target: KVLayout) -> int:
    """Tokens of one unit: whole blocks of either side fit into it."""
    return math.lcm(source.block_size, target.block_size)


def unit_sums(sums: Sums, first_block: int, block_size: int, unit: int) -> tuple[int, Sums]:
    """Add consecutive blocks into units.

    Args:
        sums: [blocks, layers, kv, heads].
        first_block: logical number of the first.
        block_size: tokens per block.
        unit: tokens per unit, a multiple of `block_size`.

    Returns:
        The number of the first unit, and the sums [units, layers, kv, heads].
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
    transfer_id: bytes,
    attempt: int,
    group: int,
    first_unit: int,
    layers: Sequence[int],
    head_start: int,
) -> npt.NDArray[np.uint64]:
    """One value per unit, keyed by all that names its bytes.

    Args:
        sums: [units, layers, kv, heads].
        transfer_id: 16 bytes.
        attempt: of the transfer.
        group: KV group.
        first_unit: number of the first unit.
        layers: global ids along the layer axis.
        head_start: global id of the first head.

    Returns:
        [units] uint64.
    """
    name = transfer_id + struct.pack("<QQ", attempt, group)
    plane_seed, unit_seed = struct.unpack("<QQ", hashlib.blake2b(name, digest_size=16).digest())
    units = _mix(_numbers(first_unit, len(sums)) + np.uint64(unit_seed))
    return _folded(sums, plane_seed, layers, head_start) * (units | np.uint64(1))


def _folded(
    sums: Sums, seed: int, layers: Sequence[int], head_start: int
) -> npt.NDArray[np.uint64]:
    """One value per unit, whatever its number: [units]."""
    _, _, planes, heads = sums.shape
    keys = _mix(np.asarray(layers, np.uint64) + np.uint64(seed))[:, None]
    keys = _mix(keys + _numbers(0, planes))[..., None]
    keys = _mix(keys + _numbers(head_start, heads)) | np.uint64(1)
    mixed = sums ^ (sums >> np.uint64(32))
    totals: npt.NDArray[np.uint64] = mixed.reshape(len(sums), -1) @ keys.ravel()
    return totals


def whole_values(
    sums: Sequence[Sums], layouts: Sequence[KVLayout], whole: KVLayout, seed: int
) -> npt.NDArray[np.uint64]:
    """One value per block over all layers and heads, equal whatever the sharding.

    Args:
        sums: per rank, of any blocks, [blocks, layers, kv, heads].
        layouts: the group's layout on each rank; `sums` are those of its first plane.
        whole: the layout of a rank that holds everything.
        seed: tells the values of one purpose from those of another.

    Returns:
        [blocks] uint64.
    """
    total = np.zeros(len(sums[0]), np.uint64)
    for share in _shares(layouts, [whole]):
        rank = share.source_rank
        mine = _cut(sums[rank], layouts[rank].planes[0], share)
        total += _folded(mine, seed, share.layers, share.head_start)
    return total


def claims(
    sums: Sequence[Sums],
    sources: Sequence[KVLayout],
    targets: Sequence[KVLayout],
    *,
    first_block: int,
    transfer_id: bytes,
    attempt: int,
) -> tuple[DigestRun, ...]:
    """What the source says of a write in one group: a run for each pair of ranks that share heads.

    Args:
        sums: per source rank, of consecutive blocks, [blocks, layers, kv, heads], counting exactly
            the tokens that the write moves.
        sources: the group's layout on each source rank; `sums` are those of its first plane.
        targets: likewise on each target rank.
        first_block: logical number of the first of the source's blocks.
        transfer_id: of the transfer.
        attempt: of the transfer.
    """
    unit = unit_tokens(sources[0], targets[0])
    group = sources[0].group
    runs = []
    for share in _shares(sources, targets):
        rank = share.source_rank
        first_unit, values = _values(
            sums[rank], sources[rank], share, first_block, unit, transfer_id, attempt
        )
        data = values.astype("<u8").tobytes()
        runs.append(DigestRun(rank, share.target_rank, group, first_unit, data))
    return tuple(runs)


def mismatches(
    sums: Sequence[Sums],
    sources: Sequence[KVLayout],
    targets: Sequence[KVLayout],
    runs: Iterable[DigestRun],
    *,
    first_block: int,
    start: int,
    end: int,
    transfer_id: bytes,
    attempt: int,
) -> list[tuple[int, int]]:
    """Token ranges of a landed write that are not what the source claims, in one group.

    A pair's missing, repeated or unknown run makes the whole write bad. Claims about units of which
    the target has no block are passed over.

    Args:
        sums: per target rank, of consecutive blocks, recomputed from memory over the tokens that
            the write moved, [blocks, layers, kv, heads].
        sources: the group's layout on each source rank.
        targets: likewise on each target rank; `sums` are those of its first plane.
        runs: what the source claims; those of other groups are passed over.
        first_block: logical number of the first of the target's blocks.
        start: first token of the write.
        end: past its last token.
        transfer_id: of the transfer.
        attempt: of the transfer.

    Returns:
        Ranges [start, end), sorted and apart; empty if all is well.
    """
    mine = [run for run in runs if run.group == targets[0].group]
    claimed = {(run.source_rank, run.target_rank): run for run in mine}
    expected = {
        (share.source_rank, share.target_rank): share for share in _shares(sources, targets)
    }
    if len(mine) != len(claimed) or claimed.keys() != expected.keys():
        return [(start, end)]
    unit = unit_tokens(sources[0], targets[0])
    bad: set[int] = set()
    for pair, share in expected.items():
        rank = share.target_rank
        first_unit, values = _values(
            sums[rank], targets[rank], share, first_block, unit, transfer_id, attempt
        )
        bad |= _differing(claimed[pair], first_unit, values)
    return _token_ranges(sorted(bad), unit, start, end)


def _shares(sources: Sequence[KVLayout], targets: Sequence[KVLayout]) -> tuple[Share, ...]:
    return shares(
        [layout.planes[0] for layout in sources], [layout.planes[0] for layout in targets]
    )


def _values(
    sums: Sums,
    layout: KVLayout,
    share: Share,
    first_block: int,
    unit: int,
    transfer_id: bytes,
    attempt: int,
) -> tuple[int, npt.NDArray[np.uint64]]:
    """The first unit and the values of a share, from one rank's sums of all that it holds."""
    first_unit, units = unit_sums(
        _cut(sums, layout.planes[0], share), first_block, layout.block_size, unit
    )
    return first_unit, fold(
        units,
        transfer_id=transfer_id,
        attempt=attempt,
        group=layout.group,
        first_unit=first_unit,
        layers=share.layers,
        head_start=share.head_start,
    )


def _cut(sums: Sums, plane: Plane, share: Share) -> Sums:
    heads = slice(share.head_start - plane.head_start, share.head_end - plane.head_start)
    if share.layers != plane.layers:
        sums = sums[:, [plane.layers.index(layer) for layer in share.layers]]
    return sums[..., heads]


def _differing(run: DigestRun, first_unit: int, values: npt.NDArray[np.uint64]) -> set[int]:
    """Numbers of the units whose value is not the claimed one, or not claimed at all."""
    whole = len(run.values) // 8 * 8
    given = np.frombuffer(run.values[:whole], "<u8").tolist()
    claimed = dict(enumerate(given, run.first_unit))
    mine = dict(enumerate(values.tolist(), first_unit))
    return {number for number, value in mine.items() if claimed.get(number) != value}


def _token_ranges(units: list[int], unit: int, start: int, end: int) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for number in units:
        low, high = max(start, number * unit), min(end, (number + 1) * unit)
        if ranges and ranges[-1][1] == low:
            low = ranges.pop()[0]
        ranges.append((low, high))
    return ranges


def _numbers(first: int, count: int) -> npt.NDArray[np.uint64]:
    return np.arange(first, first + count, dtype=np.uint64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

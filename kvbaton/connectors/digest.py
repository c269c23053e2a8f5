"""Digests on the wire: what a source claims of a write, and what a target makes of it.

`kernels.digest` gives one 64-bit sum per (block, plane, layer, K or V, head). Both sides add blocks
into *units* of lcm(both block sizes) tokens, and fold all sums of a unit that one rank sends to
another, those of every plane, into one value, keyed by transfer, attempt, group and unit, and by
plane, layer, K or V and head:

    value(unit) = sum over planes of
        u(plane, unit) * sum over (layer, kv, head) of (s ^ (s >> 32)) * p(plane, layer, kv, head)

mod 2^64, u and p odd. `s ^ (s >> 32)` is one-to-one and lets top bits count in full. So bytes of
another transfer, place, plane, layer or head differ in value, whatever the sharding of either side.

`mix` is SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), seeded by BLAKE2b of transfer, attempt, group
and plane.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvbaton.connectors.layout import KVLayout, Plane
from kvbaton.connectors.pairing import Share, planes_named, shares
from kvbaton.messages.control import DigestRun

Sums = npt.NDArray[np.uint64]
"""[blocks or units, ...]: of every plane of a group, in the layout's order, [layers, kv, heads].

So [blocks, layers, kv, heads] where there is one plane; where there are more, all of a block's sums
are flat, end to end.
"""


def unit_tokens(source: KVLayout, target: KVLayout) -> int:
    """Tokens of one unit: whole blocks of either side fit into it."""
    return math.lcm(source.block_size, target.block_size)


def unit_sums(sums: Sums, first_block: int, block_size: int, unit: int) -> tuple[int, Sums]:
    """Add consecutive blocks into units.

    Args:
        sums: [blocks, ...].
        first_block: logical number of the first.
        block_size: tokens per block.
        unit: tokens per unit, a multiple of `block_size`.

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
    transfer_id: bytes,
    attempt: int,
    group: int,
    plane: str,
    first_unit: int,
    layers: Sequence[int],
    head_start: int,
) -> npt.NDArray[np.uint64]:
    """One value per unit of one plane, keyed by all that names its bytes.

    Args:
        sums: [units, layers, kv, heads].
        transfer_id: 16 bytes.
        attempt: of the transfer.
        group: KV group.
        plane: name of the plane.
        first_unit: number of the first unit.
        layers: global ids along the layer axis.
        head_start: global id of the first head.

    Returns:
        [units] uint64.
    """
    name = transfer_id + struct.pack("<QQ", attempt, group) + plane.encode()
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
    """One value per block over all planes, layers and heads, equal whatever the sharding.

    Args:
        sums: per rank, of any blocks, [blocks, ...].
        layouts: the group's layout on each rank.
        whole: the layout of a rank that holds everything.
        seed: tells the values of one purpose from those of another.

    Returns:
        [blocks] uint64.
    """
    total = np.zeros(len(sums[0]), np.uint64)
    for name, share in _shares(layouts, [whole]):
        key = hashlib.blake2b(struct.pack("<Q", seed) + name.encode(), digest_size=8).digest()
        mine = _cut(sums[share.source_rank], layouts[share.source_rank], name, share)
        total += _folded(mine, int.from_bytes(key, "little"), share.layers, share.head_start)
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
        sums: per source rank, of consecutive blocks, [blocks, ...], counting exactly the tokens
            that the write moves.
        sources: the group's layout on each source rank.
        targets: likewise on each target rank.
        first_block: logical number of the first of the source's blocks.
        transfer_id: of the transfer.
        attempt: of the transfer.
    """
    group, runs = sources[0].group, []
    for (source, target), mine in _pairs(sources, targets).items():
        unit = unit_tokens(sources[0], targets[0])
        first_unit, values = _values(
            sums[source], sources[source], mine, first_block, unit, transfer_id, attempt
        )
        data = values.astype("<u8").tobytes()
        runs.append(DigestRun(source, target, group, first_unit, data))
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
            the write moved, [blocks, ...].
        sources: the group's layout on each source rank.
        targets: likewise on each target rank.
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
    expected = _pairs(sources, targets)
    if len(mine) != len(claimed) or claimed.keys() != expected.keys():
        return [(start, end)]
    unit = unit_tokens(sources[0], targets[0])
    bad: set[int] = set()
    for pair, parts in expected.items():
        rank = pair[1]
        first_unit, values = _values(
            sums[rank], targets[rank], parts, first_block, unit, transfer_id, attempt
        )
        bad |= _differing(claimed[pair], first_unit, values)
    return _token_ranges(sorted(bad), unit, start, end)


def _shares(
    sources: Sequence[KVLayout], targets: Sequence[KVLayout]
) -> Iterator[tuple[str, Share]]:
    """Of each plane by its name, who shares what."""
    for plane in sources[0].planes:
        for share in shares(planes_named(plane.name, sources), planes_named(plane.name, targets)):
            yield plane.name, share


def _pairs(
    sources: Sequence[KVLayout], targets: Sequence[KVLayout]
) -> dict[tuple[int, int], list[tuple[str, Share]]]:
    """What each source rank sends to each target rank: planes by name."""
    pairs: dict[tuple[int, int], list[tuple[str, Share]]] = {}
    for name, share in _shares(sources, targets):
        pairs.setdefault((share.source_rank, share.target_rank), []).append((name, share))
    return pairs


def _values(
    sums: Sums,
    layout: KVLayout,
    parts: Sequence[tuple[str, Share]],
    first_block: int,
    unit: int,
    transfer_id: bytes,
    attempt: int,
) -> tuple[int, npt.NDArray[np.uint64]]:
    """The first unit and the values of a pair's parts, from one rank's sums of all it holds."""
    first_unit, units = unit_sums(sums, first_block, layout.block_size, unit)
    total = np.zeros(len(units), np.uint64)
    for name, share in parts:
        total += fold(
            _cut(units, layout, name, share),
            transfer_id=transfer_id,
            attempt=attempt,
            group=layout.group,
            plane=name,
            first_unit=first_unit,
            layers=share.layers,
            head_start=share.head_start,
        )
    return first_unit, total


def _cut(sums: Sums, layout: KVLayout, name: str, share: Share) -> Sums:
    """A share of one plane's sums: [blocks or units, layers, kv, heads]."""
    flat, start = sums.reshape(len(sums), -1), 0
    widths = [_width(plane) for plane in layout.planes]
    assert flat.shape[1] == sum(widths), f"{flat.shape[1]} sums a block, of planes of {widths}"
    for plane, width in zip(layout.planes, widths, strict=True):
        if plane.name == name:
            break
        start += width
    mine = flat[:, start : start + width].reshape(len(sums), len(plane.layers), plane.shape[3], -1)
    if share.layers != plane.layers:
        mine = mine[:, [plane.layers.index(layer) for layer in share.layers]]
    return mine[..., share.head_start - plane.head_start : share.head_end - plane.head_start]


def _width(plane: Plane) -> int:
    """Sums of one block in a plane: a value for each layer, K or V, and head."""
    _, heads, layers, kv, _, _ = plane.shape
    return heads * layers * kv


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

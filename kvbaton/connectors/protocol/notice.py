"""Encoding of notices, which follow a write's bytes: which part has landed, and its digests.

    session 16 | transfer id 16 | attempt u32 | write u32 | start u64 | end u64
    | source rank u16 | target rank u16 | part u16 | parts u16
    then, per digest run: group u16 | number of values u16 | first unit u32 | values u64 ...

All numbers are little-endian. A write with more ranges than the transport takes at once is sent in
parts, each with a notice; the first notice has the digests.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from kvbaton.connectors.protocol.events import Landed
from kvbaton.messages.control import DigestRun
from kvbaton.types import Attempt

_HEADER = struct.Struct("<16s16sIIQQHHHH")
_RUN = struct.Struct("<HHI")
_VALUE_BYTES = 8
MIN_NOTICE_BYTES = _HEADER.size + _RUN.size + _VALUE_BYTES
"""Minimum for `Capabilities.max_notice_bytes`: the header and one digest."""


def units_per_notice(max_notice_bytes: int, values_per_unit: Iterable[int]) -> int:
    """Maximum number of units whose digests fit into one notice.

    Args:
        max_notice_bytes: Maximum length of the transport's notices.
        values_per_unit: For each group, the number of digest values of one unit.
    """
    values = list(values_per_unit)
    room = max_notice_bytes - _HEADER.size - _RUN.size * len(values)
    return max(0, room // (_VALUE_BYTES * sum(values)))


def pack_notice(landed: Landed) -> bytes:
    """Encode a notice."""
    numbers = landed.write, landed.start, landed.end
    part = landed.source_rank, landed.target_rank, landed.part, landed.parts
    packed = [_HEADER.pack(landed.session, *landed.attempt, *numbers, *part)]
    for run in landed.digests:
        packed.append(_RUN.pack(run.group, len(run.values) // _VALUE_BYTES, run.first_unit))
        packed.append(run.values)
    return b"".join(packed)


def unpack_notice(payload: bytes) -> Landed | None:
    """Decode a notice; None if the payload is not a valid notice."""
    if len(payload) < _HEADER.size:
        return None
    session, transfer_id, number, write, start, end, *numbers = _HEADER.unpack_from(payload)
    source_rank, target_rank, part, parts = numbers
    runs, at = [], _HEADER.size
    while at < len(payload):
        if len(payload) < at + _RUN.size:
            return None
        group, count, first_unit = _RUN.unpack_from(payload, at)
        at += _RUN.size
        values = payload[at : at + _VALUE_BYTES * count]
        if len(values) < _VALUE_BYTES * count:
            return None
        runs.append(DigestRun(source_rank, target_rank, group, first_unit, values))
        at += len(values)
    if part >= parts:
        return None
    about = Attempt(transfer_id, number), session, write, start, end
    return Landed(*about, source_rank, target_rank, part, parts, tuple(runs))

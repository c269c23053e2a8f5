"""The few bytes that follow a write: which part of which transfer has landed."""

from __future__ import annotations

import struct

from kvbaton.connectors.protocol.events import Landed
from kvbaton.types import Attempt

_FORMAT = struct.Struct("<16s16sIIHH")
NOTICE_BYTES = _FORMAT.size


def pack_notice(
    session: bytes, attempt: Attempt, write: int, source_rank: int, target_rank: int
) -> bytes:
    """Encode a notice: session, transfer id, attempt, write number, source and target rank."""
    return _FORMAT.pack(
        session, attempt.transfer_id, attempt.number, write, source_rank, target_rank
    )


def unpack_notice(payload: bytes) -> Landed | None:
    """Decode a notice; None if it is not one of ours."""
    if len(payload) != NOTICE_BYTES:
        return None
    session, transfer_id, number, write, source_rank, target_rank = _FORMAT.unpack(payload)
    return Landed(session, Attempt(transfer_id, number), write, source_rank, target_rank)

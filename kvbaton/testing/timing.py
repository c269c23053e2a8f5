"""How long a transport takes: one loop for the doctor and the benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvbaton.connectors.base import Peer, Ranges, Status, Transport
from kvbaton.errors import TransportError


def timed_write(
    transport: Transport,
    peer: Peer,
    ranges: Ranges,
    notice: bytes,
    *,
    poll: Callable[[], object] | None = None,
    patience: float = 60.0,
) -> float:
    """Write, and poll in a tight loop until it is done; returns the seconds.

    Args:
        transport: which writes.
        peer: to whom.
        ranges: what.
        notice: what the peer is told.
        poll: lets the peer make progress where it lives in this process.
        patience: seconds after which the write has failed.

    Raises:
        TransportError: the write failed or took too long.
    """
    start = time.perf_counter()
    handle = transport.write(peer, ranges, notice)
    while (status := handle.status()) is Status.PENDING:
        transport.notices()
        if poll is not None:
            poll()
        if time.perf_counter() - start > patience:
            raise TransportError(f"a write is not done within {patience:g} s")
    if status is not Status.DONE:
        raise TransportError(handle.error() or f"a write ended as {status}")
    seconds = time.perf_counter() - start
    handle.release()
    return seconds

"""A process with one transport, so that it can be stopped and killed: for the cases of level 3.

``python -m kvbaton.testing.far_transport SPEC NUM_BYTES``. Its only region is filled with `FILLED`.
It prints ``card HEX`` and, for every notice, ``notice HEX CRC32``, the checksum of its region. On a
line ``write HEX`` it connects to that card and writes its region over the peer's region 0, again
and again.
"""

from __future__ import annotations

import selectors
import sys
import time
import zlib

import numpy as np

from kvbaton.connectors.base import Status
from kvbaton.connectors.registry import load_transport
from kvbaton.testing.pairs import fresh_name, memory_of, pack

FILLED = 7
NOTICE = b"again"


def main(spec: str, num_bytes: int) -> None:
    """See the module."""
    transport = load_transport(spec, name=fresh_name())
    memory = np.full(num_bytes, FILLED, dtype=np.uint8)
    transport.register(memory_of(memory))
    print("card", transport.card().hex(), flush=True)
    whole = pack([(0, 0, 0, 0, num_bytes, 1, 0, 0)])
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    peer, handle = None, None
    while True:
        for notice in transport.notices():
            print("notice", notice.payload.hex(), zlib.crc32(memory.tobytes()), flush=True)
        if peer is None and selector.select(0):
            peer = transport.connect(bytes.fromhex(sys.stdin.readline().split()[1]))
        if peer is not None and (handle is None or handle.status() is Status.DONE):
            handle = transport.write(peer, whole, NOTICE)
        time.sleep(0.0002)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

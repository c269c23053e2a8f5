"""A process with one transport, for tests: prints its card, then reports what lands.

``python transport_peer.py SPEC NAME NUM_BYTES``. Its only region is filled with 7. It prints
``card HEX`` and, for every notice, ``notice HEX CRC32``. On a line ``write HEX`` on its input it
connects to that card and writes its region over the peer's region 0, again and again.
"""

import selectors
import sys
import time
import zlib

import numpy as np

from kvbaton.connectors.base import Status
from kvbaton.connectors.registry import load_transport
from kvbaton.testing.pairs import memory_of, pack


def main(spec: str, name: str, num_bytes: int) -> None:
    transport = load_transport(spec, name=name)
    memory = np.full(num_bytes, 7, dtype=np.uint8)
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
            handle = transport.write(peer, whole, b"again")
        time.sleep(0.0002)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

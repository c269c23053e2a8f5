"""A process with one transport, so that it can be written to, stopped and killed.

``python -m kvbaton.testing.far_transport SPEC NUM_BYTES [DEVICE]``. Its only region is filled with
`FILLED`. It prints ``card HEX`` and, for every notice but `QUIET`, ``notice HEX DIGEST``, the
digest of its region. On a line ``write HEX`` it connects to that card and writes its region over
the peer's region 0, again and again. It ends with its input.
"""

from __future__ import annotations

import select
import sys
import time

from kvbaton.connectors.base import Device, Handle, Peer, Status
from kvbaton.connectors.registry import load_transport
from kvbaton.errors import KvbatonError
from kvbaton.testing.buffers import Buffer
from kvbaton.testing.pairs import fresh_name, pack

FILLED = 7
NOTICE = b"again"
QUIET = b"quiet"
"""Notice of a write that is only timed."""
PAUSE_S = 0.0002
"""Between two looks at the transport, as in a node's transfer thread."""


def main(spec: str, num_bytes: int, device: Device) -> None:
    """See the module."""
    transport = load_transport(spec, name=fresh_name())
    buffer = Buffer(device, num_bytes, FILLED)
    transport.register(buffer.memory)
    print("card", transport.card().hex(), flush=True)
    whole = pack([(0, 0, 0, 0, num_bytes, 1, 0, 0)])
    peer: Peer | None = None
    handle: Handle | None = None
    while True:
        for notice in transport.notices():
            if notice.payload != QUIET:
                print("notice", notice.payload.hex(), buffer.digest(), flush=True)
        if select.select([sys.stdin], [], [], 0)[0]:
            words = sys.stdin.readline().split()
            if not words:
                break
            peer = transport.connect(bytes.fromhex(words[1]))
        if peer is not None and (handle is None or handle.status() is Status.DONE):
            handle = transport.write(peer, whole, NOTICE)
        time.sleep(PAUSE_S)
    transport.shutdown()


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), "cuda" if sys.argv[3:] == ["cuda"] else "cpu")
    except KvbatonError as error:
        sys.exit(str(error))

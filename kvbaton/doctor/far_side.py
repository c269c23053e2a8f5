"""The process at the far end of a trial.

``python -m kvbaton.doctor.far_side SPEC DEVICE NUM_BYTES``. It prints ``card HEX``, and after each
write ``landed DIGEST`` over its memory, as JSON lines. It ends with its input.
"""

from __future__ import annotations

import json
import select
import sys
import time

from kvbaton.connectors.base import Device
from kvbaton.connectors.registry import load_transport
from kvbaton.doctor.buffers import Buffer
from kvbaton.errors import KvbatonError

PAUSE_S = 0.0002
"""Between two looks at the transport, as in a node's transfer thread thread."""
QUIET = b"quiet"
"""Notice of a write that is only timed."""


def main(spec: str, device: Device, num_bytes: int) -> None:
    """Serve until standard input is closed."""
    buffer = Buffer(device, num_bytes, None)
    transport = load_transport(spec, name=f"doctor-far-{spec}-{device}", host="127.0.0.1")
    transport.register(buffer.memory)
    say("card", transport.card().hex())
    while not select.select([sys.stdin], [], [], 0)[0]:
        if any(notice.payload != QUIET for notice in transport.notices()):
            say("landed", buffer.digest())
        time.sleep(PAUSE_S)
    transport.shutdown()


def say(what: str, text: str) -> None:
    """One line for the near side."""
    print(json.dumps([what, text]), flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1], "cuda" if sys.argv[2] == "cuda" else "cpu", int(sys.argv[3]))
    except KvbatonError as error:
        say("failed", str(error))

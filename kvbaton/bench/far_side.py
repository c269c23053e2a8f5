"""The process that ``bench transfer`` writes to.

``python -m kvbaton.bench.far_side SPEC NUM_BYTES BLOCK_BYTES``. It prints ``card HEX`` and polls;
after a write whose notice says ``sums`` it prints ``sum NUMBER``, over all its blocks. It ends with
its input.
"""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable

import numpy as np

from kvbaton.bench.bare_nixl import BareNixl
from kvbaton.bench.digests import target_blocks, total_sum
from kvbaton.connectors.base import Memory
from kvbaton.connectors.registry import load_transport

BARE = "bare-nixl"
PAUSE_S = 0.0002
"""As the transfer thread's, between two looks at a transport."""


def main(spec: str, num_bytes: int, block_bytes: int) -> None:
    """Serve until standard input is closed."""
    memory, order = np.zeros(num_bytes, np.uint8), target_blocks(num_bytes // block_bytes)
    memory.fill(1)  # its pages are there before the first write
    name = f"bench-far-{spec}"
    poll: Callable[[], list[bytes]]
    if spec == BARE:
        bare = BareNixl(name, memory)
        card, poll = bare.card(), bare.poll
    else:
        transport = load_transport(spec, name=name)
        transport.register(Memory(memory.ctypes.data, memory.nbytes, owner=memory))
        card = transport.card()

        def poll() -> list[bytes]:
            return [notice.payload for notice in transport.notices()]

    print("card", card.hex(), flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        if b"sums" in poll():
            print("sum", total_sum(memory, block_bytes, order), flush=True)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

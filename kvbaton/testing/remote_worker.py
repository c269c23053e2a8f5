"""A process with one connector, which cases write to, measure, stop and kill.

``python -m kvbaton.testing.remote_worker transport SPEC NUM_BYTES DEVICE [FUNCTION [NUMBER...]]``
registers one region, filled with `FILLED`, and prints ``card HEX PID ADDRESS``, with the region's
address. For every notice but `QUIET` it prints ``notice HEX DIGEST``: the result of FUNCTION, a
``package.module:name``, for the region and the numbers, or BLAKE2b of the region's bytes without
it. On a line ``write HEX`` it connects to that card, and writes its region over the peer's region 0
again and again. It ends with its input.

``python -m kvbaton.testing.remote_worker store SPEC JOB NONCE SIZE COUNT`` opens the store, prints
``ready`` and waits for a line. The job ``write`` then stores objects 0 to COUNT - 1 one by one, and
prints ``begin I`` before and ``done I`` after each. The job ``read`` pins and loads all of them
again and again, and prints ``round`` after each time. The objects are derived from NONCE, I and
SIZE.

Both print ``begun`` once all is imported: from then on the connector is to blame for delays.
"""

from __future__ import annotations

import hashlib
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pkgutil import resolve_name

import numpy as np

from kvbaton.connectors.base import Device, Handle, Peer, Status
from kvbaton.connectors.registry import STORES, TRANSPORTS, class_of, load_store, split_spec
from kvbaton.errors import KvbatonError
from kvbaton.testing.store_rig import views
from kvbaton.testing.transport_rig import PAUSE_S, Buffer, fresh_name, pack

FILLED = 7
NOTICE = b"again"
QUIET = b"quiet"
"""Notice of a write that is only timed, and for which no line is printed."""
PATIENCE_S = 60.0


def serve_transport(
    spec: str, num_bytes: int, device: Device, function: str = "", *numbers: str
) -> None:
    """Run the worker for a transport; see the module."""
    buffer = Buffer(device, num_bytes, FILLED)
    digest: Callable[[], object] = buffer.digest
    if function:
        digest = partial(resolve_name(function), buffer.memory.owner, *map(int, numbers))
    # The parent has built the same transport by `load_transport`, which checks more.
    make_transport, (_, options) = class_of(TRANSPORTS, spec), split_spec(spec, TRANSPORTS)
    arguments = {"name": fresh_name(), "host": "127.0.0.1"} | options
    _say("begun")
    transport = make_transport(**arguments)
    transport.register(buffer.memory)
    _say("card", transport.card().hex(), os.getpid(), buffer.memory.address)
    whole = pack([(0, 0, 0, 0, num_bytes, 1, 0, 0)])
    peer: Peer | None = None
    handle: Handle | None = None
    while True:
        for notice in transport.notices():
            if notice.payload != QUIET:
                _say("notice", notice.payload.hex(), digest())
        if select.select([sys.stdin], [], [], 0)[0]:
            words = sys.stdin.readline().split()
            if not words:
                break
            peer = transport.connect(bytes.fromhex(words[1]))
        if peer is not None and (handle is None or handle.status() is Status.DONE):
            handle = transport.write(peer, whole, NOTICE)
        time.sleep(PAUSE_S)
    transport.shutdown()


def remote_objects(nonce: int, size: int, count: int) -> dict[bytes, bytes]:
    """The objects of a worker, by key, in order."""
    noise = np.random.default_rng(nonce)
    names = (f"remote {nonce} {number}".encode() for number in range(count))
    return {hashlib.blake2b(name, digest_size=32).digest(): noise.bytes(size) for name in names}


def use_store(spec: str, job: str, nonce: int, size: int, count: int) -> None:
    """Run the worker for a store; see the module."""
    objects = remote_objects(nonce, size, count)
    class_of(STORES, spec)
    _say("begun")
    store = load_store(spec, name="remote")
    store.open()
    _say("ready")
    sys.stdin.readline()
    if job == "write":
        for number, (key, data) in enumerate(objects.items()):
            _say("begin", number)
            if store.store([key], views([data])).result(PATIENCE_S) != [True]:
                raise RuntimeError(f"object {number} was not kept")
            _say("done", number)
    while job == "read":
        store.lookup(list(objects), pin=True).result(PATIENCE_S)
        targets = [bytearray(len(data)) for data in objects.values()]
        store.load(list(objects), views(targets)).result(PATIENCE_S)
        _say("round")
    store.close()


def _say(*words: object) -> None:
    print(*words, flush=True)


def main(words: Sequence[str]) -> None:
    """Run the worker; see the module."""
    kind, spec, *rest = words
    try:
        if kind == "transport":
            num_bytes, device, *function = rest
            where: Device = "cuda" if device == "cuda" else "cpu"
            serve_transport(spec, int(num_bytes), where, *function)
        else:
            job, nonce, size, count = rest
            use_store(spec, job, int(nonce), int(size), int(count))
    except KvbatonError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])

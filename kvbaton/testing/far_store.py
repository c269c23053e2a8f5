"""A process that uses a store, so that it can be killed: for the cases of level 3.

``python -m kvbaton.testing.far_store SPEC JOB NONCE SIZE COUNT``. It opens the store, prints
``ready`` and waits for a line. Then ``write`` stores objects 0 to COUNT - 1 one by one, and prints
``begin I`` before and ``done I`` after each; ``read`` pins and loads them all, again and again, and
prints ``round`` after each time. The objects follow from NONCE, I and SIZE.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np

from kvbaton.connectors.registry import load_store
from kvbaton.connectors.store import Store
from kvbaton.testing.store_rig import views

PATIENCE_S = 60.0


def far_objects(nonce: int, size: int, count: int) -> dict[bytes, bytes]:
    """The objects of a process, by key, in order."""
    noise = np.random.default_rng(nonce)
    names = (f"far {nonce} {number}".encode() for number in range(count))
    return {hashlib.blake2b(name, digest_size=32).digest(): noise.bytes(size) for name in names}


def main(spec: str, job: str, nonce: int, size: int, count: int) -> None:
    """See the module."""
    store = load_store(spec, name="far")
    store.open()
    objects = far_objects(nonce, size, count)
    _say("ready")
    sys.stdin.readline()
    {"write": write, "read": read}[job](store, objects)
    store.close()


def write(store: Store, objects: dict[bytes, bytes]) -> None:
    """Store them one by one."""
    for number, (key, data) in enumerate(objects.items()):
        _say(f"begin {number}")
        if store.store([key], views([data])).result(PATIENCE_S) != [True]:
            raise RuntimeError(f"object {number} was not kept")
        _say(f"done {number}")


def read(store: Store, objects: dict[bytes, bytes]) -> None:
    """Load them until somebody ends this process."""
    keys = list(objects)
    while True:
        store.lookup(keys, pin=True).result(PATIENCE_S)
        targets = [bytearray(len(data)) for data in objects.values()]
        store.load(keys, views(targets)).result(PATIENCE_S)
        _say("round")


def _say(words: str) -> None:
    print(words, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))

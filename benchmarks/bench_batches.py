"""Gain from loading many objects per call: the SQLite example with and without batches.

    python -m benchmarks.bench_batches

A prompt of 40 objects is one `load`. Both stores use one database and load the same objects in
turns; without batches, a thread loads one object at a time. Ratios are within a round.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbaton.bench.report import median, publish
from kvbaton.connectors.store import Store
from kvbaton.connectors.stores.threaded import ThreadedStore

EXAMPLE = Path(__file__).parents[1] / "examples" / "vendor_store"
OBJECTS, PROMPT = 400, 40


class OneByOne:
    """A backend that hides its methods for many objects."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        if name in ("get_many", "put_many"):
            raise AttributeError(name)
        return getattr(self._backend, name)


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--object-kib", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sys.path.insert(0, str(EXAMPLE))
    example: Any = importlib.import_module("kvbaton_sqlite")
    rows = []
    for kib in args.object_kib:
        with tempfile.TemporaryDirectory() as folder:
            backends = [example.Database(f"{folder}/objects.db", None) for _ in range(2)]
            stores: list[Store] = [
                ThreadedStore("one by one", OneByOne(backends[0]), threads=args.threads),
                ThreadedStore("batches", backends[1], threads=args.threads),
            ]
            rows.append(compare(stores, kib, args.rounds))
    publish("batches", vars(args), rows, args.out)


def compare(stores: Sequence[Store], kib: int, rounds: int) -> dict[str, Any]:
    """Loads per second of each store."""
    keys = [hashlib.sha256(bytes([n % 256, n // 256])).digest() for n in range(OBJECTS)]
    targets = [[memoryview(bytearray(kib << 10))] for _ in range(PROMPT)]
    for store in stores:
        store.open()
    sources = [[memoryview(os.urandom(kib << 10))] for _ in keys]
    assert all(stores[0].store(keys, sources).result())
    speeds: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        for which in (0, 1) if number % 2 else (1, 0):
            began = time.perf_counter()
            for start in range(0, OBJECTS, PROMPT):
                assert all(stores[which].load(keys[start : start + PROMPT], targets).result())
            if number:  # the first one warms up
                speeds[which].append(OBJECTS / (time.perf_counter() - began))
    for store in stores:
        store.close()
    return {
        "object KiB": kib,
        "one by one, loads/s": median(speeds[0]),
        "batches, loads/s": median(speeds[1]),
        "ratio": median([b / a for a, b in zip(*speeds, strict=True)]),
    }


if __name__ == "__main__":
    main()

"""Speed of the filesystem store, beside plain sequential I/O in the same directory.

Saves and loads: the store (including headers, accounting and renames) and a loop of `os.open`,
`os.write` or `os.read`, and `os.close` handle the same number of files of the same sizes. *dd*
reads all into one buffer, as ``dd`` does; *dd into targets* reads to where the store has to put the
bytes. The loops read the files that the store wrote. Each round runs all of them, in alternating
order; ratios are within a round. *Cold* means that the files were dropped from the page cache with
``posix_fadvise``. CPU time is user and kernel time of the whole process per object; unlike speed,
it is meaningful on a busy machine too, where more threads get a larger share of the CPU.

Lookups: half of the entries were written by another process after the store was opened. Each lookup
asks for 1,000 different entries, from both halves in turn: runs of 500 that were written one after
the other, as the blocks of a prompt are, or all scattered. CPU time (of the whole process) and the
time of as many calls of ``access("/")`` tell a slow lookup from a busy machine.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvbaton.bench.report import median, percentile, publish
from kvbaton.connectors.stores.filesystem import FilesystemStore
from kvbaton.connectors.stores.filesystem_entry import header, start_of

Row = dict[str, Any]


def main() -> None:
    """Measure, print tables and write JSON; with `--write`, act as the other process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", default=tempfile.gettempdir(), help="where to create the folder")
    parser.add_argument("--object-kib", type=int, nargs="+", default=[128, 2048])
    parser.add_argument("--total-mib", type=int, default=512, help="size of each save and load")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--entries", type=int, default=1_000_000, help="entries for the lookups")
    parser.add_argument("--lookups", type=int, default=200)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write_entries(Path(args.path), range(*args.write))
        return
    folder = Path(tempfile.mkdtemp(prefix="kvbaton-bench-", dir=args.path))
    try:
        rows = [
            row
            for kib in args.object_kib
            for fsync in (False, True)
            for row in Transfers(folder, kib << 10, args, fsync).run()
        ]
        publish("filesystem", vars(args), rows, args.out)
        if args.entries:
            looked = lookups(folder, args.entries, args.lookups)
            out = args.out and args.out.with_stem(args.out.stem + "-lookup")
            publish("filesystem lookup", vars(args), looked, out)
            print("removing them takes minutes", flush=True)
    finally:
        shutil.rmtree(folder)


class Transfers:
    """Saves and loads of objects of one size."""

    def __init__(self, folder: Path, size: int, args: argparse.Namespace, fsync: bool) -> None:
        self.count = max(1, (args.total_mib << 20) // size)
        self.size, self.fsync, self.rounds = size, fsync, args.rounds
        self.folder, self.raw = folder / "store", folder / "raw"
        self.store = FilesystemStore(
            "bench", path=str(self.folder), threads=args.threads, fsync=fsync
        )
        self.source = _random_bytes(size * self.count)
        self.target = memoryview(mmap.mmap(-1, size * self.count))
        self.keys = [_key(index) for index in range(self.count)]
        self.taken: dict[str, list[tuple[float, float]]] = {}
        """Microseconds per object of each round: wall time and CPU time."""

    def run(self) -> list[Row]:
        """Measure; one row per direction and state of the page cache."""
        for round_number in range(self.rounds):
            self._round(turned=bool(round_number % 2))
        return [self._row(*names) for names in (("save", ""), ("load", "warm"), ("load", "cold"))]

    def _round(self, *, turned: bool) -> None:
        for folder in (self.folder, self.raw):
            shutil.rmtree(folder, ignore_errors=True)
        self.raw.mkdir()
        self.store.open()
        os.sync()
        self._time([("save dd", self._dd_write), ("save store", self._save)], turned)
        os.sync()
        loads: list[tuple[str, Callable[[], None]]] = [
            ("dd", self._dd_read),
            ("dd into targets", self._dd_into_targets),
            ("store", self._load),
        ]
        named = {path.stem: path for path in self.folder.rglob("*.safetensors")}
        self._files = [named[key.hex()] for key in self.keys]
        self._time([(f"load {name} warm", load) for name, load in loads], turned)
        self._time([(f"load {name} cold", load) for name, load in loads], turned, cold=True)
        assert self.target == self.source, "the store gave other bytes"
        self.store.close()

    def _time(
        self, cases: Sequence[tuple[str, Callable[[], None]]], turned: bool, cold: bool = False
    ) -> None:
        for name, action in cases[::-1] if turned else cases:
            if cold:
                self._drop_pages()
            begin, cpu = time.perf_counter(), time.process_time()
            action()
            taken = time.perf_counter() - begin, time.process_time() - cpu
            clock, cpu = (1e6 * seconds / self.count for seconds in taken)
            self.taken.setdefault(name, []).append((clock, cpu))

    def _row(self, direction: str, cache: str) -> Row:
        def of(who: str, kind: int) -> list[float]:
            return [
                taken[kind] for taken in self.taken.get(f"{direction} {who} {cache}".strip(), [])
            ]

        def speed(who: str) -> float:
            return median([self.size / us / 1e3 for us in of(who, 0)])

        def ratio(who: str, kind: int) -> float:
            return median([b / a for a, b in zip(of("store", kind), of(who, kind), strict=False)])

        return {
            "object KiB": self.size >> 10,
            "fsync": self.fsync,
            "what": f"{direction} {cache}",
            "dd GB/s": speed("dd"),
            "dd into targets": speed("dd into targets"),
            "store": speed("store"),
            "of dd": ratio("dd", 0),
            "of dd into targets": ratio("dd into targets", 0),
            "dd CPU us": median(of("dd", 1)),
            "dd into targets CPU us": median(of("dd into targets", 1)),
            "store CPU us": median(of("store", 1)),
            "CPU of dd": ratio("dd", 1),
            "CPU of dd into targets": ratio("dd into targets", 1),
        }

    def _pieces(self, memory: memoryview) -> list[list[memoryview]]:
        starts = range(0, self.size * self.count, self.size)
        return [[memory[at : at + 256], memory[at + 256 : at + self.size]] for at in starts]

    def _save(self) -> None:
        assert all(self.store.store(self.keys, self._pieces(self.source)).result())

    def _load(self) -> None:
        assert all(self.store.load(self.keys, self._pieces(self.target)).result())

    def _dd_write(self) -> None:
        first = memoryview(bytes(start_of(self.size)))
        for index in range(self.count):
            file = os.open(self.raw / f"{index}", os.O_WRONLY | os.O_CREAT, 0o660)
            os.write(file, first)
            rest = self.source[index * self.size : (index + 1) * self.size]
            while rest:
                rest = rest[os.write(file, rest) :]
            if self.fsync:
                os.fsync(file)
            os.close(file)

    def _dd_read(self) -> None:
        for path in self._files:
            file = os.open(path, os.O_RDONLY)
            while os.read(file, self.size + start_of(self.size)):
                pass
            os.close(file)

    def _dd_into_targets(self) -> None:
        first = memoryview(bytearray(start_of(self.size)))
        for index, path in enumerate(self._files):
            file = os.open(path, os.O_RDONLY)
            rest = [first, self.target[index * self.size : (index + 1) * self.size]]
            assert os.readv(file, rest) == self.size + len(first)
            os.close(file)

    def _drop_pages(self) -> None:
        for path in self._files:
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def lookups(folder: Path, entries: int, rounds: int) -> list[Row]:
    """Time of a lookup of 1,000 keys among `entries`."""
    half = entries // 2
    root = folder / "many"
    begin = time.perf_counter()
    _run_writer(root, 0, half)
    opening = time.perf_counter()
    store = FilesystemStore("bench", path=str(root))
    store.open()
    opened = time.perf_counter()
    _run_writer(root, half, entries)
    written = time.perf_counter()
    print(
        f"{half} entries written in {opening - begin:.0f} s, the store opened in "
        f"{opened - opening:.1f} s, as many more written in {written - opened:.0f} s",
        flush=True,
    )
    rng = random.Random(0)
    scattered = [rng.randrange(half) + half * (index % 2) for index in range(1000 * rounds)]
    starts = [rng.randrange(half - 500) for _ in range(rounds)]
    runs = [at + n // 2 + half * (n % 2) for at in starts for n in range(1000)]
    rows = [
        _time_lookups(store, "a prompt's, all there", runs, 1000),
        _time_lookups(store, "scattered, all there", scattered, 1000),
        _time_lookups(store, "scattered, 500 there", scattered, 500),
        _time_lookups(store, "scattered, none there", scattered, 0),
    ]
    _check_loads(store, scattered[:1000])
    store.close()
    return rows


def _time_lookups(
    store: FilesystemStore, what: str, order: Sequence[int], there: int
) -> dict[str, Any]:
    """Time lookups whose keys after the first `there` are not in the store."""
    times, busy, floors = list[float](), list[float](), list[float]()
    for start in range(0, len(order), 1000):
        asked = [_key(index) for index in order[start : start + 1000]]
        asked[there:] = [hashlib.sha256(key).digest() for key in asked[there:]]
        begin, cpu = time.perf_counter(), time.process_time()
        found = store.lookup(asked).result()
        end = time.perf_counter()
        busy.append((time.process_time() - cpu) * 1e3)
        for _ in asked:
            os.access("/", os.F_OK)
        floors.append((time.perf_counter() - end) * 1e3)
        times.append((end - begin) * 1e3)
        assert found.present == (True,) * there + (False,) * (1000 - there)
    return {
        "1,000 keys": what,
        "lookups": len(times),
        "best ms": min(times),
        "median ms": median(times),
        "median CPU ms": median(busy),
        "p95 ms": percentile(times, 95),
        "1,000 x access(/) ms": median(floors),
    }


def _check_loads(store: FilesystemStore, order: Sequence[int]) -> None:
    """Check that the store can load the entries."""
    targets = [bytearray(64) for _ in order]
    pieces = [[memoryview(target)] for target in targets]
    assert all(store.load([_key(index) for index in order], pieces).result())
    assert all(target == _tiny(index) for index, target in zip(order, targets, strict=True))


def _run_writer(root: Path, start: int, stop: int) -> None:
    words = ["--path", str(root), "--write", str(start), str(stop)]
    subprocess.run([sys.executable, __file__, *words], check=True)


def write_entries(root: Path, indices: range) -> None:
    """Write entries as the store does, but not to its account, which counts them when opened."""
    base = root / "kvbaton-1"
    for folder in range(256):
        (base / f"{folder:02x}").mkdir(parents=True, exist_ok=True)
    for index in indices:
        key, body = _key(index), _tiny(index)
        name = key.hex()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        file = os.open(f"{base}/{name[:2]}/{name}.safetensors", flags, 0o660)
        os.write(file, header(key, len(body), start_of(len(body))) + body)
        os.close(file)


def _key(index: int) -> bytes:
    return hashlib.sha256(index.to_bytes(8, "big")).digest()


def _tiny(index: int) -> bytes:
    return index.to_bytes(64, "big")


def _random_bytes(count: int) -> memoryview:
    return memoryview(np.random.default_rng(0).bytes(count))


if __name__ == "__main__":
    main()

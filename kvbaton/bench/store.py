"""``kvbaton connectors bench SPEC``: measures how fast a store saves and loads objects.

For each size and concurrency, fresh objects are stored, loaded and deleted. Each call has one
object, and `concurrency` calls run at a time until all are done. Loaded objects are compared with
the stored ones, outside the measured time. Loads are *warm*: the objects were just stored. If the
folder of the store's files is known, loads are also measured *cold*: the files' pages are dropped
from the page cache first. A disk, a controller or another host may still have them cached.

The machine's own figures for pieces of the same sizes are measured, too, one at a time: a copy in
memory, and sequential writes and reads of a file.
"""

from __future__ import annotations

import itertools
import os
import queue
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbaton.bench import transfer
from kvbaton.bench.report import new_figure, percentile, publish, rows_of
from kvbaton.config import check_positive, flag
from kvbaton.connectors.registry import load_store, open_store
from kvbaton.connectors.store import KEY_BYTES, Store
from kvbaton.errors import INTERRUPTED, ConfigError, StoreError, writing
from kvbaton.testing.check import Subject
from kvbaton.testing.store_rig import timed_call, views

MARKERS = {"copy": "s", "disk write": "v", "disk read": "x", "disk read cold": "*"}
"""Markers of the machine's own figures in plots."""
CALL_S = 60.0
LOOKUP_KEYS = (1, 100, 1000)
LOOKUPS = 100

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class StoreLoad:
    """Load on a store.

    Attributes:
        spec: Spec of the store; ``{tmp}`` in it becomes an empty folder.
        object_bytes: Sizes of objects.
        concurrency: Numbers of concurrent calls.
        num_bytes: Bytes of all objects of one size.
        folder: Folder of the store's files, if it has one; the disk is measured there.

    Raises:
        ConfigError: An object is larger than `num_bytes`, or `folder` is not a folder.
    """

    spec: str
    object_bytes: tuple[int, ...] = flag(
        (64 << 10, 512 << 10, 2 << 20),
        "sizes of a store's objects, or of the blocks of a transport's writes (64K 512K 2M)",
        nargs="+",
        metavar="N",
    )
    concurrency: tuple[int, ...] = flag(
        (1, 4, 16), "numbers of concurrent calls (1 4 16)", nargs="+", metavar="N"
    )
    num_bytes: int = flag(64 << 20, "bytes of each size (64M)", name="--bytes", metavar="N")
    folder: str | None = flag(
        None, "folder of the store's files: measures its disk, and cold loads", metavar="DIR"
    )

    def __post_init__(self) -> None:
        for size in self.object_bytes:
            if not 0 < size <= self.num_bytes:
                raise ConfigError("--object-bytes", f"{size} is not from 1 to --bytes")
        for calls in self.concurrency:
            check_positive("--concurrency", calls)
        if self.folder is not None and not Path(self.folder).is_dir():
            raise ConfigError("--folder", f"{self.folder} is no folder")


@dataclass(frozen=True)
class Timing:
    """Calls: seconds of all, seconds of each in the order of their ends, and their answers."""

    seconds: float
    each: Sequence[float]
    answers: Sequence[bool]


def run(load: StoreLoad, out: Path | None = None, plot: Path | None = None) -> int:
    """Measure, print, write and draw; return the exit status: 130 on Ctrl-C."""
    figure = None if plot is None else new_figure(plot, 5)  # raises before the measurement
    with ExitStack() as ending:
        tmp = ending.enter_context(tempfile.TemporaryDirectory(prefix="kvbaton-bench-"))
        folder = load.folder or (tmp if "{tmp}" in load.spec else None)
        placed = replace(load, spec=load.spec.replace("{tmp}", tmp), folder=folder)
        store = load_store(placed.spec)
        open_store(store, load.spec)
        ending.callback(store.close)
        rows, left = rows_of(placed.object_bytes, partial(measure, store, placed))
        lookups, _ = rows_of(() if left else (store,), measure_lookups)
    if os.getloadavg()[0] > len(os.sched_getaffinity(0)):
        print(f"warning: others are busy here, load average {os.getloadavg()[0]:.1f}")
    if folder is None:
        print("loads were warm; with --folder they are measured cold, too")
    publish("store", asdict(load), rows, out, lookups=lookups)
    if plot is not None and rows:
        draw(figure, load.spec, rows, plot)
    if not lookups:
        print(f"interrupted: {left} of {len(load.object_bytes)} sizes were not measured, "
              "nor lookups")  # fmt: skip
        return INTERRUPTED
    return 0


def measure_lookups(store: Store) -> list[dict[str, Any]]:
    """Measure lookups, in microseconds; one key in ten is present, and at most ten keys.

    Raises:
        StoreError: A call failed.
    """
    rows, most = [], store.capabilities.max_keys
    for count in dict.fromkeys(min(keys, most) for keys in LOOKUP_KEYS):
        keys = [os.urandom(KEY_BYTES) for _ in range(count)]
        there = keys[:: max(10, count // 10)]
        made = views(np.ones((len(there), 1024), np.uint8))
        timed_call(partial(store.store, there, made), CALL_S)
        each = [1e6 * timed_call(partial(store.lookup, keys), CALL_S)[1] for _ in range(LOOKUPS)]
        if store.capabilities.deletes:
            timed_call(partial(store.delete, there), CALL_S)
        took = {"p50 us": percentile(each, 50), "p99 us": percentile(each, 99)}
        rows.append({"keys": count} | took)
    return rows


def measure(store: Store, load: StoreLoad, size: int) -> list[dict[str, Any]]:
    """Measure all rows of one size.

    Raises:
        StoreError: A call failed, or loaded bytes differ from the stored ones.
    """
    count = load.num_bytes // size
    source = transfer.random_bytes(count * size, size).reshape(count, size)
    target = np.zeros_like(source)

    def copy(i: int) -> None:
        target[i] = source[i]

    _timed(copy, count)  # touches every page
    rows = [_row("copy", size, 1, _timed(copy, count))]
    rows += _disk_rows(load, source, target)
    copied = rows[0]["GiB/s"]
    for calls in load.concurrency:
        rows += _store_rows(store, load, source, target, calls)
    return [row | {"of copy": row["GiB/s"] / copied} for row in rows]


def _store_rows(
    store: Store, load: StoreLoad, source: Bytes, target: Bytes, calls: int
) -> list[dict[str, Any]]:
    size = source.shape[1]
    keys = [os.urandom(KEY_BYTES) for _ in source]
    sources, targets = views(source), views(target)

    def load_all() -> Timing:
        target[:] = 0
        took = make_calls(
            lambda i: store.load(keys[i : i + 1], targets[i : i + 1]), len(keys), calls
        )
        loaded = np.array(took.answers)
        if not np.array_equal(source[loaded], target[loaded]):
            raise StoreError("what was loaded is not what was stored")
        return took

    took = make_calls(lambda i: store.store(keys[i : i + 1], sources[i : i + 1]), len(keys), calls)
    rows = [_row("store", size, calls, took), _row("load", size, calls, load_all())]
    if load.folder is not None:
        drop_pages(Path(load.folder))
        rows.append(_row("load cold", size, calls, load_all()))
    if store.capabilities.deletes:
        for first in range(0, len(keys), most := store.capabilities.max_keys):
            timed_call(partial(store.delete, keys[first : first + most]), CALL_S)
    return rows


def make_calls(call: Callable[[int], Future[list[bool]]], count: int, at_once: int) -> Timing:
    """Make `count` numbered calls of one object each, `at_once` at a time.

    Raises:
        StoreError: A call failed, or took longer than `CALL_S`.
    """
    ended: queue.SimpleQueue[tuple[int, float, Future[list[bool]]]] = queue.SimpleQueue()
    waiting = iter(range(count))

    def start(number: int) -> None:
        began = time.perf_counter()
        call(number).add_done_callback(
            lambda f: ended.put((number, time.perf_counter() - began, f))
        )

    first = time.perf_counter()
    for number in itertools.islice(waiting, at_once):
        start(number)
    each, answers = [], [False] * count
    for _ in range(count):
        try:
            number, seconds, future = ended.get(timeout=CALL_S)
        except queue.Empty as error:
            raise StoreError(f"a call is not done within {CALL_S:g} s") from error
        for following in itertools.islice(waiting, 1):
            start(following)
        each.append(seconds)
        [answers[number]] = future.result()
    return Timing(time.perf_counter() - first, each, answers)


def _row(what: str, size: int, calls: int, took: Timing) -> dict[str, Any]:
    """Make a row; objects that were refused or missed do not count for the speed."""
    milliseconds = [1000 * seconds for seconds in took.each]
    return {
        "object KiB": size / 1024,
        "what": what,
        "at once": calls,
        "GiB/s": sum(took.answers) * size / 2**30 / took.seconds,
        "p50 ms": percentile(milliseconds, 50),
        "p90 ms": percentile(milliseconds, 90),
        "p99 ms": percentile(milliseconds, 99),
        "objects": len(took.each),
        "refused": len(took.each) - sum(took.answers),
    }


# --- the machine's own figures ---


def _timed(action: Callable[[int], object], count: int) -> Timing:
    each = []
    first = time.perf_counter()
    for number in range(count):
        began = time.perf_counter()
        action(number)
        each.append(time.perf_counter() - began)
    return Timing(time.perf_counter() - first, each, [True] * count)


def _disk_rows(load: StoreLoad, source: Bytes, target: Bytes) -> list[dict[str, Any]]:
    size = source.shape[1]
    with tempfile.TemporaryDirectory(dir=load.folder, prefix="kvbaton-bench-") as folder:
        path = Path(folder, "disk")
        with path.open("wb", buffering=0) as file:
            wrote = _timed(lambda i: file.write(source[i].data), len(source))
        with path.open("rb", buffering=0) as file:
            warm = _timed(lambda i: file.readinto(target[i].data), len(source))
        drop_pages(Path(folder))
        with path.open("rb", buffering=0) as file:
            cold = _timed(lambda i: file.readinto(target[i].data), len(source))
    named = (("disk write", wrote), ("disk read", warm), ("disk read cold", cold))
    return [_row(name, size, 1, took) for name, took in named]


def drop_pages(folder: Path) -> None:
    """Write the files under a folder to the disk, and drop their pages from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


# --- for a certificate: seconds, not minutes ---

SPEED_OBJECTS = (64 << 10, 2 << 20)
SPEED_BYTES = 16 << 20
SPEED_COLUMNS = ("object KiB", "what", "at once", "GiB/s", "p50 ms", "of copy")


def speed(subject: Subject) -> list[dict[str, Any]]:
    """Measure a connector beside plain copies; empty for a transport within one process.

    Raises:
        StoreError: A call failed, or loaded bytes differ from the stored ones.
        TransportError: A write failed, or landed bytes differ from the sent ones.
    """
    if subject.kind == "transport":
        with subject.rig() as pair:
            if not pair.source.capabilities.processes:
                return []
        moved = transfer.TransferLoad(
            transports=(subject.spec,), block_bytes=(64 << 10,), num_bytes=SPEED_BYTES, repeats=5
        )
        rows = transfer.measure(moved, 64 << 10)
        return [{key: row[key] for key in ("block KiB", "method", "ms", "GiB/s")} for row in rows]
    with tempfile.TemporaryDirectory(prefix="kvbaton-certify-") as folder:
        spec = subject.spec.replace("{tmp}", folder)
        load = StoreLoad(
            spec=spec, object_bytes=SPEED_OBJECTS, concurrency=(4,), num_bytes=SPEED_BYTES
        )
        store = load_store(spec)
        open_store(store, subject.spec)
        with closing(store):
            rows = [row for size in SPEED_OBJECTS for row in measure(store, load, size)]
    return [{key: row[key] for key in SPEED_COLUMNS} for row in rows]


# --- the picture ---


def draw(figure: Any, title: str, rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Draw speed and latency over object size, one line per kind and concurrency, as PNG."""
    figure.suptitle(title)
    speed, latency = figure.subplots(1, 2)
    lines = list(dict.fromkeys((row["what"], row["at once"]) for row in rows))
    for what, calls in lines:
        some = [row for row in rows if (row["what"], row["at once"]) == (what, calls)]
        ours = what not in MARKERS
        label, style = (f"{what}, {calls} at once", "o-") if ours else (what, "k:")
        sizes = [row["object KiB"] for row in some]
        marker = {} if ours else {"marker": MARKERS[what], "alpha": 0.5}
        speed.plot(sizes, [row["GiB/s"] for row in some], style, label=label, **marker)
        if ours:
            points = latency.plot(sizes, [row["p50 ms"] for row in some], "o-", label=label)
            p99 = [row["p99 ms"] for row in some]
            latency.plot(sizes, p99, "^--", color=points[0].get_color(), alpha=0.4)
    for axes, unit in ((speed, "GiB/s"), (latency, "ms (dashed: p99)")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("object, KiB")
        axes.set_ylabel(unit)
        axes.grid(alpha=0.3)
    speed.legend(fontsize="x-small")
    with writing("--plot"):
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=120)

"""``kvbaton bench transfer``: blocks from this process into another one, and what bounds that.

Every block size is measured in rounds; a round does one write by every method, so that all of them
see the same noise. Methods: a plain memory copy within this process; bare NIXL (`bare_nixl`); and
our transports, with digests off and on. With digests a write counts until the far side has summed
what landed; the source's own sums are told apart, since an engine's step makes them on its way.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvbaton.bench.bare_nixl import BareNixl
from kvbaton.bench.digests import LAYER_BYTES, target_blocks, total_sum
from kvbaton.bench.far_side import BARE
from kvbaton.bench.report import median, publish
from kvbaton.config import flag
from kvbaton.connectors.base import Memory
from kvbaton.connectors.registry import load_transport
from kvbaton.errors import ConfigError, TransportError
from kvbaton.testing.far_process import FarProcess
from kvbaton.testing.timing import timed_write

WRITE_TIMEOUT_S = 60.0

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class TransferLoad:
    """What to move.

    Attributes:
        transports: specs of ours.
        block_bytes: sizes of blocks, each a multiple of 8 KiB.
        num_bytes: of one write.
        repeats: rounds; the median counts.

    Raises:
        ConfigError: sizes that do not fit together.
    """

    transports: tuple[str, ...] = flag(("nixl", "tcp"), nargs="+", metavar="NAME")
    block_bytes: tuple[int, ...] = flag(
        (16 << 10, 64 << 10, 256 << 10, 1 << 20), nargs="+", metavar="N"
    )
    num_bytes: int = flag(64 << 20, "of one write (64M)", name="--bytes", metavar="N")
    repeats: int = flag(7, metavar="N")

    def __post_init__(self) -> None:
        for size in self.block_bytes:
            if size <= 0 or size % LAYER_BYTES or self.num_bytes % size:
                raise ConfigError(
                    "--block-bytes", f"{size} is no multiple of {LAYER_BYTES} that divides --bytes"
                )


class Method(Protocol):
    """One way to move all blocks."""

    def write(self, notice: bytes) -> None:
        """Move them, and wait until they are there."""
        ...


class Copy:
    """Plain copies, block by block, within this process."""

    def __init__(self, source: Bytes, targets: npt.NDArray[np.int64], size: int) -> None:
        self._target = np.ones_like(source)
        here, there = source.ctypes.data, self._target.ctypes.data
        self._moves = [(there + int(t) * size, here + i * size) for i, t in enumerate(targets)]
        self._size = size

    def write(self, notice: bytes) -> None:
        """See `Method`."""
        for there, here in self._moves:
            ctypes.memmove(there, here, self._size)


def far_side(spec: str, num_bytes: int, block_bytes: int) -> FarProcess:
    """The other process (`bench.far_side`)."""
    words = [sys.executable, "-m", "kvbaton.bench.far_side", spec, str(num_bytes), str(block_bytes)]
    return FarProcess(words, WRITE_TIMEOUT_S)


class Bare:
    """`BareNixl`, its write prepared."""

    def __init__(self, far: FarProcess, source: Bytes, targets: npt.NDArray[np.int64]) -> None:
        self._nixl = BareNixl(f"bench-near-{BARE}", source)
        self._prepared = self._nixl.prepare(_card(far), len(source) // len(targets), targets)

    def write(self, notice: bytes) -> None:
        """See `Method`."""
        self._nixl.write(self._prepared)


class Ours:
    """A transport, driven in a tight loop."""

    def __init__(
        self, spec: str, far: FarProcess, source: Bytes, targets: npt.NDArray[np.int64]
    ) -> None:
        self.transport = load_transport(spec, name=f"bench-near-{spec}")
        self.transport.register(Memory(source.ctypes.data, source.nbytes, owner=source))
        self._peer = self.transport.connect(_card(far))
        size = len(source) // len(targets)
        self._ranges = np.array(
            [(0, i * size, 0, t * size, size, 1, 0, 0) for i, t in enumerate(targets)], np.int64
        )

    def write(self, notice: bytes) -> None:
        """See `Method`."""
        timed_write(self.transport, self._peer, self._ranges, notice, patience=WRITE_TIMEOUT_S)


def _card(far: FarProcess) -> bytes:
    return bytes.fromhex(far.started()[1])


def run(load: TransferLoad, out: Path | None = None) -> int:
    """Measure, print, write."""
    rows = [row for size in load.block_bytes for row in measure(load, size)]
    publish("transfer", asdict(load), rows, out)
    return 0


def measure(load: TransferLoad, size: int) -> list[dict[str, Any]]:
    """All methods on blocks of one size.

    Raises:
        TransportError: a write failed, or what landed is not what was sent.
    """
    source = np.random.default_rng(1).integers(0, 256, load.num_bytes, np.uint8)
    targets = target_blocks(load.num_bytes // size)
    with ExitStack() as closing:
        found = ways(load, size, source, targets, closing)
        for way in found.values():
            way()  # connections are made by the first write
        rounds = [{name: _seconds(way) for name, way in found.items()} for _ in range(load.repeats)]
    return [_row(name, size, load.num_bytes, rounds) for name in found]


def _row(name: str, size: int, num_bytes: int, rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Medians; the speed relative to bare NIXL is that of pairs within one round."""
    seconds = median([taken[name] for taken in rounds])
    return {
        "block KiB": size // 1024,
        "method": name,
        "ms": 1000 * seconds,
        "GiB/s": num_bytes / 2**30 / seconds,
        "of bare NIXL": median([taken[BARE] / taken[name] for taken in rounds if BARE in taken]),
    }


def ways(
    load: TransferLoad,
    size: int,
    source: Bytes,
    targets: npt.NDArray[np.int64],
    closing: ExitStack,
) -> dict[str, Callable[[], None]]:
    """Every method by name."""
    order = np.arange(len(targets))
    expected = total_sum(source, size, order)
    copy = Copy(source, targets, size)
    found: dict[str, Callable[[], None]] = {"memcpy": lambda: copy.write(b"")}
    found["source sums"] = lambda: _same(total_sum(source, size, order), expected)

    def far(spec: str) -> FarProcess:
        return closing.enter_context(far_side(spec, load.num_bytes, size))

    if "nixl" in load.transports:
        bare = Bare(far(BARE), source, targets)
        found[BARE] = lambda: bare.write(b"")
    for spec in load.transports:
        side = far(spec)
        ours = Ours(spec, side, source, targets)
        closing.callback(ours.transport.shutdown)
        found[spec] = lambda ours=ours: ours.write(b"quiet")  # type: ignore[misc]
        found[f"{spec}+digests"] = lambda ours=ours, side=side: _summed(ours, side, expected)  # type: ignore[misc]
    return found


def _summed(ours: Ours, far: FarProcess, expected: int) -> None:
    ours.write(b"sums")
    _same(int(far.line("sum")[1]), expected)


def _same(found: int, expected: int) -> None:
    if found != expected:
        raise TransportError("what landed is not what was sent")


def _seconds(way: Callable[[], None]) -> float:
    began = time.perf_counter()
    way()
    return time.perf_counter() - began

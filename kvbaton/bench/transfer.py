"""``kvbaton bench transfer``: measures writes of blocks into another process, beside their bounds.

Each block size is measured in rounds; a round does one write by every method, so that all methods
see the same noise. Methods are a plain memory copy within this process; bare NIXL (`BareNixl`); and
kvbaton's transports, with digests off and on. With digests a write ends when the remote side has
computed the sums of the landed blocks. The source's sums are a row of their own, because in an
engine the step that computes the blocks makes them.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.bench.report import median, publish, rows_of
from kvbaton.config import check_positive, flag
from kvbaton.connectors.base import Memory, Notice
from kvbaton.connectors.nixl_library import load_nixl, loopback_only
from kvbaton.connectors.registry import load_transport
from kvbaton.errors import INTERRUPTED, ConfigError, TransportError
from kvbaton.testing.kit import CaseFailure, KitBroke
from kvbaton.testing.remote import RemoteProcess, start_worker
from kvbaton.testing.remote_worker import QUIET
from kvbaton.testing.transport_rig import timed_write

WRITE_TIMEOUT_S = 60.0
BARE, BARE_SPEC = "bare-nixl", "kvbaton.bench.transfer:BareNixl"
TOKENS, FEATURES = 16, 64
LAYER_BYTES = 2 * TOKENS * FEATURES * 4
"""Bytes of K and V of one layer and head in float32; block sizes are multiples of it."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class TransferLoad:
    """Writes to measure.

    Attributes:
        transports: Specs of transports.
        block_bytes: Sizes of blocks, each a multiple of 8 KiB.
        num_bytes: Bytes of one write.
        repeats: Number of rounds; the median counts.

    Raises:
        ConfigError: Sizes that do not fit together, or nothing to measure.
    """

    transports: tuple[str, ...] = flag(
        ("nixl", "tcp"), "transports (nixl tcp)", nargs="+", metavar="NAME"
    )
    block_bytes: tuple[int, ...] = flag(
        (16 << 10, 64 << 10, 256 << 10, 1 << 20),
        "sizes of blocks, multiples of 8K (16K 64K 256K 1M)",
        nargs="+",
        metavar="N",
    )
    num_bytes: int = flag(64 << 20, "bytes of one write (64M)", name="--bytes", metavar="N")
    repeats: int = flag(7, "rounds, of which the median counts", metavar="N")

    def __post_init__(self) -> None:
        check_positive("--bytes", self.num_bytes)
        check_positive("--repeats", self.repeats)
        for size in self.block_bytes:
            if size <= 0 or size % LAYER_BYTES or self.num_bytes % size:
                raise ConfigError(
                    "--block-bytes", f"{size} is no multiple of {LAYER_BYTES} that divides --bytes"
                )


def run(load: TransferLoad, out: Path | None = None) -> int:
    """Measure, print and write; return the exit status: 130 on Ctrl-C."""
    rows, left = rows_of(load.block_bytes, partial(measure, load))
    publish("transfer", asdict(load), rows, out)
    if left:
        print(f"interrupted: {left} of {len(load.block_bytes)} block sizes were not measured")
        return INTERRUPTED
    return 0


def random_bytes(num_bytes: int, seed: int) -> Bytes:
    """Make random bytes to move.

    Returns:
        [num_bytes] uint8.

    Raises:
        ConfigError: They do not fit into memory; it names ``--bytes``.
    """
    try:
        return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)
    except (MemoryError, ValueError) as error:  # ValueError: more than an address has bits for
        raise ConfigError("--bytes", f"{num_bytes} can't be had: {error}") from error


def measure(load: TransferLoad, size: int) -> list[dict[str, Any]]:
    """Measure all methods on blocks of one size.

    Raises:
        TransportError: A write failed, or landed bytes differ from the sent ones.
    """
    try:
        rounds = _rounds(load, size)
    except (CaseFailure, KitBroke) as failure:  # errors of the remote process
        raise TransportError(str(failure)) from failure
    rows = []
    for name in rounds[0]:
        seconds = median([taken[name] for taken in rounds])
        # The ratio to bare NIXL is the median of the ratios within rounds.
        relative = median([taken[BARE] / taken[name] for taken in rounds if BARE in taken])
        rows.append(
            {
                "block KiB": size // 1024,
                "method": name,
                "ms": 1000 * seconds,
                "GiB/s": load.num_bytes / 2**30 / seconds,
                "of bare NIXL": relative,
            }
        )
    return rows


def _rounds(load: TransferLoad, size: int) -> list[dict[str, float]]:
    """Seconds by name of the method, in each round."""
    source = random_bytes(load.num_bytes, 1)
    with ExitStack() as closing:
        found = ways(load, size, source, closing)
        for way in found.values():
            way()  # connections are made by the first write
        rounds: list[dict[str, float]] = []
        for _ in range(load.repeats):
            rounds.append({})
            for name, way in found.items():
                began = time.perf_counter()
                way()
                rounds[-1][name] = time.perf_counter() - began
    return rounds


def ways(
    load: TransferLoad, size: int, source: Bytes, closing: ExitStack
) -> dict[str, Callable[[], object]]:
    """All methods by name; each moves all blocks and waits until they have landed."""
    targets = target_blocks(load.num_bytes // size)
    order, copied = np.arange(len(targets)), np.ones_like(source)
    expected = total_sum(source, size, order)
    here = source.ctypes.data

    def copy() -> None:
        there = copied.ctypes.data
        for i, target in enumerate(targets.tolist()):
            ctypes.memmove(there + target * size, here + i * size, size)

    def expect(found: int) -> None:
        if found != expected:
            raise TransportError("what landed is not what was sent")

    def remote(spec: str) -> RemoteProcess:
        words = (load.num_bytes, "cpu", f"{__name__}:region_sum", size)
        worker = start_worker("transport", spec, *words, patience=WRITE_TIMEOUT_S)
        return closing.enter_context(worker)

    found: dict[str, Callable[[], object]] = {"memcpy": copy}
    found["source sums"] = lambda: expect(total_sum(source, size, order))
    memory = Memory(here, source.nbytes, owner=source)
    if "nixl" in load.transports:
        bare, far = BareNixl(f"bench-near-{BARE}"), remote(BARE_SPEC)
        bare.register(memory)
        prepared = bare.prepare(far.card(), size, targets)
        found[BARE] = partial(bare.write, prepared)
    ranges = np.array(
        [(0, i * size, 0, t * size, size, 1, 0, 0) for i, t in enumerate(targets)], np.int64
    )
    for spec in load.transports:
        transport = load_transport(spec, name=f"bench-near-{spec}")
        closing.callback(transport.shutdown)
        if not transport.capabilities.processes:
            raise ConfigError("--transports", f"{spec} reaches no other process")
        far = remote(spec)
        transport.register(memory)
        peer = transport.connect(far.card())
        write = partial(timed_write, transport, peer, ranges, patience=WRITE_TIMEOUT_S)

        def summed(write: Callable[[bytes], object] = write, far: RemoteProcess = far) -> None:
            write(b"sums")
            expect(int(far.line("notice")[-1]))

        found[spec] = partial(write, QUIET)
        found[f"{spec}+digests"] = summed
    return found


# --- digests of the moved blocks, by the engine's kernel ---


def target_blocks(count: int) -> npt.NDArray[np.int64]:
    """Target of each block, in random order, as in the block tables of a busy engine."""
    return np.random.default_rng(0).permutation(count).astype(np.int64)


def total_sum(memory: Bytes, block_bytes: int, order: npt.NDArray[np.int64]) -> int:
    """Wrapping sum of the digest sums of all blocks, which form one sequence in this order."""
    import torch

    from kvbaton.kernels.digest import block_sums

    shape = (-1, 1, block_bytes // LAYER_BYTES, 2, TOKENS, FEATURES)
    cache = torch.from_numpy(memory).view(torch.float32).view(shape)
    sums = block_sums(cache, torch.from_numpy(order), 0, 0, len(order) * TOKENS)
    return int(sums.sum()) % (1 << 64)


def region_sum(memory: Bytes, block_bytes: int) -> int:
    """`total_sum` of the blocks that landed in a region, in the order of the source."""
    return total_sum(memory, block_bytes, target_blocks(len(memory) // block_bytes))


class BareNixl:
    """A NIXL agent with one registered array.

    It has the methods of `Transport` that a `remote_worker` needs to be a target.
    """

    def __init__(self, name: str, *, host: str = "127.0.0.1") -> None:
        del host  # NIXL names its own addresses
        api = load_nixl("--transports").api
        with loopback_only():  # as the `nixl` transport beside it
            self.agent: Any = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False))
        self.name, self.address = name, 0

    def register(self, memory: Memory) -> None:
        """Register the array, in host memory."""
        self.address = memory.address
        self.agent.register_memory([(memory.address, memory.num_bytes, 0, "")], "DRAM")

    def card(self) -> bytes:
        """Card for `prepare` of the other side."""
        return msgspec.msgpack.encode([self.name, self.agent.get_agent_metadata(), self.address])

    def notices(self) -> list[Notice]:
        """Notices that arrived; also drives progress."""
        found = self.agent.get_new_notifs().values()
        return [Notice(payload) for payloads in found for payload in payloads]

    def shutdown(self) -> None:
        """Do nothing: the process ends."""

    def prepare(self, card: bytes, size: int, targets: npt.NDArray[np.int64]) -> Any:
        """Prepare a write of all blocks of `size` bytes, block i to the remote ``targets[i]``."""
        name, metadata, address = msgspec.msgpack.decode(card)
        self.agent.add_remote_agent(metadata)
        order = np.arange(len(targets))
        here, there = (
            self.agent.prep_xfer_dlist(
                owner, [(base + i * size, size, 0) for i in range(len(targets))], "DRAM"
            )
            for owner, base in (("", self.address), (name, address))
        )
        return self.agent.make_prepped_xfer("WRITE", here, order, there, targets, QUIET)

    def write(self, prepared: Any) -> None:
        """Do a prepared write and wait for it.

        Raises:
            TransportError: NIXL reports an error, or the write does not end in time.
        """
        give_up = time.monotonic() + WRITE_TIMEOUT_S
        state = self.agent.transfer(prepared, QUIET)
        while state == "PROC":
            state = self.agent.check_xfer_state(prepared)
            if time.monotonic() > give_up:
                raise TransportError(f"a bare write did not end within {WRITE_TIMEOUT_S:g} s")
        if state != "DONE":
            raise TransportError(f"NIXL reports {state}")

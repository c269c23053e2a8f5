"""NIXL agents, the parts of a write that are posted at once, and the lanes that UCX may use.

UCX chooses by itself how a peer's bytes get here, and does not report its choice; so every lane
that it might use has to be considered.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.connectors.base import Device, Memory
from kvbaton.connectors.nixl_library import load_nixl
from kvbaton.connectors.transports.regions import Copies
from kvbaton.errors import ConfigError

Descriptors = npt.NDArray[np.uint64]

PART_BYTES = 8 << 20
"""Maximum bytes of a part: about 2 ms if the CPU copies."""
PART_COPIES = 1024
"""Maximum number of copies of a part: small ones take about 2 to 3 ms to post."""
GPU_PART_BYTES = 1 << 30
"""Maximum bytes of a part between GPUs, where a post copies nothing."""
GPU_PIECE_BYTES = 16 << 20
"""Maximum bytes of one copy between GPUs.

Several copies run at a time, each on a stream of its own, and posting one takes 5 us.
"""
_MEMORY_TYPE: dict[Device, str] = {"cpu": "DRAM", "cuda": "VRAM"}


class RemoteRegion(msgspec.Struct, frozen=True):
    """A peer's region, as described by its card."""

    address: int
    num_bytes: int
    device: Device
    device_index: int


class WritePart(NamedTuple):
    """Descriptors of one post: per side uint64 [n, 3] (address, bytes, device index)."""

    source: Descriptors
    source_device: Device
    target: Descriptors
    target_device: Device


class NixlAgent:
    """A NIXL agent, and the exceptions of NIXL that the transport handles."""

    def __init__(self, name: str) -> None:
        library = load_nixl("--transport")
        self.errors = library.errors
        self.disconnect: type[Exception] = library.bindings.nixlRemoteDisconnectError
        self.tls = os.environ.get("UCX_TLS", "")
        config = library.api.nixl_agent_config(enable_prog_thread=False)
        self.api: Any = library.api.nixl_agent(name, config)
        if "UCX" not in self.api.backends:
            raise ConfigError("--transport", "this NIXL has no UCX plugin")

    def register(self, memory: Memory) -> Any:
        """Register memory; raises one of `errors`."""
        entry = (memory.address, memory.num_bytes, memory.device_index, "")
        return self.api.register_memory([entry], _MEMORY_TYPE[memory.device])

    def close(self) -> None:
        """Destroy the agent, although failed handles still hold this object."""
        self.api = None

    def prepare(self, peer: str, part: WritePart) -> Any:
        """Make a transfer of a part; the notice is passed when it is posted."""
        local = self.api.get_xfer_descs(part.source, _MEMORY_TYPE[part.source_device])
        remote = self.api.get_xfer_descs(part.target, _MEMORY_TYPE[part.target_device])
        return self.api.initialize_xfer("WRITE", local, remote, peer)


def cut(
    copies: Copies, ours: Sequence[Memory | None], theirs: Sequence[RemoteRegion | None]
) -> list[WritePart]:
    """Cut checked copies from local regions to the peer's into parts."""
    parts = []
    # A NIXL transfer has one kind of memory per side.
    from_cuda = np.array([bool(m and m.device == "cuda") for m in ours] + [False])
    to_cuda = np.array([bool(m and m.device == "cuda") for m in theirs] + [False])
    kind = from_cuda[copies.source_region] * 2 + to_cuda[copies.target_region]
    for value in np.unique(kind).tolist():
        source_device: Device = "cuda" if value & 2 else "cpu"
        target_device: Device = "cuda" if value & 1 else "cpu"
        whole = Copies(*(column[kind == value] for column in copies))
        direct = source_device == target_device == "cuda"
        chosen, most = whole, GPU_PIECE_BYTES if direct else PART_BYTES
        pieces = -(-whole.length // most)
        if pieces.max() > 1:  # split long copies
            past = np.cumsum(pieces)
            begin = (np.arange(int(past[-1])) - np.repeat(past - pieces, pieces)) * most
            each = Copies(*(np.repeat(column, pieces) for column in whole))
            chosen = each._replace(
                source_offset=each.source_offset + begin,
                target_offset=each.target_offset + begin,
                length=np.minimum(each.length - begin, most),
            )
        source = _describe(chosen.source_region, chosen.source_offset, chosen.length, ours)
        target = _describe(chosen.target_region, chosen.target_offset, chosen.length, theirs)
        ends, start = np.cumsum(chosen.length), 0
        while start < len(ends):  # group consecutive copies into parts
            room = int(ends[start] - chosen.length[start])
            room += GPU_PART_BYTES if direct else PART_BYTES
            stop = int(np.searchsorted(ends, room, side="right"))
            stop = min(max(stop, start + 1), start + PART_COPIES)
            sides = source[start:stop], source_device, target[start:stop], target_device
            parts.append(WritePart(*sides))
            start = stop
    return parts


def _describe(
    region: npt.NDArray[np.int64],
    offset: npt.NDArray[np.int64],
    length: npt.NDArray[np.int64],
    memories: Sequence[Memory | RemoteRegion | None],
) -> Descriptors:
    address = np.array([m.address if m else 0 for m in memories], dtype=np.uint64)
    device = np.array([m.device_index if m else 0 for m in memories], dtype=np.uint64)
    columns = (address[region] + offset.astype(np.uint64), length, device[region])
    return np.ascontiguousarray(np.stack([c.astype(np.uint64) for c in columns], axis=1))


_SOCKETS = {"tcp", "self", "cuda_copy", "gdr_copy"}
"""Values of ``UCX_TLS`` with which bytes of another process arrive only through sockets."""
_RDMA = (Path("/sys/class/infiniband"), Path("/dev/infiniband"))


class UcxLane(enum.Enum):
    """The most direct way in which a peer may write here."""

    SOCKETS = enum.auto()
    """Only through sockets."""
    SHARED = enum.auto()
    """Maybe through shared memory or CUDA IPC, where the peer's own threads and GPU write."""
    HARDWARE = enum.auto()
    """From another machine, maybe through RDMA or CUDA IPC between machines."""


class Place(msgspec.Struct, frozen=True):
    """Where a process runs.

    Attributes:
        kernel: Boot id; equal in all containers of a machine.
        network: Network namespace; containers have their own.
    """

    kernel: str
    network: str


@cache
def this_place() -> Place:
    """Where this process runs; cached, as it can't change."""
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Place(kernel, os.readlink("/proc/self/ns/net"))


def choose_lane(ours: Place, theirs: Place, tls: str, *, reaches_gpus: bool) -> UcxLane:
    """The most direct lane that UCX may take from a peer to here; unknown lanes are not excluded.

    Args:
        ours: Where this process runs. A peer can take no lane that this process does not offer.
        theirs: Where the peer runs, as it says.
        tls: ``UCX_TLS`` of this process; empty if not set.
        reaches_gpus: Whether GPU memory is registered here.
    """
    named = {word.strip().removeprefix("\\").partition(":")[0] for word in tls.split(",")}
    if named <= _SOCKETS:
        return UcxLane.SOCKETS
    if ours.kernel == theirs.kernel:
        return UcxLane.SHARED
    rdma = any(path.is_dir() and any(path.iterdir()) for path in _RDMA)
    return UcxLane.HARDWARE if rdma or reaches_gpus else UcxLane.SOCKETS

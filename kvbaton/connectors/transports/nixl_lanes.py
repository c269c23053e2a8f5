"""What UCX may take from a peer to here: it decides by itself and does not tell, so be careful."""

from __future__ import annotations

import enum
import os
from functools import cache
from pathlib import Path

import msgspec

_SOCKETS = {"tcp", "self", "cuda_copy", "gdr_copy"}
"""Values of ``UCX_TLS`` by which bytes of another process come through sockets only."""
_RDMA = (Path("/sys/class/infiniband"), Path("/dev/infiniband"))


class UcxLane(enum.Enum):
    """The strongest way by which a peer may write here."""

    SOCKETS = enum.auto()
    """Through sockets, and nothing else."""
    SHARED = enum.auto()
    """Maybe through shared memory or CUDA IPC: the peer's own threads and GPU write."""
    HARDWARE = enum.auto()
    """From another machine, maybe through RDMA or CUDA IPC between machines."""


class Place(msgspec.Struct, frozen=True):
    """Where a process runs.

    Attributes:
        kernel: boot id: equal in all containers of a machine.
        network: network namespace: containers have their own.
    """

    kernel: str
    network: str


@cache
def this_place() -> Place:
    """Where this process runs: it can't change while we live."""
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Place(kernel, os.readlink("/proc/self/ns/net"))


def choose_lane(ours: Place, theirs: Place, tls: str, *, reaches_gpus: bool) -> UcxLane:
    """The strongest lane that UCX may take from there to here; what is not known is not excluded.

    Args:
        ours: where we run. A peer can take no lane that we do not offer.
        theirs: where the peer says it runs.
        tls: our ``UCX_TLS``, empty if not set.
        reaches_gpus: whether memory of a GPU is registered here.
    """
    named = {word.strip().removeprefix("\\").partition(":")[0] for word in tls.split(",")}
    if named <= _SOCKETS:
        return UcxLane.SOCKETS
    if ours.kernel == theirs.kernel:
        return UcxLane.SHARED
    rdma = any(path.is_dir() and any(path.iterdir()) for path in _RDMA)
    return UcxLane.HARDWARE if rdma or reaches_gpus else UcxLane.SOCKETS

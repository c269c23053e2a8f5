"""Collectives of GPUs, with one GPU per thread or process.

Small sums use a kernel of ours over peer memory, if the GPUs can access each other. All else uses
NCCL, called on the stream of the model's kernels, so that CUDA graphs capture it like any kernel.
torch's process groups would use streams of their own, and can't be aborted from another thread. The
library is the one that torch has loaded.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from kvbaton.engine.collectives import AbortedError, Collectives
from kvbaton.kernels.peer_all_reduce import peer_all_reduce, peer_all_reduce_norm
from kvbaton.kernels.peer_memory import PeerMemory

DTYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
"""`ncclDataType_t` of nccl.h."""

SUM = 0
"""`ncclRedOp_t` of nccl.h."""

ABORT_S = 10.0
"""Seconds to wait for a communicator's abort."""


class NcclError(RuntimeError):
    """A call of NCCL failed."""


class _UniqueId(ctypes.Structure):
    """`ncclUniqueId` of nccl.h."""

    _fields_ = [("internal", ctypes.c_ubyte * 128)]


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libnccl.so.2")
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def _check(library: ctypes.CDLL, code: int) -> None:
    if code:
        raise NcclError(f"NCCL: {library.ncclGetErrorString(code).decode()}")


def make_unique_id() -> bytes:
    """Make the id that all ranks of one communicator need."""
    library, made = _library(), _UniqueId()
    _check(library, library.ncclGetUniqueId(ctypes.byref(made)))
    return bytes(made)


class NcclCollectives(Collectives):
    """`Collectives` of one rank, on its current stream.

    Args:
        rank: This rank.
        size: Number of ranks.
        unique_id: Id of the communicator.
        peers: Peer memory for small sums, if all GPUs can access each other.
    """

    def __init__(self, rank: int, size: int, unique_id: bytes, peers: PeerMemory | None) -> None:
        self._rank, self._size, self._unique_id, self._peers = rank, size, unique_id, peers
        self._library, self._lock = _library(), threading.Lock()
        self._handle = ctypes.c_void_p()
        self._open = True

    def connect(self) -> None:
        """See `Collectives.connect`; on the current device. This wait can't be aborted."""
        told, made = _UniqueId.from_buffer_copy(self._unique_id), ctypes.byref(self._handle)
        code = self._library.ncclCommInitRank(made, self._size, told, self._rank)
        _check(self._library, code)

    @cached_property
    def _beside(self) -> torch.cuda.Stream:
        """A stream that precedes products, whose kernels leave no room once they have started."""
        return torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `Collectives.all_reduce`."""
        if self._peers is not None and self._peers.fits(tensor):
            self._check_open()
            return peer_all_reduce(tensor, self._peers)
        return self.nccl_all_reduce(tensor)

    def all_reduce_norm(
        self, tensor: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float
    ) -> Tensor:
        """See `Collectives.all_reduce_norm`."""
        if self._peers is not None and self._peers.fits_norm(tensor):
            self._check_open()
            return peer_all_reduce_norm(tensor, self._peers, residual, weight, eps, weight_offset)
        return super().all_reduce_norm(tensor, residual, weight, eps, weight_offset)

    def nccl_all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum with NCCL in place, whatever the size."""
        self._call("ncclAllReduce", tensor, tensor, SUM)
        return tensor

    def all_reduce_later(self, tensor: Tensor) -> Callable[[], Tensor]:
        """See `Collectives.all_reduce_later`; the current stream waits once the sum is taken."""
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            self.nccl_all_reduce(tensor)
        summed = self._beside.record_event()

        def wait() -> Tensor:
            torch.cuda.current_stream().wait_event(summed)
            return tensor

        return wait

    def all_gather(self, tensor: Tensor) -> Tensor:
        """See `Collectives.all_gather`."""
        out = tensor.new_empty((self._size, *tensor.shape))
        self._call("ncclAllGather", tensor, out)
        return out.transpose(0, 1).flatten(1)

    def _call(self, name: str, tensor: Tensor, out: Tensor, *options: int) -> None:
        stream = torch.cuda.current_stream(tensor.device).cuda_stream
        with self._lock:
            self._check_open()
            code = getattr(self._library, name)(
                ctypes.c_void_p(tensor.data_ptr()),
                ctypes.c_void_p(out.data_ptr()),
                ctypes.c_size_t(tensor.numel()),
                DTYPES[tensor.dtype],
                *options,
                self._handle,
                ctypes.c_void_p(stream),
            )
        _check(self._library, code)

    def _check_open(self) -> None:
        if not self._open:
            raise AbortedError("another rank failed, or did not come in time")

    def abort(self) -> None:
        """End all waits for other ranks, on host and GPU; later calls fail. Idempotent."""
        self._abort()

    def close(self) -> None:
        """Release NCCL; nothing may be in flight, and no CUDA graph that calls NCCL may be left."""
        if (thread := self._abort()) is not None:
            thread.join(ABORT_S)

    def _abort(self) -> threading.Thread | None:
        """Abort in a thread: NCCL returns only once all graphs with its kernels are gone."""
        if not self._open:
            return None
        self._open = False
        if self._peers is not None:
            self._peers.abort()
        thread = threading.Thread(target=self._abort_communicator, daemon=True)
        thread.start()
        return thread

    def _abort_communicator(self) -> None:
        # Later calls are refused. A call that waits for a missing rank holds the lock; then abort
        # without it.
        if self._lock.acquire(timeout=1.0):
            self._lock.release()
        if self._handle:
            self._library.ncclCommAbort(self._handle)

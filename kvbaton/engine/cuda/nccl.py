"""Collectives of GPUs that this process drives from one thread each.

Small sums go by a kernel of ours through each other's memory, if the GPUs can reach it; all else by
NCCL, which is called on the stream of the model's kernels, so a CUDA graph captures it like
any of them; torch's process groups would put it on streams of their own, and can't be given up from
another thread. The library is the one that torch has loaded.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from itertools import permutations

import torch
from torch import Tensor

from kvbaton.engine.collectives import AbortedError, Barrier, Lockstep
from kvbaton.kernels.peer_all_reduce import PeerMemory, peer_all_reduce

DTYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
"""`ncclDataType_t` of nccl.h."""

SUM = 0
"""`ncclRedOp_t` of nccl.h."""

LOCKSTEP = 8
"""Collectives between two waits of the ranks' threads for each other: some 50 launches."""

ABORT_S = 10.0
"""For a communicator to let go."""


class NcclError(RuntimeError):
    """A call of NCCL failed."""


class Communicators:
    """One NCCL communicator per GPU; rank i is on GPU i.

    Attributes:
        peers: memory for small sums, if all GPUs reach each other.
    """

    def __init__(self, size: int) -> None:
        self._library = ctypes.CDLL("libnccl.so.2")
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._locks = [threading.Lock() for _ in range(size)]
        self._open = True
        self._barrier = Barrier(size)
        self._lockstep = Lockstep(self._barrier, every=LOCKSTEP)
        self._handles = (ctypes.c_void_p * size)()
        devices = (ctypes.c_int * size)(*range(size))
        self._check(self._library.ncclCommInitAll(self._handles, size, devices))
        pairs = permutations(range(size), 2)
        reachable = all(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
        gpus = [torch.device("cuda", rank) for rank in range(size)]
        self.peers = PeerMemory(gpus) if reachable else None

    def all_reduce(self, rank: int, tensor: Tensor) -> Tensor:
        """The sum of a contiguous tensor over the ranks."""
        if self.peers is not None and self.peers.fits(tensor):
            self.tick(rank)
            return peer_all_reduce(tensor, self.peers, rank)
        return self.nccl_all_reduce(rank, tensor)

    def nccl_all_reduce(self, rank: int, tensor: Tensor) -> Tensor:
        """The same in place, whatever its size."""
        self._call(rank, "ncclAllReduce", tensor, tensor, SUM)
        return tensor

    def all_gather(self, rank: int, tensor: Tensor, out: Tensor) -> None:
        """Fill [size, ...] from a contiguous [...] of each rank."""
        self._call(rank, "ncclAllGather", tensor, out)

    def tick(self, rank: int) -> None:
        """See `Collectives.tick`."""
        self._check_open()
        self._lockstep.tick(rank)

    def _call(self, rank: int, name: str, tensor: Tensor, out: Tensor, *options: int) -> None:
        stream = torch.cuda.current_stream(tensor.device).cuda_stream
        self._lockstep.tick(rank)
        with self._locks[rank]:
            self._check_open()
            code = getattr(self._library, name)(
                ctypes.c_void_p(tensor.data_ptr()),
                ctypes.c_void_p(out.data_ptr()),
                ctypes.c_size_t(tensor.numel()),
                DTYPES[tensor.dtype],
                *options,
                ctypes.c_void_p(self._handles[rank]),
                ctypes.c_void_p(stream),
            )
        self._check(code)

    def _check_open(self) -> None:
        if not self._open:
            raise AbortedError("another rank failed, or did not come in time")

    def _check(self, code: int) -> None:
        if code:
            raise NcclError(f"NCCL: {self._library.ncclGetErrorString(code).decode()}")

    def abort(self) -> None:
        """End what waits for other ranks, on host and GPUs; later calls fail. Idempotent."""
        self._abort()

    def close(self) -> None:
        """Give back; nothing is in flight, and no CUDA graph that calls us is left."""
        for thread in self._abort():
            thread.join(ABORT_S)

    def _abort(self) -> Sequence[threading.Thread]:
        """Each in a thread: NCCL comes back only once all graphs with its kernels are gone."""
        if not self._open:
            return ()
        self._open = False
        self._barrier.abort()
        if self.peers is not None:
            self.peers.abort()
        threads = [
            threading.Thread(target=self._abort_one, args=(rank,), daemon=True)
            for rank in range(len(self._handles))
        ]
        for thread in threads:
            thread.start()
        return threads

    def _abort_one(self, rank: int) -> None:
        # A call that waits for a rank that will not come keeps its lock: it is what we end.
        locked = self._locks[rank].acquire(timeout=1.0)
        self._library.ncclCommAbort(ctypes.c_void_p(self._handles[rank]))
        if locked:
            self._locks[rank].release()


class NcclCollectives:
    """`Collectives` of one rank, on its current stream."""

    def __init__(self, communicators: Communicators, rank: int, size: int) -> None:
        self._communicators, self._rank, self._size = communicators, rank, size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `Collectives.all_reduce`."""
        return self._communicators.all_reduce(self._rank, tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """See `Collectives.all_gather`."""
        out = tensor.new_empty((self._size, *tensor.shape))
        self._communicators.all_gather(self._rank, tensor, out)
        return out.transpose(0, 1).flatten(1)

    def tick(self) -> None:
        """See `Collectives.tick`."""
        self._communicators.tick(self._rank)

"""A transport between two GPUs: GB/s of scattered 2 MiB blocks; NIXL's by size of its pieces.

    python -m benchmarks.bench_gpu_wire [--transport nccl]

From `write` to the moment at which the target's process has seen the notice and said so.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import time
from multiprocessing.connection import Connection
from statistics import median

import numpy as np

from kvbaton.connectors.base import Memory, RangeColumn, Ranges, Status, Transport
from kvbaton.connectors.transports import nixl_parts

BLOCK = 2 << 20
BLOCKS = 2048
SIZES = (8, 64, 128, 512)
PIECES = (128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20)


def open_transport(name: str, gpu: int) -> tuple[Transport, object]:
    """A transport with a pool on a GPU."""
    import torch

    from kvbaton.connectors.registry import load_transport

    torch.cuda.set_device(gpu)
    pool = torch.zeros(BLOCKS * BLOCK, dtype=torch.uint8, device=f"cuda:{gpu}")
    transport = load_transport(name, name=f"wire-{gpu}")
    transport.register(Memory(pool.data_ptr(), pool.numel(), "cuda", gpu, pool))
    torch.cuda.synchronize()
    return transport, pool


def far_side(name: str, pipe: Connection) -> None:
    """Tell of every notice, until told to stop."""
    transport, _pool = open_transport(name, 1)
    pipe.send(transport.card())
    while not pipe.poll():
        for _ in transport.notices():
            pipe.send("landed")


def ranges_of(blocks: int) -> Ranges:
    """Scattered blocks."""
    order = np.random.default_rng(blocks)
    rows = np.zeros((blocks, len(RangeColumn)), np.int64)
    rows[:, RangeColumn.SOURCE_OFFSET] = order.permutation(BLOCKS)[:blocks] * BLOCK
    rows[:, RangeColumn.TARGET_OFFSET] = order.permutation(BLOCKS)[:blocks] * BLOCK
    rows[:, RangeColumn.LENGTH], rows[:, RangeColumn.COUNT] = BLOCK, 1
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", default="nixl", choices=["nixl", "nccl"])
    args = parser.parse_args()
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=far_side, args=(args.transport, theirs), daemon=True)
    child.start()
    transport, _pool = open_transport(args.transport, 0)
    peer = transport.connect(ours.recv())
    for piece in PIECES if args.transport == "nixl" else PIECES[-1:]:
        nixl_parts.GPU_PIECE_BYTES = piece
        line = [f"pieces of {piece >> 10:5d} KiB:"]
        for blocks in SIZES:
            taken = []
            for _ in range(8):
                began = time.perf_counter()
                handle = transport.write(peer, ranges_of(blocks), b"x")
                posted = time.perf_counter() - began
                while handle.status() is Status.PENDING or not ours.poll():
                    transport.notices()
                    assert time.perf_counter() - began < 30, handle.status()
                ours.recv()
                taken.append((time.perf_counter() - began, posted))
                handle.release()
            seconds, posted = median(t for t, _ in taken), median(p for _, p in taken)
            line.append(f"{blocks} blocks {1e3 * seconds:6.2f} ms (post {1e3 * posted:5.2f}) "
                        f"{blocks * BLOCK / seconds / 1e9:6.1f} GB/s;")  # fmt: skip
        print(" ".join(line), flush=True)
    ours.send("stop")
    child.join(20)


if __name__ == "__main__":
    main()

"""A transport between two GPUs: GB/s for scattered blocks of 2 MiB, by size of the pieces.

    python -m benchmarks.bench_gpu_wire [--transport nccl | tcp]
    python -m benchmarks.bench_gpu_wire --run 16

With ``--run N``, N blocks are adjacent on both sides, as those of a prompt are while the pool is
not fragmented, and pieces are at least as long. Time is from `write` until the target's process has
received the notice and answered.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
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
ROWS = {"nixl": PIECES, "nccl": PIECES[-1:], "tcp": (4 << 10, 64 << 10, 2 << 20)}
"""Lengths in bytes to measure: of NIXL's pieces, or of the rows of a write."""
LONG_PIECES = (2 << 20, 4 << 20, 8 << 20, 16 << 20, 32 << 20)


def open_transport(name: str, gpu: int) -> tuple[Transport, object]:
    """Open a transport and register a pool on a GPU."""
    import torch

    from kvbaton.connectors.registry import load_transport

    torch.cuda.set_device(gpu)
    pool = torch.zeros(BLOCKS * BLOCK, dtype=torch.uint8, device=f"cuda:{gpu}")
    transport = load_transport(name, name=f"wire-{os.getpid()}")
    transport.register(Memory(pool.data_ptr(), pool.numel(), "cuda", gpu, pool))
    torch.cuda.synchronize()
    return transport, pool


def last_gpu() -> int:
    """The second GPU; if there is none, the first, which works with `tcp` and `nixl`."""
    import torch

    return min(1, torch.cuda.device_count() - 1)


def far_side(name: str, pipe: Connection) -> None:
    """Run the target: answer every notice until told to stop."""
    transport, _pool = open_transport(name, last_gpu())
    pipe.send(transport.card())
    while not pipe.poll():
        for _ in transport.notices():
            pipe.send("landed")


def ranges_of(blocks: int, length: int) -> Ranges:
    """Scattered rows of `length` bytes that hold as much as `blocks` blocks."""
    order, room = np.random.default_rng(blocks), BLOCKS * BLOCK // length
    rows = np.zeros((blocks * BLOCK // length, len(RangeColumn)), np.int64)
    rows[:, RangeColumn.SOURCE_OFFSET] = order.permutation(room)[: len(rows)] * length
    rows[:, RangeColumn.TARGET_OFFSET] = order.permutation(room)[: len(rows)] * length
    rows[:, RangeColumn.LENGTH], rows[:, RangeColumn.COUNT] = length, 1
    return rows


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", default="nixl", choices=["nixl", "nccl", "tcp"])
    parser.add_argument("--run", type=int, default=1, choices=[1, 2, 4, 8, 16], help="nixl only")
    args = parser.parse_args()
    if args.run > 1 and args.transport != "nixl":
        parser.error("--run: of nixl only, whose pieces may be longer than a block")
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=far_side, args=(args.transport, theirs), daemon=True)
    child.start()
    transport, _pool = open_transport(args.transport, 0)
    peer = transport.connect(ours.recv())
    for piece in ROWS[args.transport] if args.run == 1 else LONG_PIECES:
        nixl_parts.GPU_PIECE_BYTES = piece
        line = [f"pieces of {piece >> 10:5d} KiB:"]
        for blocks in (max(size, args.run) for size in SIZES):
            taken = []
            ranges = ranges_of(blocks, BLOCK * args.run if args.transport == "nixl" else piece)
            for _ in range(8):
                began = time.perf_counter()
                handle = transport.write(peer, ranges, b"x")
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

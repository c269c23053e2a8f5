"""Products of few rows with a weight: as fast as the weight can be read.

A tile of the weight's rows is split along the columns until the programs fill the GPU; the last
program of a tile adds the parts, in their order, whoever it is; so the result is deterministic.
Source of the pattern: Osama et al., "Stream-K", arXiv 2301.03598, section 4.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from kvbaton.kernels.jit import (
    cdiv,
    jit,
    next_power_of_2,
    tl,
    use_triton,
)

MAX_ROWS = 32
"""With more rows the library's product is faster."""

BLOCK_N, BLOCK_K = 64, 128


class Workspace:
    """Counters, zero between launches, and fp32 scratch; for launches on one stream at a time.

    Attributes:
        counters: [n], int32.
        scratch: [m], fp32; its content is never needed by the next launch.
    """

    def __init__(
        self, device: torch.device, *, num_counters: int = 1 << 14, num_scratch: int = 1 << 22
    ) -> None:
        self.counters = torch.zeros(num_counters, dtype=torch.int32, device=device)
        self.scratch = torch.empty(num_scratch, dtype=torch.float32, device=device)


@jit()
def is_last(counter: tl.tensor, parties: tl.tensor) -> tl.tensor:
    """Count this program in, its stores before this call included; whether it is the last.

    The last one resets the counter and sees what the others stored. Read that with
    ``cache_modifier=".cg"``, past the multiprocessor's own cache.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == parties - 1
    if last:
        tl.store(counter, 0)
    tl.debug_barrier()
    return last


def skinny_linear(
    x: torch.Tensor, weight: torch.Tensor, workspace: Workspace | None = None
) -> torch.Tensor:
    """Compute out = x @ weight.T, accumulated in fp32.

    Args:
        x: [T, K]; the library's product takes those that are not contiguous.
        weight: [N, K], contiguous.
        workspace: of this stream; None makes one for this call.

    Returns:
        [T, N], dtype of `x`.
    """
    if not use_triton(x) or not wins(x.shape[0], weight) or not x.is_contiguous():
        return linear(x, weight)
    return _launch(x, weight, workspace or Workspace(x.device))


def wins(rows: int, weight: torch.Tensor) -> bool:
    """Whether the kernel is for this product: few rows, even tiles, measured faster on an H200."""
    size, depth = weight.shape
    even = size % BLOCK_N == 0 and depth % (BLOCK_K * _splits(size, depth)) == 0
    return 0 < rows <= MAX_ROWS and even and (size <= 4096 or size >= 65536)


def _splits(size: int, depth: int) -> int:
    """Parts along the columns: about four programs for each of some 128 multiprocessors."""
    splits = 1
    while splits < 4 and size // BLOCK_N * splits < 256 and depth % (2 * splits * BLOCK_K) == 0:
        splits *= 2
    return splits


def _launch(x: torch.Tensor, weight: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    rows, depth = x.shape
    size = weight.shape[0]
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    splits = _splits(size, depth)
    _kernel[(cdiv(size, BLOCK_N), splits)](
        x,
        weight,
        out,
        workspace.scratch,
        workspace.counters,
        rows,
        size,
        depth,
        depth // splits,
        SPLITS=splits,
        BLOCK_M=max(16, next_power_of_2(rows)),
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        num_warps=4,
        num_stages=3,
    )
    return out


@jit("rows")
def _kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    scratch: tl.tensor,
    counters: tl.tensor,
    rows: tl.tensor,
    size: tl.tensor,
    depth: tl.tensor,
    share: tl.tensor,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One program: BLOCK_N rows of the weight, one of SPLITS parts of their columns."""
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    inside = (row < rows)[:, None]
    weights = weight + column.to(tl.int64)[:, None] * depth + inner[None, :]
    inputs = x + row[:, None] * depth + inner[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(split * share, (split + 1) * share, BLOCK_K):
        w = tl.load(weights + k)
        a = tl.load(inputs + k, mask=inside, other=0.0)
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
    target = out + row[:, None] * size + column[None, :]
    if SPLITS == 1:
        tl.store(target, acc.to(out.dtype.element_ty), mask=inside)
    else:
        part = scratch + row[:, None] * size + column[None, :]
        tl.store(part + split * rows * size, acc, mask=inside)
        if is_last(counters + tile, SPLITS):
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for other in tl.static_range(SPLITS):
                place = part + other * rows * size
                acc += tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(target, acc.to(out.dtype.element_ty), mask=inside)

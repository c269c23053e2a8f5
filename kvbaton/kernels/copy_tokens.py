"""Copy tokens of KV between block lists: gather, scatter, block copy, other block size or heads."""

from __future__ import annotations

import torch

from kvbaton.kernels.jit import cdiv, jit, next_power_of_2, tl, use_triton

BLOCK_T = 16


def copy_tokens(
    source: torch.Tensor,
    target: torch.Tensor,
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
    num_tokens: int,
    *,
    source_start: int = 0,
    target_start: int = 0,
    source_head: int = 0,
    target_head: int = 0,
    num_heads: int | None = None,
    num_valid: int | None = None,
) -> None:
    """Copy token ``source_start + i`` to ``target_start + i`` for i in [0, num_tokens).

    Token p of a side lies in its block ``blocks[p // block_size]`` at ``p % block_size``; the block
    sizes may differ. Blocks, heads and tokens not named stay untouched. One launch, no
    synchronisation; source and target must not overlap.

    Args:
        source: [num_blocks, heads, layers, 2, block_size, D]; last axis contiguous, else any
            strides. A layer or a contiguous buffer is a view or a tensor of this shape too.
        target: as `source`; its blocks, heads and block size may differ, its dtype not.
        source_blocks: int32 or int64 block ids, in logical order.
        target_blocks: likewise.
        num_tokens: tokens to copy.
        source_start: logical position of the first token in `source_blocks`.
        target_start: logical position of the first token in `target_blocks`.
        source_head: first head read.
        target_head: first head written.
        num_heads: heads to copy; None: all from `source_head` on.
        num_valid: tokens past these are written as zero, not read; None: all are valid.
    """
    heads = source.shape[1] - source_head if num_heads is None else num_heads
    source = source[:, source_head : source_head + heads]
    target = target[:, target_head : target_head + heads]
    num_valid = num_tokens if num_valid is None else num_valid
    if not use_triton(source):
        copy_tokens_reference(
            source, target, source_blocks, target_blocks, source_start, target_start, num_tokens,
            num_valid,
        )  # fmt: skip
        return
    if not num_tokens:
        return
    heads, layers, kv = source.shape[1:4]
    grid = (cdiv(num_tokens, BLOCK_T), heads * layers * kv)
    _kernel[grid](
        source,
        target,
        source_blocks,
        target_blocks,
        source_start,
        target_start,
        num_tokens,
        num_valid,
        layers,
        kv,
        source.stride(0),
        source.stride(1),
        source.stride(2),
        source.stride(3),
        source.stride(4),
        target.stride(0),
        target.stride(1),
        target.stride(2),
        target.stride(3),
        target.stride(4),
        SOURCE_SIZE=source.shape[4],
        TARGET_SIZE=target.shape[4],
        HEAD_DIM=source.shape[5],
        BLOCK_D=next_power_of_2(source.shape[5]),
        BLOCK_T=BLOCK_T,
        num_warps=4,
    )


def copy_tokens_reference(
    source: torch.Tensor,
    target: torch.Tensor,
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
    source_start: int,
    target_start: int,
    num_tokens: int,
    num_valid: int,
) -> None:
    """Plain torch for `copy_tokens`, over all heads of both views."""
    step = torch.arange(num_tokens, device=source.device)
    read, write = source_start + step[:num_valid], target_start + step
    sizes = source.shape[4], target.shape[4]
    rows = source.new_zeros(num_tokens, *source.shape[1:4], source.shape[5])
    rows[:num_valid] = source[source_blocks[read // sizes[0]].long(), :, :, :, read % sizes[0]]
    target[target_blocks[write // sizes[1]].long(), :, :, :, write % sizes[1]] = rows


@jit("source_blocks", "target_blocks", "source_start", "target_start", "num_tokens", "num_valid")
def _kernel(
    source: tl.tensor,
    target: tl.tensor,
    source_blocks: tl.tensor,
    target_blocks: tl.tensor,
    source_start: tl.tensor,
    target_start: tl.tensor,
    num_tokens: tl.tensor,
    num_valid: tl.tensor,
    layers: tl.tensor,
    kv: tl.tensor,
    stride_s_block: tl.tensor,
    stride_s_head: tl.tensor,
    stride_s_layer: tl.tensor,
    stride_s_kv: tl.tensor,
    stride_s_token: tl.tensor,
    stride_t_block: tl.tensor,
    stride_t_head: tl.tensor,
    stride_t_layer: tl.tensor,
    stride_t_kv: tl.tensor,
    stride_t_token: tl.tensor,
    SOURCE_SIZE: tl.constexpr,
    TARGET_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    """One program copies BLOCK_T tokens of one (head, layer, K or V)."""
    plane = tl.program_id(1)
    which = (plane % kv).to(tl.int64)
    layer = (plane // kv % layers).to(tl.int64)
    head = (plane // (kv * layers)).to(tl.int64)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = token < num_tokens
    valid = token < num_valid
    column = tl.arange(0, BLOCK_D)[None, :]
    features = column < HEAD_DIM
    place = source_start + token
    block = tl.load(source_blocks + place // SOURCE_SIZE, mask=inside & valid, other=0)
    read = block.to(tl.int64) * stride_s_block + (place % SOURCE_SIZE).to(tl.int64) * stride_s_token
    read += head * stride_s_head + layer * stride_s_layer + which * stride_s_kv
    rows = tl.load(
        source + read[:, None] + column, mask=(inside & valid)[:, None] & features, other=0.0
    )
    place = target_start + token
    block = tl.load(target_blocks + place // TARGET_SIZE, mask=inside, other=0)
    write = (
        block.to(tl.int64) * stride_t_block + (place % TARGET_SIZE).to(tl.int64) * stride_t_token
    )
    write += head * stride_t_head + layer * stride_t_layer + which * stride_t_kv
    tl.store(target + write[:, None] + column, rows, mask=inside[:, None] & features)

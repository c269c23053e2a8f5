"""Attention of prompts and chunks of prompts: cuDNN for long pieces, the paged kernel for others.

cuDNN's kernel is nearly twice as fast as the paged one on a Hopper GPU, but wants contiguous keys,
and builds a plan (50 to 120 ms, once) for every new shape. So a long chunk is cut into shapes from
a small set: its own keys, causal, padded to a multiple of `GRANULE`; and the prefix, gathered from
the pages, in multiples of `PREFIX_GRANULE`; what the prefix leaves goes before the own keys, with
empty queries in front. The two states are merged. Plans are for strides too, so that these follow
from the shape alone. What was not planned before the node was ready goes through the paged kernel,
unless it is so long that a plan costs little beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from kvbaton.kernels.copy_tokens import copy_tokens
from kvbaton.kernels.merge_attention_states import merge_attention_states
from kvbaton.kernels.paged_prefill_attention import paged_prefill_attention

MIN_QUERIES = 1024
"""With fewer queries the paged kernel is as fast."""

GRANULE, PREFIX_GRANULE = 256, 1024

LONG_ENOUGH = 2048 * 16384
"""Pairs of a query and a key whose attention, over all layers of a model, takes as long as cuDNN
takes to plan it (50 to 120 ms on an H200): with fewer, only what was planned before is launched."""

_planning = threading.local()
_planned: set[tuple[object, ...]] = set()


@contextmanager
def planning() -> Iterator[None]:
    """Let cuDNN plan whatever this thread launches: it keeps its plans by thread and shape."""
    _planning.now = True
    try:
        yield
    finally:
        _planning.now = False


@dataclass(frozen=True, kw_only=True)
class PrefillBatch:
    """The sequences of one step that compute more than one token.

    Attributes:
        block_tables: [N, max_blocks], int32.
        cu_seqlens: [N + 1], int32: where each sequence's queries start, and T.
        context_lens: [N], int32: keys of each sequence, those of its queries included.
        query_lens: of each sequence, known on the host.
        prefix_lens: keys before the queries, known on the host.
    """

    block_tables: torch.Tensor
    cu_seqlens: torch.Tensor
    context_lens: torch.Tensor
    query_lens: tuple[int, ...]
    prefix_lens: tuple[int, ...]


def prefill_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PrefillBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal softmax(scale * q k^T) v of each sequence's queries, its last tokens.

    `key` and `value` must be in the cache already. Options as in `paged_prefill_attention`.

    Args:
        query: [T, heads, D], the sequences one after the other; last axis contiguous.
        key: [T, kv_heads, D].
        value: [T, kv_heads, D].
        key_cache: [num_blocks, kv_heads, block_size, D], of the query's dtype or float8_e4m3fn.
        value_cache: as `key_cache`, with the same strides.
        batch: lengths and block tables.
        scale: of the logits.
        window: keys at positions > own position - window only; 0: all.
        softcap: bound of the logits; 0: none.
        sinks: [heads], fp32, or None.
        out: [T, heads, D], contiguous, to fill; None makes one.

    Returns:
        [T, heads, D], contiguous.
    """
    plain = softcap == 0.0 and sinks is None and cudnn_fits(query, key_cache.shape[2])
    strides = (x.stride(0) for x in (query, key, value))
    kind = (threading.get_ident(), query.dtype, *query.shape[1:], key.shape[1], *strides)
    lengths = list(zip(batch.query_lens, batch.prefix_lens, strict=True))
    long = [
        plain
        and fresh >= MIN_QUERIES
        and (window == 0 or fresh + prefix <= window)
        and (prefix == 0 or _is_planned(kind, *_chunk_shapes(fresh, prefix)))
        for fresh, prefix in lengths
    ]
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    options = (scale, window, softcap, sinks, out)
    first = row = token = 0
    while row < len(lengths):
        fresh, prefix = lengths[row]
        alike = _alike(lengths, row) if long[row] else 1
        if prefix == 0:
            padded = -(-fresh // GRANULE) * GRANULE
            while long[row] and not _is_planned(kind, ("prompts", alike, padded, padded)):
                alike //= 2
                long[row] = alike > 0
            alike = max(alike, 1)
        if long[row]:
            _paged(query, key_cache, value_cache, batch, first, row, *options)
            span = slice(token, token + alike * fresh)
            if prefix == 0:
                out[span] = _fresh(query[span], key[span], value[span], alike, scale)
            else:
                table = batch.block_tables[row]
                out[span] = _chunk(query[span], key_cache, value_cache, table, prefix, scale)
            first = row + alike
        token += alike * fresh
        row += alike
    _paged(query, key_cache, value_cache, batch, first, len(lengths), *options)
    return out


def _alike(lengths: list[tuple[int, int]], row: int) -> int:
    """Prompts from `row` on that one launch takes: equal ones without prefix, a power of two."""
    same = 1
    if lengths[row][1] == 0:
        while lengths[row + same : row + 2 * same] == [lengths[row]] * same:
            same *= 2
    return same


Shape = tuple[str, int, int, int]
"""Of a launch: what the keys are, how many prompts, queries and keys of each."""


def _chunk_shapes(tokens: int, prefix: int) -> list[Shape]:
    """Of each launch of `_chunk`."""
    whole = prefix // PREFIX_GRANULE * PREFIX_GRANULE
    granule = PREFIX_GRANULE if whole else GRANULE
    own = -(-(prefix - whole + tokens) // granule) * granule
    return [("own", 1, own, own), *([("prefix", 1, own, whole)] if whole else [])]


def _is_planned(kind: tuple[object, ...], *shapes: Shape) -> bool:
    """Whether cuDNN has planned launches of these shapes, or may do so now."""
    names = {(*kind, *shape) for shape in shapes}
    pairs = sum(count * queries * keys for _, count, queries, keys in shapes)
    if getattr(_planning, "now", False) or pairs >= LONG_ENOUGH:
        _planned.update(names)
    return names <= _planned


def cudnn_fits(query: torch.Tensor, block_size: int) -> bool:
    """Whether cuDNN's kernel takes tensors like `query`, on a GPU where it is the faster one."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    head_dim = query.shape[2]
    if not (query.is_cuda and half and head_dim % 8 == 0 and head_dim <= 128):
        return False
    return GRANULE % block_size == 0 and torch.cuda.get_device_capability(query.device) >= (9, 0)


def _paged(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PrefillBatch,
    first: int,
    last: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Sequences [first, last) through the paged kernel."""
    if max(batch.query_lens[first:last], default=0) == 0:
        return
    paged_prefill_attention(
        query,
        key_cache,
        value_cache,
        batch.block_tables[first:last],
        batch.cu_seqlens[first : last + 1],
        batch.context_lens[first:last],
        max(batch.query_lens[first:last]),
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        out=out,
    )


def _fresh(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, count: int, scale: float
) -> torch.Tensor:
    """Prompts of equal length without prefix; causality hides the padding after their keys."""
    tokens = query.shape[0] // count
    parts = [x.view(count, tokens, *x.shape[1:]) for x in (query, key, value)]
    extra = -tokens % GRANULE
    if extra:
        parts = [_pad_tokens(x, extra) for x in parts]
    query, key, value = (x.transpose(1, 2) for x in parts)
    out, _ = _cudnn_batch(query, key, value, True, scale)
    return out.transpose(1, 2)[:, :tokens].flatten(0, 1)


def _pad_tokens(x: torch.Tensor, extra: int) -> torch.Tensor:
    """[N, T, heads, D] with `extra` zeros after each T, strided as if they had been there."""
    count, tokens, heads, dim = x.shape
    row = x.stride(1)
    padded = torch.empty_strided(
        (count, tokens + extra, heads, dim), ((tokens + extra) * row, row, *x.stride()[2:]),
        dtype=x.dtype, device=x.device,
    )  # fmt: skip
    padded[:, :tokens] = x
    padded[:, tokens:] = 0
    return padded


def _chunk(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    prefix: int,
    scale: float,
) -> torch.Tensor:
    """A chunk after `prefix` cached tokens."""
    tokens = query.shape[0]
    (_, _, own, _), *earlier = _chunk_shapes(tokens, prefix)
    whole = earlier[0][3] if earlier else 0
    rest = prefix - whole
    padded = pad(query, (0, 0, 0, 0, rest, own - rest - tokens))

    def among(start: int, keys: int, valid: int) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = (
            _gather(cache, block_table, start, keys, valid).to(query.dtype)
            for cache in (key_cache, value_cache)
        )
        return _cudnn(padded, key, value, start == whole, scale)

    span = slice(rest, rest + tokens)
    out, lse = among(whole, own, rest + tokens)
    if not whole:
        return out[span]
    before, before_lse = among(0, whole, whole)
    return merge_attention_states(out[span], lse[span], before[span], before_lse[span])[0]


def _gather(
    cache: torch.Tensor, block_table: torch.Tensor, start: int, tokens: int, valid: int
) -> torch.Tensor:
    """[kv_heads, tokens, D] from the pages of one sequence, zero past `valid` tokens."""
    heads, block_size, head_dim = cache.shape[1:]
    buffer = torch.empty(heads, tokens, head_dim, dtype=cache.dtype, device=cache.device)
    pages = buffer.view(heads, tokens // block_size, block_size, head_dim).transpose(0, 1)
    order = torch.arange(pages.shape[0], device=cache.device)
    copy_tokens(
        cache[:, :, None, None],
        pages[:, :, None, None],
        block_table,
        order,
        tokens,
        source_start=start,
        num_valid=valid,
    )
    return buffer


def _cudnn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out [T, heads, D] and lse [T, heads] of query [T, heads, D] over key, value [kv_heads, N, D].

    `causal` aligns the first query with the first key.
    """
    out, lse = _cudnn_batch(query.transpose(0, 1)[None], key[None], value[None], causal, scale)
    return out[0].transpose(0, 1), lse[0, :, :, 0].T


def _cudnn_batch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of [N, heads, T, D] each; lse [N, heads, T, 1]."""
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query,
        key,
        value,
        None,
        compute_log_sumexp=True,
        is_causal=causal,
        scale=scale,
    )
    return result[0], result[1]

"""Prefill attention of prompts and chunks: cuDNN for long ones, the paged kernel for others.

cuDNN's kernel is nearly twice as fast as the paged one on a Hopper GPU, but needs contiguous keys,
and builds a plan (70 ms, once) for every new shape. So a long chunk, or one after a long prefix, is
cut into shapes of a small set, all planned before the node is ready. These are the chunk's own
keys, causal, padded to one of a few lengths; and pieces of the prefix, gathered from the pages, of
`PREFIX_GRANULE` times a power of two. The rest of the prefix is put before the own keys, with zeros
as its queries. The attention states are then merged. A plan is for given strides too, so strides
follow from the shape alone. Shapes without a plan go through the paged kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kvbaton.kernels.gather_pages import gather_pages
from kvbaton.kernels.merge_attention_states import merge_attention_states
from kvbaton.kernels.paged_attention import Softmax
from kvbaton.kernels.paged_prefill_attention import paged_prefill_attention

MIN_QUERIES = 1024
"""With fewer queries the paged kernel is as fast, unless the prefix is long (see `is_far`)."""

FEW_QUERIES, FAR_LOGITS = 256, 24_000_000
"""Number of queries, and of logits (queries times prefix keys), from which `is_far`.

Measured on an H200 with 32 query and 8 KV heads of 128 features: 500 queries after 8,128; 16,320;
65,024 keys take 223; 421; 1,582 us paged and 266; 382; 1,067 us by cuDNN. cuDNN's launches take the
host 25 to 45 ms for 32 layers: TTFT of 500 tokens after 32,640; 65,000 was 40; 64 ms with the paged
kernel, and is 46 to 55; 54 ms with cuDNN.
"""

GRANULE, PREFIX_GRANULE = 256, 1024
"""Tokens to whose multiples the keys of a prompt, and those of a chunk, are padded."""

MAX_PREFIX_PIECE = 16 * PREFIX_GRANULE
"""Most prefix keys per launch; more are hardly faster."""

Shape = tuple[str, int, int]
"""Shape of a launch: kind of keys ("prompt", "own" or "prefix"), number of queries, of keys."""


class PlanKind(NamedTuple):
    """Properties of cuDNN's plans beside the shape.

    Attributes:
        thread: Id of the thread that has the plans.
        dtype: dtype of queries, keys and values.
        heads: Number of query heads.
        kv_heads: Number of KV heads.
        head_dim: Features per head.
        strides: Token strides of a prompt's queries, keys and values.
    """

    thread: int
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    strides: tuple[int, int, int]


_planning = threading.local()
_planned: dict[PlanKind, set[Shape]] = {}


@contextmanager
def planning() -> Iterator[None]:
    """Let cuDNN plan all that this thread launches; it keeps plans by thread and shape."""
    _planning.now = True
    try:
        yield
    finally:
        _planning.now = False


def plan_ahead(most_tokens: int, longest: int, device: torch.device) -> None:
    """Plan all shapes of prompts and chunks, for tensors like those of this thread's `planning`.

    A plan takes cuDNN 50 ms, during which other threads can run Python.

    Args:
        most_tokens: Most tokens of a chunk.
        longest: Most tokens of a sequence.
        device: Device of the launches.
    """
    shapes, this = all_shapes(most_tokens, longest), threading.get_ident()
    for (thread, dtype, heads, kv_heads, dim, strides), planned in list(_planned.items()):
        for form, queries, keys in sorted(shapes - planned) if thread == this else ():
            query, key, value = (
                torch.empty_strided((n, h, dim), (s, dim, 1), dtype=dtype, device=device)
                for n, h, s in zip(
                    (queries, keys, keys), (heads, kv_heads, kv_heads), strides, strict=True
                )
            )
            if form == "prompt":
                _prompt(query, key, value, 1.0)
            else:
                both = key.new_empty(1, kv_heads, keys, dim)
                _cudnn_batch(query[None].transpose(1, 2), both, both, form == "own", 1.0)
            planned.add((form, queries, keys))


@dataclass(frozen=True, kw_only=True)
class PrefillBatch:
    """The sequences of one step that compute more than one token each.

    Attributes:
        block_tables: [N, max_blocks], int32.
        cu_seqlens: [N + 1], int32: start of each sequence's queries; then T.
        context_lens: [N], int32: keys of each sequence, including those of its queries.
        query_lens: Queries of each sequence, known on the host.
        prefix_lens: Keys of each sequence before its queries, known on the host.
        last_keys: [T], int32: last position that each query attends to, its own or a later one of
            its sequence; None: its own, for all.
        min_context: A sequence with fewer keys goes through the paged kernel; adjacent ones share a
            launch, which depends on shapes alone.
        pieces: Cache of a layer's launches and the counters of `paged_prefill_attention`, by
            window and plan kind; layers that agree in these share them.
    """

    block_tables: torch.Tensor
    cu_seqlens: torch.Tensor
    context_lens: torch.Tensor
    query_lens: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    last_keys: torch.Tensor | None = None
    min_context: int = 0
    pieces: dict[object, tuple[list[BatchPart], torch.Tensor]] = field(default_factory=dict)


def prefill_attention(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PrefillBatch,
    softmax: Softmax,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal softmax(scale * q k^T) v for the queries of each sequence's last tokens.

    `key` and `value` must be in the cache already.

    Args:
        query: [T, heads, D], sequences concatenated; last axis contiguous.
        key: [T, kv_heads, D]; None if the keys are only in the cache.
        value: Like `key`.
        key_cache: [num_blocks, kv_heads, block_size, D], of the query's dtype or float8_e4m3fn.
        value_cache: Like `key_cache`, with the same strides.
        batch: Lengths and block tables.
        softmax: Scale, mask and form of the softmax.
        out: [T, heads, D], contiguous: the output tensor; None allocates one.

    Returns:
        [T, heads, D], contiguous.
    """
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    scale, window, _, softcap, sinks = softmax
    plain = softcap == 0.0 and sinks is None and key is not None
    plain = plain and batch.last_keys is None and cudnn_fits(query, key_cache.shape[2])
    kind = None
    if plain:
        assert key is not None
        assert value is not None
        kind = PlanKind(
            threading.get_ident(), query.dtype, query.shape[1], key_cache.shape[1], query.shape[2],
            (query.stride(0), key.stride(0), value.stride(0)),
        )  # fmt: skip
    if (window, kind) not in batch.pieces:
        most = (sum(batch.query_lens) + len(batch.query_lens)) * key_cache.shape[1]
        zeros = torch.zeros(most, dtype=torch.int32, device=query.device)
        batch.pieces[window, kind] = _cut(batch, window, kind), zeros
    pieces, counters = batch.pieces[window, kind]
    for piece in pieces:
        rows, span = piece.rows, piece.tokens
        if piece.form == "prompt":
            assert key is not None
            assert value is not None
            out[span] = _prompt(query[span], key[span], value[span], scale)
        elif piece.form == "chunk":
            table, prefix = batch.block_tables[rows.start], batch.prefix_lens[rows.start]
            _chunk(query[span], key_cache, value_cache, table, prefix, scale, out[span])
        else:
            paged_prefill_attention(
                query, key_cache, value_cache,
                batch.block_tables[rows], batch.cu_seqlens[rows.start : rows.stop + 1],
                batch.context_lens[rows], batch.query_lens[rows], softmax,
                last_keys=batch.last_keys, counters=counters, out=out,
            )  # fmt: skip
    return out


def is_far(queries: int, prefix: int) -> bool:
    """Whether the prefix is so long that cuDNN is faster for fewer than `MIN_QUERIES` queries."""
    return queries > FEW_QUERIES and queries * prefix >= FAR_LOGITS


@dataclass(frozen=True)
class BatchPart:
    """Adjacent sequences of a batch that are computed by one kernel.

    Attributes:
        form: "prompt" (one sequence without prefix) or "chunk" (one with a prefix) for cuDNN;
            "paged" (any number of sequences) for the paged kernel.
        rows: The sequences.
        tokens: Their queries.
    """

    form: str
    rows: slice
    tokens: slice


def _cut(batch: PrefillBatch, window: int, kind: PlanKind | None) -> list[BatchPart]:
    """Parts of a batch, in order; all "paged" if `kind` is None: cuDNN does not support it."""
    pieces: list[BatchPart] = []
    token = 0
    for row, (fresh, prefix) in enumerate(zip(batch.query_lens, batch.prefix_lens, strict=True)):
        form, keys = "paged", fresh + prefix
        large = (fresh >= MIN_QUERIES or is_far(fresh, prefix)) and keys >= batch.min_context
        if kind is not None and large and (window == 0 or keys <= window):
            shapes = _chunk_shapes(fresh, prefix) if prefix else [_prompt_shape(fresh)]
            if _is_planned(kind, shapes):
                form = "chunk" if prefix else "prompt"
        rows, tokens = slice(row, row + 1), slice(token, token + fresh)
        if form == "paged" and pieces and pieces[-1].form == "paged":
            last = pieces.pop()
            rows, tokens = slice(last.rows.start, rows.stop), slice(last.tokens.start, tokens.stop)
        pieces.append(BatchPart(form, rows, tokens))
        token += fresh
    return [p for p in pieces if p.tokens.start < p.tokens.stop]


State = tuple[torch.Tensor, torch.Tensor]
"""Attention state of queries over some keys: out [T, heads, D] and lse [T, heads]."""


def _padded(tokens: int, granule: int, parts: int) -> int:
    """Round up to a multiple of `granule`, or of the next power of two / `parts` if that is more.

    More parts waste less work on padding, but give more shapes to plan.
    """
    step = max(granule, (1 << (tokens - 1).bit_length()) // parts)
    return -(-tokens // step) * step


def _prompt_shape(tokens: int) -> Shape:
    """Shape of a prompt without prefix; keys are padded like queries."""
    padded = _padded(tokens, GRANULE, 8)
    return "prompt", padded, padded


def _chunk_shapes(tokens: int, prefix: int) -> list[Shape]:
    """Shape of each launch of `_chunk`: own keys, then pieces of the prefix, longest first."""
    own = _padded(prefix % PREFIX_GRANULE + tokens, PREFIX_GRANULE, 8)
    queries = _padded(tokens, 2 * GRANULE, 4)
    shapes, whole = [("own", own, own)], prefix // PREFIX_GRANULE * PREFIX_GRANULE
    while whole:
        keys = min(MAX_PREFIX_PIECE, 1 << (whole.bit_length() - 1))
        shapes.append(("prefix", queries, keys))
        whole -= keys
    return shapes


def all_shapes(most_tokens: int, longest: int) -> set[Shape]:
    """All shapes for prompts and chunks of up to `most_tokens`, in sequences of up to `longest`."""
    shapes: set[Shape] = set()
    most_tokens = min(most_tokens, longest)
    far = min(2 * GRANULE, most_tokens)
    for tokens in (far, *range(MIN_QUERIES, most_tokens, GRANULE), most_tokens):
        if tokens >= MIN_QUERIES:
            shapes.add(_prompt_shape(tokens))
        if tokens >= MIN_QUERIES or is_far(tokens, longest - tokens):
            # All pieces of the prefix, and the longest rest of one.
            shapes.update(_chunk_shapes(tokens, 2 * MAX_PREFIX_PIECE - PREFIX_GRANULE))
            shapes.update(_chunk_shapes(tokens, PREFIX_GRANULE - 1))
    return {each for each in shapes if each[0] != "prefix" or FEW_QUERIES + each[2] < longest}


def _is_planned(kind: PlanKind, shapes: Sequence[Shape]) -> bool:
    """Whether cuDNN has plans for these shapes, or may make them now."""
    if getattr(_planning, "now", False):
        _planned.setdefault(kind, set()).update(shapes)
    return _planned.get(kind, set()).issuperset(shapes)


def cudnn_fits(query: torch.Tensor, block_size: int) -> bool:
    """Whether cuDNN's kernel supports tensors like `query`, and is faster on their GPU."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    head_dim = query.shape[2]
    if not (query.is_cuda and half and head_dim % 8 == 0 and head_dim <= 128):
        return False
    return GRANULE % block_size == 0 and torch.cuda.get_device_capability(query.device) >= (9, 0)


def _prompt(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of a prompt without prefix; causality masks the padding after its keys."""
    tokens = len(query)
    _, size, _ = _prompt_shape(tokens)
    padded = [_pad_tokens(x, size) for x in (query, key, value)]
    query, key, value = (x.transpose(1, 2) for x in padded)
    out, _ = _cudnn_batch(query, key, value, True, scale)
    return out[0].transpose(0, 1)[:tokens]


def _pad_tokens(x: torch.Tensor, size: int, before: int = 0) -> torch.Tensor:
    """Pad [T, heads, D] with zeros, `before` of them in front, to [1, size, heads, D].

    A token's strides are kept. Without padding this is `x` itself.
    """
    if len(x) == size:
        return x[None]
    shape, strides = (1, size, *x.shape[1:]), (size * x.stride(0), *x.stride())
    padded = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
    end = before + len(x)
    padded[0, before:end] = x
    padded[0, end:] = 0
    if before:
        padded[0, :before] = 0
    return padded


def _chunk(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    prefix: int,
    scale: float,
    target: torch.Tensor,
) -> None:
    """Attention of a chunk after `prefix` cached tokens, into `target`."""
    tokens, rest = query.shape[0], prefix % PREFIX_GRANULE
    (_, own, _), *earlier = _chunk_shapes(tokens, prefix)

    def among(queries: torch.Tensor, before: int, start: int, keys: int) -> State:
        there = prefix + tokens - start
        both = gather_pages(key_cache, value_cache, block_table, start, keys, there)
        key, value = both.to(query.dtype)[:, None]
        out, lse = _cudnn_batch(queries, key, value, start + before == prefix, scale)
        out, lse = out[0].transpose(0, 1), lse[0, :, :, 0].T
        return out[before : before + tokens], lse[before : before + tokens]

    state = among(_pad_tokens(query, own, rest).transpose(1, 2), rest, prefix - rest, own)
    if not earlier:
        target[:] = state[0]
        return
    # All pieces share one padding of the queries, for fewer launches.
    queries, start = _pad_tokens(query, earlier[0][1]).transpose(1, 2), 0
    for _, _, keys in earlier:
        state = merge_attention_states(*state, *among(queries, 0, start, keys), target)
        start += keys


def _cudnn_batch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out [N, heads, T, D] and lse [N, heads, T, 1] of queries over [N, kv_heads, keys, D].

    `causal` aligns the first query with the first key.
    """
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, compute_log_sumexp=True, is_causal=causal, scale=scale
    )
    return result[0], result[1]

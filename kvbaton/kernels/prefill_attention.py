"""Attention of prompts and chunks of prompts: cuDNN for long pieces, the paged kernel for others.

cuDNN's kernel is nearly twice as fast as the paged one on a Hopper GPU, but wants contiguous keys,
and builds a plan (70 ms, once) for every new shape. So a chunk that is long, or that has many
logits since its prefix is, is cut into shapes from a small set, all planned before a node is ready:
its own keys, causal, padded to one of a few lengths; and the prefix, gathered from the pages, in
powers of two of `PREFIX_GRANULE`; what these leave goes before the own keys, with empty queries in
front. The states are merged. Plans are for strides too, so these follow from the shape alone. What
was not planned goes through the paged kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from kvbaton.kernels.gather_pages import gather_pages
from kvbaton.kernels.merge_attention_states import merge_attention_states
from kvbaton.kernels.paged_attention import Softmax
from kvbaton.kernels.paged_prefill_attention import paged_prefill_attention

MIN_QUERIES = 1024
"""With fewer queries the paged kernel is as fast, but after a far prefix, see `is_far`."""

FEW_QUERIES, FAR_LOGITS = 256, 24_000_000
"""Measured on an H200, 32 heads of 128 features on 8: 500 queries after 8,128; 16,320; 65,024 keys
take 223; 421; 1,582 us paged and 266; 382; 1,067 by cuDNN, which the host launches for 25 to 45 ms
in 32 layers: TTFT of 500 after 32,640; 65,000 was 40; 64 ms, and is 46 to 55; 54."""

GRANULE, PREFIX_GRANULE = 256, 1024

MAX_PREFIX_PIECE = 16 * PREFIX_GRANULE
"""Keys; more per launch are hardly faster."""

Shape = tuple[str, int, int]
"""Of a launch: what the keys are, how many queries and keys."""


class PlanKind(NamedTuple):
    """What else cuDNN's plans are for.

    Attributes:
        thread: that has them.
        dtype: of queries, keys and values.
        heads: of queries.
        kv_heads: of keys and values.
        head_dim: of all.
        strides: from token to token, of a prompt's queries, keys and values.
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
    """Let cuDNN plan whatever this thread launches: it keeps its plans by thread and shape."""
    _planning.now = True
    try:
        yield
    finally:
        _planning.now = False


def plan_ahead(most_tokens: int, longest: int, device: torch.device) -> None:
    """Plan all that prompts and chunks launch, of tensors like those of this thread's `planning`.

    A plan takes cuDNN 50 ms, in which other threads have the interpreter.

    Args:
        most_tokens: of a chunk.
        longest: sequence, in tokens.
        device: where they will run.
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
                padded = query.contiguous().transpose(0, 1)[None]
                _cudnn_batch(padded, both, both, form == "own", 1.0)
            planned.add((form, queries, keys))


@dataclass(frozen=True, kw_only=True)
class PrefillBatch:
    """The sequences of one step that compute more than one token.

    Attributes:
        block_tables: [N, max_blocks], int32.
        cu_seqlens: [N + 1], int32: where each sequence's queries start, and T.
        context_lens: [N], int32: keys of each sequence, those of its queries included.
        query_lens: of each sequence, known on the host.
        prefix_lens: keys before the queries, known on the host.
        last_keys: [T], int32: the last position that each query sees, its own or a later one of
            its sequence; None: its own, of all.
        min_context: a sequence with fewer keys goes through the paged kernel, all such neighbours
            in one launch, which depends on shapes alone.
        pieces: what is launched in a layer, and the counters of `paged_prefill_attention`, by what
            it depends on; layers are alike.
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
    """Compute causal softmax(scale * q k^T) v of each sequence's queries, its last tokens.

    `key` and `value` must be in the cache already.

    Args:
        query: [T, heads, D], the sequences one after the other; last axis contiguous.
        key: [T, kv_heads, D]; None if they are in the cache alone.
        value: likewise.
        key_cache: [num_blocks, kv_heads, block_size, D], of the query's dtype or float8_e4m3fn.
        value_cache: as `key_cache`, with the same strides.
        batch: lengths and block tables.
        softmax: see there.
        out: [T, heads, D], contiguous, to fill; None makes one.

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
            out[span] = _chunk(query[span], key_cache, value_cache, table, prefix, scale)
        else:
            paged_prefill_attention(
                query, key_cache, value_cache,
                batch.block_tables[rows], batch.cu_seqlens[rows.start : rows.stop + 1],
                batch.context_lens[rows], batch.query_lens[rows], softmax,
                last_keys=batch.last_keys, counters=counters, out=out,
            )  # fmt: skip
    return out


def is_far(queries: int, prefix: int) -> bool:
    """Whether cuDNN, launches included, is faster for fewer than `MIN_QUERIES`: logits are many."""
    return queries > FEW_QUERIES and queries * prefix >= FAR_LOGITS


@dataclass(frozen=True)
class BatchPart:
    """Neighbours of a batch that go through one way: "prompt" and "chunk" are cuDNN's.

    Attributes:
        form: a "prompt" is one sequence's without prefix, a "chunk" one after a prefix; "paged"
            are any.
        rows: sequences.
        tokens: their queries.
    """

    form: str
    rows: slice
    tokens: slice


def _cut(batch: PrefillBatch, window: int, kind: PlanKind | None) -> list[BatchPart]:
    """All sequences of a batch, in their order; of no `kind` are what cuDNN can't attend to."""
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
"""Out [T, heads, D] and lse [T, heads] of queries over some keys."""


def _padded(tokens: int, granule: int, parts: int) -> int:
    """Round up to a multiple of `granule`, or of a part of the next power of two if that is more.

    The more parts, the less is computed in vain, and the more shapes there are to plan.
    """
    step = max(granule, (1 << (tokens - 1).bit_length()) // parts)
    return -(-tokens // step) * step


def _prompt_shape(tokens: int) -> Shape:
    """Of a prompt without prefix; its keys are padded as its queries are."""
    padded = _padded(tokens, GRANULE, 8)
    return "prompt", padded, padded


def _chunk_shapes(tokens: int, prefix: int) -> list[Shape]:
    """Of each launch of `_chunk`: own keys, then pieces of the prefix, the longest first."""
    own = _padded(prefix % PREFIX_GRANULE + tokens, PREFIX_GRANULE, 8)
    queries = _padded(tokens, 2 * GRANULE, 4)
    shapes, whole = [("own", own, own)], prefix // PREFIX_GRANULE * PREFIX_GRANULE
    while whole:
        keys = min(MAX_PREFIX_PIECE, 1 << (whole.bit_length() - 1))
        shapes.append(("prefix", queries, keys))
        whole -= keys
    return shapes


def all_shapes(most_tokens: int, longest: int) -> set[Shape]:
    """Of all launches of prompts and chunks of so many tokens, in sequences of up to `longest`."""
    shapes: set[Shape] = set()
    most_tokens = min(most_tokens, longest)
    far = min(2 * GRANULE, most_tokens)
    for tokens in (far, *range(MIN_QUERIES, most_tokens, GRANULE), most_tokens):
        if tokens >= MIN_QUERIES:
            shapes.add(_prompt_shape(tokens))
        if tokens >= MIN_QUERIES or is_far(tokens, longest - tokens):
            # All pieces once, and the longest rest.
            shapes.update(_chunk_shapes(tokens, 2 * MAX_PREFIX_PIECE - PREFIX_GRANULE))
            shapes.update(_chunk_shapes(tokens, PREFIX_GRANULE - 1))
    return {each for each in shapes if each[0] != "prefix" or FEW_QUERIES + each[2] < longest}


def _is_planned(kind: PlanKind, shapes: Sequence[Shape]) -> bool:
    """Whether cuDNN has planned launches of these shapes, or may do so now."""
    if getattr(_planning, "now", False):
        _planned.setdefault(kind, set()).update(shapes)
    return _planned.get(kind, set()).issuperset(shapes)


def cudnn_fits(query: torch.Tensor, block_size: int) -> bool:
    """Whether cuDNN's kernel takes tensors like `query`, on a GPU where it is the faster one."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    head_dim = query.shape[2]
    if not (query.is_cuda and half and head_dim % 8 == 0 and head_dim <= 128):
        return False
    return GRANULE % block_size == 0 and torch.cuda.get_device_capability(query.device) >= (9, 0)


def _prompt(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """A prompt without prefix; causality hides the padding after its keys."""
    tokens = len(query)
    _, size, _ = _prompt_shape(tokens)
    padded = [_pad_tokens(x, size) for x in (query, key, value)]
    query, key, value = (x.transpose(1, 2) for x in padded)
    out, _ = _cudnn_batch(query, key, value, True, scale)
    return out[0].transpose(0, 1)[:tokens]


def _pad_tokens(x: torch.Tensor, size: int) -> torch.Tensor:
    """[1, size, heads, D] of [T, heads, D]: zeros behind, strided as if they had been there."""
    if len(x) == size:
        return x[None]
    shape, strides = (1, size, *x.shape[1:]), (size * x.stride(0), *x.stride())
    padded = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
    padded[0, : len(x)] = x
    padded[0, len(x) :] = 0
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
    tokens, rest = query.shape[0], prefix % PREFIX_GRANULE
    (_, own, _), *earlier = _chunk_shapes(tokens, prefix)

    def padded(before: int, queries: int) -> torch.Tensor:
        """[1, heads, queries, D]."""
        return pad(query, (0, 0, 0, 0, before, queries - before - tokens)).transpose(0, 1)[None]

    def among(queries: torch.Tensor, before: int, start: int, keys: int) -> State:
        there = prefix + tokens - start
        both = gather_pages(key_cache, value_cache, block_table, start, keys, there)
        key, value = both.to(query.dtype)[:, None]
        out, lse = _cudnn_batch(queries, key, value, start + before == prefix, scale)
        out, lse = out[0].transpose(0, 1), lse[0, :, :, 0].T
        return out[before : before + tokens], lse[before : before + tokens]

    state = among(padded(rest, own), rest, prefix - rest, own)
    if earlier:  # for fewer launches, which the driver takes so many of, one padding is for all
        queries, start = padded(0, earlier[0][1]), 0
        for _, _, keys in earlier:
            state = merge_attention_states(*state, *among(queries, 0, start, keys))
            start += keys
    return state[0]


def _cudnn_batch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out [N, heads, T, D] and lse [N, heads, T, 1] of query over [N, kv_heads, keys, D].

    `causal` aligns the first query with the first key.
    """
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, compute_log_sumexp=True, is_causal=causal, scale=scale
    )
    return result[0], result[1]

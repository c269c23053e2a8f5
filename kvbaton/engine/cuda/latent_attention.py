"""Multi-head latent attention of a step's prompts: on latents, or on keys expanded from them.

For one query, expanding a context's latents to each head's keys and values takes far longer than
attending to them, so contexts are expanded only if a step has many queries.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvbaton.engine.cache import KVCache
from kvbaton.engine.models.layers import LatentProjection
from kvbaton.engine.upload import upload
from kvbaton.kernels.decode_parts import Parts
from kvbaton.kernels.latent_decode_attention import latent_decode_attention, latent_decode_parts
from kvbaton.kernels.prefill_attention import PrefillBatch
from kvbaton.kernels.varlen_attention import varlen_attention

ABSORBED_TOKENS = 128
"""Number of prompt tokens in a step up to which contexts are not expanded."""

EXPANDED_ELEMENTS = 1 << 28
"""Maximum number of elements of keys and values that are expanded at a time."""


def attend_among_latents(
    query: Tensor,
    rows: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    parts: Parts,
    projection: LatentProjection,
    scale: float,
    out: Tensor,
) -> None:
    """Attend with each query on its own, on latents.

    Args:
        query: [tokens, heads, head_dim], rotated.
        rows: [blocks, block_size, row_dim], rows of the layer.
        block_tables: [tokens, blocks] int32.
        context_lens: [tokens] int32, the token itself included; 0 for padding.
        parts: Work split for these lengths.
        projection: Projection of the layer.
        scale: Scale of the logits.
        out: [tokens, heads, value_dim], to fill.
    """
    absorbed = projection.absorb(query).transpose(0, 1)
    turned = query[..., projection.mla.nope_dim :]
    sums = latent_decode_attention(
        absorbed, turned, rows, block_tables, context_lens, scale=scale, parts=parts
    )
    projection.values(sums, out)


class LatentPrompts:
    """The prompts of a step; made once for all layers of a group.

    Args:
        cache: The KV pool.
        batch: The prompts.
    """

    def __init__(self, cache: KVCache, batch: PrefillBatch) -> None:
        self._cache, self._batch = cache, batch
        lens = zip(batch.query_lens, batch.prefix_lens, strict=True)
        self._lens = tuple(fresh + prefix for fresh, prefix in lens)
        self._tokens: tuple[Tensor, Tensor] | None = None
        self._parts: Parts | None = None
        self._cu = batch.cu_seqlens
        self._rows: Tensor | None = None
        if sum(batch.query_lens) <= ABSORBED_TOKENS:
            # Block table and context length of each token.
            ends = batch.cu_seqlens[1:]
            token, sequence = _numbers(ends, sum(batch.query_lens))
            later = ends[sequence] - 1 - token
            self._tokens = batch.block_tables[sequence], batch.context_lens[sequence] - later
        elif any(batch.prefix_lens):
            # Start of each sequence's rows when concatenated, and their places in the pool.
            size = cache.block_size
            (begins,) = upload([np.cumsum((0, *self._lens))], cache.data.device)
            self._cu = begins.int()
            row, sequence = _numbers(self._cu[1:], sum(self._lens))
            position = row - self._cu[sequence]
            blocks = batch.block_tables[sequence, position // size].long()
            self._rows = cache.token_views[0].token_rows(blocks * size + position % size)

    def attend(
        self,
        place: int,
        query: Tensor,
        fresh: tuple[Tensor, Tensor],
        projection: LatentProjection,
        scale: float,
        out: Tensor,
    ) -> None:
        """Fill `out`, [tokens, heads, value_dim]; fresh rows are in the cache already.

        Args:
            place: Place of the layer in the pool.
            query: [tokens, heads, head_dim], rotated.
            fresh: Latent [tokens, kv_rank] and key [tokens, rope_dim], rotated, as cached.
            projection: Projection of the layer.
            scale: Scale of the logits.
            out: To fill.
        """
        if self._tokens is not None:
            rows = self._cache.data[:, 0, place, 0]
            self._parts = self._parts or latent_decode_parts(query, self._tokens[1])
            attend_among_latents(query, rows, *self._tokens, self._parts, projection, scale, out)
            return
        mla, (latent, key_rope) = projection.mla, fresh
        if self._rows is not None:
            found = self._cache.token_views[0].read_rows(place, self._rows)
            latent, key_rope = found[:, : mla.kv_rank], found[:, mla.kv_rank :]
        step = max(1, EXPANDED_ELEMENTS // (len(latent) * 2 * mla.head_dim))
        for first in range(0, query.shape[1], step):
            heads = slice(first, first + step)
            key, value = projection.expand(latent, key_rope, heads)
            found = varlen_attention(
                query[:, heads], key, value, self._batch.cu_seqlens, self._cu,
                self._batch.query_lens, self._lens, scale=scale,
            )  # fmt: skip
            out[:, heads] = found[..., : mla.value_dim]


def _numbers(ends: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Numbers 0 .. total - 1, int32, and the sequence of each, int64, given sequences' ends."""
    numbers = torch.arange(total, dtype=ends.dtype, device=ends.device)
    return numbers, torch.searchsorted(ends, numbers, right=True)

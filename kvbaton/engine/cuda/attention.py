"""Attention of a ragged batch over the paged cache, by the kernels of `kvbaton.kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvbaton.engine.cache import KVCache
from kvbaton.engine.models.layers import LatentProjection
from kvbaton.engine.state_blocks import StateBatch
from kvbaton.engine.upload import upload
from kvbaton.kernels.decode_attention import decode_attention
from kvbaton.kernels.latent_decode_attention import latent_decode_attention
from kvbaton.kernels.prefill_attention import PrefillBatch, prefill_attention
from kvbaton.kernels.rope_write import HeadNorms, rope_write
from kvbaton.kernels.varlen_attention import varlen_attention

EXPANDED_ELEMENTS = 1 << 28
"""Most elements of keys and values that are made of latents at a time."""


@dataclass(frozen=True)
class DecodeBatch:
    """The leading sequences of a step, with one token each.

    Attributes:
        block_tables: [sequences, groups, blocks] int32. Behind a group's window they may name
            blocks of others by now, which no kernel reads.
        context_lens: [sequences] int32, the token itself included; 0 for padding.
    """

    block_tables: Tensor
    context_lens: Tensor


class KernelAttention:
    """`AttentionContext` of the kernels: decoding sequences first, then prompts.

    Args:
        cache: the pool.
        slot_mapping: [groups of K and V, tokens] int64: block * block_size + offset, or -1: not
            written.
        decode: the leading tokens' sequences, if there are any.
        prefill: the others, if there are any, as each group has them.
        states: what layers with a state need; None for a model without.
    """

    def __init__(
        self,
        cache: KVCache,
        slot_mapping: Tensor,
        decode: DecodeBatch | None,
        prefill: Sequence[PrefillBatch] = (),
        states: StateBatch | None = None,
    ) -> None:
        self._cache, self._slots, self.states = cache, slot_mapping, states
        self._decode, self._prefill = decode, prefill
        self._num_decode = 0 if decode is None else len(decode.context_lens)
        self._rows = torch.arange(slot_mapping.shape[1], device=slot_mapping.device)
        self._cos_sin: dict[Tensor, Tensor] = {}
        self._expanded: dict[int, ExpandedContexts] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary: tuple[Tensor, Tensor],
        scale: float | None = None,
        sinks: Tensor | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """See `AttentionContext.attend`."""
        group, place = self._cache.places[layer]
        window, slots = self._cache.groups[group].window, self._slots[group]
        keys, values = self._cache.data[:, :, place, 0], self._cache.data[:, :, place, 1]
        of_key, of_value = self._cache.scales(layer)
        scale = (query.shape[-1] ** -0.5 if scale is None else scale) * of_key
        if of_key != 1.0:
            if norms is not None:
                (query, key), norms = norms.apply(query, key), None
            key.div_(of_key)
        if of_value != 1.0:
            value.div_(of_value)
        angles = self._angles(rotary)
        rope_write(query, key, value, self._rows, angles, keys, values, slots, norms=norms)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        n = self._num_decode
        if self._decode is not None:
            tables, lens = self._decode.block_tables[:, group], self._decode.context_lens
            decode_attention(
                query[:n], keys, values, tables, lens,
                scale=scale, window=window, sinks=sinks, out=out[:n],
            )  # fmt: skip
        if self._prefill:
            fresh_key, fresh_value = (self._cache.kept(x[n:]) for x in (key, value))
            prefill_attention(
                query[n:], fresh_key, fresh_value, keys, values, self._prefill[group],
                scale=scale, window=window, sinks=sinks, out=out[n:],
            )  # fmt: skip
        return out if of_value == 1.0 else out.mul_(of_value)

    def attend_latent(
        self,
        layer: int,
        query: Tensor,
        latent: Tensor,
        key_rope: Tensor,
        rotary: tuple[Tensor, Tensor],
        projection: LatentProjection,
    ) -> Tensor:
        """See `AttentionContext.attend_latent`; tokens that decode attend among latents."""
        (group, place), mla = self._cache.places[layer], projection.mla
        rows = self._cache.data[:, :, place, 0]
        cached, _ = self._cache.scales(layer)
        if cached != 1.0:
            latent.div_(cached)
            key_rope.div_(cached)
        turned = query[..., mla.nope_dim :]
        rope_write(
            turned, key_rope[:, None], latent[:, None], self._rows, self._angles(rotary),
            rows[..., mla.kv_rank :], rows[..., : mla.kv_rank], self._slots[group],
            interleaved=mla.interleaved,
        )  # fmt: skip
        n, scale = self._num_decode, mla.scale * cached
        out = query.new_empty(*query.shape[:2], mla.value_dim)
        if self._decode is not None:
            tables, lens = self._decode.block_tables[:, group], self._decode.context_lens
            sums = latent_decode_attention(
                projection.absorb(query[:n]).transpose(0, 1), turned[:n], rows[:, 0], tables, lens,
                scale=scale,
            )  # fmt: skip
            out[:n] = projection.values(sums)
        if self._prefill:
            contexts = self._expanded.get(group)
            if contexts is None:
                contexts = ExpandedContexts(self._cache, self._prefill[group])
                self._expanded[group] = contexts
            fresh = self._cache.kept(latent[n:]), self._cache.kept(key_rope[n:])
            contexts.attend(place, query[n:], fresh, projection, scale, out[n:])
        return out if cached == 1.0 else out.mul_(cached)

    def _angles(self, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Cos and sin of half the features, side by side; made once for each pair of tensors."""
        found = self._cos_sin.get(rotary[0])
        if found is None:
            half = rotary[0].shape[-1] // 2
            found = torch.cat([x[:, 0, :half].float() for x in rotary], dim=-1)
            self._cos_sin[rotary[0]] = found
        return found


class ExpandedContexts:
    """Attention of prompts over keys and values that are made of their contexts' latents.

    Some heads at a time, as they take far more memory. Made once a step, for the layers of a group.

    Args:
        cache: the pool.
        batch: the prompts.
    """

    def __init__(self, cache: KVCache, batch: PrefillBatch) -> None:
        self._cache, self._batch = cache, batch
        lens = zip(batch.query_lens, batch.prefix_lens, strict=True)
        self._lens = tuple(fresh + prefix for fresh, prefix in lens)
        self._cu, self._rows = batch.cu_seqlens, None
        if any(batch.prefix_lens):
            self._cu, self._rows = self._cached_rows(cache, batch)

    def _cached_rows(self, cache: KVCache, batch: PrefillBatch) -> tuple[Tensor, Tensor]:
        """Where each sequence's rows begin, and where they lie in the pool."""
        device, total = cache.data.device, sum(self._lens)
        lens, cu = upload([np.array(self._lens), np.cumsum((0, *self._lens))], device)
        numbers = torch.arange(len(self._lens), device=device)
        sequence = torch.repeat_interleave(numbers, lens, output_size=total)
        position = torch.arange(total, device=device) - cu[sequence]
        blocks = batch.block_tables[sequence, position // cache.block_size].long()
        slots = blocks * cache.block_size + position % cache.block_size
        return cu.int(), cache.token_rows(slots)

    def attend(
        self,
        place: int,
        query: Tensor,
        fresh: tuple[Tensor, Tensor],
        projection: LatentProjection,
        scale: float,
        out: Tensor,
    ) -> None:
        """Fill `out`, [tokens, heads, value_dim].

        Args:
            place: of the layer.
            query: [tokens, heads, head_dim], turned.
            fresh: latent [tokens, kv_rank] and key [tokens, rope_dim], turned, as they are cached.
            projection: of the layer.
            scale: of the logits.
            out: to fill.
        """
        mla, (latent, key_rope) = projection.mla, fresh
        if self._rows is not None:
            rows = self._cache.read_rows(place, self._rows)
            latent, key_rope = rows[:, : mla.kv_rank], rows[:, mla.kv_rank :]
        step = max(1, EXPANDED_ELEMENTS // (len(latent) * 2 * mla.head_dim))
        for first in range(0, query.shape[1], step):
            heads = slice(first, first + step)
            key, value = projection.expand(latent, key_rope, heads)
            found = varlen_attention(
                query[:, heads], key, value, self._batch.cu_seqlens, self._cu,
                self._batch.query_lens, self._lens, scale=scale,
            )  # fmt: skip
            out[:, heads] = found[..., : mla.value_dim]

"""Attention of a ragged batch over the paged cache, with the kernels of `kvbaton.kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbaton.engine.cache import KVCache
from kvbaton.engine.cuda.latent_attention import LatentPrompts, attend_among_latents
from kvbaton.engine.models.layers import Heads, LatentHeads, Rotary
from kvbaton.engine.state_blocks import StateBatch
from kvbaton.kernels.decode_attention import decode_attention, decode_parts
from kvbaton.kernels.decode_parts import Parts
from kvbaton.kernels.latent_decode_attention import latent_decode_parts
from kvbaton.kernels.paged_attention import Softmax
from kvbaton.kernels.prefill_attention import PrefillBatch, prefill_attention
from kvbaton.kernels.rope_write import rope_write


@dataclass(frozen=True)
class DecodeBatch:
    """The leading sequences of a step, which have one token each.

    Attributes:
        block_tables: [sequences, groups, blocks] int32. Entries behind a group's window may name
            blocks of other sequences, which no kernel reads.
        context_lens: [sequences] int32, the token itself included; 0 for padding.
    """

    block_tables: Tensor
    context_lens: Tensor


class KernelAttention:
    """`AttentionContext` of the kernels: decoding sequences first, then prompts.

    Args:
        cache: The KV pool.
        slot_mapping: [groups of K and V, tokens] int64: block * block_size + offset, or -1 for
            tokens that are not written. Tokens after those of the sequences are padding.
        decode: The decoding sequences; None for none.
        prefill: Per group, the prompts; empty for none.
        states: Inputs of layers with a state; None for a model without.
        prompts_at: Index of the token at which `prefill` begins; None for the first after `decode`.
            With a smaller index, prompts may begin within `decode`, where that is padding.
        beside: Stream for the attention of prompts, concurrent with decoding sequences, whose
            padding is then left out; None computes one after the other.

    Attributes:
        slots: `slot_mapping`.
        decode: As given.
        prefill: As given.
    """

    def __init__(
        self,
        cache: KVCache,
        slot_mapping: Tensor,
        decode: DecodeBatch | None,
        prefill: Sequence[PrefillBatch] = (),
        states: StateBatch | None = None,
        prompts_at: int | None = None,
        beside: torch.cuda.Stream | None = None,
    ) -> None:
        self._cache, self.slots, self.states = cache, slot_mapping, states
        self.decode, self.prefill, self._beside = decode, prefill, beside
        self._prompts_at = self.num_decodes if prompts_at is None else prompts_at
        self._num_tokens = self._prompts_at + (sum(prefill[0].query_lens) if prefill else 0)
        self._rows = torch.arange(slot_mapping.shape[1], device=slot_mapping.device)
        self._cos_sin: dict[Tensor, Tensor] = {}
        self._latent_prompts: dict[int, LatentPrompts] = {}
        self._parts: dict[int, Parts] = {}

    def pad(self, count: int) -> None:
        """Append padding tokens."""
        self.slots = F.pad(self.slots, (0, count), value=-1)
        self._rows = torch.arange(self.slots.shape[1], device=self.slots.device)

    def attend(self, layer: int, heads: Heads, rotary: Rotary | None) -> Tensor:
        """See `AttentionContext.attend`."""
        stored, query = self.store(layer, heads, rotary), heads.query
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        out[self._num_tokens :] = 0
        return self.attend_stored(layer, stored, out)

    def store(self, layer: int, heads: Heads, rotary: Rotary | None) -> Heads:
        """First half of `attend`, which depends only on slots; returns the rotated heads."""
        query, key, value, *_ = heads
        norms = heads.norms
        group, place = self._cache.places[layer]
        data, slots = self._cache.token_views[group].data, self.slots[group]
        keys, values = data[:, :, place, 0], data[:, :, place, 1]
        of_key, of_value = self._cache.scales(layer)
        fresh: tuple[Tensor | None, Tensor | None] = None, None
        if key is None or value is None:  # dummies, rotated with the queries and not stored
            key = value = query.new_empty(len(query), keys.shape[1], keys.shape[-1])
            slots = torch.full_like(slots, -1)
        else:
            if of_key != 1.0:
                if norms is not None:
                    (query, key), norms = norms.apply((query, key)), None
                key.div_(of_key)
            if of_value != 1.0:
                value.div_(of_value)
            fresh = key, value
        angles = None if rotary is None else self._angles(rotary)
        rope_write(
            query, key, value, self._rows, angles, keys, values, slots,
            interleaved=heads.interleaved, norms=norms,
        )  # fmt: skip
        return Heads(query, *fresh, heads.scale, heads.sinks)

    def attend_stored(self, layer: int, heads: Heads, out: Tensor) -> Tensor:
        """Second half of `attend`: fill `out`, contiguous and shaped as the query."""
        query, key, value, scale, sinks, *_ = heads
        group, place = self._cache.places[layer]
        of, data = self._cache.groups[group], self._cache.token_views[group].data
        keys, values = data[:, :, place, 0], data[:, :, place, 1]
        of_key, of_value = self._cache.scales(layer)
        scale = (query.shape[-1] ** -0.5 if scale is None else scale) * of_key
        softmax = Softmax(scale, of.window, of.chunked, sinks=sinks)
        n, m, decodes = self._prompts_at, self._num_tokens, self.num_decodes
        if self._beside is not None:
            self._beside.wait_stream(torch.cuda.current_stream())
        if self.decode is not None:
            tables, lens = self.decode.block_tables[:, group], self.decode.context_lens
            if group not in self._parts:
                pads = self._beside is None
                self._parts[group] = decode_parts(query, keys, lens, softmax, pads=pads)
            decode_attention(
                query[:decodes], keys, values, tables, lens, softmax,
                parts=self._parts[group], out=out[:decodes],
            )  # fmt: skip
        if self.prefill:
            with torch.cuda.stream(self._beside):
                key, value = (None if x is None else self._cache.kept(x[n:m]) for x in (key, value))
                prefill_attention(
                    query[n:m], key, value, keys, values, self.prefill[group], softmax, out[n:m]
                )
        if self._beside is not None:
            torch.cuda.current_stream().wait_stream(self._beside)
        return out if of_value == 1.0 else out.mul_(of_value)

    def attend_latent(self, layer: int, heads: LatentHeads, rotary: Rotary) -> Tensor:
        """See `AttentionContext.attend_latent`."""
        self.store_latent(layer, heads, rotary)
        out = heads.query.new_empty(*heads.query.shape[:2], heads.projection.mla.value_dim)
        out[self._num_tokens :] = 0
        return self.attend_latent_stored(layer, heads, out)

    def store_latent(self, layer: int, heads: LatentHeads, rotary: Rotary) -> None:
        """First half of `attend_latent`, which depends only on slots; rotates in place."""
        query, latent, key_rope, projection = heads
        (group, place), mla = self._cache.places[layer], projection.mla
        rows = self._cache.data[:, :, place, 0]
        cached, _ = self._cache.scales(layer)
        if cached != 1.0:
            latent.div_(cached)
            key_rope.div_(cached)
        turned = query[..., mla.nope_dim :]
        rope_write(
            turned, key_rope[:, None], latent[:, None], self._rows, self._angles(rotary),
            rows[..., mla.kv_rank :], rows[..., : mla.kv_rank], self.slots[group],
            interleaved=mla.interleaved,
        )  # fmt: skip

    def attend_latent_stored(self, layer: int, heads: LatentHeads, out: Tensor) -> Tensor:
        """Second half of `attend_latent`: fill `out`, [tokens, heads, value_dim]."""
        query, latent, key_rope, projection = heads
        (group, place), mla = self._cache.places[layer], projection.mla
        rows = self._cache.data[:, :, place, 0]
        cached, _ = self._cache.scales(layer)
        n, m, scale = self._prompts_at, self._num_tokens, mla.scale * cached
        if self.decode is not None:
            tables, lens = self.decode.block_tables[:, group], self.decode.context_lens
            if group not in self._parts:
                self._parts[group] = latent_decode_parts(query, lens)
            attend_among_latents(
                query[:n], rows[:, 0], tables, lens, self._parts[group], projection, scale, out[:n]
            )
        if self.prefill:
            prompts = self._latent_prompts.get(group)
            if prompts is None:
                prompts = LatentPrompts(self._cache, self.prefill[group])
                self._latent_prompts[group] = prompts
            fresh = self._cache.kept(latent[n:m]), self._cache.kept(key_rope[n:m])
            prompts.attend(place, query[n:m], fresh, projection, scale, out[n:m])
        return out if cached == 1.0 else out.mul_(cached)

    @property
    def num_decodes(self) -> int:
        """Number of decoding sequences, padding included."""
        return 0 if self.decode is None else len(self.decode.context_lens)

    @property
    def num_prompts(self) -> int:
        """Number of prompts."""
        return len(self.prefill[0].query_lens) if self.prefill else 0

    def _angles(self, rotary: Rotary) -> Tensor:
        """Cos and sin of half the features, side by side; cached per pair of tensors."""
        found = self._cos_sin.get(rotary[0])
        if found is None:
            half = rotary[0].shape[-1] // 2
            found = torch.cat([x[:, 0, :half].float() for x in rotary], dim=-1)
            self._cos_sin[rotary[0]] = found
        return found

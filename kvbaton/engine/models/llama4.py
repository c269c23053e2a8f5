"""Llama 4's language model (Meta, "The Llama 4 herd", 2025).

Beside Llama's: three layers that attend within chunks to one that attends to everything and whose
heads are not turned (iRoPE), its queries the longer the later they are; a norm without a scale of
the heads that are turned; and mixtures of experts that weigh what they are given, beside one expert
that all tokens go through, in all layers or in every other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from kvbaton.engine.collectives import Shard
from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.models.layers import AttentionContext, Heads, Rotary, SelfAttention
from kvbaton.engine.models.llama import DecoderLayer, LlamaForCausalLM
from kvbaton.kernels.rope_write import HeadNorms

Turn = tuple[Rotary | None, Tensor | None]
"""What turns heads, or what their queries are multiplied with, [tokens, 1, 1]; neither: None."""


class Llama4Attention(SelfAttention):
    """Attention whose heads are turned, or whose queries have a temperature."""

    def __init__(self, config: ModelConfig, layer: int, shard: Shard) -> None:
        super().__init__(config, layer, shard)
        assert config.nope is not None
        if config.nope.normed and not config.nope.layers[layer]:
            # A turn changes no length, so it may come after the norm.
            self.register_buffer("ones", torch.ones(config.head_dim), persistent=False)
            self.eps = config.rms_norm_eps

    def forward(self, hidden: Tensor, turn: Turn, attention: AttentionContext) -> Tensor:  # type: ignore[override]
        """As `SelfAttention.forward`."""
        rotary, temperature = turn
        projected = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_dim))
        query, key, value = projected.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        ones: Tensor | None = getattr(self, "ones", None)
        norms = None if ones is None else HeadNorms(ones, ones, self.eps, 0.0)
        if temperature is not None:
            query = (query * temperature).to(query.dtype)
        heads = Heads(query, key, value, norms=norms, interleaved=rotary is not None)
        out = attention.attend(self.layer, heads, rotary)
        return self.o_proj(out.flatten(1))  # type: ignore[no-any-return]


class Llama4DecoderLayer(DecoderLayer):
    """Attention, then experts or an MLP."""

    attention_class = Llama4Attention
    mlp_name = "feed_forward"

    def __init__(self, config: ModelConfig, layer: int, shard: Shard) -> None:
        super().__init__(config, layer, shard)
        assert config.nope is not None
        self.kind = int(config.nope.layers[layer])


class Llama4ForCausalLM(LlamaForCausalLM):
    """The whole model, but for its vision tower."""

    layer_class = Llama4DecoderLayer

    @override
    def layer_inputs(self, token_ids: Tensor, positions: Tensor, stream: Tensor) -> Sequence[Turn]:
        assert self.config.nope is not None
        temperature, nope = None, self.config.nope
        if nope.attn_scale:
            steps = ((positions.float() + 1.0) / nope.floor_scale).floor()
            temperature = (steps.log1p() * nope.attn_scale + 1.0)[:, None, None]
        return (self.rotary(positions, stream.dtype), None), (None, temperature)

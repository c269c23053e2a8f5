"""Llama 4's language model (Meta, "The Llama 4 herd", 2025).

It differs from Llama: three layers with attention within chunks are followed by one with full
attention, no rotation (iRoPE), and queries that are scaled up with their position; rotated heads
have a norm without scale; mixtures of experts, in all or every second layer, weigh the experts'
inputs, and have one expert that all tokens use.
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
"""Cos and sin for rotation, or None; and a factor of queries, [tokens, 1, 1], or None."""


class Llama4Attention(SelfAttention):
    """Attention with rotation, or with a temperature of queries."""

    def __init__(self, config: ModelConfig, layer: int, shard: Shard) -> None:
        super().__init__(config, layer, shard)
        assert config.nope is not None
        if config.nope.normed and not config.nope.layers[layer]:
            # Rotation keeps lengths, so it may come after the norm.
            self.register_buffer("ones", torch.ones(config.head_dim), persistent=False)
            self.eps = config.rms_norm_eps

    def forward(self, hidden: Tensor, turn: Turn, attention: AttentionContext) -> Tensor:  # type: ignore[override]
        """Do as `SelfAttention.forward`."""
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
    """The whole model, except for its vision tower."""

    layer_class = Llama4DecoderLayer

    @override
    def layer_inputs(self, token_ids: Tensor, positions: Tensor, stream: Tensor) -> Sequence[Turn]:
        assert self.config.nope is not None
        temperature, nope = None, self.config.nope
        if nope.attn_scale:
            steps = ((positions.float() + 1.0) / nope.floor_scale).floor()
            temperature = (steps.log1p() * nope.attn_scale + 1.0)[:, None, None]
        return (self.rotary(positions, stream.dtype), None), (None, temperature)

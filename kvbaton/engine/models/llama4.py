"""Llama 4's language model (Meta, "The Llama 4 herd", 2025).

Beside Llama's: three layers that attend within chunks to one that attends to everything and whose
heads are not turned (iRoPE), its queries the longer the later they are; a norm without a scale of
the heads that are turned; and mixtures of experts that weigh what they are given, beside one expert
that all tokens go through, in all layers or in every other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvbaton.engine.collectives import Shard
from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.models.layers import (
    AttentionContext,
    GatedMLP,
    Heads,
    RMSNorm,
    Rotary,
    SelfAttention,
)
from kvbaton.engine.models.llama import Encoded, LlamaForCausalLM
from kvbaton.engine.models.moe import MoE
from kvbaton.kernels.rope_write import HeadNorms


class Llama4Attention(SelfAttention):
    """Attention whose heads are turned, or whose queries have a temperature."""

    def __init__(self, config: ModelConfig, layer: int, shard: Shard) -> None:
        super().__init__(config, layer, shard)
        assert config.nope is not None
        if config.nope.normed and not config.nope.layers[layer]:
            # A turn changes no length, so it may come after the norm.
            self.register_buffer("ones", torch.ones(config.head_dim), persistent=False)
            self.eps = config.rms_norm_eps

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        rotary: Rotary | None,
        temperature: Tensor | None,
        attention: AttentionContext,
    ) -> Tensor:
        """As `SelfAttention.forward`; queries are multiplied by `temperature`, [tokens, 1, 1]."""
        projected = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_dim))
        query, key, value = projected.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        ones: Tensor | None = getattr(self, "ones", None)
        norms = None if ones is None else HeadNorms(ones, ones, self.eps, 0.0)
        if temperature is not None:
            query = (query * temperature).to(query.dtype)
        heads = Heads(query, key, value, norms=norms, interleaved=rotary is not None)
        out = attention.attend(self.layer, heads, rotary)
        return self.o_proj(out.flatten(1))  # type: ignore[no-any-return]


class Llama4DecoderLayer(nn.Module):
    """Attention, then experts or an MLP."""

    def __init__(self, config: ModelConfig, layer: int, shard: Shard) -> None:
        super().__init__()
        assert config.nope is not None
        name, size, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        self.turned = not config.nope.layers[layer]
        self.input_norm = RMSNorm(f"{name}.input_layernorm", size, eps)
        self.self_attn = Llama4Attention(config, layer, shard)
        self.post_norm = RMSNorm(f"{name}.post_attention_layernorm", size, eps)
        self.mlp: GatedMLP | MoE
        if config.moe is not None and config.moe.layers[layer]:
            self.mlp = MoE(name, size, config.moe, shard, config.quantization)
        else:
            self.mlp = GatedMLP(
                f"{name}.feed_forward",
                size,
                config.intermediate_size,
                shard,
                bias=False,
                quantization=config.quantization,
            )

    def forward(
        self,
        delta: Tensor | None,
        stream: Tensor,
        rotary: Rotary,
        temperature: Tensor | None,
        attention: AttentionContext,
    ) -> Tensor:
        """As `llama.DecoderLayer.forward`."""
        normed = self.input_norm(stream) if delta is None else self.input_norm(delta, stream)
        turn, scale = (rotary, None) if self.turned else (None, temperature)
        attended = self.self_attn(normed, turn, scale, attention)
        return self.mlp(self.post_norm(attended, stream))  # type: ignore[no-any-return]


class Llama4ForCausalLM(LlamaForCausalLM):
    """The whole model, but for its vision tower."""

    layer_class = Llama4DecoderLayer

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionContext,
        encoded: Encoded | None = None,
    ) -> Tensor:
        """See `LlamaForCausalLM.forward`; there are no encoder outputs."""
        assert encoded is None
        assert self.config.nope is not None
        stream: Tensor = self.embed_tokens(token_ids)
        rotary = self.rotary(positions, stream.dtype)
        temperature, nope = None, self.config.nope
        if nope.attn_scale:
            steps = ((positions.float() + 1.0) / nope.floor_scale).floor()
            temperature = (steps.log1p() * nope.attn_scale + 1.0)[:, None, None]
        delta = None
        for layer in self.layers:
            delta = layer(delta, stream, rotary, temperature, attention)
        return self.norm(delta, stream)  # type: ignore[no-any-return]

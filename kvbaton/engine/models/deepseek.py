"""DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437), and models of the same form, such as R1.

They differ from Llama by multi-head latent attention. A token's keys and values are projections of
one latent row, which is what the cache stores; its queries, too, come from a latent, except in the
Lite models. The first layers have an MLP, the others experts (chosen as in `moe_config`).
"""

from __future__ import annotations

from torch import Tensor, nn

from kvbaton.engine.collectives import Shard
from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.models.layers import (
    AttentionContext,
    ColumnLinear,
    LatentHeads,
    LatentProjection,
    RMSNorm,
    Rotary,
    output_projection,
)
from kvbaton.engine.models.llama import DecoderLayer, LlamaForCausalLM

LATENT_EPS = 1e-6
"""Epsilon of the latents' norms, independent of ``rms_norm_eps``."""


class LatentAttention(nn.Module):
    """Multi-head latent attention over the paged cache; heads are split over ranks, latents not.

    Args:
        config: Configuration of the model.
        layer: Number of the layer.
        shard: This rank's share.
    """

    def __init__(self, config: ModelConfig, layer: int, shard: Shard) -> None:
        super().__init__()
        mla, name, total = config.mla, f"model.layers.{layer}.self_attn", config.num_heads
        assert mla is not None
        self.layer, self.mla = layer, mla
        (first, heads), dim = shard.span(total), mla.head_dim
        rows = total * dim, (first * dim, heads * dim)
        query = ("q_a_proj", mla.q_rank, (0, mla.q_rank)) if mla.q_rank else ("q_proj", *rows)
        row = mla.row_dim, (0, mla.row_dim)
        self.widths = query[2][1], mla.kv_rank, mla.rope_dim
        quantization = config.quantization
        self.down_proj = ColumnLinear(
            config.hidden_size,
            [(f"{name}.{query[0]}", *query[1:]), (f"{name}.kv_a_proj_with_mqa", *row)],
            bias=False,
            quantization=quantization,
        )
        self.q_norm: RMSNorm | None = None
        if mla.q_rank:
            self.q_norm = RMSNorm(f"{name}.q_a_layernorm", mla.q_rank, LATENT_EPS)
            own = [(f"{name}.q_b_proj", *rows)]
            self.q_b_proj = ColumnLinear(mla.q_rank, own, bias=False, quantization=quantization)
        self.kv_norm = RMSNorm(f"{name}.kv_a_layernorm", mla.kv_rank, LATENT_EPS)
        self.kv_b_proj = LatentProjection(f"{name}.kv_b_proj", mla, total, shard)
        self.o_proj = output_projection(name, config, mla.value_dim, shard)

    def forward(self, hidden: Tensor, rotary: Rotary, attention: AttentionContext) -> Tensor:
        """Map [tokens, hidden] to the rank's part of the same; writes latents into the cache."""
        query, latent, key_rope = self.down_proj(hidden).split(self.widths, dim=-1)
        if self.q_norm is not None:
            query = self.q_b_proj(self.q_norm(query))
        query = query.unflatten(-1, (-1, self.mla.head_dim))
        heads = LatentHeads(query, self.kv_norm(latent), key_rope, self.kv_b_proj)
        out = attention.attend_latent(self.layer, heads, rotary)
        return self.o_proj(out.flatten(1))  # type: ignore[no-any-return]


class DeepseekDecoderLayer(DecoderLayer):
    """Latent attention, and MLP or experts."""

    attention_class = LatentAttention


class DeepseekForCausalLM(LlamaForCausalLM):
    """The whole model, except for multi-token prediction."""

    layer_class = DeepseekDecoderLayer

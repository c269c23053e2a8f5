"""Qwen3-Next: three layers with a gated delta rule are followed by one with gated attention.

All have experts. The rule (Gated DeltaNet: Yang, Kautz, Hatamizadeh, arXiv 2412.06464) summarises
all earlier tokens in one matrix per head, which each token decays, corrects and reads
(`kernels.delta_rule`). Before it, a short causal convolution mixes each channel with its last
tokens, which belong to the state too.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from typing_extensions import override

from kvbaton.engine.collectives import Shard
from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.models.layers import (
    AttentionContext,
    ColumnLinear,
    Heads,
    Piece,
    RMSNorm,
    Rotary,
    RowLinear,
    WeightedModule,
    output_projection,
)
from kvbaton.engine.models.linear import new_weight
from kvbaton.engine.models.llama import DecoderLayer, LlamaForCausalLM
from kvbaton.kernels.delta_rule import delta_rule
from kvbaton.kernels.delta_rule_inputs import delta_rule_inputs


class GatedDeltaNet(WeightedModule):
    """Linear attention: projections, convolution, the gated delta rule, a gated norm.

    Everything is ordered by key head, as in the checkpoint's projections: a head's query, key and
    values. So ranks split heads and states alike, by the head axis.
    """

    def __init__(self, config: ModelConfig, layer: int, shard: Shard) -> None:
        super().__init__()
        linear = config.linear_attention
        assert linear is not None
        self.linear, self.layer, self.name = linear, layer, f"model.layers.{layer}.linear_attn"
        self.first, self.heads = shard.span(linear.num_key_heads)
        self.value_heads = self.heads * linear.values_per_key
        values = linear.values_per_key * linear.value_head_dim

        def projection(name: str, rows: int) -> ColumnLinear:
            span = self.first * rows, self.heads * rows
            parts = [(f"{self.name}.{name}", linear.num_key_heads * rows, span)]
            quantization = config.quantization
            return ColumnLinear(config.hidden_size, parts, bias=False, quantization=quantization)

        self.in_proj_qkvz = projection("in_proj_qkvz", linear.channels + values)
        self.in_proj_ba = projection("in_proj_ba", 2 * linear.values_per_key)
        self.conv = new_weight(self.heads, linear.channels, linear.conv_kernel)
        # The logarithm of a decay, in float32 whatever the model's dtype.
        self.decays = new_weight(2, self.value_heads, dtype=torch.float32)
        self.norm = RMSNorm(f"{self.name}.norm", linear.value_head_dim, config.rms_norm_eps)
        self.out_proj = RowLinear(
            f"{self.name}.out_proj",
            linear.num_value_heads * linear.value_head_dim,
            config.hidden_size,
            shard,
            bias=False,
            quantization=config.quantization,
        )

    def forward(self, hidden: Tensor, rotary: Rotary, attention: AttentionContext) -> Tensor:
        """Map [tokens, hidden] to the rank's part of the same; updates this layer's states."""
        linear = self.linear
        assert attention.states is not None, "the cache has groups for all layers"
        states = attention.states.of(self.layer)
        projected = self.in_proj_qkvz(hidden).unflatten(-1, (self.heads, -1))
        inputs, gate = projected.tensor_split((linear.channels,), dim=-1)
        rates = self.in_proj_ba(hidden).unflatten(-1, (self.heads, 2, linear.values_per_key))
        rule = delta_rule_inputs(inputs, rates, self.conv, self.decays, states)
        out = delta_rule(*rule, states)
        gate = gate.unflatten(-1, (linear.values_per_key, linear.value_head_dim))
        return self.out_proj(self.norm(out, gate=gate).flatten(1))  # type: ignore[no-any-return]

    def pieces(self) -> Iterator[Piece]:
        """The convolution, head by head, since the checkpoint has all queries first; the decays."""
        linear = self.linear
        keys, values = linear.key_head_dim, linear.values_per_key * linear.value_head_dim
        of_keys = linear.num_key_heads * keys
        channels = 2 * of_keys + linear.num_key_heads * values
        parts = ((0, 0, keys), (of_keys, keys, keys), (2 * of_keys, 2 * keys, values))
        for head in range(self.heads):
            for start, place, number in parts:
                target = self.conv[head, place : place + number, None]
                first = start + (self.first + head) * number
                shape = (channels, 1, linear.conv_kernel)
                yield Piece(f"{self.name}.conv1d.weight", shape, target, 0, first)
        total, first = linear.num_value_heads, self.first * linear.values_per_key
        for name, target in zip(("A_log", "dt_bias"), self.decays, strict=True):
            yield Piece(f"{self.name}.{name}", (total,), target, 0, first)


def rotary_order(head_dim: int, rotary_dim: int) -> list[tuple[int, int]]:
    """Order in which a head's features are stored, as ranges (first, number) of the checkpoint's.

    Only the first `rotary_dim` features are rotated, i with i + rotary_dim / 2, while attention
    rotates i with i + head_dim / 2. Queries and keys are therefore stored in another order, which
    does not change their products.
    """
    half, turned = head_dim // 2, rotary_dim // 2
    rest = half - turned
    return [(0, turned), (rotary_dim, rest), (turned, turned), (rotary_dim + rest, rest)]


class HeadNorm(RMSNorm):
    """Norm of heads whose features are in `rotary_order`."""

    def __init__(self, name: str, config: ModelConfig) -> None:
        super().__init__(name, config.head_dim, config.rms_norm_eps, config.family.norm_offset)
        self.order = rotary_order(config.head_dim, config.rope.rotary_dim(config.head_dim))

    @override
    def pieces(self) -> Iterator[Piece]:
        """The scale, in that order."""
        at = 0
        for first, number in self.order:
            target = self.weight[at : at + number]
            yield Piece(f"{self.name}.weight", self.weight.shape, target, 0, first, norm=True)
            at += number


class GatedAttention(nn.Module):
    """Attention whose output is gated by a sigmoid per feature."""

    def __init__(self, config: ModelConfig, layer: int, shard: Shard) -> None:
        super().__init__()
        name, dim = f"model.layers.{layer}.self_attn", config.head_dim
        self.layer, self.head_dim = layer, dim
        self.q_norm, self.k_norm = (HeadNorm(f"{name}.{x}_norm", config) for x in "qk")
        first, self.heads = shard.span(config.num_heads)
        first_kv, self.kv_heads = shard.kv_heads(config.num_kv_heads)
        queries, keys = range(first, first + self.heads), range(first_kv, first_kv + self.kv_heads)
        order = self.q_norm.order
        # In the checkpoint, each query head is followed by its gate.
        rows = [("q", head * 2 * dim + at, number) for head in queries for at, number in order]
        rows += [("k", head * dim + at, number) for head in keys for at, number in order]
        rows += [("v", first_kv * dim, self.kv_heads * dim)]
        rows += [("q", (head * 2 + 1) * dim, dim) for head in queries]
        kv = config.num_kv_heads * dim
        totals = {"q": config.num_heads * 2 * dim, "k": kv, "v": kv}
        self.qkv_proj = ColumnLinear(
            config.hidden_size,
            [(f"{name}.{x}_proj", totals[x], (start, number)) for x, start, number in rows],
            bias=config.qkv_bias,
            quantization=config.quantization,
        )
        self.o_proj = output_projection(name, config, dim, shard)

    def forward(self, hidden: Tensor, rotary: Rotary, attention: AttentionContext) -> Tensor:
        """Map [tokens, hidden] to the rank's part of the same; writes K and V into the cache."""
        projected = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_dim))
        query, key, value, gate = projected.split(
            (self.heads, self.kv_heads, self.kv_heads, self.heads), dim=1
        )
        heads = Heads(self.q_norm(query), self.k_norm(key), value)
        out = attention.attend(self.layer, heads, rotary)
        return self.o_proj((out * gate.sigmoid()).flatten(1))  # type: ignore[no-any-return]


class Qwen3NextDecoderLayer(DecoderLayer):
    """Linear or gated attention, then experts."""

    @staticmethod
    def attention_class(
        config: ModelConfig, layer: int, shard: Shard
    ) -> GatedDeltaNet | GatedAttention:
        """Make the kind of attention that the layer has."""
        linear = config.linear_attention
        assert linear is not None
        kind = GatedDeltaNet if linear.layers[layer] else GatedAttention
        return kind(config, layer, shard)


class Qwen3NextForCausalLM(LlamaForCausalLM):
    """The whole model, except for multi-token prediction (MTP)."""

    layer_class = Qwen3NextDecoderLayer

"""Llama, Mistral, Mixtral, Qwen2, Qwen2.5, Qwen3, their MoE and VL variants, dots.llm1, gpt-oss.

They differ in which projections have a bias and which heads have norms or sinks (`Family`), in
windows, in rotation (`RopeConfig`), and in which layers have experts (`MoeConfig`); `ModelConfig`
contains all of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from kvbaton.engine.collectives import Shard
from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.models.layers import (
    AttentionContext,
    Embedding,
    GatedMLP,
    RMSNorm,
    RotaryEmbedding,
    SelfAttention,
)
from kvbaton.engine.models.moe import MoE
from kvbaton.kernels.jit import cdiv

PARTS_RANKS = 3
"""Number of ranks from which on long steps are computed in two parts. With two ranks, sums take an
eighth of a step, and the power that the devices may draw limits what overlap saves."""

PARTS_TOKENS = 2048
"""Number of tokens of a long step; half of fewer tokens takes almost as long as the whole."""

PART_ROWS = 128
"""Granularity of the first part's size: the number of rows of most products' tiles."""


@dataclass(frozen=True)
class Encoded:
    """Encoder outputs of a batch.

    Attributes:
        at: [n] int64, indices of the tokens that stand for them.
        rows: [n, levels, hidden_size]: the first level replaces the tokens' embeddings, the others
            are added to the stream after the first layers, one per layer (DeepStack: Meng et al.,
            arXiv 2406.04334).
    """

    at: Tensor
    rows: Tensor


class DecoderLayer(nn.Module):
    """Attention and MLP, each on the normalised stream and added back to it (pre-norm).

    Attributes:
        kind: Index of its input in `LlamaForCausalLM.layer_inputs`.
        collectives: Those that sum the ranks' parts of attention and MLP.
    """

    attention_class: Callable[[ModelConfig, int, Shard], nn.Module] = SelfAttention
    mlp_name = "mlp"
    kind = 0

    def __init__(self, config: ModelConfig, layer: int, shard: Shard) -> None:
        super().__init__()
        name, size = f"model.layers.{layer}", config.hidden_size
        norm = size, config.rms_norm_eps, config.family.norm_offset
        self.collectives = shard.collectives
        self.input_norm = RMSNorm(f"{name}.input_layernorm", *norm)
        self.self_attn = self.attention_class(config, layer, shard)
        self.post_norm = RMSNorm(f"{name}.post_attention_layernorm", *norm)
        self.mlp: GatedMLP | MoE
        if config.moe is not None and config.moe.layers[layer]:
            self.mlp = MoE(name, size, config.moe, shard, config.quantization)
        else:
            self.mlp = GatedMLP(
                f"{name}.{self.mlp_name}",
                size,
                config.mlp_size(layer),
                shard,
                bias=config.mlp_bias,
                quantization=config.quantization,
                gelu=config.family.gemma,
            )

    def forward(
        self,
        delta: Tensor | None,
        stream: Tensor,
        inputs: Sequence[Any],
        attention: AttentionContext,
    ) -> Tensor | None:
        """Add `delta` and this layer's attention to the stream, in place; return the MLP's output.

        The output is this rank's part: the next layer's norm sums and adds it in the same pass.
        None if it is already added.
        """
        hidden = self.add_delta(self.input_norm, delta, stream)
        attended = self.self_attn(hidden, inputs[self.kind], attention)
        return self.mlp(self.post_norm.add(attended, stream, self.collectives))  # type: ignore[no-any-return]

    def forward_in_parts(
        self,
        deltas: Sequence[Callable[[], Tensor] | None],
        streams: Sequence[Tensor],
        inputs: Sequence[Any],
        attention: AttentionContext,
    ) -> Sequence[Callable[[], Tensor]]:
        """Do as `forward`, on parts of the tokens: sums of one part overlap products of the other.

        Parts are joined for attention only. (DeepSeek-V3 alternates between two batches for the
        same purpose: arXiv 2412.19437, section 3.4.)
        """
        own, later = cast(SelfAttention, self.self_attn), self.collectives.all_reduce_later
        projected = [
            own.qkv_proj(self.input_norm(delta(), stream) if delta else self.input_norm(stream))
            for delta, stream in zip(deltas, streams, strict=True)
        ]
        attended = own.attend(torch.cat(projected), inputs[self.kind], attention)
        parts = torch.split(attended, [len(stream) for stream in streams])
        added = [later(own.o_proj(part)) for part in parts]
        return [
            later(self.mlp(self.post_norm(part(), stream)))
            for part, stream in zip(added, streams, strict=True)
        ]

    def add_delta(self, norm: RMSNorm, delta: Tensor | None, stream: Tensor) -> Tensor:
        """Add what the layer before returned to the stream, in place, and normalise it."""
        return norm(stream) if delta is None else norm.add(delta, stream, self.collectives)


class LlamaForCausalLM(nn.Module):
    """The whole model, except for its vision tower."""

    layer_class: type[nn.Module] = DecoderLayer

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        super().__init__()
        self.config, self.shard = config, shard
        vocab = config.vocab_size, config.hidden_size, shard
        self.embed_tokens = Embedding("model.embed_tokens", *vocab)
        self.layers = nn.ModuleList(
            self.layer_class(config, layer, shard) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(
            "model.norm", config.hidden_size, config.rms_norm_eps, config.family.norm_offset
        )
        self.rotary = RotaryEmbedding(config.rope, config.rotary_dim)
        self.lm_head = None if config.tie_word_embeddings else Embedding("lm_head", *vocab)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionContext,
        encoded: Encoded | None = None,
    ) -> Tensor:
        """Run all layers.

        Args:
            token_ids: [tokens] int64, sequence after sequence.
            positions: Rotary positions, [tokens] or [3, tokens] int64.
            attention: Attention over the sequences and the cache.
            encoded: Encoder outputs for some of the tokens.

        Returns:
            [tokens, hidden_size], normalised.
        """
        stream = self.embed(token_ids)
        deep: tuple[Tensor, ...] = ()
        if encoded is not None:
            stream.index_copy_(0, encoded.at, encoded.rows[:, 0])
            deep = encoded.rows.unbind(1)[1:]
        inputs = self.layer_inputs(token_ids, positions, stream)
        if encoded is None and self._takes_parts(len(stream)):
            return self._forward_in_parts(stream, inputs, attention)
        delta = None
        for number, layer in enumerate(self.layers):
            delta = layer(delta, stream, inputs, attention)
            if encoded is not None and number < len(deep):
                stream.index_add_(0, encoded.at, deep[number])
        return cast(DecoderLayer, self.layers[-1]).add_delta(self.norm, delta, stream)

    def _takes_parts(self, num_tokens: int) -> bool:
        layer = self.layer_class
        return (
            num_tokens >= PARTS_TOKENS
            and self.shard.size >= PARTS_RANKS
            and layer.forward is DecoderLayer.forward
            and getattr(layer, "attention_class", None) is SelfAttention
        )

    def _forward_in_parts(
        self, stream: Tensor, inputs: Sequence[Any], attention: AttentionContext
    ) -> Tensor:
        streams = torch.split(stream, cdiv(len(stream), 2 * PART_ROWS) * PART_ROWS)
        deltas: Sequence[Callable[[], Tensor] | None] = [None] * len(streams)
        for layer in self.layers:
            deltas = cast(DecoderLayer, layer).forward_in_parts(deltas, streams, inputs, attention)
        parts = zip(deltas, streams, strict=True)
        return torch.cat([self.norm(delta(), part) for delta, part in parts if delta])

    def embed(self, token_ids: Tensor) -> Tensor:
        """Map [tokens] to the stream before all layers, [tokens, hidden_size]."""
        return self.embed_tokens(token_ids)  # type: ignore[no-any-return]

    def layer_inputs(self, token_ids: Tensor, positions: Tensor, stream: Tensor) -> Sequence[Any]:
        """Inputs of layers beside the stream, by kind of layer; here cos and sin for rotation.

        Args:
            token_ids: See `forward`.
            positions: See `forward`.
            stream: The stream before all layers.
        """
        return (self.rotary(positions, stream.dtype),)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [rows, hidden_size] to logits [rows, vocab_size] float32."""
        return self.narrow_logits(hidden).float()

    def narrow_logits(self, hidden: Tensor) -> Tensor:
        """Map [rows, hidden_size] to logits [rows, vocab_size] in the model's dtype."""
        return (self.lm_head or self.embed_tokens).logits(hidden)

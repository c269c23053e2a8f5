"""Gemma's language models.

Gemma 3 (arXiv 2503.19786) differs from Llama: five layers with a window are followed by one
without, each kind with its own base of rotation; norms also follow attention and MLP, and their
scales are stored less 1; the MLP has a GELU; embeddings are scaled up.

Gemma 4 (Google DeepMind, 2026), here without its mixtures of experts, differs from Gemma 3: layers
without a window have larger heads, which are rotated in part, and may share one projection for keys
and values; values have a norm too; the last layers have no K and V, and read those of the last
layer of their kind that has them; each layer gets its own input per token; logits are bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from kvbaton.engine.attention_config import Gemma4Config
from kvbaton.engine.collectives import Shard
from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.models.layers import (
    AttentionContext,
    Embedding,
    Heads,
    Piece,
    RMSNorm,
    Rotary,
    RotaryEmbedding,
    WeightedModule,
    head_projections,
    output_projection,
    whole_linear,
)
from kvbaton.engine.models.linear import new_weight
from kvbaton.engine.models.llama import DecoderLayer, LlamaForCausalLM
from kvbaton.kernels.rms_norm import rms_norm
from kvbaton.kernels.rope_write import HeadNorms


class Gemma3DecoderLayer(DecoderLayer):
    """Attention and MLP, each between two norms."""

    def __init__(self, config: ModelConfig, layer: int, shard: Shard) -> None:
        super().__init__(config, layer, shard)
        name = f"model.layers.{layer}"
        norm = config.hidden_size, config.rms_norm_eps, config.family.norm_offset
        self.kind = int(config.windows[layer] > 0)
        self.pre_mlp_norm = RMSNorm(f"{name}.pre_feedforward_layernorm", *norm)
        self.post_mlp_norm = RMSNorm(f"{name}.post_feedforward_layernorm", *norm)

    def forward(
        self,
        delta: Tensor | None,
        stream: Tensor,
        inputs: Sequence[Any],
        attention: AttentionContext,
    ) -> Tensor | None:
        """See `DecoderLayer.forward`."""
        all_reduce = self.collectives.all_reduce
        hidden = self.add_delta(self.input_norm, delta, stream)
        attended = all_reduce(self.self_attn(hidden, inputs[self.kind], attention))
        out = all_reduce(self.mlp(self.pre_mlp_norm(self.post_norm(attended), stream)))
        return self.post_mlp_norm(out)  # type: ignore[no-any-return]

    @override
    def add_delta(self, norm: RMSNorm, delta: Tensor | None, stream: Tensor) -> Tensor:
        """See `DecoderLayer.add_delta`; what `forward` returns is summed."""
        return norm(stream) if delta is None else norm(delta, stream)  # type: ignore[no-any-return]


class Gemma3ForCausalLM(LlamaForCausalLM):
    """The whole Gemma 3 model; encoder outputs are not scaled."""

    layer_class: type[nn.Module] = Gemma3DecoderLayer

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        super().__init__(config, shard)
        assert config.local_rope is not None
        self.local_rotary = RotaryEmbedding(config.local_rope, config.head_dim)

    @override
    def embed(self, token_ids: Tensor) -> Tensor:
        stream = super().embed(token_ids)
        stream *= stream.new_full((), self.config.hidden_size**0.5)  # rounded to the dtype
        return stream

    @override
    def layer_inputs(self, token_ids: Tensor, positions: Tensor, stream: Tensor) -> Sequence[Any]:
        return [turn(positions, stream.dtype) for turn in (self.rotary, self.local_rotary)]


class Gemma4Attention(nn.Module):
    """Attention with norms of queries, keys and values, over K and V of this layer or another.

    Args:
        config: Configuration of the model.
        layer: Number of the layer.
        shard: This rank's share.
    """

    def __init__(self, config: ModelConfig, layer: int, shard: Shard) -> None:
        super().__init__()
        gemma = config.gemma4
        assert gemma is not None
        name = f"model.layers.{layer}.self_attn"
        num_kv_heads, dim = config.heads_of(layer)
        self.kv_layer, self.head_dim, self.eps = gemma.kv_layers[layer], dim, config.rms_norm_eps
        query, kv = shard.span(config.num_heads), shard.kv_heads(num_kv_heads)
        self.heads, self.kv_heads, self.stores = query[1], kv[1], self.kv_layer == layer
        parts = [("q_proj", config.num_heads, query)]
        if self.stores:
            parts.append(("k_proj", num_kv_heads, kv))
            if config.windows[layer] or not gemma.keys_are_values:
                parts.append(("v_proj", num_kv_heads, kv))
            self.k_norm = RMSNorm(f"{name}.k_norm", dim, self.eps)
            self.register_buffer("ones", torch.ones(dim), persistent=False)
        self.qkv_proj = head_projections(name, config, dim, parts)
        self.o_proj = output_projection(name, config, dim, shard)
        self.q_norm = RMSNorm(f"{name}.q_norm", dim, self.eps)

    def forward(self, hidden: Tensor, rotary: Rotary, attention: AttentionContext) -> Tensor:
        """Map [tokens, hidden] to the rank's part of the same; writes K and V, if it has them."""
        projected = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_dim))
        query, key, value, weight = projected[:, : self.heads], None, None, self.q_norm.weight
        if self.stores:
            ones = self.get_buffer("ones")
            key = projected[:, self.heads : self.heads + self.kv_heads]
            # Without its own projection, the value is that of the key, which is rotated in place.
            value = rms_norm(projected[:, -self.kv_heads :], ones, self.eps)
            weight = self.k_norm.weight
        norms = HeadNorms(self.q_norm.weight, weight, self.eps, 0.0)
        heads = Heads(query, key, value, scale=1.0, norms=norms)
        out = attention.attend(self.kv_layer, heads, rotary)
        return self.o_proj(out.flatten(1))  # type: ignore[no-any-return]


class PerLayerInput(nn.Module):
    """Adds a token's own input for a layer, gated by the stream."""

    def __init__(self, name: str, config: ModelConfig, size: int) -> None:
        super().__init__()
        hidden, stored = config.hidden_size, config.quantization
        self.gate = whole_linear(f"{name}.per_layer_input_gate", hidden, size, stored)
        self.projection = whole_linear(f"{name}.per_layer_projection", size, hidden, stored)
        self.norm = RMSNorm(f"{name}.post_per_layer_input_norm", hidden, config.rms_norm_eps)

    def forward(self, stream: Tensor, given: Tensor) -> Tensor:
        """What to add to `stream`, [tokens, hidden], for inputs [tokens, size]."""
        gate = F.gelu(self.gate(stream), approximate="tanh")
        return self.norm(self.projection(gate * given))  # type: ignore[no-any-return]


class Gemma4DecoderLayer(Gemma3DecoderLayer, WeightedModule):
    """Attention and MLP, each between two norms; the layer's own input; a scale of the sum."""

    attention_class = Gemma4Attention

    def __init__(self, config: ModelConfig, layer: int, shard: Shard) -> None:
        super().__init__(config, layer, shard)
        assert config.gemma4 is not None
        self.name, self.number = f"model.layers.{layer}", layer
        size = config.gemma4.per_layer_size
        self.own_input = PerLayerInput(self.name, config, size) if size else None
        self.scalar = new_weight(1)

    def forward(
        self,
        delta: Tensor | None,
        stream: Tensor,
        inputs: Sequence[Any],
        attention: AttentionContext,
    ) -> None:
        """See `DecoderLayer.forward`; returns None, since the scaled sum includes the MLP."""
        out = super().forward(delta, stream, inputs, attention)
        assert out is not None
        stream += out
        *_, given = inputs
        if self.own_input is not None and given is not None:
            stream += self.own_input(stream, given[:, self.number])
        stream *= self.scalar

    def pieces(self) -> Iterator[Piece]:
        """The scale of its output."""
        yield Piece(f"{self.name}.layer_scalar", (1,), self.scalar, norm=True)


class PerLayerEmbedding(nn.Module):
    """A token's own input for each layer: from a table, and from the token's embedding."""

    def __init__(self, config: ModelConfig, gemma: Gemma4Config, shard: Shard) -> None:
        super().__init__()
        self.layers, size = config.num_layers, gemma.per_layer_size
        name, wide = "model.embed_tokens_per_layer", config.num_layers * size
        self.size, self.hidden_size = size, config.hidden_size
        self.table = Embedding(name, gemma.per_layer_vocab_size, wide, shard)
        projection = "model.per_layer_model_projection"
        self.projection = whole_linear(projection, config.hidden_size, wide, config.quantization)
        self.norm = RMSNorm("model.per_layer_projection_norm", size, config.rms_norm_eps)

    def forward(self, token_ids: Tensor, stream: Tensor) -> Tensor:
        """Inputs [tokens, layers, size] of tokens and their embeddings, [tokens, hidden]."""
        shape = (len(token_ids), self.layers, self.size)
        known = self.table(token_ids).view(shape)
        known *= known.new_full((), self.size**0.5)  # rounded to the dtype
        made = self.projection(stream) * self.hidden_size**-0.5
        return (self.norm(made.view(shape)) + known) * 2.0**-0.5  # type: ignore[no-any-return]


class Gemma4ForCausalLM(Gemma3ForCausalLM):
    """The whole Gemma 4 model, except for its towers."""

    layer_class = Gemma4DecoderLayer

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        super().__init__(config, shard)
        gemma = config.gemma4
        assert gemma is not None
        self.softcap = gemma.softcap
        self.per_layer = PerLayerEmbedding(config, gemma, shard) if gemma.per_layer_size else None

    @override
    def layer_inputs(self, token_ids: Tensor, positions: Tensor, stream: Tensor) -> Sequence[Any]:
        rotaries = super().layer_inputs(token_ids, positions, stream)
        given = None if self.per_layer is None else self.per_layer(token_ids, stream)
        return [*rotaries, given]

    @override
    def narrow_logits(self, hidden: Tensor) -> Tensor:
        logits = super().narrow_logits(hidden)
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits

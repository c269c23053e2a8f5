"""Gemma 3's language model (arXiv 2503.19786).

Beside Llama's: five layers with a window to one without, each kind turned with a base of its own;
norms after attention and MLP as well as before, of scales that are stored less 1; a GELU; and
embeddings that are scaled up.
"""

from __future__ import annotations

from torch import Tensor, nn

from kvbaton.engine.collectives import Shard
from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.models.layers import (
    AttentionContext,
    GatedMLP,
    RMSNorm,
    RotaryEmbedding,
    SelfAttention,
)
from kvbaton.engine.models.llama import Encoded, LlamaForCausalLM


class Gemma3DecoderLayer(nn.Module):
    """Attention and MLP, each between two norms."""

    def __init__(self, config: ModelConfig, layer: int, shard: Shard) -> None:
        super().__init__()
        name, middle = f"model.layers.{layer}", config.intermediate_size
        norm = config.hidden_size, config.rms_norm_eps, config.norm_offset
        self.has_window = bool(config.windows[layer])
        self.input_norm = RMSNorm(f"{name}.input_layernorm", *norm)
        self.self_attn = SelfAttention(config, layer, shard)
        self.post_attention_norm = RMSNorm(f"{name}.post_attention_layernorm", *norm)
        self.pre_mlp_norm = RMSNorm(f"{name}.pre_feedforward_layernorm", *norm)
        self.mlp = GatedMLP(
            f"{name}.mlp",
            config.hidden_size,
            middle,
            shard,
            bias=False,
            quantization=config.quantization,
            activation=config.activation,
        )
        self.post_mlp_norm = RMSNorm(f"{name}.post_feedforward_layernorm", *norm)

    def forward(
        self,
        delta: Tensor | None,
        stream: Tensor,
        rotary: tuple[Tensor, Tensor],
        attention: AttentionContext,
    ) -> Tensor:
        """As `llama.DecoderLayer.forward`."""
        normed = self.input_norm(stream) if delta is None else self.input_norm(delta, stream)
        attended = self.post_attention_norm(self.self_attn(normed, rotary, attention))
        out = self.mlp(self.pre_mlp_norm(attended, stream))
        return self.post_mlp_norm(out)  # type: ignore[no-any-return]


class Gemma3ForCausalLM(LlamaForCausalLM):
    """The whole model."""

    layer_class = Gemma3DecoderLayer

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        super().__init__(config, shard)
        assert config.local_rope is not None
        self.local_rotary = RotaryEmbedding(config.local_rope, config.head_dim)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionContext,
        encoded: Encoded | None = None,
    ) -> Tensor:
        """See `LlamaForCausalLM.forward`; encoder outputs are not scaled."""
        stream: Tensor = self.embed_tokens(token_ids)
        stream *= stream.new_full((), self.config.hidden_size**0.5)  # rounded to the dtype
        if encoded is not None:
            stream.index_copy_(0, encoded.at, encoded.rows[:, 0])
        of_all = self.rotary(positions, stream.dtype)
        of_windows = self.local_rotary(positions, stream.dtype)
        delta = None
        for layer in self.layers:
            rotary = of_windows if layer.has_window else of_all
            delta = layer(delta, stream, rotary, attention)
        return self.norm(delta, stream)  # type: ignore[no-any-return]

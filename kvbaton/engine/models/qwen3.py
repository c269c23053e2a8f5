"""Qwen3: Llama with every query and key head normalised."""

from __future__ import annotations

from kvbaton.engine.models.layers import SelfAttention
from kvbaton.engine.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """The whole model."""

    def attention_layer(self, layer: int) -> SelfAttention:
        """The attention of one layer."""
        bias = self.config.attention_bias
        return SelfAttention(
            self.config, layer, self.shard, qkv_bias=bias, output_bias=bias, qk_norm=True
        )

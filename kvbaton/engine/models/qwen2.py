"""Qwen2 and Qwen2.5: Llama with a bias on query, key and value."""

from __future__ import annotations

from kvbaton.engine.models.layers import SelfAttention
from kvbaton.engine.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """The whole model."""

    def attention_layer(self, layer: int) -> SelfAttention:
        """The attention of one layer."""
        return SelfAttention(self.config, layer, self.shard, qkv_bias=True)

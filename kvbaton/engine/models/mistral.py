"""Mistral: Llama with a sliding window (`ModelConfig.windows`) and no biases."""

from __future__ import annotations

from kvbaton.engine.models.layers import SelfAttention
from kvbaton.engine.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """The whole model."""

    def attention_layer(self, layer: int) -> SelfAttention:
        """The attention of one layer."""
        return SelfAttention(self.config, layer, self.shard)

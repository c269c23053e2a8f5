"""Multimodal folders around a language model that is served alone too: its configuration.

Published Gemma 3 (4B and larger), Gemma 4 and Llama 4 are such: ``config.json``
holds that of the language model in ``text_config``, and may leave out what is the default of its
class in `transformers`. Of their towers only Gemma 3's is built (`siglip_config`); prompts of text
are what they would be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TEXT_ARCHITECTURES = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
}
"""The architecture of the language model, by that of the whole."""

_DEFAULTS: Mapping[str, dict[str, Any]] = {
    "Gemma3ForCausalLM": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
}
"""What published folders leave out."""


def language_model(content: dict[str, Any]) -> dict[str, Any]:
    """``config.json`` of the language model of a folder; any other folder's as it is."""
    named = content.get("architectures")
    architecture = TEXT_ARCHITECTURES.get(named[0]) if isinstance(named, list) and named else None
    text = content.get("text_config")
    if architecture is None or not isinstance(text, dict):
        return content
    whole = {
        name: value
        for name, value in content.items()
        if not name.endswith("_config") or name == "quantization_config"
    }
    own = {name: value for name, value in text.items() if value is not None}
    ends = {name: whole[name] for name in ("eos_token_id",) if whole.get(name) is not None}
    return _DEFAULTS.get(architecture, {}) | whole | own | ends | {"architectures": [architecture]}

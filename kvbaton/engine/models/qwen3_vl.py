"""The language model of Qwen3-VL: Qwen3, with rotary positions in three dimensions."""

from __future__ import annotations

from kvbaton.engine.models.qwen3 import Qwen3ForCausalLM


class Qwen3VLForConditionalGeneration(Qwen3ForCausalLM):
    """The whole model but its vision tower (`engine/models/vision.py`)."""

"""The language model of Qwen2.5-VL: Qwen2.5, with rotary positions in three dimensions."""

from __future__ import annotations

from kvbaton.engine.models.qwen2 import Qwen2ForCausalLM


class Qwen2_5_VLForConditionalGeneration(Qwen2ForCausalLM):
    """The whole model but its vision tower (`engine/models/vision.py`)."""

"""What ``config.json`` says about Gemma 3's vision tower, which is SigLIP's (`VisionConfig`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvbaton.engine.vision_config import VisionConfig
from kvbaton.errors import ConfigError
from kvbaton.image_file import has_processor, pooled_side

IMAGE_TOKEN = 262_144
"""The placeholder where ``config.json`` names none."""


class _Siglip(msgspec.Struct):
    """``vision_config``, with the defaults of its class in `transformers`."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 16
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6


class _Gemma3(msgspec.Struct):
    vision_config: _Siglip | None = None
    mm_tokens_per_image: int = 256
    image_token_index: int | None = None
    image_token_id: int | None = None


def read_siglip(content: dict[str, Any], folder: Path, hidden_size: int) -> VisionConfig | None:
    """The tower of a multimodal Gemma 3.

    Args:
        content: ``config.json``.
        folder: where it lies.
        hidden_size: of the language model.

    Returns:
        None of a model of text only, which a folder without an image processor is taken for.

    Raises:
        ConfigError: a field is missing, out of range or not supported; names it.
    """
    try:
        raw = msgspec.convert(content, _Gemma3)
    except msgspec.ValidationError as error:
        raise ConfigError("--model", f"{folder / 'config.json'}: {error}") from error
    tower = raw.vision_config
    if tower is None or not has_processor(folder):
        return None
    where = "vision_config."
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_channels"):
        if getattr(tower, name) < 1:
            raise ConfigError("--model", f"{where}{name} must be positive")
    if tower.hidden_size % tower.num_attention_heads:
        raise ConfigError("--model", f"{where}hidden_size must be a multiple of the heads' number")
    for name, only in (("hidden_act", "gelu_pytorch_tanh"), ("layer_norm_eps", 1e-6)):
        if getattr(tower, name) != only:
            raise ConfigError("--model", f"{where}{name} must be {only!r}")
    image_token = raw.image_token_index or raw.image_token_id or IMAGE_TOKEN
    return VisionConfig(
        patch_size=tower.patch_size,
        depth=tower.num_hidden_layers,
        hidden_size=tower.hidden_size,
        num_heads=tower.num_attention_heads,
        intermediate_size=tower.intermediate_size,
        out_hidden_size=hidden_size,
        hidden_act=tower.hidden_act,
        temporal_patch_size=1,
        merge_size=pooled_side(tower.image_size, tower.patch_size, raw.mm_tokens_per_image),
        in_channels=tower.num_channels,
        window_size=0,
        full_attention_layers=(),
        num_position_embeddings=(tower.image_size // tower.patch_size) ** 2,
        deepstack_layers=(),
        image_token_id=image_token,
        bidirectional=True,
    )

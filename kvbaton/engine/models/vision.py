"""Loading the vision tower of a multimodal model, without its language model."""

from __future__ import annotations

import torch

from kvbaton.engine.config import LoadFormat
from kvbaton.engine.loader import empty_weights, fill_weights
from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.models.qwen2_5_vision import Qwen25VisionTower
from kvbaton.engine.models.qwen3_vision import Qwen3VisionTower
from kvbaton.engine.models.vision_layers import VisionTower
from kvbaton.engine.vision_config import VisionConfig
from kvbaton.errors import ConfigError

__all__ = ["VisionTower", "load_vision"]

TOWERS: dict[str, type[Qwen25VisionTower | Qwen3VisionTower]] = {
    "Qwen2_5_VLForConditionalGeneration": Qwen25VisionTower,
    "Qwen3VLForConditionalGeneration": Qwen3VisionTower,
}


def load_vision(
    model: ModelConfig,
    *,
    device: torch.device,
    load_format: LoadFormat = "auto",
    seed: int = 0,
) -> VisionTower:
    """Build a vision tower and fill it.

    Args:
        model: the model that it belongs to; the tower has its dtype.
        device: where the weights go.
        load_format: ``dummy`` takes random weights from `seed`, equal on every device.
        seed: of dummy weights.

    Raises:
        ConfigError: the model has no tower, or a file or tensor is missing, broken or of the wrong
            shape.
    """
    config = _vision_config(model)
    with empty_weights(model.dtype, device):
        tower = TOWERS[model.architecture](config)
    fill_weights(tower.pieces(), model.folder, load_format, seed)
    return tower.eval()


def _vision_config(model: ModelConfig) -> VisionConfig:
    if model.vision is None:
        raise ConfigError("--model", f"{model.architecture} has no vision tower")
    return model.vision

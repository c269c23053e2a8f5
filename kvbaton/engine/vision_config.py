"""What ``config.json`` says about the vision tower of a multimodal model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from kvbaton.errors import ModelError
from kvbaton.image_file import has_processor, pooled_side
from kvbaton.types import Size


class _Axial(Struct, frozen=True):
    rope_theta: float | None = None


class VisionConfig(Struct, frozen=True, kw_only=True):
    """The vision tower of a multimodal model: ``vision_config``, with the families' defaults.

    Attributes:
        patch_size: Side of a patch, in pixels.
        depth: Number of layers.
        out_hidden_size: Features of a row, the hidden size of the language model.
        temporal_patch_size: Frames per patch; an image is repeated.
        merge_size: Side of the square of patches that becomes one row.
        window_size: Side of an attention window, in pixels; 0 for no windows.
        full_attention_layers: Layers with full attention despite the windows.
        num_position_embeddings: Entries of the (square) table of learned positions; 0 for none.
        deepstack_layers: Layers whose output also becomes rows, added after the first layers of the
            language model (Meng et al., arXiv 2406.04334).
        image_token_id: Placeholder that an image's rows replace, in the whole model's vocabulary.
        bidirectional: Whether tokens of an image attend to all of it, in the language model.
    """

    patch_size: Size
    depth: Size
    hidden_size: int
    num_heads: Size
    intermediate_size: Size
    out_hidden_size: int
    hidden_act: str
    rope_parameters: _Axial | None = None
    temporal_patch_size: Size = 2
    merge_size: Size = field(name="spatial_merge_size", default=2)
    in_channels: Size = 3
    window_size: int = 112
    full_attention_layers: tuple[int, ...] = field(
        name="fullatt_block_indexes", default=(7, 15, 23, 31)
    )
    num_position_embeddings: int = 2304
    deepstack_layers: tuple[int, ...] = field(name="deepstack_visual_indexes", default=(8, 16, 24))
    image_token_id: int = 0
    bidirectional: bool = False

    @property
    def rope_theta(self) -> float:
        """Base of the rotation by row and column."""
        return (self.rope_parameters and self.rope_parameters.rope_theta) or 10_000.0

    @property
    def levels(self) -> int:
        """Rows per placeholder: the tower's result, and one per DeepStack layer."""
        return 1 + len(self.deepstack_layers)

    @property
    def head_dim(self) -> int:
        """Features per head."""
        return self.hidden_size // self.num_heads


@dataclass(frozen=True)
class VisionFamily:
    """Properties not in ``config.json``; families with DeepStack have learned positions."""

    hidden_act: str
    rope_theta: float
    mrope_interleaved: bool
    deepstack: bool


VISION_FAMILIES = {
    "Qwen2_5_VLForConditionalGeneration": VisionFamily("silu", 1e6, False, False),
    "Qwen3VLForConditionalGeneration": VisionFamily("gelu_pytorch_tanh", 5e5, True, True),
}


def read_vision(
    vision: VisionConfig | None, architecture: str, hidden_size: int, image_token_id: int
) -> VisionConfig | None:
    """Complete the tower's configuration.

    Args:
        vision: ``vision_config`` of ``config.json``; None if it has none.
        architecture: Architecture of the whole model.
        hidden_size: Hidden size of the language model.
        image_token_id: Token id of placeholders.

    Returns:
        None if the architecture has no tower.

    Raises:
        ConfigError: It is missing although the architecture has a tower, or is not supported.
    """
    family = VISION_FAMILIES.get(architecture)
    if family is None:
        return None
    if vision is None:
        raise ModelError(f"{architecture} needs a vision_config")
    _refuse_unsupported(vision, family, hidden_size)
    if family.deepstack:
        unused: dict[str, Any] = {"window_size": 0, "full_attention_layers": ()}
    else:
        unused = {"num_position_embeddings": 0, "deepstack_layers": ()}
    return replace(
        vision,
        image_token_id=image_token_id,
        # Equal configurations, whether the file names the default or not.
        rope_parameters=_Axial(vision.rope_theta),
        **unused,
    )


def _refuse_unsupported(vision: VisionConfig, family: VisionFamily, hidden_size: int) -> None:
    where = "vision_config."
    if vision.hidden_act != family.hidden_act:
        raise ModelError(f"{where}hidden_act must be {family.hidden_act!r}")
    if vision.out_hidden_size != hidden_size:
        raise ModelError(f"{where}out_hidden_size must be hidden_size, {hidden_size}")
    if vision.hidden_size % (4 * vision.num_heads):
        raise ModelError(f"{where}hidden_size must be a multiple of 4 * num_heads")
    if not family.deepstack and vision.window_size < vision.patch_size * vision.merge_size:
        raise ModelError(f"{where}window_size must hold spatial_merge_size patches")
    if not family.deepstack:
        return
    layers, entries = vision.deepstack_layers, vision.num_position_embeddings
    if list(layers) != sorted(set(layers) & set(range(vision.depth))):
        raise ModelError(f"{where}deepstack_visual_indexes must ascend below depth")
    if entries < 1 or math.isqrt(entries) ** 2 != entries:
        raise ModelError(f"{where}num_position_embeddings must be a square")


IMAGE_TOKEN = 262_144
"""Default placeholder of Gemma 3."""


class _Siglip(msgspec.Struct):
    """``vision_config``, with the defaults of its class in `transformers`."""

    hidden_size: Size = 768
    intermediate_size: Size = 3072
    num_hidden_layers: Size = 12
    num_attention_heads: Size = 12
    num_channels: Size = 3
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
        content: Content of ``config.json``.
        folder: Folder of the file.
        hidden_size: Hidden size of the language model.

    Returns:
        None for a text-only model, which is assumed if the folder has no image processor.

    Raises:
        ConfigError: A field is missing, out of range or not supported; names it.
    """
    try:
        raw = msgspec.convert(content, _Gemma3)
    except msgspec.ValidationError as error:
        raise ModelError(f"{folder / 'config.json'}: {error}") from error
    tower = raw.vision_config
    if tower is None or not has_processor(folder):
        return None
    where = "vision_config."
    if tower.hidden_size % tower.num_attention_heads:
        raise ModelError(f"{where}hidden_size must be a multiple of the heads' number")
    for name, only in (("hidden_act", "gelu_pytorch_tanh"), ("layer_norm_eps", 1e-6)):
        if getattr(tower, name) != only:
            raise ModelError(f"{where}{name} must be {only!r}")
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

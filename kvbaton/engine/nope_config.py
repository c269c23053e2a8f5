"""What ``config.json`` says about layers without a rotation of heads (NoPE). Needs no torch.

Source: Kazemnejad et al., "The Impact of Positional Encoding on Length Generalization",
arXiv 2305.19466; of the temperature: Nakanishi, "Scalable-Softmax", arXiv 2501.19399.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvbaton.engine.config_fields import convert_fields
from kvbaton.errors import ConfigError

NOPE_ARCHITECTURES = ("Llama4ForCausalLM",)


@dataclass(frozen=True, kw_only=True)
class NopeConfig:
    """The layers of a model whose heads are not turned.

    Attributes:
        layers: of each layer, whether it is one.
        normed: heads of the others have a norm without a scale after they are turned.
        attn_scale: queries of a position p are multiplied by
            ``1 + attn_scale * log(1 + floor((p + 1) / floor_scale))``; 0 for none.
        floor_scale: see there.
    """

    layers: tuple[bool, ...]
    normed: bool
    attn_scale: float
    floor_scale: int


class _RawNope(msgspec.Struct):
    """The fields of ``config.json`` that we read, under their own names, with their defaults."""

    num_hidden_layers: int
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = 4
    use_qk_norm: bool = True
    attn_temperature_tuning: bool | int = True
    attn_scale: float = 0.1
    floor_scale: int = 8192


def read_nope(content: Mapping[str, Any], architecture: str) -> NopeConfig | None:
    """The layers of a model that are not turned; None for an architecture without.

    Args:
        content: of ``config.json``.
        architecture: which it names.

    Raises:
        ConfigError: a field is of the wrong type or out of range.
    """
    if architecture not in NOPE_ARCHITECTURES:
        return None
    raw = convert_fields(content, _RawNope, architecture)
    count, interval = raw.num_hidden_layers, raw.no_rope_layer_interval
    for name in ("no_rope_layer_interval", "floor_scale"):
        if getattr(raw, name) < 1:
            raise ConfigError("--model", f"config.json: {name} must be positive")
    turned = raw.no_rope_layers or [(layer + 1) % interval for layer in range(count)]
    if len(turned) != count:
        raise ConfigError("--model", "no_rope_layers and num_hidden_layers differ in length")
    return NopeConfig(
        layers=tuple(not turns for turns in turned),
        normed=raw.use_qk_norm,
        attn_scale=raw.attn_scale if raw.attn_temperature_tuning else 0.0,
        floor_scale=raw.floor_scale,
    )

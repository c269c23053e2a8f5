"""What ``config.json`` says about layers with linear attention. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvbaton.engine.config_fields import convert_fields
from kvbaton.engine.kv_groups import LayerKV
from kvbaton.errors import ConfigError

LINEAR_ATTENTION_ARCHITECTURES = ("Qwen3NextForCausalLM",)


@dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig:
    """The layers of a model that have a gated delta rule in the place of attention.

    Attributes:
        layers: of each layer, whether it is one.
        num_key_heads: heads of queries and keys.
        num_value_heads: a multiple; each key head serves as many that follow one another.
        key_head_dim: features of a query or key head.
        value_head_dim: features of a value head.
        conv_kernel: tokens that the convolution before sees, the token itself included.
    """

    layers: tuple[bool, ...]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int

    @property
    def values_per_key(self) -> int:
        """Value heads of a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def channels(self) -> int:
        """Of the convolution, for one key head: its query, its key, and its values."""
        return 2 * self.key_head_dim + self.values_per_key * self.value_head_dim

    @property
    def conv_rows(self) -> int:
        """Rows of a state for what the convolution has yet to see again; the last is padded."""
        return -(-self.channels * (self.conv_kernel - 1) // self.value_head_dim)

    @property
    def state(self) -> LayerKV:
        """A layer's state: per key head the rows of the convolution, then keys x values."""
        rows = self.conv_rows + self.values_per_key * self.key_head_dim
        return LayerKV(heads=self.num_key_heads, head_dim=self.value_head_dim, state_rows=rows)


class _RawLinearAttention(msgspec.Struct):
    """The fields of ``config.json`` that we read, under their own names, with their defaults."""

    num_hidden_layers: int
    layer_types: list[str] | None = None
    full_attention_interval: int = 4
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32


def read_linear_attention(
    content: Mapping[str, Any], architecture: str
) -> LinearAttentionConfig | None:
    """The linear attention of a model; None for an architecture without.

    Args:
        content: of ``config.json``.
        architecture: which it names.

    Raises:
        ConfigError: a field is of the wrong type or out of range.
    """
    if architecture not in LINEAR_ATTENTION_ARCHITECTURES:
        return None
    raw = convert_fields(content, _RawLinearAttention, architecture)
    for name, least in [
        ("full_attention_interval", 1),
        ("linear_conv_kernel_dim", 2),
        ("linear_key_head_dim", 1),
        ("linear_value_head_dim", 1),
        ("linear_num_key_heads", 1),
    ]:
        if getattr(raw, name) < least:
            raise ConfigError("--model", f"config.json: {name} must be at least {least}")
    if raw.linear_num_value_heads < 1 or raw.linear_num_value_heads % raw.linear_num_key_heads:
        raise ConfigError(
            "--model",
            f"config.json: linear_num_value_heads {raw.linear_num_value_heads} is no multiple of "
            f"linear_num_key_heads {raw.linear_num_key_heads}",
        )
    kinds = raw.layer_types or [
        "linear_attention" if (layer + 1) % raw.full_attention_interval else "full_attention"
        for layer in range(raw.num_hidden_layers)
    ]
    if len(kinds) != raw.num_hidden_layers:
        raise ConfigError("--model", "layer_types and num_hidden_layers differ in length")
    if unknown := set(kinds) - {"linear_attention", "full_attention"}:
        raise ConfigError("--model", f"layer_types has {sorted(unknown)}, which are unsupported")
    if "full_attention" not in kinds:
        raise ConfigError("--model", "layer_types needs a layer of 'full_attention'")
    return LinearAttentionConfig(
        layers=tuple(kind == "linear_attention" for kind in kinds),
        num_key_heads=raw.linear_num_key_heads,
        num_value_heads=raw.linear_num_value_heads,
        key_head_dim=raw.linear_key_head_dim,
        value_head_dim=raw.linear_value_head_dim,
        conv_kernel=raw.linear_conv_kernel_dim,
    )

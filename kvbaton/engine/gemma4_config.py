"""What ``config.json`` says about Gemma 4 beside what all families have. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvbaton.engine.attention_config import convert_fields
from kvbaton.errors import ConfigError

GEMMA4_ARCHITECTURES = ("Gemma4ForCausalLM",)


@dataclass(frozen=True, kw_only=True)
class Gemma4Config:
    """How layers of Gemma 4 differ from each other, and from Gemma 3's.

    Attributes:
        kv_layers: of each layer, which one's K and V it reads: itself, or the last one of its kind
            before the first layer that has none of its own.
        head_dim: of layers without a window.
        num_kv_heads: likewise.
        keys_are_values: likewise: they have one projection for both, before their norms.
        wide_mlp: MLPs of layers without K and V are twice as wide.
        per_layer_size: features of each token's own input to each layer; 0 for none.
        per_layer_vocab_size: tokens that have one.
        softcap: bound of the logits; 0 for none.
    """

    kv_layers: tuple[int, ...]
    head_dim: int
    num_kv_heads: int
    keys_are_values: bool
    wide_mlp: bool
    per_layer_size: int
    per_layer_vocab_size: int
    softcap: float


class _RawGemma4(msgspec.Struct):
    """The fields of ``config.json`` that we read, under their own names, with their defaults."""

    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 4
    layer_types: list[str] | None = None
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    per_layer_config: dict[str, dict[str, Any]] | None = None
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int | None = 256
    vocab_size_per_layer_input: int = 262_144
    final_logit_softcapping: float | None = None
    enable_moe_block: bool = False


def read_gemma4(content: Mapping[str, Any], architecture: str) -> Gemma4Config | None:
    """What is Gemma 4's own; None for another architecture.

    Args:
        content: of ``config.json``.
        architecture: which it names.

    Raises:
        ConfigError: a field is of the wrong type or out of range, or asks for what is unsupported.
    """
    if architecture not in GEMMA4_ARCHITECTURES:
        return None
    raw = convert_fields(content, _RawGemma4, architecture)
    if raw.enable_moe_block:
        raise ConfigError("--model", "enable_moe_block is unsupported; need a dense Gemma 4")
    count, shared = raw.num_hidden_layers, raw.num_kv_shared_layers
    kinds = raw.layer_types
    if kinds is None or len(kinds) != count:
        raise ConfigError("--model", f"layer_types must name {count} layers")
    own = count - shared
    if not 0 < own <= count or set(kinds) != set(kinds[:own]):
        raise ConfigError(
            "--model",
            f"num_kv_shared_layers {shared}: each kind of layer must be among the first ones, "
            "which have K and V",
        )
    last = {kind: layer for layer, kind in enumerate(kinds[:own])}
    head_dim, heads = raw.global_head_dim, None
    if raw.attention_k_eq_v:
        heads = raw.num_global_key_value_heads
    # As transformers saves it: what each layer has that differs.
    overrides = raw.per_layer_config or {}
    named = [overrides[str(i)] for i in range(count) if str(i) in overrides]
    if named:
        head_dim = int(named[0].get("head_dim", head_dim))
        heads = named[0].get("num_key_value_heads", heads)
    heads = int(heads or raw.num_key_value_heads)
    if head_dim < 1 or heads < 1 or raw.num_attention_heads % heads:
        raise ConfigError(
            "--model",
            f"global_head_dim {head_dim} and num_global_key_value_heads {heads} must be positive, "
            f"the latter a divisor of num_attention_heads {raw.num_attention_heads}",
        )
    return Gemma4Config(
        kv_layers=tuple(i if i < own else last[kind] for i, kind in enumerate(kinds)),
        head_dim=head_dim,
        num_kv_heads=heads,
        keys_are_values=raw.attention_k_eq_v,
        wide_mlp=raw.use_double_wide_mlp,
        per_layer_size=raw.hidden_size_per_layer_input or 0,
        per_layer_vocab_size=raw.vocab_size_per_layer_input,
        softcap=raw.final_logit_softcapping or 0.0,
    )

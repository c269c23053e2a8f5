"""What ``config.json`` says about a mixture of experts. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvbaton.errors import ConfigError

__all__ = ["MOE_FAMILIES", "MoeConfig", "MoeFamily", "read_moe"]


@dataclass(frozen=True)
class MoeFamily:
    """What an architecture's ``config.json`` leaves unsaid.

    Attributes:
        block: name of a mixture within its layer, in checkpoints.
        projections: names of an expert's gate, up and down projection there.
        intermediate_size: the field with the experts' intermediate size.
        norm_topk_prob: as in `MoeConfig`; None for whatever ``norm_topk_prob`` says.
        float32_weights: see `MoeConfig`.
    """

    block: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    intermediate_size: str = "moe_intermediate_size"
    norm_topk_prob: bool | None = None
    float32_weights: bool = False


MOE_FAMILIES = {
    "MixtralForCausalLM": MoeFamily(
        block="block_sparse_moe",
        projections=("w1", "w3", "w2"),
        intermediate_size="intermediate_size",
        norm_topk_prob=True,
        float32_weights=True,
    ),
    "Qwen3MoeForCausalLM": MoeFamily(),
}
"""Architectures with experts."""


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """The mixtures of experts of a model.

    Attributes:
        family: its names in checkpoints.
        layers: of each layer, whether it has a mixture instead of one MLP.
        num_experts: experts of a layer.
        top_k: experts that a token goes through.
        intermediate_size: of each expert.
        norm_topk_prob: the weights of a token's experts are scaled to add up to 1.
        float32_weights: these weights stay float32; else they are rounded to the model's dtype.
    """

    family: MoeFamily
    layers: tuple[bool, ...]
    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool
    float32_weights: bool


class _Raw(msgspec.Struct):
    """The fields of ``config.json`` that we read, under their own names."""

    num_hidden_layers: int
    num_experts_per_tok: int
    num_experts: int | None = None
    num_local_experts: int | None = None
    intermediate_size: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None


def read_moe(content: Mapping[str, Any], architecture: str) -> MoeConfig | None:
    """The experts of a model; None for an architecture without.

    Args:
        content: of ``config.json``.
        architecture: which it names.

    Raises:
        ConfigError: a field is missing, of the wrong type or out of range.
    """
    family = MOE_FAMILIES.get(architecture)
    if family is None:
        return None
    try:
        raw = msgspec.convert(content, _Raw)
    except msgspec.ValidationError as error:
        raise ConfigError("--model", f"config.json of {architecture}: {error}") from error
    experts, top_k = raw.num_experts or raw.num_local_experts or 0, raw.num_experts_per_tok
    intermediate_size: int = getattr(raw, family.intermediate_size)
    for name, value, most in (
        ("num_experts", experts, 1 << 15),
        ("num_experts_per_tok", top_k, experts),
        (family.intermediate_size, intermediate_size, 1 << 31),
        ("decoder_sparse_step", raw.decoder_sparse_step, 1 << 31),
    ):
        if not 1 <= value <= most:
            raise ConfigError("--model", f"config.json: {name} {value} is not within 1 and {most}")
    dense, step = raw.mlp_only_layers or (), raw.decoder_sparse_step
    norm = raw.norm_topk_prob if family.norm_topk_prob is None else family.norm_topk_prob
    return MoeConfig(
        family=family,
        layers=tuple(
            layer not in dense and (layer + 1) % step == 0 for layer in range(raw.num_hidden_layers)
        ),
        num_experts=experts,
        top_k=top_k,
        intermediate_size=intermediate_size,
        norm_topk_prob=norm,
        float32_weights=family.float32_weights,
    )

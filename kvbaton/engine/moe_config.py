"""What ``config.json`` says about a mixture of experts. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from kvbaton.engine.attention_config import MLA_ARCHITECTURES, check_sizes, convert_fields
from kvbaton.errors import ModelError
from kvbaton.types import Count, Positive


@dataclass(frozen=True)
class MoeFamily:
    """Properties of an architecture that ``config.json`` does not contain.

    Attributes:
        block: Name of a mixture within its layer, in checkpoints.
        projections: Names of an expert's gate, up and down projections in checkpoints.
        shared_experts: Name of the MLP that all tokens use, in checkpoints.
        shared_gate: Name of that MLP's gate, the sigmoid of a product with each token; None for no
            gate.
        intermediate_size: Field with the experts' intermediate size.
        norm_topk_prob: As in `MoeConfig`; None for the value of the field ``norm_topk_prob``.
        float32_weights: Whether weights of experts stay float32 instead of the model's dtype.
        router: Name of the router in checkpoints.
        stacked: Whether experts are stored like gpt-oss's: stacked, transposed, columns of gate and
            up interleaved, all with biases; and the router has a bias.
        float32_router: Whether logits are computed in float32.
        num_shared: Number of shared experts if ``config.json`` does not tell.
        halves: Whether experts are stored like `stacked` ones, but without biases, and with gate's
            columns before up's.
        weighs_inputs: Whether an expert's weight is the sigmoid of its logit and multiplies its
            input instead of its output; the experts with the largest logits are chosen.
        sigmoid: Whether experts are rated by the sigmoid of logits and chosen by that plus a bias,
            instead of by a softmax.
    """

    block: str = "mlp"
    router: str = "gate"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_experts: str = "shared_experts"
    shared_gate: str | None = None
    intermediate_size: str = "moe_intermediate_size"
    norm_topk_prob: bool | None = None
    float32_weights: bool = False
    float32_router: bool = False
    sigmoid: bool = False
    stacked: bool = False
    halves: bool = False
    weighs_inputs: bool = False
    num_shared: int = 0


_DEEPSEEK_V2 = MoeFamily(float32_weights=True, float32_router=True)
_DEEPSEEK_V3 = replace(_DEEPSEEK_V2, sigmoid=True)
MOE_FAMILIES = {
    "DeepseekV2ForCausalLM": _DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "Dots1ForCausalLM": _DEEPSEEK_V3,
    "GptOssForCausalLM": MoeFamily(
        router="router", intermediate_size="intermediate_size", norm_topk_prob=True, stacked=True
    ),
    "Llama4ForCausalLM": MoeFamily(
        block="feed_forward",
        router="router",
        shared_experts="shared_expert",
        intermediate_size="intermediate_size",
        norm_topk_prob=False,
        halves=True,
        weighs_inputs=True,
        num_shared=1,
    ),
    "MixtralForCausalLM": MoeFamily(
        block="block_sparse_moe",
        projections=("w1", "w3", "w2"),
        intermediate_size="intermediate_size",
        norm_topk_prob=True,
        float32_weights=True,
    ),
    "Qwen2MoeForCausalLM": MoeFamily(
        shared_experts="shared_expert", shared_gate="shared_expert_gate"
    ),
    "Qwen3MoeForCausalLM": MoeFamily(),
    "Qwen3NextForCausalLM": MoeFamily(
        shared_experts="shared_expert", shared_gate="shared_expert_gate"
    ),
}
"""Architectures with experts."""


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """The mixtures of experts of a model.

    Attributes:
        family: Properties of the architecture.
        layers: Per layer, whether it has a mixture instead of one MLP.
        num_experts: Number of routed experts per layer.
        top_k: Number of routed experts that a token uses.
        intermediate_size: Intermediate size of each expert.
        shared_intermediate_size: Intermediate size of the MLP that all tokens use; 0 for none.
        norm_topk_prob: Whether the weights of a token's experts are scaled to sum up to 1.
        routed_scaling_factor: Factor of these weights.
        num_groups: Number of equal groups of experts.
        top_groups: Number of groups that a token may choose experts from.
        swiglu: Alpha and limit of gpt-oss's activation (`kernels.fused_moe.ClampedSwiGLU`); None
            for silu(gate) * up.
    """

    family: MoeFamily
    layers: tuple[bool, ...]
    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    norm_topk_prob: bool
    routed_scaling_factor: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    swiglu: tuple[float, float] | None = None


class _RawMoe(msgspec.Struct):
    """The fields of ``config.json`` that are read, under their own names."""

    num_hidden_layers: int
    num_experts_per_tok: int
    num_experts: int | None = None
    num_local_experts: int | None = None
    n_routed_experts: int | None = None
    n_shared_experts: Count | None = None
    shared_expert_intermediate_size: Count | None = None
    intermediate_size: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool | None = None
    routed_scaling_factor: Positive = 1.0
    n_group: int | None = None
    topk_group: int | None = None
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"] | None = None
    scoring_func: str | None = None
    decoder_sparse_step: int = 1
    interleave_moe_layer_step: int | None = None
    moe_layers: list[int] | None = None
    mlp_only_layers: list[int] | None = None
    first_k_dense_replace: Count | None = None
    swiglu_alpha: float = 1.702
    swiglu_limit: Positive = 7.0


def _check_is_one(name: str, value: str | None, supported: tuple[str, ...]) -> None:
    if value not in (None, *supported):
        need = " or ".join(map(repr, supported))
        raise ModelError(f"config.json: {name} {value!r} is unsupported; need {need}")


def read_moe(content: Mapping[str, Any], architecture: str) -> MoeConfig | None:
    """The experts of a model; None for an architecture without.

    Args:
        content: Content of ``config.json``.
        architecture: Architecture that it names.

    Raises:
        ConfigError: A field is missing, of the wrong type, out of range or unsupported.
    """
    family = MOE_FAMILIES.get(architecture)
    if family is None:
        return None
    raw = convert_fields(content, _RawMoe, architecture)
    if architecture in MLA_ARCHITECTURES:
        methods = ("noaux_tc",) if family.sigmoid else ("greedy", "group_limited_greedy")
        _check_is_one("topk_method", raw.topk_method, methods)
        _check_is_one(
            "scoring_func", raw.scoring_func, ("sigmoid" if family.sigmoid else "softmax",)
        )
    experts = raw.num_experts or raw.num_local_experts or raw.n_routed_experts or 0
    groups, top_groups = raw.n_group or 1, raw.topk_group or 1
    if raw.topk_method == "greedy" and not family.sigmoid:
        groups = top_groups = 1
    middle: int = getattr(raw, family.intermediate_size)
    shared = (
        raw.shared_expert_intermediate_size or (raw.n_shared_experts or family.num_shared) * middle
    )
    step = raw.interleave_moe_layer_step or raw.decoder_sparse_step
    sizes = [
        ("num_experts", experts, 1 << 15),
        (family.intermediate_size, middle, 1 << 31),
        ("decoder_sparse_step", step, 1 << 31),
        ("n_group", groups, experts // 2 if groups > 1 else 1),
        ("topk_group", top_groups, groups),
        ("num_experts_per_tok", raw.num_experts_per_tok, experts // max(1, groups) * top_groups),
    ]
    check_sizes(sizes)
    if experts % groups:
        raise ModelError(f"config.json: n_group {groups} does not divide {experts}")
    dense, first = raw.mlp_only_layers or (), raw.first_k_dense_replace or 0
    sparse = raw.moe_layers
    norm = raw.norm_topk_prob if family.norm_topk_prob is None else family.norm_topk_prob
    return MoeConfig(
        family=family,
        layers=tuple(
            layer >= first and layer not in dense and (layer + 1) % step == 0
            if sparse is None
            else layer in sparse
            for layer in range(raw.num_hidden_layers)
        ),
        num_experts=experts,
        top_k=raw.num_experts_per_tok,
        intermediate_size=middle,
        shared_intermediate_size=shared,
        norm_topk_prob=bool(norm),
        routed_scaling_factor=raw.routed_scaling_factor,
        num_groups=groups,
        top_groups=top_groups,
        swiglu=(raw.swiglu_alpha, raw.swiglu_limit) if family.stacked else None,
    )

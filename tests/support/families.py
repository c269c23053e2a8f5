"""Small random models of all families, in real Hugging Face folders: `FamilySpec`.

The folder of a multimodal model also has ``preprocessor_config.json``. Images are small: a patch is
4 x 4 pixels, and an image becomes 4 to 100 rows of 8 x 8 pixels.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from tests.support.checkpoints import CheckpointSpec, Shapes, make_checkpoint
from tests.support.family_config import (
    EXPERTS,
    LATENT,
    VISION_FAMILIES,
    VISION_TOKENS,
    Family,
    family_config,
    preprocessor_config,
    tokenizer_changes,
)

_NORMED_HEADS = ("dots1", "gemma3", "gemma3_vl", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl")
_OFFSET_NORMS = ("gemma3", "gemma3_vl", "qwen3_next")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class FamilySpec(CheckpointSpec):
    """Specification for `make_family`.

    Attributes:
        family: Model family.
        config: Entries of ``config.json`` to add or replace; those of ``text_config`` and
            ``vision_config`` one by one.
        shards: Number of safetensors files; more than one have an index.
    """

    family: Family = "llama"
    shards: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def special_tokens(self) -> list[str]:
        """See `CheckpointSpec.special_tokens`."""
        more = VISION_TOKENS if self.family in VISION_FAMILIES else []
        return [*super().special_tokens, *more]

    def files(self, tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
        """See `CheckpointSpec.files`."""
        files = super().files(tokenizer)
        config = family_config(self.family, files["config.json"], tokenizer, self.config)
        files["config.json"] = config
        files["tokenizer_config.json"] |= tokenizer_changes(self.family)
        if tower := config.get("vision_config"):
            files["preprocessor_config.json"] = preprocessor_config(self.family, tower)
        return files

    def shapes(self, config: dict[str, Any]) -> Shapes:
        """See `CheckpointSpec.shapes`."""
        return _shapes(self, config)

    def weight(self, name: str, noise: Tensor) -> Tensor:
        """See `CheckpointSpec.weight`."""
        if name.endswith("layer_scalar"):
            return 1 + 0.2 * noise
        if noise.dim() == 1 and name.endswith(".weight"):
            # Some families add 1 to the weight.
            plain = "linear_attn" in name or name.startswith("vision_tower")
            return 0.2 * noise + (self.family not in _OFFSET_NORMS or plain)
        if name.endswith("A_log"):
            return noise - 3  # a decay that keeps a part of the last hundred tokens
        if name.endswith("bias"):
            return 0.2 * noise
        if name.endswith("_proj"):  # of all experts, inputs first
            scale: float = noise.shape[1] ** -0.5
            return noise * 1.5 * scale
        if noise.dim() == 1:  # sinks
            return noise * 1.5
        return super().weight(name, noise)


def make_family(folder: Path, spec: FamilySpec) -> Path:
    """As `make_checkpoint`, in `spec.shards` files."""
    make_checkpoint(folder, spec)
    if spec.shards == 1:
        return folder
    whole = folder / "model.safetensors"
    weights, weight_map = load_file(whole), dict[str, str]()
    for shard in range(spec.shards):
        names = sorted(weights)[shard :: spec.shards]
        file = f"model-{shard + 1:05d}-of-{spec.shards:05d}.safetensors"
        save_file({name: weights[name] for name in names}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    whole.unlink()
    total = sum(x.nbytes for x in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return folder


def without_embedding(folder: Path, token: int, to: Path) -> Path:
    """Copy a model folder, with NaN as the embedding of one token."""
    shutil.copytree(folder, to)
    for file in to.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith("embed_tokens.weight"):
                tensor[token] = math.nan
        save_file(tensors, file, {"format": "pt"})
    return to


def _shapes(spec: FamilySpec, config: dict[str, Any]) -> Shapes:
    """Names and shapes of all tensors, as in published checkpoints."""
    if "vision_config" in config:
        if spec.family == "gemma3_vl":
            yield from _siglip_shapes(config["vision_config"], spec.hidden_size)
        else:
            yield from _tower_shapes(spec.family, config["vision_config"])
    heads = {"gemma3_vl": "language_model.model", "qwen3_vl": "model.language_model"}
    head = heads.get(spec.family, "model")
    hidden, middle = spec.hidden_size, spec.intermediate_size
    yield f"{head}.embed_tokens.weight", (spec.vocab_size, hidden)
    interval = config.get("full_attention_interval", 1)
    states = ["linear_attention"] * (interval - 1) + ["full_attention"]
    kinds = config.get("layer_types") or states * spec.num_layers
    for layer in range(spec.num_layers):
        name = f"{head}.layers.{layer}"
        if spec.family in LATENT:
            yield from _latent_shapes(f"{name}.self_attn", config)
        elif spec.family == "qwen3_next" and kinds[layer] == "linear_attention":
            yield from _linear_attention_shapes(name, config)
        elif spec.family == "gemma4":
            yield from _gemma4_shapes(spec, name, layer, config)
        else:
            yield from _attention_shapes(spec, f"{name}.self_attn", config)
        steps = ("decoder_sparse_step", "interleave_moe_layer_step")
        step = next((config[name] for name in steps if name in config), 1)
        dense = config.get("mlp_only_layers", [])
        sparse = layer not in dense and (layer + 1) % step == 0
        sparse = layer in config.get("moe_layers", [layer] if sparse else [])
        if spec.family in EXPERTS and sparse and layer >= config.get("first_k_dense_replace", 0):
            yield from _expert_shapes(spec.family, name, config)
        else:
            bias = bool(config.get("mlp_bias"))
            block, wide = ("mlp", middle)
            if (
                spec.family == "gemma4"
                and layer >= spec.num_layers - config["num_kv_shared_layers"]
            ):
                wide = middle * (2 if config["use_double_wide_mlp"] else 1)
            if spec.family == "llama4":
                block, wide = "feed_forward", config["intermediate_size_mlp"]
            yield from _mlp(f"{name}.{block}", _PROJECTIONS, hidden, wide, bias=bias)
        yield f"{name}.input_layernorm.weight", (hidden,)
        yield f"{name}.post_attention_layernorm.weight", (hidden,)
        if spec.family in ("gemma3", "gemma3_vl", "gemma4"):
            yield f"{name}.pre_feedforward_layernorm.weight", (hidden,)
            yield f"{name}.post_feedforward_layernorm.weight", (hidden,)
    yield f"{head}.norm.weight", (hidden,)
    if size := config.get("hidden_size_per_layer_input"):
        wide = spec.num_layers * size
        rows = config["vocab_size_per_layer_input"]
        yield f"{head}.embed_tokens_per_layer.weight", (rows, wide)
        yield f"{head}.per_layer_model_projection.weight", (wide, hidden)
        yield f"{head}.per_layer_projection_norm.weight", (size,)
    if not spec.tied:
        outer = "language_model." if spec.family == "gemma3_vl" else ""
        yield f"{outer}lm_head.weight", (spec.vocab_size, hidden)


def _attention_shapes(spec: FamilySpec, name: str, config: dict[str, Any]) -> Shapes:
    """Projections of attention, and further tensors of some families."""
    hidden, dim = spec.hidden_size, spec.head_dim
    rows = {"q": spec.num_heads * dim, "k": spec.num_kv_heads * dim}
    rows["v"] = rows["k"]
    for part, size in rows.items():
        gates = size if spec.family == "qwen3_next" and part == "q" else 0
        yield f"{name}.{part}_proj.weight", (size + gates, hidden)
        if spec.family in ("qwen2", "qwen2_moe", "qwen2_5_vl") or config.get("attention_bias"):
            yield f"{name}.{part}_proj.bias", (size + gates,)
    yield f"{name}.o_proj.weight", (hidden, rows["q"])
    if config.get("attention_bias"):
        yield f"{name}.o_proj.bias", (hidden,)
    if spec.family == "gpt_oss":
        yield f"{name}.sinks", (spec.num_heads,)
    if spec.family in _NORMED_HEADS:
        yield f"{name}.q_norm.weight", (dim,)
        yield f"{name}.k_norm.weight", (dim,)


def _gemma4_shapes(spec: FamilySpec, layer: str, number: int, config: dict[str, Any]) -> Shapes:
    """A layer's attention, its per-layer input, and the scale of its output."""
    name, size = f"{layer}.self_attn", config["hidden_size_per_layer_input"]
    hidden, dim, kv_heads = spec.hidden_size, spec.head_dim, spec.num_kv_heads
    full = config["layer_types"][number] == "full_attention"
    alike = full and config["attention_k_eq_v"]
    if full:
        dim = config["global_head_dim"]
    if alike:
        kv_heads = config["num_global_key_value_heads"] or kv_heads
    yield f"{name}.q_proj.weight", (spec.num_heads * dim, hidden)
    yield f"{name}.q_norm.weight", (dim,)
    if number < spec.num_layers - config["num_kv_shared_layers"]:
        yield f"{name}.k_proj.weight", (kv_heads * dim, hidden)
        yield f"{name}.k_norm.weight", (dim,)
        if not alike:
            yield f"{name}.v_proj.weight", (kv_heads * dim, hidden)
    yield f"{name}.o_proj.weight", (hidden, spec.num_heads * dim)
    yield f"{layer}.layer_scalar", (1,)
    if size:
        yield f"{layer}.per_layer_input_gate.weight", (size, hidden)
        yield f"{layer}.per_layer_projection.weight", (hidden, size)
        yield f"{layer}.post_per_layer_input_norm.weight", (hidden,)


def _latent_shapes(name: str, config: dict[str, Any]) -> Shapes:
    """Projections to and from latents (MLA)."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    rank, query, value = config["kv_lora_rank"], config["q_lora_rank"], config["v_head_dim"]
    if query is None:
        yield f"{name}.q_proj.weight", (heads * (nope + rope), hidden)
    else:
        yield f"{name}.q_a_proj.weight", (query, hidden)
        yield f"{name}.q_a_layernorm.weight", (query,)
        yield f"{name}.q_b_proj.weight", (heads * (nope + rope), query)
    yield f"{name}.kv_a_proj_with_mqa.weight", (rank + rope, hidden)
    yield f"{name}.kv_a_layernorm.weight", (rank,)
    yield f"{name}.kv_b_proj.weight", (heads * (nope + value), rank)
    yield f"{name}.o_proj.weight", (hidden, heads * value)


def _linear_attention_shapes(layer: str, config: dict[str, Any]) -> Shapes:
    """A layer's gated delta rule, instead of attention."""
    name, hidden = f"{layer}.linear_attn", config["hidden_size"]
    heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys = heads * config["linear_key_head_dim"]
    values = value_heads * config["linear_value_head_dim"]
    yield f"{name}.in_proj_qkvz.weight", (2 * keys + 2 * values, hidden)
    yield f"{name}.in_proj_ba.weight", (2 * value_heads, hidden)
    yield f"{name}.conv1d.weight", (2 * keys + values, 1, config["linear_conv_kernel_dim"])
    yield f"{name}.A_log", (value_heads,)
    yield f"{name}.dt_bias", (value_heads,)
    yield f"{name}.norm.weight", (config["linear_value_head_dim"],)
    yield f"{name}.out_proj.weight", (hidden, values)


def _expert_shapes(family: str, layer: str, config: dict[str, Any]) -> Shapes:
    """Router, experts and shared experts of a layer."""
    block, parts = f"{layer}.mlp", _PROJECTIONS
    if family == "mixtral":
        block, parts = f"{layer}.block_sparse_moe", ("w1", "w3", "w2")
    if family == "llama4":
        block = f"{layer}.feed_forward"
    hidden = config["hidden_size"]
    middle = config.get("moe_intermediate_size", config["intermediate_size"])
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next(config[name] for name in counts if name in config)
    if family == "gpt_oss":
        yield f"{block}.router.weight", (experts, hidden)
        yield f"{block}.router.bias", (experts,)
        for part, size_in, size_out in (("gate_up", hidden, 2 * middle), ("down", middle, hidden)):
            yield f"{block}.experts.{part}_proj", (experts, size_in, size_out)
            yield f"{block}.experts.{part}_proj_bias", (experts, size_out)
        return
    if family == "llama4":
        yield f"{block}.router.weight", (experts, hidden)
        yield f"{block}.experts.gate_up_proj", (experts, hidden, 2 * middle)
        yield f"{block}.experts.down_proj", (experts, middle, hidden)
        yield from _mlp(f"{block}.shared_expert", parts, hidden, middle)
        return
    yield f"{block}.gate.weight", (experts, hidden)
    if family in ("dots1", "deepseek_v3"):
        yield f"{block}.gate.e_score_correction_bias", (experts,)
    for expert in range(experts):
        yield from _mlp(f"{block}.experts.{expert}", parts, hidden, middle)
    if family in ("dots1", *LATENT):
        shared = config["n_shared_experts"] * middle
        yield from _mlp(f"{block}.shared_experts", parts, hidden, shared)
    if family in ("qwen2_moe", "qwen3_next"):
        shared = config["shared_expert_intermediate_size"]
        yield from _mlp(f"{block}.shared_expert", parts, hidden, shared)
        yield f"{block}.shared_expert_gate.weight", (1, hidden)


def _mlp(
    name: str, parts: Sequence[str], hidden: int, middle: int, *, bias: bool = False
) -> Shapes:
    """Gate, up and down."""
    for part, shape in zip(parts, (*[(middle, hidden)] * 2, (hidden, middle)), strict=True):
        yield f"{name}.{part}.weight", shape
        if bias:
            yield f"{name}.{part}.bias", shape[:1]


def _tower_shapes(family: str, tower: dict[str, Any]) -> Shapes:
    """Names and shapes of the tower's tensors, as in published checkpoints."""
    head = "model.visual" if family == "qwen3_vl" else "visual"
    norm = ["weight", "bias"] if family == "qwen3_vl" else ["weight"]
    hidden, patch = tower["hidden_size"], tower["patch_size"]
    filters = (hidden, tower["in_channels"], tower["temporal_patch_size"], patch, patch)
    yield f"{head}.patch_embed.proj.weight", filters
    if family == "qwen3_vl":
        yield f"{head}.patch_embed.proj.bias", (hidden,)
        yield f"{head}.pos_embed.weight", (tower["num_position_embeddings"], hidden)
    for layer in range(tower["depth"]):
        name = f"{head}.blocks.{layer}"
        for part in ("norm1", "norm2"):
            yield from ((f"{name}.{part}.{kind}", (hidden,)) for kind in norm)
        yield from _linear(f"{name}.attn.qkv", hidden, 3 * hidden)
        yield from _linear(f"{name}.attn.proj", hidden, hidden)
        parts = ["linear_fc1"] if family == "qwen3_vl" else ["gate_proj", "up_proj"]
        for part in parts:
            yield from _linear(f"{name}.mlp.{part}", hidden, tower["intermediate_size"])
        last = "linear_fc2" if family == "qwen3_vl" else "down_proj"
        yield from _linear(f"{name}.mlp.{last}", tower["intermediate_size"], hidden)
    out, wide = tower["out_hidden_size"], hidden * tower["spatial_merge_size"] ** 2
    if family == "qwen2_5_vl":
        yield f"{head}.merger.ln_q.weight", (hidden,)
        yield from _linear(f"{head}.merger.mlp.0", wide, wide)
        yield from _linear(f"{head}.merger.mlp.2", wide, out)
        return
    deep = [f"deepstack_merger_list.{i}" for i in range(len(tower["deepstack_visual_indexes"]))]
    for part in ("merger", *deep):
        size = hidden if part == "merger" else wide
        yield f"{head}.{part}.norm.weight", (size,)
        yield f"{head}.{part}.norm.bias", (size,)
        yield from _linear(f"{head}.{part}.linear_fc1", wide, wide)
        yield from _linear(f"{head}.{part}.linear_fc2", wide, out)


def _siglip_shapes(tower: dict[str, Any], hidden_size: int) -> Shapes:
    """Tower and projector as in published checkpoints of Gemma 3."""
    head, hidden, patch = "vision_tower.vision_model", tower["hidden_size"], tower["patch_size"]
    yield f"{head}.embeddings.patch_embedding.weight", (hidden, 3, patch, patch)
    yield f"{head}.embeddings.patch_embedding.bias", (hidden,)
    places = (tower["image_size"] // patch) ** 2
    yield f"{head}.embeddings.position_embedding.weight", (places, hidden)
    for layer in range(tower["num_hidden_layers"]):
        name = f"{head}.encoder.layers.{layer}"
        for part in ("layer_norm1", "layer_norm2"):
            yield from ((f"{name}.{part}.{kind}", (hidden,)) for kind in ("weight", "bias"))
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{name}.self_attn.{part}", hidden, hidden)
        yield from _linear(f"{name}.mlp.fc1", hidden, tower["intermediate_size"])
        yield from _linear(f"{name}.mlp.fc2", tower["intermediate_size"], hidden)
    yield from ((f"{head}.post_layernorm.{kind}", (hidden,)) for kind in ("weight", "bias"))
    yield "multi_modal_projector.mm_soft_emb_norm.weight", (hidden,)
    yield "multi_modal_projector.mm_input_projection_weight", (hidden, hidden_size)


def _linear(name: str, size_in: int, size_out: int) -> Shapes:
    yield f"{name}.weight", (size_out, size_in)
    yield f"{name}.bias", (size_out,)

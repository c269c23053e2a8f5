"""Small random models in real Hugging Face folders, for tests, demos and benchmarks.

A folder holds ``config.json``, ``generation_config.json``, safetensors (one file, or several with
an index), and a byte-level BPE ``tokenizer.json`` with ``tokenizer_config.json`` and chat template;
of a multimodal model also ``preprocessor_config.json``; pixels are few there: a patch has 4 x 4, an
image becomes 4 to 100 rows of 8 x 8.
Equal arguments give equal files. The text is noise, but every part of the path to it is real.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

Family = Literal[
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "gemma3",
    "gemma4",
    "gpt_oss",
    "llama",
    "llama4",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen2_5_vl",
    "qwen3_vl",
]

ARCHITECTURES: dict[Family, str] = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}
VISION_FAMILIES = ("qwen2_5_vl", "qwen3_vl")
_DEEPSEEK: dict[str, Any] = {
    "kv_lora_rank": 48,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
    "rope_scaling": {
        "type": "yarn",
        "factor": 8.0,
        "beta_fast": 4,
        "beta_slow": 1,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "original_max_position_embeddings": 64,
    },
}
_EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": _DEEPSEEK | {"topk_method": "group_limited_greedy", "norm_topk_prob": False},
    "deepseek_v3": _DEEPSEEK | {"topk_method": "noaux_tc", "norm_topk_prob": True},
    "dots1": {
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 4,
        "topk_group": 2,
        "sliding_window": None,
        "max_window_layers": 62,
    },
    "gpt_oss": {
        "attention_bias": True,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "swiglu_limit": 1.5,
        "sliding_window": 11,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "llama4": {
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "intermediate_size": 48,
        "intermediate_size_mlp": 128,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 16,
        "no_rope_layer_interval": 3,
        "floor_scale": 8,
        "attn_scale": 0.3,
        "rope_theta": 500_000.0,
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "qwen3_next": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 5,
        "linear_value_head_dim": 4,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    },
}
_GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "sliding_window": 11,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
_GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 11,
    "global_head_dim": 32,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 384,
    "final_logit_softcapping": 20.0,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1_000_000.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
BOS, EOS, TURN = "<|begin|>", "<|endoftext|>", "<|turn|>"
TOKENIZER_SIZE = 384
CORPUS = (
    "A prefill node computes the keys and values of a prompt, block by block.",
    "A decode node takes over the baton and writes the answer, one token at a time.",
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "What is the capital of France? The capital of France is Paris, a city on the Seine.",
    "Write a short story about a relay race in which the runners hand over a baton.",
    "def add(first: int, second: int) -> int:\n    return first + second\n",
    "One, two, three, four, five, six, seven, eight, nine, ten. Straße, naïve, 東京, Ελλάδα.",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
VISION_START, VISION_END, IMAGE, VIDEO = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VISION_TOKENS = [VISION_START, VISION_END, IMAGE, VIDEO]
VISION_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|turn|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
MIN_PIXELS, MAX_PIXELS = 4 * 64, 100 * 64
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl_vision",
        "hidden_act": "silu",
        "depth": 3,
        "fullatt_block_indexes": [1],
        "window_size": 32,
        "tokens_per_second": 2,
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl_vision",
        "hidden_act": "gelu_pytorch_tanh",
        "depth": 3,
        "deepstack_visual_indexes": [0, 1],
        "num_position_embeddings": 36,
    },
}
_LATENT = ("deepseek_v2", "deepseek_v3")
_NORMED_HEADS = ("dots1", "gemma3", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl")
_OFFSET_NORMS = ("gemma3", "qwen3_next")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """What to make.

    Attributes:
        family: which model family.
        seed: of the weights.
        vocab_size: of the model; at least the tokenizer's 384.
        dtype: of the stored weights.
        shards: safetensors files.
        tied: output projection shares the embedding.
        config: further entries of ``config.json``, or others than ours; those of ``text_config``
            and ``vision_config`` one by one.
    """

    family: Family = "llama"
    seed: int = 0
    vocab_size: int = TOKENIZER_SIZE
    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    max_position_embeddings: int = 512
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    shards: int = 1
    tied: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)


def make_checkpoint(folder: str | Path, spec: CheckpointSpec | None = None) -> Path:
    """Write a model folder and return it."""
    spec = spec or CheckpointSpec()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(spec)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = _config(spec, tokenizer)
    _write_json(folder / "config.json", config)
    ends = [tokenizer.token_to_id(token) for token in (EOS, TURN)]
    generation = {"bos_token_id": tokenizer.token_to_id(BOS), "eos_token_id": ends}
    _write_json(folder / "generation_config.json", generation)
    template = VISION_CHAT_TEMPLATE if spec.family in VISION_FAMILIES else CHAT_TEMPLATE
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": spec.max_position_embeddings,
        "chat_template": template,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    if "vision_config" in config:
        preprocessor = _preprocessor_config(spec.family, config["vision_config"])
        _write_json(folder / "preprocessor_config.json", preprocessor)
    weights = dict(_weights(spec, config))
    metadata = {"format": "pt"}
    if spec.shards == 1:
        save_file(weights, folder / "model.safetensors", metadata)
        return folder
    names, weight_map = list(weights), dict[str, str]()
    for shard in range(spec.shards):
        file = f"model-{shard + 1:05d}-of-{spec.shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard :: spec.shards]}
        save_file(part, folder / file, metadata)
        weight_map |= dict.fromkeys(part, file)
    total = sum(x.nbytes for x in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)
    return folder


# --- configuration ---


def _config(spec: CheckpointSpec, tokenizer: Tokenizer) -> dict[str, Any]:
    config: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": spec.tied,
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
        "torch_dtype": spec.dtype,
    }
    if spec.family in ("mistral", "mixtral"):
        config["sliding_window"] = None
    if spec.family in _LATENT:
        config["num_key_value_heads"] = spec.num_heads
        del config["head_dim"]
    config |= _EXPERTS.get(spec.family, {})
    if spec.family == "llama4":  # as published, not left to be worked out
        turned = [int((layer + 1) % 3 != 0) for layer in range(spec.num_layers)]
        config |= {"model_type": "llama4_text", "no_rope_layers": turned}
        config["layer_types"] = [("full_attention", "chunked_attention")[x] for x in turned]
    if spec.family == "gpt_oss":
        kinds = ("sliding_attention", "full_attention")
        config["layer_types"] = [kinds[layer % 2] for layer in range(spec.num_layers)]
    if spec.family in VISION_FAMILIES:
        config = _nested_config(spec.family, config, tokenizer)
    config |= {"architectures": [ARCHITECTURES[spec.family]]}
    config.setdefault("model_type", spec.family)
    if spec.family == "gemma3":
        config |= _GEMMA3
        del config["hidden_act"]
    if spec.family == "gemma4":  # every third layer, and the last, without a window
        last = spec.num_layers - 1
        full = [layer % 3 == 2 or layer == last for layer in range(spec.num_layers)]
        config |= _GEMMA4
        config["layer_types"] = [("sliding_attention", "full_attention")[x] for x in full]
        del config["hidden_act"], config["rope_theta"]
    for name, value in spec.config.items():
        nested = isinstance(value, Mapping) and isinstance(config.get(name), dict)
        config[name] = config[name] | dict(value) if nested else value
    return config


def _nested_config(family: str, text: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """``config.json`` as transformers saves it, around the language model's part.

    Args:
        family: one of `VISION_FAMILIES`.
        text: fields of the language model.
        tokenizer: gives the ids of `VISION_TOKENS`.
    """
    text = text | {"model_type": f"{family}_text", "dtype": text.pop("torch_dtype")}
    # Shares of the frequencies as in the published models, 64 there.
    half = text["head_dim"] // 2
    space = half * 5 // 16 if family == "qwen3_vl" else half * 3 // 8
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": text.pop("rope_theta"),
        "mrope_section": [half - 2 * space, space, space],
        **({"mrope_interleaved": True} if family == "qwen3_vl" else {}),
    }
    return {
        "image_token_id": tokenizer.token_to_id(IMAGE),
        "video_token_id": tokenizer.token_to_id(VIDEO),
        "vision_start_token_id": tokenizer.token_to_id(VISION_START),
        "vision_end_token_id": tokenizer.token_to_id(VISION_END),
        "tie_word_embeddings": text.pop("tie_word_embeddings"),
        "dtype": text["dtype"],
        "text_config": text,
        "vision_config": _TOWER | _TOWERS[family] | {"out_hidden_size": text["hidden_size"]},
    }


def _preprocessor_config(family: str, tower: dict[str, Any]) -> dict[str, Any]:
    """``preprocessor_config.json``, in the form that the family's published models have."""
    shared = {
        "patch_size": tower["patch_size"],
        "temporal_patch_size": tower["temporal_patch_size"],
        "merge_size": tower["spatial_merge_size"],
    }
    if family == "qwen2_5_vl":
        return shared | {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
            "min_pixels": MIN_PIXELS,
            "max_pixels": MAX_PIXELS,
            "image_mean": _CLIP_MEAN,
            "image_std": _CLIP_STD,
        }
    return shared | {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# --- tokenizer ---


def _tokenizer(spec: CheckpointSpec) -> Tokenizer:
    """A byte-level BPE trained on `CORPUS`; puts `BOS` before a text."""
    special = [BOS, EOS, TURN]
    if spec.family in VISION_FAMILIES:
        special += VISION_TOKENS
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer


# --- weights ---


def _shapes(spec: CheckpointSpec, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors, as published checkpoints have them."""
    if "vision_config" in config:
        yield from _tower_shapes(spec.family, config["vision_config"])
    head = "model.language_model" if spec.family == "qwen3_vl" else "model"
    hidden, middle = spec.hidden_size, spec.intermediate_size
    yield f"{head}.embed_tokens.weight", (spec.vocab_size, hidden)
    interval = config.get("full_attention_interval", 1)
    states = ["linear_attention"] * (interval - 1) + ["full_attention"]
    kinds = config.get("layer_types") or states * spec.num_layers
    for layer in range(spec.num_layers):
        name = f"{head}.layers.{layer}"
        if spec.family in _LATENT:
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
        if spec.family in _EXPERTS and sparse and layer >= config.get("first_k_dense_replace", 0):
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
        if spec.family in ("gemma3", "gemma4"):
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
        yield "lm_head.weight", (spec.vocab_size, hidden)


def _attention_shapes(
    spec: CheckpointSpec, name: str, config: dict[str, Any]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Projections of heads, and what else some families have."""
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


def _gemma4_shapes(
    spec: CheckpointSpec, layer: str, number: int, config: dict[str, Any]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A layer's attention, its own input, and the scale of its output."""
    name, hidden, size = (
        f"{layer}.self_attn",
        spec.hidden_size,
        config["hidden_size_per_layer_input"],
    )
    dim, kv_heads = spec.head_dim, spec.num_kv_heads
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


def _latent_shapes(name: str, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Projections to latents and from them."""
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


def _linear_attention_shapes(
    layer: str, config: dict[str, Any]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The gated delta rule of a layer, in the place of attention."""
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


def _expert_shapes(
    family: str, layer: str, config: dict[str, Any]
) -> Iterator[tuple[str, tuple[int, ...]]]:
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
    if family in ("dots1", *_LATENT):
        shared = config["n_shared_experts"] * middle
        yield from _mlp(f"{block}.shared_experts", parts, hidden, shared)
    if family in ("qwen2_moe", "qwen3_next"):
        shared = config["shared_expert_intermediate_size"]
        yield from _mlp(f"{block}.shared_expert", parts, hidden, shared)
        yield f"{block}.shared_expert_gate.weight", (1, hidden)


def _mlp(
    name: str, parts: Sequence[str], hidden: int, middle: int, *, bias: bool = False
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Gate, up and down."""
    for part, shape in zip(parts, (*[(middle, hidden)] * 2, (hidden, middle)), strict=True):
        yield f"{name}.{part}.weight", shape
        if bias:
            yield f"{name}.{part}.bias", shape[:1]


def _tower_shapes(family: str, tower: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tower's tensors, as published checkpoints have them."""
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


def _linear(name: str, size_in: int, size_out: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (size_out, size_in)
    yield f"{name}.bias", (size_out,)


def _weights(spec: CheckpointSpec, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Random tensors that keep activations near 1, so that no part of the model goes unnoticed."""
    generator = torch.Generator().manual_seed(spec.seed)
    for name, shape in _shapes(spec, config):
        noise = torch.randn(shape, generator=generator)
        if name.endswith("layer_scalar"):
            value = 1 + 0.2 * noise
        elif len(shape) == 1 and name.endswith(".weight"):
            # Of some families 1 is added when it is read.
            value = 0.2 * noise + (spec.family not in _OFFSET_NORMS or "linear_attn" in name)
        elif name.endswith("A_log"):
            value = noise - 3  # keeps something of the last hundred tokens
        elif name.endswith("bias"):
            value = 0.2 * noise
        elif "embed_tokens" in name:
            value = noise * (0.3 if spec.tied else 1.0)
        else:
            inputs = shape[1] if name.endswith("_proj") else math.prod(shape[1:])
            value = noise * 1.5 * inputs**-0.5
        yield name, value.to(getattr(torch, spec.dtype))


def main() -> None:
    """``python -m kvbaton.testing.checkpoints FOLDER``: make a model for a demo or a benchmark."""
    parser = argparse.ArgumentParser(description="Make a small random model folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=sorted(ARCHITECTURES), default="llama")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--max-position-embeddings", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    spec = CheckpointSpec(
        family=args.family,
        seed=args.seed,
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_layers=args.layers,
        num_heads=args.hidden_size // 64,
        num_kv_heads=max(1, args.hidden_size // 256),
        head_dim=64,
        max_position_embeddings=args.max_position_embeddings,
    )
    print(make_checkpoint(args.folder, spec))


if __name__ == "__main__":
    main()

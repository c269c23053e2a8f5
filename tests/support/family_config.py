"""``config.json`` and other JSON files of small random models (`families`).

Fields are those of each family's published models; sizes are smaller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tokenizers import Tokenizer

from tests.support.checkpoints import TOKENIZER_SIZE

Family = Literal[
    "deepseek_v2", "deepseek_v3", "dots1", "gemma3", "gemma3_vl", "gemma4", "gpt_oss", "llama",
    "llama4", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next",
    "qwen2_5_vl", "qwen3_vl",
]  # fmt: skip

ARCHITECTURES: dict[Family, str] = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma3_vl": "Gemma3ForConditionalGeneration",
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
VISION_FAMILIES = ("gemma3_vl", "qwen2_5_vl", "qwen3_vl")
_GROUPED_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
}
_DEEPSEEK = _GROUPED_EXPERTS | {
    "kv_lora_rank": 48,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
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
_QWEN_MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_QWEN_SHARED = {"shared_expert_intermediate_size": 48}
EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": _DEEPSEEK | {"topk_method": "group_limited_greedy", "norm_topk_prob": False},
    "deepseek_v3": _DEEPSEEK | {"topk_method": "noaux_tc", "norm_topk_prob": True},
    "dots1": _GROUPED_EXPERTS
    | {"norm_topk_prob": True, "sliding_window": None, "max_window_layers": 62},
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
    "qwen2_moe": _QWEN_MOE | _QWEN_SHARED | {"norm_topk_prob": False},
    "qwen3_moe": _QWEN_MOE,
    "qwen3_next": _QWEN_MOE
    | _QWEN_SHARED
    | {
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
    "vocab_size_per_layer_input": TOKENIZER_SIZE,
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
_SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 4,
    "vision_use_head": False,
}
GEMMA3_ROWS = 9
"""Rows per image in the family `gemma3_vl`: 3 x 3 squares of 2 x 2 patches."""
LATENT = ("deepseek_v2", "deepseek_v3")
_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]


def family_config(
    family: Family, config: dict[str, Any], tokenizer: Tokenizer, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """``config.json`` of a family, derived from a Llama's.

    Args:
        family: The family.
        config: ``config.json`` of a Llama of the same sizes.
        tokenizer: Gives the ids of `VISION_TOKENS`.
        changes: Entries to add or replace; those of ``text_config`` and ``vision_config`` one by
            one.
    """
    heads, num_layers = config["num_attention_heads"], config["num_hidden_layers"]
    del config["model_type"], config["architectures"]
    if family in ("mistral", "mixtral"):
        config["sliding_window"] = None
    if family in LATENT:
        config["num_key_value_heads"] = heads
        del config["head_dim"]
    config |= EXPERTS.get(family, {})
    if family == "llama4":  # explicit, as in published models
        turned = [int((layer + 1) % 3 != 0) for layer in range(num_layers)]
        config |= {"model_type": "llama4_text", "no_rope_layers": turned}
        config["layer_types"] = [("full_attention", "chunked_attention")[x] for x in turned]
    if family == "gpt_oss":
        kinds = ("sliding_attention", "full_attention")
        config["layer_types"] = [kinds[layer % 2] for layer in range(num_layers)]
    if family == "gemma3_vl":
        config = _gemma3_config(config, tokenizer)
    elif family in VISION_FAMILIES:
        config = _nested_config(family, config, tokenizer)
    config |= {"architectures": [ARCHITECTURES[family]]}
    config.setdefault("model_type", family)
    if family == "gemma3":
        config |= _GEMMA3
        del config["hidden_act"]
    if family == "gemma4":  # every third layer, and the last, without a window
        last = num_layers - 1
        full = [layer % 3 == 2 or layer == last for layer in range(num_layers)]
        config |= _GEMMA4
        config["layer_types"] = [("sliding_attention", "full_attention")[x] for x in full]
        del config["hidden_act"], config["rope_theta"]
    for name, value in changes.items():
        nested = isinstance(value, Mapping) and isinstance(config.get(name), dict)
        config[name] = config[name] | dict(value) if nested else value
    return config


def tokenizer_changes(family: Family) -> dict[str, Any]:
    """Differences of a family's ``tokenizer_config.json`` from a Llama's."""
    if family == "gemma3_vl":  # its processor frames and repeats the placeholder
        short = VISION_CHAT_TEMPLATE.replace(VISION_START + IMAGE + VISION_END, VISION_START)
        named = {"boi_token": VISION_START, "image_token": IMAGE, "eoi_token": VISION_END}
        return {"chat_template": short, "extra_special_tokens": named}
    return {"chat_template": VISION_CHAT_TEMPLATE} if family in VISION_FAMILIES else {}


def _nested_config(family: str, text: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """``config.json`` as transformers saves it, around the language model's part.

    Args:
        family: One of `VISION_FAMILIES` except Gemma's.
        text: Fields of the language model.
        tokenizer: Gives the ids of `VISION_TOKENS`.
    """
    text = text | {"model_type": f"{family}_text", "dtype": text.pop("torch_dtype")}
    # Sections in the proportions of the published models, which have 64 frequencies.
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


def _gemma3_config(text: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """``config.json`` as in published models of Gemma 3."""
    del text["hidden_act"]
    tied = text.pop("tie_word_embeddings")
    return {
        "boi_token_index": tokenizer.token_to_id(VISION_START),
        "eoi_token_index": tokenizer.token_to_id(VISION_END),
        "image_token_index": tokenizer.token_to_id(IMAGE),
        "mm_tokens_per_image": GEMMA3_ROWS,
        "model_type": "gemma3",
        "tie_word_embeddings": tied,
        "torch_dtype": text.pop("torch_dtype"),
        "text_config": text | _GEMMA3 | {"tie_word_embeddings": tied},
        "vision_config": dict(_SIGLIP),
    }


def preprocessor_config(family: str, tower: dict[str, Any]) -> dict[str, Any]:
    """``preprocessor_config.json``, in the form of the family's published models."""
    if family == "gemma3_vl":
        return {
            "do_convert_rgb": None,
            "do_normalize": True,
            "do_pan_and_scan": None,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_processor_type": "Gemma3ImageProcessor",
            "image_seq_length": GEMMA3_ROWS,
            "image_std": [0.5, 0.5, 0.5],
            "processor_class": "Gemma3Processor",
            "resample": 2,
            "rescale_factor": 1 / 255,
            "size": {"height": tower["image_size"], "width": tower["image_size"]},
        }
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

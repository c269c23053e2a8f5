"""What small random multimodal models have beside their language model.

Their pixels are few: a patch has 4 x 4, an image becomes 4 to 100 rows of 8 x 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
VISION_START, VISION_END, IMAGE, VIDEO = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TOKENS = [VISION_START, VISION_END, IMAGE, VIDEO]
CHAT_TEMPLATE = (
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
_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]


def nested_config(family: str, text: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """``config.json`` as transformers saves it, around the language model's part.

    Args:
        family: one of `FAMILIES`.
        text: fields of the language model.
        tokenizer: gives the ids of `TOKENS`.
    """
    text = text | {"model_type": f"{family}_text", "dtype": text.pop("torch_dtype")}
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": text.pop("rope_theta"),
        **_mrope(family, text["head_dim"] // 2),
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


def _mrope(family: str, half: int) -> dict[str, Any]:
    """Shares of the frequencies as in the published models, 64 there."""
    space = half * 5 // 16 if family == "qwen3_vl" else half * 3 // 8
    section = {"mrope_section": [half - 2 * space, space, space]}
    return section | ({"mrope_interleaved": True} if family == "qwen3_vl" else {})


def preprocessor_config(family: str, tower: dict[str, Any]) -> dict[str, Any]:
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


def shapes(family: str, tower: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
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
        yield from _mlp(family, f"{name}.mlp", hidden, tower["intermediate_size"])
    yield from _mergers(family, head, tower)


def _mlp(family: str, name: str, hidden: int, middle: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if family == "qwen3_vl":
        yield from _linear(f"{name}.linear_fc1", hidden, middle)
        yield from _linear(f"{name}.linear_fc2", middle, hidden)
        return
    for part in ("gate_proj", "up_proj"):
        yield from _linear(f"{name}.{part}", hidden, middle)
    yield from _linear(f"{name}.down_proj", middle, hidden)


def _mergers(
    family: str, head: str, tower: dict[str, Any]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, out = tower["hidden_size"], tower["out_hidden_size"]
    wide = hidden * tower["spatial_merge_size"] ** 2
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

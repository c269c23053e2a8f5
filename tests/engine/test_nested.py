"""Multimodal folders of which the language model alone is served, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kvbaton.engine.model_config import ARCHITECTURES, TEXT_ARCHITECTURES, load_model_config
from kvbaton.engine.vision_config import VISION_FAMILIES
from kvbaton.errors import ConfigError
from kvbaton.image_file import ARCHITECTURES as SEEING
from kvbaton.text.vision import VisionText

TEXT: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 7,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": ({"sliding_window": 12}, {}),
    "gemma4": ({"sliding_window": 12, "num_hidden_layers": 12, "num_kv_shared_layers": 6,
                "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 384,
                "global_head_dim": 32}, {}),
    "llama4": ({"num_local_experts": 4, "attention_chunk_size": 16, "intermediate_size_mlp": 96,
                "interleave_moe_layer_step": 2},
               {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As transformers writes it."""
    text, vision = MODELS[request.param]
    kind: Any = transformers.models.auto.configuration_auto.CONFIG_MAPPING[request.param]
    config = kind(text_config=TEXT | text, vision_config=VISION | vision)
    torch.manual_seed(0)
    make: Any = transformers.AutoModelForImageTextToText.from_config
    model = make(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    folder: Path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return folder


def expected(folder: Path, prompt: list[int], count: int) -> list[int]:
    load: Any = transformers.AutoModelForImageTextToText.from_pretrained
    out = load(folder, dtype=torch.float32).generate(
        input_ids=torch.tensor([prompt]), max_new_tokens=count, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def test_tokens_are_those_of_the_whole_model(folder: Path, drive: Any) -> None:
    prompt = np.random.default_rng(0).integers(3, 380, 40).tolist()
    driver = drive(folder)
    assert driver.generate(driver.add(prompt), 12) == expected(folder, prompt, 12)
    assert VisionText.load(folder) is None, "images are refused"


def test_fields_that_published_folders_leave_out(tmp_path: Path) -> None:
    """Those of Gemma 3 4B, as Google has written them."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }  # fmt: skip
    content = {
        "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106],
        "image_token_index": 262144, "mm_tokens_per_image": 256, "model_type": "gemma3",
        "text_config": text, "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(content))
    model = load_model_config(tmp_path)
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (8, 4, 256)
    assert (model.vocab_size, model.dtype, model.eos_token_ids) == (262208, "bfloat16", (1, 106))
    assert [layer for layer, window in enumerate(model.windows) if not window] == [
        5,
        11,
        17,
        23,
        29,
    ]
    assert model.tie_word_embeddings
    with pytest.raises(ConfigError, match="no vision tower"):
        model.require_vision()


def test_which_architectures_see() -> None:
    assert set(SEEING) == {*VISION_FAMILIES, "Gemma3ForConditionalGeneration"}
    assert set(TEXT_ARCHITECTURES.values()) <= set(ARCHITECTURES)

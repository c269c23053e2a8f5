"""Configurations of multimodal models: nested, flat as on the hub, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbaton.engine.model_config import load_model_config
from kvbaton.errors import ConfigError

Checkpoint = Callable[..., Path]


def edit(folder: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    copy = Path(shutil.copytree(folder, target / "edited"))
    config = json.loads((copy / "config.json").read_text())
    change(config)
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def flatten(config: dict[str, Any]) -> None:
    """As Qwen2.5-VL lies on the hub: the language model's fields on top, an older rope."""
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    config |= {name: value for name, value in text.items() if name not in ("model_type", "dtype")}
    config |= {"rope_theta": rope["rope_theta"], "torch_dtype": config.pop("dtype")}
    config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}


def test_flat_and_nested_forms_say_the_same(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint(family="qwen2_5_vl", config={"text_config": {"num_hidden_layers": 3}})
    flat = load_model_config(edit(folder, tmp_path, flatten))
    assert replace(flat, folder=folder) == load_model_config(folder)
    assert (flat.num_layers, flat.rope.mrope_section) == (3, (2, 3, 3))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_config_is_the_same_after_transformers_saved_it(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    import transformers

    folder = checkpoint(family=family, tied=True)
    transformers.AutoConfig.from_pretrained(folder).save_pretrained(tmp_path)
    shutil.copy(folder / "generation_config.json", tmp_path)
    saved = load_model_config(tmp_path)
    assert replace(saved, folder=folder) == load_model_config(folder)
    assert saved.tie_word_embeddings


def test_towers_have_what_their_family_has(checkpoint: Checkpoint) -> None:
    windowed = load_model_config(checkpoint(family="qwen2_5_vl"))
    deep = load_model_config(checkpoint(family="qwen3_vl"))
    assert windowed.vision is not None
    assert deep.vision is not None
    assert (windowed.vision.levels, windowed.vision.window_size) == (1, 32)
    assert (deep.vision.levels, deep.vision.window_size) == (3, 0)
    assert (windowed.rope.mrope_interleaved, deep.rope.mrope_interleaved) == (False, True)
    assert load_model_config(checkpoint()).vision is None


def test_missing_rope_theta_is_the_familys(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = edit(
        checkpoint(family="qwen3_vl"),
        tmp_path,
        lambda config: config["text_config"]["rope_parameters"].pop("rope_theta"),
    )
    assert load_model_config(folder).rope.theta == 500_000.0


@pytest.mark.parametrize(
    ("family", "part", "change", "named"),
    [
        ("qwen2_5_vl", "vision_config", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen2_5_vl", "vision_config", {"window_size": 4}, "window_size"),
        ("qwen2_5_vl", "vision_config", {"patch_size": 0}, "patch_size"),
        ("qwen2_5_vl", "vision_config", {"intermediate_size": -48}, "intermediate_size"),
        ("qwen2_5_vl", "vision_config", {"out_hidden_size": 32}, "out_hidden_size"),
        ("qwen2_5_vl", "vision_config", {"num_heads": 5}, "num_heads"),
        ("qwen2_5_vl", "text_config", {"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ("qwen2_5_vl", "text_config", {"rope_parameters": {}}, "mrope_section"),
        ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": [1, 3]}, "deepstack"),
        ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": [1, 0]}, "deepstack"),
        ("qwen3_vl", "vision_config", {"num_position_embeddings": 35}, "square"),
    ],
)
def test_unsupported_is_refused_by_name(
    family: str,
    part: str,
    change: dict[str, Any],
    named: str,
    checkpoint: Checkpoint,
    tmp_path: Path,
) -> None:
    folder = edit(checkpoint(family=family), tmp_path, lambda config: config[part].update(change))
    with pytest.raises(ConfigError, match=named):
        load_model_config(folder)


def test_tower_must_be_described(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint(family="qwen3_vl")
    with pytest.raises(ConfigError, match="needs a vision_config"):
        load_model_config(edit(folder, tmp_path, lambda config: config.pop("vision_config")))

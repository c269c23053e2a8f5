"""Vision towers against transformers', one image or several, whole grids of odd shapes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from kvbaton.engine.loader import load_vision
from kvbaton.engine.model_config import load_model_config
from kvbaton.engine.models.vision_layers import KEPT_PLANS, VisionTower
from kvbaton.errors import ConfigError
from tests.engine.sync_debug import waiting_is_an_error

Checkpoint = Callable[..., Path]
Grid = tuple[int, int, int]
CPU = torch.device("cpu")
FAMILIES = ["qwen2_5_vl", "qwen3_vl"]
SEVERAL: list[Grid] = [(1, 8, 8), (1, 4, 6), (1, 18, 22), (1, 8, 8), (1, 2, 10)]
family = pytest.mark.parametrize("family", FAMILIES)


def tower(folder: Path, dtype: str = "auto") -> VisionTower:
    return load_vision(load_model_config(folder, dtype), device=CPU)


def patches(grids: Sequence[Grid], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(map(prod, grids)), 96, generator=generator)


def assert_near(found: Tensor, wanted: Tensor) -> None:
    assert_close(found, wanted, atol=3e-5, rtol=1e-5)


def expected(model: Any, values: Tensor, grids: Sequence[Grid]) -> Tensor:
    """What transformers makes of it, as [rows, levels, hidden]."""
    with torch.no_grad():
        out = model.model.visual(values, torch.tensor(grids))
    return torch.stack([out.pooler_output, *getattr(out, "deepstack_features", [])], dim=1)


@pytest.fixture(scope="session")
def whole() -> Callable[[Path], Any]:
    """The whole transformers model of a folder, loaded once."""
    import transformers

    loaded: dict[Path, Any] = {}

    def load(folder: Path) -> Any:
        if folder not in loaded:
            loaded[folder] = transformers.AutoModelForImageTextToText.from_pretrained(folder)
        return loaded[folder]

    return load


@family
@pytest.mark.parametrize(
    "grids",
    [
        [(1, 2, 2)],
        [(1, 2, 30)],
        [(1, 34, 2)],
        [(1, 10, 14)],
        [(1, 16, 16)],
        SEVERAL,
        [(1, 6, 6), (3, 8, 10), (1, 6, 6)],
    ],
    ids=str,
)
def test_rows_equal_transformers(
    family: str, grids: list[Grid], checkpoint: Checkpoint, whole: Callable[[Path], Any]
) -> None:
    folder = checkpoint(family=family)
    values = patches(grids)
    rows = tower(folder)(values, grids)
    assert rows.shape == (len(values) // 4, 3 if family == "qwen3_vl" else 1, 64)
    assert_near(rows, expected(whole(folder), values, grids))


@family
def test_any_sizes_equal_transformers(
    family: str, checkpoint: Checkpoint, whole: Callable[[Path], Any]
) -> None:
    folder = checkpoint(family=family)
    ours, theirs = tower(folder), whole(folder)
    side = st.integers(1, 12).map(lambda units: 2 * units)

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(st.lists(st.tuples(st.just(1), side, side), min_size=1, max_size=4))
    def check(grids: list[Grid]) -> None:
        values = patches(grids)
        assert_near(ours(values, grids), expected(theirs, values, grids))

    check()


@family
def test_several_at_once_equal_one_by_one(family: str, checkpoint: Checkpoint) -> None:
    ours = tower(checkpoint(family=family))
    values = patches(SEVERAL)
    parts = torch.split(values, [prod(grid) for grid in SEVERAL])
    alone = [ours(part, [grid]) for part, grid in zip(parts, SEVERAL, strict=True)]
    assert_near(ours(values, SEVERAL), torch.cat(alone))
    assert torch.equal(ours(values, SEVERAL), ours(values, SEVERAL))


@family
def test_narrow_dtype_stays_close(family: str, checkpoint: Checkpoint) -> None:
    folder = checkpoint(family=family)
    values = patches(SEVERAL)
    narrow = tower(folder, "bfloat16")(values, SEVERAL)
    assert narrow.dtype == torch.bfloat16
    error = (narrow.float() - tower(folder)(values, SEVERAL)).abs().mean()
    assert 0 < error < 0.05


def test_plans_of_old_sizes_are_forgotten(checkpoint: Checkpoint) -> None:
    ours = tower(checkpoint(family="qwen2_5_vl"))
    for height in range(1, KEPT_PLANS + 10):
        ours.plan(((1, 2 * height, 2),))
    assert ours.plan.cache_info().currsize == KEPT_PLANS
    kept = ours.plan(((1, 2 * KEPT_PLANS, 2),))
    assert ours.plan(((1, 2 * KEPT_PLANS, 2),)) is kept


@family
def test_dummy_weights_need_no_files(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        shutil.copy(checkpoint(family=family) / name, tmp_path)
    config = load_model_config(tmp_path)
    values = patches(SEVERAL)
    made = [
        load_vision(config, device=CPU, load_format="dummy", seed=seed)(values, SEVERAL)
        for seed in (1, 1, 2)
    ]
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
    assert made[0].isfinite().all()


@family
def test_parts_may_hang_elsewhere_in_the_file(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Tuned models come with the names of either family."""
    folder = checkpoint(family=family)
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))
    tensors = load_file(folder / "model.safetensors")
    if family == "qwen3_vl":
        renamed = {name.replace("model.visual.", "visual."): x for name, x in tensors.items()}
    else:
        renamed = {name.replace("visual.", "model.visual."): x for name, x in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, moved / "model.safetensors")
    values = patches(SEVERAL)
    assert torch.equal(tower(moved)(values, SEVERAL), tower(folder)(values, SEVERAL))


def test_only_the_towers_tensors_are_needed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint(family="qwen2_5_vl")
    alone = Path(shutil.copytree(folder, tmp_path / "alone"))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: x for name, x in tensors.items() if name.startswith("visual.")}
    save_file(kept, alone / "model.safetensors")
    values = patches(SEVERAL)
    assert torch.equal(tower(alone)(values, SEVERAL), tower(folder)(values, SEVERAL))
    del kept["visual.merger.mlp.0.bias"]
    save_file(kept, alone / "model.safetensors")
    with pytest.raises(ConfigError, match=r"visual\.merger\.mlp\.0\.bias"):
        tower(alone)


def test_text_models_have_no_tower(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="has no vision tower"):
        tower(checkpoint())


def test_positions_turn_with_their_own_base(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint(family="qwen2_5_vl")
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    config["vision_config"]["rope_parameters"] = {"rope_type": "axial", "rope_theta": 100.0}
    (other / "config.json").write_text(json.dumps(config))
    values = patches(SEVERAL)
    assert not torch.allclose(tower(other)(values, SEVERAL), tower(folder)(values, SEVERAL))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@family
def test_gpu_equals_cpu_and_is_not_waited_for(family: str, checkpoint: Checkpoint) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    config = load_model_config(checkpoint(family=family))
    ours = load_vision(config, device=torch.device("cuda"))
    ours(patches([(1, 4, 4)]).pin_memory(), [(1, 4, 4)])
    values = patches(SEVERAL)
    pinned = values.pin_memory()
    with waiting_is_an_error():
        rows = ours(pinned, SEVERAL)
    assert_close(rows.cpu(), tower(config.folder)(values, SEVERAL), atol=1e-3, rtol=1e-3)

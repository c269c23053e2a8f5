"""K and V in FP8: tokens are those of attention over rounded K and V, whatever the chunks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvbaton.engine.attention import rotate
from kvbaton.engine.build import identity_record
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.loader import load_kv_scales, load_model
from kvbaton.engine.model_config import load_model_config
from kvbaton.engine.models.layers import Heads, Rotary
from kvbaton.errors import ConfigError
from tests.engine.test_loader import CPU
from tests.support.digests import digest_of

Checkpoint = Callable[..., Path]
PROMPT = list(range(40, 90))
NAMES = ("self_attn.{0}_scale", "self_attn.{0}_proj.{0}_scale", "self_attn.{0}_proj.output_scale")


class RoundedAttention:
    """Attention of one sequence without a cache, over K and V as an FP8 cache keeps them."""

    states = None

    def __init__(self, scales: dict[int, tuple[float, float]]) -> None:
        self._scales = scales

    def attend(self, layer: int, heads: Heads, rotary: Rotary) -> Tensor:
        query, key, value, *_ = heads
        assert key is not None
        assert value is not None
        if heads.norms is not None:
            query, key = heads.norms.apply((query, key))
        of_key, of_value = self._scales[layer]
        query, key, value = (
            x.transpose(0, 1)[None]
            for x in (
                rotate(query, rotary),
                rounded(rotate(key, rotary), of_key),
                rounded(value, of_value),
            )
        )
        out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)


def rounded(x: Tensor, scale: float) -> Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def expected(folder: Path, scales: dict[int, tuple[float, float]], count: int) -> list[int]:
    model, tokens = load_model(load_model_config(folder), device=CPU), list(PROMPT)
    with torch.inference_mode():
        for _ in range(count):
            at = torch.arange(len(tokens))
            hidden = model(torch.tensor(tokens), at, RoundedAttention(scales))
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(PROMPT) :]


def scaled(folder: Path, target: Path, scales: dict[str, float]) -> Path:
    """The folder with tensors of one number more."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    weights |= {f"model.layers.{name}": torch.tensor(x) for name, x in scales.items()}
    save_file(weights, target / "model.safetensors")
    return target


@pytest.mark.parametrize("chunk", [1000, 13])
@pytest.mark.parametrize("size", [1, 2])
def test_tokens_are_those_of_rounded_keys_and_values(
    checkpoint: Checkpoint, drive: Any, chunk: int, size: int
) -> None:
    driver = drive(checkpoint(), kv_cache_dtype="fp8", tensor_parallel_size=size)
    found = driver.generate(driver.add(PROMPT), 10, chunk=chunk)
    assert found == expected(checkpoint(), dict.fromkeys(range(2), (1.0, 1.0)), 10)
    cache = driver.executor.workers[0].cache
    assert cache.data.dtype == torch.float8_e4m3fn
    assert cache.layouts[0].planes[0].dtype == "float8_e4m3fn"


@pytest.mark.parametrize("names", NAMES)
def test_scales_of_the_checkpoint(
    checkpoint: Checkpoint, drive: Any, tmp_path: Path, names: str
) -> None:
    """Small ones, so that much would be lost at the lower end of e4m3 without them."""
    stored = {f"1.{names.format('k')}": 2e-2, f"1.{names.format('v')}": 1e-2}
    folder = scaled(checkpoint(), tmp_path / "scaled", stored)
    scales = load_kv_scales(load_model_config(folder, kv_cache_dtype="fp8"), "auto")
    assert list(scales) == [1]
    assert scales[1] == pytest.approx((2e-2, 1e-2))
    scales[0] = (1.0, 1.0)
    driver = drive(folder, kv_cache_dtype="fp8")
    assert driver.generate(driver.add(PROMPT), 10, chunk=17) == expected(checkpoint(), scales, 10)


def test_a_latent_has_the_scale_of_keys(checkpoint: Checkpoint, drive: Any, tmp_path: Path) -> None:
    """Of powers of two nothing but the range is seen: tokens are those of a scale of one."""
    plain = checkpoint(family="deepseek_v3")
    stored = {"0.self_attn.k_scale": 0.5, "1.self_attn.k_scale": 2.0, "1.self_attn.v_scale": 7.0}
    folder = scaled(plain, tmp_path / "scaled", stored)
    scales = load_kv_scales(load_model_config(folder, kv_cache_dtype="fp8"), "auto")
    assert scales == {0: (0.5, 0.5), 1: (2.0, 2.0)}
    found, wanted = (drive(x, kv_cache_dtype="fp8") for x in (folder, plain))
    tokens = found.generate(found.add(PROMPT), 10, chunk=17)
    assert tokens == wanted.generate(wanted.add(PROMPT), 10, chunk=17)
    ratio = found.executor.workers[0].cache.data.float()
    ratio /= wanted.executor.workers[0].cache.data.float()
    assert ratio[:, :, 0].nanmedian() == 2.0
    assert ratio[:, :, 1].nanmedian() == 0.5


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), [1.0, 2.0]])
def test_a_scale_that_is_no_positive_number(
    checkpoint: Checkpoint, tmp_path: Path, value: Any
) -> None:
    folder = scaled(checkpoint(), tmp_path / "scaled", {"0.self_attn.k_scale": value})
    model = load_model_config(folder, kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match=r"'model\.layers\.0\.self_attn\.k_scale'.*positive"):
        load_kv_scales(model, "auto")
    assert load_kv_scales(load_model_config(folder), "auto") == {}


def test_sums_and_poison(checkpoint: Checkpoint, drive: Any) -> None:
    driver = drive(checkpoint(), kv_cache_dtype="fp8")
    handle = driver.add(PROMPT)
    driver.generate(handle, 10, chunk=33)
    blocks, length = driver.tables[handle], driver.computed[handle]
    executor = driver.executor
    kept, again = executor.sums(0, blocks), digest_of(executor, 0, blocks, 0, 0, length)
    assert (driver.wait(kept) == driver.wait(again)).all()
    executor.poison(blocks[:1])
    assert executor.workers[0].cache.data[blocks[0]].isnan().all()


def test_what_it_is_makes_another_identity(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = scaled(checkpoint(), tmp_path / "scaled", {"0.self_attn.k_scale": 0.5})
    records = []
    for kind in ("auto", "fp8"):
        config = EngineConfig(model=str(folder), kv_cache_dtype=kind)
        model = load_model_config(folder, kv_cache_dtype=config.kv_cache_dtype)
        records.append(identity_record(config, model).record())
    assert [record["kv_dtype"] for record in records] == ["float32", "float8_e4m3fn"]
    assert records[0]["kv_scales"] == "" != records[1]["kv_scales"]
    assert records[0]["dtype"] == records[1]["dtype"]

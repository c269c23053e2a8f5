"""Experts that stay in MXFP4, over any ranks, give what transformers does, dequantised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvbaton.engine.collectives import Shard
from kvbaton.engine.loader import load_model
from kvbaton.engine.model_config import load_model_config
from kvbaton.errors import ConfigError
from tests.engine.test_gpu import GPU, MODELS, expected_logits
from tests.engine.test_tensor_parallel import GREEDY, PROMPTS, served, tokens
from tests.support.prompts import random_tokens
from tests.support.quantized_files import mxfp4_folders

__all__ = ["served"]
Checkpoint = Callable[..., Path]
SHAPE: dict[str, Any] = {"family": "gpt_oss", "intermediate_size": 96}
CPU = torch.device("cpu")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU keeps MXFP4 as a GPU does, by the references of the kernels."""
    monkeypatch.setattr("kvbaton.engine.models.linear.has_mxfp4_products", lambda: True)


@pytest.mark.parametrize(
    ("size", "settings"),
    [(1, {}), (2, {}), (4, {}), (2, {"enable_expert_parallel": True})],
    ids=["one", "tp2", "tp4", "ep2"],
)
def test_greedy_tokens_are_those_of_transformers(
    kept: None,
    size: int,
    settings: dict[str, Any],
    checkpoint: Checkpoint,
    reference: Any,
    served: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Three groups of 32 over 2 ranks are 2 and 1; of 4 ranks one has none."""
    folder, plain = mxfp4_folders(checkpoint(**SHAPE), tmp_path_factory.mktemp("mxfp4"))
    ours = served(folder, size, **settings)
    found = tokens(ours.run([(prompt, GREEDY) for prompt in PROMPTS]))
    theirs = reference(plain)
    for number, prompt in enumerate(PROMPTS):
        given, count = torch.tensor([prompt]), GREEDY.max_tokens
        out = theirs.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=None,
        )
        assert found[f"{number}/0"] == out[0, len(prompt) :].tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("chunk", [7, 1000])
def test_a_model_on_a_gpu_keeps_4_bits(
    chunk: int, checkpoint: Checkpoint, reference: Any, drive: Any, tmp_path: Path
) -> None:
    """Of numbers that a bfloat16 has, beside transformers with the same as floats."""
    shape = MODELS["gpt-oss"] | {"intermediate_size": 288}
    folder, plain = mxfp4_folders(checkpoint(**shape), tmp_path)
    driver = drive(folder, dtype="bfloat16", **GPU)
    (worker,) = driver.executor.workers
    assert worker.model.layers[1].mlp.experts.down_proj.dtype == torch.int16
    prompt = random_tokens(np.random.default_rng(1), 100)
    got = driver.generate(driver.add(prompt), 12, chunk=chunk)
    logits = expected_logits(reference(plain, "bfloat16"), [*prompt, *got][:-1])[99:]
    chosen = logits.gather(1, torch.tensor(got, device="cuda")[:, None])[:, 0]
    gap = (logits.amax(-1) - chosen).mean() / logits.std()
    assert gap < 0.1, f"tokens are {gap:.2f} deviations below the best"


def experts(folder: Path, shard: Shard, load_format: Any = "auto") -> Any:
    config = load_model_config(folder)
    model: Any = load_model(config, device=CPU, shard=shard, load_format=load_format)
    return model.layers[1].mlp.experts


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_ranks_hold_whole_groups_of_4_bits(
    kept: None, load_format: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder, plain = mxfp4_folders(checkpoint(**SHAPE), tmp_path)
    whole = experts(folder, Shard(), load_format)
    held, size = len(whole.down_proj), whole.size
    assert whole.down_proj.dtype == torch.int16
    assert whole.down_proj.shape == (held, 1, size, 32)  # 96 of 128 columns
    assert whole.gate_up_proj.shape == (held, 1, 192, 32)
    stored = sum(x.nbytes for name, x in whole.named_parameters() if "bias" not in name)
    floats = experts(plain, Shard())
    padded = (floats.gate_up_proj.numel() * 128 // size) + floats.down_proj.numel() * 128 // 96
    assert stored == padded * 17 // 32  # 4.25 bits each
    last = experts(folder, Shard(1, 2), load_format)
    assert (last.start, last.middle) == (64, 32)
    assert torch.equal(last.gate_up_proj[:, :, :64], whole.gate_up_proj[:, :, 128:])
    assert torch.equal(last.gate_up_bias[:, :64], whole.gate_up_bias[:, 128:])
    assert not last.gate_up_proj[:, :, 64:].any()
    assert not last.gate_up_scales[:, :, 64:].any()
    assert not last.gate_up_bias[:, 64:].any()
    some = experts(folder, Shard(1, 2, expert_parallel=True), load_format)
    assert torch.equal(some.down_proj, whole.down_proj[held // 2 :])
    assert torch.equal(some.gate_up_scales, whole.gate_up_scales[held // 2 :])


def test_experts_that_are_floats_after_all(
    kept: None, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder, plain = mxfp4_folders(checkpoint(**SHAPE), tmp_path)
    name = "model.layers.1.mlp.experts.down_proj"
    weights = load_file(folder / "model.safetensors")
    weights[name] = load_file(plain / "model.safetensors")[name]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"'{name}'.*F32; need {name}_blocks, or its module"):
        experts(folder, Shard())


def test_scales_that_no_bfloat16_has_are_told(
    kept: None, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder, _ = mxfp4_folders(checkpoint(**SHAPE), tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj_scales"
    weights = load_file(folder / "model.safetensors")
    weights[name][1, 2, 0] = 130
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"'{name}'.*up to 2\^3; .* 2\^1 at most"):
        experts(folder, Shard())

"""Quantised checkpoints serve as the same weights in floats would; broken ones are told by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvbaton.engine.collectives import Shard
from kvbaton.engine.loader import load_model
from kvbaton.engine.model_config import ModelConfig, load_model_config
from kvbaton.engine.quantization_config import Quantization, read_quantization
from kvbaton.engine.quantized_tensors import MXFP4Tensor, dequantize_mxfp4, find_tensor
from kvbaton.errors import ConfigError
from tests.engine.test_loader import CPU, logits
from tests.support.quantized_files import CONFIGS, compressed, mxfp4_folders, quantized_folders

Checkpoint = Callable[..., Path]
LAYER = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_those_of_the_same_floats(
    checkpoint: Checkpoint, tmp_path: Path, kind: str
) -> None:
    folders = quantized_folders(checkpoint(), tmp_path, kind)
    found, wanted = (logits(load_model(load_model_config(x), device=CPU)) for x in folders)
    assert torch.equal(found, wanted)
    assert not torch.equal(found, logits(load_model(load_model_config(checkpoint()), device=CPU)))


@pytest.mark.parametrize(
    "kind", ["fp8-tensor", "fp8-channel", "fp8-uneven", "awq", "gptq-act-order", "packed-act-order"]
)
def test_ranks_take_their_parts(checkpoint: Checkpoint, tmp_path: Path, kind: str) -> None:
    folders = quantized_folders(checkpoint(), tmp_path, kind)
    for rank in range(2):
        found, wanted = (
            load_model(load_model_config(x), device=CPU, shard=Shard(rank, 2)).state_dict()
            for x in folders
        )
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("family", "kind"),
    [("qwen3_moe", "fp8-block"), ("qwen3_moe", "awq"), ("deepseek_v3", "fp8-uneven")],
)
def test_experts_and_latents_are_dequantised(
    checkpoint: Checkpoint, tmp_path: Path, family: str, kind: str
) -> None:
    folders = quantized_folders(checkpoint(family=family), tmp_path, kind)
    found, wanted = (
        load_model(load_model_config(x), device=CPU, shard=Shard(1, 2)).state_dict()
        for x in folders
    )
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# --- parts that begin and end anywhere ---


class InMemory:
    """`Stored` of a tensor that is there."""

    DTYPES = {torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8"} | {
        torch.float16: "F16",
        torch.int32: "I32",
        torch.int64: "I64",
    }

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self.shape = tensor, tuple(tensor.shape)
        self.where, self.dtype = "tensor in memory", self.DTYPES[tensor.dtype]

    def read(self, *index: slice) -> Tensor:
        return self._tensor[index]


@pytest.mark.parametrize(
    "kind", ["fp8-channel", "fp8-uneven", "awq", "gptq-2", "gptq-act-order", "packed-asymmetric"]
)
def test_any_part_can_be_read(checkpoint: Checkpoint, tmp_path: Path, kind: str) -> None:
    quantized, plain = quantized_folders(checkpoint(), tmp_path, kind)
    stored = load_file(quantized / "model.safetensors")
    tensors = {name: InMemory(x) for name, x in stored.items() if name.startswith(LAYER)}
    how = load_model_config(quantized).quantization
    wanted = load_file(plain / "model.safetensors")[f"{LAYER}.weight"]
    found = find_tensor(tensors, f"{LAYER}.weight", how)
    assert found.shape == tuple(wanted.shape)
    for rows, columns in ((slice(None), slice(5, 99)), (slice(3, 30), slice(33, 34))):
        assert torch.equal(found.read(rows, columns), wanted[rows, columns])


# --- MXFP4 ---


def test_mxfp4_is_that_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 135, (2, 6, 3), dtype=torch.uint8, generator=generator)
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(dequantize_mxfp4(blocks, scales).transpose(1, 2), wanted)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {f"{name}_blocks": InMemory(blocks), f"{name}_scales": InMemory(scales)}
    stored = find_tensor(tensors, name, read_quantization({"quant_method": "mxfp4"}))
    assert isinstance(stored, MXFP4Tensor)
    assert stored.shape == (2, 96, 6)
    assert torch.equal(stored.read(), wanted)
    part = (slice(1, 2), slice(7, 70), slice(2, 5))
    assert torch.equal(stored.read(*part), wanted[part])


@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2), Shard(0, 2, expert_parallel=True)])
def test_gpt_oss_as_published_is_its_floats(
    checkpoint: Checkpoint, tmp_path: Path, shard: Shard
) -> None:
    source = checkpoint(family="gpt_oss", intermediate_size=96)
    folders = mxfp4_folders(source, tmp_path)
    found, wanted, other = (
        load_model(load_model_config(x), device=CPU, shard=shard).state_dict()
        for x in (*folders, source)
    )
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    name = "layers.1.mlp.experts.down_proj"
    assert not torch.equal(found[name], other[name])
    torch.testing.assert_close(found[name], other[name], atol=0.1, rtol=0.34)


def test_a_part_of_mxfp4_that_is_missing_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, _ = mxfp4_folders(checkpoint(family="gpt_oss"), tmp_path)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    broken(folder, lambda weights: weights.pop(name))
    with pytest.raises(ConfigError, match=name):
        load_model(load_model_config(folder), device=CPU)


# --- what is wrong ---


def broken(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("fp8-tensor", "weight_scale"),
        ("fp8-block", "weight_scale_inv"),
        ("fp8-block", "weight"),
        ("awq", "qweight"),
        ("awq", "qzeros"),
        ("gptq", "scales"),
        ("packed", "weight_scale"),
    ],
)
def test_a_missing_part_is_named(
    checkpoint: Checkpoint, tmp_path: Path, kind: str, part: str
) -> None:
    folder, _ = quantized_folders(checkpoint(), tmp_path, kind)
    broken(folder, lambda weights: weights.pop(f"{LAYER}.{part}"))
    part = "weight" if part == "qweight" else part
    with pytest.raises(ConfigError, match=rf"no tensor '{LAYER}\.{part}'"):
        load_model(load_model_config(folder), device=CPU)


@pytest.mark.parametrize(
    ("kind", "part", "value", "told"),
    [
        ("fp8-block", "weight", torch.zeros(64, 128, dtype=torch.float8_e5m2), "dtype F8_E5M2"),
        ("fp8-block", "weight_scale_inv", torch.ones(4, 5), r"shape \[4, 5\].* needs \[4, 4\]"),
        ("fp8-channel", "weight_scale", torch.ones(7), r"shape \[7\].* \[64, 1\] or \[1, 1\]"),
        ("fp8-tensor", "weight_scale", torch.ones(1, dtype=torch.int32), "dtype I32"),
        ("awq", "qweight", torch.zeros(128, 8), "dtype F32; need I32"),
        ("awq", "qweight", torch.zeros(128, dtype=torch.int32), r"shape \[128\]"),
        ("awq", "qweight", torch.zeros(128, 7, dtype=torch.int32), r"shape .*; need \[4, 7\]"),
        ("gptq", "qzeros", torch.zeros(5, 8, dtype=torch.int32), r"shape \[5, 8\]; need \[4, 8\]"),
        ("gptq", "g_idx", torch.full((128,), 4, dtype=torch.int32), "beyond the 4"),
        ("packed", "weight_shape", torch.tensor([64, 999]), r"shape \[64, 16\]; need \[64, 125\]"),
    ],
)
def test_a_foreign_part_is_named(
    checkpoint: Checkpoint, tmp_path: Path, kind: str, part: str, value: Tensor, told: str
) -> None:
    folder, _ = quantized_folders(checkpoint(), tmp_path, kind)
    broken(folder, lambda weights: weights.update({f"{LAYER}.{part}": value}))
    with pytest.raises(ConfigError, match=rf"'{LAYER}\.\w+'.*{told}"):
        load_model(load_model_config(folder), device=CPU)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32])
def test_numbers_that_the_configuration_does_not_tell_of(
    checkpoint: Checkpoint, tmp_path: Path, dtype: torch.dtype
) -> None:
    _, folder = quantized_folders(checkpoint(), tmp_path, "fp8-block")
    broken(
        folder, lambda weights: weights.update({f"{LAYER}.weight": torch.ones(64, 128).to(dtype)})
    )
    with pytest.raises(ConfigError, match=rf"'{LAYER}\.weight'.*does not account for"):
        load_model(load_model_config(folder), device=CPU)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"bits": 4}, "quant_method None.*supported: fp8, compressed-tensors, awq"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is unsupported"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "must be positive"),
        ({"quant_method": "awq", "bits": 4}, "group_size"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "gemv"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits 3"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size 0"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 8, "dynamic": {"-:x": {}}}, "dynamic"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 8, "checkpoint_format": "marlin"},
            "mar",
        ),
        (
            compressed("nvfp4-pack-quantized", 4, "float", "x"),
            "nv",
        ),
        (
            compressed("float-quantized", 8, "float", "token"),
            "tok",
        ),
        (
            compressed("float-quantized", 8, "float", "block"),
            "blo",
        ),
        (
            compressed("pack-quantized", 3, "int", "group"),
            "bits 3",
        ),
        (compressed("int-quantized", 8, "int", "channel", symmetric=False), "not symmetric"),
        (
            compressed("int-quantized", 8, "int", "channel") | {"transform_config": {"R1": {}}},
            "transform_config",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    checkpoint: Checkpoint, tmp_path: Path, content: dict[str, Any], told: str
) -> None:
    config = json.loads((checkpoint() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": content}))
    with pytest.raises(ConfigError, match=f"quantization_config: .*{told}") as raised:
        load_model_config(tmp_path)
    assert raised.value.field == "--model"


def test_modules_that_are_left_alone() -> None:
    names = ("lm_head", "model.layers.0.mlp.gate", "re:.*experts.*")
    how = Quantization(layout="fp8", bits=8, ignored=names)
    assert how.ignores("lm_head")
    assert how.ignores("model.layers.0.mlp.gate")
    assert how.ignores("model.layers.3.mlp.experts.7.up_proj")
    assert not how.ignores("model.layers.0.mlp.gate_proj")


# --- FP8 kept, and multiplied as such ---


@pytest.fixture
def fp8_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU does what a GPU does, by the references of the kernels."""
    monkeypatch.setattr("kvbaton.engine.models.linear.has_fp8_products", lambda: True)


def test_projections_that_queries_absorb_are_floats(
    fp8_products: None, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint(**WIDE, family="deepseek_v2", config={"q_lora_rank": 48})
    found, wanted = (
        layers_of(load_model_config(x))[0].self_attn
        for x in quantized_folders(folder, tmp_path, "fp8-channel")
    )
    for layer in (found.down_proj, found.q_b_proj, found.o_proj):
        assert layer.weight.dtype == torch.float8_e4m3fn
    assert found.kv_b_proj.weight.dtype == torch.bfloat16
    assert torch.equal(found.kv_b_proj.weight, wanted.kv_b_proj.weight)


WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_heads": 8, "dtype": "bfloat16"}


def layers_of(config: ModelConfig, shard: Shard | None = None) -> Any:
    return load_model(config, device=CPU, shard=shard).layers


@pytest.mark.parametrize("kind", ["fp8-tensor", "fp8-channel", "ct-channel", "fp8-block-64"])
@pytest.mark.parametrize("size", [1, 2])
def test_fp8_weights_are_kept(
    fp8_products: None, checkpoint: Checkpoint, tmp_path: Path, kind: str, size: int
) -> None:
    kept, plain = (
        load_model_config(x) for x in quantized_folders(checkpoint(**WIDE), tmp_path, kind)
    )
    for rank in range(size):
        found, wanted = (layers_of(x, Shard(rank, size))[1] for x in (kept, plain))
        x = torch.randn(9, 128 // size, generator=torch.Generator().manual_seed(1)).bfloat16()
        layers = (found.self_attn.o_proj, wanted.self_attn.o_proj)
        assert layers[0].weight.dtype == torch.float8_e4m3fn
        groups = layers[0].scales.shape[1]
        wide = layers[0].scales.repeat_interleave(x.shape[1] // groups, 1)
        dequantised = layers[0].weight.float() * wide
        torch.testing.assert_close(dequantised.bfloat16(), layers[1].weight, atol=0, rtol=0)
        out, exact = (layer.method.product(x, layer.weight, layer.scales, None) for layer in layers)
        assert (out.float() - exact.float()).norm() < 0.05 * exact.float().norm()


EXPERTS = {"moe_intermediate_size": 192, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("kind", ["fp8-tensor", "fp8-channel", "fp8-block-64"])
@pytest.mark.parametrize(
    "shard", [Shard(), Shard(1, 2), Shard(1, 2, expert_parallel=True)], ids=["whole", "tp", "ep"]
)
def test_experts_in_fp8_are_kept(
    fp8_products: None, checkpoint: Checkpoint, tmp_path: Path, kind: str, shard: Shard
) -> None:
    folder = checkpoint(**WIDE, family="qwen3_moe", config=EXPERTS)
    kept, plain = (load_model_config(x) for x in quantized_folders(folder, tmp_path, kind))
    found, wanted = (layers_of(x, shard)[1].mlp for x in (kept, plain))
    for name in ("gate_up", "down"):
        weight, scales = (getattr(found.experts, f"{name}_{part}") for part in ("proj", "scales"))
        assert weight.dtype == torch.float8_e4m3fn
        # A rank that has half a block of columns has its scale, too.
        runs = weight.shape[2] // (32 if kind == "fp8-block-64" and name == "down" else 64)
        runs = runs if shard.size == 2 and not shard.expert_parallel else weight.shape[2] // 64
        assert scales.shape[1] == (runs if kind == "fp8-block-64" else 1)
        wide = scales.repeat_interleave(weight.shape[2] // scales.shape[1], 1).transpose(1, 2)
        dequantised = (weight.float() * wide).bfloat16()
        assert torch.equal(dequantised, getattr(wanted.experts, f"{name}_proj"))
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(found(x), wanted(x))  # of few tokens nothing is rounded but the weights


def test_experts_that_are_left_alone_stay_floats(
    fp8_products: None, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint(**WIDE, family="qwen3_moe", config=EXPERTS)
    quantised, plain = quantized_folders(folder, tmp_path, "fp8-channel")
    weights = load_file(plain / "model.safetensors")
    floats = {name: x for name, x in weights.items() if ".experts." in name}
    broken(quantised, lambda stored: stored.update(floats))
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"].append("re:.*mlp.experts.*")
    (quantised / "config.json").write_text(json.dumps(config))
    found, wanted = (layers_of(load_model_config(x))[1].mlp.experts for x in (quantised, plain))
    assert found.gate_up_scales is None
    assert torch.equal(found.gate_up_proj, wanted.gate_up_proj)


def test_layers_that_are_left_alone_stay_floats(
    fp8_products: None, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder, plain = quantized_folders(checkpoint(**WIDE), tmp_path, "fp8-channel")
    weights = load_file(plain / "model.safetensors")
    broken(folder, lambda stored: stored.update({f"{LAYER}.weight": weights[f"{LAYER}.weight"]}))
    with pytest.raises(ConfigError, match=rf"'{LAYER}\.weight'.*BF16; need F8_E4M3, or its module"):
        load_model(load_model_config(folder), device=CPU)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"].append(LAYER)
    (folder / "config.json").write_text(json.dumps(config))
    layer = layers_of(load_model_config(folder))[1]
    assert torch.equal(layer.mlp.down_proj.weight, weights[f"{LAYER}.weight"])
    assert layer.mlp.gate_up_proj.weight.dtype == torch.float8_e4m3fn


def test_ranks_that_split_a_block_are_refused(
    fp8_products: None, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder, _ = quantized_folders(checkpoint(**WIDE), tmp_path, "fp8-block-64")
    told = r"4 ranks split the 128 inputs of 'model\.layers\.0\.self_attn\.o_proj'.*divides 2"
    with pytest.raises(ConfigError, match=told) as raised:
        load_model(load_model_config(folder), device=CPU, shard=Shard(1, 4))
    assert raised.value.field == "--tensor-parallel-size"


def test_floats_are_quantised_online(fp8_products: None, checkpoint: Checkpoint) -> None:
    folder = checkpoint(**WIDE)
    configs = (load_model_config(folder, quantization="fp8"), load_model_config(folder))
    found, wanted = (layers_of(config)[0].mlp.down_proj for config in configs)
    assert found.weight.dtype == torch.float8_e4m3fn
    assert found.weight.float().abs().amax(1).eq(448).all()
    error = found.weight.float() * found.scales - wanted.weight.float()
    assert error.norm() < 0.04 * wanted.weight.float().norm()
    quantised, plain = (logits(load_model(config, device=CPU)) for config in configs)
    assert (quantised - plain).norm() < 0.2 * plain.norm()


def test_online_quantisation_needs_a_gpu_and_floats(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"capability 8\.9") as raised:
        load_model(load_model_config(checkpoint(), quantization="fp8"), device=CPU)
    assert raised.value.field == "--quantization"
    folder, _ = quantized_folders(checkpoint(), tmp_path, "awq")
    with pytest.raises(ConfigError, match="quantised as awq already"):
        load_model_config(folder, quantization="fp8")

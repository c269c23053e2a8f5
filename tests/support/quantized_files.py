"""Folders with quantised weights in the formats of common tools, and the same weights as floats.

Numbers, zero points and scales are drawn first. Weights follow from them by the format's formula,
and they are packed bit by bit as its definition says, without any code of the engine.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns (of 8) of the 4-bit fields of an int32, from the lowest bits on."""

MXFP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)
"""The 16 numbers of e2m1."""

Parts = tuple[dict[str, Tensor], Tensor]
"""Tensors by name suffix after the module, and the weight that they represent."""


def pack(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack numbers [rows, columns] into int32s along the columns, first in the lowest bits."""
    each = 32 // bits
    numbers = torch.nn.functional.pad(numbers.long(), (0, -numbers.shape[1] % each))
    packed = torch.zeros(numbers.shape[0], numbers.shape[1] // each, dtype=torch.int64)
    for place, column in enumerate(order or range(each)):
        packed |= numbers[:, column::each] << place * bits
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def fp8(weight: Tensor, block: tuple[int, int], suffix: str) -> Parts:
    """Quantise to e4m3 with one scale per block."""
    rows, columns = weight.shape
    height, width = block
    scales = torch.zeros(-(-rows // height), -(-columns // width))
    stored, plain = torch.zeros_like(weight, dtype=torch.float8_e4m3fn), torch.zeros_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            scales[i, j] = weight[at].abs().max() / 448
            stored[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            plain[at] = stored[at].float() * scales[i, j]
    return {"weight": stored, suffix: scales}, plain


def integers(weight: Tensor, bits: int, group: int, *, symmetric: bool, seed: int) -> list[Tensor]:
    """Quantise a weight: codes [rows, columns], zeros and fp16 scales [rows, groups]."""
    rows, columns = weight.shape
    grouped = weight.view(rows, columns // group, group)
    top, generator = 2**bits - 1, torch.Generator().manual_seed(seed)
    scales = (grouped.abs().amax(2) * 2 / top).half()
    zeros = torch.full(scales.shape, 1 << bits - 1)
    if not symmetric:
        zeros = torch.randint(1, top + 1, scales.shape, generator=generator)
    codes = (grouped / scales.float()[..., None] + zeros[..., None]).round().clamp(0, top)
    return [codes.view(rows, columns).long(), zeros, scales]


def awq(weight: Tensor, seed: int, group: int = 32) -> Parts:
    codes, zeros, scales = integers(weight, 4, group, symmetric=False, seed=seed)
    plain = (codes - zeros.repeat_interleave(group, 1)) * scales.float().repeat_interleave(group, 1)
    packed = {"qweight": codes.t(), "qzeros": zeros.t()}
    parts = {name: pack(x, 4, AWQ_ORDER) for name, x in packed.items()}
    return parts | {"scales": scales.t().contiguous()}, plain


def regroup(weight: Tensor, group: int, seed: int) -> tuple[Tensor, Tensor]:
    """Permute columns so that those of a group are adjacent; the weight, and columns' groups."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))
    group_of = torch.empty_like(order)
    group_of[order] = torch.arange(len(order)) // group
    return weight[:, order], group_of


def gptq(
    weight: Tensor, seed: int, *, bits: int, symmetric: bool, act_order: bool, v1: bool
) -> Parts:
    group, group_of = 32, torch.arange(weight.shape[1]) // 32
    if act_order:
        _, group_of = regroup(weight, group, seed)
    at = torch.argsort(group_of, stable=True)
    codes, zeros, scales = integers(weight[:, at], bits, group, symmetric=symmetric, seed=seed)
    codes = codes[:, torch.argsort(at)]
    plain = (codes - zeros[:, group_of]) * scales.float()[:, group_of]
    stored = zeros - 1 if v1 else zeros
    return {
        "qweight": pack(codes, bits).t().contiguous(),
        "qzeros": pack(stored.t(), bits),
        "scales": scales.t().contiguous(),
        "g_idx": group_of.int(),
    }, plain


def packed(
    weight: Tensor, seed: int, *, bits: int, group: int, symmetric: bool, act_order: bool
) -> Parts:
    group = group if group > 0 else weight.shape[1]
    group_of = torch.arange(weight.shape[1]) // group
    if act_order:
        _, group_of = regroup(weight, group, seed)
    at = torch.argsort(group_of, stable=True)
    codes, zeros, scales = integers(weight[:, at], bits, group, symmetric=symmetric, seed=seed)
    codes = codes[:, torch.argsort(at)]
    parts = {
        "weight_packed": pack(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = pack(zeros.t(), bits).t().contiguous()
    if act_order:
        parts["weight_g_idx"] = group_of.int()
    return parts, (codes - zeros[:, group_of]) * scales.float()[:, group_of]


def mxfp4_folders(folder: Path, target: Path) -> tuple[Path, Path]:
    """Write a folder of gpt-oss with experts in OpenAI's MXFP4, and one with them as floats."""
    stored = load_file(folder / "model.safetensors")
    plain = dict(stored)
    for name in [name for name in stored if name.endswith("experts.gate_up_proj")]:
        for stack in (name, name.replace("gate_up", "down")):
            columns = stored.pop(stack).float().transpose(1, 2)
            wide = columns.reshape(*columns.shape[:2], -1, 32)
            exponents = torch.log2(wide.abs().amax(-1) / 6).ceil()
            scaled = wide / torch.exp2(exponents)[..., None]
            codes = (scaled[..., None] - torch.tensor(MXFP4)).abs().argmin(-1)
            stored[f"{stack}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).byte()
            stored[f"{stack}_scales"] = (exponents + 127).byte()
            numbers = torch.tensor(MXFP4)[codes] * torch.exp2(exponents)[..., None]
            plain[stack] = numbers.flatten(2).transpose(1, 2).contiguous()
    made = target / "mxfp4", target / "plain"
    for path, weights in zip(made, (stored, plain), strict=True):
        shutil.copytree(folder, path)
        save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    kept = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    said = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (made[0] / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return made


def compressed(form: str, bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    """``quantization_config`` of compressed-tensors."""
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True} | more
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def _fp8_config(**more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"} | more


def _gptq_config(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False} | more


CONFIGS: dict[str, dict[str, Any]] = {
    "fp8-tensor": _fp8_config(activation_scheme="static", ignored_layers=["lm_head"]),
    "fp8-channel": _fp8_config(modules_to_not_convert=["lm_head"]),
    "fp8-block": _fp8_config(weight_block_size=[16, 32]),
    "fp8-uneven": _fp8_config(weight_block_size=[24, 48]),
    "fp8-block-64": _fp8_config(weight_block_size=[48, 64]),
    "ct-tensor": compressed("float-quantized", 8, "float", "tensor"),
    "ct-channel": compressed("float-quantized", 8, "float", "channel"),
    "ct-block": compressed("float-quantized", 8, "float", "block", block_structure=[16, 32]),
    "ct-int8": compressed("int-quantized", 8, "int", "channel"),
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    "awq-whole": {"quant_method": "awq", "bits": 4, "group_size": -1, "zero_point": True},
    "gptq": _gptq_config(sym=True),
    "gptq-asymmetric": _gptq_config(sym=False),
    "gptq-act-order": _gptq_config(sym=False, desc_act=True),
    "gptq-v2": _gptq_config(sym=False, checkpoint_format="gptq_v2"),
    "gptq-8": _gptq_config(bits=8, sym=True),
    "gptq-2": _gptq_config(bits=2, sym=False),
    "packed": compressed("pack-quantized", 4, "int", "group", group_size=32),
    "packed-channel": compressed("pack-quantized", 8, "int", "channel"),
    "packed-asymmetric": compressed(
        "pack-quantized", 4, "int", "group", group_size=32, symmetric=False
    ),
    "packed-act-order": compressed(
        "pack-quantized", 4, "int", "group", group_size=16, actorder="group"
    ),
}


def quantized_module(kind: str, weight: Tensor, seed: int) -> Parts:
    """Tensors of one quantised linear layer, and the weight that they represent."""
    rows, columns = weight.shape
    config = CONFIGS[kind]
    blocks = {
        "fp8-tensor": ((rows, columns), "weight_scale"),
        "fp8-channel": ((1, columns), "weight_scale"),
        "fp8-block": ((16, 32), "weight_scale_inv"),
        "fp8-uneven": ((24, 48), "weight_scale_inv"),
        "fp8-block-64": ((48, 64), "weight_scale_inv"),
        "ct-tensor": ((rows, columns), "weight_scale"),
        "ct-channel": ((1, columns), "weight_scale"),
        "ct-block": ((16, 32), "weight_scale"),
    }
    if kind in blocks:
        parts, plain = fp8(weight, *blocks[kind])
        if kind == "fp8-tensor":  # a scalar, and one for static activations
            parts |= {"weight_scale": parts["weight_scale"].view(()), "input_scale": torch.ones(1)}
        return parts, plain
    if kind == "ct-int8":
        scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
        codes = (weight / scales.float()).round().clamp(-128, 127)
        return {"weight": codes.char(), "weight_scale": scales}, codes * scales.float()
    if kind.startswith("awq"):
        return awq(weight, seed, columns if kind == "awq-whole" else 32)
    if kind.startswith("gptq"):
        return gptq(
            weight,
            seed,
            bits=config["bits"],
            symmetric=config["sym"],
            act_order=config["desc_act"],
            v1=config.get("checkpoint_format") != "gptq_v2",
        )
    said = config["config_groups"]["group_0"]["weights"]
    return packed(
        weight,
        seed,
        bits=said["num_bits"],
        group=said.get("group_size", -1),
        symmetric=said["symmetric"],
        act_order="actorder" in said,
    )


def quantized_folders(folder: Path, target: Path, kind: str) -> tuple[Path, Path]:
    """Write a folder with quantised linear layers, and one with the same weights as floats."""
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for seed, (name, weight) in enumerate(load_file(folder / "model.safetensors").items()):
        stored[name] = plain[name] = weight
        if ".layers." in name and weight.dim() == 2 and "visual" not in name:
            parts, plain[name] = quantized_module(kind, weight.float(), seed)
            plain[name] = plain[name].to(weight.dtype)
            del stored[name]
            module = name.removesuffix("weight")
            stored |= {f"{module}{part}": x.contiguous() for part, x in parts.items()}
    made = target / f"{folder.name}-{kind}", target / f"{folder.name}-{kind}-plain"
    for path, weights in zip(made, (stored, plain), strict=True):
        shutil.copytree(folder, path)
        save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = CONFIGS[kind]
    (made[0] / "config.json").write_text(json.dumps(config))
    return made

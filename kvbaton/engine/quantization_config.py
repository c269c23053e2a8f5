"""What ``quantization_config`` of ``config.json`` says about stored weights. Needs no torch.

Formats: ``fp8`` of DeepSeek, Qwen and Mistral, ``compressed-tensors`` of llm-compressor, ``awq`` of
AutoAWQ, ``gptq`` of AutoGPTQ and GPTQModel, ``mxfp4`` of gpt-oss.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from kvbaton.errors import ConfigError, ModelError

Layout = Literal["fp8", "int8", "awq", "gptq", "packed", "mxfp4"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How a checkpoint stores the weights of its linear layers.

    Attributes:
        layout: ``fp8`` (e4m3) and ``int8`` are 8-bit numbers with separate scales, ``packed`` is
            ``pack-quantized`` of compressed-tensors, the others are the formats of that name.
        bits: Bits per number.
        block: Rows and columns that share a scale of 8-bit numbers; None for one scale per row, or
            one in total.
        group_size: Number of inputs that share a scale in ``awq``, ``gptq`` and ``packed``; None
            for all inputs.
        zero_offset: Number to add to stored zero points: 1 for GPTQ's first format.
        ignored: Modules that are not quantised; ``re:`` marks a pattern.
        online: Whether floats are stored, to be quantised while they are loaded.
    """

    layout: Layout
    bits: int
    block: tuple[int, int] | None = None
    group_size: int | None = None
    zero_offset: int = 0
    ignored: tuple[str, ...] = ()
    online: bool = False

    def ignores(self, module: str) -> bool:
        """Whether a module, such as ``model.layers.0.mlp.down_proj``, is not quantised."""
        # Our names omit the name of a multimodal checkpoint's language model.
        stored = (module, module.replace("model.", "model.language_model.", 1))
        for name in self.ignored:
            # A module, all below it, or (in AutoAWQ) all with a path component of that name.
            if name.startswith("re:"):
                if any(re.match(name.removeprefix("re:"), each) for each in stored):
                    return True
            elif any(f".{name}." in f".{each}." for each in stored):
                return True
        return False


class _FP8(msgspec.Struct):
    fmt: str = "e4m3"
    weight_block_size: tuple[int, int] | None = None
    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None

    def read(self) -> Quantization:
        if self.fmt not in ("e4m3", "float8_e4m3fn"):
            raise _refusal(f"fmt {self.fmt!r} is unsupported; need 'e4m3'")
        ignored = (*(self.modules_to_not_convert or ()), *(self.ignored_layers or ()))
        block = _checked_block(self.weight_block_size, "weight_block_size")
        return Quantization(layout="fp8", bits=8, block=block, ignored=ignored)


class _AWQ(msgspec.Struct):
    bits: int
    group_size: int
    version: str = "gemm"
    modules_to_not_convert: list[str] | None = None

    def read(self) -> Quantization:
        if self.bits != 4 or self.version.lower() != "gemm":
            raise _refusal(
                f"awq of {self.bits} bits, version {self.version!r} is unsupported; "
                "need 4 and 'gemm'"
            )
        ignored = tuple(self.modules_to_not_convert or ())
        size = _checked_group(self.group_size)
        return Quantization(layout="awq", bits=4, group_size=size, ignored=ignored)


class _GPTQ(msgspec.Struct):
    bits: int
    group_size: int
    checkpoint_format: str = "gptq"
    dynamic: dict[str, Any] | None = None

    def read(self) -> Quantization:
        _check_bits(self.bits, "bits")
        if self.checkpoint_format not in ("gptq", "gptq_v2"):
            raise _refusal(
                f"checkpoint_format {self.checkpoint_format!r} is unsupported; "
                "need 'gptq' or 'gptq_v2'"
            )
        if self.dynamic:
            raise _refusal("dynamic (other settings for some modules) is unsupported")
        return Quantization(
            layout="gptq",
            bits=self.bits,
            group_size=_checked_group(self.group_size),
            zero_offset=int(self.checkpoint_format == "gptq"),
        )


class _Weights(msgspec.Struct):
    num_bits: int
    type: str
    strategy: str
    symmetric: bool = True
    group_size: int | None = None
    block_structure: tuple[int, int] | None = None


class _Group(msgspec.Struct):
    weights: _Weights | None = None
    targets: list[str] = []


class _CompressedTensors(msgspec.Struct):
    config_groups: dict[str, _Group]
    format: str = "dense"
    ignore: list[str] = []
    transform_config: dict[str, Any] | None = None

    def read(self) -> Quantization:
        if self.transform_config:
            raise _refusal("transform_config (rotations beside the weights) is unsupported")
        kinds = [group.weights for group in self.config_groups.values()]
        if not kinds or kinds[0] is None or any(kind != kinds[0] for kind in kinds):
            raise _refusal("config_groups must say one and the same of all weights")
        weights, ignored = kinds[0], tuple(self.ignore)
        if self.format == "pack-quantized" and weights.type == "int":
            _check_bits(weights.num_bits, "num_bits")
            if weights.strategy not in ("channel", "group"):
                raise _refusal(f"strategy {weights.strategy!r} of packed weights is unsupported")
            size = _checked_group(weights.group_size or -1)
            return Quantization(
                layout="packed", bits=weights.num_bits, group_size=size, ignored=ignored
            )
        known = {
            "float-quantized": "float",
            "int-quantized": "int",
            "naive-quantized": weights.type,
        }
        if known.get(self.format) != weights.type or weights.num_bits != 8:
            raise _refusal(
                f"format {self.format!r} of {weights.type} with {weights.num_bits} bits is "
                "unsupported; supported: float-quantized and int-quantized of 8, pack-quantized "
                "of 2, 4 or 8"
            )
        if not weights.symmetric:
            raise _refusal("8-bit weights that are not symmetric are unsupported")
        if weights.strategy not in ("tensor", "channel", "block"):
            raise _refusal(f"strategy {weights.strategy!r} of 8-bit weights is unsupported")
        block = _checked_block(weights.block_structure, "block_structure")
        if (weights.strategy == "block") != (block is not None):
            raise _refusal(f"strategy {weights.strategy!r} with block_structure {block}")
        layout: Layout = "fp8" if weights.type == "float" else "int8"
        return Quantization(layout=layout, bits=8, block=block, ignored=ignored)


class _MXFP4(msgspec.Struct):
    modules_to_not_convert: list[str] | None = None

    def read(self) -> Quantization:
        ignored = tuple(self.modules_to_not_convert or ())
        return Quantization(layout="mxfp4", bits=4, group_size=32, ignored=ignored)


FORMATS: Mapping[str, type[_FP8 | _CompressedTensors | _AWQ | _GPTQ | _MXFP4]] = {
    "fp8": _FP8,
    "compressed-tensors": _CompressedTensors,
    "awq": _AWQ,
    "gptq": _GPTQ,
    "mxfp4": _MXFP4,
}
ONLINE = Quantization(layout="fp8", bits=8, online=True)
"""Quantisation of floats by ``--quantization fp8``: one scale per row."""


def read_quantization(
    content: Mapping[str, Any] | None, asked: Literal["fp8"] | None = None
) -> Quantization | None:
    """Read the entry; None if there is none.

    Args:
        content: ``quantization_config``.
        asked: ``--quantization``: how to quantise floats.

    Raises:
        ConfigError: The entry is broken, its format is not supported, or differs from `asked`.
    """
    if not content:
        return ONLINE if asked else None
    method: Any = content.get("quant_method")
    if method not in FORMATS:
        raise _refusal(f"quant_method {method!r} is unsupported; supported: {', '.join(FORMATS)}")
    try:
        found = msgspec.convert(content, FORMATS[method]).read()
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from error
    if asked not in (None, found.layout):
        raise ConfigError(
            "--quantization", f"the checkpoint is quantised as {found.layout} already; leave it out"
        )
    return found


def _refusal(what: str) -> ConfigError:
    return ModelError(f"config.json: quantization_config: {what}")


def _checked_block(block: tuple[int, int] | None, field: str) -> tuple[int, int] | None:
    if block is not None and min(block) < 1:
        raise _refusal(f"{field} {list(block)} must be positive")
    return block


def _checked_group(size: int) -> int | None:
    """Check a group size; -1 is a single group."""
    if size == -1:
        return None
    if size < 1:
        raise _refusal(f"group_size {size} must be positive, or -1")
    return size


def _check_bits(bits: int, field: str) -> None:
    if bits not in (2, 4, 8):
        raise _refusal(f"{field} {bits} is unsupported; need 2, 4 or 8")

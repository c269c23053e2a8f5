"""How weights of linear layers are stored and multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from kvbaton.engine.quantization_config import Quantization
from kvbaton.errors import ConfigError
from kvbaton.kernels.block_scaled_linear import GROUPS, block_scaled_linear
from kvbaton.kernels.quantize_fp8 import quantize_fp8
from kvbaton.kernels.silu_and_mul import silu_and_mul
from kvbaton.kernels.skinny_linear import Workspace, skinny_linear, wins

FP8 = torch.float8_e4m3fn
SQUARE = 128
"""Side of a weight's blocks with one scale each for which the library has a matrix product."""


def new_weight(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A weight to be filled, on torch's default device, in its default dtype if none is given."""
    empty = torch.empty(shape) if dtype is None else torch.empty(shape, dtype=dtype)
    return nn.Parameter(empty, requires_grad=False)


@cache
def _workspace(device: torch.device) -> Workspace:
    """Workspace of all products on the stream that models run on."""
    return Workspace(device)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``."""
    if bias is None and x.is_cuda:
        return skinny_linear(x, weight, _workspace(x.device))
    if bias is None and x.dtype == torch.float32 and 8 <= len(x) <= 64:
        # For few rows, the CPU's BLAS is a third faster if they are the columns of its input.
        return torch.mm(weight, x.t()).t().contiguous()
    return F.linear(x, weight, bias)


class LinearMethod:
    """How a linear layer stores and multiplies its weight, [rows, columns]; named as in vLLM.

    This class is for a weight in the model's dtype.
    """

    def new_weight(self, rows: int, columns: int) -> tuple[nn.Parameter, nn.Parameter | None]:
        """A weight to be filled, and its scales, [rows, groups of columns], if it has scales."""
        return new_weight(rows, columns), None

    def product(
        self, x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Multiply: [tokens, columns] to [tokens, rows]."""
        return product(x, weight, bias)

    def gate(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """silu(gate) * up of the product, if one launch can compute it; else None."""
        if bias is None and x.is_cuda:
            return skinny_linear(x, weight, _workspace(x.device), gated=True)
        return None

    def gated_product(
        self, gate_up: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Multiply silu(gate) * up: [tokens, 2 * columns] to [tokens, rows]."""
        return self.product(silu_and_mul(gate_up), weight, scales, bias)


class FP8Method(LinearMethod):
    """A weight in FP8 with one scale per row, or per `group` columns of a row.

    Inputs are quantised likewise, with one scale per token or per group of it, from their maximum;
    inputs of few tokens stay as they are (see `skinny_linear`).

    Args:
        group: Number of columns that share a scale; None for a whole row.
        square: Whether each block of `SQUARE` x `SQUARE` weights has a single scale.
    """

    def __init__(self, group: int | None, *, square: bool = False) -> None:
        self.group, self._square = group, square
        self._block_scales: Tensor | None = None

    @override
    def new_weight(self, rows: int, columns: int) -> tuple[nn.Parameter, nn.Parameter | None]:
        groups = -(-columns // (self.group or columns))
        scales = new_weight(rows, groups, dtype=torch.float32)
        return new_weight(rows, columns, dtype=FP8), scales

    @override
    def product(
        self, x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        assert scales is not None
        if wins(len(x), weight, scales):
            out = skinny_linear(x, weight, _workspace(x.device), scales)
            return out if bias is None else out + bias
        return self._quantised_product(x, weight, scales, bias, gated=False)

    @override
    def gate(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        return None

    @override
    def gated_product(
        self, gate_up: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        assert scales is not None
        if wins(len(gate_up), weight, scales):
            return super().gated_product(gate_up, weight, scales, bias)
        return self._quantised_product(gate_up, weight, scales, bias, gated=True)

    def _quantised_product(
        self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, *, gated: bool
    ) -> Tensor:
        group = self.group or weight.shape[1]
        numbers, x_scales = quantize_fp8(x, group, for_blocks=self._square, gated=gated)
        if wins(len(x), weight, scales, quantised=True):
            out = skinny_linear(
                numbers[: len(x)], weight, _workspace(x.device), scales,
                x_scales=x_scales, dtype=x.dtype,
            )  # fmt: skip
        elif self._square:
            out = F.scaled_mm(
                numbers, weight.t(),
                x_scales, F.ScalingType.BlockWise1x128,
                self._scales_of_blocks(scales), F.ScalingType.BlockWise128x128,
                output_dtype=x.dtype,
            )[: len(x)]  # fmt: skip
        elif self.group is None:
            # With scales per row and column, the output is bfloat16 only. Others, too, serve FP8
            # with sums of 14 bits within the tensor cores.
            out = torch._scaled_mm(
                numbers, weight.t(), x_scales, scales.t(),
                out_dtype=torch.bfloat16, use_fast_accum=True,
            ).to(x.dtype)  # fmt: skip
        else:
            out = block_scaled_linear(numbers, x_scales, weight, scales, group, x.dtype)
        return out if bias is None else out + bias

    def _scales_of_blocks(self, scales: Tensor) -> Tensor:
        """One scale per block, [groups, blocks of rows], in the layout of `scaled_mm`."""
        if self._block_scales is None:
            of_blocks = scales[::SQUARE]
            padded = F.pad(of_blocks, (0, -of_blocks.shape[1] % 4))  # to a multiple of 4 groups
            self._block_scales = padded.contiguous().t()
        return self._block_scales


def has_fp8_products() -> bool:
    """Whether the default device multiplies FP8, with activations of 16 bits."""
    return _weights_go_to((8, 9), torch.bfloat16, torch.float16)


def has_mxfp4_products() -> bool:
    """Whether the default device can read MXFP4 weights in products, for bfloat16 activations."""
    return _weights_go_to((8, 0), torch.bfloat16)


def _weights_go_to(capability: tuple[int, int], *dtypes: torch.dtype) -> bool:
    """Whether new weights are on a GPU of this compute capability or more, in one of the dtypes."""
    where = torch.empty(0)
    if where.dtype not in dtypes or where.device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(where.device) >= capability


def keeps_mxfp4(quantization: Quantization | None, name: str) -> bool:
    """Whether the experts of this name stay in MXFP4."""
    if quantization is None or quantization.layout != "mxfp4" or not has_mxfp4_products():
        return False
    return not quantization.ignores(name)


def expert_run(
    quantization: Quantization | None, names: Sequence[str], columns: int, start: int
) -> int | None:
    """Number of inputs that share a scale of an expert's FP8 weight; None for float weights.

    If ranks split a block, each part has a scale.

    Args:
        quantization: Quantization of the checkpoint.
        names: Modules of the checkpoint that form the weight.
        columns: Number of the weight's columns on this rank.
        start: First of these columns in the whole weight.
    """
    if quantization is None or quantization.layout != "fp8" or not has_fp8_products():
        return None
    run = columns if quantization.block is None else gcd(quantization.block[1], start, columns)
    known = columns % 16 == 0 if run == columns else run in GROUPS or run % max(GROUPS) == 0
    return None if any(map(quantization.ignores, names)) or not known else run


def linear_method(
    quantization: Quantization | None,
    names: Sequence[str],
    rows: int,
    columns: int,
    total_columns: int,
    *,
    spans: Sequence[tuple[int, int]],
) -> LinearMethod:
    """The method of a layer: FP8 if the weights are and this device multiplies it.

    Args:
        quantization: Quantization of the checkpoint.
        names: Modules of the checkpoint that form the layer.
        rows: Number of the weight's rows on this rank.
        columns: Number of the weight's columns on this rank.
        total_columns: Number of columns of the whole weight.
        spans: Per module, first row and number of rows on this rank.

    Raises:
        ConfigError: Ranks split the columns inside of blocks that share a scale, or online FP8 was
            requested where it is impossible.
    """
    if quantization is None or quantization.layout != "fp8":
        return LinearMethod()
    if not has_fp8_products():
        if quantization.online:
            raise ConfigError(
                "--quantization",
                "'fp8' needs a GPU of compute capability 8.9 or more, and --dtype bfloat16 or "
                "float16; leave it out",
            )
        return LinearMethod()
    group = None if quantization.block is None else quantization.block[1]
    whole = rows % 16 == 0 and columns % 16 == 0  # required by FP8 products
    if any(map(quantization.ignores, names)) or not whole or group not in (None, *GROUPS):
        return LinearMethod()
    if group is not None and columns != total_columns and columns % group:
        raise ConfigError(
            "--tensor-parallel-size",
            f"{total_columns // columns} ranks split the {total_columns} inputs of {names[0]!r} "
            f"inside of blocks of {group}, which share a scale; "
            f"give a number that divides {total_columns // group}",
        )
    even = all(number % SQUARE == 0 for span in spans for number in span)
    square = even and columns % SQUARE == 0 and quantization.block == (SQUARE, SQUARE)
    where = torch.empty(0).device  # the library supports this for Hopper only
    hopper = where.type == "cuda" and torch.cuda.get_device_capability(where) == (9, 0)
    return FP8Method(group, square=square and hopper)

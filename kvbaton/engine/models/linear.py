"""How the weight of a linear layer is held, and inputs are multiplied with it."""

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
"""Side of the blocks of a weight that share a scale for which the library has a product."""


def new_weight(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A weight to be filled, on the device, and of the dtype if none is named, that are set."""
    empty = torch.empty(shape) if dtype is None else torch.empty(shape, dtype=dtype)
    return nn.Parameter(empty, requires_grad=False)


@cache
def _workspace(device: torch.device) -> Workspace:
    """Scratch of all products on the stream on which models run."""
    return Workspace(device)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``."""
    if bias is None and x.is_cuda:
        return skinny_linear(x, weight, _workspace(x.device))
    if bias is None and x.dtype == torch.float32 and 8 <= len(x) <= 64:
        # The CPU's BLAS takes a third less time for few rows when they are its columns.
        return torch.mm(weight, x.t()).t().contiguous()
    return F.linear(x, weight, bias)


class LinearMethod:
    """What a linear layer does with its weight, [rows, columns]; as vLLM's of that name.

    Here, a weight in the model's dtype.
    """

    def new_weight(self, rows: int, columns: int) -> tuple[nn.Parameter, nn.Parameter | None]:
        """A weight to be filled, and its scales, [rows, groups of columns], if it has any."""
        return new_weight(rows, columns), None

    def product(
        self, x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """[tokens, columns] to [tokens, rows]."""
        return product(x, weight, bias)

    def gate(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """silu(gate) * up of the product, gate and up, if that may be one launch; else None."""
        if bias is None and x.is_cuda:
            return skinny_linear(x, weight, _workspace(x.device), gated=True)
        return None

    def gated_product(
        self, gate_up: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """The product of silu(gate) * up: [tokens, 2 * columns] to [tokens, rows]."""
        return self.product(silu_and_mul(gate_up), weight, scales, bias)


class FP8Method(LinearMethod):
    """A weight in FP8 with a scale for each row, or for each run of `group` columns of a row.

    Inputs are quantised likewise, a scale a token or for each of its runs, from their own maximum;
    those of few tokens stay as they are (see `skinny_linear`).

    Args:
        group: see above.
        square: all rows of each `SQUARE` times `SQUARE` block of the weight have the same scale.
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
            # With scales of rows and columns it gives bfloat16 only. Sums of 14 bits within the
            # tensor cores are what others serve FP8 with, too.
            out = torch._scaled_mm(
                numbers, weight.t(), x_scales, scales.t(),
                out_dtype=torch.bfloat16, use_fast_accum=True,
            ).to(x.dtype)  # fmt: skip
        else:
            out = block_scaled_linear(numbers, x_scales, weight, scales, group, x.dtype)
        return out if bias is None else out + bias

    def _scales_of_blocks(self, scales: Tensor) -> Tensor:
        """One for each block, [groups, blocks of rows], as `scaled_mm` takes them."""
        if self._block_scales is None:
            of_blocks = scales[::SQUARE]
            padded = F.pad(of_blocks, (0, -of_blocks.shape[1] % 4))  # groups in fours
            self._block_scales = padded.contiguous().t()
        return self._block_scales


def has_fp8_products() -> bool:
    """Whether where new weights go FP8 can be multiplied, for activations of 16 bits."""
    return _weights_go_to((8, 9), torch.bfloat16, torch.float16)


def has_mxfp4_products() -> bool:
    """Whether where new weights go MXFP4 can be widened as it is read, for bfloat16 activations."""
    return _weights_go_to((8, 0), torch.bfloat16)


def _weights_go_to(capability: tuple[int, int], *dtypes: torch.dtype) -> bool:
    """Whether new ones do to a GPU of this compute capability or more, in one of these dtypes."""
    where = torch.empty(0)
    if where.dtype not in dtypes or where.device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(where.device) >= capability


def keeps_mxfp4(quantization: Quantization | None, name: str) -> bool:
    """Whether a checkpoint's experts of this name stay in MXFP4."""
    if quantization is None or quantization.layout != "mxfp4" or not has_mxfp4_products():
        return False
    return not quantization.ignores(name)


def expert_run(
    quantization: Quantization | None, names: Sequence[str], columns: int, start: int
) -> int | None:
    """Inputs that share a scale of an expert's weight in FP8; None for weights that are floats.

    Where ranks split a block, its parts have a scale each.

    Args:
        quantization: of the checkpoint.
        names: the checkpoint's modules that the weight is made of.
        columns: of the weight that this rank holds.
        start: the first of them in the whole weight.
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
    """The method of a layer: FP8 where the weights are and this device multiplies it.

    Args:
        quantization: of the checkpoint.
        names: the checkpoint's modules that the layer is made of.
        rows: of the weight that this rank holds.
        columns: likewise.
        total_columns: of the whole weight.
        spans: first row, and number of rows, that this rank holds of each module.

    Raises:
        ConfigError: ranks split the columns inside of blocks that share a scale, or FP8 is asked
            for where it can't be.
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
    whole = rows % 16 == 0 and columns % 16 == 0  # what FP8 products take
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
    where = torch.empty(0).device  # the library has it for Hopper only
    hopper = where.type == "cuda" and torch.cuda.get_device_capability(where) == (9, 0)
    return FP8Method(group, square=square and hopper)

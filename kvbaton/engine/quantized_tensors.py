"""Weights of a checkpoint by their usual names, dequantised while they are read.

`find_tensor` returns ``X.weight``, [rows (outputs), columns (inputs)], in whatever form it is
stored; only the requested part is read and computed. Everything is float32 until it is copied.

| layout | stored | a weight |
| --- | --- | --- |
| ``fp8``, ``int8`` | ``weight`` [rows, columns], ``weight_scale`` or ``weight_scale_inv``: one, | |
| | one per row, or one per block | ``w * scale`` |
| ``awq`` | ``qweight`` [columns, rows / 8], ``qzeros`` [groups, rows / 8], int32; | |
| | ``scales`` [groups, rows] | ``(q - zero) * scale`` |
| ``gptq`` | ``qweight`` [columns / n, rows], ``qzeros`` [groups, rows / n], int32; | |
| | ``scales`` [groups, rows]; ``g_idx`` [columns], a column's group | ``(q - zero - 1) * scale`` |
| ``packed`` | ``weight_packed`` [rows, columns / n] int32, ``weight_scale`` [rows, groups]; | |
| | perhaps ``weight_zero_point`` [rows / n, groups] and ``weight_g_idx`` [columns] | likewise |
| ``mxfp4`` | ``X_blocks`` uint8 [..., rows, groups, 16], ``X_scales`` uint8 [..., rows, groups] | |

An int32 contains n = 32 / bits numbers, the first in its lowest bits; AWQ has another order.
``packed`` adds 2^(bits - 1) to numbers and zero points, so that they are not negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from kvbaton.engine.quantization_config import Quantization
from kvbaton.errors import ConfigError, ModelError
from kvbaton.kernels.mxfp4 import GROUP, MOST

T = TypeVar("T")

FLOATS = ("F32", "F16", "BF16")
"""dtypes of weights that are not quantised, by safetensors' names."""

SCALED = {"fp8": "F8_E4M3", "int8": "I8"}
SCALES = ("weight_scale", "weight_scale_inv")
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of e2m1 numbers, by their bits."""


class Stored(Protocol):
    """A tensor of a checkpoint; `read` reads it from its file, or computes it."""

    @property
    def where(self) -> str:
        """Its name and file, for errors."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    @property
    def dtype(self) -> str:
        """dtype, by safetensors' names."""

    def read(self, *index: slice) -> Tensor:
        """Read a part; axes without an index are read as a whole."""


Tensors = Mapping[str, Stored]
"""Tensors of a checkpoint, by name."""


def find_tensor(tensors: Tensors, name: str, quantization: Quantization | None) -> Stored:
    """The tensor of a name as floats.

    Args:
        tensors: Tensors that the checkpoint stores.
        name: Name in a checkpoint of floats.
        quantization: What ``config.json`` says about the stored weights.

    Raises:
        ConfigError: It is not stored, or a part of it is missing, or has another dtype or shape
            than its format requires; names it.
    """
    stored = tensors.get(name)
    layout = quantization.layout if quantization else ""
    if stored is not None and stored.dtype in FLOATS:
        return stored
    if stored is not None:
        if quantization is None or SCALED.get(layout) != stored.dtype:
            raise ModelError(
                f"{stored.where} has dtype {stored.dtype}, which config.json's "
                f"quantization_config does not account for; need {', '.join(FLOATS)}"
            )
        return ScaledTensor(tensors, name, quantization)
    if quantization is not None and layout == "mxfp4" and f"{name}_blocks" in tensors:
        return MXFP4Tensor(tensors, name)
    if quantization is not None and layout in PACKED:
        module = name.removesuffix(".weight")
        if f"{module}.{PACKED[layout].codes}" in tensors:
            return PackedTensor(tensors, module, quantization)
    raise _missing(name)


def _matrix(tensors: Tensors, name: str) -> Stored:
    """A stored matrix. Raises `ConfigError` if it is missing, or not a matrix."""
    stored = tensors.get(name)
    if stored is None:
        raise _missing(name)
    if len(stored.shape) != 2:
        raise ModelError(f"{stored.where} has shape {list(stored.shape)}, not 2 axes")
    return stored


def _missing(name: str) -> ConfigError:
    return ModelError(f"the checkpoint has no tensor {name!r}")


def _part(tensors: Tensors, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> Stored:
    """A stored tensor that must have this shape and one of these dtypes.

    Raises:
        ConfigError: It is missing, or has others.
    """
    stored = tensors.get(name)
    if stored is None:
        raise _missing(name)
    if stored.dtype not in dtypes:
        raise ModelError(f"{stored.where} has dtype {stored.dtype}; need {' or '.join(dtypes)}")
    if stored.shape != shape:
        raise ModelError(f"{stored.where} has shape {list(stored.shape)}; need {list(shape)}")
    return stored


def _bounds(shape: tuple[int, ...], index: tuple[slice, ...]) -> list[tuple[int, int]]:
    """Start and end of the part along each axis."""
    whole = (slice(None),) * (len(shape) - len(index))
    return [at.indices(size)[:2] for size, at in zip(shape, index + whole, strict=True)]


def _blocks(start: int, end: int, size: int) -> slice:
    """The blocks of a size that a range overlaps."""
    return slice(start // size, -(-end // size))


def _spread(x: Tensor, dim: int, size: int, start: int, end: int) -> Tensor:
    """Repeat values of the blocks that a range overlaps, one per element; a single one is kept."""
    if x.shape[dim] == 1:
        return x
    wide = x.repeat_interleave(size, dim)
    return wide.narrow(dim, start % size, end - start)


# --- 8-bit numbers with scales ---


class ScaledTensor:
    """8-bit numbers times the scales of their blocks.

    Args:
        tensors: Tensors of the checkpoint.
        name: Name of the numbers, ``X.weight``.
        quantization: Quantization of the checkpoint.

    Raises:
        ConfigError: The scales are missing, or do not fit the weight or the format.
    """

    def __init__(self, tensors: Tensors, name: str, quantization: Quantization) -> None:
        self._stored, module = _matrix(tensors, name), name.removesuffix(".weight")
        found = [tensors[f"{module}.{kind}"] for kind in SCALES if f"{module}.{kind}" in tensors]
        if not found:
            raise _missing(f"{module}.{SCALES[quantization.block is not None]}")
        self._scales = found[0]
        if self._scales.dtype not in (*FLOATS, "F8_E8M0"):
            raise ModelError(f"{self._scales.where} has dtype {self._scales.dtype}; need F32")
        self.where, self.shape, self.dtype = self._stored.where, self._stored.shape, "F32"
        rows, columns = self.shape
        blocks = [quantization.block] if quantization.block else [(1, columns), (rows, columns)]
        grids = [(-(-rows // height), -(-columns // width)) for height, width in blocks]
        for block, grid in zip(blocks, grids, strict=True):
            # A single scale is stored as [], [1] or [1, 1], one per row as [rows] or [rows, 1].
            if [x for x in self._scales.shape if x > 1] == [x for x in grid if x > 1]:
                self._block, self._grid = block, grid
                return
        raise ModelError(
            f"{self._scales.where} has shape {list(self._scales.shape)}; a weight of "
            f"{list(self.shape)} needs {' or '.join(str(list(grid)) for grid in grids)}"
        )

    def read(self, *index: slice) -> Tensor:
        """See `Stored.read`."""
        rows, columns = _bounds(self.shape, index)
        scales = self._scales_of(rows, columns)
        return self._stored.read(*index).float() * self._spread(scales, columns)

    def read_parts(self, *index: slice, runs: int) -> tuple[Tensor, Tensor]:
        """Read stored numbers and their scales: float32 [rows, 1 or runs].

        Args:
            *index: The part.
            runs: Number of equal runs of its columns, each within a block; or of its blocks.
        """
        rows, columns = _bounds(self.shape, index)
        scales = self._scales_of(rows, columns)
        if scales.shape[1] not in (1, runs):
            scales = self._spread(scales, columns)[:, :: (columns[1] - columns[0]) // runs]
        return self._stored.read(*index), scales

    def _scales_of(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """Scales of a range of the weight: float32 [rows, column blocks]."""
        height, width = self._block
        grid = self._scales.read().float().reshape(self._grid)
        part = grid[_blocks(*rows, height), _blocks(*columns, width)]
        return _spread(part, 0, height, *rows).expand(rows[1] - rows[0], -1)

    def _spread(self, scales: Tensor, columns: tuple[int, int]) -> Tensor:
        return _spread(scales, 1, self._block[1], *columns)


# --- several numbers per int32 ---


class PackedLayout(NamedTuple):
    """How a format stores a weight, [rows, columns].

    Attributes:
        codes: Name of the numbers, several per int32.
        zeros: Name of the zero points, [rows, groups], several per int32 along the rows.
        scales: Name of the scales, [rows, groups].
        order: Name of each column's group; empty if groups are consecutive.
        turned: Whether all matrices are stored transposed: [columns, rows] and [groups, rows].
        dim: Axis along which an int32 contains numbers: 0 if they are of several rows.
        places: Place in an int32 of the first number, the second, ...; empty if ascending.
    """

    codes: str
    zeros: str
    scales: str
    order: str
    turned: bool
    dim: int
    places: tuple[int, ...] = ()

    def oriented(self, shape: Sequence[T]) -> tuple[T, ...]:
        """Order rows and columns as stored; and back."""
        return tuple(reversed(shape) if self.turned else shape)

    def unpack(self, packed: Tensor, bits: int, dim: int) -> Tensor:
        """Unpack int32s, [rows, columns], to their numbers of `bits` along `dim`; int32."""
        places = torch.tensor(self.places or range(32 // bits), device=packed.device)
        shifts = (places * bits).int().view(-1, *(1,) * (1 - dim))
        return ((packed.unsqueeze(dim + 1) >> shifts) & (1 << bits) - 1).flatten(dim, dim + 1)


_QUANTIZER = "qweight", "qzeros", "scales"
PACKED = {
    "awq": PackedLayout(*_QUANTIZER, "", turned=True, dim=0, places=(0, 4, 1, 5, 2, 6, 3, 7)),
    "gptq": PackedLayout(*_QUANTIZER, "g_idx", turned=True, dim=1),
    "packed": PackedLayout(
        "weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx", turned=False, dim=1
    ),
}


class PackedTensor:
    """Numbers minus their zero points, times scales.

    AWQ is activation-aware weight quantisation (Lin et al., arXiv 2306.00978), in AutoAWQ's
    ``gemm``. GPTQ (Frantar et al., arXiv 2210.17323) is stored as by AutoGPTQ and GPTQModel: the
    first format stores ``zero - 1``; 1 is added without wrapping around, as in exllama and vLLM.
    ``pack-quantized`` of compressed-tensors stores no zero points if they are in the middle.
    """

    def __init__(self, tensors: Tensors, module: str, quantization: Quantization) -> None:
        form, bits = PACKED[quantization.layout], quantization.bits
        self._form, self._bits, self._offset = form, bits, quantization.zero_offset
        codes, each = _matrix(tensors, f"{module}.{form.codes}"), 32 // bits
        shape = [*form.oriented(codes.shape)]
        shape[form.dim] *= each
        if f"{module}.weight_shape" in tensors:
            said = _part(tensors, f"{module}.weight_shape", ("I64", "I32"), (2,))
            shape = said.read().tolist()
        rows, columns = shape
        shape[form.dim] = -(-shape[form.dim] // each)
        self._group = quantization.group_size or columns
        self._groups = -(-columns // self._group)

        def part(name: str, dtypes: tuple[str, ...], *shape: int) -> Stored:
            return _part(tensors, f"{module}.{name}", dtypes, form.oriented(shape))

        self._codes = part(form.codes, ("I32",), *shape)
        self._zeros = self._order = None
        if quantization.layout != "packed" or f"{module}.{form.zeros}" in tensors:
            self._zeros = part(form.zeros, ("I32",), -(-rows // each), self._groups)
        self._scales = part(form.scales, FLOATS, rows, self._groups)
        if f"{module}.{form.order}" in tensors:
            self._order = _part(tensors, f"{module}.{form.order}", ("I32", "I64"), (columns,))
        self.where, self.shape, self.dtype = codes.where, (rows, columns), "F32"

    def read(self, *index: slice) -> Tensor:
        """See `Stored.read`."""
        rows, columns = _bounds(self.shape, index)
        codes = self._numbers(self._codes, self._form.dim, rows, columns)
        group = _group_of(self._order, self._group, self._groups, columns).to(codes.device)
        zeros: int | Tensor = 1 << self._bits - 1
        if self._zeros is not None:
            zeros = self._numbers(self._zeros, 0, rows, (0, self._groups))[:, group] + self._offset
        return (codes - zeros) * self._read(self._scales, slice(*rows)).float()[:, group]

    def _read(self, stored: Stored, rows: slice, columns: slice = slice(None)) -> Tensor:
        found = stored.read(*self._form.oriented((rows, columns)))
        return found.t() if self._form.turned else found

    def _numbers(self, stored: Stored, dim: int, *bounds: tuple[int, int]) -> Tensor:
        """Numbers of a range of rows and columns of a matrix that is packed along `dim`."""
        (start, end), each = bounds[dim], 32 // self._bits
        parts = [slice(*bound) for bound in bounds]
        parts[dim] = _blocks(start, end, each)
        numbers = self._form.unpack(self._read(stored, *parts), self._bits, dim)
        return numbers.narrow(dim, start % each, end - start)


def _group_of(order: Stored | None, size: int, groups: int, columns: tuple[int, int]) -> Tensor:
    """The group of each column of a range: int64."""
    if order is None:
        return torch.arange(*columns) // size
    found = order.read(slice(*columns)).long()
    if found.min() < 0 or found.max() >= groups:
        raise ModelError(f"{order.where} names groups beyond the {groups} there are")
    return found


# --- MXFP4 ---


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """4-bit numbers times a power of two per 32 numbers (OCP Microscaling Formats v1.0).

    Args:
        blocks: uint8 [..., groups, 16], two e2m1 numbers per byte, the first in the lower half.
        scales: uint8 [..., groups], e8m0: 2^(scale - 127).

    Returns:
        float32 [..., groups * 32].
    """
    table = torch.tensor(FP4, device=blocks.device)
    pairs = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)
    return torch.ldexp(table[pairs.int()], scales.int()[..., None] - 127).flatten(-2)


class MXFP4Tensor:
    """A tensor of gpt-oss: stored as [..., rows, columns], read transposed, as in float models."""

    def __init__(self, tensors: Tensors, name: str) -> None:
        blocks = tensors[f"{name}_blocks"]
        shape = (*blocks.shape[:-1], 16)
        self._blocks = _part(tensors, f"{name}_blocks", ("U8",), shape)
        self._scales = _part(tensors, f"{name}_scales", ("U8",), shape[:-1])
        *outer, rows, groups, _ = shape
        self.where, self.shape, self.dtype = blocks.where, (*outer, groups * GROUP, rows), "F32"

    def read(self, *index: slice) -> Tensor:
        """See `Stored.read`."""
        columns = _bounds(self.shape, index)[-2]
        wide = dequantize_mxfp4(*self._read(index))
        return wide.narrow(-1, columns[0] % GROUP, columns[1] - columns[0]).transpose(-1, -2)

    def read_parts(self, *index: slice) -> tuple[Tensor, Tensor]:
        """Read blocks and scales in the form that `pack_mxfp4` takes.

        Raises:
            ConfigError: A scale is larger than it supports.
        """
        blocks, scales = self._read(index)
        if scales.numel() and scales.max() > MOST:
            raise ModelError(
                f"{self._scales.where} has scales up to 2^{int(scales.max()) - 127}; experts in "
                f"MXFP4 are served with 2^{MOST - 127} at most; --dtype float16 dequantises them"
            )
        return blocks, scales

    def _read(self, index: tuple[slice, ...]) -> tuple[Tensor, Tensor]:
        *outer, columns, rows = _bounds(self.shape, index)
        part = (*(slice(*bound) for bound in outer), slice(*rows), _blocks(*columns, GROUP))
        return self._blocks.read(*part), self._scales.read(*part)

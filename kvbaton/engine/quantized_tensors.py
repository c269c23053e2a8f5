"""Weights of a checkpoint by their usual names, dequantised as they are read.

`find_tensor` gives ``X.weight``, [rows (outputs), columns (inputs)], however the checkpoint stores
it; only the part that is asked for is read and computed. All is float32 until it is copied.

| layout | stored | a weight |
| --- | --- | --- |
| ``fp8``, ``int8`` | ``weight`` [rows, columns], ``weight_scale`` or ``weight_scale_inv``: one, | |
| | one a row, or one a block | ``w * scale`` |
| ``awq`` | ``qweight`` [columns, rows / 8], ``qzeros`` [groups, rows / 8], int32; | |
| | ``scales`` [groups, rows] | ``(q - zero) * scale`` |
| ``gptq`` | ``qweight`` [columns / n, rows], ``qzeros`` [groups, rows / n], int32; | |
| | ``scales`` [groups, rows]; ``g_idx`` [columns], a column's group | ``(q - zero - 1) * scale`` |
| ``packed`` | ``weight_packed`` [rows, columns / n] int32, ``weight_scale`` [rows, groups]; | |
| | perhaps ``weight_zero_point`` [rows / n, groups] and ``weight_g_idx`` [columns] | likewise |
| ``mxfp4`` | ``X_blocks`` uint8 [..., rows, groups, 16], ``X_scales`` uint8 [..., rows, groups] | |

An int32 holds n = 32 / bits numbers, the first in its lowest bits; AWQ's are in another order.
``packed`` adds 2^(bits - 1) to numbers and zero points, so that they are not negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from kvbaton.engine.quantization_config import Quantization
from kvbaton.errors import ConfigError, ModelError
from kvbaton.kernels.mxfp4 import GROUP, MOST

FLOATS = ("F32", "F16", "BF16")
"""What weights that are not quantised may be stored as, by safetensors' names."""

SCALED = {"fp8": "F8_E4M3", "int8": "I8"}
SCALES = ("weight_scale", "weight_scale_inv")
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in an int32 AWQ keeps its 8 numbers."""

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of e2m1, by their bits."""


class Stored(Protocol):
    """A tensor of a checkpoint, which is read from its file, or computed, by `read`."""

    @property
    def where(self) -> str:
        """Its name and file, for errors."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all of it."""

    @property
    def dtype(self) -> str:
        """As safetensors names it."""

    def read(self, *index: slice) -> Tensor:
        """A part of it; axes that are not given are whole."""


Tensors = Mapping[str, Stored]
"""A checkpoint's, by their names."""


def find_tensor(tensors: Tensors, name: str, quantization: Quantization | None) -> Stored:
    """The tensor of a name in floats.

    Args:
        tensors: what the checkpoint stores.
        name: as a checkpoint of floats has it.
        quantization: what ``config.json`` says of the stored weights.

    Raises:
        ConfigError: it is not stored, or a part of it is missing, or has another dtype or shape
            than its format has; told by name.
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
        return ScaledTensor(stored, scales_of(tensors, name, quantization))
    if quantization is not None and layout == "mxfp4" and f"{name}_blocks" in tensors:
        return MXFP4Tensor(tensors, name)
    if quantization is not None and layout in PACKED:
        module = name.removesuffix(".weight")
        if f"{module}.{PACKED[layout].CODES}" in tensors:
            return PACKED[layout](tensors, module, quantization)
    raise _missing(name)


def _matrix(tensors: Tensors, name: str) -> Stored:
    """A stored matrix. Raises `ConfigError` if it is missing, or none."""
    stored = tensors.get(name)
    if stored is None:
        raise _missing(name)
    if len(stored.shape) != 2:
        raise ModelError(f"{stored.where} has shape {list(stored.shape)}, not 2 axes")
    return stored


def _missing(name: str) -> ConfigError:
    return ModelError(f"the checkpoint has no tensor {name!r}")


def _part(tensors: Tensors, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> Stored:
    """A stored tensor that must have one of some dtypes, and a shape.

    Raises:
        ConfigError: it is missing, or has others.
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
    """First and end of the part of each axis."""
    whole = (slice(None),) * (len(shape) - len(index))
    return [at.indices(size)[:2] for size, at in zip(shape, index + whole, strict=True)]


def _blocks(start: int, end: int, size: int) -> slice:
    """The blocks of some size that a range touches."""
    return slice(start // size, -(-end // size))


def _spread(x: Tensor, dim: int, size: int, start: int, end: int) -> Tensor:
    """Values of the blocks that a range touches, one for each of its elements; or one for all."""
    if x.shape[dim] == 1:
        return x
    wide = x.repeat_interleave(size, dim)
    return wide.narrow(dim, start % size, end - start)


# --- 8 bits beside scales ---


def scales_of(tensors: Tensors, name: str, quantization: Quantization) -> Scales:
    """The scales of a weight ``X.weight``.

    Raises:
        ConfigError: they are missing, or fit neither the weight nor the format.
    """
    shape, module = _matrix(tensors, name).shape, name.removesuffix(".weight")
    found = [tensors[f"{module}.{kind}"] for kind in SCALES if f"{module}.{kind}" in tensors]
    if not found:
        raise _missing(f"{module}.{SCALES[quantization.block is not None]}")
    stored = found[0]
    if stored.dtype not in (*FLOATS, "F8_E8M0"):
        raise ModelError(f"{stored.where} has dtype {stored.dtype}; need F32")
    rows, columns = shape
    blocks = [quantization.block] if quantization.block else [(1, columns), (rows, columns)]
    candidates = [Scales(stored, shape, block) for block in blocks]
    for scales in candidates:
        # One for all is stored as [], [1] or [1, 1], one a row as [rows] or [rows, 1].
        if [x for x in stored.shape if x > 1] == [x for x in scales.grid if x > 1]:
            return scales
    asked = " or ".join(str(list(scales.grid)) for scales in candidates)
    raise ModelError(
        f"{stored.where} has shape {list(stored.shape)}; a weight of {list(shape)} needs {asked}"
    )


class Scales:
    """Scales of a weight of 8-bit numbers.

    Attributes:
        block: rows and columns that share one.
        grid: rows and columns of blocks.
    """

    def __init__(self, stored: Stored, shape: tuple[int, ...], block: tuple[int, int]) -> None:
        self._stored, self.block = stored, block
        self.grid = tuple(-(-size // per) for size, per in zip(shape, block, strict=True))

    def read(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """Those of a range of the weight: float32 [rows, column blocks]."""
        height, width = self.block
        grid = self._stored.read().float().reshape(self.grid)
        part = grid[_blocks(*rows, height), _blocks(*columns, width)]
        return _spread(part, 0, height, *rows).expand(rows[1] - rows[0], -1)


class ScaledTensor:
    """8-bit numbers times the scales of their blocks."""

    def __init__(self, stored: Stored, scales: Scales) -> None:
        self._stored, self._scales = stored, scales
        self.where, self.shape, self.dtype = stored.where, stored.shape, "F32"

    def read(self, *index: slice) -> Tensor:
        """See `Stored.read`."""
        rows, columns = _bounds(self.shape, index)
        scales = self._scales.read(rows, columns)
        return self._stored.read(*index).float() * self._spread(scales, columns)

    def read_parts(self, *index: slice, runs: int) -> tuple[Tensor, Tensor]:
        """Numbers as they are stored, and their scales: float32 [rows, 1 or runs].

        Args:
            *index: the part.
            runs: of equal numbers of its columns, each within a block; or how many blocks it has.
        """
        rows, columns = _bounds(self.shape, index)
        scales = self._scales.read(rows, columns)
        if scales.shape[1] not in (1, runs):
            scales = self._spread(scales, columns)[:, :: (columns[1] - columns[0]) // runs]
        return self._stored.read(*index), scales

    def _spread(self, scales: Tensor, columns: tuple[int, int]) -> Tensor:
        return _spread(scales, 1, self._scales.block[1], *columns)


# --- several numbers in an int32 ---


def unpack(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Numbers of so many bits out of int32s, 32 / bits times as many along an axis; int32."""
    dim %= packed.dim()
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    shifts = shifts.view(-1, *(1,) * (packed.dim() - dim - 1))
    return ((packed.unsqueeze(dim + 1) >> shifts) & (1 << bits) - 1).flatten(dim, dim + 1)


def _unpacked(stored: Stored, bits: int, dim: int, *bounds: tuple[int, int]) -> Tensor:
    """A range of numbers of a packed matrix, whose axis `dim` holds int32s."""
    start, end = bounds[dim]
    parts = [slice(*bound) for bound in bounds]
    parts[dim] = _blocks(start, end, 32 // bits)
    numbers = unpack(stored.read(*parts), bits, dim)
    return numbers.narrow(dim, start % (32 // bits), end - start)


class AWQTensor:
    """Activation-aware weight quantisation (Lin et al., arXiv 2306.00978), AutoAWQ's ``gemm``."""

    CODES = "qweight"

    def __init__(self, tensors: Tensors, module: str, quantization: Quantization) -> None:
        codes = _matrix(tensors, f"{module}.{self.CODES}")
        columns, rows = codes.shape[0], codes.shape[1] * 8
        self._group = quantization.group_size or columns
        groups = -(-columns // self._group)
        self._codes = _part(tensors, f"{module}.{self.CODES}", ("I32",), (columns, rows // 8))
        self._zeros = _part(tensors, f"{module}.qzeros", ("I32",), (groups, rows // 8))
        self._scales = _part(tensors, f"{module}.scales", FLOATS, (groups, rows))
        self.where, self.shape, self.dtype = codes.where, (rows, columns), "F32"

    def read(self, *index: slice) -> Tensor:
        """See `Stored.read`."""
        rows, columns = _bounds(self.shape, index)
        touched = _blocks(*rows, 8)
        groups = _blocks(*columns, self._group)
        codes = self._in_order(self._codes.read(slice(*columns), touched))
        zeros = self._in_order(self._zeros.read(groups, touched))
        zeros = _spread(zeros, 0, self._group, *columns)
        cut = slice(rows[0] % 8, rows[0] % 8 + rows[1] - rows[0])
        scales = self._scales.read(groups, slice(*rows)).float()
        return ((codes - zeros)[:, cut] * _spread(scales, 0, self._group, *columns)).t()

    def _in_order(self, packed: Tensor) -> Tensor:
        numbers = unpack(packed, 4, 1).view(len(packed), -1, 8)
        return numbers[..., AWQ_ORDER].flatten(1)


class GPTQTensor:
    """GPTQ (Frantar et al., arXiv 2210.17323) as AutoGPTQ and GPTQModel store it.

    The first format keeps ``zero - 1``; 1 is added without wrapping around, as exllama and vLLM do.
    """

    CODES = "qweight"

    def __init__(self, tensors: Tensors, module: str, quantization: Quantization) -> None:
        self._bits, self._offset = quantization.bits, quantization.zero_offset
        each = 32 // self._bits
        codes = _matrix(tensors, f"{module}.{self.CODES}")
        columns, rows = codes.shape[0] * each, codes.shape[1]
        self._group = quantization.group_size or columns
        groups = -(-columns // self._group)
        self._codes = _part(tensors, f"{module}.{self.CODES}", ("I32",), codes.shape)
        self._zeros = _part(tensors, f"{module}.qzeros", ("I32",), (groups, -(-rows // each)))
        self._scales = _part(tensors, f"{module}.scales", FLOATS, (groups, rows))
        self._order = None
        if f"{module}.g_idx" in tensors:
            self._order = _part(tensors, f"{module}.g_idx", ("I32", "I64"), (columns,))
        self.where, self.shape, self.dtype = codes.where, (rows, columns), "F32"

    def read(self, *index: slice) -> Tensor:
        """See `Stored.read`."""
        rows, columns = _bounds(self.shape, index)
        codes = _unpacked(self._codes, self._bits, 0, columns, rows)
        groups = self._scales.shape[0]
        zeros = _unpacked(self._zeros, self._bits, 1, (0, groups), rows) + self._offset
        scales = self._scales.read(slice(None), slice(*rows)).float()
        group = _group_of(self._order, self._group, groups, columns).to(codes.device)
        return ((codes - zeros[group]) * scales[group]).t()


class PackedTensor:
    """``pack-quantized`` of compressed-tensors."""

    CODES = "weight_packed"

    def __init__(self, tensors: Tensors, module: str, quantization: Quantization) -> None:
        self._bits = quantization.bits
        each = 32 // self._bits
        codes = _matrix(tensors, f"{module}.{self.CODES}")
        said = tensors.get(f"{module}.weight_shape")
        rows, columns = codes.shape[0], codes.shape[1] * each
        if said is not None:
            rows, columns = _part(tensors, f"{module}.weight_shape", ("I64", "I32"), (2,)).read()
            rows, columns = int(rows), int(columns)
        self._group = quantization.group_size or columns
        groups = -(-columns // self._group)
        shape = (rows, -(-columns // each))
        self._codes = _part(tensors, f"{module}.{self.CODES}", ("I32",), shape)
        self._scales = _part(tensors, f"{module}.weight_scale", FLOATS, (rows, groups))
        self._zeros = self._order = None
        if f"{module}.weight_zero_point" in tensors:
            shape = (-(-rows // each), groups)
            self._zeros = _part(tensors, f"{module}.weight_zero_point", ("I32",), shape)
        if f"{module}.weight_g_idx" in tensors:
            self._order = _part(tensors, f"{module}.weight_g_idx", ("I32", "I64"), (columns,))
        self.where, self.shape, self.dtype = codes.where, (rows, columns), "F32"

    def read(self, *index: slice) -> Tensor:
        """See `Stored.read`."""
        rows, columns = _bounds(self.shape, index)
        codes = _unpacked(self._codes, self._bits, 1, rows, columns)
        scales = self._scales.read(slice(*rows)).float()
        groups = scales.shape[1]
        group = _group_of(self._order, self._group, groups, columns).to(codes.device)
        if self._zeros is None:
            return (codes - (1 << self._bits - 1)) * scales[:, group]
        zeros = _unpacked(self._zeros, self._bits, 0, rows, (0, groups))
        return (codes - zeros[:, group]) * scales[:, group]


def _group_of(order: Stored | None, size: int, groups: int, columns: tuple[int, int]) -> Tensor:
    """The group of each column of a range: int64."""
    if order is None:
        return torch.arange(*columns) // size
    found = order.read(slice(*columns)).long()
    if found.min() < 0 or found.max() >= groups:
        raise ModelError(f"{order.where} names groups beyond the {groups} there are")
    return found


PACKED: dict[str, type[AWQTensor | GPTQTensor | PackedTensor]] = {
    "awq": AWQTensor,
    "gptq": GPTQTensor,
    "packed": PackedTensor,
}


# --- MXFP4 ---


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Numbers of 4 bits times a power of two for each 32 of them (OCP Microscaling Formats v1.0).

    Args:
        blocks: uint8 [..., groups, 16], each byte two e2m1 numbers, the first in its lower half.
        scales: uint8 [..., groups], e8m0: 2^(scale - 127).

    Returns:
        float32 [..., groups * 32].
    """
    table = torch.tensor(FP4, device=blocks.device)
    pairs = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)
    return torch.ldexp(table[pairs.int()], scales.int()[..., None] - 127).flatten(-2)


class MXFP4Tensor:
    """A tensor of gpt-oss: stored [..., rows, columns], read as the float model's, transposed."""

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
        """Blocks and scales as `pack_mxfp4` takes them.

        Raises:
            ConfigError: a scale is larger than it takes.
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

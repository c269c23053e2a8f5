"""Layers of vision towers, over the patches of several images.

Tensors are ``[patches, features]``, in the order of a `PatchPlan`, which depends only on the sizes
of the images. Patches come in *units*: squares of patches that become one row, and are always moved
together. Attention runs within *segments* (windows, or whole frames). Units are ordered so that
segments of equal length are contiguous and can be computed as one batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvbaton.engine.models.layers import ColumnLinear, Piece, WeightedModule
from kvbaton.engine.models.linear import new_weight
from kvbaton.engine.upload import upload
from kvbaton.engine.vision_config import VisionConfig

EPS = 1e-6
KEPT_PLANS = 64
"""Number of plans kept for images of the same sizes; a plan of 16k patches takes half a MiB."""


Array = npt.NDArray[Any]
Grid = tuple[int, int, int]
"""Frames, rows and columns of an item's patches."""


@dataclass(frozen=True)
class PatchSegments:
    """Attention within contiguous segments of patches.

    Attributes:
        runs: Per length of segments: their number, and the length in patches.
        order: [units] int64, indices into the plan's order that bring units into the order of the
            segments; None if that is the same.
        inverse: The inverse permutation.
    """

    runs: tuple[tuple[int, int], ...]
    order: Tensor | None = None
    inverse: Tensor | None = None


@dataclass(frozen=True)
class PatchPlan:
    """The order in which a tower processes the patches of some images.

    Attributes:
        order: [units] int64, index of the input unit at each place; None if nothing moves.
        inverse: [units] int64, the inverse permutation; None likewise.
        positions: [patches, 2] int64, row and column of each patch in its frame.
        sizes: [patches, 2] int64, rows and columns of each patch's frame.
        frames: Attention within whole frames.
        windows: Attention within windows; same as `frames` if the tower has no windows.
    """

    order: Tensor | None
    inverse: Tensor | None
    positions: Tensor
    sizes: Tensor
    frames: PatchSegments
    windows: PatchSegments


class LayerNorm(WeightedModule):
    """Normalise the last axis to mean 0 and variance 1, then scale and shift it."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__()
        self.name = name
        self.weight, self.bias = new_weight(size), new_weight(size)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., size] to [..., size]."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, EPS)

    def pieces(self) -> Iterator[Piece]:
        """Scale and shift."""
        shape = tuple(self.weight.shape)
        yield Piece(f"{self.name}.weight", shape, self.weight, norm=True)
        yield Piece(f"{self.name}.bias", shape, self.bias)


def linear(name: str, size_in: int, size_out: int) -> ColumnLinear:
    """A projection with a bias."""
    return ColumnLinear(size_in, [(name, size_out, (0, size_out))], bias=True)


class PatchEmbedding(WeightedModule):
    """A vector per patch: a convolution without overlap, so a matrix product.

    Args:
        name: Name of the convolution.
        shape: Shape of its filters in the checkpoint: their number, then the shape of a patch.
        bias: Whether it has a bias.
    """

    def __init__(self, name: str, shape: tuple[int, ...], *, bias: bool) -> None:
        super().__init__()
        self.name, self.shape = name, shape
        self.weight = new_weight(shape[0], math.prod(shape[1:]))
        self.bias = new_weight(shape[0]) if bias else None

    def forward(self, patches: Tensor) -> Tensor:
        """Map [patches, patch_dim] to [patches, hidden]."""
        return F.linear(patches, self.weight, self.bias)

    def pieces(self) -> Iterator[Piece]:
        """The filters, and the bias if there is one."""
        yield Piece(f"{self.name}.weight", self.shape, self.weight.view(self.shape))
        if self.bias is not None:
            yield Piece(f"{self.name}.bias", self.shape[:1], self.bias)


def frame_patches(config: VisionConfig, *, bias: bool) -> PatchEmbedding:
    """Patch embedding of towers whose patches have several frames."""
    size = config.patch_size
    patch = config.in_channels, config.temporal_patch_size, size, size
    return PatchEmbedding("visual.patch_embed.proj", (config.hidden_size, *patch), bias=bias)


class LearnedPositions(WeightedModule):
    """A square table of vectors, stretched over each frame by bilinear interpolation."""

    def __init__(self, name: str, config: VisionConfig) -> None:
        super().__init__()
        self.name = name
        self.side = int(config.num_position_embeddings**0.5)
        self.weight = new_weight(config.num_position_embeddings, config.hidden_size)

    def forward(self, positions: Tensor, sizes: Tensor) -> Tensor:
        """Vectors [patches, hidden] float32 of positions in frames of sizes, both [patches, 2]."""
        place = positions.float() * (self.side - 1) / (sizes - 1).clamp(min=1)
        low = place.floor().long()
        high = (low + 1).clamp(max=self.side - 1)
        upper = place - low
        total = torch.zeros((), device=self.weight.device)
        for row, row_share in ((low, 1 - upper), (high, upper)):
            for column, column_share in ((low, 1 - upper), (high, upper)):
                share = row_share[:, :1] * column_share[:, 1:]
                total = total + self.weight[row[:, 0] * self.side + column[:, 1]] * share
        return total

    def pieces(self) -> Iterator[Piece]:
        """The table."""
        yield Piece(f"{self.name}.weight", tuple(self.weight.shape), self.weight)


class VisionRotary(nn.Module):
    """Rotation by row for the first half of a head's pairs, and by column for the second."""

    frequencies: Tensor

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        half = config.head_dim // 2
        exponent = torch.arange(0, half, 2, dtype=torch.float32) / half
        self.register_buffer("frequencies", 1.0 / config.rope_theta**exponent, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Map [patches, 2] to cos and sin, each [patches, 1, 1, head_dim] float32."""
        angles = (positions[..., None].float() * self.frequencies).flatten(1)
        angles = torch.cat((angles, angles), dim=-1)[:, None, None]
        return angles.cos(), angles.sin()


class VisionAttention(nn.Module):
    """Attention of every patch to the patches of its segment.

    Args:
        heads: Number of heads.
        qkv: Projection to queries, keys and values.
        proj: Projection of all heads' outputs.
    """

    def __init__(self, heads: int, qkv: ColumnLinear, proj: ColumnLinear) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, qkv, proj

    @classmethod
    def fused(cls, name: str, config: VisionConfig) -> VisionAttention:
        """Attention with one projection to queries, keys and values in the checkpoint."""
        size = config.hidden_size
        qkv = linear(f"{name}.qkv", size, 3 * size)
        return cls(config.num_heads, qkv, linear(f"{name}.proj", size, size))

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, segments: PatchSegments
    ) -> Tensor:
        """Map [patches, hidden] to [patches, hidden]; rotates heads if `rotary` is given."""
        qkv = self.qkv(x).view(len(x), 3, self.heads, -1)
        turned = qkv[:, :2]
        if rotary is not None:
            (cos, sin), wide = rotary, turned.float()
            first, second = wide.chunk(2, dim=-1)
            wide = (wide * cos).addcmul_(torch.cat((-second, first), dim=-1), sin)
            turned = wide.to(x.dtype)
        query, key = turned.unbind(1)
        parts = [_moved(part, segments.order) for part in (query, key, qkv[:, 2])]
        out = x.new_empty(len(x), self.heads, qkv.shape[-1])
        start = 0
        for count, length in segments.runs:
            run = slice(start, start + count * length)
            q, k, v = (_split(part[run], count).transpose(1, 2) for part in parts)
            attended = F.scaled_dot_product_attention(q, k, v)
            out[run] = attended.transpose(1, 2).flatten(0, 1)
            start = run.stop
        return self.proj(_moved(out, segments.inverse).flatten(1))  # type: ignore[no-any-return]


def _moved(x: Tensor, order: Tensor | None) -> Tensor:
    """Permute units of patches: [patches, ...] to the same shape."""
    if order is None:
        return x
    return _split(x, len(order))[order].flatten(0, 1)


def _split(x: Tensor, parts: int) -> Tensor:
    """Split [parts * n, ...] into [parts, n, ...]."""
    return x.reshape(parts, -1, *x.shape[1:])


class GeluMLP(nn.Module):
    """``fc2(gelu(fc1(x)))``, GELU by tanh; `name` is the common prefix of both projections."""

    def __init__(self, name: str, config: VisionConfig) -> None:
        super().__init__()
        self.fc1 = linear(f"{name}1", config.hidden_size, config.intermediate_size)
        self.fc2 = linear(f"{name}2", config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map [patches, hidden] to [patches, hidden]."""
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))  # type: ignore[no-any-return]


class VisionBlock(nn.Module):
    """Attention and MLP, each on the normalised stream and added back to it."""

    def __init__(
        self, norm1: nn.Module, attn: VisionAttention, norm2: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = norm1, attn, norm2, mlp

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, segments: PatchSegments
    ) -> Tensor:
        """Update [patches, hidden] in place, and return it."""
        x += self.attn(self.norm1(x), rotary, segments)
        x += self.mlp(self.norm2(x))
        return x


class VisionTower(nn.Module, ABC):
    """Maps patches of images to rows for the language model.

    Args:
        config: Configuration of the tower.
        patch_embed: Patch embedding.

    Attributes:
        plan: Returns the `PatchPlan` for items of some grids; cached.
    """

    def __init__(self, config: VisionConfig, patch_embed: PatchEmbedding) -> None:
        super().__init__()
        self.config, self.patch_embed = config, patch_embed
        self.blocks = nn.ModuleList(self.block(layer) for layer in range(config.depth))
        self.plan = lru_cache(KEPT_PLANS)(self._plan)

    @abstractmethod
    def block(self, layer: int) -> VisionBlock:
        """Make one layer."""

    @abstractmethod
    def run(self, x: Tensor, plan: PatchPlan) -> list[Tensor]:
        """Run embedded patches through all layers: per level, [rows, out_hidden_size]."""

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Encode images.

        Does not wait for the device, nor for the copy of patches in pinned memory.

        Args:
            patches: [patches, patch_dim] of all images in order, as the image processor returns
                them, of any dtype and on any device.
            grids: Frames (1 for an image), rows and columns of patches of each image.

        Returns:
            [rows, levels, out_hidden_size] in the dtype of the weights, image after image; an image
            has one row per merged square of patches.
        """
        plan = self.plan(tuple(grids))
        weight = self.patch_embed.weight
        embedded = self.patch_embed(patches.to(weight.device, weight.dtype, non_blocking=True))
        levels = self.run(_moved(embedded, plan.order), plan)
        return _moved(torch.stack(levels, dim=1), plan.inverse)

    def _plan(self, grids: tuple[Grid, ...]) -> PatchPlan:
        return make_plan(self.config, grids, self.patch_embed.weight.device)


# --- plans ---


def make_plan(config: VisionConfig, grids: Sequence[Grid], device: torch.device) -> PatchPlan:
    """Make the `PatchPlan` for items of these grids on `device`, without waiting for it."""
    merge, area = config.merge_size, config.merge_size**2
    frames = [(rows, columns) for frames, rows, columns in grids for _ in range(frames)]
    # Per unit: the size of its frame in patches, its row and column, its frame's number.
    counts = [rows * columns // area for rows, columns in frames]
    sizes = np.repeat(np.array(frames), counts, axis=0)
    number = np.concatenate([np.arange(count) for count in counts])
    places = np.stack(np.divmod(number, sizes[:, 1] // merge), axis=1)
    frame = np.repeat(np.arange(len(frames)), counts)
    window = frame  # per unit, a number shared by the units of its window
    if config.window_size:  # ascending by frame, row, column
        side = config.window_size // (merge * config.patch_size)
        most = int(sizes.max()) // merge // side + 1
        row, column = (places // side).T
        window = (frame * most + row) * most + column
    order, window_runs = _sorted(window, area)
    by_frame, frame_runs = _sorted(frame[order], area)
    step = np.stack(np.divmod(np.arange(area), merge), axis=1)
    positions = (places[order][:, None] * merge + step).reshape(-1, 2)
    arrays = [*_both(order), *_both(by_frame), positions, np.repeat(sizes[order], area, axis=0)]
    sent = iter(upload([array for array in arrays if array is not None], device))
    flat: list[Any] = [None if array is None else next(sent) for array in arrays]
    out, back, out_frames, back_frames, *rest = flat
    return PatchPlan(
        order=out,
        inverse=back,
        positions=rest[0].view(-1, 2),
        sizes=rest[1].view(-1, 2),
        frames=PatchSegments(frame_runs, out_frames, back_frames),
        windows=PatchSegments(window_runs),
    )


def _sorted(segment: Array, area: int) -> tuple[Array, tuple[tuple[int, int], ...]]:
    """Sort units by the length of their segments, longest first; runs as in `PatchSegments`.

    Units of one segment keep their order, so that nothing moves if there is only one segment.
    """
    _, index, lengths = np.unique(segment, return_inverse=True, return_counts=True)
    order = np.lexsort((index, -lengths[index]))
    numbers = zip(*np.unique(lengths, return_counts=True), strict=True)
    return order, tuple((int(count), int(length) * area) for length, count in numbers)[::-1]


def _both(order: Array) -> tuple[Array | None, Array | None]:
    """A permutation and its inverse; None for the identity."""
    if np.array_equal(order, np.arange(len(order))):
        return None, None
    return order, np.argsort(order)

"""Layers of decoder-only models, over ragged batches of tokens.

Tensors are ``[tokens, features]``. `pieces` of a layer with weights tells the loader which tensors
of the checkpoint fill them, so that two tensors may be fused and a rank takes its share.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvbaton.engine.attention_config import MlaConfig
from kvbaton.engine.collectives import Collectives, Shard
from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.models.linear import linear_method, new_weight, product
from kvbaton.engine.quantization_config import Quantization
from kvbaton.engine.rope_config import RopeConfig
from kvbaton.engine.state_blocks import StateBatch
from kvbaton.kernels.rms_norm import rms_norm
from kvbaton.kernels.rope_write import HeadNorms
from kvbaton.kernels.silu_and_mul import gelu_and_mul


@dataclass(frozen=True)
class Piece:
    """One tensor of the checkpoint, or this rank's slice of it, and where it goes.

    Attributes:
        name: Name in the checkpoint; in multimodal ones, without ``language_model.`` and with
            ``visual.`` instead of ``model.visual.``.
        shape: Shape of the whole tensor in the checkpoint.
        target: View of the weight to fill.
        dim: Axis that is sliced.
        start: First index of the slice; its length is the target's.
        norm: Whether it is a norm's scale, which dummy weights set to 1.
        scales: [target rows, groups of target columns] float32, scales of an FP8 target, to be
            filled too.
        index: For a stack of tensors, index along the first axis of `shape`; `target`, `dim` and
            `start` are within that tensor. None if it is not a stack.
        number: For an MXFP4 target, length of the slice; `target` and `scales` are laid out as by
            `pack_mxfp4`, transposed from the stack.
    """

    name: str
    shape: tuple[int, ...]
    target: Tensor
    dim: int = 0
    start: int = 0
    norm: bool = False
    scales: Tensor | None = None
    index: int | None = None
    number: int | None = None


class WeightedModule(nn.Module, ABC):
    """A module with its own weights."""

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """Tensors of the checkpoint that fill the weights."""


def pieces_of(model: nn.Module) -> Iterator[Piece]:
    """Tensors of the checkpoint that a model, or this rank's share of it, needs."""
    for module in model.modules():
        if isinstance(module, WeightedModule):
            yield from module.pieces()


class RMSNorm(WeightedModule):
    """``y = weight * x / sqrt(mean(x^2) + eps)``; float32 before the product with the weight."""

    def __init__(self, name: str, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.name, self.eps, self.offset = name, eps, offset
        self.weight = new_weight(size)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, gate: Tensor | None = None
    ) -> Tensor:
        """Normalise the last axis; see `rms_norm`."""
        offset = self.offset
        return rms_norm(
            x, self.weight, self.eps, residual=residual, weight_offset=offset, gate=gate
        )

    def add(self, part: Tensor, stream: Tensor, collectives: Collectives) -> Tensor:
        """Sum [tokens, size] over the ranks, add the sum to a stream in place, and normalise it."""
        return collectives.all_reduce_norm(part, stream, self.weight, self.eps, self.offset)

    def pieces(self) -> Iterator[Piece]:
        """The scale."""
        yield Piece(f"{self.name}.weight", tuple(self.weight.shape), self.weight, norm=True)


class ColumnLinear(WeightedModule):
    """Several projections of one input as one matrix, each split by output rows over the ranks.

    Args:
        size_in: Number of input features.
        parts: Per projection: name in the checkpoint, total rows, and this rank's (first, number).
        bias: Whether the projections have a bias.
        quantization: Quantization of the checkpoint.
    """

    def __init__(
        self,
        size_in: int,
        parts: list[tuple[str, int, tuple[int, int]]],
        *,
        bias: bool,
        quantization: Quantization | None = None,
    ) -> None:
        super().__init__()
        self.parts = parts
        rows = sum(number for _, _, (_, number) in parts)
        names = [name for name, _, _ in parts]
        spans = [span for _, _, span in parts]
        self.method = linear_method(quantization, names, rows, size_in, size_in, spans=spans)
        self.weight, self.scales = self.method.new_weight(rows, size_in)
        self.bias = new_weight(rows) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map [tokens, size_in] to [tokens, this rank's rows of all parts]."""
        return self.method.product(x, self.weight, self.scales, self.bias)

    def pieces(self) -> Iterator[Piece]:
        """Weight of each part, and bias if it has one."""
        row = 0
        for name, total, (start, number) in self.parts:
            target = self.weight[row : row + number]
            scales = None if self.scales is None else self.scales[row : row + number]
            shape = (total, target.shape[1])
            yield Piece(f"{name}.weight", shape, target, 0, start, scales=scales)
            if self.bias is not None:
                yield Piece(f"{name}.bias", (total,), self.bias[row : row + number], 0, start)
            row += number


def whole_linear(
    name: str, size_in: int, size_out: int, quantization: Quantization | None
) -> ColumnLinear:
    """A projection that every rank computes as a whole."""
    parts = [(name, size_out, (0, size_out))]
    return ColumnLinear(size_in, parts, bias=False, quantization=quantization)


class RowLinear(WeightedModule):
    """A projection split by input columns over the ranks, whose results are yet to be summed."""

    def __init__(
        self,
        name: str,
        size_in: int,
        size_out: int,
        shard: Shard,
        *,
        bias: bool,
        quantization: Quantization | None = None,
    ) -> None:
        super().__init__()
        self.name, self.size_in, self.rank = name, size_in, shard.rank
        self.start, columns = shard.span(size_in)
        spans = [(0, size_out)]
        self.method = linear_method(quantization, [name], size_out, columns, size_in, spans=spans)
        self.weight, self.scales = self.method.new_weight(size_out, columns)
        self.bias = new_weight(size_out) if bias else None

    def forward(self, x: Tensor, *, gated: bool = False) -> Tensor:
        """Map [tokens, this rank's columns] to this rank's part of a sum, [tokens, size_out].

        If `gated`, `x` is gate and up, [tokens, 2 * columns], and silu(gate) * up is projected.
        """
        product = self.method.gated_product if gated else self.method.product
        bias = self.bias if self.rank == 0 else None
        return product(x, self.weight, self.scales, bias)

    def pieces(self) -> Iterator[Piece]:
        """Weight, and bias if there is one."""
        shape = (self.weight.shape[0], self.size_in)
        yield Piece(f"{self.name}.weight", shape, self.weight, 1, self.start, scales=self.scales)
        if self.bias is not None:
            yield Piece(f"{self.name}.bias", shape[:1], self.bias)


class Embedding(WeightedModule):
    """A vector per token, split by tokens over the ranks; used for lookup and for logits."""

    def __init__(self, name: str, vocab_size: int, size: int, shard: Shard) -> None:
        super().__init__()
        self.name, self.vocab_size, self.shard = name, vocab_size, shard
        self.start, rows = shard.padded_span(vocab_size)
        self.held = max(0, min(rows, vocab_size - self.start))
        self.weight = new_weight(rows, size)
        self.weight[self.held :] = 0

    def forward(self, token_ids: Tensor) -> Tensor:
        """Map [tokens] to [tokens, size]."""
        if self.shard.size == 1:
            return F.embedding(token_ids, self.weight)
        own = token_ids - self.start
        others = (own < 0) | (own >= self.held)
        part = F.embedding(own.masked_fill_(others, 0), self.weight)
        return self.shard.collectives.all_reduce(part.masked_fill_(others[:, None], 0))

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [rows, size] to [rows, vocab_size]: products with each token's vector."""
        part = product(hidden, self.weight, None)
        return self.shard.collectives.all_gather(part)[:, : self.vocab_size]

    def pieces(self) -> Iterator[Piece]:
        """The table."""
        shape = (self.vocab_size, self.weight.shape[1])
        yield Piece(f"{self.name}.weight", shape, self.weight[: self.held], 0, self.start)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair of features (Su et al., arXiv 2104.09864), float32.

    `RopeConfig.factor` stretches wavelengths as in Llama 3.1: frequencies of wavelengths above
    ``original / low_freq_factor`` are divided by the factor, those of wavelengths below
    ``original / high_freq_factor`` are kept, and those in between are interpolated.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequency: Tensor = 1.0 / (rope.theta**exponent)
    if rope.linear:
        return frequency / rope.factor
    if rope.yarn:
        return _yarn_frequencies(rope, head_dim, frequency)
    if rope.factor == 1.0:
        return frequency
    original = rope.original_max_position
    wavelength = 2 * math.pi / frequency
    smooth = (original / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * frequency / rope.factor + smooth * frequency
    stretched = torch.where(
        wavelength > original / rope.low_freq_factor, frequency / rope.factor, between
    )
    return torch.where(wavelength < original / rope.high_freq_factor, frequency, stretched)


def _yarn_frequencies(rope: RopeConfig, head_dim: int, frequency: Tensor) -> Tensor:
    """See `RopeConfig.yarn`; in between, a linearly falling share of a frequency is divided."""
    turns = (
        rope.original_max_position / (beta * 2 * math.pi)
        for beta in (rope.beta_fast, rope.beta_slow)
    )
    low, high = (head_dim * math.log(turn) / (2 * math.log(rope.theta)) for turn in turns)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2) - low) / (high - low if high != low else 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return frequency / rope.factor * (1 - kept) + frequency * kept


def frequency_axes(rope: RopeConfig, head_dim: int) -> Tensor:
    """Index of the rotary position that turns each pair of features (see `RopeConfig`), int64."""
    axes = torch.zeros(head_dim // 2, dtype=torch.int64)
    start = 0
    for axis, size in enumerate(rope.mrope_section):
        if rope.mrope_interleaved and axis:
            axes[axis : 3 * size : 3] = axis
        elif not rope.mrope_interleaved:
            axes[start : start + size] = axis
        start += size
    return axes


class RotaryEmbedding(nn.Module):
    """Cosines and sines of a batch's positions, computed once per step."""

    frequencies: Tensor
    axes: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        super().__init__()
        turned = rope.rotary_dim(head_dim) // 2
        still = torch.zeros(head_dim // 2 - turned)
        of = head_dim if rope.proportional else 2 * turned
        frequencies = torch.cat((inverse_frequencies(rope, of)[:turned], still))
        self.factor = rope.attention_factor
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("axes", frequency_axes(rope, head_dim), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """Compute cos and sin, each [tokens, 1, head_dim] of `dtype`, from angles in float32.

        Args:
            positions: [tokens], or [3, tokens]: temporal, vertical, horizontal.
            dtype: dtype of the model.
        """
        turns = positions[:, None] if positions.dim() == 1 else positions[self.axes].t()
        angles = turns.float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return (angles.cos() * self.factor).to(dtype), (angles.sin() * self.factor).to(dtype)


class LatentProjection(WeightedModule):
    """``kv_b_proj`` of multi-head latent attention: from a latent to keys and values of all heads.

    Since it is linear, attention may also be computed on latents: queries absorb the projection of
    keys, and the projection of values is applied afterwards (arXiv 2405.04434, section 2.1.2).

    Attributes:
        weight: [heads, 2 * head_dim, kv_rank]. Rows of a head: its key, zeros in place of the key's
            rotary features, its value, zeros up to the key's width.
    """

    def __init__(self, name: str, mla: MlaConfig, num_heads: int, shard: Shard) -> None:
        super().__init__()
        self.name, self.mla, self.num_heads = name, mla, num_heads
        self.first_head, heads = shard.span(num_heads)
        self.weight = new_weight(heads, 2 * mla.head_dim, mla.kv_rank)
        self.weight.zero_()

    def absorb(self, query: Tensor) -> Tensor:
        """Map queries [tokens, heads, head_dim] to latent space, [heads, tokens, kv_rank]."""
        nope = self.mla.nope_dim
        return torch.bmm(query[..., :nope].transpose(0, 1), self.weight[:, :nope])

    def values(self, latents: Tensor, out: Tensor) -> Tensor:
        """Map sums of latents, [tokens, heads, kv_rank], to sums of values, in `out`."""
        first, count = self.mla.head_dim, self.mla.value_dim
        of_values = self.weight[:, first : first + count].transpose(1, 2)
        torch.bmm(latents.transpose(0, 1), of_values, out=out.transpose(0, 1))
        return out

    def expand(self, latent: Tensor, key_rope: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Keys and values of some heads, each [tokens, heads, head_dim]; values end with zeros.

        Args:
            latent: [tokens, kv_rank].
            key_rope: [tokens, rope_dim].
            heads: Heads of this rank.
        """
        both = F.linear(latent, self.weight[heads].flatten(0, 1))
        key, value = both.view(len(latent), -1, 2, self.mla.head_dim).unbind(2)
        key[..., self.mla.nope_dim :] = key_rope[:, None]
        return key, value

    def pieces(self) -> Iterator[Piece]:
        """Rows of each head's key and value."""
        mla, name = self.mla, f"{self.name}.weight"
        per_head = mla.nope_dim + mla.value_dim
        shape = (self.num_heads * per_head, mla.kv_rank)
        for head, both in enumerate(self.weight, self.first_head):
            row, value = head * per_head, both[mla.head_dim : mla.head_dim + mla.value_dim]
            yield Piece(name, shape, both[: mla.nope_dim], 0, row)
            yield Piece(name, shape, value, 0, row + mla.nope_dim)


Rotary = tuple[Tensor, Tensor]
"""Cos and sin of each token's angles, each [tokens, 1, head_dim]; the same tensors for all layers
with the same frequencies."""


class Heads(NamedTuple):
    """A layer's queries, keys and values of a batch.

    Attributes:
        query: [tokens, query heads, head_dim]; may be overwritten.
        key: [tokens, kv heads, head_dim]; may be overwritten. None if the layer attends over K and
            V that another layer has stored in this step.
        value: Like `key`.
        scale: Scale of the logits; None for ``head_dim ** -0.5``.
        sinks: [query heads] float32, logits without values that join each head's softmax (Xiao et
            al., arXiv 2309.17453); None for none.
        norms: Norms of heads, applied before rotation; None for none.
        interleaved: Whether rotation pairs features 2i and 2i + 1 instead of i and
            i + head_dim / 2; they are stored apart then.
    """

    query: Tensor
    key: Tensor | None
    value: Tensor | None
    scale: float | None = None
    sinks: Tensor | None = None
    norms: HeadNorms | None = None
    interleaved: bool = False


class LatentHeads(NamedTuple):
    """A layer's queries and latents of a batch, with multi-head latent attention.

    Attributes:
        query: [tokens, query heads, head_dim], last `rope_dim` features not rotated yet; may be
            overwritten.
        latent: [tokens, kv_rank], normalised; may be overwritten.
        key_rope: [tokens, rope_dim], not rotated yet; may be overwritten.
        projection: Projection of the layer.
    """

    query: Tensor
    latent: Tensor
    key_rope: Tensor
    projection: LatentProjection


class AttentionContext(Protocol):
    """What attention layers need of a batch; implemented per kind of kernel.

    Attributes:
        states: Inputs of layers with a state; None for a model without.
    """

    states: StateBatch | None

    def attend(self, layer: int, heads: Heads, rotary: Rotary | None) -> Tensor:
        """Rotate query and key, store K and V, and attend causally as the layer's group does.

        Args:
            layer: Number of the layer whose K and V are used.
            heads: Queries, keys and values of this layer.
            rotary: Cos and sin; None for a layer without rotation.

        Returns:
            A tensor in the shape of the query.
        """

    def attend_latent(self, layer: int, heads: LatentHeads, rotary: Rotary) -> Tensor:
        """Attend with latents: rotate, store rows of latent and `key_rope`, attend causally.

        Args:
            layer: Number of the layer.
            heads: Queries and latents of this layer.
            rotary: Cos and sin of `rope_dim` features.

        Returns:
            [tokens, query heads, value_dim].
        """


def head_projections(
    name: str, config: ModelConfig, dim: int, parts: Iterable[tuple[str, int, tuple[int, int]]]
) -> ColumnLinear:
    """Projections to queries, keys and values as one product.

    Args:
        name: Name of the attention in the checkpoint.
        config: Configuration of the model.
        dim: Number of features per head.
        parts: Per projection: name, total number of heads, and this rank's (first, number).
    """
    columns = [
        (f"{name}.{part}", total * dim, (first * dim, number * dim))
        for part, total, (first, number) in parts
    ]
    return ColumnLinear(
        config.hidden_size, columns, bias=config.qkv_bias, quantization=config.quantization
    )


def output_projection(name: str, config: ModelConfig, dim: int, shard: Shard) -> RowLinear:
    """Projection of all heads' outputs, of `dim` features each, to hidden states."""
    return RowLinear(
        f"{name}.o_proj",
        config.num_heads * dim,
        config.hidden_size,
        shard,
        bias=config.output_bias,
        quantization=config.quantization,
    )


class SelfAttention(WeightedModule):
    """Grouped-query attention over the paged cache.

    Args:
        config: Configuration of the model.
        layer: Number of the layer.
        shard: This rank's share.
    """

    def __init__(self, config: ModelConfig, layer: int, shard: Shard) -> None:
        super().__init__()
        name, dim = f"model.layers.{layer}.self_attn", config.head_dim
        self.name, self.layer, self.head_dim, self.num_heads = name, layer, dim, config.num_heads
        query = shard.span(config.num_heads)
        kv = shard.kv_heads(config.num_kv_heads)
        self.first_head, self.heads, self.kv_heads = *query, kv[1]
        parts = [("q_proj", config.num_heads, query)]
        parts += [(part, config.num_kv_heads, kv) for part in ("k_proj", "v_proj")]
        self.qkv_proj = head_projections(name, config, dim, parts)
        self.o_proj = output_projection(name, config, dim, shard)
        norm = dim, config.rms_norm_eps, config.family.norm_offset
        self.q_norm = RMSNorm(f"{name}.q_norm", *norm) if config.family.qk_norm else None
        self.k_norm = RMSNorm(f"{name}.k_norm", *norm) if config.family.qk_norm else None
        self.scale = config.attention_scale
        self.sinks: nn.Parameter | None = None
        if config.family.sinks:
            self.sinks = new_weight(self.heads, dtype=torch.float32)

    def forward(self, hidden: Tensor, rotary: Rotary, attention: AttentionContext) -> Tensor:
        """Map [tokens, hidden] to the rank's part of the same; writes K and V into the cache."""
        return self.o_proj(self.attend(self.qkv_proj(hidden), rotary, attention))  # type: ignore[no-any-return]

    def attend(self, projected: Tensor, rotary: Rotary, attention: AttentionContext) -> Tensor:
        """Map the output of `qkv_proj` to the heads' outputs, [tokens, columns]."""
        by_head = projected.view(len(projected), -1, self.head_dim)
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        query, key, value = torch.split(by_head, sizes, dim=1)
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            eps, offset = self.q_norm.eps, self.q_norm.offset
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, eps, offset)
        heads = Heads(query, key, value, self.scale, self.sinks, norms)
        return attention.attend(self.layer, heads, rotary).flatten(1)

    def pieces(self) -> Iterator[Piece]:
        """The sinks, if there are any."""
        if self.sinks is not None:
            yield Piece(f"{self.name}.sinks", (self.num_heads,), self.sinks, 0, self.first_head)


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``; with `gelu`, GELU by tanh instead of silu."""

    def __init__(
        self,
        name: str,
        size: int,
        middle: int,
        shard: Shard,
        *,
        bias: bool,
        quantization: Quantization | None = None,
        gelu: bool = False,
    ) -> None:
        super().__init__()
        self.gelu = gelu
        parts = [(f"{name}.{part}_proj", middle, shard.span(middle)) for part in ("gate", "up")]
        self.gate_up_proj = ColumnLinear(size, parts, bias=bias, quantization=quantization)
        self.down_proj = RowLinear(
            f"{name}.down_proj", middle, size, shard, bias=bias, quantization=quantization
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [tokens, size] to the rank's part of the same."""
        first = self.gate_up_proj
        if self.gelu:
            return self.down_proj(gelu_and_mul(first(x)))  # type: ignore[no-any-return]
        hidden = first.method.gate(x, first.weight, first.bias)
        if hidden is not None:
            return self.down_proj(hidden)  # type: ignore[no-any-return]
        return self.down_proj(first(x), gated=True)  # type: ignore[no-any-return]

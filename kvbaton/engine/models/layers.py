"""The parts that every decoder-only model is made of, over ragged batches of tokens.

Tensors are ``[tokens, features]``. A layer that holds weights tells the loader by `pieces` which
tensors of the checkpoint fill them, so that two may be fused into one and a rank takes its share.
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
from kvbaton.engine.collectives import Shard
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
        name: in the checkpoint, of multimodal ones without ``language_model.`` and with ``visual.``
            instead of ``model.visual.``.
        shape: of the whole tensor there.
        target: a view of the weight to fill.
        dim: the axis that is sliced.
        start: first index of the slice; its length is the target's.
        norm: a scale that starts at 1, for dummy weights.
        scales: [target rows, groups of target columns] float32, of an FP8 target; to fill too.
        index: of a stack of tensors, along the first axis of `shape`, which one; `target`, `dim`
            and `start` are within it. None if it is no stack.
        number: length of the slice, of a target in MXFP4: it and `scales` are as `pack_mxfp4`
            packs what the stack has transposed.
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
    """A module with weights of its own."""

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """The tensors of the checkpoint that fill them."""


def pieces_of(model: nn.Module) -> Iterator[Piece]:
    """Every tensor of the checkpoint that a model, or this rank's share of it, needs."""
    for module in model.modules():
        if isinstance(module, WeightedModule):
            yield from module.pieces()


class RMSNorm(WeightedModule):
    """``y = weight * x / sqrt(mean(x^2) + eps)``, in float32 up to the product with the weight."""

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

    def pieces(self) -> Iterator[Piece]:
        """Its scale."""
        yield Piece(f"{self.name}.weight", tuple(self.weight.shape), self.weight, norm=True)


class ColumnLinear(WeightedModule):
    """Several projections of one input as one matrix, each split by output rows over the ranks.

    Args:
        size_in: features of the input.
        parts: per projection its checkpoint name, rows in all, and this rank's (first, number).
        bias: whether they have one.
        quantization: of the checkpoint.
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
        """[tokens, size_in] to [tokens, this rank's rows of all parts]."""
        return self.method.product(x, self.weight, self.scales, self.bias)

    def pieces(self) -> Iterator[Piece]:
        """Weight, and bias if there is one, of each part."""
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
    """A projection that every rank holds all of."""
    parts = [(name, size_out, (0, size_out))]
    return ColumnLinear(size_in, parts, bias=False, quantization=quantization)


class RowLinear(WeightedModule):
    """A projection split by input columns over the ranks, whose results are summed."""

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
        self.name, self.size_in, self.shard = name, size_in, shard
        self.start, columns = shard.span(size_in)
        spans = [(0, size_out)]
        self.method = linear_method(quantization, [name], size_out, columns, size_in, spans=spans)
        self.weight, self.scales = self.method.new_weight(size_out, columns)
        self.bias = new_weight(size_out) if bias else None

    def forward(self, x: Tensor, *, gated: bool = False) -> Tensor:
        """[tokens, this rank's columns] to [tokens, size_out].

        With `gated` of [tokens, 2 * columns], gate and up, whose silu(gate) * up is the input.
        """
        product = self.method.gated_product if gated else self.method.product
        bias = self.bias if self.shard.rank == 0 else None
        return self.shard.collectives.all_reduce(product(x, self.weight, self.scales, bias))

    def pieces(self) -> Iterator[Piece]:
        """Weight, and bias if there is one."""
        shape = (self.weight.shape[0], self.size_in)
        yield Piece(f"{self.name}.weight", shape, self.weight, 1, self.start, scales=self.scales)
        if self.bias is not None:
            yield Piece(f"{self.name}.bias", shape[:1], self.bias)


class Embedding(WeightedModule):
    """A vector per token, split by tokens over the ranks: to look up, or to compare with."""

    def __init__(self, name: str, vocab_size: int, size: int, shard: Shard) -> None:
        super().__init__()
        self.name, self.vocab_size, self.shard = name, vocab_size, shard
        self.start, rows = shard.padded_span(vocab_size)
        self.held = max(0, min(rows, vocab_size - self.start))
        self.weight = new_weight(rows, size)
        self.weight[self.held :] = 0

    def forward(self, token_ids: Tensor) -> Tensor:
        """[tokens] to [tokens, size]."""
        if self.shard.size == 1:
            return F.embedding(token_ids, self.weight)
        own = token_ids - self.start
        others = (own < 0) | (own >= self.held)
        part = F.embedding(own.masked_fill_(others, 0), self.weight)
        return self.shard.collectives.all_reduce(part.masked_fill_(others[:, None], 0))

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, size] to [rows, vocab_size]: the product with each token's vector."""
        part = product(hidden, self.weight, None)
        return self.shard.collectives.all_gather(part)[:, : self.vocab_size]

    def pieces(self) -> Iterator[Piece]:
        """Its table."""
        shape = (self.vocab_size, self.weight.shape[1])
        yield Piece(f"{self.name}.weight", shape, self.weight[: self.held], 0, self.start)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair of features (Su et al., arXiv 2104.09864), float32.

    With `RopeConfig.factor`, as Llama 3.1 stretches them: wavelengths above
    ``original / low_freq_factor`` are divided by the factor, those below
    ``original / high_freq_factor`` stay, those between are interpolated.
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
    """See `RopeConfig.yarn`; between the two kinds, a share that falls linearly is divided."""
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
    """Which of three rotary positions turns each pair of features (see `RopeConfig`), int64."""
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
        """Cos and sin, each [tokens, 1, head_dim] of `dtype`, from angles in float32.

        Args:
            positions: [tokens], or [3, tokens]: temporal, vertical, horizontal.
            dtype: of the model.
        """
        turns = positions[:, None] if positions.dim() == 1 else positions[self.axes].t()
        angles = turns.float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return (angles.cos() * self.factor).to(dtype), (angles.sin() * self.factor).to(dtype)


class LatentProjection(WeightedModule):
    """``kv_b_proj`` of multi-head latent attention: from a latent to keys and values of all heads.

    It is linear, so attention may as well be computed among latents: the projection of keys is
    absorbed by queries, and that of values comes after (arXiv 2405.04434, section 2.1.2).

    Attributes:
        weight: [heads, 2 * head_dim, kv_rank], the rows of a head: those of its key, zeros where
            the key's turned features go, those of its value, zeros up to the key's width.
    """

    def __init__(self, name: str, mla: MlaConfig, num_heads: int, shard: Shard) -> None:
        super().__init__()
        self.name, self.mla, self.num_heads = name, mla, num_heads
        self.first_head, heads = shard.span(num_heads)
        self.weight = new_weight(heads, 2 * mla.head_dim, mla.kv_rank)
        self.weight.zero_()

    def absorb(self, query: Tensor) -> Tensor:
        """[tokens, heads, head_dim] to what meets latents, [heads, tokens, kv_rank]."""
        nope = self.mla.nope_dim
        return torch.bmm(query[..., :nope].transpose(0, 1), self.weight[:, :nope])

    def values(self, latents: Tensor, out: Tensor) -> Tensor:
        """Sums of latents, [tokens, heads, kv_rank], to those of values, `out` [..., value_dim]."""
        first, count = self.mla.head_dim, self.mla.value_dim
        of_values = self.weight[:, first : first + count].transpose(1, 2)
        torch.bmm(latents.transpose(0, 1), of_values, out=out.transpose(0, 1))
        return out

    def expand(self, latent: Tensor, key_rope: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Keys and values of some heads, each [tokens, heads, head_dim]: values end with zeros.

        Args:
            latent: [tokens, kv_rank].
            key_rope: [tokens, rope_dim].
            heads: of this rank.
        """
        both = F.linear(latent, self.weight[heads].flatten(0, 1))
        key, value = both.view(len(latent), -1, 2, self.mla.head_dim).unbind(2)
        key[..., self.mla.nope_dim :] = key_rope[:, None]
        return key, value

    def pieces(self) -> Iterator[Piece]:
        """The rows of each head's key and value."""
        mla, name = self.mla, f"{self.name}.weight"
        per_head = mla.nope_dim + mla.value_dim
        shape = (self.num_heads * per_head, mla.kv_rank)
        for head, both in enumerate(self.weight, self.first_head):
            row, value = head * per_head, both[mla.head_dim : mla.head_dim + mla.value_dim]
            yield Piece(name, shape, both[: mla.nope_dim], 0, row)
            yield Piece(name, shape, value, 0, row + mla.nope_dim)


Rotary = tuple[Tensor, Tensor]
"""Cos and sin of each token's angles, each [tokens, 1, head_dim]; the same tensors for all layers
that turn alike."""


class Heads(NamedTuple):
    """What a layer made of a batch's tokens, for its attention.

    Attributes:
        query: [tokens, query heads, head_dim]; may be overwritten.
        key: [tokens, kv heads, head_dim]; may be overwritten. None where another layer, in whose
            place this one attends, has stored K and V in this step.
        value: as `key`.
        scale: of the logits; None for ``head_dim ** -0.5``.
        sinks: [query heads] float32: a logit without a value that joins each head's softmax
            (Xiao et al., arXiv 2309.17453); None for none.
        norms: of the heads before they are turned; None for none.
        interleaved: features 2i and 2i + 1 turn with each other, instead of i and i +
            head_dim / 2; they are held apart then.
    """

    query: Tensor
    key: Tensor | None
    value: Tensor | None
    scale: float | None = None
    sinks: Tensor | None = None
    norms: HeadNorms | None = None
    interleaved: bool = False


class LatentHeads(NamedTuple):
    """The same of a layer with multi-head latent attention.

    Attributes:
        query: [tokens, query heads, head_dim], its last `rope_dim` features not turned yet; may be
            overwritten.
        latent: [tokens, kv_rank], normalised; may be overwritten.
        key_rope: [tokens, rope_dim], not turned yet; may be overwritten.
        projection: of this layer.
    """

    query: Tensor
    latent: Tensor
    key_rope: Tensor
    projection: LatentProjection


class AttentionContext(Protocol):
    """What a model's attention layer needs of a batch; an implementation per kind of kernel.

    Attributes:
        states: what layers with a state need; None for a model without.
    """

    states: StateBatch | None

    def attend(self, layer: int, heads: Heads, rotary: Rotary | None) -> Tensor:
        """Turn query and key, store K and V, attend causally over what the layer's group sees.

        Args:
            layer: number of the layer whose K and V they are.
            heads: of this layer.
            rotary: None where heads are not turned.

        Returns:
            As the query.
        """

    def attend_latent(self, layer: int, heads: LatentHeads, rotary: Rotary) -> Tensor:
        """Multi-head latent attention: turn, store rows of latent and `key_rope`, attend causally.

        Args:
            layer: number of the layer.
            heads: of this layer.
            rotary: of `rope_dim` features.

        Returns:
            [tokens, query heads, value_dim].
        """


def head_projections(
    name: str, config: ModelConfig, dim: int, parts: Iterable[tuple[str, int, tuple[int, int]]]
) -> ColumnLinear:
    """What makes queries, keys and values, as one product.

    Args:
        name: of the attention, in the checkpoint.
        config: the model.
        dim: elements per head.
        parts: the projection, its heads in all, and the first and number of this rank's.
    """
    columns = [
        (f"{name}.{part}", total * dim, (first * dim, number * dim))
        for part, total, (first, number) in parts
    ]
    return ColumnLinear(
        config.hidden_size, columns, bias=config.qkv_bias, quantization=config.quantization
    )


def output_projection(name: str, config: ModelConfig, dim: int, shard: Shard) -> RowLinear:
    """From what the heads of `dim` elements attended to back to the stream."""
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
        config: the model.
        layer: its number.
        shard: this rank's share.
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
        """[tokens, hidden] to [tokens, hidden]; writes this layer's K and V into the cache."""
        return self.o_proj(self.attend(self.qkv_proj(hidden), rotary, attention))  # type: ignore[no-any-return]

    def attend(self, projected: Tensor, rotary: Rotary, attention: AttentionContext) -> Tensor:
        """What `qkv_proj` made of all tokens to what their heads attended to, [tokens, columns]."""
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
        """Its sinks, if there are any."""
        if self.sinks is not None:
            yield Piece(f"{self.name}.sinks", (self.num_heads,), self.sinks, 0, self.first_head)


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, or with a GELU, by tanh."""

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
        """[tokens, size] to [tokens, size]."""
        first = self.gate_up_proj
        if self.gelu:
            return self.down_proj(gelu_and_mul(first(x)))  # type: ignore[no-any-return]
        hidden = first.method.gate(x, first.weight, first.bias)
        if hidden is not None:
            return self.down_proj(hidden)  # type: ignore[no-any-return]
        return self.down_proj(first(x), gated=True)  # type: ignore[no-any-return]

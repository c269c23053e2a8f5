"""Mixtures of experts: a router sends each token through a few of many MLPs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from kvbaton.engine.collectives import Shard
from kvbaton.engine.models.layers import (
    ColumnLinear,
    GatedMLP,
    Piece,
    WeightedModule,
    whole_linear,
)
from kvbaton.engine.models.linear import FP8, expert_run, keeps_mxfp4, new_weight, product
from kvbaton.engine.moe_config import MoeConfig
from kvbaton.engine.quantization_config import Quantization
from kvbaton.kernels.fused_moe import ClampedSwiGLU, fused_moe
from kvbaton.kernels.fused_router import fits, fused_router
from kvbaton.kernels.fused_topk import ExpertChoice, fused_topk
from kvbaton.kernels.jit import cdiv
from kvbaton.kernels.mxfp4 import COLUMNS, GROUP, WORDS
from kvbaton.kernels.silu_and_mul import silu_and_mul


class Router(WeightedModule):
    """Chooses the experts of each token; all ranks have the whole router and choose alike.

    Attributes:
        weight: [experts, size]; float32 if logits are.
        choice_bias: [experts] float32, affects only the choice; see `ExpertChoice`.
        bias: [experts], bias of the logits.
    """

    def __init__(self, name: str, size: int, moe: MoeConfig) -> None:
        super().__init__()
        self.name, self.moe = name, moe
        count, dtype = moe.num_experts, torch.float32 if moe.family.float32_router else None
        self.weight = new_weight(count, size, dtype=dtype)
        self.bias = new_weight(count) if moe.family.stacked else None
        self.choice_bias = new_weight(count, dtype=dtype) if moe.family.sigmoid else None

    def forward(self, x: Tensor, shared: int = 0) -> tuple[Tensor, Tensor]:
        """Map [tokens, size] to weights and numbers of experts, each [tokens, top_k + shared].

        Args:
            x: Hidden states of the tokens.
            shared: Number of shared experts after the routed ones, which all tokens use.
        """
        moe = self.moe
        choice = ExpertChoice(
            moe.top_k,
            moe.norm_topk_prob,
            torch.float32 if moe.family.float32_weights else x.dtype,
            self.choice_bias,
            moe.num_groups,
            moe.top_groups,
            moe.routed_scaling_factor,
            shared,
        )
        if fits(x) and not moe.family.weighs_inputs:
            return fused_router(x, self.weight, choice, self.bias)
        logits = product(x.to(self.weight.dtype), self.weight, self.bias)
        weights, ids = fused_topk(logits, choice)
        if moe.family.weighs_inputs:
            weights = logits.gather(1, ids.long()).float().sigmoid().to(x.dtype)
        return weights, ids

    def pieces(self) -> Iterator[Piece]:
        """Its weight, and the biases that it has."""
        names = ("weight", "bias", "e_score_correction_bias")
        parts = (self.weight, self.bias, self.choice_bias)
        for name, part in zip(names, parts, strict=True):
            if part is not None:
                yield Piece(f"{self.name}.{name}", tuple(part.shape), part)


JOINED_TOKENS = 32
"""Maximum number of tokens for which shared experts are computed in the launches of routed ones.
With more, each shared expert's weights would be read for every block of tokens."""


class Experts(WeightedModule):
    """The MLPs ``down(silu(gate(x)) * up(x))``, stacked: this rank's part of all, or some in full.

    With `Shard.expert_parallel`, a rank has a contiguous range of experts; else, of all experts,
    its rows of gate and up and its columns of down. In both cases the ranks' results are summed.
    Shared experts of the same size follow the routed ones (`_joined`), if they are floats.

    In MXFP4, ranks have equal numbers of groups of down's columns, padded with zeros at the end.

    Attributes:
        first: Number of the rank's first expert.
        start: First of the rank's intermediate features.
        middle: Number of the rank's intermediate features.
        shared: Number of shared experts that follow the routed ones.
        gate_up_proj: [experts held, 2 * intermediate size held, size]; rows of gate before those of
            up, or interleaved (`MoeFamily.stacked`). MXFP4 in the layout of `pack_mxfp4`.
        down_proj: [experts held, size, intermediate size held]; MXFP4 likewise.
        gate_up_scales: For FP8, [experts held, groups of inputs, rows] float32; for MXFP4, in the
            layout of `pack_mxfp4`.
        down_scales: Likewise, for `down_proj`.
        gate_up_bias: [experts held, 2 * intermediate size held], if there is one.
        down_bias: [experts held, size], on the rank that adds it.
    """

    def __init__(
        self, name: str, size: int, moe: MoeConfig, shard: Shard, quantization: Quantization | None
    ) -> None:
        super().__init__()
        self.name, self.moe, self.size = name, moe, size
        self.first, held = 0, moe.num_experts
        self.start, middle = 0, moe.intermediate_size
        packed = keeps_mxfp4(quantization, name)
        if shard.expert_parallel:
            self.first, held = shard.span(held)
        elif packed:
            self.start, middle = (GROUP * x for x in shard.padded_span(middle // GROUP))
        else:
            self.start, middle = shard.span(middle)
        self.middle = max(0, min(middle, moe.intermediate_size - self.start))
        self.gate_up_scales: nn.Parameter | None = None
        self.down_scales: nn.Parameter | None = None
        names = [f"{name}.{self.first}.{part}" for part in moe.family.projections]
        runs = (
            expert_run(quantization, names[:2], size, 0),
            expert_run(quantization, names[2:], middle, self.start),
        )
        floats = None in runs or moe.family.stacked or moe.family.halves
        self.shared = _joined(moe, shard) if floats else 0
        if packed:
            self.gate_up_proj, self.gate_up_scales = _new_mxfp4(held, 2 * middle, size)
            self.down_proj, self.down_scales = _new_mxfp4(held, size, middle)
        elif floats:
            self.gate_up_proj = new_weight(held + self.shared, 2 * middle, size)
            self.down_proj = new_weight(held + self.shared, size, middle)
        else:
            self.gate_up_proj, self.gate_up_scales = _new_fp8(held, 2 * middle, size, runs[0])
            self.down_proj, self.down_scales = _new_fp8(held, size, middle, runs[1])
        self.gate_up_bias = new_weight(held, 2 * middle) if moe.family.stacked else None
        if packed and self.gate_up_bias is not None:
            self.gate_up_bias.zero_()
        adds = moe.family.stacked and (shard.expert_parallel or shard.rank == 0)
        self.down_bias = new_weight(held, size) if adds else None
        self.swiglu = None if moe.swiglu is None else ClampedSwiGLU(*moe.swiglu)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Weighted sum of this rank's experts, [tokens, size].

        Args:
            x: [tokens, size].
            weights: [tokens, top_k], or with columns for the shared experts.
            ids: Numbers of the experts, in the shape of `weights`.
        """
        left_out = self.shared if ids.shape[1] == self.moe.top_k else 0
        held = len(self.down_proj) - left_out
        return fused_moe(
            x,
            self.gate_up_proj[:held],
            self.down_proj[:held],
            weights,
            ids,
            first_expert=self.first,
            num_experts=self.moe.num_experts + self.shared - left_out,
            gate_up_scales=self.gate_up_scales,
            down_scales=self.down_scales,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            swiglu=self.swiglu,
        )

    def add_shared(self, x: Tensor, out: Tensor) -> None:
        """Add the shared experts' outputs for `x`, [tokens, size], to `out`."""
        first, middle = len(self.down_proj) - self.shared, self.down_proj.shape[2]
        both = product(x, self.gate_up_proj[first:].flatten(0, 1), None)
        hidden = silu_and_mul(both.view(-1, 2 * middle)).view(len(x), -1)
        for index, down in enumerate(self.down_proj[first:]):
            out.addmm_(hidden[:, index * middle : (index + 1) * middle], down.t())

    def pieces(self) -> Iterator[Piece]:
        """Three tensors per expert, or stacks of all; the shared experts are three tensors."""
        if self.moe.family.stacked or self.moe.family.halves:
            yield from self._stacks()
            return
        total, held = self.moe.intermediate_size, len(self.down_proj) - self.shared
        for index in range(held):
            expert = f"{self.name}.{self.first + index}"
            names = [f"{expert}.{part}" for part in self.moe.family.projections]
            yield from self._expert(index, names, total, self.start)
        name = f"{self.name.removesuffix('experts')}{self.moe.family.shared_experts}"
        names = [f"{name}.{part}_proj" for part in ("gate", "up", "down")]
        for index in range(self.shared):
            start = index * total + self.start
            yield from self._expert(held + index, names, self.shared * total, start)

    def _expert(self, index: int, names: list[str], total: int, start: int) -> Iterator[Piece]:
        """Gate, up and down of one expert, with intermediate features from `start` on."""
        middle, both = self.down_proj.shape[2], self.gate_up_proj[index]
        scales: list[Tensor | None] = [None, None, None]
        if self.gate_up_scales is not None and self.down_scales is not None:
            of_both = self.gate_up_scales[index].t()
            scales = [of_both[:middle], of_both[middle:], self.down_scales[index].t()]
        targets, rows = [both[:middle], both[middle:], self.down_proj[index]], (total, self.size)
        for name, target, own in zip(names, targets, scales, strict=True):
            turned = name is names[2]
            shape = rows[::-1] if turned else rows
            yield Piece(f"{name}.weight", shape, target, int(turned), start, scales=own)

    def _stacks(self) -> Iterator[Piece]:
        moe, size, start, rows = self.moe, self.size, self.start, 2 * self.middle
        total = moe.intermediate_size
        gate_up, down = (size, 2 * total), (total, size)
        both, turned = self.gate_up_proj.transpose(1, 2), self.down_proj.transpose(1, 2)
        if self.gate_up_scales is not None and self.down_scales is not None:
            blocks, scales = cdiv(self.middle, COLUMNS), self.gate_up_scales[:, :, :rows]
            packed = self.gate_up_proj[:, :, :rows]
            yield from self._stack("gate_up_proj", gate_up, packed, 1, 2 * start, scales, rows)
            packed, scales = self.down_proj[:, :blocks], self.down_scales[:, :blocks]
            yield from self._stack("down_proj", down, packed, 0, start, scales, self.middle)
        elif moe.family.halves:
            gate, up = both.chunk(2, dim=2)
            yield from self._stack("gate_up_proj", gate_up, gate, 1, start)
            yield from self._stack("gate_up_proj", gate_up, up, 1, total + start)
            yield from self._stack("down_proj", down, turned, 0, start)
        else:
            yield from self._stack("gate_up_proj", gate_up, both, 1, 2 * start)
            yield from self._stack("down_proj", down, turned, 0, start)
        if self.gate_up_bias is not None:
            bias = self.gate_up_bias[:, :rows]
            yield from self._stack("gate_up_proj_bias", (2 * total,), bias, 0, 2 * start)
        if self.down_bias is not None:
            yield from self._stack("down_proj_bias", (size,), self.down_bias)

    def _stack(
        self,
        name: str,
        shape: tuple[int, ...],
        targets: Tensor,
        dim: int = 0,
        start: int = 0,
        scales: Tensor | None = None,
        number: int | None = None,
    ) -> Iterator[Piece]:
        """This rank's part of a tensor of all experts, for each of its experts; see `Piece`."""
        for index, target in enumerate(targets if targets.numel() else ()):
            yield Piece(
                f"{self.name}.{name}", (self.moe.num_experts, *shape), target, dim, start,
                index=self.first + index, number=number,
                scales=None if scales is None else scales[index],
            )  # fmt: skip


def _joined(moe: MoeConfig, shard: Shard) -> int:
    """Number of shared experts that can follow the routed ones; 0 if they differ in form."""
    family = moe.family
    other = family.stacked or family.halves or family.weighs_inputs or family.shared_gate
    count, rest = divmod(moe.shared_intermediate_size, moe.intermediate_size)
    return 0 if other or rest or shard.expert_parallel else count


def _new_fp8(
    held: int, rows: int, columns: int, run: int | None
) -> tuple[nn.Parameter, nn.Parameter]:
    """FP8 weights to be filled, and their scales, one for each `run` columns of a row."""
    scales = new_weight(held, columns // (run or columns), rows, dtype=torch.float32)
    return new_weight(held, rows, columns, dtype=FP8), scales


def _new_mxfp4(held: int, rows: int, columns: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Zero weights in MXFP4, packed, and their scales; see `pack_mxfp4`."""
    blocks = cdiv(columns, COLUMNS)
    words = torch.zeros(held, blocks, rows, GROUP, dtype=WORDS)
    scales = torch.zeros(held, blocks, rows, dtype=torch.int32)
    return nn.Parameter(words, requires_grad=False), nn.Parameter(scales, requires_grad=False)


class MoE(nn.Module):
    """Router, experts and shared experts, in place of an MLP.

    Args:
        layer: Name of the layer in checkpoints.
        size: Number of features of hidden states.
        moe: The model's mixtures.
        shard: This rank's share.
        quantization: Quantization of the checkpoint.
    """

    def __init__(
        self,
        layer: str,
        size: int,
        moe: MoeConfig,
        shard: Shard,
        quantization: Quantization | None = None,
    ) -> None:
        super().__init__()
        name = f"{layer}.{moe.family.block}"
        self.weighs_inputs = moe.family.weighs_inputs
        self.gate = Router(f"{name}.{moe.family.router}", size, moe)
        self.experts = Experts(f"{name}.experts", size, moe, shard, quantization)
        self.shared_experts: GatedMLP | None = None
        self.shared_gate: ColumnLinear | None = None
        if moe.shared_intermediate_size and not self.experts.shared:
            self.shared_experts = GatedMLP(
                f"{name}.{moe.family.shared_experts}", size, moe.shared_intermediate_size, shard,
                bias=False, quantization=quantization,
            )  # fmt: skip
            if moe.family.shared_gate is not None:
                gate = f"{name}.{moe.family.shared_gate}"
                self.shared_gate = whole_linear(gate, size, 1, None)

    def forward(self, x: Tensor) -> Tensor:
        """Map [tokens, size] to the rank's part of the same."""
        shared = self.experts.shared
        joined = shared if len(x) <= JOINED_TOKENS else 0
        weights, ids = self.gate(x, joined)
        if self.weighs_inputs:
            given = (x[:, None] * weights[..., None]).flatten(0, 1)
            whole = torch.ones_like(weights).view(-1, 1)
            out: Tensor = self.experts(given, whole, ids.view(-1, 1))
            out = out.view(*ids.shape, -1).sum(1)
        else:
            out = self.experts(x, weights, ids)
        if shared > joined:
            self.experts.add_shared(x, out)
        if self.shared_experts is not None:
            of_all = self.shared_experts(x)
            if self.shared_gate is not None:
                of_all *= self.shared_gate(x).sigmoid_()
            out += of_all
        return out

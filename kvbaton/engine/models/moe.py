"""Mixtures of experts: a router sends each token through a few of many MLPs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from kvbaton.engine.collectives import Shard
from kvbaton.engine.models.layers import Piece, WeightedModule, new_weight, product
from kvbaton.engine.moe_config import MoeConfig
from kvbaton.kernels.fused_moe import fused_moe
from kvbaton.kernels.topk_softmax import topk_softmax


class Router(WeightedModule):
    """Chooses the experts of each token; every rank holds all of it and chooses the same.

    Source: Shazeer et al., "Outrageously Large Neural Networks", arXiv 1701.06538.
    """

    def __init__(self, name: str, size: int, moe: MoeConfig) -> None:
        super().__init__()
        self.name, self.moe = name, moe
        self.weight = new_weight(moe.num_experts, size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, size] to weights and numbers of experts, each [tokens, top_k].

        Probabilities are a softmax in float32 over all experts.
        """
        moe, logits = self.moe, product(x, self.weight, None)
        dtype = torch.float32 if moe.float32_weights else logits.dtype
        return topk_softmax(logits, moe.top_k, renormalize=moe.norm_topk_prob, dtype=dtype)

    def pieces(self) -> Iterator[Piece]:
        """Its weight."""
        yield Piece(f"{self.name}.weight", tuple(self.weight.shape), self.weight)


class Experts(WeightedModule):
    """The MLPs ``down(silu(gate(x)) * up(x))``, stacked: this rank's part of each, or some whole.

    With `Shard.expert_parallel` a rank holds a contiguous range of experts, else its rows of gate
    and up, and columns of down, of all experts. Either way the ranks' results add up.

    Attributes:
        first: number of the first expert held.
        gate_up_proj: [experts held, 2 * intermediate size held, size].
        down_proj: [experts held, size, intermediate size held].
    """

    def __init__(self, name: str, size: int, moe: MoeConfig, shard: Shard) -> None:
        super().__init__()
        self.name, self.moe = name, moe
        self.first, held = 0, moe.num_experts
        self.start, middle = 0, moe.intermediate_size
        if shard.expert_parallel:
            self.first, held = shard.span(held)
        else:
            self.start, middle = shard.span(middle)
        self.gate_up_proj = new_weight(held, 2 * middle, size)
        self.down_proj = new_weight(held, size, middle)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """[tokens, size] to the weighted sum of what this rank computes, [tokens, size].

        Args:
            x: the tokens.
            weights: [tokens, top_k].
            ids: [tokens, top_k], which experts.
        """
        shared = {"first_expert": self.first, "num_experts": self.moe.num_experts}
        return fused_moe(x, self.gate_up_proj, self.down_proj, weights, ids, **shared)

    def pieces(self) -> Iterator[Piece]:
        """Three tensors per expert."""
        held, size, middle = self.down_proj.shape
        gate, up, down = self.moe.family.projections
        total = self.moe.intermediate_size
        for index in range(held):
            name, both = f"{self.name}.{self.first + index}", self.gate_up_proj[index]
            yield Piece(f"{name}.{gate}.weight", (total, size), both[:middle], 0, self.start)
            yield Piece(f"{name}.{up}.weight", (total, size), both[middle:], 0, self.start)
            target = self.down_proj[index]
            yield Piece(f"{name}.{down}.weight", (size, total), target, 1, self.start)


class MoE(nn.Module):
    """Router and experts, in the place of an MLP.

    Args:
        layer: the layer's name in checkpoints.
        size: of the hidden states.
        moe: the model's mixtures.
        shard: this rank's share.
    """

    def __init__(self, layer: str, size: int, moe: MoeConfig, shard: Shard) -> None:
        super().__init__()
        name = f"{layer}.{moe.family.block}"
        self.shard = shard
        self.gate = Router(f"{name}.gate", size, moe)
        self.experts = Experts(f"{name}.experts", size, moe, shard)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, size] to [tokens, size]."""
        return self.shard.collectives.all_reduce(self.experts(x, *self.gate(x)))

"""The vision tower of Qwen3-VL: learned positions, and rows for several layers of the model.

Sources: Bai et al., "Qwen3-VL Technical Report", arXiv 2511.21631; deepstack: Meng et al., arXiv
2406.04334.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvbaton.engine.models.layers import Piece, WeightedModule, new_weight
from kvbaton.engine.models.vision_layers import (
    LayerNorm,
    PatchPlan,
    VisionAttention,
    VisionBlock,
    VisionTower,
    linear,
)
from kvbaton.engine.vision_config import VisionConfig


class GeluMLP(nn.Module):
    """``fc2(gelu(fc1(x)))``, gelu by tanh."""

    def __init__(self, name: str, config: VisionConfig) -> None:
        super().__init__()
        self.fc1 = linear(f"{name}.linear_fc1", config.hidden_size, config.intermediate_size)
        self.fc2 = linear(f"{name}.linear_fc2", config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[patches, hidden] to [patches, hidden]."""
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))  # type: ignore[no-any-return]


class PatchMerger(nn.Module):
    """Squares of patches to rows; normalises each patch, or the joined vector (deepstack)."""

    def __init__(self, name: str, config: VisionConfig, *, norm_joined: bool) -> None:
        super().__init__()
        self.wide = config.hidden_size * config.merge_size**2
        self.norm = LayerNorm(f"{name}.norm", self.wide if norm_joined else config.hidden_size)
        self.norm_joined = norm_joined
        self.fc1 = linear(f"{name}.linear_fc1", self.wide, self.wide)
        self.fc2 = linear(f"{name}.linear_fc2", self.wide, config.out_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[patches, hidden] to [rows, out_hidden_size]."""
        joined = x.view(-1, self.wide)
        normed = self.norm(joined) if self.norm_joined else self.norm(x).view(-1, self.wide)
        return self.fc2(F.gelu(self.fc1(normed)))  # type: ignore[no-any-return]


class LearnedPositions(WeightedModule):
    """A square table of vectors, stretched over each frame by bilinear interpolation."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.side = int(config.num_position_embeddings**0.5)
        self.weight = new_weight(config.num_position_embeddings, config.hidden_size)

    def forward(self, positions: Tensor, sizes: Tensor) -> Tensor:
        """Positions and frame sizes, both [patches, 2], to vectors [patches, hidden] float32."""
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
        yield Piece("visual.pos_embed.weight", tuple(self.weight.shape), self.weight)


class Qwen3VisionTower(VisionTower):
    """The whole tower."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(config, patch_bias=True)
        self.pos_embed = LearnedPositions(config)
        self.merger = PatchMerger("visual.merger", config, norm_joined=False)
        self.deep_mergers = nn.ModuleList(
            PatchMerger(f"visual.deepstack_merger_list.{number}", config, norm_joined=True)
            for number in range(len(config.deepstack_layers))
        )

    def block(self, layer: int) -> VisionBlock:
        """One layer."""
        name, size = f"visual.blocks.{layer}", self.config.hidden_size
        return VisionBlock(
            LayerNorm(f"{name}.norm1", size),
            VisionAttention(f"{name}.attn", self.config),
            LayerNorm(f"{name}.norm2", size),
            GeluMLP(f"{name}.mlp", self.config),
        )

    def run(self, x: Tensor, plan: PatchPlan) -> list[Tensor]:
        """See `VisionTower.run`."""
        x = x + self.pos_embed(plan.positions, plan.sizes).to(x.dtype)
        rotary, mergers = self.rotary(plan.positions), iter(self.deep_mergers)
        deep = []
        for number, block in enumerate(self.blocks):
            x = block(x, rotary, plan.frames)
            if number in self.config.deepstack_layers:
                deep.append(next(mergers)(x))
        return [self.merger(x), *deep]

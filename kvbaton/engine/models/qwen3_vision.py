"""The vision tower of Qwen3-VL: learned positions, and rows for several layers of the model.

Sources: Bai et al., "Qwen3-VL Technical Report", arXiv 2511.21631; deepstack: Meng et al., arXiv
2406.04334.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from kvbaton.engine.models.vision_layers import (
    GeluMLP,
    LayerNorm,
    LearnedPositions,
    PatchPlan,
    VisionAttention,
    VisionBlock,
    VisionRotary,
    VisionTower,
    frame_patches,
    linear,
)
from kvbaton.engine.vision_config import VisionConfig


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


class Qwen3VisionTower(VisionTower):
    """The whole tower."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(config, frame_patches(config, bias=True))
        self.rotary = VisionRotary(config)
        self.pos_embed = LearnedPositions("visual.pos_embed", config)
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
            VisionAttention.fused(f"{name}.attn", self.config),
            LayerNorm(f"{name}.norm2", size),
            GeluMLP(f"{name}.mlp.linear_fc", self.config),
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

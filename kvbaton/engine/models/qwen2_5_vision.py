"""The vision tower of Qwen2.5-VL: most layers attend within windows, a few to the whole image.

Source: Bai et al., "Qwen2.5-VL Technical Report", arXiv 2502.13923, section 2.1.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kvbaton.engine.collectives import Shard
from kvbaton.engine.models.layers import GatedMLP, RMSNorm
from kvbaton.engine.models.vision_layers import (
    EPS,
    PatchPlan,
    VisionAttention,
    VisionBlock,
    VisionRotary,
    VisionTower,
    frame_patches,
    linear,
)
from kvbaton.engine.vision_config import VisionConfig


class Qwen25VisionTower(VisionTower):
    """The whole tower."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(config, frame_patches(config, bias=False))
        self.rotary = VisionRotary(config)
        wide = config.hidden_size * config.merge_size**2
        self.norm = RMSNorm("visual.merger.ln_q", config.hidden_size, EPS)
        self.merge_in = linear("visual.merger.mlp.0", wide, wide)
        self.merge_out = linear("visual.merger.mlp.2", wide, config.out_hidden_size)

    def block(self, layer: int) -> VisionBlock:
        """One layer."""
        name, size = f"visual.blocks.{layer}", self.config.hidden_size
        middle = self.config.intermediate_size
        return VisionBlock(
            RMSNorm(f"{name}.norm1", size, EPS),
            VisionAttention.fused(f"{name}.attn", self.config),
            RMSNorm(f"{name}.norm2", size, EPS),
            GatedMLP(f"{name}.mlp", size, middle, Shard(), bias=True),
        )

    def run(self, x: Tensor, plan: PatchPlan) -> list[Tensor]:
        """See `VisionTower.run`."""
        rotary, full = self.rotary(plan.positions), self.config.full_attention_layers
        for number, block in enumerate(self.blocks):
            x = block(x, rotary, plan.frames if number in full else plan.windows)
        merged = self.norm(x).view(-1, self.config.merge_size**2 * x.shape[1])
        return [self.merge_out(F.gelu(self.merge_in(merged)))]

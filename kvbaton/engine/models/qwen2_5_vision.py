"""The vision tower of Qwen2.5-VL: most layers attend within windows, a few to the whole image.

Source: Bai et al., "Qwen2.5-VL Technical Report", arXiv 2502.13923, section 2.1.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from kvbaton.engine.models.layers import ColumnLinear, RMSNorm
from kvbaton.engine.models.vision_layers import (
    EPS,
    VisionAttention,
    VisionBlock,
    VisionTower,
    linear,
)
from kvbaton.engine.models.vision_plan import Plan
from kvbaton.engine.vision_config import VisionConfig
from kvbaton.kernels.silu_and_mul import silu_and_mul


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, with biases."""

    def __init__(self, name: str, config: VisionConfig) -> None:
        super().__init__()
        size, middle = config.hidden_size, config.intermediate_size
        parts = [(f"{name}.{part}_proj", middle, (0, middle)) for part in ("gate", "up")]
        self.gate_up_proj = ColumnLinear(size, parts, bias=True)
        self.down_proj = linear(f"{name}.down_proj", middle, size)

    def forward(self, x: Tensor) -> Tensor:
        """[patches, hidden] to [patches, hidden]."""
        return self.down_proj(silu_and_mul(self.gate_up_proj(x)))  # type: ignore[no-any-return]


class Qwen25VisionTower(VisionTower):
    """The whole tower."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(config, patch_bias=False)
        wide = config.hidden_size * config.merge_size**2
        self.norm = RMSNorm("visual.merger.ln_q", config.hidden_size, EPS)
        self.merge_in = linear("visual.merger.mlp.0", wide, wide)
        self.merge_out = linear("visual.merger.mlp.2", wide, config.out_hidden_size)

    def block(self, layer: int) -> VisionBlock:
        """One layer."""
        name, size = f"visual.blocks.{layer}", self.config.hidden_size
        return VisionBlock(
            RMSNorm(f"{name}.norm1", size, EPS),
            VisionAttention(f"{name}.attn", self.config),
            RMSNorm(f"{name}.norm2", size, EPS),
            GatedMLP(f"{name}.mlp", self.config),
        )

    def run(self, x: Tensor, plan: Plan) -> list[Tensor]:
        """See `VisionTower.run`."""
        rotary, full = self.rotary(plan.positions), self.config.full_attention_layers
        for number, block in enumerate(self.blocks):
            x = block(x, rotary, plan.frames if number in full else plan.windows)
        merged = self.norm(x).view(-1, self.config.merge_size**2 * x.shape[1])
        return [self.merge_out(F.gelu(self.merge_in(merged)))]

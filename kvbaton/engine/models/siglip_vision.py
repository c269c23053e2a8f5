"""The vision tower of Gemma 3: SigLIP (arXiv 2303.15343), and what makes rows of its patches.

All images have one size. Patches see all of their image, and are told apart by learned positions.
The mean of each square of patches is normalised and projected (arXiv 2503.19786, section 2.1).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kvbaton.engine.models.layers import ColumnLinear, Piece, RMSNorm, WeightedModule, new_weight
from kvbaton.engine.models.vision_layers import (
    EPS,
    GeluMLP,
    LayerNorm,
    LearnedPositions,
    PatchEmbedding,
    PatchPlan,
    VisionAttention,
    VisionBlock,
    VisionTower,
    linear,
)
from kvbaton.engine.vision_config import VisionConfig


class SoftTokenProjector(WeightedModule):
    """Squares of patches to rows: their mean, normalised, and projected."""

    name = "multi_modal_projector.mm_input_projection_weight"

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.area = config.merge_size**2
        self.norm = RMSNorm("multi_modal_projector.mm_soft_emb_norm", config.hidden_size, EPS, 1.0)
        self.weight = new_weight(config.hidden_size, config.out_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[patches, hidden] to [rows, out_hidden_size]."""
        pooled = x.view(-1, self.area, x.shape[1]).mean(dim=1)
        return self.norm(pooled) @ self.weight  # type: ignore[no-any-return]

    def pieces(self) -> Iterator[Piece]:
        """The projection, stored by rows of its input."""
        yield Piece(self.name, tuple(self.weight.shape), self.weight)


class SiglipVisionTower(VisionTower):
    """The whole tower."""

    def __init__(self, config: VisionConfig) -> None:
        name, size = "vision_tower.embeddings", config.patch_size
        filters = config.hidden_size, config.in_channels, size, size
        super().__init__(config, PatchEmbedding(f"{name}.patch_embedding", filters, bias=True))
        self.pos_embed = LearnedPositions(f"{name}.position_embedding", config)
        self.norm = LayerNorm("vision_tower.post_layernorm", config.hidden_size)
        self.projector = SoftTokenProjector(config)

    def block(self, layer: int) -> VisionBlock:
        """One layer."""
        name, size = f"vision_tower.encoder.layers.{layer}", self.config.hidden_size
        attn = f"{name}.self_attn"
        parts = [(f"{attn}.{part}_proj", size, (0, size)) for part in "qkv"]
        qkv, proj = ColumnLinear(size, parts, bias=True), linear(f"{attn}.out_proj", size, size)
        return VisionBlock(
            LayerNorm(f"{name}.layer_norm1", size),
            VisionAttention(self.config.num_heads, qkv, proj),
            LayerNorm(f"{name}.layer_norm2", size),
            GeluMLP(f"{name}.mlp.fc", self.config),
        )

    def run(self, x: Tensor, plan: PatchPlan) -> list[Tensor]:
        """See `VisionTower.run`."""
        x = x + self.pos_embed(plan.positions, plan.sizes).to(x.dtype)
        for block in self.blocks:
            x = block(x, None, plan.frames)
        return [self.projector(self.norm(x))]

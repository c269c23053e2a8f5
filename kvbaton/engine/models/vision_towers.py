"""The vision towers of Qwen2.5-VL, Qwen3-VL and Gemma 3.

Layers of Qwen2.5-VL mostly attend within windows, a few to the whole image (Bai et al., "Qwen2.5-VL
Technical Report", arXiv 2502.13923, section 2.1). Qwen3-VL has learned positions, and rows for
several layers of the model (Bai et al., "Qwen3-VL Technical Report", arXiv 2511.21631; DeepStack:
Meng et al., arXiv 2406.04334). Gemma 3 uses SigLIP (arXiv 2303.15343): all images have one size and
full attention; the mean of each square of patches is normalised and projected (arXiv 2503.19786,
section 2.1).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from kvbaton.engine.collectives import Shard
from kvbaton.engine.models.layers import (
    ColumnLinear,
    GatedMLP,
    Piece,
    RMSNorm,
    WeightedModule,
)
from kvbaton.engine.models.linear import new_weight
from kvbaton.engine.models.vision_layers import (
    EPS,
    GeluMLP,
    LayerNorm,
    LearnedPositions,
    PatchEmbedding,
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
    """The vision tower of Qwen2.5-VL."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(config, frame_patches(config, bias=False))
        self.rotary = VisionRotary(config)
        wide = config.hidden_size * config.merge_size**2
        self.norm = RMSNorm("visual.merger.ln_q", config.hidden_size, EPS)
        self.merge_in = linear("visual.merger.mlp.0", wide, wide)
        self.merge_out = linear("visual.merger.mlp.2", wide, config.out_hidden_size)

    def block(self, layer: int) -> VisionBlock:
        """Make one layer."""
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


class PatchMerger(nn.Module):
    """Merges squares of patches to rows; normalises patches, or the joined vector (DeepStack)."""

    def __init__(self, name: str, config: VisionConfig, *, norm_joined: bool) -> None:
        super().__init__()
        self.wide = config.hidden_size * config.merge_size**2
        self.normed = self.wide if norm_joined else config.hidden_size
        self.norm = LayerNorm(f"{name}.norm", self.normed)
        self.fc1 = linear(f"{name}.linear_fc1", self.wide, self.wide)
        self.fc2 = linear(f"{name}.linear_fc2", self.wide, config.out_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map [patches, hidden] to [rows, out_hidden_size]."""
        normed = self.norm(x.view(-1, self.normed)).view(-1, self.wide)
        return self.fc2(F.gelu(self.fc1(normed)))  # type: ignore[no-any-return]


class Qwen3VisionTower(VisionTower):
    """The vision tower of Qwen3-VL."""

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
        """Make one layer."""
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


class SoftTokenProjector(WeightedModule):
    """Merges squares of patches to rows: their mean, normalised and projected."""

    name = "multi_modal_projector.mm_input_projection_weight"

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.area = config.merge_size**2
        self.norm = RMSNorm("multi_modal_projector.mm_soft_emb_norm", config.hidden_size, EPS, 1.0)
        self.weight = new_weight(config.hidden_size, config.out_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map [patches, hidden] to [rows, out_hidden_size]."""
        pooled = x.view(-1, self.area, x.shape[1]).mean(dim=1)
        return self.norm(pooled) @ self.weight  # type: ignore[no-any-return]

    def pieces(self) -> Iterator[Piece]:
        """The projection, stored with a row per input feature."""
        yield Piece(self.name, tuple(self.weight.shape), self.weight)


class SiglipVisionTower(VisionTower):
    """The vision tower of Gemma 3."""

    def __init__(self, config: VisionConfig) -> None:
        name, size = "vision_tower.embeddings", config.patch_size
        filters = config.hidden_size, config.in_channels, size, size
        super().__init__(config, PatchEmbedding(f"{name}.patch_embedding", filters, bias=True))
        self.pos_embed = LearnedPositions(f"{name}.position_embedding", config)
        self.norm = LayerNorm("vision_tower.post_layernorm", config.hidden_size)
        self.projector = SoftTokenProjector(config)

    def block(self, layer: int) -> VisionBlock:
        """Make one layer."""
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

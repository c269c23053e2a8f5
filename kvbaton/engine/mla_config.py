"""What ``config.json`` says about multi-head latent attention. Needs no torch.

Source: DeepSeek-AI, "DeepSeek-V2", arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvbaton.engine.config_fields import check_sizes, convert_fields
from kvbaton.errors import ConfigError

MLA_ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")


@dataclass(frozen=True, kw_only=True)
class MlaConfig:
    """Attention whose keys and values are projections of one latent row a token.

    Attributes:
        q_rank: features of the latent that queries are projected from; 0 for none.
        kv_rank: of the latent of keys and values.
        nope_dim: features of a head's queries and keys that are not turned.
        rope_dim: those that are, of keys one for all heads.
        value_dim: features of a head's values.
        interleaved: features 2i and 2i + 1 turn together, as projected; else i and
            i + rope_dim / 2.
        scale: of the logits, YaRN's part included.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool
    scale: float

    @property
    def head_dim(self) -> int:
        """Features of a head's queries and keys."""
        return self.nope_dim + self.rope_dim

    @property
    def row_dim(self) -> int:
        """Features that are kept of a token: its latent, and what is turned of its keys."""
        return self.kv_rank + self.rope_dim


class _RawRope(msgspec.Struct):
    rope_type: str | None = None
    type: str | None = None
    factor: float = 1.0
    mscale_all_dim: float | None = None


class _RawMla(msgspec.Struct):
    """The fields of ``config.json`` that we read, under their own names."""

    kv_lora_rank: int = 512
    q_lora_rank: int | None = 1536
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_interleave: bool | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_scaling: _RawRope | None = None
    rope_parameters: _RawRope | None = None


def read_mla(content: Mapping[str, Any], architecture: str) -> MlaConfig | None:
    """The latent attention of a model; None for an architecture without.

    Args:
        content: of ``config.json``.
        architecture: which it names.

    Raises:
        ConfigError: a field is of the wrong type or out of range, or not supported.
    """
    if architecture not in MLA_ARCHITECTURES:
        return None
    raw = convert_fields(content, _RawMla, architecture)
    for name in ("attention_bias", "mlp_bias"):
        if getattr(raw, name):
            raise ConfigError("--model", f"{name} of {architecture} is unsupported")
    head_dim = raw.qk_nope_head_dim + raw.qk_rope_head_dim
    sizes = (
        ("kv_lora_rank", raw.kv_lora_rank, 1 << 31),
        ("q_lora_rank", raw.q_lora_rank or 1, 1 << 31),
        ("qk_nope_head_dim", raw.qk_nope_head_dim, 1 << 31),
        ("qk_rope_head_dim", raw.qk_rope_head_dim, 1 << 31),
        ("v_head_dim", raw.v_head_dim, head_dim),  # attention kernels take one width for both
    )
    check_sizes(sizes)
    if raw.qk_rope_head_dim % 2:
        raise ConfigError("--model", f"qk_rope_head_dim {raw.qk_rope_head_dim} must be even")
    rope = raw.rope_parameters or raw.rope_scaling or _RawRope()
    stretch = 1.0
    if (rope.rope_type or rope.type or "default") != "default" and rope.factor > 1:
        stretch += 0.1 * (rope.mscale_all_dim or 0.0) * math.log(rope.factor)
    interleaved = architecture == "DeepseekV2ForCausalLM" or raw.rope_interleave is not False
    return MlaConfig(
        q_rank=raw.q_lora_rank or 0,
        kv_rank=raw.kv_lora_rank,
        nope_dim=raw.qk_nope_head_dim,
        rope_dim=raw.qk_rope_head_dim,
        value_dim=raw.v_head_dim,
        interleaved=interleaved,
        scale=head_dim**-0.5 * stretch**2,
    )

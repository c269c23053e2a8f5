"""What ``config.json`` says about rotary embeddings (`RopeConfig`). Needs no torch.

Source: Su et al., "RoFormer", arXiv 2104.09864; for scaling methods, see `RopeConfig`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import msgspec

from kvbaton.engine.vision_config import VisionFamily
from kvbaton.errors import ModelError
from kvbaton.types import Positive, Size

RotaryBase = Annotated[float, msgspec.Meta(gt=1)]
"""Base of a rotation: frequencies are its negative powers."""

MAX_TURNS = 1e9
"""Largest ``beta_fast``; far more turns than any context has positions."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: its base, and Llama 3's scaling of low frequencies if `factor` is not 1.

    Attributes:
        linear: Whether all frequencies are divided by `factor` (Chen et al., arXiv 2306.15595).
        yarn: Whether frequencies with at most `beta_slow` turns within the original positions are
            divided by `factor`, those with at least `beta_fast` turns are kept, and those in
            between are interpolated (Peng et al., arXiv 2309.00071).
        truncate: Whether YaRN's interpolation starts and ends at whole frequency numbers.
        attention_factor: Factor of cosines and sines.
        mrope_section: For multimodal models, how many of the ``head_dim / 2`` frequencies belong to
            the temporal, vertical and horizontal position (Wang et al., arXiv 2409.12191).
        mrope_interleaved: Whether the three alternate (t, h, w, t, h, w, ...) instead of being
            consecutive; the remaining frequencies are temporal.
        share: Share of a head's features that are rotated, the first ones.
        proportional: Whether features are rotated as if all were: the first ones paired with those
            half a head further on, with the frequencies of a full rotation.
    """

    theta: float = 10_000.0
    factor: float = 1.0
    linear: bool = False
    yarn: bool = False
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False
    share: float = 1.0
    proportional: bool = False

    def rotary_dim(self, head_dim: int) -> int:
        """Number of features per head that are rotated."""
        return int(head_dim * self.share)


class RotaryEntry(msgspec.Struct):
    """The fields of an entry for rotary embeddings, under their own names."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: RotaryBase | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Size | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    partial_rotary_factor: Positive | None = None
    mrope_section: tuple[int, int, int] | None = None
    full_attention: RotaryEntry | None = None
    sliding_attention: RotaryEntry | None = None

    @property
    def kind(self) -> str:
        """Name of the scaling method."""
        return self.rope_type or self.type or "default"


class RawRotary(msgspec.Struct, kw_only=True):
    """The fields of ``config.json`` about rotation, under their own names."""

    hidden_size: Size
    num_attention_heads: Size
    head_dim: Size | None = None
    max_position_embeddings: Size = 2048
    original_max_position_embeddings: Size | None = None
    rope_theta: RotaryBase | None = None
    rope_scaling: RotaryEntry | None = None
    rope_parameters: RotaryEntry | None = None
    rope_local_base_freq: RotaryBase = 10_000.0
    partial_rotary_factor: Positive | None = None

    @property
    def head_size(self) -> int:
        """Features per head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


def read_rope(
    raw: RawRotary,
    base: float,
    share: float | None,
    vision: VisionFamily | None,
    unsaid: RotaryEntry,
) -> RopeConfig:
    """The rotation of a model; of its layers without a window, if others have their own.

    Args:
        raw: Fields of ``config.json``.
        base: Default base of the rotation.
        share: Default share of a head's features that are rotated; None for families that rotate
            all.
        vision: Family of a multimodal model; None for a text-only model.
        unsaid: Entry to use if the folder has none.

    Raises:
        ConfigError: A field is missing, out of range or not supported; names it.
    """
    rope = raw.rope_parameters or raw.rope_scaling or unsaid
    rope = rope.full_attention or rope
    theta = rope.rope_theta or raw.rope_theta or base
    kind = rope.kind
    if vision is not None:
        if kind not in ("default", "mrope"):
            raise ModelError(f"rope_type {kind!r} is unsupported; need 'default' or 'mrope'")
        half, section = raw.head_size // 2, rope.mrope_section
        if section is None or sum(section) != half or min(section) < 0:
            raise ModelError(f"mrope_section must be three numbers that add up to {half}")
        interleaved = vision.mrope_interleaved
        return RopeConfig(theta=theta, mrope_section=section, mrope_interleaved=interleaved)
    if raw.rope_scaling is not None and raw.rope_scaling.kind != kind:
        raise ModelError(
            f"rope_scaling says {raw.rope_scaling.kind!r}, rope_parameters {kind!r}; keep one"
        )
    turned = raw.partial_rotary_factor or rope.partial_rotary_factor or share or 1.0
    if kind == "proportional":
        factor = rope.factor or 1.0
        return RopeConfig(theta=theta, share=turned, proportional=True, factor=factor, linear=True)
    if turned != 1.0 and (share is None or kind != "default"):
        raise ModelError(f"partial_rotary_factor {turned:g} is unsupported")
    if kind == "default":
        half, pairs = raw.head_size // 2, raw.head_size * turned / 2
        if turned != 1.0 and not (0 < pairs < half and pairs == int(pairs)):
            raise ModelError(
                f"partial_rotary_factor {turned:g} must give an even part of {2 * half}"
            )
        return RopeConfig(theta=theta, share=turned)
    factor = rope.factor or 0.0
    if kind in ("linear", "yarn") and factor < 1:
        raise ModelError(f"rope_type {kind!r} needs a factor from 1 on, not {factor:g}")
    if kind == "linear":
        return RopeConfig(theta=theta, factor=factor, linear=True)
    original = (
        raw.original_max_position_embeddings
        or rope.original_max_position_embeddings
        or raw.max_position_embeddings
    )
    if kind == "yarn":
        return _yarn(rope, theta, factor, original)
    if kind != "llama3":
        known = "'default', 'linear', 'llama3', 'yarn'"
        raise ModelError(f"rope_type {kind!r} is unsupported; supported: {known}")
    low, high = rope.low_freq_factor, rope.high_freq_factor
    if rope.factor is None or low is None or high is None or low >= high:
        raise ModelError(
            "rope_type 'llama3' needs factor, low_freq_factor and a high_freq_factor above that"
        )
    return RopeConfig(
        theta=theta,
        factor=rope.factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=original,
    )


def read_local_rope(raw: RawRotary) -> RopeConfig:
    """The rotation of layers with a window, if it differs from that of others.

    Raises:
        ConfigError: It is not supported; names it.
    """
    local = raw.rope_parameters.sliding_attention if raw.rope_parameters else None
    kind = local.kind if local else "default"
    if kind != "default":
        raise ModelError(f"rope_type {kind!r} of windows is unsupported")
    return RopeConfig(theta=(local.rope_theta if local else None) or raw.rope_local_base_freq)


def _yarn(rope: RotaryEntry, theta: float, factor: float, original: int) -> RopeConfig:
    fast, slow = rope.beta_fast or 32.0, rope.beta_slow or 1.0
    if not 0 < slow < fast <= MAX_TURNS:
        raise ModelError(
            f"rope_type 'yarn' needs beta_fast {fast:g} above beta_slow {slow:g} above 0, "
            f"and at most {MAX_TURNS:g}"
        )
    attention_factor = rope.attention_factor
    if attention_factor is None:
        both = rope.mscale and rope.mscale_all_dim
        scales = (rope.mscale, rope.mscale_all_dim) if both else (1.0, 0.0)
        above, below = (0.1 * (scale or 0.0) * math.log(factor) + 1.0 for scale in scales)
        attention_factor = above / below
    if not 0 < attention_factor < math.inf:
        raise ModelError(f"attention_factor {attention_factor} must be positive")
    return RopeConfig(
        theta=theta,
        factor=factor,
        yarn=True,
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.truncate,
        attention_factor=attention_factor,
        original_max_position=original,
    )

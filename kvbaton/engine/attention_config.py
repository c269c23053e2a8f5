"""What ``config.json`` says about attention that differs from Llama's. Needs no torch.

- Layers without rotation of heads (NoPE): Kazemnejad et al., "The Impact of Positional Encoding on
  Length Generalization", arXiv 2305.19466; their temperature: Nakanishi, "Scalable-Softmax", arXiv
  2501.19399.
- Multi-head latent attention: DeepSeek-AI, "DeepSeek-V2", arXiv 2405.04434, section 2.1.
- Layers with linear attention, a gated delta rule.
- Layers of Gemma 4, some of which read the keys and values of others.

Each part is read through a struct of its fields, with their defaults.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, field
from msgspec.structs import replace

from kvbaton.engine.kv_groups import LayerKV
from kvbaton.engine.rope_config import RotaryEntry
from kvbaton.errors import ModelError
from kvbaton.types import Count, Size

FieldsT = TypeVar("FieldsT")


def convert_fields(content: Mapping[str, Any], form: type[FieldsT], architecture: str) -> FieldsT:
    """Read the fields of a `msgspec.Struct`.

    Args:
        content: Content of ``config.json``.
        form: The struct.
        architecture: Architecture that the file names.

    Raises:
        ConfigError: A field is missing or of the wrong type.
    """
    try:
        return msgspec.convert(content, form)
    except msgspec.ValidationError as error:
        raise ModelError(f"config.json of {architecture}: {error}") from error


def check_sizes(sizes: Iterable[tuple[str, int, int]]) -> None:
    """Raise `ConfigError` unless each field's value lies between 1 and its bound."""
    for name, value, most in sizes:
        if not 1 <= value <= most:
            raise ModelError(f"config.json: {name} {value} is not within 1 and {most}")


NOPE_ARCHITECTURES = ("Llama4ForCausalLM",)


class NopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The layers of a model whose heads are not rotated.

    Attributes:
        num_hidden_layers: Number of all layers.
        turned: Per layer, whether its heads are rotated.
        interval: Distance between layers without rotation, where `turned` is not given.
        normed: Whether rotated heads have a norm without scale afterwards.
        tuned: Whether `attn_scale` is used.
        attn_scale: Queries at position p that are not rotated are multiplied by
            ``1 + attn_scale * log(1 + floor((p + 1) / floor_scale))``; 0 for none.
        floor_scale: See `attn_scale`.
    """

    num_hidden_layers: int
    turned: tuple[int, ...] | None = field(name="no_rope_layers", default=None)
    interval: Size = field(name="no_rope_layer_interval", default=4)
    normed: bool = field(name="use_qk_norm", default=True)
    tuned: bool | int = field(name="attn_temperature_tuning", default=True)
    attn_scale: float = 0.1
    floor_scale: Size = 8192

    @property
    def layers(self) -> tuple[bool, ...]:
        """Per layer, whether its heads are not rotated."""
        return tuple(not turns for turns in self.turned or ())


def read_nope(content: Mapping[str, Any], architecture: str) -> NopeConfig | None:
    """The layers of a model without rotation; None for an architecture without such layers.

    Args:
        content: Content of ``config.json``.
        architecture: Architecture that it names.

    Raises:
        ConfigError: A field is of the wrong type or out of range.
    """
    if architecture not in NOPE_ARCHITECTURES:
        return None
    found = convert_fields(content, NopeConfig, architecture)
    count = found.num_hidden_layers
    turned = found.turned or tuple((layer + 1) % found.interval for layer in range(count))
    if len(turned) != count:
        raise ModelError("no_rope_layers and num_hidden_layers differ in length")
    return replace(found, turned=turned, attn_scale=found.attn_scale if found.tuned else 0.0)


MLA_ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")


@dataclass(frozen=True, kw_only=True)
class MlaConfig:
    """Attention whose keys and values are projections of one latent row per token.

    Attributes:
        q_rank: Features of the latent that queries are projected from; 0 for none.
        kv_rank: Features of the latent of keys and values.
        nope_dim: Features of a head's queries and keys that are not rotated.
        rope_dim: Features that are rotated; all heads share those of keys.
        value_dim: Features of a head's values.
        interleaved: Whether rotation pairs features 2i and 2i + 1, as projected, instead of i and
            i + rope_dim / 2.
        scale: Scale of the logits, YaRN's part included.
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
        """Features stored per token: its latent, and the rotated features of its keys."""
        return self.kv_rank + self.rope_dim


class _RawMla(msgspec.Struct):
    """The fields of ``config.json`` that are read, under their own names."""

    kv_lora_rank: Size = 512
    q_lora_rank: Count | None = 1536
    qk_nope_head_dim: Size = 128
    qk_rope_head_dim: Size = 64
    v_head_dim: int = 128
    rope_interleave: bool | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_scaling: RotaryEntry | None = None
    rope_parameters: RotaryEntry | None = None


def read_mla(content: Mapping[str, Any], architecture: str) -> MlaConfig | None:
    """The latent attention of a model; None for an architecture without.

    Args:
        content: Content of ``config.json``.
        architecture: Architecture that it names.

    Raises:
        ConfigError: A field is of the wrong type, out of range or unsupported.
    """
    if architecture not in MLA_ARCHITECTURES:
        return None
    raw = convert_fields(content, _RawMla, architecture)
    for name in ("attention_bias", "mlp_bias"):
        if getattr(raw, name):
            raise ModelError(f"{name} of {architecture} is unsupported")
    head_dim = raw.qk_nope_head_dim + raw.qk_rope_head_dim
    # Attention kernels have one width for keys and values.
    check_sizes([("v_head_dim", raw.v_head_dim, head_dim)])
    if raw.qk_rope_head_dim % 2:
        raise ModelError(f"qk_rope_head_dim {raw.qk_rope_head_dim} must be even")
    rope = raw.rope_parameters or raw.rope_scaling or RotaryEntry()
    stretch = 1.0
    factor = rope.factor or 1.0
    if rope.kind != "default" and factor > 1:
        stretch += 0.1 * (rope.mscale_all_dim or 0.0) * math.log(factor)
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


LINEAR_ATTENTION_ARCHITECTURES = ("Qwen3NextForCausalLM",)


class LinearAttentionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The layers of a model with a gated delta rule in place of attention.

    Attributes:
        num_hidden_layers: Number of all layers.
        kinds: Per layer, ``linear_attention`` or ``full_attention``.
        interval: Distance between layers with attention, where `kinds` is not given.
        num_key_heads: Number of heads of queries and keys.
        num_value_heads: A multiple of that; each key head serves consecutive value heads.
        key_head_dim: Features of a query or key head.
        value_head_dim: Features of a value head.
        conv_kernel: Tokens that the preceding convolution covers, the token itself included.
    """

    num_hidden_layers: int
    kinds: tuple[str, ...] | None = field(name="layer_types", default=None)
    interval: Size = field(name="full_attention_interval", default=4)
    num_key_heads: Size = field(name="linear_num_key_heads", default=16)
    num_value_heads: Size = field(name="linear_num_value_heads", default=32)
    key_head_dim: Size = field(name="linear_key_head_dim", default=128)
    value_head_dim: Size = field(name="linear_value_head_dim", default=128)
    conv_kernel: Annotated[int, Meta(ge=2, le=1 << 16)] = field(
        name="linear_conv_kernel_dim", default=4
    )

    @property
    def layers(self) -> tuple[bool, ...]:
        """Per layer, whether it has linear attention."""
        return tuple(kind == "linear_attention" for kind in self.kinds or ())

    @property
    def values_per_key(self) -> int:
        """Number of value heads per key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def channels(self) -> int:
        """Channels of the convolution per key head: its query, its key, and its values."""
        return 2 * self.key_head_dim + self.values_per_key * self.value_head_dim

    @property
    def state(self) -> LayerKV:
        """A layer's state: per key head, rows of the convolution, then keys x values."""
        # Inputs that the convolution needs again; the last row is padded.
        conv_rows = -(-self.channels * (self.conv_kernel - 1) // self.value_head_dim)
        rows = conv_rows + self.values_per_key * self.key_head_dim
        return LayerKV(heads=self.num_key_heads, head_dim=self.value_head_dim, state_rows=rows)


def read_linear_attention(
    content: Mapping[str, Any], architecture: str
) -> LinearAttentionConfig | None:
    """The linear attention of a model; None for an architecture without.

    Args:
        content: Content of ``config.json``.
        architecture: Architecture that it names.

    Raises:
        ConfigError: A field is of the wrong type or out of range.
    """
    if architecture not in LINEAR_ATTENTION_ARCHITECTURES:
        return None
    found = convert_fields(content, LinearAttentionConfig, architecture)
    if found.num_value_heads % found.num_key_heads:
        raise ModelError(
            f"config.json: linear_num_value_heads {found.num_value_heads} is no multiple of "
            f"linear_num_key_heads {found.num_key_heads}"
        )
    kinds = found.kinds or tuple(
        "linear_attention" if (layer + 1) % found.interval else "full_attention"
        for layer in range(found.num_hidden_layers)
    )
    if len(kinds) != found.num_hidden_layers:
        raise ModelError("layer_types and num_hidden_layers differ in length")
    if unknown := set(kinds) - {"linear_attention", "full_attention"}:
        raise ModelError(f"layer_types has {sorted(unknown)}, which are unsupported")
    if "full_attention" not in kinds:
        raise ModelError("layer_types needs a layer of 'full_attention'")
    return replace(found, kinds=kinds)


GEMMA4_ARCHITECTURES = ("Gemma4ForCausalLM",)


@dataclass(frozen=True, kw_only=True)
class Gemma4Config:
    """How layers of Gemma 4 differ from each other, and from Gemma 3's.

    Attributes:
        kv_layers: Per layer, the layer whose K and V it reads: itself, or the last one of its kind
            before the first layer without K and V.
        head_dim: Features per head in layers without a window.
        num_kv_heads: Number of KV heads in layers without a window.
        keys_are_values: Whether layers without a window have one projection for keys and values,
            which differ by their norms.
        wide_mlp: Whether MLPs of layers without K and V are twice as wide.
        per_layer_size: Features of each token's own input to each layer; 0 for none.
        per_layer_vocab_size: Number of tokens that have such an input.
        softcap: Bound of the logits; 0 for none.
    """

    kv_layers: tuple[int, ...]
    head_dim: int
    num_kv_heads: int
    keys_are_values: bool
    wide_mlp: bool
    per_layer_size: int
    per_layer_vocab_size: int
    softcap: float


class _RawGemma4Layer(msgspec.Struct):
    """Settings of a layer that differ from those of the model."""

    head_dim: int | None = None
    num_key_value_heads: int | None = None


class _RawGemma4(msgspec.Struct):
    """The fields of ``config.json`` that are read, under their own names, with their defaults."""

    vocab_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 4
    head_dim: int = 256
    layer_types: list[str] | None = None
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    per_layer_config: dict[str, _RawGemma4Layer] | None = None
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: Count | None = 256
    vocab_size_per_layer_input: Count = 262_144
    final_logit_softcapping: float | None = None
    enable_moe_block: bool = False


def read_gemma4(content: Mapping[str, Any], architecture: str) -> Gemma4Config | None:
    """Settings specific to Gemma 4; None for another architecture.

    Args:
        content: Content of ``config.json``.
        architecture: Architecture that it names.

    Raises:
        ConfigError: A field is of the wrong type, out of range or unsupported.
    """
    if architecture not in GEMMA4_ARCHITECTURES:
        return None
    raw = convert_fields(content, _RawGemma4, architecture)
    if raw.enable_moe_block:
        raise ModelError("enable_moe_block is unsupported; need a dense Gemma 4")
    if raw.hidden_size_per_layer_input and raw.vocab_size_per_layer_input < raw.vocab_size:
        known = raw.vocab_size_per_layer_input
        text = f"vocab_size_per_layer_input {known} is less than vocab_size {raw.vocab_size}"
        raise ModelError(text)
    count, shared = raw.num_hidden_layers, raw.num_kv_shared_layers
    kinds = raw.layer_types
    if kinds is None or len(kinds) != count:
        raise ModelError(f"layer_types must name {count} layers")
    own = count - shared
    if not 0 < own <= count or set(kinds) != set(kinds[:own]):
        raise ModelError(
            f"num_kv_shared_layers {shared}: each kind of layer must be among the first ones, "
            "which have K and V"
        )
    last = {kind: layer for layer, kind in enumerate(kinds[:own])}
    head_dim, heads = raw.global_head_dim, None
    if raw.attention_k_eq_v:
        heads = raw.num_global_key_value_heads
    # As transformers saves it: the settings in which layers differ, in place of `global_head_dim`.
    if (overrides := raw.per_layer_config) is not None:
        named = [overrides[str(i)] for i in range(count) if str(i) in overrides]
        own_sizes = named[0] if named else _RawGemma4Layer()
        head_dim, heads = own_sizes.head_dim or raw.head_dim, own_sizes.num_key_value_heads
    heads = heads or raw.num_key_value_heads
    if head_dim < 1 or head_dim % 2 or heads < 1 or raw.num_attention_heads % heads:
        raise ModelError(
            f"global_head_dim {head_dim} must be positive and even, and "
            f"num_global_key_value_heads {heads} a divisor of num_attention_heads "
            f"{raw.num_attention_heads}"
        )
    return Gemma4Config(
        kv_layers=tuple(i if i < own else last[kind] for i, kind in enumerate(kinds)),
        head_dim=head_dim,
        num_kv_heads=heads,
        keys_are_values=raw.attention_k_eq_v,
        wide_mlp=raw.use_double_wide_mlp,
        per_layer_size=raw.hidden_size_per_layer_input or 0,
        per_layer_vocab_size=raw.vocab_size_per_layer_input,
        softcap=raw.final_logit_softcapping or 0.0,
    )

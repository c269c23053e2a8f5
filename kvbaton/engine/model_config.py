"""A model's configuration in a Hugging Face folder: ``config.json``, ``generation_config.json``.

The tokenizer's files add an end token. Needs neither torch nor transformers, so that the HTTP
process can read it too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvbaton.engine.attention_config import (
    GEMMA4_ARCHITECTURES,
    MLA_ARCHITECTURES,
    Gemma4Config,
    LinearAttentionConfig,
    MlaConfig,
    NopeConfig,
    convert_fields,
    read_gemma4,
    read_linear_attention,
    read_mla,
    read_nope,
)
from kvbaton.engine.kv_groups import KVGroup, LayerKV, kv_groups
from kvbaton.engine.moe_config import MoeConfig, read_moe
from kvbaton.engine.quantization_config import Quantization, read_quantization
from kvbaton.engine.rope_config import (
    RawRotary,
    RopeConfig,
    RotaryEntry,
    read_local_rope,
    read_rope,
)
from kvbaton.engine.vision_config import VISION_FAMILIES, VisionConfig, read_siglip, read_vision
from kvbaton.errors import ConfigError, ModelError
from kvbaton.messages import UNREADABLE
from kvbaton.types import Count, Positive, Size

logger = logging.getLogger(__name__)

MAX_LAYERS = 4096
"""Far more layers than any model has; with a billion, the start would not end."""

TEXT_ARCHITECTURES = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
}
"""Architecture of the language model, by that of the multimodal model."""

_DEFAULTS: Mapping[str, dict[str, Any]] = {
    "Gemma3ForCausalLM": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    "DeepseekV2ForCausalLM": {"n_shared_experts": 2, "topk_method": "greedy"},
    "DeepseekV3ForCausalLM": {
        "first_k_dense_replace": 3,
        "n_group": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    },
    "Dots1ForCausalLM": {"sliding_window": 4096},
    "Gemma4ForCausalLM": {"sliding_window": 512},
    "GptOssForCausalLM": {"rms_norm_eps": 1e-5, "sliding_window": 128},
    "Llama4ForCausalLM": {"rms_norm_eps": 1e-5},
    "MistralForCausalLM": {"sliding_window": 4096},
    "MixtralForCausalLM": {"rms_norm_eps": 1e-5},
    "Qwen2MoeForCausalLM": {"shared_expert_intermediate_size": 5632},
    "Qwen3NextForCausalLM": {"norm_topk_prob": True, "shared_expert_intermediate_size": 512},
}
"""Defaults of `transformers` that differ from those of `_Raw`, for fields that a folder may omit.

Sizes that could be taken from the weights' shapes are not included, except those that Gemma 3's
folders omit.
"""


def language_model(content: dict[str, Any]) -> dict[str, Any]:
    """``config.json`` of the language model, which may be in ``text_config``."""
    named, text = content.get("architectures"), content.get("text_config")
    if not isinstance(text, dict) or not isinstance(named, list) or not named:
        return content
    own = {name: value for name, value in text.items() if value is not None}
    alone = TEXT_ARCHITECTURES.get(str(named[0]))
    if alone is None:
        tied = content.get("tie_word_embeddings") or own.get("tie_word_embeddings", False)
        return content | own | {"architectures": named, "tie_word_embeddings": tied}
    whole = {
        name: value
        for name, value in content.items()
        if not name.endswith("_config") or name == "quantization_config"
    }
    ends = {name: whole[name] for name in ("eos_token_id",) if whole.get(name) is not None}
    return whole | own | ends | {"architectures": [alone]}


DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Family:
    """How an architecture differs from Llama, mainly in its attention.

    Attributes:
        qkv_bias: Whether query, key and value have a bias; None for the value of
            ``attention_bias``, which then also applies to the output projection.
        qk_norm: Whether query and key heads are normalised before rotation.
        rope_theta: Base of the rotation if ``config.json`` has none.
        rope: Rotary settings if ``config.json`` has none.
        windows: Layers with the sliding window: all; those named in ``layer_types``, else the
            ``upper`` ones, from ``max_window_layers`` on, or all but every sixth (``pattern``); or
            only those named (``listed``). ``chunks`` of ``attention_chunk_size`` are in layers with
            rotation (see `types.first_attended`).
        window_switch: Whether windows also need ``use_sliding_window``.
        max_window_layers: Default of ``max_window_layers``.
        sinks: Whether query heads have sinks (`AttentionContext.attend`), and projections of the
            attention have biases by default (``attention_bias``).
        norm_offset: Offset that is subtracted from norms' scales in checkpoints.
        rotary_share: Default share of a head's features that are rotated; None for families that
            rotate all.
        gemma: Whether layers with a window have their own base of rotation, ``config.json`` has the
            scale of logits, and the MLP has a GELU.
    """

    qkv_bias: bool | None = None
    qk_norm: bool = False
    rope_theta: float = 10_000.0
    rope: RotaryEntry | None = None
    windows: Literal["none", "all", "upper", "pattern", "listed", "chunks"] = "none"
    window_switch: bool = False
    max_window_layers: int = 28
    sinks: bool = False
    norm_offset: float = 0.0
    rotary_share: float | None = None
    gemma: bool = False


_QWEN2 = Family(qkv_bias=True, windows="upper", window_switch=True)
_QWEN3 = Family(qk_norm=True, windows="upper", window_switch=True)
ARCHITECTURES = {
    "DeepseekV2ForCausalLM": Family(qkv_bias=False),
    "DeepseekV3ForCausalLM": Family(qkv_bias=False),
    "Dots1ForCausalLM": Family(qk_norm=True, windows="upper", max_window_layers=62),
    "Gemma3ForCausalLM": Family(
        qk_norm=True, windows="pattern", rope_theta=1_000_000.0, norm_offset=1.0, gemma=True
    ),
    "Gemma4ForCausalLM": Family(
        qk_norm=True,
        rope=RotaryEntry(type="proportional", rope_theta=1_000_000.0, partial_rotary_factor=0.25),
        windows="listed",
        gemma=True,
    ),
    "GptOssForCausalLM": Family(
        rope_theta=150_000.0,
        rope=RotaryEntry(
            type="yarn", factor=32.0, truncate=False, original_max_position_embeddings=4096
        ),
        windows="listed",
        sinks=True,
    ),
    "Llama4ForCausalLM": Family(rope_theta=500_000.0, windows="chunks"),
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(qkv_bias=False, windows="all"),
    "MixtralForCausalLM": Family(qkv_bias=False, windows="all", rope_theta=1_000_000.0),
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen2MoeForCausalLM": replace(_QWEN2, windows="listed"),
    "Qwen2_5_VLForConditionalGeneration": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3MoeForCausalLM": replace(_QWEN3, windows="all"),
    "Qwen3NextForCausalLM": Family(qk_norm=True, norm_offset=1.0, rotary_share=0.25),
    "Qwen3VLForConditionalGeneration": _QWEN3,
}
"""Supported architectures, by their name in ``config.json``."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only model.

    Attributes:
        folder: Folder of the model.
        architecture: A key of `ARCHITECTURES`.
        dtype: dtype of weights and activations: one of `DTYPES`.
        kv_dtype: dtype of the KV cache: `dtype`, or ``float8_e4m3fn``.
        qkv_bias: Whether query, key and value have a bias.
        output_bias: Whether the output projection of attention has a bias.
        windows: Per layer, tokens of its sliding window; 0 for full attention.
        eos_token_ids: Tokens that end a text, ascending.
        vision: The vision tower; None for a text-only model.
        quantization: Format of the stored weights; None for floats.
        moe: The mixtures of experts; None for a model without.
        local_rope: Rotation in layers with a window; None for `rope`.
        attention_scale: Scale of the logits; None for ``head_dim ** -0.5``.
        mla: The latent attention, with which `num_kv_heads` is 1; None for a model without.
        linear_attention: Layers with a state instead of K and V; None for a model without.
        nope: Layers without rotation; None for a model without.
        gemma4: Settings specific to Gemma 4; None for other models.
    """

    folder: Path
    architecture: str
    dtype: str
    kv_dtype: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    windows: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    vision: VisionConfig | None = None
    quantization: Quantization | None = None
    moe: MoeConfig | None = None
    local_rope: RopeConfig | None = None
    attention_scale: float | None = None
    mla: MlaConfig | None = None
    linear_attention: LinearAttentionConfig | None = None
    nope: NopeConfig | None = None
    gemma4: Gemma4Config | None = None

    @property
    def family(self) -> Family:
        """How the architecture differs from Llama in attention, norms and activations."""
        return ARCHITECTURES[self.architecture]

    @property
    def rotary_dim(self) -> int:
        """Number of features per head that rotation applies to."""
        if self.gemma4 is not None:  # `rope` is for its layers without a window
            return self.gemma4.head_dim
        return self.head_dim if self.mla is None else self.mla.rope_dim

    def kv_groups(self) -> tuple[KVGroup, ...]:
        """KV groups of the layers."""
        return kv_groups([self._layer_kv(layer) for layer in range(self.num_layers)])

    def mlp_size(self, layer: int) -> int:
        """Number of intermediate features of a layer's MLP."""
        gemma = self.gemma4
        wide = gemma is not None and gemma.wide_mlp and gemma.kv_layers[layer] != layer
        return self.intermediate_size * (2 if wide else 1)

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Number of KV heads of a layer, and features per head."""
        if self.gemma4 is None or self.windows[layer]:
            return self.num_kv_heads, self.head_dim
        return self.gemma4.num_kv_heads, self.gemma4.head_dim

    def _layer_kv(self, layer: int) -> LayerKV | None:
        if self.gemma4 is not None and self.gemma4.kv_layers[layer] != layer:
            return None
        mla, linear, window = self.mla, self.linear_attention, self.windows[layer]
        if mla is not None:
            return LayerKV(window=window, heads=1, head_dim=mla.row_dim, value_dim=mla.kv_rank)
        if linear is not None and linear.layers[layer]:
            return linear.state
        chunked = self.family.windows == "chunks" and window > 0
        heads, dim = self.heads_of(layer)
        return LayerKV(window=window, chunked=chunked, heads=heads, head_dim=dim)

    def require_vision(self) -> VisionConfig:
        """The vision tower. Raises `ConfigError` if there is none."""
        if self.vision is None:
            raise ModelError(f"{self.architecture} has no vision tower to encode with")
        return self.vision


class _Raw(RawRotary, kw_only=True):
    """The fields of ``config.json`` that are read, under their own names."""

    architectures: list[str]
    vocab_size: Size
    intermediate_size: Size
    num_hidden_layers: Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
    num_key_value_heads: Size | None = None
    rms_norm_eps: Annotated[float, Meta(ge=0)] = 1e-6
    hidden_act: str | None = None
    hidden_activation: str | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool = False
    query_pre_attn_scalar: Positive | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | str | None = None
    sliding_window_pattern: Size = 6
    sliding_window: Count | None = None
    attention_chunk_size: Count | None = None
    intermediate_size_mlp: Size | None = None
    use_sliding_window: bool = False
    max_window_layers: Count | None = None
    layer_types: list[str] | None = None
    eos_token_id: int | list[int] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: dict[str, Any] | None = None
    image_token_id: int = 151655
    vision_config: VisionConfig | None = None


def load_model_config(
    folder: str | Path,
    dtype: str = "auto",
    quantization: Literal["fp8"] | None = None,
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto",
) -> ModelConfig:
    """Read a model folder's configuration.

    Args:
        folder: A Hugging Face folder.
        dtype: One of `DTYPES`, or ``auto`` for the checkpoint's dtype.
        quantization: How to quantise weights that are stored as floats.
        kv_cache_dtype: dtype of the KV cache; ``auto`` for that of activations.

    Raises:
        ConfigError: The folder or its files are missing or broken, or the model is not supported.
    """
    folder = Path(folder)
    whole = _read_json(folder, "config.json")
    content = language_model(whole)
    architecture = _check_architecture(content)
    family = ARCHITECTURES[architecture]
    content = _DEFAULTS.get(architecture, {}) | content
    raw = convert_fields(content, _Raw, architecture)
    _refuse_unsupported(raw, family)
    has_generation = (folder / "generation_config.json").exists()
    generation = _read_json(folder, "generation_config.json") if has_generation else {}
    ends = [raw.eos_token_id, generation.get("eos_token_id"), _tokenizer_end(folder)]
    bias = family.sinks if raw.attention_bias is None else raw.attention_bias
    dtype = _dtype(raw, family, dtype)
    mla, nope = read_mla(content, architecture), read_nope(content, architecture)
    seeing = VISION_FAMILIES.get(architecture)
    base = (seeing or family).rope_theta
    rope = read_rope(raw, base, family.rotary_share, seeing, family.rope or RotaryEntry())
    if nope is not None and nope.normed:  # its norm, after the rotation, takes any factor out
        rope = replace(rope, attention_factor=1.0)
    vision = read_vision(raw.vision_config, architecture, raw.hidden_size, raw.image_token_id)
    if architecture == "Gemma3ForCausalLM":
        vision = read_siglip(whole, folder, raw.hidden_size)
    own_scale = (raw.query_pre_attn_scalar or 256) ** -0.5 if family.gemma else None
    gemma4 = read_gemma4(content, architecture)
    if gemma4 is not None:
        own_scale = 1.0
    positions = int(rope.factor * rope.original_max_position) if rope.yarn else 0
    return ModelConfig(
        folder=folder,
        architecture=architecture,
        dtype=dtype,
        kv_dtype=dtype if kv_cache_dtype == "auto" else "float8_e4m3fn",
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size_mlp or raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_heads=raw.num_attention_heads,
        num_kv_heads=1 if mla else raw.num_key_value_heads or raw.num_attention_heads,
        head_dim=mla.head_dim if mla else raw.head_size,
        rms_norm_eps=raw.rms_norm_eps,
        rope=rope,
        max_position_embeddings=max(positions, raw.max_position_embeddings),
        tie_word_embeddings=family.gemma
        if raw.tie_word_embeddings is None
        else raw.tie_word_embeddings,
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias and family.qkv_bias is None,
        mlp_bias=raw.mlp_bias,
        windows=_windows(raw, family, nope),
        nope=nope,
        gemma4=gemma4,
        eos_token_ids=_end_tokens(folder, ends, raw.vocab_size),
        vision=vision,
        quantization=read_quantization(raw.quantization_config, quantization),
        moe=read_moe(content, architecture),
        local_rope=read_local_rope(raw) if family.gemma else None,
        attention_scale=mla.scale if mla else own_scale,
        mla=mla,
        linear_attention=read_linear_attention(content, architecture),
    )


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def _tokenizer_end(folder: Path) -> int | None:
    """The tokenizer's end token, which vLLM uses first; None if it has none.

    Some fine-tuned chat models name it only there. Errors are ignored: whoever serves text reads
    these files as well, and reports what is wrong with them.
    """
    with suppress(ConfigError, OSError, *UNREADABLE):
        end = _read_json(folder, "tokenizer_config.json").get("eos_token")
        text = end.get("content") if isinstance(end, dict) else end
        data = (folder / "tokenizer.json").read_bytes()
        for token in msgspec.json.decode(data, type=_TokenizerFile).added_tokens:
            if token.content == text:
                return token.id
    return None


def _end_tokens(folder: Path, ends: list[Any], vocab_size: int) -> tuple[int, ...]:
    """Those of the ids (or lists of ids) that the model can generate, ascending."""
    named = {token for end in ends for token in (end if isinstance(end, list) else [end])}
    found = {token for token in named if isinstance(token, int) and 0 <= token < vocab_size}
    if not found:
        logger.warning(
            "%s names no end token (eos_token_id of config.json and generation_config.json, "
            "eos_token of tokenizer_config.json): texts go on until max_tokens, unless requests "
            "have stop or stop_token_ids",
            folder,
        )
    return tuple(sorted(found))


def resolve_max_model_len(max_model_len: int | None, model: ModelConfig) -> int:
    """Maximum length of prompt plus output: the value given, or the model's maximum.

    Raises:
        ConfigError: The value exceeds the model's positions, or has no room for a prompt.
    """
    if max_model_len is None:
        return model.max_position_embeddings
    if not 2 <= max_model_len <= model.max_position_embeddings:  # a prompt token and a new one
        raise ConfigError(
            "--max-model-len",
            f"{max_model_len} is not within 2 and the model's {model.max_position_embeddings}",
        )
    return max_model_len


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    if not folder.is_dir():
        raise ModelError(f"no such folder: {folder}")
    path = folder / name
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ModelError(f"can't read {path}: {error.strerror}") from error
    except UNREADABLE as error:
        raise ModelError(f"{path} is not a JSON object: {error}") from error


def _check_architecture(content: dict[str, Any]) -> str:
    """The first architecture named; checked before fields that only supported models must have.

    Raises:
        ConfigError: It is not implemented; names those that are.
    """
    named = content.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    supported = (
        f"supported architectures: {', '.join(sorted({*ARCHITECTURES, *TEXT_ARCHITECTURES}))}"
    )
    # DeepSeek's folders name custom code, since they are older than the code of transformers.
    if content.get("auto_map") and architecture not in MLA_ARCHITECTURES:
        raise ModelError(
            f"{architecture!r} brings code of its own (auto_map, trust_remote_code), which is "
            f"never run; {supported}"
        )
    if architecture not in ARCHITECTURES:
        raise ModelError(f"architecture {architecture!r} is unknown; {supported}")
    return architecture


def _refuse_unsupported(raw: _Raw, family: Family) -> None:
    wanted = "gelu_pytorch_tanh" if family.gemma else "silu"
    found = (raw.hidden_activation if family.gemma else None) or raw.hidden_act or wanted
    if found != wanted:
        raise ModelError(f"hidden_act {found!r} is unsupported; need {wanted!r}")
    unsupported = ["attn_logit_softcapping"]
    if raw.architectures[0] not in GEMMA4_ARCHITECTURES:
        unsupported.append("final_logit_softcapping")
    if raw.use_bidirectional_attention != "vision":  # for images, which are never sent
        unsupported.append("use_bidirectional_attention")
    for name in unsupported:
        if family.gemma and getattr(raw, name):
            raise ModelError(f"{name} is unsupported")
    if raw.head_size % 2 and raw.architectures[0] not in MLA_ARCHITECTURES:
        raise ModelError(f"head_dim {raw.head_size} must be even")
    kv_heads = raw.num_key_value_heads or raw.num_attention_heads
    if raw.num_attention_heads % kv_heads:
        raise ModelError(
            f"num_attention_heads {raw.num_attention_heads} is no multiple of "
            f"num_key_value_heads {kv_heads}"
        )


def _dtype(raw: _Raw, family: Family, asked: str) -> str:
    default = "bfloat16" if family.sinks else "float32"  # published gpt-oss folders name none
    name = (raw.dtype or raw.torch_dtype or default) if asked == "auto" else asked
    name = name.removeprefix("torch.")
    name = {"half": "float16", "float": "float32"}.get(name, name)
    if name not in DTYPES:
        raise ConfigError("--dtype", f"{name!r} is unsupported; choose one of {list(DTYPES)}")
    return name


def _windows(raw: _Raw, family: Family, nope: NopeConfig | None) -> tuple[int, ...]:
    """Window of each layer; see `Family.windows`."""
    count, window = raw.num_hidden_layers, raw.sliding_window or 0
    named, field = "sliding_attention", "sliding_window"
    if family.windows == "chunks":
        named, field = "chunked_attention", "attention_chunk_size"
        window = raw.attention_chunk_size or 0
        if nope is not None and raw.layer_types is None:
            raw.layer_types = ["full_attention" if still else named for still in nope.layers]
    if family.windows == "none" or (family.window_switch and not raw.use_sliding_window):
        return (0,) * count
    if family.windows == "all":
        return (window,) * count
    if raw.layer_types is None and family.windows == "listed":
        raise ModelError("sliding_window needs layer_types, which says what it is for")
    if raw.layer_types is None and family.windows == "pattern":
        every = raw.sliding_window_pattern
        return tuple(window if (layer + 1) % every else 0 for layer in range(count))
    if raw.layer_types is None:
        first = family.max_window_layers if raw.max_window_layers is None else raw.max_window_layers
        return tuple(window if layer >= first else 0 for layer in range(count))
    if len(raw.layer_types) != count:
        raise ModelError("layer_types and num_hidden_layers differ in length")
    if named in raw.layer_types and window < 1:
        raise ModelError(f"layer_types has {named!r}: {field} is missing")
    return tuple(window if kind == named else 0 for kind in raw.layer_types)

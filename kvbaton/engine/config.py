"""The engine's settings, from which command-line defaults are read, and the scheduler's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from kvbaton.errors import ConfigError, ModelError
from kvbaton.types import Size

if TYPE_CHECKING:
    from kvbaton.engine.kv_cache_manager import GroupSpec

T = TypeVar("T", bound=msgspec.Struct)

DType = Literal["auto", "float32", "float16", "bfloat16"]
LoadFormat = Literal["auto", "dummy"]
OnlineQuantization = Literal["fp8"]
KVCacheDType = Literal["auto", "fp8"]
LoadFailurePolicy = Literal["recompute", "fail"]

ENCODER_SETTINGS = (
    "model", "dtype", "load_format", "device", "seed", "max_num_seqs", "num_threads", "store",
    "store_lookup_timeout", "store_load_timeout", "store_ttl", "encoder_cache_tokens",
    "max_num_encoder_tokens", "profile_dir",
)  # fmt: skip
"""Settings that an engine with `encoder_only` heeds."""

KV_EVENTS_FLAG = "--kv-events-config"

MIXED_TOKENS = 512
"""Of a step in which sequences decode, too. Measured on an H200 with 8B (docs/performance.md): of
2,048 they cost more each, and stall who decodes for 60 ms instead of 16."""

LEAST: dict[str, float] = {
    "block_size": 1,
    "kv_cache_memory_bytes": 1,
    "num_blocks": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_num_mixed_tokens": 1,
    "tensor_parallel_size": 1,
    "num_threads": 1,
    "store_lookup_timeout": 0,
    "store_load_timeout": 0,
    "store_ttl": 0,
    "encoder_cache_tokens": 0,
    "max_num_encoder_tokens": 1,
}
"""The least value of settings, by field of `EngineConfig`; what a model needs is checked later."""
MOST = {"max_num_seqs": 65_536, "tensor_parallel_size": 1024, "num_threads": 1024}
"""The largest: wrong numbers would take all memory or threads of the machine, not just ours."""


def parse_json_flag(flag: str, text: str, form: type[T]) -> T:
    """The settings that a flag's JSON holds.

    Raises:
        ConfigError: it is no JSON, or a key or value is wrong.
    """
    try:
        return msgspec.json.decode(text, type=form)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        known, kinds = list[str](), get_type_hints(form)
        for name in form.__struct_fields__:
            parts = (kinds[name], *get_args(kinds[name]))
            choices = [c for part in parts if get_origin(part) is Literal for c in get_args(part)]
            known.append(f"{name} ({', '.join(choices)})" if choices else name)
        raise ConfigError(flag, f"{text!r}: {error}; keys: {', '.join(known)}") from error


def check_model_folder(model: str) -> None:
    """Refuse what is no Hugging Face folder.

    Raises:
        ConfigError: naming ``--model``.
    """
    if not Path(model, "config.json").is_file():
        problem = f"{model!r} is no model folder: it has no config.json"
        if not Path(model).exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", model):
            problem += f"; to have it from Hugging Face: hf download {model} --local-dir DIR"
        if gguf := sorted(Path(model).glob("*.gguf")):
            problem += f"; name one of its GGUF files, as {gguf[0]}"
        raise ModelError(problem)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All that an engine core needs to know. Names as vLLM's flags.

    What no model could make right is a `ConfigError` at once, before anything is loaded.

    Attributes:
        model: a Hugging Face folder, or a GGUF file of Llama or Qwen.
        dtype: of weights and activations; ``auto`` takes the checkpoint's.
        quantization: ``fp8`` quantises weights that are stored as floats as they are loaded, a
            scale a row, for a GPU that multiplies FP8. A quantised checkpoint needs no flag.
        kv_cache_dtype: ``fp8`` keeps K and V as e4m3, divided by the checkpoint's ``k_scale`` and
            ``v_scale`` if it has any; ``auto`` in the dtype of activations.
        load_format: ``dummy`` makes random weights from `seed` and reads no tensor.
        device: ``cpu`` or ``cuda``; ``auto`` takes CUDA where there is one.
        seed: of dummy weights.
        block_size: tokens per KV block; raised where a model has states that need more room.
        kv_cache_memory_bytes: size of each rank's KV pool; None takes `num_blocks` or a default.
        num_blocks: blocks of the pool, overriding the bytes; None computes it.
        gpu_memory_utilization: share of a GPU's memory that the engine may use in all.
        max_model_len: longest prompt plus output; None takes the checkpoint's.
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: most tokens in one step.
        max_num_mixed_tokens: most tokens in one step with sequences that decode (128 more for each
            128 of these), so that prompts do not stall them for long; None takes 512, of a mixture
            of experts as many times more as it has experts for each that a token goes through.
        enable_prefix_caching: reuse blocks of equal prefixes.
        enforce_eager: no CUDA graphs.
        tensor_parallel_size: ranks of this node, each on a GPU of its own or a thread of the CPU.
        enable_expert_parallel: ranks hold whole experts instead of a part of each.
        kv_load_failure_policy: what to do when handed-over or stored bytes do not arrive.
        num_threads: of torch on the CPU, for each rank; None takes torch's own choice for all.
        store: where KV is kept for later, ``NAME[:JSON]`` or a dotted path; None keeps none.
        store_lookup_timeout: seconds that a request waits for what a store says; then it goes on
            without it.
        store_load_timeout: seconds that a request waits for what a store loads.
        store_ttl: seconds that what is saved stays in a store that can let objects expire; None for
            as long as it likes.
        kv_events_config: JSON with vLLM's keys for KV events, like
            ``{"enable_kv_cache_events": true}``; None publishes none.
        speculative_config: JSON with vLLM's keys for drafts, like ``{"method": "ngram",
            "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}``; None
            makes none.
        encoder_cache_tokens: rows of the encoder cache; None takes enough for the longest prompt,
            or on an encoder node for 16 of the largest images.
        max_num_encoder_tokens: most rows that the encoder computes in one step; an item that has
            more is encoded alone.
        language_model_only: do not load the encoder: outputs come from encoder nodes or a store.
        encoder_only: load nothing but the encoder; prompts are items.
        profile_dir: where profiles are written that ``/start_profile`` and ``/stop_profile`` make;
            None makes none.
        debug_poison: fill reserved blocks with NaN before they are handed out as targets.
        debug_forbid_prompt_compute: refuse to compute any prompt token but the last, so that a
            test can prove where the KV came from.
    """

    GROUP: ClassVar[str | None] = "engine"
    EVERY_FIELD: ClassVar[bool] = True

    model: str
    dtype: DType = "auto"
    quantization: OnlineQuantization | None = None
    kv_cache_dtype: KVCacheDType = "auto"
    load_format: LoadFormat = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_num_mixed_tokens: int | None = None
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    kv_load_failure_policy: LoadFailurePolicy = "recompute"
    num_threads: int | None = None
    store: str | None = None
    store_lookup_timeout: float = 0.5
    store_load_timeout: float = 10.0
    store_ttl: float | None = None
    kv_events_config: str | None = None
    speculative_config: str | None = None
    encoder_cache_tokens: int | None = None
    max_num_encoder_tokens: int = 8192
    language_model_only: bool = False
    encoder_only: bool = False
    profile_dir: str | None = None
    debug_poison: bool = False
    debug_forbid_prompt_compute: bool = False

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value, flag = getattr(self, name), "--" + name.replace("_", "-")
            if value is not None and not value >= least:  # NaN is not
                raise ConfigError(flag, f"{value} is too small; at least {least:g}")
            if value is not None and value > MOST.get(name, value):
                raise ConfigError(flag, f"{value} is too large; at most {MOST[name]}")
        if not 0 < self.gpu_memory_utilization <= 1:
            text = f"{self.gpu_memory_utilization} is no share, above 0 and at most 1"
            raise ConfigError("--gpu-memory-utilization", text)
        if self.store is not None:  # an engine that starts in vain takes long
            from kvbaton.connectors.registry import STORES, check_spec

            check_spec(STORES, self.store)
        SpeculativeConfig.parse(self.speculative_config)
        KVEventsConfig.parse(self.kv_events_config)


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of KV events; keys as vLLM's.

    Attributes:
        enable_kv_cache_events: publish them.
        publisher: ``zmq``, or ``null`` for none; None takes ``zmq``.
        endpoint: of the PUB socket. ``tcp://`` with ``*``, ``::`` or a loopback address, ``ipc://``
            and ``inproc://`` are bound, others connected to. Port ``*`` takes a free one.
        replay_endpoint: of the ROUTER socket that repeats batches; None has none.
        buffer_steps: batches that can be repeated.
        hwm: messages that wait for a slow subscriber; it misses those beyond.
        max_queue_size: batches that wait to be published; those beyond are dropped.
        topic: first frame of each message.
        int_block_hashes: send the last 8 bytes of a block's key as a number (what vLLM does by
            default, and some indexers need), not all 32 bytes.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: Size = 10_000
    hwm: Size = 100_000
    max_queue_size: Size = 100_000
    topic: str = ""
    int_block_hashes: bool = True

    @classmethod
    def parse(cls, text: str | None) -> KVEventsConfig:
        """Read the flag's JSON; None is all defaults.

        Raises:
            ConfigError: it is no JSON, or a key or value is wrong.
        """
        return parse_json_flag(KV_EVENTS_FLAG, text or "{}", cls)

    @property
    def enabled(self) -> bool:
        """Whether there is anything to publish, and a way."""
        return self.enable_kv_cache_events and self.publisher != "null"


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of drafts; keys as vLLM's.

    Attributes:
        method: ``ngram``.
        num_speculative_tokens: most tokens of a draft.
        prompt_lookup_max: most of the latest tokens that are looked for; None takes
            `prompt_lookup_min`, or 5.
        prompt_lookup_min: fewest; None takes `prompt_lookup_max`.
    """

    method: Literal["ngram"]
    num_speculative_tokens: Size
    prompt_lookup_max: Size | None = None
    prompt_lookup_min: Size | None = None

    @property
    def lookup(self) -> tuple[int, int]:
        """Fewest and most of the latest tokens that are looked for."""
        most = self.prompt_lookup_max or self.prompt_lookup_min or 5
        return self.prompt_lookup_min or most, most

    @classmethod
    def parse(cls, text: str | None) -> SpeculativeConfig | None:
        """Read the flag's JSON; None is no speculation.

        Raises:
            ConfigError: it is no JSON, or a key or value is wrong.
        """
        if text is None:
            return None
        config = parse_json_flag("--speculative-config", text, cls)
        least, most = config.lookup
        if least > most:
            raise ConfigError(
                "--speculative-config",
                f"prompt_lookup_min: {least} is more than prompt_lookup_max, {most}",
            )
        return config


NO_DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=0)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler needs to know. Names as in `EngineConfig`.

    Attributes:
        groups: one per KV group.
        max_model_len: longest prompt plus output.
        vocab_size: the model's; all token ids are below it.
        max_num_seqs: most sequences that run, or load, at a time.
        max_num_batched_tokens: most tokens in one step.
        max_num_mixed_tokens: most in one with sequences that decode.
        whole_prompts: compute a prompt in one step; one that is longer than a step may be has the
            step for itself.
        enable_prefix_caching: reuse blocks of equal prefixes.
        eos_token_ids: the model's own end tokens.
        kv_load_failure_policy: what to do when handed-over bytes do not arrive.
        speculative: drafts; None makes none.
        max_loading_share: share of a pool that hand-overs may have reserved, quarantine included,
            so that a crowd of them does not take what running requests grow into. A hand-over that
            is alone is never refused by it.
        debug_forbid_prompt_compute: end requests that would compute a prompt token but the last.
        whole_items: most tokens of an item, if they see all of it, so that those that are computed
            are so in one step; 0 if they do not.
    """

    groups: tuple[GroupSpec, ...]
    max_model_len: int
    vocab_size: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_num_mixed_tokens: int = MIXED_TOKENS
    enable_prefix_caching: bool = True
    eos_token_ids: tuple[int, ...] = ()
    kv_load_failure_policy: LoadFailurePolicy = "recompute"
    speculative: SpeculativeConfig | None = None
    max_loading_share: float = 0.75
    debug_forbid_prompt_compute: bool = False
    whole_prompts: bool = False
    whole_items: int = 0

    def __post_init__(self) -> None:
        least = self.max_num_seqs - 1 + self.whole_items
        if self.whole_items and self.max_num_batched_tokens < least:
            raise ConfigError(
                "--max-num-batched-tokens",
                f"{self.max_num_batched_tokens} is too small, at least {least}: the "
                f"{self.whole_items} tokens of an image are computed in one step, beside one of "
                f"each other of {self.max_num_seqs} sequences (--max-num-seqs)",
            )

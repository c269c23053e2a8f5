"""Settings of the engine, which are also its command-line flags, and settings of the scheduler."""

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

DType = Literal["auto", "float32", "float16", "bfloat16", "float", "half"]
LoadFormat = Literal["auto", "dummy"]
OnlineQuantization = Literal["fp8"]
KVCacheDType = Literal["auto", "fp8", "fp8_e4m3"]
LoadFailurePolicy = Literal["recompute", "fail"]

ENCODER_SETTINGS = (
    "model", "dtype", "load_format", "device", "seed", "max_num_seqs", "num_threads", "store",
    "store_lookup_timeout", "store_load_timeout", "store_ttl", "encoder_cache_tokens",
    "max_num_encoder_tokens", "profile_dir",
)  # fmt: skip
"""Settings that matter to an engine with `encoder_only`."""

KV_EVENTS_FLAG = "--kv-events-config"

MIXED_TOKENS = 512
"""Maximum number of tokens of a step that also decodes. Measured on an H200 with an 8B model
(docs/performance.md): with 2,048, tokens cost more each and decoding stalls for 60 ms, not 16."""

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
"""Smallest valid values by field of `EngineConfig`; limits of the model are checked later."""
MOST = {"max_num_seqs": 65_536, "tensor_parallel_size": 1024, "num_threads": 1024}
"""Largest valid values: a typo could otherwise take all memory or threads of the machine."""


def parse_json_flag(flag: str, text: str, form: type[T]) -> T:
    """Decode the JSON value of a flag.

    Raises:
        ConfigError: The text is not JSON, or a key or value is wrong.
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
    """Check that `model` is a Hugging Face folder.

    Raises:
        ConfigError: It is not; names ``--model``.
    """
    try:
        found = Path(model, "config.json").is_file()
    except OSError as error:  # of another user, for example
        raise ModelError(f"can't look into {model}: {error.strerror}") from error
    if not found:
        problem = f"{model!r} is no model folder: it has no config.json"
        if not Path(model).exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", model):
            problem += f"; to have it from Hugging Face: hf download {model} --local-dir DIR"
        if gguf := sorted(Path(model).glob("*.gguf")):
            problem += f"; name one of its GGUF files, as {gguf[0]}"
        raise ModelError(problem)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine core, named as vLLM's flags.

    Values that are wrong for every model raise `ConfigError` at once, before anything is loaded.

    Attributes:
        model: a Hugging Face folder, or a GGUF file of Llama or Qwen.
        dtype: dtype of weights and activations; ``auto`` takes the checkpoint's, ``float`` and
            ``half`` are float32 and float16.
        quantization: ``fp8`` quantises floating-point weights while they are loaded, with one scale
            per row; for GPUs with FP8 matrix products. A quantised checkpoint needs no flag.
        kv_cache_dtype: ``fp8`` (or ``fp8_e4m3``) stores K and V as e4m3, divided by the
            checkpoint's ``k_scale`` and ``v_scale`` if it has them; ``auto`` stores them in the
            dtype of activations.
        load_format: ``dummy`` makes random weights from `seed` and reads no tensors.
        device: ``cpu`` or ``cuda``; ``auto`` takes CUDA if there is a GPU.
        seed: random seed of dummy weights.
        block_size: tokens per KV block; raised for models whose states need larger blocks.
        kv_cache_memory_bytes: size of each rank's KV pool; None takes `num_blocks` or a default.
        num_blocks: number of KV blocks, overrides the size in bytes; None computes it.
        gpu_memory_utilization: share of a GPU's memory that the engine may use in total.
        max_model_len: maximum number of tokens of prompt plus output; None takes the checkpoint's.
        max_num_seqs: maximum number of sequences in one step.
        max_num_batched_tokens: maximum number of tokens in one step.
        max_num_mixed_tokens: maximum number of tokens in one step that also decodes (plus 128 for
            each 128 decoding sequences), so that prompts do not stall decoding for long; None takes
            512, for a mixture of experts multiplied by experts / active experts.
        enable_prefix_caching: reuse the KV blocks of equal prefixes.
        enforce_eager: do not use CUDA graphs.
        tensor_parallel_size: number of ranks of this node, each with a GPU or a CPU thread.
        enable_expert_parallel: give each rank whole experts instead of a part of every expert.
        kv_load_failure_policy: what to do if KV from another node or a store does not arrive:
            compute it, or end the request with an error.
        num_threads: torch threads per rank on the CPU; None divides torch's default among ranks.
        store: store that keeps KV for later, ``NAME[:JSON]`` or a dotted path; None keeps none.
        store_lookup_timeout: seconds that a request waits for a store's answer before it goes on
            without.
        store_load_timeout: seconds that a request waits for a store to load its KV.
        store_ttl: seconds after which saved objects expire, in stores that can expire them; None
            leaves it to the store.
        kv_events_config: JSON with vLLM's keys for KV events, like
            ``{"enable_kv_cache_events": true}``; None publishes none.
        speculative_config: JSON with vLLM's keys for speculative decoding, like ``{"method":
            "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}``;
            None disables it.
        encoder_cache_tokens: rows of the encoder cache; None takes enough for the longest prompt,
            or on an encoder node for 16 of the largest images.
        max_num_encoder_tokens: maximum number of rows that the encoder computes in one step; an
            item with more rows is encoded alone.
        language_model_only: do not load the encoder: outputs come from encoder nodes or a store.
        encoder_only: load only the encoder; prompts are items.
        profile_dir: folder for the profiles that ``/start_profile`` and ``/stop_profile`` record;
            None disables profiling.
        debug_poison: fill blocks reserved for a hand-over with NaN before they are written.
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
            if value is not None and not value >= least:  # also true for NaN
                raise ConfigError(flag, f"{value} is too small; at least {least:g}")
            if value is not None and value > MOST.get(name, value):
                raise ConfigError(flag, f"{value} is too large; at most {MOST[name]}")
        if not 0 < self.gpu_memory_utilization <= 1:
            text = f"{self.gpu_memory_utilization} is no share, above 0 and at most 1"
            raise ConfigError("--gpu-memory-utilization", text)
        if self.store is not None:  # checked here, since an engine takes long to start
            from kvbaton.connectors.registry import STORES, check_spec

            check_spec(STORES, self.store)
        SpeculativeConfig.parse(self.speculative_config)
        KVEventsConfig.parse(self.kv_events_config)


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of KV events; keys as vLLM's.

    Attributes:
        enable_kv_cache_events: Whether to publish events.
        publisher: ``zmq``, or ``null`` for none; None takes ``zmq``.
        endpoint: Address of the PUB socket. ``tcp://`` with ``*``, ``::`` or a loopback address,
            ``ipc://`` and ``inproc://`` are bound, others connected to. Port ``*`` takes a free
            one.
        replay_endpoint: Address of the ROUTER socket that repeats batches; None for none.
        buffer_steps: Number of batches kept for repetition.
        hwm: Maximum number of messages queued for a slow subscriber, which misses further ones.
        max_queue_size: Maximum number of batches that wait to be published; more are dropped.
        topic: First frame of each message.
        int_block_hashes: Whether to send the last 8 bytes of a block's key as a number (vLLM's
            default, which some indexers need) instead of all 32 bytes.
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
        """Decode the flag's JSON; None gives the defaults.

        Raises:
            ConfigError: The text is not JSON, or a key or value is wrong.
        """
        return parse_json_flag(KV_EVENTS_FLAG, text or "{}", cls)

    @property
    def enabled(self) -> bool:
        """Whether events are to be published, and by a publisher."""
        return self.enable_kv_cache_events and self.publisher != "null"


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of speculative decoding; keys as vLLM's.

    Attributes:
        method: ``ngram``.
        num_speculative_tokens: Maximum number of draft tokens per step.
        prompt_lookup_max: Length of the longest n-gram looked up in the sequence; None takes
            `prompt_lookup_min`, or 5.
        prompt_lookup_min: Length of the shortest; None takes `prompt_lookup_max`.
    """

    method: Literal["ngram"]
    num_speculative_tokens: Size
    prompt_lookup_max: Size | None = None
    prompt_lookup_min: Size | None = None

    @property
    def lookup(self) -> tuple[int, int]:
        """Lengths of the shortest and longest n-gram that are looked up."""
        most = self.prompt_lookup_max or self.prompt_lookup_min or 5
        return self.prompt_lookup_min or most, most

    @classmethod
    def parse(cls, text: str | None) -> SpeculativeConfig | None:
        """Decode the flag's JSON; None disables speculative decoding.

        Raises:
            ConfigError: The text is not JSON, or a key or value is wrong.
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
    """Settings of the scheduler, named as in `EngineConfig`.

    Attributes:
        groups: Specs of the KV groups.
        max_model_len: Maximum number of tokens of prompt plus output.
        vocab_size: Size of the model's vocabulary; all token ids are below it.
        max_num_seqs: Maximum number of sequences that run or load at a time.
        max_num_batched_tokens: Maximum number of tokens in one step.
        max_num_mixed_tokens: Maximum number of tokens in one step that also decodes.
        whole_prompts: Whether a prompt is computed in one step; if it is longer than the budget, it
            gets a step of its own.
        enable_prefix_caching: Whether blocks of equal prefixes are reused.
        eos_token_ids: End tokens of the model.
        kv_load_failure_policy: What to do if KV from another node or a store does not arrive.
        speculative: Settings of speculative decoding; None disables it.
        max_loading_share: Largest share of the pool that loads may have reserved, quarantined
            blocks included, so that many loads do not take the blocks that running requests grow
            into. A load that is alone is never refused.
        debug_forbid_prompt_compute: Whether requests end that would compute a prompt token but the
            last.
        whole_items: Maximum number of tokens of an item, if all tokens of an item attend to each
            other and are computed in one step; else 0.
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

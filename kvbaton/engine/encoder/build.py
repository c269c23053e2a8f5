"""Puts an encoder together from an engine's settings: tower, reader, pool, scheduler."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvbaton.connectors.layout import ITEM_SIZE, KVLayout
from kvbaton.engine.config import EngineConfig, SchedulerConfig
from kvbaton.engine.encoder.pool import EncoderPool
from kvbaton.engine.encoder.worker import Encoder, encoder_executor
from kvbaton.engine.executor import Executor
from kvbaton.engine.kv_cache_manager import GroupSpec
from kvbaton.engine.model_config import ModelConfig, resolve_max_model_len
from kvbaton.engine.scheduler import Scheduler
from kvbaton.engine.vision_config import VisionConfig, processor_settings
from kvbaton.engine.worker import DEFAULT_CPU_BYTES, choose_device
from kvbaton.errors import ConfigError
from kvbaton.types import ENCODER_BLOCK_ROWS

ITEMS = 16
"""An encoder node keeps so many of the largest items, unless told otherwise."""
DEFAULT_PIXELS = 1280 * 28 * 28
"""Largest image of a processor that does not say."""


def make_encoder(config: EngineConfig, model: ModelConfig) -> Executor:
    """The executor of a model's encoder outputs; without a tower for `language_model_only`.

    Raises:
        ConfigError: the model has no encoder, or a setting, a file or the pool's size is wrong.
    """
    vision, device = vision_config(model), choose_device(config)
    pool = EncoderPool(
        pool_blocks(config, model, device), vision.levels, model.hidden_size, model.dtype, device
    )
    if config.language_model_only:
        return encoder_executor(pool, None)
    # Images come in through libraries that take a second to import.
    from kvbaton.engine.encoder.images import ImageReader
    from kvbaton.engine.encoder.reading import Readings
    from kvbaton.engine.models.vision import load_vision

    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    tower = load_vision(model, device=device, load_format=config.load_format, seed=config.seed)
    reader = ImageReader(model.folder)
    readings = Readings(reader, pin=device.type == "cuda")
    rows = 1 if device.type == "cpu" else max(largest_item(model), config.max_num_encoder_tokens)
    dtype = pool.data.dtype
    return encoder_executor(pool, Encoder(tower, readings, vision, device, dtype, most=rows))


def make_encoder_scheduler(
    config: EngineConfig,
    layout: KVLayout,
    root_key: Callable[[str], bytes],
) -> Scheduler:
    """A scheduler of items over a pool with this layout."""
    return Scheduler(
        SchedulerConfig(
            groups=(GroupSpec(layout.block_size, layout.num_blocks, layout.kind),),
            max_model_len=(layout.num_blocks - 1) * layout.block_size + 1,
            vocab_size=1,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_encoder_tokens,
            kv_load_failure_policy=config.kv_load_failure_policy,
            debug_forbid_prompt_compute=config.debug_forbid_prompt_compute,
            whole_prompts=True,
        ),
        root_key=root_key,
    )


def vision_config(model: ModelConfig) -> VisionConfig:
    """The model's vision tower. Raises `ConfigError` if it has none."""
    if model.vision is None:
        raise ConfigError("--model", f"{model.architecture} has no vision tower to encode with")
    return model.vision


def largest_item(model: ModelConfig) -> int:
    """Rows of the largest image that the model's processor makes.

    Raises:
        ConfigError: the processor's settings can't be read.
    """
    settings, vision = processor_settings(model.folder), vision_config(model)
    size = settings.get("size") or {}
    pixels = settings.get("max_pixels") or size.get("longest_edge") or DEFAULT_PIXELS
    return max(1, int(pixels) // (vision.patch_size * vision.merge_size) ** 2)


def pool_blocks(config: EngineConfig, model: ModelConfig, device: torch.device) -> int:
    """Blocks of the pool, the null block included.

    An encoder node holds `ITEMS` of the largest items if they take at most half of the memory; a
    node with a language model holds what the longest prompt can have.

    Raises:
        ConfigError: there is no room for a block.
    """
    rows = config.encoder_cache_tokens
    if rows is None:
        wanted = ITEMS * largest_item(model)
        if not config.encoder_only:
            # Items end in the middle of their last block: one of 33 rows takes two.
            wanted = 2 * resolve_max_model_len(config.max_model_len, model)
        row_bytes = vision_config(model).levels * model.hidden_size * ITEM_SIZE[model.dtype]
        rows = min(wanted, _spare_bytes(device) // row_bytes)
    if rows < 1:
        raise ConfigError("--encoder-cache-tokens", f"{rows} is too small; at least 1")
    return -(-rows // ENCODER_BLOCK_ROWS) + 1


def _spare_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return DEFAULT_CPU_BYTES
    return torch.cuda.mem_get_info(device)[0] // 2

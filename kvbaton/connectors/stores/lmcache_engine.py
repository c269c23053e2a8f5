"""Makes LMCache engines that keep bytes: the part of the store that imports LMCache."""

from __future__ import annotations

import multiprocessing
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Before the import: unless told otherwise, it reports its use to its makers.
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata

from kvbaton.connectors.stores.lmcache_chunks import KEY_TOKENS
from kvbaton.errors import ConfigError

Move = Callable[[list[memoryview]], None]
"""Fills or reads the memory of some chunks, in their order."""


def make_engine(
    max_bytes: int, chunk_bytes: int, options: Mapping[str, Any]
) -> tuple[Any, Callable[[], None]]:
    """Make an engine with chunks of `KEY_TOKENS` tokens, each of them a row of bytes.

    Its ``store`` and ``retrieve`` take a `Move` named ``move``.

    Returns:
        The engine, and what gives it back.

    Raises:
        ConfigError: LMCache does not take these options.
    """
    name, start_method = f"kvbaton-{uuid.uuid4()}", multiprocessing.get_start_method(True)
    try:
        engine = LMCacheEngineBuilder.get_or_create(
            name,
            _config(max_bytes, options),
            _metadata(chunk_bytes),
            Mover(chunk_bytes),
            lambda tensor, source: None,
            lambda thing, source: thing,
        )
    finally:
        # It sets one for the whole process.
        multiprocessing.set_start_method(start_method, force=True)
    engine.post_init()

    def give_back() -> None:
        LMCacheEngineBuilder.destroy(name)
        if not engine.storage_manager.loop.is_running():
            engine.storage_manager.loop.close()  # it only stops it

    return engine, give_back


def _config(max_bytes: int, options: Mapping[str, Any]) -> Any:
    known = LMCacheEngineConfig.from_defaults()
    if unknown := [name for name in options if not hasattr(known, name)]:
        raise ConfigError("options", f"LMCache has no settings {unknown}")
    settings = {
        "chunk_size": KEY_TOKENS,
        "local_cpu": True,
        "max_local_cpu_size": max_bytes / (1 << 30),
        "py_enable_gc": True,  # as its default is now; False stops the whole process's collector
    }
    return LMCacheEngineConfig.from_defaults(**settings | dict(options))


def _metadata(chunk_bytes: int) -> Any:
    shape = (1, 1, KEY_TOKENS, 1, chunk_bytes // KEY_TOKENS)
    model = f"kvbaton-{chunk_bytes}"
    return LMCacheMetadata(model, 1, 1, 0, 0, torch.uint8, shape, chunk_size=KEY_TOKENS)


class Mover(GPUConnectorInterface):  # type: ignore[misc]
    """Hands the memory of chunks to whoever called the engine.

    Args:
        chunk_bytes: of each of them.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._token_bytes = chunk_bytes // KEY_TOKENS

    def batched_from_gpu(
        self, memory_objs: Sequence[Any], starts: Any, ends: Any, *, move: Move, **_: Any
    ) -> None:
        """Called by ``store``."""
        move([chunk.byte_array.cast("B") for chunk in memory_objs])

    def batched_to_gpu(
        self, memory_objs: Sequence[Any], starts: Any, ends: Any, *, move: Move, **_: Any
    ) -> None:
        """Called by ``retrieve``."""
        move([chunk.byte_array.cast("B") for chunk in memory_objs])

    def from_gpu(self, memory_obj: Any, start: int, end: int, **more: Any) -> None:
        """The same for one chunk."""
        self.batched_from_gpu([memory_obj], [start], [end], **more)

    def to_gpu(self, memory_obj: Any, start: int, end: int, **more: Any) -> None:
        """The same for one chunk."""
        self.batched_to_gpu([memory_obj], [start], [end], **more)

    def get_shape(self, num_tokens: int) -> Any:
        """Of the memory of so many tokens."""
        return torch.Size([1, 1, num_tokens, self._token_bytes])

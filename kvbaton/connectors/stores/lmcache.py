"""Objects as chunks of tokens (`chunks.py`) in an LMCache engine, inside this process.

LMCache chains the hashes of chunks, so all chunks of an object can have the same tokens. The engine
has the tiers that its options configure. `lmcache_server.py` uses LMCache's server instead.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from kvbaton.connectors.store import Pieces, StoreCapabilities, Usage
from kvbaton.connectors.stores import chunks
from kvbaton.connectors.stores.chunks import KEY_TOKENS
from kvbaton.connectors.stores.threaded import ClientBackend, ThreadedStore
from kvbaton.errors import ConfigError

if find_spec("lmcache") is None:
    raise ImportError("lmcache is not installed: pip install 'kvbaton[lmcache]'")

# Set before its import: by default LMCache sends usage statistics to its makers.
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")


class LMCacheStore(ThreadedStore):
    """Keeps objects in an LMCache engine of its own; see the module.

    The engine supports one caller at a time, so calls are serialised.

    Args:
        name: See `Store.name`.
        max_bytes: Bytes of host memory for LMCache's chunks.
        chunk_bytes: Bytes of a chunk of LMCache; an object's last chunk is only partly filled. All
            processes that share objects need the same value.
        options: Further settings of LMCache (``local_disk``, ``max_local_disk_size``,
            ``remote_url``, ...), named as in its configuration files.
    """

    def __init__(
        self,
        name: str,
        *,
        max_bytes: int = 1 << 30,
        chunk_bytes: int = 256 << 10,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        chunks.check_chunk_bytes(chunk_bytes)
        super().__init__(name, LMCacheBackend(max_bytes, chunk_bytes, options or {}), threads=1)


class LMCacheBackend(ClientBackend):
    """The backend of `LMCacheStore`; LMCache itself is imported when it is opened."""

    def __init__(self, max_bytes: int, chunk_bytes: int, options: Mapping[str, Any]) -> None:
        remote = "remote_url" in options
        self.capabilities = StoreCapabilities(persistent=remote, shared=remote, pins=False)
        self._max_bytes = max_bytes
        self._chunk_bytes = chunk_bytes
        self._options = options
        self._turn = threading.Lock()
        self._give_back: Callable[[], None] | None = None

    def open(self) -> None:
        """Import LMCache, which takes seconds, and make an engine.

        Raises:
            ConfigError: LMCache does not take these options.
            StoreError: The engine can't be created.
        """
        with self._engine_turn():
            self._engine, self._give_back = _make_engine(
                self._max_bytes, self._chunk_bytes, self._options
            )

    def close(self) -> None:
        """Destroy the engine."""
        super().close()
        if self._give_back is not None:
            self._give_back()
        self._engine = self._give_back = None

    def usage(self) -> Usage:
        """Only the capacity."""
        return Usage(capacity=self._max_bytes)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Backend.contains`; looks up only the first chunk of each object."""
        with self._engine_turn():
            return [self._engine.lookup(chunks.tokens_of(key)) == KEY_TOKENS for key in keys]

    def get(self, key: bytes, target: Pieces) -> bool:
        """See `Backend.get`; a damaged object is removed."""
        tokens = chunks.tokens_of(key, KEY_TOKENS, chunks.count(target, self._chunk_bytes))
        right: bool | None = None

        def move(slots: list[memoryview]) -> None:
            nonlocal right
            if len(slots) * KEY_TOKENS == len(tokens):
                right = chunks.take(slots, key, target)

        with self._engine_turn():
            self._engine.retrieve(tokens, move=move)
            if right is False:
                self._engine.clear(tokens)
        return bool(right)

    def put(self, key: bytes, source: Pieces) -> bool:
        """See `Backend.put`."""
        count = chunks.count(source, self._chunk_bytes)
        if count * self._chunk_bytes > self._max_bytes:
            return False
        tokens = chunks.tokens_of(key, KEY_TOKENS, count)
        with self._engine_turn():
            found = self._engine.lookup(tokens)
            if 0 < found < len(tokens):  # the other chunks were evicted, or never stored
                self._engine.clear(tokens)
            if found < len(tokens):
                self._engine.store(
                    tokens, move=lambda slots: chunks.fill(slots, range(len(slots)), key, source)
                )
            return bool(self._engine.lookup(tokens) == len(tokens))

    def remove(self, keys: Sequence[bytes]) -> int:
        """See `Backend.remove`; removes the first chunk, without which no other is found."""
        with self._engine_turn():
            return sum(self._engine.clear(chunks.tokens_of(key)) > 0 for key in dict.fromkeys(keys))

    @contextmanager
    def _engine_turn(self) -> Iterator[None]:
        """Exclusive use of the engine; its errors become `StoreError`."""
        with self._turn, self._calling("LMCache", Exception):
            yield


Move = Callable[[list[memoryview]], None]
"""Writes or reads the memory of some chunks, given in order."""


def _make_engine(
    max_bytes: int, chunk_bytes: int, options: Mapping[str, Any]
) -> tuple[Any, Callable[[], None]]:
    """Create an engine with chunks of `KEY_TOKENS` tokens, each a row of bytes.

    Its ``store`` and ``retrieve`` take a keyword argument ``move``, a `Move`.

    Returns:
        The engine, and a function that destroys it.

    Raises:
        ConfigError: LMCache does not take these options.
    """
    import torch
    from lmcache.v1.cache_engine import LMCacheEngineBuilder
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata

    known = LMCacheEngineConfig.from_defaults()
    if unknown := [name for name in options if not hasattr(known, name)]:
        raise ConfigError("options", f"LMCache has no settings {unknown}")
    settings = {
        "chunk_size": KEY_TOKENS,
        "local_cpu": True,
        "max_local_cpu_size": max_bytes / (1 << 30),
        "py_enable_gc": True,  # its default today; False disables the process's garbage collector
    }
    shape = (1, 1, KEY_TOKENS, 1, chunk_bytes // KEY_TOKENS)
    model = f"kvbaton-{chunk_bytes}"
    name, start_method = f"kvbaton-{uuid.uuid4()}", multiprocessing.get_start_method(True)
    try:
        engine = LMCacheEngineBuilder.get_or_create(
            name,
            LMCacheEngineConfig.from_defaults(**settings | dict(options)),
            LMCacheMetadata(model, 1, 1, 0, 0, torch.uint8, shape, chunk_size=KEY_TOKENS),
            ChunkMover(),
            lambda tensor, source: None,
            lambda thing, source: thing,
        )
    finally:
        # LMCache sets a start method for the whole process: restore the former one.
        multiprocessing.set_start_method(start_method, force=True)
    engine.post_init()

    def give_back() -> None:
        LMCacheEngineBuilder.destroy(name)
        if not engine.storage_manager.loop.is_running():
            engine.storage_manager.loop.close()  # LMCache only stops the loop

    return engine, give_back


class ChunkMover:
    """Passes the memory of chunks to the `move` argument of the engine's caller.

    It implements the part of LMCache's `GPUConnectorInterface` that the engine calls.
    """

    def batched_from_gpu(
        self, memory_objs: Sequence[Any], starts: Any, ends: Any, *, move: Move, **_: Any
    ) -> None:
        """Called by ``store``."""
        move([chunk.byte_array.cast("B") for chunk in memory_objs])

    batched_to_gpu = batched_from_gpu
    """Called by ``retrieve``."""

"""Objects in an LMCache engine inside this process, with whatever tiers it is configured to have.

`lmcache_server.py` talks to LMCache's server instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from kvbaton.connectors.store import Pieces, StoreCapabilities, Usage
from kvbaton.connectors.stores.lmcache_chunks import (
    KEY_TOKENS,
    Verdict,
    check_chunk_bytes,
    chunks_of,
    fill,
    take,
    tokens_of,
)
from kvbaton.connectors.stores.threaded import ThreadedStore
from kvbaton.errors import ConfigError, StoreError

if find_spec("lmcache") is None:
    raise ImportError("lmcache is not installed: pip install 'kvbaton[lmcache]'")


class LMCacheStore(ThreadedStore):
    """Keeps objects in an LMCache engine of its own; see the module.

    The engine is made for one caller at a time, so calls take turns.

    Args:
        name: see `Store.name`.
        max_bytes: host memory that LMCache keeps chunks in.
        chunk_bytes: of what LMCache keeps an object in; the last chunk of an object is not filled.
            All who share objects have the same.
        options: more settings of LMCache (``local_disk``, ``max_local_disk_size``, ``remote_url``,
            ...), named as in its own configuration files.
    """

    def __init__(
        self,
        name: str,
        *,
        max_bytes: int = 1 << 30,
        chunk_bytes: int = 256 << 10,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        check_chunk_bytes(chunk_bytes)
        super().__init__(name, Chunks(max_bytes, chunk_bytes, options or {}), threads=1)


class Chunks:
    """The backend of `LMCacheStore`; LMCache itself is imported when it is opened."""

    def __init__(self, max_bytes: int, chunk_bytes: int, options: Mapping[str, Any]) -> None:
        remote = "remote_url" in options
        self.capabilities = StoreCapabilities(persistent=remote, shared=remote, pins=False)
        self._max_bytes = max_bytes
        self._chunk_bytes = chunk_bytes
        self._options = options
        self._turn = threading.Lock()
        self._give_back: Callable[[], None] | None = None
        self._trouble: str | None = "not open"

    def open(self) -> None:
        """Import LMCache, which takes seconds, and make an engine.

        Raises:
            ConfigError: LMCache does not take these options.
            StoreError: the engine can't be made.
        """
        from kvbaton.connectors.stores.lmcache_engine import make_engine

        with self._calling():
            self._engine, self._give_back = make_engine(
                self._max_bytes, self._chunk_bytes, self._options
            )

    def close(self) -> None:
        """Give the engine's memory back."""
        if self._give_back is not None:
            self._give_back()
        self._engine = self._give_back = None
        self._trouble = "not open"

    def health(self) -> str | None:
        """The error of the last call, if it had one."""
        return self._trouble

    def usage(self) -> Usage:
        """Only the limit."""
        return Usage(capacity=self._max_bytes)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Backend.contains`; of an object, only its first chunk is looked for."""
        with self._calling():
            return [self._engine.lookup(_tokens(key)) == KEY_TOKENS for key in keys]

    def get(self, key: bytes, target: Pieces) -> bool:
        """See `Backend.get`; an object that is not what it should be is removed."""
        tokens, verdict = _tokens(key, chunks_of(target, self._chunk_bytes)), Verdict.OTHER_LENGTH

        def move(slots: list[memoryview]) -> None:
            nonlocal verdict
            if len(slots) * KEY_TOKENS == len(tokens):
                verdict = take(slots, key, target)

        with self._calling():
            self._engine.retrieve(tokens, move=move)
            if verdict is Verdict.CORRUPT:
                self._engine.clear(tokens)
        return verdict is Verdict.RIGHT

    def put(self, key: bytes, source: Pieces) -> bool:
        """See `Backend.put`."""
        chunks = chunks_of(source, self._chunk_bytes)
        if chunks * self._chunk_bytes > self._max_bytes:
            return False
        tokens = _tokens(key, chunks)
        with self._calling():
            found = self._engine.lookup(tokens)
            if 0 < found < len(tokens):  # the rest was evicted, or was never there
                self._engine.clear(tokens)
            if found < len(tokens):
                self._engine.store(
                    tokens, move=lambda slots: fill(slots, range(len(slots)), key, source)
                )
            return bool(self._engine.lookup(tokens) == len(tokens))

    def remove(self, keys: Sequence[bytes]) -> int:
        """See `Backend.remove`; of an object, its first chunk: without it there is no other."""
        with self._calling():
            return sum(self._engine.clear(_tokens(key)) > 0 for key in dict.fromkeys(keys))

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """A turn at the engine; what it raises is `StoreError`."""
        with self._turn:
            try:
                yield
            except (ConfigError, StoreError):
                raise
            except Exception as error:
                self._trouble = f"LMCache: {type(error).__name__}: {error}"
                raise StoreError(self._trouble) from error
            self._trouble = None


def _tokens(key: bytes, chunks: int = 1) -> list[int]:
    return tokens_of(key, KEY_TOKENS, chunks)

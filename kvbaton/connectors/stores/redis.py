"""Objects as values of a Redis server.

``PREFIX<key in hex>`` holds checksum (`seal.py`) and bytes as one string. A string is set as a
whole or not at all, so no reader sees a part. Whether the server evicts, and what it keeps over a
restart, is up to its own configuration; without eviction a full server refuses, which is False.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvbaton.connectors.store import Pieces, StoreCapabilities, Usage
from kvbaton.connectors.stores.memory import copy
from kvbaton.connectors.stores.seal import SEAL_BYTES, seal, unseal
from kvbaton.connectors.stores.threaded import ThreadedStore
from kvbaton.errors import ConfigError, StoreError

try:
    from redis import Redis
    from redis.backoff import ExponentialBackoff
    from redis.connection import ConnectionPool
    from redis.exceptions import ConnectionError, OutOfMemoryError, RedisError
    from redis.retry import Retry
except ImportError as error:
    raise ImportError(f"{error}: pip install 'kvbaton[redis]'") from error

T = TypeVar("T")

_LOST = (ConnectionError,)
"""What is tried again: a lost connection, but not a server that is silent."""


class RedisStore(ThreadedStore):
    """Keeps objects in a Redis server; see the module.

    Args:
        name: see `Store.name`.
        url: ``redis://[user:password@]host:port/database``, ``rediss://`` with TLS, or
            ``unix://path``. Options of redis-py's connections may follow as a query.
        prefix: of the names of its values; stores with one prefix share their objects.
        ttl_s: an object that nobody used for so many seconds is dropped; None for never.
        threads: see `ThreadedStore`; one connection each.
        timeout_s: the longest that a read, a write or a connect waits for the server.
        retries: how often a call tries again after it lost its connection.
    """

    def __init__(
        self,
        name: str,
        *,
        url: str,
        prefix: str = "kvbaton:",
        ttl_s: float | None = None,
        threads: int = 4,
        timeout_s: float = 5.0,
        retries: int = 2,
    ) -> None:
        super().__init__(name, Values(url, prefix, ttl_s, timeout_s, retries), threads=threads)


class Values:
    """The backend of `RedisStore`."""

    capabilities = StoreCapabilities(persistent=True, shared=True, pins=False)

    def __init__(
        self, url: str, prefix: str, ttl_s: float | None, timeout_s: float, retries: int
    ) -> None:
        if ttl_s is not None and ttl_s < 0.001:
            raise ConfigError("ttl_s", f"must be at least 0.001, not {ttl_s}")
        self._prefix = prefix.encode()
        self._ttl_ms = None if ttl_s is None else round(ttl_s * 1000)
        self._pool = _pool(url, timeout_s, Retry(ExponentialBackoff(1.0, 0.05), retries, _LOST))
        self._redis = Redis(connection_pool=self._pool)
        self._where = _address(self._pool.connection_kwargs)
        self._trouble: str | None = "not open"
        self._capacity: int | None = None

    def open(self) -> None:
        """Ask the server for its limit.

        Raises:
            StoreError: it can't be reached, or refuses us.
        """
        memory: Any = self._ask("reach", lambda: self._redis.info("memory"))
        self._capacity = int(memory["maxmemory"]) or None

    def close(self) -> None:
        """Close the connections."""
        self._pool.disconnect()
        self._trouble = "not open"

    def health(self) -> str | None:
        """The error of the last call, if it had one."""
        return self._trouble

    def usage(self) -> Usage:
        """Only the server's limit: it counts neither values nor bytes by prefix."""
        return Usage(capacity=self._capacity)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Backend.contains`: one round trip."""
        pipeline = self._redis.pipeline(transaction=False)
        for name in map(self._name, keys):
            pipeline.exists(name)
        return [bool(found) for found in self._ask("look into", pipeline.execute)]

    def get(self, key: bytes, target: Pieces) -> bool:
        """See `Backend.get`; a value that is not what it should be is removed."""
        name, num_bytes = self._name(key), sum(map(len, target))
        value: Any = self._ask("read", lambda: self._redis.getex(name, px=self._ttl_ms))
        if value is None:
            return False
        body = unseal(key, memoryview(value))
        if body is None:
            self.remove([key])
        if body is None or len(body) != num_bytes:
            return False
        copy(target, [body])
        return True

    def put(self, key: bytes, source: Pieces) -> bool:
        """See `Backend.put`: the bytes are sent only if they are not there yet."""
        name, num_bytes = self._name(key), SEAL_BYTES + sum(map(len, source))
        held = self._ask("look into", lambda: self._held(name))
        if held == num_bytes:
            return True
        # A value of another length is wrong for whoever asks now, so it is replaced.
        value = b"".join([seal(key, source), *source])
        try:
            self._ask(
                "write to", lambda: self._redis.set(name, value, px=self._ttl_ms, nx=not held)
            )
        except OutOfMemoryError:
            return False
        return True

    def remove(self, keys: Sequence[bytes]) -> int:
        """See `Backend.remove`."""
        names = list(map(self._name, dict.fromkeys(keys)))
        if not names:
            return 0
        count: Any = self._ask("delete from", lambda: self._redis.unlink(*names))
        return int(count)

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _held(self, name: bytes) -> int:
        """Length of a value, 0 without one; its time starts anew."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.strlen(name)
        if self._ttl_ms is not None:
            pipeline.pexpire(name, self._ttl_ms)
        length: int = pipeline.execute()[0]
        return length

    def _ask(self, what: str, call: Callable[[], T]) -> T:
        """Call the server; a full one is the caller's business.

        Raises:
            StoreError: it failed.
        """
        try:
            answer = call()
        except OutOfMemoryError:
            self._trouble = None
            raise
        except (RedisError, OSError) as error:
            self._trouble = f"can't {what} redis at {self._where}: {error}"
            raise StoreError(self._trouble) from error
        self._trouble = None
        return answer


def _pool(url: str, timeout_s: float, retry: Retry) -> ConnectionPool:
    try:
        return ConnectionPool.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=retry
        )
    except ValueError as error:
        raise ConfigError("url", f"is not one of a Redis server: {error}") from error


def _address(options: dict[str, Any]) -> str:
    """Where the server is, without what the URL says besides."""
    port = options.get("port", 6379)
    return str(options.get("path") or f"{options.get('host', 'localhost')}:{port}")

"""Objects as values of a Redis server.

``PREFIX<key in hex>`` holds checksum (`threaded.seal`) and bytes as one string. A string is set as
a whole or not at all, so no reader sees a part. Whether the server evicts, and what it keeps over a
restart, is up to its own configuration; without eviction a full server refuses, which is False.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from kvbaton.connectors.store import Pieces, StoreCapabilities, Usage
from kvbaton.connectors.stores.threaded import SEAL_BYTES, LastCall, ThreadedStore, seal, unseal
from kvbaton.errors import ConfigError

try:
    from redis import Redis
    from redis.backoff import ExponentialBackoff
    from redis.connection import ConnectionPool
    from redis.exceptions import ConnectionError, OutOfMemoryError, RedisError
    from redis.retry import Retry
except ImportError as error:
    raise ImportError(f"{error}: pip install 'kvbaton[redis]'") from error

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
        super().__init__(name, RedisValues(url, prefix, ttl_s, timeout_s, retries), threads=threads)


class RedisValues(LastCall):
    """The backend of `RedisStore`."""

    capabilities = StoreCapabilities(persistent=True, shared=True, pins=False)

    def __init__(
        self, url: str, prefix: str, ttl_s: float | None, timeout_s: float, retries: int
    ) -> None:
        if ttl_s is not None and ttl_s < 0.001:
            raise ConfigError("ttl_s", f"must be at least 0.001, not {ttl_s}")
        self._prefix = prefix.encode()
        self._ttl_ms = None if ttl_s is None else round(ttl_s * 1000)
        retry = Retry(ExponentialBackoff(1.0, 0.05), retries, _LOST)
        try:
            self._pool = ConnectionPool.from_url(
                url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=retry
            )
        except ValueError as error:
            raise ConfigError("url", f"is not one of a Redis server: {error}") from error
        self._redis = Redis(connection_pool=self._pool)
        where = self._pool.connection_kwargs  # without what the URL says besides
        server = f"{where.get('host', 'localhost')}:{where.get('port', 6379)}"
        self._where = str(where.get("path") or server)
        self._capacity: int | None = None

    def open(self) -> None:
        """Ask the server for its limit.

        Raises:
            StoreError: it can't be reached, or refuses us.
        """
        with self._asking("reach"):
            memory: Any = self._redis.info("memory")
        self._capacity = int(memory["maxmemory"]) or None

    def close(self) -> None:
        """Close the connections."""
        super().close()
        self._pool.disconnect()

    def usage(self) -> Usage:
        """Only the server's limit: it counts neither values nor bytes by prefix."""
        return Usage(capacity=self._capacity)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Backend.contains`: one round trip."""
        pipeline = self._redis.pipeline(transaction=False)
        for name in map(self._name, keys):
            pipeline.exists(name)
        with self._asking("look into"):
            return [bool(found) for found in pipeline.execute()]

    def get(self, key: bytes, target: Pieces) -> bool:
        """See `Backend.get`; a value that is not what it should be is removed."""
        with self._asking("read"):
            value: Any = self._redis.getex(self._name(key), px=self._ttl_ms)
        if value is None:
            return False
        return unseal(self, key, memoryview(value), target)

    def put(self, key: bytes, source: Pieces) -> bool:
        """See `Backend.put`: the bytes are sent only if they are not there yet."""
        name, num_bytes = self._name(key), SEAL_BYTES + sum(map(len, source))
        with self._asking("look into"):
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.strlen(name)
            if self._ttl_ms is not None:
                pipeline.pexpire(name, self._ttl_ms)  # its time starts anew
            held: int = pipeline.execute()[0]
        if held == num_bytes:
            return True
        # A value of another length is wrong for whoever asks now, so it is replaced.
        value = b"".join([seal(key, source), *source])
        with self._asking("write to"):
            try:
                self._redis.set(name, value, px=self._ttl_ms, nx=not held)
            except OutOfMemoryError:
                return False
        return True

    def remove(self, keys: Sequence[bytes]) -> int:
        """See `Backend.remove`."""
        names = list(map(self._name, dict.fromkeys(keys)))
        if not names:
            return 0
        with self._asking("delete from"):
            count: Any = self._redis.unlink(*names)
        return int(count)

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _asking(self, what: str) -> AbstractContextManager[None]:
        return self._calling(f"can't {what} redis at {self._where}", RedisError, OSError)

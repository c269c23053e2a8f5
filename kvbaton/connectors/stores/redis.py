"""Objects as values of a Redis server.

An object is one string ``PREFIX<key in hex>``: checksum (`threaded.seal`), namespace and tenant,
bytes. Redis sets a string as a whole or not at all, so no reader sees a part of it. The object's
time to live is that of the string. A claim is another string, ``PREFIXclaim:<key in hex>``, which
only one client can set. Whether the server evicts, and what it keeps over a restart, depends on its
configuration; a full server without eviction refuses a store, and the answer is False.
"""

from __future__ import annotations

import logging
import math
import re
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kvbaton.connectors.store import (
    CLAIM_S,
    KEY_BYTES,
    MAX_LABEL,
    NO_HINTS,
    Hints,
    Pieces,
    StoreCapabilities,
    Usage,
)
from kvbaton.connectors.stores.threaded import (
    SEAL_BYTES,
    ClientBackend,
    HeldClaims,
    ThreadedStore,
    check_positive,
    seal,
    unseal,
    usage_by_namespace,
)
from kvbaton.errors import ConfigError, StoreError

try:
    from redis import Redis
    from redis.backoff import ExponentialBackoff
    from redis.connection import ConnectionPool
    from redis.exceptions import ConnectionError, OutOfMemoryError, RedisError
    from redis.retry import Retry
except ImportError as error:
    raise ImportError(f"{error}: pip install 'kvbaton[redis]'") from error

_log = logging.getLogger(__name__)
_LOST = (ConnectionError,)
"""Errors after which a call is retried: lost connections, but not time-outs."""
LABELS = struct.Struct(f"{MAX_LABEL}s{MAX_LABEL}s")
"""Namespace and tenant; the checksum covers them and the object's bytes after them."""
HEAD_BYTES = SEAL_BYTES + LABELS.size
"""Bytes of a value before the object's bytes."""
_LABEL = re.compile(rb"([\w.-]*)\0*")
_KEY = re.compile(rb"[0-9a-f]{%d}" % (2 * KEY_BYTES))
_SCANNED = 1000
"""Number of names that the server scans per call, during which it serves no other client."""
_FIGURES_S = 5.0
"""Age in seconds after which a lookup reads the server's statistics again."""
_LONGEST_MS = 1 << 50
"""Maximum time to live in ms; Redis takes none that is much longer."""


class RedisStore(ThreadedStore):
    """Keeps objects in a Redis server; see the module.

    Args:
        name: See `Store.name`.
        url: ``redis://[user:password@]host:port/database``, ``rediss://`` with TLS, or
            ``unix://path``. Options of redis-py's connections may follow as a query.
        prefix: Prefix of the values' names; stores with the same prefix share their objects.
        ttl_s: Seconds after its last use at which an object expires. None: an object expires after
            the time to live that a node gives it (``--store-ttl``), or never.
        threads: See `ThreadedStore`; one connection per thread.
        timeout_s: Time-out in seconds of a connect, a read and a write.
        retries: Number of retries of a call after a lost connection.
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


class RedisValues(ClientBackend):
    """The backend of `RedisStore`."""

    def __init__(
        self, url: str, prefix: str, ttl_s: float | None, timeout_s: float, retries: int
    ) -> None:
        check_positive(timeout_s=timeout_s)
        if ttl_s is not None and ttl_s < 0.001:
            raise ConfigError("ttl_s", f"must be at least 0.001, not {ttl_s}")
        self.capabilities = StoreCapabilities(
            persistent=True,
            shared=True,
            pins=False,
            hints=True,
            expires=ttl_s is None,  # with `ttl_s`, use would prolong an object's time to live
            prefix=True,
            claims=True,
            namespaces=True,
        )
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
        where = self._pool.connection_kwargs  # for messages: only the address, no password
        server = f"{where.get('host', 'localhost')}:{where.get('port', 6379)}"
        self._where = str(where.get("path") or server)
        self._usage, self._asked_at = Usage(), -math.inf
        self._last: dict[str, int] = {}
        self._claims = HeldClaims()

    def open(self) -> None:
        """Connect and read the server's statistics.

        Raises:
            StoreError: The server can't be reached, or refuses access.
        """
        with self._asking("reach"):
            self._ask_figures()

    def close(self) -> None:
        """Remove own claims and close the connections."""
        try:
            self._unlink(map(self._claim_name, self._claims.take(self._claims.keys())))
        except StoreError as error:
            _log.warning("claims are void after %g s: %s", CLAIM_S, error)
        super().close()
        self._pool.disconnect()

    def usage(self) -> Usage:
        """Limit and statistics of the whole server, which does not count by prefix."""
        return self._usage

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Backend.contains`: one round trip."""
        pipeline = self._redis.pipeline(transaction=False)
        for name in map(self._name, keys):
            pipeline.exists(name)
        with self._asking("look into"):
            if time.monotonic() > self._asked_at + _FIGURES_S:
                self._ask_figures()
            return [bool(found) for found in pipeline.execute()]

    def get(self, key: bytes, target: Pieces) -> bool:
        """See `Backend.get`; a damaged value is removed."""
        with self._asking("read"):
            name, lives_ms = self._name(key), self._ttl_ms
            # GETEX only with `ttl_s`: it is a write, which a read-only replica refuses.
            value: Any = (
                self._redis.get(name) if lives_ms is None else self._redis.getex(name, px=lives_ms)
            )
        if value is None:
            return False
        return unseal(self, key, memoryview(value), target, skip=LABELS.size)

    def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
        """See `Backend.put`: the bytes are sent only if the object is not there yet."""
        name, num_bytes = self._name(key), HEAD_BYTES + sum(map(len, source))
        with self._asking("look into"):
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.strlen(name)
            if self._ttl_ms is not None:
                pipeline.pexpire(name, self._ttl_ms)  # storing again restarts its time to live
            held: int = pipeline.execute()[0]
        claims = [self._claim_name(claimed) for claimed in self._claims.take([key])]
        if held == num_bytes:
            self._unlink(claims)
            return True
        # A value of another length is of no use to current readers: replace it.
        labels = LABELS.pack(hints.namespace.encode(), hints.tenant.encode())
        value = b"".join([seal(key, [memoryview(labels), *source]), labels, *source])
        lives_ms = self._ttl_ms
        if lives_ms is None and hints.ttl_s is not None:
            lives_ms = min(max(1, math.ceil(hints.ttl_s * 1000)), _LONGEST_MS)
        with self._asking("write to"):
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.set(name, value, px=lives_ms, nx=not held)
            if claims:
                pipeline.unlink(*claims)
            try:
                pipeline.execute()
            except OutOfMemoryError:
                return False
        return True

    def remove(self, keys: Sequence[bytes]) -> int:
        """See `Backend.remove`."""
        return self._unlink(map(self._name, dict.fromkeys(keys)))

    def claim(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Claiming.claim`: one round trip, and another if some objects are there."""
        until = time.monotonic() + CLAIM_S  # taken before the server starts its timer
        pipeline = self._redis.pipeline(transaction=False)
        for key in keys:
            pipeline.set(self._claim_name(key), b"", nx=True, px=round(CLAIM_S * 1000))
            pipeline.exists(self._name(key))
        with self._asking("claim in"):
            answers = pipeline.execute(raise_on_error=False)
            for answer in answers:
                # A full server takes no claims, either; the store will then answer False.
                if isinstance(answer, RedisError) and not isinstance(answer, OutOfMemoryError):
                    raise answer
        claims, present = answers[::2], answers[1::2]
        self._claims.forget_void()
        self._claims.add((k for k, made in zip(keys, claims, strict=True) if made is True), until)
        there = [key for key, found in zip(keys, present, strict=True) if found]
        self._unlink(map(self._claim_name, self._claims.take(there)))
        return [bool(made) and not found for made, found in zip(claims, present, strict=True)]

    def namespaces(self) -> dict[str, Usage]:
        """See `Namespaced.namespaces`; it reads the head of every value."""
        return usage_by_namespace(found[1:] for found in self._labelled())

    def clear(self, namespace: str) -> int:
        """See `Namespaced.clear`; it reads the head of every value."""
        names = [name for name, held_in, *_ in self._labelled() if held_in == namespace]
        starts = range(0, len(names), _SCANNED)
        return sum(self._unlink(names[start : start + _SCANNED]) for start in starts)

    def _labelled(self) -> Iterator[tuple[bytes, str, str, int]]:
        """Name, namespace, tenant and bytes of every object."""
        pattern = re.sub(rb"([\\*?\[\]^-])", rb"\\\1", self._prefix) + b"*"
        cursor, seen = 0, set[Any]()  # the server may list a name twice
        while True:
            with self._asking("list"):
                answer: Any = self._redis.scan(cursor, pattern, _SCANNED)
                cursor, names = answer
                new = {n for n in names if _KEY.fullmatch(n, len(self._prefix))} - seen
                seen |= new
                pipeline = self._redis.pipeline(transaction=False)
                for name in new:
                    pipeline.getrange(name, SEAL_BYTES, HEAD_BYTES - 1)
                    pipeline.strlen(name)
                answers = pipeline.execute()
            for name, labels, held in zip(new, answers[::2], answers[1::2], strict=True):
                if len(labels) == LABELS.size:  # else it was deleted meanwhile
                    told = [_LABEL.fullmatch(label) for label in LABELS.unpack(labels)]
                    if told[0] and told[1]:
                        yield name, told[0][1].decode(), told[1][1].decode(), held - HEAD_BYTES
            if not cursor:
                return

    def _ask_figures(self) -> None:
        """Read the server's statistics; called by `open` and by the lookup thread."""
        figures: Any = self._redis.info()
        counters = dict(self._usage.counters)
        for name in ("evicted_keys", "expired_keys"):
            now, last = int(figures.get(name, 0)), self._last.get(name, 0)
            # After a restart the server counts from 0.
            counters[name] = counters.get(name, 0) + (now - last if now >= last else now)
            self._last[name] = now
        used, capacity = (int(figures.get(name, 0)) for name in ("used_memory", "maxmemory"))
        gauges = {"used_memory_bytes": used}
        self._usage = Usage(capacity=capacity or None, counters=counters, gauges=gauges)
        self._asked_at = time.monotonic()

    def _unlink(self, names: Iterable[bytes]) -> int:
        given = list(names)
        if not given:
            return 0
        with self._asking("delete from"):
            count: Any = self._redis.unlink(*given)
        return int(count)

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _claim_name(self, key: bytes) -> bytes:
        return self._prefix + b"claim:" + key.hex().encode()

    def _asking(self, what: str) -> AbstractContextManager[None]:
        return self._calling(f"can't {what} redis at {self._where}", RedisError, OSError)

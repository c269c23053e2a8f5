"""Objects in an LMCache server on this machine, through its shared memory.

The operator starts the server, so it outlives engines and keeps their objects::

    lmcache server --eviction-policy LRU --supported-transfer-mode engine_driven ...

This store uses LMCache's own request client (0.5.6). It maps the server's memory itself, as
LMCache's `EngineDrivenContextShm` would pin all of it for CUDA for each instance. Bytes are moved
only through shared memory: across machines the server would unpickle its input. The server can't
delete single objects, and does not answer requests that it rejects, so each request has a time-out.
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import zmq

import kvbaton.connectors.stores.lmcache  # noqa: F401  # says if LMCache is missing, and quiets it
from kvbaton.connectors.store import Pieces, StoreCapabilities, Usage
from kvbaton.connectors.stores import chunks
from kvbaton.connectors.stores.chunks import KEY_TOKENS
from kvbaton.connectors.stores.threaded import ClientBackend, ThreadedStore
from kvbaton.errors import StoreError

_RENEW_S = 600.0
"""Age in seconds at which an instance is replaced: the server forgets silent ones after an hour."""
_LINGER_MS = 200
"""Time for the last requests to be sent."""
_ROOM_S = 2.0
"""Seconds to wait for room: a full server evicts once a second, also for refused stores."""
_ASK_AGAIN_S = 0.05
"""Seconds between attempts while waiting for room."""


class LMCacheServerStore(ThreadedStore):
    """Keeps objects in an LMCache server; see the module.

    Args:
        name: See `Store.name`.
        url: ``tcp://host:port`` of the server.
        chunk_bytes: Bytes of a chunk of LMCache; an object's last chunk is only partly filled. All
            processes that share objects need the same value.
        threads: See `ThreadedStore`.
        timeout_s: Time-out of one request in seconds.
    """

    def __init__(
        self,
        name: str,
        *,
        url: str = "tcp://127.0.0.1:5555",
        chunk_bytes: int = 256 << 10,
        threads: int = 2,
        timeout_s: float = 5.0,
    ) -> None:
        chunks.check_chunk_bytes(chunk_bytes)
        super().__init__(name, LMCacheServerBackend(url, chunk_bytes, timeout_s), threads=threads)


class LMCacheServerBackend(ClientBackend):
    """The backend of `LMCacheServerStore`; LMCache itself is imported when it is opened."""

    capabilities = StoreCapabilities(
        persistent=True, shared=True, pins=False, deletes=False, max_keys=256
    )

    def __init__(self, url: str, chunk_bytes: int, timeout_s: float) -> None:
        self._url = url
        self._chunk_bytes = chunk_bytes
        self._timeout_s = timeout_s
        self._client: Any = None
        self._capacity: int | None = None
        self._idle: deque[LMCacheInstance] = deque()

    def open(self) -> None:
        """Import LMCache, which takes seconds, and register with the server.

        Raises:
            StoreError: The server can't be reached, its chunks are too short, or it runs on
                another machine.
        """
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, _LINGER_MS)
        self._context.setsockopt(zmq.SNDTIMEO, _LINGER_MS)  # its clients share a thread
        self._client = RequestClientFactory.create(self._url, context=self._context)
        try:
            with self._instance() as instance:
                self._capacity = instance.capacity
        except StoreError:
            self._disconnect()
            raise

    def close(self) -> None:
        """Unregister and close the connection."""
        super().close()
        self._disconnect()

    def usage(self) -> Usage:
        """Only the capacity: the memory that the server has for all of its clients."""
        return Usage(capacity=self._capacity)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Backend.contains`; looks up only the first chunk of each object."""
        with self._instance() as instance:
            return [hits > 0 for hits in instance.hits([(key, 1) for key in keys])]

    def get(self, key: bytes, target: Pieces) -> bool:
        """See `Backend.get`."""
        with self._instance() as instance:
            return instance.get(key, target)

    def put(self, key: bytes, source: Pieces) -> bool:
        """See `Backend.put`."""
        with self._instance() as instance:
            return instance.put(key, source)

    def _disconnect(self) -> None:
        if self._client is not None:
            while self._idle:
                self._idle.pop().close()
            self._client.close()
            self._context.destroy()
        self._client = None

    @contextmanager
    def _instance(self) -> Iterator[LMCacheInstance]:
        """An instance for exclusive use; it is discarded if a call fails."""
        # Exception: time-outs, and whatever LMCache raises for an answer.
        with self._calling(f"LMCache server at {self._url}", Exception):
            instance = None
            with suppress(IndexError):  # none is idle
                instance = self._idle.pop()
            if instance is not None and instance.is_old():
                instance.close()
                instance = None
            instance = instance or LMCacheInstance(self._client, self._chunk_bytes, self._timeout_s)
            try:
                yield instance
            except Exception:
                instance.close()
                raise
        self._idle.append(instance)


class LMCacheInstance:
    """A registration at the server, and the server's memory; for one thread at a time.

    There are several because the server tracks only one transfer per instance and key.
    """

    def __init__(self, client: Any, chunk_bytes: int, timeout_s: float) -> None:
        from lmcache.v1.multiprocess.custom_types import RegisterEngineDrivenContextPayload

        self._client = client
        self._chunk_bytes, self._timeout_s = chunk_bytes, timeout_s
        self._numbers = itertools.count()
        self._id = random.getrandbits(48)
        self._made = time.monotonic()
        self._makes_room = True
        self._chunk_tokens = int(self._answer("get_chunk_size"))
        if self._chunk_tokens < KEY_TOKENS:
            raise StoreError(f"--chunk-size must be at least {KEY_TOKENS}")
        # A model name per length keeps objects in chunks of different lengths apart.
        self._model = f"kvbaton-{chunk_bytes}"
        registered = self._answer(
            "register_kv_cache_engine_driven_context",
            RegisterEngineDrivenContextPayload(
                instance_id=self._id,
                model_name=self._model,
                world_size=1,
                block_size=self._chunk_tokens,
                num_layers=1,
                hidden_dim_size=chunk_bytes,
                dtype_str="uint8",
                use_mla=True,
                num_physical_slots=1,
            ),
        )
        self._pool = _mapped(registered.shm_name, registered.pool_size)
        self.capacity = len(self._pool)

    def is_old(self) -> bool:
        """Whether the instance should be replaced."""
        return time.monotonic() > self._made + _RENEW_S

    def close(self) -> None:
        """Unregister, without waiting for an answer."""
        self._client.unregister_kv_cache_engine_driven_context(self._id)

    def hits(self, wanted: Sequence[tuple[bytes, int]]) -> list[int]:
        """For each (key, number of chunks), how many of the object's first chunks are there."""
        requests = [self._request(key, count) for key, count in wanted]
        hits = self._lock(requests)
        self._unlock(request for request, hit in zip(requests, hits, strict=True) if hit)
        self._end(requests)
        return hits

    def get(self, key: bytes, target: Pieces) -> bool:
        """See `Backend.get`."""
        count = chunks.count(target, self._chunk_bytes)
        request, right = self._request(key, count), None
        [hits] = self._lock([request])
        if hits == count:
            found = self._answer("prepare_retrieve", request, self._id)
            if found.success:
                right = chunks.take(self._slots(found.context), key, target)
                self._answer("commit_retrieve", request, self._id)
        elif hits:
            self._unlock([request])
        self._end([request])
        return bool(right)

    def put(self, key: bytes, source: Pieces) -> bool:
        """See `Backend.put`."""
        count = chunks.count(source, self._chunk_bytes)
        if count * self._chunk_bytes > len(self._pool):
            return False
        # If the server made no room the last time, try once: else each object would wait for it.
        deadline = time.monotonic() + _ROOM_S * self._makes_room
        while not (kept := self._put_now(key, source, count)) and time.monotonic() < deadline:
            time.sleep(_ASK_AGAIN_S)
        self._makes_room = kept
        return kept

    def _put_now(self, key: bytes, source: Pieces, count: int) -> bool:
        """Store the chunks of an object for which there is room; True if all are there now."""
        request = self._request(key, count)
        room = self._answer("prepare_store", request, self._id).context
        if numbers := room["chunk_indices"]:
            chunks.fill(self._slots(room), numbers, key, source)
            self._answer("commit_store", request, self._id, b"")
        self._end([request])
        # The server gives no room for chunks that are there, are being written, or do not fit.
        return len(numbers) == count or self.hits([(key, count)]) == [count]

    def _request(self, key: bytes, count: int) -> Any:
        """The server's form of a key: token ids, and the name of a session."""
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

        tokens = chunks.tokens_of(key, self._chunk_tokens, count)
        return IPCCacheServerKey(
            model_name=self._model,
            world_size=1,
            worker_id=0,
            token_ids=tuple(tokens),
            start=0,
            end=len(tokens),
            request_id=f"{self._id}-{next(self._numbers)}",
            num_kv_readers=1,
        )

    def _lock(self, requests: Sequence[Any]) -> list[int]:
        """Number of chunks of each request that are there; these stay until they are unlocked."""
        self._answers("lookup", [(request, 1) for request in requests])
        waits = [(request.request_id, self._timeout_s / 2) for request in requests]
        return [hits or 0 for hits in self._answers("wait_prefetch_status", waits)]

    def _unlock(self, requests: Iterable[Any]) -> None:
        self._answers("free_lookup_locks", [(request, 1) for request in requests])

    def _end(self, requests: Sequence[Any]) -> None:
        self._answers("end_session", [(request.request_id,) for request in requests])

    def _slots(self, context: dict[str, Any]) -> list[memoryview]:
        slots = [self._pool[s["offset"] : s["offset"] + s["length"]] for s in context["slots"]]
        if any(len(slot) != self._chunk_bytes for slot in slots):
            raise StoreError("the server's chunks have another length")
        return slots

    def _answer(self, operation: str, *words: Any) -> Any:
        return self._answers(operation, [words])[0]

    def _answers(self, operation: str, many: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send all requests at once, and wait for all answers."""
        deadline = time.monotonic() + self._timeout_s
        futures = [getattr(self._client, operation)(*words) for words in many]
        for future in futures:
            if not future.wait(max(deadline - time.monotonic(), 0)):
                raise StoreError(f"no answer to {operation} within {self._timeout_s:g} s")
        return [future.result() for future in futures]


def _mapped(name: str, num_bytes: int) -> memoryview:
    """Map the server's shared memory."""
    path = f"/dev/shm/{name.strip('/')}"
    if not name or os.path.dirname(path) != "/dev/shm":
        raise StoreError("the server offers no shared memory: start it with --shm-name")
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(f"its memory is not on this machine: {error}") from error
    try:
        return memoryview(mmap.mmap(file, num_bytes))
    except (OSError, ValueError) as error:
        raise StoreError(f"can't map its memory: {error}") from error
    finally:
        os.close(file)

"""Objects in an LMCache server on this machine, through its shared memory.

The server is started by whoever runs it, so that it keeps what engines leave behind::

    lmcache server --eviction-policy LRU --supported-transfer-mode engine_driven ...

Spoken to by LMCache's own request client (0.5.6). Its memory is mapped here, not by LMCache's
`EngineDrivenContextShm`, which pins all of it for CUDA once for each that is made. Bytes go through
shared memory only: across machines the server would unpickle what it gets. It does not delete
objects one by one, and it does not answer what it does not like: each request has a deadline.
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
"""The server forgets whom it has not heard of for an hour."""
_LINGER_MS = 200
"""For last requests to leave."""
_ROOM_S = 2.0
"""A full server makes room once a second, also for those who could not be served meanwhile."""
_ASK_AGAIN_S = 0.05


class LMCacheServerStore(ThreadedStore):
    """Keeps objects in an LMCache server; see the module.

    Args:
        name: see `Store.name`.
        url: ``tcp://host:port`` of the server.
        chunk_bytes: of what LMCache keeps an object in; the last chunk of an object is not filled.
            All who share objects have the same.
        threads: see `ThreadedStore`.
        timeout_s: the longest that one request waits for its answer.
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
            StoreError: it can't be reached, its chunks are too short, or it is on another machine.
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
        """Say goodbye and close the connection."""
        super().close()
        self._disconnect()

    def usage(self) -> Usage:
        """Only the memory that the server has for all who use it."""
        return Usage(capacity=self._capacity)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Backend.contains`; of an object, only its first chunk is looked for."""
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
        """An instance that nobody else uses meanwhile; one that fails is not used again."""
        # A time-out, or whatever LMCache makes of an answer.
        with self._calling(f"LMCache server at {self._url}", Exception):
            instance = None
            with suppress(IndexError):  # none, or another thread was faster
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
    """What the server knows about somebody who uses it, and its memory: for one thread at a time.

    The server keeps one transfer per instance and key in its books.
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
        # Objects in chunks of another length are those of another model.
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
        """Whether to make a new one."""
        return time.monotonic() > self._made + _RENEW_S

    def close(self) -> None:
        """Say goodbye, without waiting for an answer."""
        self._client.unregister_kv_cache_engine_driven_context(self._id)

    def hits(self, wanted: Sequence[tuple[bytes, int]]) -> list[int]:
        """How many of an object's first chunks are there, for each key and number of chunks."""
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
        # A server that made none the last time is asked once, else each object would wait for it.
        deadline = time.monotonic() + _ROOM_S * self._makes_room
        while not (kept := self._put_now(key, source, count)) and time.monotonic() < deadline:
            time.sleep(_ASK_AGAIN_S)
        self._makes_room = kept
        return kept

    def _put_now(self, key: bytes, source: Pieces, count: int) -> bool:
        """Store those chunks of an object that there is room for; True if all are there now."""
        request = self._request(key, count)
        room = self._answer("prepare_store", request, self._id).context
        if numbers := room["chunk_indices"]:
            chunks.fill(self._slots(room), numbers, key, source)
            self._answer("commit_store", request, self._id, b"")
        self._end([request])
        # Chunks without room are there already, are being written by others, or do not fit.
        return len(numbers) == count or self.hits([(key, count)]) == [count]

    def _request(self, key: bytes, count: int) -> Any:
        """What the server calls a key: tokens, and the name of a session."""
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
        """How many chunks of each request are there; those stay until they are unlocked."""
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
        """Send requests at once and wait for all answers."""
        deadline = time.monotonic() + self._timeout_s
        futures = [getattr(self._client, operation)(*words) for words in many]
        for future in futures:
            if not future.wait(max(deadline - time.monotonic(), 0)):
                raise StoreError(f"no answer to {operation} within {self._timeout_s:g} s")
        return [future.result() for future in futures]


def _mapped(name: str, num_bytes: int) -> memoryview:
    """The server's memory."""
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

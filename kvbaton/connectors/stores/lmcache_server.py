"""Objects in an LMCache server on this machine, through its shared memory.

The server is started by whoever runs it, so that it keeps what engines leave behind::

    lmcache server --eviction-policy LRU --supported-transfer-mode engine_driven ...

Spoken to by its own protocol (LMCache 0.5.6) over ZMQ, without importing LMCache. Bytes go through
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import zmq

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
from kvbaton.errors import StoreError

_OPERATIONS = {
    "lookup": 8,
    "wait_prefetch_status": 10,
    "free_lookup_locks": 12,
    "end_session": 13,
    "register": 14,
    "unregister": 15,
    "prepare_store": 16,
    "commit_store": 17,
    "prepare_retrieve": 18,
    "commit_retrieve": 19,
    "get_chunk_size": 21,
}
"""Numbers of the requests on the wire."""

_RENEW_S = 600.0
"""The server forgets whom it has not heard of for an hour."""
_LINGER_MS = 200
"""For a last request to leave."""


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
        check_chunk_bytes(chunk_bytes)
        super().__init__(name, Chunks(url, chunk_bytes, timeout_s), threads=threads)


class Chunks:
    """The backend of `LMCacheServerStore`."""

    capabilities = StoreCapabilities(
        persistent=True, shared=True, pins=False, deletes=False, max_keys=256
    )

    def __init__(self, url: str, chunk_bytes: int, timeout_s: float) -> None:
        self._url = url
        self._chunk_bytes = chunk_bytes
        self._timeout_s = timeout_s
        self._idle: deque[Channel] = deque()
        self._trouble: str | None = "not open"

    def open(self) -> None:
        """Register with the server.

        Raises:
            StoreError: it can't be reached, its chunks are too short, or it is on another machine.
        """
        self._context = zmq.Context()
        try:
            with self._channel():
                pass
        except StoreError:
            self._context.destroy(linger=0)
            raise

    def close(self) -> None:
        """Close the channels."""
        while self._idle:
            self._idle.pop().close()
        self._context.destroy(linger=_LINGER_MS)
        self._trouble = "not open"

    def health(self) -> str | None:
        """The error of the last call, if it had one."""
        return self._trouble

    def usage(self) -> Usage:
        """Unknown."""
        return Usage()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Backend.contains`; of an object, only its first chunk is looked for."""
        with self._channel() as channel:
            return channel.contains(keys)

    def get(self, key: bytes, target: Pieces) -> bool:
        """See `Backend.get`."""
        with self._channel() as channel:
            return channel.get(key, target)

    def put(self, key: bytes, source: Pieces) -> bool:
        """See `Backend.put`."""
        with self._channel() as channel:
            return channel.put(key, source)

    def remove(self, keys: Sequence[bytes]) -> int:
        """Not declared: the protocol has no request for it."""
        return 0

    @contextmanager
    def _channel(self) -> Iterator[Channel]:
        """A channel that nobody else uses meanwhile; one that fails is thrown away."""
        channel = None
        try:
            channel = self._idle.pop() if self._idle else None
            if channel is None or channel.is_old():
                if channel is not None:
                    channel.close()
                channel = Channel(self._context, self._url, self._chunk_bytes, self._timeout_s)
            yield channel
        except (StoreError, zmq.ZMQError) as error:
            if channel is not None:
                channel.close()
            self._trouble = f"LMCache server at {self._url}: {error}"
            raise StoreError(self._trouble) from error
        self._trouble = None
        self._idle.append(channel)


class Channel:
    """A socket, and what the server knows about whoever uses it: for one thread at a time.

    The server keeps one transfer per instance and key in its books, so each channel is an instance.
    """

    def __init__(
        self, context: zmq.Context[Any], url: str, chunk_bytes: int, timeout_s: float
    ) -> None:
        self._timeout_s = timeout_s
        self._chunk_bytes = chunk_bytes
        self._numbers = itertools.count()
        self._instance = random.getrandbits(48)
        self._made = time.monotonic()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDTIMEO, round(timeout_s * 1000))
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        try:
            self._socket.connect(url)
            self._chunk_tokens = int(self._ask("get_chunk_size"))
            self._pool = self._register()
        except BaseException:
            self._socket.close(linger=0)
            raise

    def is_old(self) -> bool:
        """Whether to make a new one."""
        return time.monotonic() > self._made + _RENEW_S

    def close(self) -> None:
        """Say goodbye if the server is there, and close the socket."""
        with suppress(zmq.ZMQError):
            self._send("unregister", self._instance, flags=zmq.NOBLOCK)
        self._socket.close(linger=_LINGER_MS)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Backend.contains`."""
        requests = [self._request(key, 1) for key in keys]
        hits = self._look(requests)
        self._let_go([r for r, hit in zip(requests, hits, strict=True) if hit])
        self._end(requests)
        return [hit > 0 for hit in hits]

    def get(self, key: bytes, target: Pieces) -> bool:
        """See `Backend.get`."""
        chunks = chunks_of(target, self._chunk_bytes)
        request, verdict = self._request(key, chunks), Verdict.OTHER_LENGTH
        [hits] = self._look([request])
        if hits == chunks:
            verdict = self._take(request, key, target)
        elif hits:
            self._let_go([request])
        self._end([request])
        return verdict is Verdict.RIGHT

    def put(self, key: bytes, source: Pieces) -> bool:
        """See `Backend.put`."""
        chunks = chunks_of(source, self._chunk_bytes)
        if chunks * self._chunk_bytes > len(self._pool):
            return False
        request = self._request(key, chunks)
        room = self._ask("prepare_store", request, self._instance)["context"]
        if numbers := room["chunk_indices"]:
            fill(self._slots(room), numbers, key, source)
            self._ask("commit_store", request, self._instance, b"")
        self._end([request])
        # Chunks without room are there already, are being written by others, or do not fit.
        return len(numbers) == chunks or self._is_whole(key, chunks)

    def _is_whole(self, key: bytes, chunks: int) -> bool:
        request = self._request(key, chunks)
        [hits] = self._look([request])
        self._let_go([request] if hits else [])
        self._end([request])
        return hits == chunks

    def _take(self, request: dict[str, Any], key: bytes, target: Pieces) -> Verdict:
        answer = self._ask("prepare_retrieve", request, self._instance)
        if not answer["success"]:
            return Verdict.OTHER_LENGTH
        verdict = take(self._slots(answer["context"]), key, target)
        self._ask("commit_retrieve", request, self._instance)
        return verdict

    def _look(self, requests: Sequence[dict[str, Any]]) -> list[int]:
        """How many chunks of each request are there; those are locked."""
        self._ask_all("lookup", [(request, 1) for request in requests])
        waits = [(request["request_id"], self._timeout_s / 2) for request in requests]
        return [hits or 0 for hits in self._ask_all("wait_prefetch_status", waits)]

    def _let_go(self, requests: Sequence[dict[str, Any]]) -> None:
        self._ask_all("free_lookup_locks", [(request, 1) for request in requests])

    def _end(self, requests: Sequence[dict[str, Any]]) -> None:
        self._ask_all("end_session", [(request["request_id"],) for request in requests])

    def _request(self, key: bytes, chunks: int) -> dict[str, Any]:
        """What the server calls a key: tokens, and the name of a session."""
        tokens = tokens_of(key, self._chunk_tokens, chunks)
        return {
            "model_name": self._model,
            "world_size": 1,
            "worker_id": 0,
            "token_ids": tokens,
            "start": 0,
            "end": len(tokens),
            "request_id": f"{self._instance}-{next(self._numbers)}",
            "cache_salt": "",
            "request_configs": None,
            "num_kv_readers": 1,
        }

    @property
    def _model(self) -> str:
        """Objects in chunks of another length are those of another model."""
        return f"kvbaton-{self._chunk_bytes}"

    def _register(self) -> memoryview:
        """Say how long chunks are; returns the memory that holds them."""
        if self._chunk_tokens < KEY_TOKENS:
            raise StoreError(f"--chunk-size must be at least {KEY_TOKENS}")
        answer = self._ask(
            "register",
            {
                "instance_id": self._instance,
                "model_name": self._model,
                "world_size": 1,
                "block_size": self._chunk_tokens,
                "num_layers": 1,
                "hidden_dim_size": self._chunk_bytes,
                "dtype_str": "uint8",
                "use_mla": True,
                "num_physical_slots": 1,
            },
        )
        return _mapped(answer["shm_name"], answer["pool_size"])

    def _slots(self, context: dict[str, Any]) -> list[memoryview]:
        slots = [self._pool[s["offset"] : s["offset"] + s["length"]] for s in context["slots"]]
        if any(len(slot) != self._chunk_bytes for slot in slots):
            raise StoreError("the server's chunks have another length")
        return slots

    def _ask(self, operation: str, *words: Any) -> Any:
        return self._ask_all(operation, [words])[0]

    def _ask_all(self, operation: str, many: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send requests at once and wait for all answers, in whatever order they come."""
        try:
            numbers = [self._send(operation, *words) for words in many]
        except zmq.Again as error:
            raise StoreError(f"no connection within {self._timeout_s:g} s") from error
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self._timeout_s
        while len(answers) < len(numbers):
            left = deadline - time.monotonic()
            if left <= 0 or not self._socket.poll(left * 1000):
                raise StoreError(f"no answer to {operation} within {self._timeout_s:g} s")
            number, _, *rest = self._socket.recv_multipart()
            answer = msgspec.msgpack.decode(rest[0]) if rest else None
            answers[msgspec.msgpack.decode(number)] = answer
        return [answers[number] for number in numbers]

    def _send(self, operation: str, *words: Any, flags: int = 0) -> int:
        number = next(self._numbers)
        parts = (number, _OPERATIONS[operation], *words)
        self._socket.send_multipart([msgspec.msgpack.encode(part) for part in parts], flags)
        return number


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

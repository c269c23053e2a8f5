"""KV events: which blocks the prefix cache has gained and lost, in vLLM's format, for indexers.

The structs are those of vLLM's KV events, with fields in the same order, encoded as MessagePack
arrays; `docs/kv_events.md` describes the wire format. A thread publishes them over ZMQ, repeats
them on request, and sends snapshots. The core's thread only encodes a batch and puts it into a
bounded queue, so a slow subscriber never delays a step. Batches are numbered, so that subscribers
notice gaps.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

import msgspec
import zmq
from typing_extensions import override

from kvbaton.connectors.layout import GroupKind
from kvbaton.engine.config import KV_EVENTS_FLAG, KVEventsConfig
from kvbaton.engine.kv_cache_manager import KVCacheManager
from kvbaton.engine.kv_connector import KVConnector
from kvbaton.engine.request import Sequence as RequestSequence
from kvbaton.errors import ConfigError
from kvbaton.types import TokenIds

logger = logging.getLogger(__name__)

POOL_MEDIUM = "GPU"
"""vLLM's name for the memory that a model runs from, whatever the device is."""

SNAPSHOT = b"snapshot"
"""Request to the replay socket for all cached blocks, instead of batches from a number on."""
END = (-1).to_bytes(8, "big", signed=True)
"""Number of the last message of a reply."""
SNAPSHOT_EVENTS = 256
"""Number of events per message of a snapshot."""
LINGER_MS = 1000
CLOSE_S = 5.0

_encode = msgspec.msgpack.Encoder().encode
_BOUND = re.compile(r"(?:ipc|inproc)://|tcp://(?:127\.|localhost:|\[::1\]:)|.*(?:\*|::)")

KINDS = {
    GroupKind.FULL: "full_attention",
    GroupKind.WINDOW: "sliding_window",
    GroupKind.CHUNK: "chunked_local_attention",
    GroupKind.STATE: "mamba",  # vLLM's name for any state
}
"""vLLM's names for kinds of groups."""

BlockHash = int | bytes


class BlockStored(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Consecutive blocks of one sequence were added to a medium.

    Attributes:
        block_hashes: Keys of the blocks.
        parent_block_hash: Key of the block before the first one; None at a sequence's start.
        token_ids: Tokens of all blocks.
        block_size: Tokens per block.
        lora_id: Always None, since there are no adapters.
        medium: `POOL_MEDIUM`, or the name of a store.
        lora_name: Always None, since there are no adapters.
        extra_keys: None, or per block what its hash covers besides tokens: the cache salt of a
            sequence's first block.
        group_idx: KV group.
        kv_cache_spec_kind: One of `KINDS`.
        kv_cache_spec_sliding_window: Tokens of the window or chunk.
    """

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None
    group_idx: int
    kv_cache_spec_kind: str
    kv_cache_spec_sliding_window: int | None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    """Blocks were removed from a medium."""

    block_hashes: list[BlockHash]
    medium: str
    group_idx: int


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """All blocks were removed from the cache."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, frozen=True):
    """One message: the events since the previous one.

    Attributes:
        ts: Seconds since 1970.
        events: Events in order.
        data_parallel_rank: Always 0.
    """

    ts: float
    events: Sequence[Event]
    data_parallel_rank: int = 0


class Cached(NamedTuple):
    """A block in the prefix cache: key of the block before it, its tokens, the request's salt."""

    parent: bytes | None
    tokens: TokenIds
    salt: str


class KVEventLog(KVConnector):
    """Collects events of the prefix caches, and mirrors their contents.

    Args:
        blocks: The KV cache manager to listen to.
        int_block_hashes: See `KVEventsConfig`.

    Attributes:
        index: Per group, all cached blocks by key.
    """

    def __init__(self, blocks: KVCacheManager, *, int_block_hashes: bool = True) -> None:
        self.index: list[dict[bytes, Cached]] = [{} for _ in blocks.groups]
        self._blocks = blocks
        self._ints = int_block_hashes
        self._events: list[Event] = []
        self._elsewhere = False
        blocks.pool.on_forget.append(self.forgotten)

    # --- changes ---

    @override
    def committed(self, sequence: RequestSequence, g: int, first: int, end: int) -> None:
        size, index = self._blocks.groups[g].block_size, self.index[g]
        by_key = self._blocks.pool.by_key[g]
        chain, salt = sequence.chain(size), sequence.request.spec.cache_salt
        fresh = [i for i in range(first, end) if chain[i] in by_key and chain[i] not in index]
        for i in fresh:
            tokens = sequence.tokens[i * size : (i + 1) * size]
            index[chain[i]] = Cached(chain[i - 1] if i else None, tokens, "" if i else salt)
        for _, run in groupby(enumerate(fresh), lambda pair: pair[1] - pair[0]):
            self._events.append(self._event(g, [chain[i] for _, i in run], index, POOL_MEDIUM))

    def forgotten(self, g: int, key: bytes) -> None:
        """Note that a block left a prefix cache."""
        if self.index[g].pop(key, None) is None:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and (last.medium, last.group_idx) == (POOL_MEDIUM, g):
            last.block_hashes.append(self._hash(key))
        else:
            self._events.append(BlockRemoved([self._hash(key)], POOL_MEDIUM, g))

    @override
    def saved(self, medium: str, g: int, keys: list[bytes]) -> None:
        """Note that a store has saved blocks; those no longer cached here are left out.

        Only a store that reports its evictions takes this back.
        """
        kept = {key: self.index[g][key] for key in keys if key in self.index[g]}
        for run in _runs(kept):
            self._events.append(self._event(g, run, kept, medium))
            self._elsewhere = True

    @override
    def removed(self, medium: str, g: int, keys: list[bytes]) -> None:
        self._events.append(BlockRemoved(list(map(self._hash, keys)), medium, g))

    @override
    def reset_prefix_cache(self) -> int:
        """Note that all prefix caches were cleared; single blocks were reported already.

        `AllBlocksCleared` is left out if a store has blocks: it has no medium, so it would clear
        these too.
        """
        if not self._elsewhere:
            self._events.append(AllBlocksCleared())
        return 0

    # --- events ---

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def contents(self) -> Iterator[BlockStored]:
        """Yield all cached blocks, parents first; from any thread.

        May be ahead of the events taken so far; applying these again changes nothing.
        """
        for g, index in enumerate(self.index):
            now = index.copy()  # atomic in the interpreter: no thread can interfere
            for run in _runs(now):
                yield self._event(g, run, now, POOL_MEDIUM)

    def _event(
        self, g: int, keys: Sequence[bytes], index: Mapping[bytes, Cached], medium: str
    ) -> BlockStored:
        group, blocks = self._blocks.groups[g], [index[key] for key in keys]
        parent = blocks[0].parent
        salted = any(block.salt for block in blocks)
        return BlockStored(
            block_hashes=tuple(map(self._hash, keys)),
            parent_block_hash=None if parent is None else self._hash(parent),
            token_ids=[token for block in blocks for token in block.tokens],
            block_size=group.block_size,
            lora_id=None,
            medium=medium,
            lora_name=None,
            extra_keys=[(b.salt,) if b.salt else None for b in blocks] if salted else None,
            group_idx=g,
            kv_cache_spec_kind=KINDS[group.kind],
            kv_cache_spec_sliding_window=group.window or None,
        )

    def _hash(self, key: bytes) -> BlockHash:
        return int.from_bytes(key[-8:], "big") if self._ints else key


def _runs(blocks: Mapping[bytes, Cached]) -> Iterator[list[bytes]]:
    """Yield blocks in chains; each comes after the chain that contains its parent."""
    done: set[bytes] = set()
    at: bytes | None
    for at in reversed(list(blocks)):  # a sequence's last block leads to all before it
        run = []
        while at is not None and at in blocks and at not in done:
            run.append(at)
            done.add(at)
            at = blocks[at].parent
        if run:
            yield run[::-1]


class KVEventPublisher(KVEventLog):
    """Publishes the events of an engine's prefix caches.

    Args:
        config: Settings of KV events.
        blocks: The KV cache manager.

    Raises:
        ConfigError: An endpoint is invalid or in use.

    Attributes:
        endpoint: Address as bound or connected, with its port.
        replay_endpoint: Address as bound.
        published: Number of batches that were numbered, dropped ones included.
        dropped: Number of batches dropped since the queue was full.
    """

    name = "kv_events"

    def __init__(self, config: KVEventsConfig, blocks: KVCacheManager) -> None:
        super().__init__(blocks, int_block_hashes=config.int_block_hashes)
        self.published = 0
        self.dropped = 0
        self._topic = config.topic.encode()
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.Context()
        try:
            self._pub = self._open(zmq.PUB, config.hwm)
            self._replay = self._open(zmq.ROUTER, max(config.hwm, config.buffer_steps + 1))
            self.endpoint = _attach(self._pub, "endpoint", config.endpoint)
            self.replay_endpoint = config.replay_endpoint and _attach(
                self._replay, "replay_endpoint", config.replay_endpoint, bind=True
            )
        except ConfigError:
            self._context.destroy(0)
            raise
        self._queue = self._open(zmq.PULL, 1)
        self._queue.bind("inproc://batches")
        self._feed = self._open(zmq.PUSH, config.max_queue_size)
        self._feed.connect("inproc://batches")
        self._thread = threading.Thread(target=self._run, name="kvbaton-kv-events", daemon=True)
        self._thread.start()
        logger.info("KV events at %s, replay at %s", self.endpoint, self.replay_endpoint)

    def _open(self, kind: int, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(hwm)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        return socket

    # --- called by the core's thread ---

    @override
    def flush(self) -> None:
        """Queue the events since the last call, if there are any; never waits."""
        events = self.take()
        if not events:
            return
        number, self.published = self.published.to_bytes(8, "big"), self.published + 1
        try:
            self._feed.send_multipart((number, _payload(events)), zmq.NOBLOCK)
        except zmq.Again:
            self.dropped += 1

    @override
    def counters(self) -> dict[str, float]:
        return {
            "kvbaton_kv_event_batches_total": float(self.published),
            "kvbaton_kv_event_batches_dropped_total": float(self.dropped),
        }

    @override
    def state(self) -> dict[str, Any]:
        """Addresses for indexers, and counts."""
        return {
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "published": self.published,
            "dropped": self.dropped,
            "cached": [len(index) for index in self.index],
        }

    @override
    def close(self) -> None:
        """Publish what is queued, for at most a few seconds, and end the thread."""
        self.flush()
        self._feed.setsockopt(zmq.SNDTIMEO, LINGER_MS)
        try:
            self._feed.send(b"")
            self._thread.join(CLOSE_S)
        except zmq.Again:
            logger.warning("the thread of the KV events does not take its queue")
        self._feed.close(0)
        if not self._thread.is_alive():
            self._context.term()

    # --- the thread ---

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._queue, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        try:
            while self._forward():
                if self._replay not in dict(poller.poll()):
                    continue
                if not self._forward():  # a reply must contain all that was published before
                    return
                frames = self._replay.recv_multipart()
                if len(frames) != 3 or len(frames[2]) != 8:
                    logger.warning("a KV replay request has %d frames", len(frames))
                    continue
                # A client that makes no room for replies misses them.
                client, delimiter, wanted = frames
                later = (batch for batch in self._buffer if batch[0] >= wanted)
                for reply in self._snapshot() if wanted == SNAPSHOT else later:
                    self._replay.send_multipart((client, delimiter, *reply))
                self._replay.send_multipart((client, delimiter, END, b""))
        finally:
            for socket in (self._queue, self._replay, self._pub):
                socket.close()

    def _forward(self) -> bool:
        """Publish all queued batches; False once the end was queued."""
        while self._queue.poll(0):
            batch = self._queue.recv_multipart()
            if len(batch) == 1:
                return False
            self._pub.send_multipart((self._topic, *batch))
            self._buffer.append((batch[0], batch[1]))
        return True

    def _snapshot(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield all cached blocks, numbered as the last batch that they include."""
        published = self.published  # read first: the contents must not be older
        if published:
            number = (published - 1).to_bytes(8, "big")
            yield number, _payload([AllBlocksCleared()])
            contents = self.contents()
            while events := list[Event](islice(contents, SNAPSHOT_EVENTS)):
                yield number, _payload(events)


def _payload(events: list[Event]) -> bytes:
    return _encode(EventBatch(time.time(), events))


def _attach(socket: zmq.Socket[bytes], key: str, endpoint: str, *, bind: bool = False) -> str:
    """Bind or connect a socket; returns the address with its port."""
    socket.setsockopt(zmq.IPV6, "::" in endpoint)
    try:
        if bind or _BOUND.match(endpoint):
            socket.bind(endpoint)
            return socket.getsockopt_string(zmq.LAST_ENDPOINT)
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        hint = "; port * takes a free one" if error.errno == zmq.EADDRINUSE else ""
        raise ConfigError(KV_EVENTS_FLAG, f"{key} {endpoint!r}: {error}{hint}") from error
    return endpoint

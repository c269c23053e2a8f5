"""What the prefix cache tells indexers: which blocks it has gained and lost, as vLLM says it.

The structs are those of vLLM's KV events, fields in the same order, encoded as MessagePack arrays;
`docs/kv_events.md` has the wire format. They leave over ZMQ from a thread of its own, which repeats
them and tells what there is now. The core's thread only encodes a batch and puts it into a bounded
queue, so nobody who reads events slowly delays a step. Each batch has a number; whoever misses one
sees the gap.
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
"""What indexers call the memory that a model runs from, whatever the device is."""

SNAPSHOT = b"snapshot"
"""Asks the replay socket for all that is cached, instead of for batches from a number on."""
END = (-1).to_bytes(8, "big", signed=True)
"""Number of the last message of an answer."""
SNAPSHOT_EVENTS = 256
"""Per message of a snapshot."""
LINGER_MS = 1000
CLOSE_S = 5.0

_encode = msgspec.msgpack.Encoder().encode
_BOUND = re.compile(r"(?:ipc|inproc)://|tcp://(?:127\.|localhost:|\[::1\]:)|.*(?:\*|::)")

KINDS = {
    GroupKind.FULL: "full_attention",
    GroupKind.WINDOW: "sliding_window",
    GroupKind.CHUNK: "chunked_local_attention",
    GroupKind.STATE: "mamba",  # vLLM's word for any state
}
"""What vLLM calls groups."""

BlockHash = int | bytes


class BlockStored(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Consecutive blocks of one sequence came into a medium.

    Attributes:
        block_hashes: their keys.
        parent_block_hash: key of the block before the first one; None at a sequence's begin.
        token_ids: the tokens of all blocks.
        block_size: tokens per block.
        lora_id: always None, as `lora_name`: there are no adapters.
        medium: `POOL_MEDIUM`, or the name of a store.
        lora_name: see `lora_id`.
        extra_keys: None, or per block what its hash covers besides tokens: the cache salt of a
            sequence's first block.
        group_idx: KV group.
        kv_cache_spec_kind: one of `KINDS`.
        kv_cache_spec_sliding_window: tokens of the window or chunk.
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
    """Blocks left a medium."""

    block_hashes: list[BlockHash]
    medium: str
    group_idx: int


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Nothing is cached any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, frozen=True):
    """One message: what happened since the one before.

    Attributes:
        ts: seconds since 1970.
        events: in the order in which they happened.
        data_parallel_rank: always 0.
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
    """Collects events of the pools' prefix caches, and knows what is in them.

    Args:
        blocks: the pools to listen to.
        int_block_hashes: see `KVEventsConfig`.

    Attributes:
        index: per group, all cached blocks by key.
    """

    def __init__(self, blocks: KVCacheManager, *, int_block_hashes: bool = True) -> None:
        self.index: list[dict[bytes, Cached]] = [{} for _ in blocks.groups]
        self._blocks = blocks
        self._ints = int_block_hashes
        self._events: list[Event] = []
        self._elsewhere = False
        blocks.pool.on_forget.append(self.forgotten)

    # --- what happens ---

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
        """A block left a prefix cache."""
        if self.index[g].pop(key, None) is None:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and (last.medium, last.group_idx) == (POOL_MEDIUM, g):
            last.block_hashes.append(self._hash(key))
        else:
            self._events.append(BlockRemoved([self._hash(key)], POOL_MEDIUM, g))

    @override
    def saved(self, medium: str, g: int, keys: list[bytes]) -> None:
        """A store has kept blocks that are still cached; those that are not are left out.

        Only a store that tells of its evictions takes this back.
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
        """All prefix caches were emptied; the blocks themselves were reported one by one.

        Says no more where a store has blocks: the event has no medium, they would go with it.
        """
        if not self._elsewhere:
            self._events.append(AllBlocksCleared())
        return 0

    # --- what is told ---

    def take(self) -> list[Event]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

    def contents(self) -> Iterator[BlockStored]:
        """All cached blocks, parents first. Any thread may ask.

        It may be ahead of the events taken so far; applying those on top gives the same again.
        """
        for g, index in enumerate(self.index):
            now = index.copy()  # one operation of the interpreter: no thread can interfere
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
    """Blocks in chains; a chain comes after the one that its parent is in."""
    done: set[bytes] = set()
    at: bytes | None
    for at in reversed(list(blocks)):  # the end of a sequence first: it leads to all before it
        run = []
        while at is not None and at in blocks and at not in done:
            run.append(at)
            done.add(at)
            at = blocks[at].parent
        if run:
            yield run[::-1]


class KVEventPublisher(KVEventLog):
    """Sends the events of an engine's prefix caches.

    Args:
        config: where and how.
        blocks: the pools.

    Raises:
        ConfigError: an endpoint is none, or is in use.

    Attributes:
        endpoint: as bound or connected, with its port.
        replay_endpoint: as bound.
        published: batches that were given a number, dropped ones included.
        dropped: batches that found the queue full.
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
        """Send what happened since the last call, if anything did; never waits."""
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
        """Indexers find the sockets here."""
        return {
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "published": self.published,
            "dropped": self.dropped,
            "cached": [len(index) for index in self.index],
        }

    @override
    def close(self) -> None:
        """Publish what is queued, for a few seconds at the most, and end."""
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
                if not self._forward():  # what was published before it was asked for is in it
                    return
                frames = self._replay.recv_multipart()
                if len(frames) != 3 or len(frames[2]) != 8:
                    logger.warning("a KV replay request has %d frames", len(frames))
                    continue
                # Its sender misses replies that it does not make room for.
                client, delimiter, wanted = frames
                later = (batch for batch in self._buffer if batch[0] >= wanted)
                for reply in self._snapshot() if wanted == SNAPSHOT else later:
                    self._replay.send_multipart((client, delimiter, *reply))
                self._replay.send_multipart((client, delimiter, END, b""))
        finally:
            for socket in (self._queue, self._replay, self._pub):
                socket.close()

    def _forward(self) -> bool:
        """Publish all queued batches; False once the last one was."""
        while self._queue.poll(0):
            batch = self._queue.recv_multipart()
            if len(batch) == 1:
                return False
            self._pub.send_multipart((self._topic, *batch))
            self._buffer.append((batch[0], batch[1]))
        return True

    def _snapshot(self) -> Iterator[tuple[bytes, bytes]]:
        """All that is cached, under the number of the last batch that is in it."""
        published = self.published  # read before the contents: they must not be older
        if published:
            number = (published - 1).to_bytes(8, "big")
            yield number, _payload([AllBlocksCleared()])
            contents = self.contents()
            while events := list[Event](islice(contents, SNAPSHOT_EVENTS)):
                yield number, _payload(events)


def _payload(events: list[Event]) -> bytes:
    return _encode(EventBatch(time.time(), events))


def _attach(socket: zmq.Socket[bytes], key: str, endpoint: str, *, bind: bool = False) -> str:
    """Bind or connect; returns the address with its port."""
    socket.setsockopt(zmq.IPV6, "::" in endpoint)
    try:
        if bind or _BOUND.match(endpoint):
            socket.bind(endpoint)
            return socket.getsockopt_string(zmq.LAST_ENDPOINT)
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(KV_EVENTS_FLAG, f"{key} {endpoint!r}: {error}") from error
    return endpoint

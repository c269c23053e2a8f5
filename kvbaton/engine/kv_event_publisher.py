"""Publishes KV events over ZMQ from a thread of its own; repeats them, and tells what there is now.

The core's thread only encodes a batch and puts it into a bounded queue, so nobody who reads events
slowly delays a step. Each batch has a number; whoever misses one sees the gap.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec
import zmq
from typing_extensions import override

from kvbaton.engine.kv_cache_manager import KVCacheManager
from kvbaton.engine.kv_connector import KVConnector
from kvbaton.engine.kv_events import (
    FLAG,
    AllBlocksCleared,
    Event,
    EventBatch,
    KVEventLog,
    KVEventsConfig,
)
from kvbaton.errors import ConfigError

logger = logging.getLogger(__name__)

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


class KVEventPublisher(KVConnector):
    """Sends the events of an engine's prefix caches.

    Args:
        config: where and how.
        blocks: the pools.

    Raises:
        ConfigError: an endpoint is none, or is in use.

    Attributes:
        log: collects the events.
        endpoint: as bound or connected, with its port.
        replay_endpoint: as bound.
        published: batches that were given a number, dropped ones included.
        dropped: batches that found the queue full.
    """

    name = "kv_events"

    def __init__(self, config: KVEventsConfig, blocks: KVCacheManager) -> None:
        self.log = KVEventLog(blocks, int_block_hashes=config.int_block_hashes)
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
        events = self.log.take()
        if not events:
            return
        number, self.published = self.published.to_bytes(8, "big"), self.published + 1
        try:
            self._feed.send_multipart((number, _payload(events)), zmq.NOBLOCK)
        except zmq.Again:
            self.dropped += 1

    @override
    def reset_prefix_cache(self) -> int:
        self.log.cleared()
        return 0

    @override
    def saved(self, medium: str, g: int, keys: list[bytes]) -> None:
        self.log.saved(medium, g, keys)

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
            "cached": [len(index) for index in self.log.index],
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
                self._answer(self._replay.recv_multipart())
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

    def _answer(self, frames: list[bytes]) -> None:
        """Serve a request; its sender misses replies that it does not make room for."""
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("a KV replay request has %d frames", len(frames))
            return
        client, delimiter, wanted = frames
        for reply in self._snapshot() if wanted == SNAPSHOT else self._since(wanted):
            self._replay.send_multipart((client, delimiter, *reply))
        self._replay.send_multipart((client, delimiter, END, b""))

    def _since(self, number: bytes) -> list[tuple[bytes, bytes]]:
        return [batch for batch in self._buffer if batch[0] >= number]

    def _snapshot(self) -> Iterator[tuple[bytes, bytes]]:
        """All that is cached, under the number of the last batch that is in it."""
        published = self.published  # read before the contents: they must not be older
        if published:
            number = (published - 1).to_bytes(8, "big")
            yield number, _payload([AllBlocksCleared()])
            contents = self.log.contents()
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
        raise ConfigError(FLAG, f"{key} {endpoint!r}: {error}") from error
    return endpoint

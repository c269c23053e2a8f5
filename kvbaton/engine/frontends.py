"""The core's side of the sockets to its frontends: ZMQ, MessagePack, one thread.

A node's own HTTP processes connect to a Unix socket in a folder of mode 0700 and may send anything.
Remote frontends (routers) may add, abort and ping. They connect over TCP, encrypted and
authenticated by the cluster key (`connectors/curve.py`); without a key, to a second Unix socket.

Request ids are per frontend. If two frontends use the same id at once, the core renames the later
request. A frontend that is gone, or does not read, loses its requests.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import zmq
from msgspec.structs import replace

from kvbaton.connectors.curve import CurveAuthenticator, bind_tcp, drain
from kvbaton.engine.stats import LATENCIES, LatencyHistogram, RequestHistograms, RequestTimes
from kvbaton.errors import SHUTTING_DOWN, ConfigError, RequestError
from kvbaton.messages import engine as messages
from kvbaton.types import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

HEARTBEAT_MS = 400
HEARTBEAT_TIMEOUT_MS = 1000
"""Milliseconds after which ZMQ takes a silent remote peer for dead. ZMQ's I/O threads send and
answer heartbeats, so a busy Python program is not taken for dead, until its unread messages fill
its queue (`RCVHWM`) and ZMQ reads no more."""
PROBE_S = 0.4
"""Seconds between signs of life to each frontend, by which the core notices lost ones."""
HIGH_WATER_MARK = 128
"""Maximum number of messages that ZMQ queues for a frontend; more wait in the core's backlog."""
MAX_BACKLOG_BYTES = 32 << 20
"""Unread bytes beyond which a frontend is dropped."""
MAX_WATCHER_BACKLOG_BYTES = 4 << 20
"""Unread bytes beyond which a frontend gets no cached blocks until it has read its backlog."""
_RECEIVE_MARK = 10_000
_RETRY_S = 0.01
_FIRST_PART = int(zmq.NOBLOCK | zmq.SNDMORE)
"""The flag as an integer: `send_multipart` makes an enumeration for each message, taking 4 us."""
_LINGER_MS = 2000

_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, kw_only=True)
class EngineEndpoints:
    """Addresses at which a core listens for frontends.

    Attributes:
        local: ``ipc:///...`` for the node's own processes.
        host: Address for remote frontends, if there is a cluster key; None admits none.
        port: Port for remote frontends; 0 takes a free one.
        cluster_key: Key of the cluster; without one, remote frontends get a Unix socket beside
            `local`.
    """

    local: str
    host: str | None = None
    port: int = 0
    cluster_key: str | None = field(default=None, repr=False)


@dataclass(eq=False)
class _Peer:
    """A connected frontend.

    Attributes:
        kind: ``local`` or ``remote``, for metrics.
        names: The core's ids of its live requests, by the frontend's ids.
        backlog: Encoded messages that ZMQ has no room for.
        lost: Whether the frontend is lost: nothing is sent to it but what is in its backlog.
        next_blocks: Number of its next `CachedBlocks`, if it watches.
    """

    socket: zmq.Socket[bytes]
    identity: bytes
    local: bool
    kind: str
    names: dict[str, str] = field(default_factory=dict)
    backlog: deque[bytes] = field(default_factory=deque)
    backlog_bytes: int = 0
    lost: bool = False
    next_blocks: int = 0


@dataclass(eq=False)
class _Owned:
    """A live request: its frontend, its id there, its number of open choices, and its times."""

    peer: _Peer
    name: str
    open_choices: int
    times: RequestTimes


class CachedBlockSource(Protocol):
    """The prefix caches' contents, for frontends that watch them."""

    groups: tuple[messages.CachedGroup, ...]

    def snapshot(self) -> Iterator[tuple[messages.BlockChange, ...]]:
        """All blocks that are cached now, in parts."""


class FrontendServer:
    """The core's `Mailbox`: receives from all frontends, and sends to those concerned.

    Args:
        endpoints: Addresses to listen at.

    Raises:
        ConfigError: ``--host`` or ``--engine-port`` can't be listened on.

    Attributes:
        block_watchers: Frontends that watch the prefix caches.
    """

    def __init__(self, endpoints: EngineEndpoints) -> None:
        self._context = zmq.Context()
        self._gate: CurveAuthenticator | None = None
        self._peers: dict[tuple[bool, bytes], _Peer] = {}
        self._owned: dict[str, _Owned] = {}
        self._commands: dict[int, tuple[_Peer, int]] = {}
        self._numbers = itertools.count(1)
        self._lost: list[_Peer] = []
        self.block_watchers: dict[_Peer, None] = {}
        self._dismissed: list[_Peer] = []
        self._ready: messages.Ready | None = None
        self._probe_at = 0.0
        self._seen = RequestHistograms(*(LatencyHistogram(bounds) for *_, bounds in LATENCIES))
        self._counts = {
            'kvbaton_frontend_requests_total{frontend="local"}': 0,
            'kvbaton_frontend_requests_total{frontend="remote"}': 0,
            'kvbaton_frontend_tokens_total{frontend="local"}': 0,
            'kvbaton_frontend_tokens_total{frontend="remote"}': 0,
            'kvbaton_frontends_lost_total{reason="gone"}': 0,
            'kvbaton_frontends_lost_total{reason="did_not_read"}': 0,
            "kvbaton_frontend_messages_dropped_total": 0,
        }
        self._local = self._context.socket(zmq.ROUTER)
        self._remote: zmq.Socket[bytes] | None = None
        self.address = ""
        try:
            _configure(self._local)
            self._local.bind(endpoints.local)
            if endpoints.host is not None:
                self._bind_remote(endpoints, endpoints.host)
        except BaseException:
            self.close()
            raise
        self._poller = zmq.Poller()
        gate = None if self._gate is None else self._gate.socket
        for socket in (self._local, self._remote, gate):
            if socket is not None:
                self._poller.register(socket, zmq.POLLIN)
        self._wake_fd = -1

    def _bind_remote(self, endpoints: EngineEndpoints, host: str) -> None:
        self._remote = self._context.socket(zmq.ROUTER)
        _configure(self._remote)
        self._remote.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._remote.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        if not endpoints.cluster_key:
            self.address = f"{endpoints.local}-remote"
            self._remote.bind(self.address)
            return
        self._gate = CurveAuthenticator(self._context, endpoints.cluster_key)
        self._gate.secure(self._remote)
        try:
            self.address = bind_tcp(self._remote, host, endpoints.port)
        except zmq.ZMQError as error:
            where = f"{host}:{endpoints.port}"
            raise ConfigError("--engine-port", f"can't listen on {where}: {error}") from error

    # --- from frontends ---

    def receive(self, timeout: float, wake_fd: int) -> Iterator[messages.ToCore]:
        """Yield messages that have arrived; each must be handled before the next is taken.

        Waits up to `timeout` seconds for a message or for `wake_fd`. For each request of a lost
        frontend, yields an `AbortRequest`.
        """
        if wake_fd != self._wake_fd:
            self._poller.register(wake_fd, zmq.POLLIN)
            self._wake_fd = wake_fd
        behind = any(peer.backlog for peer in (*self._peers.values(), *self._dismissed))
        if behind:
            timeout = min(timeout, _RETRY_S)
        timeout = 0.0 if self._lost else max(0.0, min(timeout, self._probe_at - time.monotonic()))
        readable = dict(self._poller.poll(int(timeout * 1000)))
        if self._gate is not None and self._gate.socket in readable:
            self._gate.answer()
        for socket in (self._local, self._remote):
            if socket is not None and socket in readable:
                for frames in drain(socket):
                    yield from self._take(socket, frames)
        if behind or time.monotonic() >= self._probe_at:
            self._probe()
        while self._lost:
            for request_id in tuple(self._lost.pop().names.values()):
                yield messages.AbortRequest(request_id=request_id)

    def _take(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> Iterator[messages.ToCore]:
        """Decode a message; yields what the core has to do, nothing if it is answered here."""
        identity, *data = frames
        local = socket is self._local
        peer = self._peers.get((local, identity))
        if len(data) != 1:
            self._count_drop()
            return
        message = messages.decode_to_core(data[0])
        if isinstance(message, messages.Undecodable):
            self._count_drop()
            logger.warning("dropped a message of a frontend that can't be read: %s", message.error)
            if peer is not None and message.request_id is not None:  # answer the sender
                error = RequestError(f"the request can't be read: {message.error}")
                self._put(peer, messages.Rejected.of(message.request_id, error))
            return
        if isinstance(message, messages.Connect):
            kind = "local" if local else "remote"
            self._connect(peer or _Peer(socket, identity, local, kind), message)
            return
        if peer is None:
            self._count_drop()
            return
        match message:
            case messages.AddRequest():
                yield from self._add(peer, message)
            case messages.AbortRequest():
                known = peer.names.get(message.request_id)
                if known is not None:  # else it has just ended, or belongs to another frontend
                    yield replace(message, request_id=known)
            case messages.Ping():
                self._put(peer, messages.Pong(number=message.number))
            case messages.WatchBlocks():
                peer.next_blocks = 0
                self.block_watchers[peer] = None
            case messages.Command() if local:
                number = next(self._numbers)
                self._commands[number] = peer, message.command_id
                yield replace(message, command_id=number)
            case messages.Shutdown() if local:
                yield message
            case _:
                self._count_drop()

    def _count_drop(self) -> None:
        self._counts["kvbaton_frontend_messages_dropped_total"] += 1

    def _connect(self, peer: _Peer, message: messages.Connect) -> None:
        if self._ready is None:  # the core does not serve yet
            return
        low, high = messages.MIN_ENGINE_VERSION, messages.ENGINE_VERSION
        if message.version < low or message.min_version > high:
            reason = (
                f"this engine speaks versions {low} to {high} of its messages, "
                f"the frontend {message.min_version} to {message.version}"
            )
            self._put(peer, messages.Disconnected(reason=reason))
            return
        self._peers[peer.local, peer.identity] = peer
        self._put(peer, self._ready)

    def _add(self, peer: _Peer, request: messages.AddRequest) -> Iterator[messages.ToCore]:
        name = request.request_id
        if name in peer.names:
            error = RequestError(f"request id {name!r} is in use", param="request_id", status=409)
            self._put(peer, messages.Rejected.of(name, error))
            return
        key = name
        while key in self._owned:
            key = f"{name[:230]}#{next(self._numbers)}"
        peer.names[name] = key
        self._owned[key] = _Owned(peer, name, request.params.n, RequestTimes(self._seen))
        self._counts[f'kvbaton_frontend_requests_total{{frontend="{peer.kind}"}}'] += 1
        yield request if key == name else replace(request, request_id=key)

    # --- to frontends ---

    def send(self, message: messages.FromCore) -> None:
        """Send a message to the frontends concerned; drops outputs of ended requests."""
        match message:
            case messages.Outputs():
                by_peer: dict[_Peer, list[messages.Output]] = {}
                for output in message.outputs:
                    key = output.request_id
                    owner = self._owned.get(key)
                    if owner is None:
                        continue
                    owner.times.output(output)
                    if output.finish_reason is not None:
                        owner.open_choices -= 1
                        if not owner.open_choices:
                            self._end(key)
                    own = output if owner.name == key else replace(output, request_id=owner.name)
                    by_peer.setdefault(owner.peer, []).append(own)
                for of_peer, mine in by_peer.items():
                    tokens = sum(len(output.token_ids) for output in mine)
                    kind = f'kvbaton_frontend_tokens_total{{frontend="{of_peer.kind}"}}'
                    self._counts[kind] += tokens
                    self._put(of_peer, messages.Outputs(outputs=tuple(mine)))
            case messages.Rejected():
                owned = self._end(message.request_id)
                if owned is not None:
                    self._put(owned.peer, replace(message, request_id=owned.name))
            case messages.Reply():
                peer, command_id = self._commands.pop(message.command_id, (None, 0))
                if peer is not None:
                    self._put(peer, replace(message, command_id=command_id))
            case messages.Ready():
                self._ready = message
            case messages.Metrics():
                self._send_to_all(self.completed(message), local_only=True)
            case _:
                self._send_to_all(message)

    def tell_watchers(
        self, changes: tuple[messages.BlockChange, ...], source: CachedBlockSource
    ) -> None:
        """Send changes of the prefix caches since the last call to the frontends that watch."""
        for peer in tuple(self.block_watchers):
            if peer.next_blocks == 0:
                if peer.backlog:
                    continue
                self._put(peer, messages.CachedBlocks.beginning(source.groups))
                parts = source.snapshot()
                peer.next_blocks = 1
            else:
                parts = iter([changes] if changes else [])
            for part in parts:
                if peer.backlog_bytes > MAX_WATCHER_BACKLOG_BYTES:
                    peer.next_blocks = 0  # start again with all blocks, once the backlog is read
                    break
                self._put(peer, messages.CachedBlocks(number=peer.next_blocks, changes=part))
                peer.next_blocks += 1

    def _end(self, key: str) -> _Owned | None:
        owned = self._owned.pop(key, None)
        if owned is not None:
            del owned.peer.names[owned.name]
            owned.times.close()
        return owned

    def completed(self, metrics: messages.Metrics) -> messages.Metrics:
        """The core's metrics with those of this server."""
        refused = 0 if self._gate is None else self._gate.refused
        counters = {name: float(value) for name, value in self._counts.items()}
        counters["kvbaton_frontends_refused_total"] = float(refused)
        timed = zip(LATENCIES, self._seen, strict=True)
        latencies = {f"{name}_seconds": seen.counts() for (name, *_), seen in timed}
        connected = Counter(peer.kind for peer in self._peers.values())
        kinds = ("local", "remote")
        gauges = {f'kvbaton_frontends{{frontend="{k}"}}': float(connected[k]) for k in kinds}
        return messages.Metrics(
            counters=metrics.counters | counters,
            gauges=metrics.gauges | gauges,
            histograms=metrics.histograms | latencies,
        )

    def _send_to_all(self, message: messages.FromCore, *, local_only: bool = False) -> None:
        for peer in tuple(self._peers.values()):
            if peer.local or not local_only:
                self._put(peer, message)

    def _put(self, peer: _Peer, message: messages.FromCore) -> None:
        if peer.lost:
            return
        data = _encoder.encode(message)
        if not peer.backlog and self._sent(peer, data):
            return
        peer.backlog.append(data)
        peer.backlog_bytes += len(data)
        if peer.backlog_bytes > MAX_BACKLOG_BYTES:
            self._lose(peer, "did_not_read")
            reason = "this frontend did not read what it was sent; its requests were cancelled"
            peer.backlog.append(_encoder.encode(messages.Disconnected(reason=reason)))
            self._dismissed.append(peer)

    def _sent(self, peer: _Peer, data: bytes) -> bool:
        """Whether a message is done with: ZMQ has taken it, or its frontend is gone."""
        try:
            peer.socket.send(peer.identity, _FIRST_PART)
            peer.socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._lose(peer, "gone")
        return True

    def _lose(self, peer: _Peer, reason: str) -> None:
        """Drop a frontend; the next `receive` aborts its requests."""
        if self._peers.pop((peer.local, peer.identity), None) is not None:
            self._counts[f'kvbaton_frontends_lost_total{{reason="{reason}"}}'] += 1
            self._lost.append(peer)
        peer.lost = True
        self.block_watchers.pop(peer, None)
        peer.backlog.clear()

    def _probe(self) -> None:
        """Send the backlogs, and check which frontends are still connected."""
        for peer in (*self._peers.values(), *self._dismissed):
            while peer.backlog and self._sent(peer, peer.backlog[0]):
                if peer.backlog:
                    peer.backlog_bytes -= len(peer.backlog.popleft())
        self._dismissed = [peer for peer in self._dismissed if peer.backlog]
        now = time.monotonic()
        if now >= self._probe_at:
            self._probe_at = now + PROBE_S
            for peer in tuple(self._peers.values()):
                if not peer.backlog:
                    self._put(peer, messages.Pong())

    def stop(self) -> None:
        """Reject all live requests, since the node stops."""
        reason = "the node is stopping; retry elsewhere"
        error = RequestError(reason, status=503, code=SHUTTING_DOWN)
        for key in tuple(self._owned):
            self.send(messages.Rejected.of(key, error))

    def close(self) -> None:
        """Send what is queued, for at most two seconds, and close the sockets."""
        for socket in (self._local, self._remote):
            if socket is not None:
                socket.close()
        if self._gate is not None:
            self._gate.close()
        self._context.term()


def _configure(socket: zmq.Socket[bytes]) -> None:
    options = {
        zmq.LINGER: _LINGER_MS,
        zmq.SNDHWM: HIGH_WATER_MARK,
        zmq.RCVHWM: _RECEIVE_MARK,
        zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
        zmq.ROUTER_MANDATORY: 1,
        zmq.IPV6: 1,
    }
    for option, value in options.items():
        socket.setsockopt(option, value)

"""The control channel: small messages between engine cores, over ZMQ.

One ROUTER socket is bound for peers that dial this node; one DEALER socket is opened per address
that this node dials. The channel may lose messages (a full queue, a peer that is gone, a
reconnect), so the protocol repeats them. It never blocks and has no thread of its own; one thread
makes all calls, waits with `poller` and then calls `receive`.

With a cluster key every connection is encrypted, and both ends have proven that they hold the key
(`connectors/curve.py`). Without a key the channel binds to loopback only, and anyone on the machine
may send it junk, which is dropped where messages are decoded.
"""

from __future__ import annotations

import errno
import secrets

import zmq

from kvbaton.connectors.address import check_dialable, host_of, is_loopback
from kvbaton.connectors.curve import CurveAuthenticator, bind_tcp, drain, secure_client
from kvbaton.connectors.protocol.events import Link
from kvbaton.errors import ConfigError
from kvbaton.types import MAX_MESSAGE_BYTES

HIGH_WATER_MARK = 1000
"""Maximum number of queued messages per peer and direction; more are dropped."""
LINGER_MS = 500
"""Time that queued messages get to leave when a socket is closed."""
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 5000
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000
HANDSHAKE_MS = 5000
_DIALLED, _INCOMING = b"d", b"i"


class ControlChannel:
    """Sends and receives whole messages over links.

    Attributes:
        poller: Polls all sockets of the channel; its caller may register further descriptors.
        address: Address that peers dial, ``tcp://host:port``.
    """

    def __init__(self, host: str, port: int = 0, *, cluster_key: str | None) -> None:
        """Bind.

        Args:
            host: Address to listen on, which peers dial as well.
            port: Port to listen on; 0 takes a free one.
            cluster_key: Secret that all nodes of the cluster share; None only on loopback.

        Raises:
            ConfigError: The host is a wildcard or no address of this machine, or is not loopback
                while there is no key; or the port is taken.
        """
        check_dialable(host)
        if not cluster_key and not is_loopback(host):
            raise ConfigError("--cluster-key", f"is needed to listen beyond loopback, on {host}")
        self.poller = zmq.Poller()
        self._cluster_key = cluster_key
        self._context = zmq.Context()
        self._gate = CurveAuthenticator(self._context, cluster_key) if cluster_key else None
        self._dealers: dict[Link, zmq.Socket[bytes]] = {}
        self._addresses: dict[str, Link] = {}
        self._router = self._new_socket(zmq.ROUTER)
        try:
            self.address = bind_tcp(self._router, host, port)
        except zmq.ZMQError as error:
            self.close()
            flag = "--control-port" if port and error.errno == errno.EADDRINUSE else "--host"
            raise ConfigError(flag, f"can't listen on {host}:{port}: {error}") from error
        self.poller.register(self._router, zmq.POLLIN)
        if self._gate is not None:
            self.poller.register(self._gate.socket, zmq.POLLIN)

    def dial(self, address: str) -> Link:
        """Open a link to a peer's address; the same address gives the same link until `hang_up`.

        This does not wait for the connection: messages are queued until it is up.

        Raises:
            ValueError: The address is not ``tcp://host:port``, or can't be dialled.
        """
        known = self._addresses.get(address)
        if known is not None:
            return known
        try:
            host_of(address)
        except ValueError as error:
            raise ValueError(
                f"a control address is tcp://host:port, not {address!r}: {error}"
            ) from error
        dealer = None
        try:
            dealer = self._new_socket(zmq.DEALER)
            dealer.connect(address)
        except zmq.ZMQError as error:  # the interface does not exist, or there are no sockets left
            if dealer is not None:
                dealer.close()
            raise ValueError(f"can't dial {address!r}: {error}") from error
        link = Link(_DIALLED + secrets.token_bytes(16))
        self.poller.register(dealer, zmq.POLLIN)
        self._dealers[link] = dealer
        self._addresses[address] = link
        return link

    def send(self, link: Link, data: bytes) -> bool:
        """Queue a message; False if the link can't take it: its queue is full, or it is gone."""
        try:
            if link in self._dealers:
                self._dealers[link].send(data, zmq.NOBLOCK)
            else:
                self._router.send_multipart([link.id[len(_INCOMING) :], data], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        return True

    def receive(self) -> list[tuple[Link, bytes]]:
        """Messages that have arrived, with their links; at most a batch per link; never blocks."""
        if self._gate is not None:
            self._gate.answer()
        came = [(Link(_INCOMING + sender), rest) for sender, *rest in drain(self._router)]
        for link, dealer in self._dealers.items():
            came += [(link, frames) for frames in drain(dealer)]
        return [(link, frames[0]) for link, frames in came if len(frames) == 1]

    def hang_up(self, address: str) -> None:
        """Close the link to an address, if one is open."""
        link = self._addresses.pop(address, None)
        if link is not None:
            dealer = self._dealers.pop(link)
            self.poller.unregister(dealer)
            dealer.close()

    def close(self) -> None:
        """Close all sockets; queued messages get `LINGER_MS` to leave. Idempotent."""
        for address in tuple(self._addresses):
            self.hang_up(address)
        self._router.close()
        if self._gate is not None:
            self._gate.close()
        self._context.term()

    def _new_socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        options = {
            zmq.LINGER: LINGER_MS,
            zmq.SNDHWM: HIGH_WATER_MARK,
            zmq.RCVHWM: HIGH_WATER_MARK,
            zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
            zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
            zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
            zmq.RECONNECT_IVL: RECONNECT_MS,
            zmq.RECONNECT_IVL_MAX: RECONNECT_MAX_MS,
            zmq.IPV6: 1,
        }
        for option, value in options.items():
            socket.setsockopt(option, value)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._gate is not None and kind == zmq.ROUTER:
            self._gate.secure(socket)
        elif self._cluster_key:
            secure_client(socket, self._cluster_key)
        return socket

"""ZMQ sockets between nodes: binding, receiving, and CURVE with a key pair from the cluster key.

- A client must know the server's public key to pass the handshake. This key is never sent or
  published: it is derived from the cluster key.
- In addition a server answers ZMQ's authentication requests (RFC 27, ZAP) itself. It accepts only
  clients whose own public key is the shared one, which only holders of the secret key can use.

So both ends of a secured connection hold the cluster key.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_MAX_BATCH = 1000
"""Maximum number of messages that one call takes from a socket, so that none starves the others."""


def derive_key_pair(cluster_key: str) -> tuple[bytes, bytes]:
    """Derive the cluster's CURVE key pair (public, secret), Z85 text each."""
    seed = hashlib.blake2b(cluster_key.encode(), digest_size=32, person=b"kvbaton-curve").digest()
    secret = z85.encode(seed)
    return zmq.curve_public(secret), secret


def secure_client(socket: zmq.Socket[bytes], cluster_key: str) -> None:
    """Make a socket, before it connects, talk only to servers of the cluster."""
    public, secret = derive_key_pair(cluster_key)
    socket.curve_publickey, socket.curve_secretkey = public, secret
    socket.curve_serverkey = public


class CurveAuthenticator:
    """Admits holders of the cluster key to the server sockets of one context.

    Attributes:
        socket: Readable when `answer` has something to do; handshakes wait for it.
        refused: Number of handshakes refused because the client lacks the cluster key.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], cluster_key: str) -> None:
        self._public, self._secret = derive_key_pair(cluster_key)
        self.refused = 0
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(_ZAP_ADDRESS)

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket, before it binds, accept only holders of the cluster key."""
        socket.curve_publickey, socket.curve_secretkey = self._public, self._secret
        socket.curve_server = True
        socket.zap_domain = b"kvbaton"

    def answer(self) -> None:
        """Answer pending authentication requests (https://rfc.zeromq.org/spec/27/)."""
        ours = z85.decode(self._public)
        for frames in drain(self.socket):
            # identity, empty, version, request id, domain, address, identity, mechanism, key
            accepted = len(frames) == 9 and frames[7] == b"CURVE" and frames[8] == ours
            self.refused += not accepted
            verdict = [b"200", b"OK"] if accepted else [b"400", b"not a member"]
            self.socket.send_multipart([*frames[:4], *verdict, b"", b""])

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


def bind_tcp(socket: zmq.Socket[bytes], host: str, port: int) -> str:
    """Bind to a host and a port, 0 for a free one. Returns the address. Raises `zmq.ZMQError`."""
    host = "127.0.0.1" if host == "localhost" else host
    shown = f"[{host}]" if ":" in host else host
    socket.bind(f"tcp://{shown}:{port or '*'}")
    bound = urlsplit(socket.getsockopt_string(zmq.LAST_ENDPOINT)).port
    return f"tcp://{shown}:{bound}"


def drain(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    """Queued messages of a socket as lists of frames, at most a batch; never blocks."""
    got: list[list[bytes]] = []
    with suppress(zmq.Again):
        while len(got) < _MAX_BATCH:
            got.append(socket.recv_multipart(zmq.NOBLOCK))
    return got

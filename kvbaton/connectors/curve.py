"""ZMQ sockets between nodes: CURVE with one key pair, derived from the cluster key; ports.

- A client must know the server's public key to get past the handshake, and this public key is never
  sent or published: it follows from the cluster key alone.
- Beyond that, a server answers ZMQ's authentication requests (RFC 27, ZAP) itself and lets only
  clients through whose own public key is the shared one, which takes the secret half to use.

So whoever talks through a secured socket holds the cluster key, on both ends.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_MAX_BATCH = 1000
"""Most messages that one call takes from one socket, so that none starves the others."""


def derive_key_pair(cluster_key: str) -> tuple[bytes, bytes]:
    """Derive the cluster's CURVE key pair (public, secret), Z85 text each."""
    seed = hashlib.blake2b(cluster_key.encode(), digest_size=32, person=b"kvbaton-curve").digest()
    secret = z85.encode(seed)
    return zmq.curve_public(secret), secret


def secure_client(socket: zmq.Socket[bytes], cluster_key: str) -> None:
    """Let a socket that is yet to connect talk to servers of the cluster, and to nobody else."""
    public, secret = derive_key_pair(cluster_key)
    socket.curve_publickey, socket.curve_secretkey = public, secret
    socket.curve_serverkey = public


class CurveAuthenticator:
    """Admits holders of the cluster key to the server sockets of one context.

    Attributes:
        socket: readable when `answer` has something to do; handshakes wait for it.
        refused: handshakes that were refused for want of the cluster key.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], cluster_key: str) -> None:
        self._public, self._secret = derive_key_pair(cluster_key)
        self.refused = 0
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(_ZAP_ADDRESS)

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket that is yet to bind a server for holders of the cluster key alone."""
        socket.curve_publickey, socket.curve_secretkey = self._public, self._secret
        socket.curve_server = True
        socket.zap_domain = b"kvbaton"

    def answer(self) -> None:
        """Answer the authentication requests that wait (https://rfc.zeromq.org/spec/27/)."""
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
    """Bind to a host and a port, a free one for 0; what peers dial. Raises `zmq.ZMQError`."""
    host = "127.0.0.1" if host == "localhost" else host
    shown = f"[{host}]" if ":" in host else host
    socket.bind(f"tcp://{shown}:{port or '*'}")
    bound = urlsplit(socket.getsockopt_string(zmq.LAST_ENDPOINT)).port
    return f"tcp://{shown}:{bound}"


def drain(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    """Whole messages that wait in a socket, as frames; at most a batch."""
    got: list[list[bytes]] = []
    with suppress(zmq.Again):
        while len(got) < _MAX_BATCH:
            got.append(socket.recv_multipart(zmq.NOBLOCK))
    return got

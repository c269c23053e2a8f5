"""Listening sockets, and tokens of the cluster key: what launchers need; imports nothing heavy.

Workers of one endpoint share a socket, so it outlives the servers on it: give those a `dup()`.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import resource
import socket

from kvbaton.errors import ConfigError

MAX_OPEN_FILES = 65_536


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one.

    Raises:
        ConfigError: naming ``--host`` or ``--port``.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            message = f"{host}:{port} is in use; choose another port, or 0 for any free one"
            raise ConfigError("--port", message) from error
        raise ConfigError("--host", f"can't listen on {host}:{port}: {error}") from error
    return sock


def allow_connections() -> None:
    """Let this process and its children have as many connections as it may: each is an open file.

    A shell's soft limit is often 1,024. No more than 65,536 are asked for, since some libraries
    walk over all that could be open.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def url_of(sock: socket.socket, scheme: str = "http") -> str:
    """Base URL of a server on this socket."""
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def registration_token(cluster_key: str) -> str:
    """The bearer token with which a node registers at its router: a keyed BLAKE2b, in hex."""
    return _token(cluster_key, b"registration")


def operator_token(cluster_key: str) -> str:
    """The bearer token with which a router asks a node for what only operators may ask."""
    return _token(cluster_key, b"operator")


def _token(cluster_key: str, purpose: bytes) -> str:
    # BLAKE2b keys are at most 64 bytes; a passphrase may be longer.
    key = hashlib.blake2b(cluster_key.encode(), digest_size=32).digest()
    return hashlib.blake2b(purpose, key=key, person=b"kvbaton", digest_size=32).hexdigest()


def bearer(token: str | None) -> dict[str, str]:
    """Headers that present a key or a token, if there is one."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def carries_token(authorization: str | None, token: str) -> bool:
    """Whether an ``Authorization`` header carries this token; takes the same time for any other."""
    given = (authorization or "").encode(errors="replace")
    return hmac.compare_digest(given, f"Bearer {token}".encode())

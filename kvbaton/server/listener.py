"""Listening sockets of endpoints; made before anything heavy is imported.

Workers of one endpoint share one, so it outlives the servers on it: give those a `dup()`.
"""

from __future__ import annotations

import errno
import socket

from kvbaton.errors import ConfigError


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


def url_of(sock: socket.socket) -> str:
    """Base URL of a server on this socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

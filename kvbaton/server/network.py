"""Listening sockets, TLS, and tokens made from the cluster key; imports nothing heavy.

Workers of an endpoint share a listening socket, which outlives the servers on it: give each server
a `dup()`.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import resource
import socket
import ssl
from dataclasses import dataclass
from functools import cache
from typing import ClassVar
from urllib.parse import urlsplit

from kvbaton.config import flag
from kvbaton.connectors.address import is_loopback
from kvbaton.errors import ConfigError

MAX_OPEN_FILES = 65_536


def bind(host: str, port: int) -> socket.socket:
    """Open a listening TCP socket; port 0 takes a free one.

    Raises:
        ConfigError: The address can't be used; it names ``--host`` or ``--port``.
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
    """Raise the limit of open files, hence of connections, for this process and its children.

    A shell's soft limit is often 1,024. The limit is raised to at most 65,536, because some
    libraries loop over all possible file descriptors.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def url_of(sock: socket.socket, scheme: str = "http") -> str:
    """Base URL of a server on this socket."""
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def scheme_hint(url: str, reason: str) -> str:
    """How to end a message of a URL that can't be asked, if its scheme may be why."""
    if url.startswith("http:") and ("disconnected" in reason or "reset by peer" in reason):
        return "; it may want https://"  # TLS has no other answer
    return "; it may want http://" if "WRONG_VERSION_NUMBER" in reason else ""


def registration_token(cluster_key: str | None) -> str:
    """The bearer token with which a node registers at its router; empty without a key."""
    return _token(cluster_key, b"registration")


def operator_token(cluster_key: str | None) -> str:
    """The bearer token of a router's operator requests to nodes; empty without a key."""
    return _token(cluster_key, b"operator")


def _token(cluster_key: str | None, purpose: bytes) -> str:
    """A keyed BLAKE2b, in hex."""
    if not cluster_key:
        return ""
    # BLAKE2b keys are at most 64 bytes; a passphrase may be longer.
    key = hashlib.blake2b(cluster_key.encode(), digest_size=32).digest()
    return hashlib.blake2b(purpose, key=key, person=b"kvbaton", digest_size=32).hexdigest()


def bearer(token: str | None) -> dict[str, str]:
    """The ``Authorization`` header with a key or token; empty without one."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def first_key(keys: str | None) -> str | None:
    """The first of some API keys: the environment variable of a server may have several."""
    return next(iter((keys or "").split()), None)


def carries_token(authorization: str | None, token: str) -> bool:
    """Whether an ``Authorization`` header carries this token, compared in constant time."""
    given = (authorization or "").encode(errors="replace")
    return hmac.compare_digest(given, f"Bearer {token}".encode())


@dataclass(frozen=True, kw_only=True)
class TrustConfig:
    """Which certificates of servers are trusted.

    Attributes:
        ssl_ca_certs: File of certificate authorities, beside those that the system trusts.

    Raises:
        ConfigError: The file can't be read.
    """

    GROUP: ClassVar[str | None] = "TLS"

    ssl_ca_certs: str | None = flag(
        None, "certificate authorities to trust, beside the system's", metavar="FILE"
    )

    def __post_init__(self) -> None:
        if self.ssl_ca_certs is not None:
            _client(self.ssl_ca_certs, verified=True)

    def client(self, url: str) -> ssl.SSLContext:
        """TLS context for requests to a URL.

        Certificates are not checked for servers on this machine, because most are made for another
        name: kvbaton trusts the processes that listen here, with TLS or without.
        """
        return _client(self.ssl_ca_certs, verified=not is_loopback(urlsplit(url).hostname))


@dataclass(frozen=True, kw_only=True)
class TlsConfig(TrustConfig):
    """Trusted certificates, and the endpoint's own; the files are PEM.

    Attributes:
        ssl_certfile: Certificate of the endpoint, with intermediate ones; None serves plain HTTP.
        ssl_keyfile: Private key of the certificate, without a password; None looks for it in
            `ssl_certfile`.

    Raises:
        ConfigError: A file can't be read, or the files do not fit together.
    """

    ssl_certfile: str | None = flag(None, "serve https with this certificate", metavar="FILE")
    ssl_keyfile: str | None = flag(
        None, "private key of --ssl-certfile, if it is not in that file", metavar="FILE"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("--ssl-keyfile", "needs --ssl-certfile")
        self.server()

    def server(self) -> ssl.SSLContext | None:
        """TLS context of the endpoint; None serves plain HTTP."""
        if self.ssl_certfile is None:
            return None
        return _server(self.ssl_certfile, self.ssl_keyfile).context

    def renew(self) -> bool:
        """Read the endpoint's files again if they have changed; return whether they had.

        Connections that begin later are shown the new certificate.

        Raises:
            ConfigError: The files can't be used; the certificate from before is still shown.
        """
        assert self.ssl_certfile is not None, "no certificate"
        shown = _server(self.ssl_certfile, self.ssl_keyfile)
        if shown.is_current():
            return False
        # A failure would leave it without a key, so another context comes first.
        read = _Certificate(self.ssl_certfile, self.ssl_keyfile)
        shown.load()
        shown.stamp = read.stamp
        return True

    @property
    def scheme(self) -> str:
        """Scheme of the endpoint's URL."""
        return "http" if self.ssl_certfile is None else "https"


# Settings are pickled for workers, and contexts can't be: so contexts are cached here.


class _Certificate:
    """A context that shows a certificate, and what told its files from later ones when read."""

    def __init__(self, certfile: str, keyfile: str | None) -> None:
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._files = certfile, keyfile
        self.stamp = self.load()

    def is_current(self) -> bool:
        """Whether the files are those that were read."""
        try:
            return self._stamp() == self.stamp
        except OSError:
            return False  # reading them says why

    def _stamp(self) -> list[tuple[int, int]]:
        found = [os.stat(file) for file in self._files if file is not None]
        return [(status.st_ino, status.st_mtime_ns) for status in found]

    def load(self) -> list[tuple[int, int]]:
        """Read the files, and return their `stamp`.

        Raises:
            ConfigError: They can't be used.
        """
        certfile, keyfile = self._files
        try:
            stamp = self._stamp()
            # Without a password it would ask the terminal.
            self.context.load_cert_chain(certfile, keyfile, password="")
        except (OSError, ValueError) as error:
            files = certfile if keyfile is None else f"{certfile} with {keyfile}"
            alone = keyfile is None and isinstance(error, ssl.SSLError)
            hint = "; if its private key is in another file: --ssl-keyfile" if alone else ""
            raise ConfigError("--ssl-certfile", f"{files} can't be used: {error}{hint}") from error
        return stamp


_server = cache(_Certificate)


@cache
def _client(ca_certs: str | None, *, verified: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verified:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    elif ca_certs is not None:
        try:
            context.load_verify_locations(ca_certs)
        except OSError as error:
            raise ConfigError("--ssl-ca-certs", f"{ca_certs} can't be used: {error}") from error
    return context

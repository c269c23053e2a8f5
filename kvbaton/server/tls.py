"""TLS of HTTP: what an endpoint shows, and whom one trusts that is asked; flags as uvicorn's."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import cache
from typing import ClassVar
from urllib.parse import urlsplit

from kvbaton.config import flag
from kvbaton.connectors.address import is_loopback
from kvbaton.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TrustConfig:
    """Whose certificates are believed.

    Attributes:
        ssl_ca_certs: file of certificate authorities, beside those that the system trusts.

    Raises:
        ConfigError: the file can't be read.
    """

    GROUP: ClassVar[str | None] = "TLS"

    ssl_ca_certs: str | None = flag(
        None, "authorities that are trusted at https URLs, beside the system's", metavar="FILE"
    )

    def __post_init__(self) -> None:
        if self.ssl_ca_certs is not None:
            _client(self.ssl_ca_certs, verified=True)

    def client(self, url: str) -> ssl.SSLContext:
        """With which a URL is asked.

        On this machine certificates are not checked, which are mostly made for another name: there
        kvbaton trusts who listens, with TLS or without.
        """
        return _client(self.ssl_ca_certs, verified=not is_loopback(urlsplit(url).hostname))


@dataclass(frozen=True, kw_only=True)
class TlsConfig(TrustConfig):
    """And what an endpoint shows; both files are PEM, and read once.

    Attributes:
        ssl_certfile: certificate, with those between it and the authority; None serves plain HTTP.
        ssl_keyfile: its private key, without a password; None finds it in the other file.

    Raises:
        ConfigError: a file can't be read, or they do not fit together.
    """

    ssl_certfile: str | None = flag(None, "serve https, with this certificate", metavar="FILE")
    ssl_keyfile: str | None = flag(
        None, "its private key, if it is not in the same file", metavar="FILE"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("--ssl-keyfile", "needs --ssl-certfile")
        self.server()

    def server(self) -> ssl.SSLContext | None:
        """With which an endpoint answers; None answers plain HTTP."""
        return None if self.ssl_certfile is None else _server(self.ssl_certfile, self.ssl_keyfile)

    @property
    def scheme(self) -> str:
        """Of the endpoint's URL."""
        return "http" if self.ssl_certfile is None else "https"


# Contexts can't be pickled, and settings go to workers: so they are kept here.


@cache
def _server(certfile: str, keyfile: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certfile, keyfile, password="")  # or it would ask the terminal
    except (OSError, ValueError) as error:
        files = certfile if keyfile is None else f"{certfile} with {keyfile}"
        raise ConfigError("--ssl-certfile", f"{files} can't be used: {error}") from error
    return context


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

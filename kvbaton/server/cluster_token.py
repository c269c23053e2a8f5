"""What the cluster key is good for over HTTP: tokens derived from it, never the key itself."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress


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


def carries_token(authorization: str | None, token: str) -> bool:
    """Whether an ``Authorization`` header carries this token; takes the same time for any other."""
    given = (authorization or "").encode(errors="replace")
    return hmac.compare_digest(given, f"Bearer {token}".encode())


def is_loopback(host: str | None) -> bool:
    """Whether a host name or address means this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False

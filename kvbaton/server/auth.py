"""API keys."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence

from aiohttp import BasicAuth, web

from kvbaton.connectors.address import is_loopback
from kvbaton.errors import RequestError
from kvbaton.server.frontend import FRONTEND
from kvbaton.server.network import carries_token

PROTECTED = ("/v1/", "/inference/", "/tokenize", "/detokenize")
PROXIED = ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via")
"""Headers by which a proxy says that it asks for somebody else."""
_PORT = re.compile(r":\d*$")

PEER = web.RequestKey("peer", str)
"""Address of whoever asked, where that is not the request's own remote end."""


def has_key(request: web.Request, api_keys: Sequence[str]) -> bool:
    """Whether the request carries one of the keys."""
    return _is_key(_sent_key(request), api_keys)


def has_password(request: web.Request, api_keys: Sequence[str]) -> bool:
    """Whether the request carries one of the keys as the password of any user (RFC 7617)."""
    try:
        sent = BasicAuth.decode(request.headers.get("Authorization", ""), encoding="utf-8")
    except ValueError:
        return False
    return _is_key(sent.password, api_keys)


def _sent_key(request: web.Request) -> str:
    """A bearer token, or what clients of Anthropic's API send instead; empty without either."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("X-Api-Key", "")


def _is_key(text: str, api_keys: Sequence[str]) -> bool:
    sent = text.encode(errors="surrogateescape")
    # Every key is compared, so that the time tells nothing about which one is close.
    return any([hmac.compare_digest(sent, key.encode()) for key in api_keys])


def tenant(request: web.Request) -> str:
    """A name for the sender's key that does not tell it; empty where no key is asked for."""
    if not request.app[FRONTEND].config.api_keys:
        return ""
    sent = _sent_key(request).encode(errors="surrogateescape")
    return hashlib.sha256(sent).hexdigest()[:16]


def from_loopback(request: web.Request) -> bool:
    """Whether the peer is this machine, and asks for itself.

    Any site can have browsers ask here, and read the answer if its name leads here (DNS rebinding).
    They say by `Host` what name that is, and what site it is wherever they change anything. A proxy
    says that it is one; who is behind it may be anybody.
    """
    if request.method not in ("GET", "HEAD"):
        if "Origin" in request.headers:
            return False
    else:
        host = request.headers.get("Host", "localhost").lower()
        if not is_loopback(_PORT.sub("", host).strip("[]")):
            return False
    if any(header in request.headers for header in PROXIED):
        return False
    return is_loopback(request.get(PEER, request.remote))


def operator_keys(request: web.Request) -> Sequence[str]:
    """What opens the operators' part, where tenants have keys of their own."""
    config = request.app[FRONTEND].config
    return config.operator_keys or config.api_keys


def require_operator(request: web.Request) -> None:
    """Let in loopback peers, holders of an operator's key, and the router of this node's cluster.

    Raises:
        RequestError: 403.
    """
    config = request.app[FRONTEND].config
    token, sent = config.operator_token, request.headers.get("Authorization")
    if from_loopback(request) or (token and carries_token(sent, token)):
        return
    if not has_key(request, operator_keys(request)):
        raise RequestError(
            "only from loopback (as 127.0.0.1, [::1] or localhost) or with an operator's API key",
            status=403,
        )


def check_key(request: web.Request) -> None:
    """Refuse protected paths without a key, where keys are set.

    Raises:
        RequestError: 401.
    """
    keys = request.app[FRONTEND].config.api_keys
    if keys and request.path.startswith(PROTECTED) and not has_key(request, keys):
        raise RequestError(
            "a valid API key is required: Authorization: Bearer KEY, or X-Api-Key: KEY",
            status=401,
            code="invalid_api_key",
        )

"""API keys, and which requests come from operators."""

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
"""Headers by which a proxy says that it forwards another client's request."""
_PORT = re.compile(r":\d*$")

PEER = web.RequestKey("peer", str)
"""Address of the client, if it is not the remote end of this request's connection."""


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
    """The bearer token, or the header ``X-Api-Key`` of Anthropic's API; empty without either."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("X-Api-Key", "")


def _is_key(text: str, api_keys: Sequence[str]) -> bool:
    sent = text.encode(errors="surrogateescape")
    # Every key is compared, so that the time tells nothing about which one is close.
    return any([hmac.compare_digest(sent, key.encode()) for key in api_keys])


def tenant(request: web.Request) -> str:
    """A name for the sender's key that does not reveal it; empty if no keys are set."""
    if not request.app[FRONTEND].config.api_keys:
        return ""
    sent = _sent_key(request).encode(errors="surrogateescape")
    return hashlib.sha256(sent).hexdigest()[:16]


def from_loopback(request: web.Request) -> bool:
    """Whether the client is on this machine and asks for itself.

    Any web site can make a browser send requests here, and read the answers if the site's name
    resolves to this machine (DNS rebinding). The header `Host` shows that name, and `Origin` shows
    the site in requests that change anything. A proxy adds `PROXIED` headers; its client may be
    anybody.
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
    """Keys that give operators' rights."""
    config = request.app[FRONTEND].config
    return config.operator_keys or config.api_keys


def require_operator(request: web.Request) -> None:
    """Allow loopback clients, holders of an operator's key, and the router of this node's cluster.

    Raises:
        RequestError: 403, for any other request.
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
    """Check the API key of a request to a protected path, if keys are set.

    Raises:
        RequestError: 401, without a valid key.
    """
    keys = request.app[FRONTEND].config.api_keys
    if keys and request.path.startswith(PROTECTED) and not has_key(request, keys):
        raise RequestError(
            "a valid API key is required: Authorization: Bearer KEY, or X-Api-Key: KEY",
            status=401,
            code="invalid_api_key",
        )

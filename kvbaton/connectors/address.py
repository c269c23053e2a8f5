"""Hosts, and addresses of control channels ``tcp://host:port``, as clients and peers name them."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from kvbaton.errors import ConfigError

MAX_HOST = 240
"""Characters of a host; an address with it is still a `Name`."""

_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_SCOPE = re.compile(r"[A-Za-z0-9_.-]+")


def address_of(host: str, port: int) -> str:
    """The control address of a host name or IP address; IPv6 gets its brackets.

    Raises:
        ValueError: no such host or port can be.
    """
    if not 0 < port < 1 << 16:
        raise ValueError(f"port {port} is not in [1, 65535]")
    if len(host) > MAX_HOST:
        raise ValueError(f"a host has at most {MAX_HOST} characters")
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        if not _HOST_NAME.fullmatch(host):
            raise ValueError("a host is a host name or an IP address") from None
        return f"tcp://{host}:{port}"
    if isinstance(address, ipaddress.IPv4Address):
        return f"tcp://{address}:{port}"
    if address.scope_id is not None and not _SCOPE.fullmatch(address.scope_id):
        raise ValueError("the scope of an IPv6 address is the name of an interface")
    return f"tcp://[{address}]:{port}"


def host_of(address: str) -> str:
    """The host of a control address that is spelled as `address_of` does it, without brackets.

    Raises:
        ValueError: it is none.
    """
    parts = urlsplit(address.lower())
    host = parts.hostname or ""
    if address_of(host, parts.port or 0) != address.lower():
        raise ValueError(f"{address!r} is not of the form tcp://host:port")
    return host


def is_loopback(host: str | None) -> bool:
    """Whether only processes of this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def is_wildcard(host: str) -> bool:
    """Whether `host` stands for every address of the machine, so that no peer can dial it."""
    try:
        return host in ("", "*") or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def check_dialable(host: str) -> None:
    """Raise `ConfigError` for a wildcard as the host of a node or of what it listens with."""
    if is_wildcard(host):
        raise ConfigError("--host", f"must be an address that others can dial, not {host!r}")

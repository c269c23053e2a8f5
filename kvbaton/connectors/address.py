"""Host names, and addresses ``tcp://host:port`` of control channels."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from kvbaton.errors import ConfigError

MAX_HOST = 240
"""Maximum length of a host in characters, so that an address with it still fits a `Name`."""

_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_SCOPE = re.compile(r"[A-Za-z0-9_.-]+")


def address_of(host: str, port: int) -> str:
    """The control address of a host name or IP address; IPv6 addresses get brackets.

    Raises:
        ValueError: The host or the port is invalid.
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
    """The host, without brackets, of a control address spelled as `address_of` spells it.

    Raises:
        ValueError: The address is not spelled so.
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
    """Whether `host` means all addresses of the machine, so that no peer can dial it."""
    try:
        return host in ("", "*") or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def check_dialable(host: str) -> None:
    """Raise `ConfigError` if the host of a node or of one of its listeners is a wildcard."""
    if is_wildcard(host):
        raise ConfigError("--host", f"must be an address that others can dial, not {host!r}")

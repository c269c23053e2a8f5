"""What a plug-in must look like, checked once when it is built: members, signatures, capabilities.

So a mistake that Python would tell of in the middle of a request is told at the start.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, get_args, get_origin, get_type_hints

from kvbaton.connectors.base import Device
from kvbaton.connectors.protocol.notice import MIN_NOTICE_BYTES
from kvbaton.errors import ConfigError

Further = Sequence[tuple[type, str | None]]
"""Protocols that a plug-in may implement; each with the capability that requires it, if any."""

AWAITED = (
    "which nobody awaits: a store's calls return futures of `concurrent.futures`, and a "
    "transport's do not wait"
)


def check_members(
    flag: str,
    who: str,
    plugin: Any,
    protocol: type,
    able: type,
    further: Further,
    awaited: str = AWAITED,
) -> None:
    """Check that a plug-in is an object with all members of a protocol.

    Methods must take the arguments of the protocol's, and not be ``async def``.

    Args:
        flag: The flag whose spec names the plug-in.
        who: The plug-in, for errors.
        plugin: What its constructor returned.
        protocol: The protocol; one of its members is ``capabilities``.
        able: Type of the capabilities.
        further: Protocols of which it may have all members or none. If a capability requires one,
            its members count only where this is declared, and must be there then.
        awaited: What an error says of a coroutine.

    Raises:
        ConfigError: It names the first thing that is wrong.
    """
    if inspect.isclass(plugin):
        raise ConfigError(flag, f"{who} is the class {plugin.__name__}, not an object of it")
    if missing := _missing(plugin, protocol):
        raise ConfigError(flag, f"{who} is not a {protocol.__name__}: it lacks {missing}")
    _check_methods(flag, who, plugin, protocol, awaited)
    _check_capabilities(flag, who, plugin.capabilities, able)
    for optional, capability in further:
        missing, every = _missing(plugin, optional), ", ".join(_names(optional))
        if capability and not getattr(plugin.capabilities, capability):
            continue
        if missing and capability:
            raise ConfigError(flag, f"{who} declares {capability}, but lacks {missing}")
        if missing and missing != every:
            raise ConfigError(flag, f"{who} has some of {every}, but lacks {missing}")
        if not missing:
            _check_methods(flag, who, plugin, optional, awaited)


def _names(protocol: type) -> list[str]:
    return [name for name in dir(protocol) if name[0] != "_"]


def _missing(plugin: object, protocol: type) -> str:
    return ", ".join(name for name in _names(protocol) if getattr(plugin, name, None) is None)


def _check_methods(flag: str, who: str, plugin: object, protocol: type, awaited: str) -> None:
    for name in _names(protocol):
        theirs, ours = getattr(plugin, name), getattr(protocol, name)
        if inspect.iscoroutinefunction(theirs):
            raise ConfigError(flag, f"{who} has a coroutine, {name}, {awaited}")
        if not inspect.isfunction(ours):
            continue  # a property
        _, *given = inspect.signature(ours).parameters.values()
        words = [p.name for p in given if p.kind is not p.KEYWORD_ONLY]
        options = {p.name: p.default for p in given if p.kind is p.KEYWORD_ONLY}
        try:
            # In part, since a back end that declares hints is given more.
            inspect.signature(theirs).bind_partial(*words, **options)
        except ValueError:  # written in C, without a signature
            continue
        except TypeError as error:
            called = ", ".join([*words, *(f"{name}={value}" for name, value in options.items())])
            told = f"{who} can't be called as {name}({called}): {error}"
            raise ConfigError(flag, told) from error


def _check_capabilities(flag: str, who: str, declared: object, able: type) -> None:
    """Refuse a declared value of a wrong type or out of bounds, and what contradicts another."""
    if not isinstance(declared, able):
        raise ConfigError(flag, f"{who} declares no valid capabilities: {declared!r}")
    hints = get_type_hints(able)
    fields = {name: getattr(declared, name) for name in hints}
    for name, value in fields.items():
        wanted = get_origin(hints[name]) or hints[name]
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            told = f"{who} declares {name}={value!r}, which is no {wanted.__name__}"
            raise ConfigError(flag, told)
    for name, least in {
        "max_notice_bytes": MIN_NOTICE_BYTES,
        "max_ranges": 1,
        "max_keys": 1,
    }.items():
        if fields.get(name, least) < least:
            told = f"{who} declares {name}={fields[name]}; it must be at least {least}"
            raise ConfigError(flag, told)
    sets: dict[str, Any] = {"devices": get_args(Device), "host_staged": fields["devices"]}
    for name, known in sets.items():
        if unknown := sorted(map(str, fields.get(name, frozenset()) - set(known))):
            told = f"{who} declares {name} {', '.join(unknown)}; there is {', '.join(known)}"
            raise ConfigError(flag, told)
    for name in ("expires", "namespaces"):
        if fields.get(name) and not fields["hints"]:
            told = f"{who} declares {name}, but not hints, in which they are given"
            raise ConfigError(flag, told)

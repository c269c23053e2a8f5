"""Find transports by name: ours, entry points of group ``kvbaton.transports``, or a dotted path.

A spec is ``NAME``, ``NAME:JSON`` or ``package.module:Class``, the last also followed by ``:JSON``.
The JSON object holds keyword arguments of the constructor, which every transport writes as
``Class(name: str, *, host: str = "127.0.0.1", **options)``.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvbaton.connectors.base import Transport
from kvbaton.errors import ConfigError

GROUP = "kvbaton.transports"
BUILT_IN = {
    "faulty": "kvbaton.connectors.transports.faulty:FaultyTransport",
    "memory": "kvbaton.connectors.transports.memory:MemoryTransport",
    "nixl": "kvbaton.connectors.transports.nixl:NixlTransport",
    "tcp": "kvbaton.connectors.transports.tcp:TcpTransport",
}
"""Ours, which must be found where the package runs from its sources, too."""
_FLAG = "--transport"
_PATH = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def list_transports() -> dict[str, str]:
    """Names of the installed transports and where each lives, ``package.module:Class``."""
    return {point.name: point.value for point in sorted(_entry_points(), key=lambda p: p.name)}


def load_transport(spec: str, **context: Any) -> Transport:
    """Build the transport that a spec names.

    Args:
        spec: see the module's docstring.
        context: keyword arguments that the caller adds (`name`, `host`); options of the spec win.

    Raises:
        ConfigError: unknown name, bad JSON, a missing dependency, wrong arguments, no transport.
    """
    target, options = _split(spec)
    factory = _load(target)
    arguments = context | options
    try:
        inspect.signature(factory).bind(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(_FLAG, f"{target} does not take these options: {error}") from error
    transport = factory(**arguments)
    if not isinstance(transport, Transport):
        missing = [n for n in dir(Transport) if n[0] != "_" and not hasattr(transport, n)]
        raise ConfigError(_FLAG, f"{target} is not a Transport: it lacks {', '.join(missing)}")
    return transport


def _entry_points() -> list[EntryPoint]:
    found = list(entry_points(group=GROUP))
    known = {point.name for point in found}
    ours = (EntryPoint(name, path, GROUP) for name, path in BUILT_IN.items() if name not in known)
    return [*found, *ours]


def _split(spec: str) -> tuple[str, dict[str, Any]]:
    path = _PATH.match(spec)
    target = path.group() if path else spec.partition(":")[0]
    rest = spec[len(target) :]
    if not rest:
        return target, {}
    try:
        options = json.loads(rest[1:])
    except json.JSONDecodeError as error:
        raise ConfigError(_FLAG, f"{rest[1:]!r} after {target} is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise ConfigError(_FLAG, f"options of {target} must be a JSON object, not {options!r}")
    return target, options


def _load(target: str) -> Any:
    named = {point.name: point for point in _entry_points()}
    if ":" not in target and target not in named:
        known = ", ".join(sorted(named))
        raise ConfigError(_FLAG, f"unknown transport {target!r}; known are {known}")
    try:
        factory = _import(target) if ":" in target else named[target].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(_FLAG, f"can't load {target}: {error}") from error
    if not callable(factory):
        raise ConfigError(_FLAG, f"{target} is not a class")
    return factory


def _import(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)

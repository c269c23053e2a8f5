"""Find connectors by name: ours, entry points, or a dotted path.

A spec is ``NAME``, ``NAME:JSON`` or ``package.module:Class``, the last also followed by ``:JSON``.
The JSON object holds keyword arguments of the constructor. A transport is written as
``Class(name: str, *, host: str = "127.0.0.1", **options)``, a store as
``Class(name: str, **options)``. Entry points are of group ``kvbaton.transports`` or
``kvbaton.stores``. Inside the JSON of a store that wraps others, a spec may also be written as
``{NAME: OPTIONS}``. Secrets are filled in (`secret_options.py`): on a command line all see them.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, get_type_hints

import msgspec

from kvbaton.connectors.base import Transport
from kvbaton.connectors.contract import Contract
from kvbaton.connectors.secret_options import as_written, filled_in
from kvbaton.connectors.store import Store
from kvbaton.errors import ConfigError, KvbatonError

Spec = str | Mapping[str, Mapping[str, Any]]
"""Names a connector and its options; see the module's docstring."""

_PATH = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class Kind:
    """A kind of connector.

    Attributes:
        noun: what errors call it.
        protocol: what each must have.
        built_in: ours by name, which must be found where the package runs from its sources, too.
        contract: which versions of its contract are loaded.
    """

    noun: str
    protocol: type
    built_in: dict[str, str]
    contract: Contract

    @property
    def flag(self) -> str:
        """The flag that takes its specs."""
        return f"--{self.noun}"

    @property
    def group(self) -> str:
        """The group of its entry points."""
        return f"kvbaton.{self.noun}s"


TRANSPORTS = Kind(
    "transport",
    Transport,
    {
        "faulty": "kvbaton.connectors.transports.faulty:FaultyTransport",
        "memory": "kvbaton.connectors.transports.memory:MemoryTransport",
        "nccl": "kvbaton.connectors.transports.nccl:NcclTransport",
        "nixl": "kvbaton.connectors.transports.nixl:NixlTransport",
        "tcp": "kvbaton.connectors.transports.tcp:TcpTransport",
    },
    Contract(major=1, minor=0, oldest=1),
)
STORES = Kind(
    "store",
    Store,
    {
        "decode_bench": "kvbaton.connectors.stores.decode_bench:DecodeBenchStore",
        "faulty": "kvbaton.connectors.stores.faulty:FaultyStore",
        "tiered": "kvbaton.connectors.stores.tiered:TieredStore",
        "filesystem": "kvbaton.connectors.stores.filesystem:FilesystemStore",
        "lmcache": "kvbaton.connectors.stores.lmcache:LMCacheStore",
        "lmcache_server": "kvbaton.connectors.stores.lmcache_server:LMCacheServerStore",
        "memory": "kvbaton.connectors.stores.memory:MemoryStore",
        "mooncake": "kvbaton.connectors.stores.mooncake:MooncakeStore",
        "nixl": "kvbaton.connectors.stores.nixl:NixlStore",
        "redis": "kvbaton.connectors.stores.redis:RedisStore",
        "s3": "kvbaton.connectors.stores.s3:S3Store",
        "vllm": "kvbaton.connectors.vllm_adapter.store:VllmStore",
    },
    Contract(major=1, minor=2, oldest=1),
)


def list_connectors(kind: Kind) -> dict[str, str]:
    """Names of the installed connectors and where each lives, ``package.module:Class``."""
    points = sorted(_entry_points(kind), key=lambda point: point.name)
    return {point.name: point.value for point in points}


def load_transport(spec: str, *, name: str, host: str = "127.0.0.1", **context: Any) -> Transport:
    """Build the transport that a spec names, as nodes, the kit and the benchmarks all do.

    Args:
        spec: see the module's docstring.
        name: unique per process and generation.
        host: the node's ``--host``: where peers reach it.
        context: further keyword arguments; options of the spec win over all of them.

    Raises:
        ConfigError: unknown name, bad JSON, a missing dependency, wrong arguments, no transport,
            one whose constructor raises.
    """
    transport: Transport = _build(TRANSPORTS, spec, {"name": name, "host": host} | context)
    return transport


def load_store(spec: Spec, **context: Any) -> Store:
    """Build the store that a spec names, under that name unless `name` is given.

    Raises:
        ConfigError: as `load_transport`.
    """
    if not isinstance(spec, str):
        if not isinstance(spec, Mapping) or len(spec) != 1:
            raise ConfigError(STORES.flag, f"{spec!r} is neither a spec nor {{NAME: OPTIONS}}")
        [(name, options)] = spec.items()
        spec = f"{name}:{json.dumps(options)}"
    target, _ = split_spec(spec, STORES)
    store: Store = _build(STORES, spec, {"name": target.rpartition(":")[2]} | context)
    return store


def split_spec(spec: str, kind: Kind) -> tuple[str, dict[str, Any]]:
    """Name or dotted path of a spec, and its options.

    Raises:
        ConfigError: it has no name, or the options are no JSON object.
    """
    if spec.startswith("{"):  # as of a mapping in YAML
        problem = f"must be NAME or NAME:{{...}}, options in JSON behind the name, not {spec}"
        raise ConfigError(kind.flag, problem)
    path = _PATH.match(spec)
    target = path.group() if path else spec.partition(":")[0]
    rest = spec[len(target) :]
    if not rest:
        return target, {}
    try:
        options = json.loads(rest[1:])
    except json.JSONDecodeError as error:
        raise ConfigError(kind.flag, f"{rest[1:]!r} after {target} is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise ConfigError(kind.flag, f"options of {target} must be a JSON object, not {options!r}")
    return target, options


def _build(kind: Kind, spec: str, context: dict[str, Any]) -> Any:
    target, options = split_spec(spec, kind)
    factory = find_connector(kind, target)
    kind.contract.check(kind.flag, target, factory)
    filled = {name: filled_in(kind.flag, name, value) for name, value in options.items()}
    arguments = context | filled
    try:
        inspect.signature(factory).bind(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(kind.flag, f"{target} does not take these options: {error}") from error
    _check_types(kind, target, factory, {name: arguments[name] for name in options})
    try:
        connector = factory(**arguments)
        fits = isinstance(connector, kind.protocol)  # looks at its properties
    except KvbatonError as error:
        if (told := as_written(str(error))) == str(error):
            raise
        raise ConfigError(kind.flag, told) from None
    except Exception as error:
        text = f"{target} can't be built: {type(error).__name__}: {error}"
        told = as_written(text)
        raise ConfigError(kind.flag, told) from (error if told == text else None)
    if not fits:
        missing = [n for n in dir(kind.protocol) if n[0] != "_" and not hasattr(connector, n)]
        noun = kind.noun.capitalize()
        raise ConfigError(kind.flag, f"{target} is not a {noun}: it lacks {', '.join(missing)}")
    return connector


def _check_types(kind: Kind, target: str, factory: Any, options: Mapping[str, Any]) -> None:
    """Refuse options that are not of the type that the constructor annotates, if JSON has it."""
    try:
        hints = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    except Exception:  # of names that exist for type checkers only, say
        return
    for option, value in options.items():
        try:
            msgspec.convert(value, hints.get(option, Any))
        except msgspec.ValidationError as error:
            text = f"{target}'s option {option} has a wrong type: {error}"
            raise ConfigError(kind.flag, text) from error
        except TypeError:  # a type that msgspec does not know
            continue


@lru_cache(maxsize=8)
def _installed(group: str, seen: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """Entry points of all packages, whose files are read again once a folder has changed."""
    return tuple(entry_points(group=group))


def _entry_points(kind: Kind) -> list[EntryPoint]:
    seen = []
    for folder in sys.path:
        with suppress(OSError):
            seen.append((folder, os.stat(folder or ".").st_mtime_ns))
    found = list(_installed(kind.group, tuple(seen)))
    known = {point.name for point in found}
    ours = kind.built_in.items()
    return [*found, *(EntryPoint(n, path, kind.group) for n, path in ours if n not in known)]


def find_entry(kind: Kind, target: str) -> EntryPoint:
    """Where the class lives that a name or a dotted path means; nothing is imported.

    Raises:
        ConfigError: unknown name.
    """
    if ":" in target:
        return EntryPoint(target, target, kind.group)
    named = {point.name: point for point in _entry_points(kind)}
    if target not in named:
        known = ", ".join(sorted(named))
        raise ConfigError(kind.flag, f"unknown {kind.noun} {target!r}; known are {known}")
    return named[target]


def check_spec(kind: Kind, spec: str) -> None:
    """Refuse what no machine could make right; nothing is imported.

    Raises:
        ConfigError: unknown name, or options that are no JSON object.
    """
    target, _ = split_spec(spec, kind)
    find_entry(kind, target)


def find_connector(kind: Kind, target: str) -> Any:
    """Import the class that a name or a dotted path means.

    Raises:
        ConfigError: unknown name, a missing dependency, no class.
    """
    try:
        factory = find_entry(kind, target).load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(kind.flag, f"can't load {target}: {error}") from error
    if not callable(factory):
        raise ConfigError(kind.flag, f"{target} is not a class")
    return factory

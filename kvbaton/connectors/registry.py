"""Find connectors by name: a built-in one, an entry point, or a dotted path.

A spec is ``NAME``, ``NAME:JSON``, ``package.module:Class`` or ``package.module:Class:JSON``. The
JSON object holds keyword arguments of the constructor, which is
``Class(name: str, *, host: str = "127.0.0.1", **options)`` for a transport and
``Class(name: str, **options)`` for a store. Entry points are in the group ``kvbaton.transports`` or
``kvbaton.stores``. Inside the JSON of a store that wraps others, a spec may also be written as
``{NAME: OPTIONS}``.

Everybody on the machine can read a command line. To keep secrets out of it, ``{env:NAME}`` in an
option's text stands for an environment variable, and ``{file:PATH}`` for the content of a file. A
plug-in may repeat such a secret in any error, so such texts pass through `as_written` before they
are logged or shown.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from kvbaton.connectors.base import Capabilities, PreparesWrites, Transport
from kvbaton.connectors.members import Further, check_members
from kvbaton.connectors.store import Claiming, Namespaced, Registering, Store, StoreCapabilities
from kvbaton.errors import ConfigError, KvbatonError, StoreError, error_text, import_failure

MIN_SECRET_LENGTH = 4
"""Minimum length of a secret that `as_written` replaces: shorter ones occur in any text."""

_SECRET = re.compile(r"\{(env|file):([^{}]+)\}")
_known: dict[str, str] = {}
"""Secrets that this process has filled into options, each with its placeholder."""


def as_written(text: str) -> str:
    """The text with each filled-in secret replaced by its placeholder from the spec."""
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, _known[secret])
    return text


def as_told(flag: str, name: str, error: KvbatonError) -> KvbatonError:
    """A connector's error, reworded for the operator: it names the flag and contains no secrets.

    Args:
        flag: The flag whose spec names the connector.
        name: Name of the connector, put before an error that names only one of its options.
        error: The error that the connector raised.
    """
    told = as_written(str(error))
    if isinstance(error, ConfigError) and error.field[:2] != "--":
        return ConfigError(flag, f"{name}'s {told}")
    return error if told == str(error) else ConfigError(flag, told.removeprefix(f"{flag}: "))


def filled_in(flag: str, option: str, value: Any) -> Any:
    """An option's value with its placeholders replaced by what they stand for.

    Specs inside the value are left as they are: they are filled in when they are loaded.

    Raises:
        ConfigError: Names `flag`; a variable is not set or a file can't be read.
    """
    if isinstance(value, list):
        return [filled_in(flag, option, part) for part in value]
    if isinstance(value, dict):
        return {name: filled_in(flag, option, part) for name, part in value.items()}
    if not isinstance(value, str) or '{"' in value:
        return value

    def look_up(found: re.Match[str]) -> str:
        source, name = found.groups()
        try:
            secret = os.environ[name] if source == "env" else Path(name).read_text().strip()
        except KeyError as error:
            text = f"option {option} needs the environment variable {name}, which is not set"
            raise ConfigError(flag, text) from error
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(flag, f"option {option} can't be read: {error}") from error
        if len(secret) >= MIN_SECRET_LENGTH:
            _known[secret] = found[0]
        return secret

    return _SECRET.sub(look_up, value)


FIRST_CONTRACT = "1.0"
_VERSION = re.compile(r"(\d+)\.(\d+)")
NOT_OPTIONS = {"store": ("name", "clock"), "transport": ("name", "host", "clock", "hub")}
"""By kind: parameters of constructors that kvbaton gives, or that JSON can't express."""


@dataclass(frozen=True)
class Contract:
    """The versions ``MAJOR.MINOR`` of a plug-in contract that this kvbaton supports.

    The class of a plug-in names the version that it was written to in an attribute ``contract``; a
    class without it was written to 1.0.

    - A minor version adds features that a plug-in may have or ignore. A plug-in of a later minor
      version than the present one is refused, since it may rely on being called.
    - A major version changes what a plug-in must do. Plug-ins of the present and the previous major
      version are loaded, the previous with a warning, for at least two minor releases of kvbaton
      and six months. Older and later ones are refused. The warning and the error say what to
      install.

    Attributes:
        major: The present major version.
        minor: The present minor version.
        oldest: The oldest major version that is loaded; with a warning if it is not `major`.
    """

    major: int
    minor: int
    oldest: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    def check(self, flag: str, target: str, connector: object) -> None:
        """Warn of a plug-in that was written to an old contract, or refuse it.

        Args:
            flag: The flag whose spec names the plug-in.
            target: Its name or dotted path.
            connector: Its class, or an instance.

        Raises:
            ConfigError: This version is not supported.
        """
        written = getattr(connector, "contract", FIRST_CONTRACT)
        version = _VERSION.fullmatch(written) if isinstance(written, str) else None
        if version is None:
            raise ConfigError(flag, f"{target}'s contract is {written!r}, not MAJOR.MINOR")
        major, minor = map(int, version.groups())
        ours = f"this kvbaton knows {self.oldest}.0 to {self}"
        if major < self.oldest or (major, minor) > (self.major, self.minor):
            later = target if major < self.oldest else "one"
            told = f"{target} was written to contract {written}; {ours}: install a later {later}"
            raise ConfigError(flag, told)
        if major < self.major:
            told = f"{target} was written to contract {written}, which a later kvbaton refuses"
            warnings.warn(f"{told}; the present one is {self}", FutureWarning, stacklevel=4)


Spec = str | Mapping[str, Mapping[str, Any]]
"""A connector's name and options; see the module's docstring."""

_PATH = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(?=:|$)")


@dataclass(frozen=True)
class Kind:
    """A kind of connector.

    Attributes:
        noun: Name of the kind in errors and flags.
        protocol: The protocol that each connector of this kind must implement.
        capabilities: Type of the capabilities that each connector declares.
        further: Protocols that it may implement, see `check_members`.
        built_in: Dotted paths of the built-in connectors by name. They are no entry points, since
            they must also be found when the package runs from its sources.
        contract: The supported versions of its contract.
    """

    noun: str
    protocol: type
    capabilities: type
    further: Further
    built_in: dict[str, str]
    contract: Contract

    @property
    def flag(self) -> str:
        """The flag that takes specs of this kind."""
        return f"--{self.noun}"

    @property
    def group(self) -> str:
        """The entry-point group of this kind."""
        return f"kvbaton.{self.noun}s"


TRANSPORTS = Kind(
    "transport",
    Transport,
    Capabilities,
    [(PreparesWrites, None)],
    {
        "faulty": "kvbaton.connectors.transports.faulty:FaultyTransport",
        "memory": "kvbaton.connectors.transports.memory:MemoryTransport",
        "nccl": "kvbaton.connectors.transports.nccl:NcclTransport",
        "nixl": "kvbaton.connectors.transports.nixl:NixlTransport",
        "tcp": "kvbaton.connectors.transports.tcp:TcpTransport",
    },
    Contract(major=1, minor=1, oldest=1),
)
STORES = Kind(
    "store",
    Store,
    StoreCapabilities,
    [
        (Registering, None),
        (Registering, "devices"),
        (Claiming, "claims"),
        (Namespaced, "namespaces"),
    ],
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
    """Installed connectors: name to location, ``package.module:Class``."""
    points = sorted(_entry_points(kind), key=lambda point: point.name)
    return {point.name: point.value for point in points}


def load_transport(spec: str, *, name: str, host: str = "127.0.0.1", **context: Any) -> Transport:
    """Build the transport that a spec names, as nodes, the kit and the benchmarks all do.

    Args:
        spec: Name and options, see the module's docstring.
        name: Unique per process and generation.
        host: The node's ``--host``, at which peers reach it.
        context: Further keyword arguments; options of the spec override all of them.

    Raises:
        ConfigError: The name is unknown, the JSON is bad, a dependency is missing, the arguments
            are wrong, the constructor raises, or the result is no transport.
    """
    transport: Transport = _build(TRANSPORTS, spec, {"name": name, "host": host} | context)
    target, options = split_spec(spec, TRANSPORTS)
    if transport.name != (given := options.get("name", name)):
        told = f"{target} was named {given!r}, but calls itself {transport.name!r}"
        raise ConfigError(TRANSPORTS.flag, told)
    return transport


def load_store(spec: Spec, **context: Any) -> Store:
    """Build the store that a spec names. The store gets the spec's name unless `name` is given.

    Raises:
        ConfigError: As for `load_transport`.
    """
    if not isinstance(spec, str):
        if not isinstance(spec, Mapping) or len(spec) != 1:
            raise ConfigError(STORES.flag, f"{spec!r} is neither a spec nor {{NAME: OPTIONS}}")
        [(name, options)] = spec.items()
        spec = f"{name}:{json.dumps(options)}"
    target, _ = split_spec(spec, STORES)
    store: Store = _build(STORES, spec, {"name": target.rpartition(":")[2]} | context)
    return store


def open_store(store: Store, spec: str) -> None:
    """Open a store for a command. Errors other than `StoreError` pass unchanged.

    Raises:
        StoreError: The store's own error, with the spec.
    """
    try:
        store.open()
    except StoreError as error:
        raise StoreError(f"{spec} can't be opened: {error}") from error


def split_spec(spec: str, kind: Kind) -> tuple[str, dict[str, Any]]:
    """Name or dotted path of a spec, and its options.

    Raises:
        ConfigError: The spec has no name, or the options are not a JSON object.
    """
    if spec.startswith("{"):  # comes from a mapping in YAML
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
    factory = load_class(kind.flag, find_entry(kind, target))
    kind.contract.check(kind.flag, target, factory)
    filled = {name: filled_in(kind.flag, name, value) for name, value in options.items()}
    arguments = context | filled
    try:
        inspect.signature(factory).bind(**arguments)
    except (TypeError, ValueError) as error:
        ours = next((name for name in context if f"argument '{name}'" in str(error)), None)
        what = "these options" if ours is None else f"{ours}, which each {kind.noun} is given"
        taken = [option.name for option in options_of(kind, factory)] if ours is None else []
        known = f"; its options are {', '.join(taken)}" if taken else ""
        raise ConfigError(kind.flag, f"{target} does not take {what}: {error}{known}") from error
    _check_types(kind, target, factory, {name: arguments[name] for name in options})
    try:
        connector = factory(**arguments)
        needed = kind.protocol, kind.capabilities, kind.further
        check_members(kind.flag, target, connector, *needed)
    except KvbatonError as error:
        raise as_told(kind.flag, target, error) from None
    except (Exception, SystemExit) as error:
        text = f"{target} can't be built: {error_text(error)}"
        told = as_written(text)
        raise ConfigError(kind.flag, told) from (error if told == text else None)
    return connector


def options_of(kind: Kind, factory: Any) -> list[inspect.Parameter]:
    """Parameters of a constructor that are options; empty if it has no signature."""
    try:
        every = inspect.signature(factory).parameters.values()
    except ValueError:  # written in C
        return []
    ours = NOT_OPTIONS[kind.noun]
    return [p for p in every if p.kind is not p.VAR_KEYWORD and p.name not in ours]


def _check_types(kind: Kind, target: str, factory: Any, options: Mapping[str, Any]) -> None:
    """Refuse options that do not have the type that the constructor annotates, if JSON has it."""
    try:
        hints = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    except Exception:  # annotations may use names that exist for type checkers only
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
    """Entry points of all packages; their files are read again once a folder has changed."""
    return tuple(entry_points(group=group))


def _entry_points(kind: Kind) -> list[EntryPoint]:
    seen = []
    for folder in sys.path:
        with suppress(OSError):
            seen.append((folder, os.stat(folder or ".").st_mtime_ns))
    ours = [EntryPoint(name, path, kind.group) for name, path in kind.built_in.items()]
    return [*_installed(kind.group, tuple(seen)), *ours]


def find_entry(kind: Kind, target: str) -> EntryPoint:
    """The entry point that a name or a dotted path stands for; nothing is imported.

    Raises:
        ConfigError: The name is unknown, or several packages have it.
    """
    if ":" in target:
        return EntryPoint(target, target, kind.group)
    points = _entry_points(kind)
    named = {point.value: point for point in points if point.name == target}
    if not named:
        known = ", ".join(sorted({point.name for point in points}))
        raise ConfigError(kind.flag, f"unknown {kind.noun} {target!r}; known are {known}")
    if len(named) > 1:
        told = f"several packages have a {kind.noun} {target!r}: {', '.join(sorted(named))}"
        raise ConfigError(kind.flag, f"{told}: remove all but one, or name its path")
    return next(iter(named.values()))


def check_spec(kind: Kind, spec: str) -> None:
    """Check the parts of a spec that do not depend on the machine; nothing is imported.

    Raises:
        ConfigError: The name is unknown, or the options are not a JSON object.
    """
    target, _ = split_spec(spec, kind)
    find_entry(kind, target)


def class_of(kind: Kind, spec: str) -> Any:
    """Import the class that a spec names; nothing is built.

    Raises:
        ConfigError: As for `split_spec`, `find_entry` and `load_class`.
    """
    return load_class(kind.flag, find_entry(kind, split_spec(spec, kind)[0]))


def load_class(flag: str, entry: EntryPoint) -> Any:
    """Import the class of an entry point.

    Raises:
        ConfigError: Names the flag; the module can't be imported, or it has no such class.
    """
    try:
        factory = entry.load()
    except (Exception, SystemExit) as error:  # importing a module may raise anything
        raise ConfigError(flag, f"can't load {entry.name}: {import_failure(error)}") from error
    if not callable(factory):
        raise ConfigError(flag, f"{entry.name} is not a class")
    return factory


def declared(capabilities: Any) -> dict[str, Any]:
    """A connector's declared capabilities as JSON values."""
    values = {item.name: getattr(capabilities, item.name) for item in fields(capabilities)}
    return {
        name: sorted(value) if isinstance(value, frozenset) else getattr(value, "name", value)
        for name, value in values.items()
    }

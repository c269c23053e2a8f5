"""Find connectors by name: ours, entry points, or a dotted path.

A spec is ``NAME``, ``NAME:JSON`` or ``package.module:Class``, the last also followed by ``:JSON``.
The JSON object holds keyword arguments of the constructor. A transport is written as
``Class(name: str, *, host: str = "127.0.0.1", **options)``, a store as
``Class(name: str, **options)``. Entry points are of group ``kvbaton.transports`` or
``kvbaton.stores``. Inside the JSON of a store that wraps others, a spec may also be written as
``{NAME: OPTIONS}``.

On a command line all see an option. So in its text ``{env:NAME}`` stands for an environment
variable, and ``{file:PATH}`` for what is in a file. A plug-in's author may put what stood for it
into any error; whoever logs or shows such a text passes it through `as_written`.
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
from typing import Any, get_origin, get_type_hints

import msgspec

from kvbaton.connectors.base import Capabilities, Transport
from kvbaton.connectors.store import Store, StoreCapabilities
from kvbaton.errors import ConfigError, KvbatonError, StoreError, error_text, import_failure

LEAST_SECRET = 4
"""Characters of what is looked for in texts: of less there is something everywhere."""

_SECRET = re.compile(r"\{(env|file):([^{}]+)\}")
_known: dict[str, str] = {}
"""What was filled in, in this process, and how it was written."""


def as_written(text: str) -> str:
    """A text in which all that was filled in is as it was written in its spec."""
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, _known[secret])
    return text


def as_told(flag: str, name: str, error: KvbatonError) -> KvbatonError:
    """What a connector raised as its operator is to read it.

    Args:
        flag: that named the connector.
        name: of the connector; an error that names an option alone is told to be of this one.
        error: what it raised; nothing that was filled in is left in what is returned.
    """
    told = as_written(str(error))
    if isinstance(error, ConfigError) and error.field[:2] != "--":
        return ConfigError(flag, f"{name}'s {told}")
    return error if told == str(error) else ConfigError(flag, told.removeprefix(f"{flag}: "))


def filled_in(flag: str, option: str, value: Any) -> Any:
    """An option's value with what its texts stand for.

    Specs inside of it are left as they are: whoever loads them fills them in.

    Raises:
        ConfigError: of `flag`, if a variable is not set or a file can't be read.
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
        if len(secret) >= LEAST_SECRET:
            _known[secret] = found[0]
        return secret

    return _SECRET.sub(look_up, value)


FIRST_CONTRACT = "1.0"
_VERSION = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True)
class Contract:
    """What of one kind this kvbaton loads, by the version of its contract: ``MAJOR.MINOR``.

    A plug-in's class names the one that it was written to in an attribute ``contract``; one without
    it was written to 1.0.

    - A minor version adds what a plug-in may have or ignore. One that needs a later minor version
      than ours is refused: it may rely on being asked.
    - A major version changes what a plug-in must do. Ours and the one before it are loaded, the
      latter with a warning, for at least two minor releases of kvbaton and six months; after that,
      and if it is of a later one, a plug-in is refused. Both texts say what to install.

    Attributes:
        major: the present version.
        minor: the present version.
        oldest: the oldest major version that is still loaded, with a warning if it is not ours.
    """

    major: int
    minor: int
    oldest: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    def check(self, flag: str, target: str, connector: object) -> str:
        """The version that a plug-in's class, or the plug-in, was written to.

        Args:
            flag: that named it.
            target: its name or path.
            connector: the class or the plug-in.

        Raises:
            ConfigError: it is none that can be loaded.
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
        return written


Spec = str | Mapping[str, Mapping[str, Any]]
"""Names a connector and its options; see the module's docstring."""

_PATH = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class Kind:
    """A kind of connector.

    Attributes:
        noun: what errors call it.
        protocol: what each must have.
        capabilities: the type of what each declares.
        built_in: ours by name, which must be found where the package runs from its sources, too.
        contract: which versions of its contract are loaded.
    """

    noun: str
    protocol: type
    capabilities: type
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
    Capabilities,
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


def open_store(store: Store, spec: str) -> None:
    """Open it for a command.

    Raises:
        StoreError: its own, with the spec. What else it raises, its author wants as it is.
    """
    try:
        store.open()
    except StoreError as error:
        raise StoreError(f"{spec} can't be opened: {error}") from error


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
        ours = next((name for name in context if f"argument '{name}'" in str(error)), None)
        what = "these options" if ours is None else f"{ours}, which each {kind.noun} is given"
        raise ConfigError(kind.flag, f"{target} does not take {what}: {error}") from error
    _check_types(kind, target, factory, {name: arguments[name] for name in options})
    try:
        connector = factory(**arguments)
        fits = isinstance(connector, kind.protocol)  # looks at its properties
    except KvbatonError as error:
        raise as_told(kind.flag, target, error) from None
    except (Exception, SystemExit) as error:
        text = f"{target} can't be built: {error_text(error)}"
        told = as_written(text)
        raise ConfigError(kind.flag, told) from (error if told == text else None)
    if inspect.isclass(connector):
        told = f"{target} gives the class {connector.__name__}, not a {kind.noun} made of it"
        raise ConfigError(kind.flag, told)
    if not fits:
        wanted = [name for name in dir(kind.protocol) if name[0] != "_"]
        missing = ", ".join(name for name in wanted if getattr(connector, name, None) is None)
        noun = kind.noun.capitalize()
        raise ConfigError(kind.flag, f"{target} is not a {noun}: it lacks {missing}")
    for name in dir(kind.protocol):
        if name[0] != "_" and inspect.iscoroutinefunction(getattr(connector, name)):
            told = f"{target} has a coroutine, {name}, which nobody awaits"
            if kind is STORES:
                told += ": what is asynchronous in a store returns futures of `concurrent.futures`"
            raise ConfigError(kind.flag, told)
    if not isinstance(able := connector.capabilities, kind.capabilities):
        raise ConfigError(kind.flag, f"{target} declares no valid capabilities: {able!r}")
    for name, hint in get_type_hints(kind.capabilities).items():
        value, wanted = getattr(able, name), get_origin(hint) or hint
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            told = f"{target} declares {name}={value!r}, which is no {wanted.__name__}"
            raise ConfigError(kind.flag, told)
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
    ours = [EntryPoint(name, path, kind.group) for name, path in kind.built_in.items()]
    return [*_installed(kind.group, tuple(seen)), *ours]


def find_entry(kind: Kind, target: str) -> EntryPoint:
    """Where the class lives that a name or a dotted path means; nothing is imported.

    Raises:
        ConfigError: unknown name, or one that means several classes.
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
    """Refuse what no machine could make right; nothing is imported.

    Raises:
        ConfigError: unknown name, or options that are no JSON object.
    """
    target, _ = split_spec(spec, kind)
    find_entry(kind, target)


def find_connector(kind: Kind, target: str) -> Any:
    """Import the class that a name or a dotted path means.

    Raises:
        ConfigError: unknown name, a module that can't be imported, no class.
    """
    return load_class(kind.flag, find_entry(kind, target))


def class_of(kind: Kind, spec: str) -> Any:
    """Import the class that a spec names; nothing is built.

    Raises:
        ConfigError: as `split_spec` and `find_connector`.
    """
    return find_connector(kind, split_spec(spec, kind)[0])


def load_class(flag: str, entry: EntryPoint) -> Any:
    """Import the class of an entry point.

    Raises:
        ConfigError: naming the flag: a module that can't be imported, no class.
    """
    try:
        factory = entry.load()
    except (Exception, SystemExit) as error:  # whatever its module does when it is imported
        raise ConfigError(flag, f"can't load {entry.name}: {import_failure(error)}") from error
    if not callable(factory):
        raise ConfigError(flag, f"{entry.name} is not a class")
    return factory


def declared(capabilities: Any) -> dict[str, Any]:
    """What a connector says that it can, in words that JSON has."""
    values = {item.name: getattr(capabilities, item.name) for item in fields(capabilities)}
    return {
        name: sorted(value) if isinstance(value, frozenset) else getattr(value, "name", value)
        for name, value in values.items()
    }

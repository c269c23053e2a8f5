"""Lists installed connectors, whether they can be used, and the namespaces of a store."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Sequence
from contextlib import closing
from typing import Any, cast

import msgspec
from msgspec import Struct

from kvbaton.connectors.registry import (
    STORES,
    TRANSPORTS,
    Kind,
    class_of,
    declared,
    list_connectors,
    load_store,
    load_transport,
    open_store,
    options_of,
    split_spec,
)
from kvbaton.connectors.store import InDirectory, Namespaced
from kvbaton.errors import ConfigError, KvbatonError


class Installed(Struct, kw_only=True):
    """An installed connector.

    Attributes:
        kind: ``store`` or ``transport``.
        name: Name in specs, with the options of the spec that was asked for.
        where: ``package.module:Class``.
        options: Options of its constructor; required ones have a ``*``.
        capabilities: Declared capabilities; None if it was not built.
        problem: Why it was not built; None if it was.
    """

    kind: str
    name: str
    where: str
    options: list[str] = []
    capabilities: dict[str, Any] | None = None
    problem: str | None = None


def run(specs: Sequence[str] = (), *, as_json: bool = False, as_markdown: bool = False) -> int:
    """Print all connectors, or the named ones; return 1 if a named one can't be built, else 0."""
    if as_markdown:
        print("\n\n".join(_markdown(kind, spec) for kind, spec in _wanted(specs)))
        return 0
    found = [_look(kind, spec) for kind, spec in _wanted(specs)]
    text = msgspec.json.format(msgspec.json.encode(found)).decode() if as_json else _table(found)
    print(text)
    usable = {one.name for one in found if one.problem is None}
    return 0 if usable.issuperset(specs) else 1


def _wanted(specs: Sequence[str]) -> list[tuple[Kind, str]]:
    known = [(kind, name) for kind in (STORES, TRANSPORTS) for name in list_connectors(kind)]
    if not specs:
        return known
    pairs = [(kind, spec) for spec in specs for kind in (STORES, TRANSPORTS)]
    fitting = [pair for pair in pairs if (pair[0], split_spec(pair[1], pair[0])[0]) in known]
    named = {spec for _, spec in fitting}
    # A dotted path, or not a connector: the attempt to build it gives the error.
    return fitting + [(STORES, spec) for spec in specs if spec not in named]


def _look(kind: Kind, spec: str) -> Installed:
    """Import a connector, and build it if no option is missing; stores are built without I/O."""
    target, given = split_spec(spec, kind)
    where = list_connectors(kind).get(target, target)
    found = Installed(kind=kind.noun, name=spec, where=where)
    try:
        parameters = options_of(kind, class_of(kind, spec))
        found.options = [p.name + "*" * (p.default is p.empty) for p in parameters]
        if missing := [o[:-1] for o in found.options if o[-1] == "*" and o[:-1] not in given]:
            found.problem = f"it needs {', '.join(missing)}"
        elif kind is STORES:
            found.capabilities = declared(load_store(spec).capabilities)
        else:
            transport = load_transport(spec, name=f"list-{spec}")
            try:
                found.capabilities = declared(transport.capabilities)
            finally:
                transport.shutdown()
    except (KvbatonError, OSError, RuntimeError) as error:
        found.problem = str(error)
    return found


def _markdown(kind: Kind, spec: str) -> str:
    """A connector and its options in Markdown, from the docstrings of its class."""
    head = f"### {kind.noun} `{spec}`"
    try:
        factory = class_of(kind, spec)
    except ConfigError as error:
        return f"{head}\n\nNot here: {error}"
    of_class = inspect.getdoc(factory) or ""
    text = f"{inspect.getdoc(factory.__init__)}\n\n{of_class}"
    lines = [head, "", of_class.partition("\n")[0]]
    if parameters := options_of(kind, factory):
        lines += ["", "| option | default | |", "| --- | --- | --- |"]
    for parameter in parameters:
        found = re.search(rf"^    {parameter.name}: (.*(?:\n {{5,}}.*)*)", text, re.MULTILINE)
        meaning = re.sub(r"\s+", " ", found[1]).replace("|", "\\|") if found else ""
        default = f"`{json.dumps(parameter.default, default=str)}`"
        default = "required" if parameter.default is parameter.empty else default
        lines += [f"| `{parameter.name}` | {default} | {meaning} |"]
    return "\n".join(lines)


def _table(found: Sequence[Installed]) -> str:
    width = max(len("name"), *(len(one.name) for one in found)) + 2
    lines = [f"{'kind':<11}{'name':<{width}}where and what it can do"]
    for one in found:
        lines.append(f"{one.kind:<11}{one.name:<{width}}{one.where}")
        able = []
        for name, value in (one.capabilities or {}).items():
            shown = f"{name} {'+'.join(value) if isinstance(value, list) else value}"
            able += [shown if value and value is not True else ("" if value else "no ") + name]
        parts = ("can: ", ", ".join(able)), ("options: ", " ".join(one.options))
        for head, text in (*parts, ("not built: ", one.problem)):
            lines += [f"{'':<11}{'':<{width}}{head}{text}"] if text else []
    return "\n".join(lines)


# --- what a store holds ---

CLEAR_S = 600.0
"""Maximum seconds of a call on namespaces, for which a store may have to read every object."""


def run_namespaces(spec: str, clear: str | None = None) -> int:
    """List a store's namespaces, after clearing one if it is named; return the exit status.

    Raises:
        ConfigError: The store does not support namespaces, or its folder is missing.
        StoreError: The store can't be opened, or fails.
    """
    store = load_store(spec)
    if not store.capabilities.namespaces:
        raise ConfigError("SPEC", f"{store.name} does not tell namespaces apart")
    if isinstance(store, InDirectory) and not os.path.isdir(store.directory):
        raise ConfigError("SPEC", f"nothing was ever stored there: {store.directory} is missing")
    open_store(store, spec)
    with closing(store):
        able = cast(Namespaced, store)
        if clear is not None:
            print(f"{clear}: {able.clear(clear).result(CLEAR_S)} objects forgotten")
        for name, usage in sorted(able.namespaces().result(CLEAR_S).items()):
            tenants = ", ".join(f"{who} {held}" for who, held in sorted(usage.tenants.items()))
            print(
                f"{name or '(none)'}: {usage.objects} objects, {usage.num_bytes} bytes"
                + (f" ({tenants})" if tenants else "")
            )
    return 0

"""The house: rooms import one way (docs/architecture.md), and light rooms stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvbaton

PACKAGE = Path(kvbaton.__file__).parent

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "signals": set(),
    "malloc": set(),
    "log": {"errors"},
    "version": set(),
    "types": set(),
    "config": {"errors"},
    "messages": {"errors", "types"},
    "image_file": {"errors"},
    "kernels": set(),
    "connectors": {"errors", "types", "messages"},
    "testing": {"errors", "types", "messages", "connectors"},
    "engine": {
        *("errors", "signals", "malloc", "log", "types", "config"),
        *("messages", "image_file", "connectors", "kernels"),
    },
    "text": {"errors", "types", "messages", "image_file"},
    "server": {
        *("version", "errors", "signals", "malloc", "log", "types", "config"),
        *("messages", "text", "engine", "connectors"),
    },
    "decode": {"errors", "types", "messages", "connectors", "engine", "server"},
    "prefill": {"errors", "types", "messages", "connectors", "engine", "server"},
    "roles": {"messages", "connectors", "engine", "server", "prefill", "decode"},
    "doctor": {"errors", "types", "connectors", "testing"},
    "router": {
        *("errors", "log", "types", "config", "messages", "text", "engine", "server"),
        "connectors.address",
        "connectors.keys",
    },
}
"""What each room may import of ours; a file of the first level is a room of its own."""

ANYTHING = {"cli", "cluster", "bench", "simulate", "__main__", "__init__", "llm"}

ONLY_FOR_CLI = {"bench", "simulate"}
"""Rooms that nobody imports but the commands (and themselves)."""

LIGHT = (
    "router.app",
    "server.app",
    "text.tokenizer",
    "connectors.base",
    "cli",
    "engine.client",
    "testing.suite",
    "simulate.main",
)
"""Modules that must not pull in torch, transformers or triton."""


def room_of(module: str) -> str:
    return module.split(".")[1]


def imports_of(path: Path) -> list[str]:
    """Names of our modules that a file imports, at any depth, lazily or not."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in names if name.startswith("kvbaton.")]


def module_name(path: Path) -> str:
    return ".".join(("kvbaton", *path.relative_to(PACKAGE).with_suffix("").parts))


FILES = sorted(PACKAGE.rglob("*.py"))


def imports_in(room: str) -> list[tuple[str, str]]:
    """(module, name that it imports) of a room's files."""
    modules = [(module_name(path), path) for path in FILES]
    return [(m, name) for m, path in modules if room_of(m) == room for name in imports_of(path)]


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_imports_run_one_way(room: str) -> None:
    allowed = MAY_IMPORT[room] | {room}
    for module, name in imports_in(room):
        short = name.removeprefix("kvbaton.")
        ok = any(short == a or short.startswith(a + ".") for a in allowed)
        # `from kvbaton.connectors import keys` also yields the bare package name.
        ok = ok or any(a.startswith(short + ".") for a in allowed)
        assert ok, f"{module} may not import {name}"


@pytest.mark.parametrize("room", sorted(ANYTHING - ONLY_FOR_CLI - {"cli"}))
def test_nobody_leans_on_the_commands(room: str) -> None:
    """No room of `MAY_IMPORT` may."""
    assert not any(ONLY_FOR_CLI & allowed for allowed in MAY_IMPORT.values())
    for module, name in imports_in(room):
        assert room_of(name) not in ONLY_FOR_CLI, f"{module} may not import {name}"


def test_no_circles() -> None:
    edges = {room: allowed - {room} for room, allowed in MAY_IMPORT.items()}
    done: set[str] = set()
    while len(done) < len(edges):
        free = {
            room
            for room, allowed in edges.items()
            if room not in done and {name.split(".")[0] for name in allowed} <= done
        }
        assert free, f"a circle among {sorted(set(edges) - done)}"
        done |= free


def test_every_room_is_listed() -> None:
    rooms = {room_of(module_name(path)) for path in FILES}
    assert rooms <= set(MAY_IMPORT) | ANYTHING


@pytest.mark.parametrize("room", ["connectors", "messages"])
def test_what_several_threads_decode_is_taken_apart_when_it_is_imported(room: str) -> None:
    """Not when it first comes: of two threads that msgspec does that for, one may crash."""
    for path in FILES:
        if room_of(module_name(path)) != room:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                typed = any(keyword.arg == "type" for keyword in node.keywords)
                assert not (node.func.attr == "decode" and typed), f"{path}:{node.lineno}"


def heavy_imports(modules: tuple[str, ...], heavy: tuple[str, ...]) -> list[str]:
    """What of this modules import, which are imported in turn; by the first that does."""
    code = f"""
import importlib, sys
heavy = set({heavy})
for name in {modules}:
    importlib.import_module("kvbaton." + name)
    for found in sorted(heavy & set(sys.modules)):
        print(name, "imports", found)
    heavy -= set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()


def test_light_modules_import_nothing_heavy() -> None:
    assert heavy_imports(LIGHT, ("torch", "transformers", "triton")) == []


def test_what_starts_others_is_up_at_once() -> None:
    """The first is imported by both processes of a node."""
    heavy = ("torch", "numpy", "aiohttp", "jinja2")
    assert heavy_imports(("roles", "cluster.launcher"), heavy) == []


@pytest.mark.parametrize("module", ["cli", "server.node", "router.app", "doctor.main"])
def test_a_folder_on_the_path_is_enough(module: str) -> None:
    """As on a GPU machine whose Python has all packages but ours."""
    command = [sys.executable, "-I", "-c", _WITHOUT_PACKAGE.format(str(PACKAGE.parent), module)]
    subprocess.run(command, timeout=60, check=True)


_WITHOUT_PACKAGE = """
import importlib.metadata, sys
sys.path.insert(0, {0!r})
found = importlib.metadata.distribution
def distribution(name):
    if name == "kvbaton":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)
importlib.metadata.distribution = distribution
import kvbaton.{1}
"""

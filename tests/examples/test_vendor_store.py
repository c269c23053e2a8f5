"""A vendor's package: small, built on the SDK's public names alone, and it passes the kit."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path

import pytest

import kvbaton.connectors
from tests.examples.vendor import ROOT, check_imports, install, run

PACKAGE = ROOT / "examples" / "vendor_store"
SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the package was installed."""
    return install(PACKAGE, tmp_path_factory.mktemp("vendor"))


def check(site: Path, options: str, *words: str) -> subprocess.CompletedProcess[str]:
    spec = f'sqlite:{{"path": "{{tmp}}/objects.db"{options}}}'
    return run(site, "-m", "kvbaton", "connectors", "check", spec, *words)


def test_it_is_certified(installed: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    door = ["--back-door", "kvbaton_sqlite_door:SqliteDoor"]
    done = check(installed, ', "max_bytes": 20000000', *door, "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(": certified")
    written = json.loads(report.read_text())
    assert written["not_certified"] == []
    skipped = {case["text"] for case in written["cases"] if case["verdict"] == "skipped"}
    undeclared = ("pins", "register", "devices", "hints", "prefix", "claims", "on_forget")
    assert skipped == {f"not declared: {name}" for name in undeclared}


def test_a_prompt_is_one_query(installed: Path, tmp_path: Path) -> None:
    code = """
import os, sys
from kvbaton_sqlite import SqliteStore
store = SqliteStore("s", path=sys.argv[1], threads=1)
store.open()
keys = [os.urandom(32) for _ in range(40)]
data = [os.urandom(5000) for _ in keys]
assert all(store.store(keys, [[memoryview(x)] for x in data]).result())
assert store.load(keys[:1], [[memoryview(bytearray(5000))]]).result() == [True]
asked = []
for connection in store.backend._connections:
    connection.set_trace_callback(asked.append)
targets = [bytearray(5000) for _ in keys]
assert all(store.load(keys, [[memoryview(target)] for target in targets]).result())
assert targets == data
assert len(asked) == 1 and " SELECT number" in asked[0], asked
store.close()
"""
    done = run(installed, "-W", "error", "-c", code, str(tmp_path / "objects.db"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_was_left_out_is_told(installed: Path) -> None:
    done = check(installed, "", "--case", "full-store", "--case", "L1.what-is-kept", "-x")
    assert done.returncode == 4, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert (
        "passed, not certified: no small capacity (it is None; 16000000 to 134217728 byte" in last
    )
    assert "no back door (--back-door with a method get)" in last
    assert "cases were not asked for" in last
    done = check(installed, "", "--case", "no-such-case")
    assert done.returncode == 2
    assert "--case" in done.stderr
    assert "L1.sizes" in done.stderr


def test_a_store_that_is_too_small_for_the_kit_is_told(installed: Path) -> None:
    done = check(installed, ', "max_bytes": 4000000', "--level", "1", "-x")
    assert done.returncode == 2
    assert "holds 4000000 bytes; the kit needs 16000000" in done.stderr


def test_it_is_found_by_its_entry_point(installed: Path) -> None:
    spec = 'sqlite:{"path": "objects.db"}'
    done = run(installed, "-m", "kvbaton", "connectors", "list", spec)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kvbaton_sqlite:SqliteStore" in done.stdout
    assert "persistent, shared" in done.stdout


def test_it_is_small_and_imports_public_names_only() -> None:
    assert len((PACKAGE / "kvbaton_sqlite.py").read_text().splitlines()) <= 190
    check_imports(*SOURCES)


def test_public_names_are_what_they_say() -> None:
    for name in kvbaton.connectors.__all__:
        value = getattr(kvbaton.connectors, name)
        home = getattr(value, "__module__", None)
        if isinstance(home, str) and home.startswith("kvbaton"):
            assert getattr(importlib.import_module(home), name) is value
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        kvbaton.connectors.Nothing  # type: ignore[attr-defined]  # noqa: B018


def test_neither_the_sdk_nor_the_vendor_imports_torch_or_the_engine(installed: Path) -> None:
    code = (
        "import sys; from kvbaton.connectors import *; import kvbaton_sqlite;"
        "print([m for m in sys.modules if m == 'torch' or m.startswith('kvbaton.engine')])"
    )
    assert run(installed, "-c", code).stdout.strip() == "[]"
    code = "import sys, kvbaton.connectors; print('numpy' in sys.modules)"
    assert run(installed, "-c", code).stdout.strip() == "False"

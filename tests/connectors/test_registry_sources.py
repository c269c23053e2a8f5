"""Connectors are found by their packages' metadata, and the built-in ones without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvbaton.connectors import registry
from kvbaton.connectors.transports.memory import MemoryTransport
from kvbaton.errors import ConfigError


def test_ours_are_known_by_name_without_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = registry.list_connectors(registry.TRANSPORTS)
    monkeypatch.setattr(registry, "_installed", lambda group, seen: ())
    assert registry.list_connectors(registry.TRANSPORTS) == registry.TRANSPORTS.built_in
    assert {
        name: installed[name] for name in registry.TRANSPORTS.built_in
    } == registry.TRANSPORTS.built_in
    assert isinstance(registry.load_transport("memory", name="a"), MemoryTransport)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("class Broken(:", "SyntaxError: invalid syntax"),
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
    ],
)
def test_a_module_that_breaks_when_it_is_imported_is_named(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "breaks_at_once.py").write_text(text)
    with pytest.raises(ConfigError, match=f"can't load breaks_at_once:Broken: {says}"):
        registry.load_transport("breaks_at_once:Broken", name="a")


def test_a_package_that_is_installed_meanwhile_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    os.utime(tmp_path, (0, 0))  # clocks of files stand for milliseconds
    assert "later" not in registry.list_connectors(registry.TRANSPORTS)
    package = tmp_path / "later-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: later\nVersion: 1\n")
    group = registry.TRANSPORTS.group
    (package / "entry_points.txt").write_text(f"[{group}]\nlater = some.module:Some\n")
    assert registry.list_connectors(registry.TRANSPORTS)["later"] == "some.module:Some"


def test_a_name_of_two_packages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    group = registry.STORES.group
    for name in ("one", "two"):
        package = tmp_path / f"{name}-1.dist-info"
        package.mkdir()
        (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        points = f"[{group}]\nshelf = {name}.shelf:Shelf\nmemory = {name}.memory:Memory\n"
        (package / "entry_points.txt").write_text(points)
    for name in ("shelf", "memory"):
        told = f"several packages have a store '{name}': .*one.{name}:.*, two.{name}:.*: remove"
        with pytest.raises(ConfigError, match=told):
            registry.check_spec(registry.STORES, name)

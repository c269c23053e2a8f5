"""Built-in transports are found without the metadata of an installed package."""

from __future__ import annotations

import pytest

from kvbaton.connectors import registry
from kvbaton.connectors.transports.memory import MemoryTransport


def test_ours_are_known_by_name_without_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = registry.list_connectors(registry.TRANSPORTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [])
    assert registry.list_connectors(registry.TRANSPORTS) == registry.TRANSPORTS.built_in
    assert {
        name: installed[name] for name in registry.TRANSPORTS.built_in
    } == registry.TRANSPORTS.built_in
    assert isinstance(registry.load_transport("memory", name="a"), MemoryTransport)

"""Built-in transports are found without the metadata of an installed package."""

from __future__ import annotations

import pytest

from kvbaton.connectors import registry
from kvbaton.connectors.transports.memory import MemoryTransport


def test_ours_are_known_by_name_without_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = registry.list_transports()
    monkeypatch.setattr(registry, "entry_points", lambda group: [])
    assert registry.list_transports() == registry.BUILT_IN
    assert {name: installed[name] for name in registry.BUILT_IN} == registry.BUILT_IN
    assert isinstance(registry.load_transport("memory", name="a"), MemoryTransport)

"""Which versions of a contract are loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbaton.connectors import registry
from kvbaton.connectors.registry import Contract
from kvbaton.connectors.stores.memory import MemoryStore
from kvbaton.errors import ConfigError

SPEC = f"{__name__}:Written"
OURS = Contract(major=3, minor=2, oldest=2)


class Written(MemoryStore):
    """A plug-in that names what it was written to."""

    contract: object = "3.1"


@pytest.fixture(autouse=True)
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kvbaton of another day."""
    monkeypatch.setattr(registry, "STORES", replace(registry.STORES, contract=OURS))


@pytest.mark.parametrize("version", ["3.0", "3.2"])
def test_ours_is_loaded(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Written, "contract", version)
    assert registry.load_store(SPEC).name == "Written"


def test_the_one_before_is_loaded_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Written, "contract", "2.7")
    with pytest.warns(FutureWarning, match=r"contract 2.7, which a later .* present one is 3.2"):
        registry.load_store(SPEC)


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("1.9", "knows 2.0 to 3.2: install a later tests"),
        ("3.3", "knows 2.0 to 3.2: install a later one"),
        ("4.0", "install a later one"),
        (None, "contract is None, not MAJOR.MINOR"),
        (3, "not MAJOR.MINOR"),
        ("3", "contract is .3., not"),
    ],
)
def test_others_are_refused(version: object, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Written, "contract", version)
    with pytest.raises(ConfigError, match=told):
        registry.load_store(SPEC)


def test_one_that_says_nothing_was_written_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Written, "contract")
    with pytest.raises(ConfigError, match=r"written to contract 1\.0"):
        registry.load_store(SPEC)

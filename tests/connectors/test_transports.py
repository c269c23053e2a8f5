"""Every built-in transport passes the kit; the kit catches transports that are broken."""

import itertools

import pytest

from kvbaton.connectors.base import Transport
from kvbaton.connectors.registry import load_transport
from kvbaton.connectors.transports.memory import MemoryHub, MemoryTransport
from kvbaton.testing import pairs
from kvbaton.testing.broken_transports import BROKEN, DropsLastRange
from kvbaton.testing.pairs import CHECKS, PairFailure, check_pair, run_check

SPECS = [
    "memory",
    "tcp",
    "nixl",
    'faulty:{"inner": "memory"}',
    'faulty:{"inner": "tcp", "delay": 0.5, "delay_polls": 20}',
]
_names = itertools.count()


def make(spec: str) -> tuple[Transport, Transport]:
    left, right = (load_transport(spec, name=f"t{next(_names)}") for _ in range(2))
    return left, right


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("spec", SPECS)
def test_pair(spec: str, check: str) -> None:
    run_check(check, lambda: make(spec))


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_transport_is_caught_by_its_check(
    broken: type[MemoryTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "DEADLINE_S", 0.3)
    hub = MemoryHub()
    with pytest.raises(PairFailure):
        run_check(BROKEN[broken], lambda: (broken("left", hub=hub), broken("right", hub=hub)))


def test_a_failure_names_its_check() -> None:
    hub = MemoryHub()

    def make_broken() -> tuple[Transport, Transport]:
        left, right = (DropsLastRange(f"b{next(_names)}", hub=hub) for _ in range(2))
        return left, right

    with pytest.raises(PairFailure, match=r"^exact_bytes: round 0 .* wrong bytes"):
        check_pair(make_broken)

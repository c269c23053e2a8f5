"""Every built-in transport passes the kit; the kit catches transports that are broken."""

import itertools

import pytest

from kvbaton.connectors.base import Transport
from kvbaton.connectors.registry import load_transport
from kvbaton.testing.pairs import CHECKS, run_check

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

"""Which cases of the kit run in `make test-slow`, and how its far processes start here."""

from __future__ import annotations

import pytest

from kvbaton.testing import remote
from tests.support.forked_remote import popen

SLOW = tuple(
    f"TestS3::test_store[{case}]"  # the server in Python takes seconds of CPU time for each
    for case in (
        "L3.a-killed-writer",
        "L3.what-a-killed-writer-leaves",
        "L5.gives-everything-back",
        "L5.memory-stays-level",
    )
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them."""
    for item in items:
        if item.nodeid.endswith(SLOW):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far processes of the kit need not import all anew: that takes seconds with some connectors.

    That they start as they do for others, `tests/doctor` and `tests/bench` see.
    """
    monkeypatch.setattr(remote, "Popen", popen)

"""Which cases of the kit run in `make test-slow`; its remote processes are forked."""

from __future__ import annotations

import pytest

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
def always_forked_workers(forked_workers: None) -> None:
    """In all tests of this folder."""

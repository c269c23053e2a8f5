"""Servers of these tests are forked, cores included: each that is not costs seconds of CPU time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import descendants_of
from tests.support.servers import Node, Router

pytestmark = pytest.mark.e2e


def test_no_server_and_no_core_was_executed_afresh(main_nodes: tuple[Node, Node, Router]) -> None:
    for server in main_nodes:
        below = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants_of(server.pid)]
        cores = [line for line in below if b"resource_tracker" not in line]
        assert len(cores) == isinstance(server, Node)
        for line in (Path(f"/proc/{server.pid}/cmdline").read_bytes(), *cores):
            assert b"tests.support.fork_server" in line

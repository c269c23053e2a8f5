"""SIGTERM to all processes of a server at once, as systemd and Slurm send it, loses no request."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.support.cluster import Cluster
from tests.support.servers import Server, completion

pytestmark = pytest.mark.e2e

TOKENS = 300


def tokens_through_a_stop(server: Server, *nodes: Server) -> Iterator[int]:
    """Tells all processes of these at once to end, as soon as the first token is there.

    And again, as a parent does which was told, too.
    """
    body = completion([5, 6, 7], max_tokens=TOKENS, stream=True)
    for number, event in enumerate(server.stream("/v1/completions", body)):
        if number < 2:
            for each in nodes:
                with suppress(ProcessLookupError):  # a source has ended once its part is done
                    os.killpg(each.pid, signal.SIGTERM)
        yield from event["choices"][0]["token_ids"]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_what_a_node_has_begun_ends_well(workers: str, cluster: Cluster) -> None:
    flags = {"workers": workers, "shutdown-timeout": "30"}
    node = cluster.start_node("any", f"signalled-{workers}", flags)
    cluster.until_up(node)
    assert len(list(tokens_through_a_stop(node, node))) == TOKENS
    node.stop()
    cluster.servers.remove(node)
    assert "exit 0" in node.tail()


def test_what_a_pair_has_begun_ends_well(cluster: Cluster) -> None:
    router = cluster.start_router("signalled-router", "--shutdown-timeout=30")
    flags = {"shutdown-timeout": "30"}
    p = cluster.start_node("prefill", "signalled-p", flags, router=router)
    d = cluster.start_node("decode", "signalled-d", flags, router=router)
    cluster.until_up(p, d, router=router, pairs=1)
    assert len(list(tokens_through_a_stop(router, router, p, d))) == TOKENS
    for server in (router, p, d):
        server.stop()
        cluster.servers.remove(server)
        assert "exit 0" in server.tail()

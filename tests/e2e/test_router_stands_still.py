"""A router that was stopped and goes on: its nodes were never silent, it did not listen."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbaton.router.config import MembershipTimers
from tests.support.cluster import Cluster
from tests.support.prompts import prompt_of
from tests.support.servers import poll

pytestmark = pytest.mark.e2e

TIMERS = MembershipTimers()
STOPPED_S = TIMERS.missed * TIMERS.heartbeat_s + 1.0
"""Longer than silence of nodes is borne."""


def test_nodes_of_a_router_that_stood_still_were_not_silent(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Engines have hung up meanwhile, and are called again at once; nobody waits for heartbeats."""
    cluster = Cluster(tmp_path, checkpoint())
    try:
        router = cluster.start_router("router")
        p = cluster.start_node("prefill", "p", router=router)
        d = cluster.start_node("decode", "d", router=router)
        cluster.until_up(p, d, router=router, pairs=1)
        prompt = prompt_of(40, seed=1)
        right = router.complete(prompt, max_tokens=4)["choices"][0]["token_ids"]
        os.killpg(router.pid, signal.SIGSTOP)
        try:
            time.sleep(STOPPED_S)
        finally:
            os.killpg(router.pid, signal.SIGCONT)

        def noticed() -> bool:
            return "this process stood still for" in router.log.read_text()

        poll("the pair", lambda: noticed() and router.num_pairs() == 1, 5.0, router.tail)
        assert router.complete(prompt, max_tokens=4)["choices"][0]["token_ids"] == right
        assert "heartbeats stopped" not in router.log.read_text()
    finally:
        cluster.stop()

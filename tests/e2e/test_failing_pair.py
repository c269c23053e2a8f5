"""Two nodes that live, and between which nothing gets through: requests must not pay for it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbaton.router.failing_pairs import FailingPair
from kvbaton.types import TransferTimers
from tests.support.altered import env_of
from tests.support.cluster import Cluster
from tests.support.prompts import prompt_of
from tests.support.served_pair import POOL
from tests.support.servers import HttpFailure, Router, poll

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
LOST_S = 2.0
"""What a request pays whose KV does not arrive."""
QUICK = env_of(
    (TransferTimers, {"progress_deadline": LOST_S}), (FailingPair, {"period_s": 1.5 * LOST_S})
)
ASK_S = 0.2
"""Between two requests of a client that waits for the pair; without it they take a core."""


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_pair_that_hands_nothing_over_is_put_out_and_comes_back(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    cluster, deaf = Cluster(tmp_path, checkpoint()), tmp_path / "deaf"

    def over(file: str) -> dict[str, str | None]:
        options = json.dumps({"inner": "tcp", "deaf": file})
        return {"transport": f"tests.connectors_broken.switched:DeafTransport:{options}"}

    try:
        router = cluster.start_router("router", f"--workers={workers}", env=QUICK)
        p = cluster.start_node("prefill", "p", over(""), router=router, env=QUICK)
        d = cluster.start_node("decode", "d", over(str(deaf)), router=router, env=QUICK)
        cluster.until_up(p, d, router=router, pairs=1)
        seeds = iter(range(1, 10_000))

        def ask() -> float:
            """Seconds that a prompt takes which nobody knows; its tokens must be right."""
            prompt = prompt_of(40, seed=next(seeds))
            began = time.monotonic()
            (choice,) = router.complete(prompt, max_tokens=4)["choices"]
            seconds = time.monotonic() - began
            (right,) = p.generate(prompt, max_tokens=4).choices
            assert tuple(choice["token_ids"]) == tuple(right.token_ids)
            return seconds

        def delivered() -> float:
            return d.metrics()("kvbaton_transfers_total", role="target", outcome="delivered")

        def learned() -> bool:
            """Whether each worker, which learns by itself who pairs, has handed over."""
            try:
                ask()
            except HttpFailure as failure:
                if failure.status != 503:  # of a worker that knows no node yet
                    raise
                return False
            return delivered() >= 2 * workers

        poll("hand-overs", learned, 30.0, router.tail)

        deaf.touch()
        assert min(POOL.map(lambda _: ask(), range(3))) > 0.9 * LOST_S
        poll("the pair is out", lambda: _failing(router), 10.0, router.tail)
        (pair,) = _failing(router)
        assert (pair["source"], pair["target"]) == ("p", "d")
        shown = router.metrics()("kvbaton_router_pair_failures", source="p", target="d")
        assert shown >= 2
        paid = [seconds > 0.9 * LOST_S for seconds in (ask() for _ in range(30))]
        (pair,) = _failing(router)
        # And one that went before its worker was told.
        assert sum(paid) <= 1 + workers * pair["trials"] <= 1 + workers * 3, paid
        assert {node["state"] for node in router.get("/nodes")["nodes"]} == {"ready"}

        deaf.unlink()
        poll(
            "the pair is back",
            lambda: ask() and not _failing(router),
            150.0,
            router.tail,
            every_s=ASK_S,
        )
        assert router.num_pairs() == 1
        assert ask() < LOST_S
    finally:
        cluster.stop()


def _failing(router: Router) -> list[dict[str, Any]]:
    pairs: list[dict[str, Any]] = router.get("/nodes")["failing_pairs"]
    return pairs

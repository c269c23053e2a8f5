"""D gives blocks of some requests to others while blocks of yet others arrive."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait

import pytest

from tests.e2e.conftest import MakePair
from tests.support.oracle import Oracle
from tests.support.servers import POLL_S, Metrics, Node, Router

pytestmark = pytest.mark.e2e

Prompt = Callable[[int], list[int]]


def test_preemption_while_blocks_arrive(
    main_nodes: tuple[Node, Node, Router],
    small: Node,
    make_pair: MakePair,
    oracle: Oracle,
    prompt: Prompt,
) -> None:
    pair = make_pair(main_nodes[0], small)
    # More than D has blocks for: the last arrive when the first are over.
    prompts = [prompt(20 + 2 * i) for i in range(20)]
    futures = [pair.submit(ids, max_tokens=60) for ids in prompts]
    watched: list[Metrics] = []
    while wait(futures, POLL_S).not_done:
        watched.append(pair.at_d())
    answers = [list(future.result().choices[0].token_ids) for future in futures]
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer == oracle.greedy(ids, 60, answer)
    assert pair.at_d()("kvbaton_preemptions_total") > 0
    preempted = next(m for m in watched if m("kvbaton_preemptions_total"))
    arrived = [m("kvbaton_prompt_tokens_total", source="transferred") for m in watched]
    at_preemption = preempted("kvbaton_prompt_tokens_total", source="transferred")
    assert at_preemption < arrived[-1], "all had arrived before the first preemption"

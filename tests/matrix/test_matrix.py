"""P and D processes of every cell: one node's tokens, and exactly the planned bytes cross."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.matrix.cells import ALL, COVERING, FAMILIES, REFUSED, WITHOUT_DRAFTS, Cell, pairs
from tests.matrix.conftest import Nodes
from tests.matrix.hand_over import GREEDY, gained, generate, hand_over, prompt_of, run_cell
from tests.support.engine_process import NodeProcess, NodeSpec, Role


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in WITHOUT_DRAFTS])
def test_drafts_change_no_token(family: str, nodes: Nodes) -> None:
    """D speculates on what P has computed; P generates the same without drafts."""
    drafts = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
    model = str(nodes.model(family))
    p = nodes.start(NodeSpec("prefill", model, "tcp"))
    d = nodes.start(NodeSpec("decode", model, "tcp", (("speculative_config", drafts),)))
    params = msgspec.structs.replace(GREEDY, max_tokens=32)
    for seed in range(3):
        prompt = tuple(np.random.default_rng(seed).integers(3, 300, 12).tolist() * 3)
        assert hand_over(p, d, prompt, params) == generate(p, prompt, params)
    counters = d.books().counters
    assert counters["kvbaton_spec_decode_num_draft_tokens_total"] > 0
    assert counters['kvbaton_prompt_tokens_total{source="transferred"}'] == 3 * 36


@pytest.mark.slow
@pytest.mark.parametrize("cell", COVERING, ids=lambda cell: cell.id)
def test_a_cell(cell: Cell, nodes: Nodes) -> None:
    run_cell(cell, nodes)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_pair_is_refused_by_name(what: str, policy: str, nodes: Nodes) -> None:
    """Before anything moves; and the request is served by policy."""
    refused = REFUSED[what]
    p = _node("prefill", refused.p, nodes)
    d = _node("decode", refused.d | {"kv_load_failure_policy": policy}, nodes)
    before, prompt = d.books().counters, prompt_of(40)
    if policy == "recompute":
        assert hand_over(p, d, prompt) == generate(d, prompt)
    else:
        with pytest.raises(AssertionError, match="the KV cache could not be loaded"):
            hand_over(p, d, prompt)
    books = d.books()
    at_d = gained(books.counters, before)
    assert at_d["kvbaton_load_failures_total"] == 1
    assert at_d.get('kvbaton_prompt_tokens_total{source="transferred"}', 0) == 0
    assert p.books().counters["kvbaton_transfer_posted_bytes_total"] == 0
    for word in refused.told:
        assert word in books.story


def _node(role: Role, settings: dict[str, Any], nodes: Nodes) -> NodeProcess:
    rest = {name: value for name, value in settings.items() if name not in ("seed", "transport")}
    model = str(nodes.model("llama", settings.get("seed", 0)))
    spec = NodeSpec(role, model, settings.get("transport", "tcp"), tuple(rest.items()))
    return nodes.start(spec)


def test_every_two_values_meet_in_the_covering_cells() -> None:
    wanted = {pair for cell in ALL for pair in pairs(cell)}
    assert {pair for cell in COVERING for pair in pairs(cell)} == wanted
    assert len(COVERING) < 60

"""P and D processes of every cell: one node's tokens, and exactly the planned bytes cross."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvbaton.connectors.layout import ITEM_SIZE
from kvbaton.engine.model_config import load_model_config
from kvbaton.messages.engine import AddRequest, SamplingParams, TransferSpec
from tests.matrix.cells import ALL, COVERING, FAMILIES, REFUSED, WITHOUT_DRAFTS, Cell, pairs
from tests.matrix.conftest import Nodes
from tests.support.engine_process import NodeProcess, NodeSpec, Role

LENGTHS = (1, 30, 75)
"""Prompts: one token, less than a step, and several steps and windows."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, seed=0)
_names = itertools.count()


def prompt_of(length: int) -> tuple[int, ...]:
    """Other tokens in every call, so that none is cached."""
    return tuple(np.random.default_rng(next(_names)).integers(3, 380, length).tolist())


def hand_over(
    p: NodeProcess, d: NodeProcess, prompt: tuple[int, ...], params: SamplingParams = GREEDY
) -> list[int]:
    """D's tokens, of a prompt that is sent to both at the same time."""
    name, transfer = f"r{next(_names)}", os.urandom(16)
    request = AddRequest(request_id=name, token_ids=prompt, params=params)
    source = TransferSpec(role="source", transfer_id=transfer)
    target = TransferSpec(role="target", transfer_id=transfer, peer=p.address)
    for node, spec in ((p, source), (d, target)):
        node.add(msgspec.structs.replace(request, transfer=spec))
    return d.result(name)


def generate(
    node: NodeProcess, prompt: tuple[int, ...], params: SamplingParams = GREEDY
) -> list[int]:
    """One node's tokens."""
    name = f"r{next(_names)}"
    node.add(AddRequest(request_id=name, token_ids=prompt, params=params))
    return node.result(name)


def needed_bytes(folder: Path, cell: Cell, length: int) -> tuple[int, int]:
    """What D's ranks need of a prompt, and with the rest of the blocks in which windows begin."""
    model = load_model_config(folder, kv_cache_dtype=cell.kv_dtype)
    least = most = 0
    for group in model.kv_groups():
        # Ranks beyond the heads hold one of them again, as of a latent row all do.
        heads = max(group.heads, cell.d_ranks)
        if group.state_rows:
            state = heads * len(group.layers) * group.state_rows * group.head_dim * 4
            least, most = least + state, most + state
            continue
        per_token = heads * len(group.layers) * group.planes * group.head_dim
        first = group.first_attended(length)
        least += (length - first) * per_token * ITEM_SIZE[model.kv_dtype]
        first -= first % cell.d_block_size
        most += (length - first) * per_token * ITEM_SIZE[model.kv_dtype]
    return least, most


def run_cell(cell: Cell, nodes: Nodes) -> None:
    p, d, alone = nodes.of(cell)
    before = p.books().counters, d.books().counters
    least = most = 0
    for length in LENGTHS:
        prompt = prompt_of(length)
        assert hand_over(p, d, prompt) == generate(alone, prompt), f"a prompt of {length} tokens"
        needed = needed_bytes(nodes.model(cell.family), cell, length)
        least, most = least + needed[0], most + needed[1]
    books = p.books(), d.books()
    for side in books:
        assert (side.leftovers, side.imbalance) == ({}, 0)
    at_p, at_d = (_gained(side.counters, was) for side, was in zip(books, before, strict=True))
    planned, sent = (at_p[f"kvbaton_transfer_{name}_bytes_total"] for name in ("posted", "sent"))
    assert at_p["kvbaton_transfer_needed_bytes_total"] == least
    assert least <= sent == planned <= most
    assert at_d['kvbaton_prompt_tokens_total{source="transferred"}'] == sum(LENGTHS)
    assert at_d["kvbaton_transfer_digests_checked_total"] > 0
    assert at_d["kvbaton_transfer_digests_failed_total"] == 0


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in WITHOUT_DRAFTS])
def test_drafts_change_no_token(family: str, nodes: Nodes) -> None:
    """D speculates on what P has computed."""
    drafts = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
    model, dtype = str(nodes.model(family)), ("kv_cache_dtype", "auto")
    p = nodes.start(NodeSpec("prefill", model, "tcp"))
    d = nodes.start(NodeSpec("decode", model, "tcp", (("speculative_config", drafts),)))
    alone = nodes.start(NodeSpec("alone", model, "none", (dtype,)))
    params = msgspec.structs.replace(GREEDY, max_tokens=60)
    for seed in range(3):
        prompt = tuple(np.random.default_rng(seed).integers(3, 300, 12).tolist() * 3)
        assert hand_over(p, d, prompt, params) == generate(alone, prompt, params)
    counters = d.books().counters
    assert counters["kvbaton_spec_decode_num_draft_tokens_total"] > 0
    assert counters['kvbaton_prompt_tokens_total{source="transferred"}'] == 3 * 36


def _gained(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in now.items()}


@pytest.mark.slow
@pytest.mark.parametrize("cell", COVERING, ids=lambda cell: cell.id)
def test_a_cell(cell: Cell, nodes: Nodes) -> None:
    run_cell(cell, nodes)


@pytest.mark.matrix
@pytest.mark.parametrize("cell", ALL, ids=lambda cell: cell.id)
def test_every_cell(cell: Cell, nodes: Nodes) -> None:
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
    at_d = _gained(books.counters, before)
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
    assert len(COVERING) < 50

"""A prompt from P to D of a cell: one node's tokens, and exactly the planned bytes cross."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from kvbaton.connectors.layout import ITEM_SIZE
from kvbaton.engine.model_config import load_model_config
from kvbaton.messages.engine import AddRequest, SamplingParams, TransferSpec
from tests.matrix.cells import Cell
from tests.matrix.conftest import Nodes
from tests.support.engine_process import NodeProcess

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
    at_p, at_d = (gained(side.counters, was) for side, was in zip(books, before, strict=True))
    planned, sent = (at_p[f"kvbaton_transfer_{name}_bytes_total"] for name in ("posted", "sent"))
    assert at_p["kvbaton_transfer_needed_bytes_total"] == least
    assert least <= sent == planned <= most
    assert at_d['kvbaton_prompt_tokens_total{source="transferred"}'] == sum(LENGTHS)
    assert at_d["kvbaton_transfer_digests_checked_total"] > 0
    assert at_d["kvbaton_transfer_digests_failed_total"] == 0


def gained(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in now.items()}

"""A prompt from P to D of a cell: one node's tokens, and exactly the planned bytes cross."""

from __future__ import annotations

import itertools
import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from kvbaton.connectors.layout import ITEM_SIZE
from kvbaton.engine.model_config import load_model_config
from kvbaton.messages.engine import AddRequest, Item, SamplingParams, TransferSpec
from kvbaton.types import first_attended
from tests.matrix.cells import WITH_IMAGES, Cell
from tests.matrix.conftest import Nodes
from tests.support.chats import picture
from tests.support.encoder_items import item_of, request_for
from tests.support.engine_process import NodeProcess

LENGTHS = (1, 30, 75)
"""Prompts: one token, less than a step, and several steps and windows."""
SIZES = (((48, 40),), ((90, 33), (120, 160)))
"""Images of prompts that have some: one, and two of which one has more rows than a step tokens."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, seed=0)
_names = itertools.count()


def prompt_of(length: int) -> tuple[int, ...]:
    """Other tokens in every call, so that none is cached."""
    return tuple(np.random.default_rng(next(_names)).integers(3, 380, length).tolist())


def prompt_with_images(folder: Path, sizes: Sequence[tuple[int, int]]) -> AddRequest:
    """Text before, between and after images that no other call has."""
    vision = load_model_config(folder).require_vision()
    ids, items = list(prompt_of(9)), []
    for size in sizes:
        item = item_of(folder, picture(next(_names), *size), merge_size=vision.merge_size)
        items.append(replace(item, start=len(ids)))
        ids += [vision.image_token_id] * item.length + list(prompt_of(7))
    return AddRequest(request_id="", token_ids=array("I", ids), params=GREEDY, items=tuple(items))


def hand_over(
    p: NodeProcess,
    d: NodeProcess,
    prompt: Sequence[int],
    params: SamplingParams = GREEDY,
    items: tuple[Item, ...] = (),
) -> list[int]:
    """D's tokens, of a prompt that is sent to both at the same time; D can't encode its items."""
    name, transfer = f"r{next(_names)}", os.urandom(16)
    request = AddRequest(request_id=name, token_ids=array("I", prompt), params=params, items=items)
    source = TransferSpec(role="source", transfer_id=transfer)
    target = TransferSpec(role="target", transfer_id=transfer, peer=p.address)
    bare = tuple(replace(item, data=b"", transfer=None) for item in items)
    p.add(replace(request, transfer=source))
    d.add(replace(request, transfer=target, items=bare))
    return d.result(name)


def encode(e: NodeProcess, items: tuple[Item, ...]) -> tuple[Item, ...]:
    """Ask an encoder node for items; they come back as P takes them, who can't encode them."""
    found = []
    for item in items:
        name, transfer = f"r{next(_names)}", os.urandom(16)
        source = TransferSpec(role="source", transfer_id=transfer)
        e.add(request_for(replace(item, start=0), name, transfer=source))
        target = TransferSpec(role="target", transfer_id=transfer, peer=e.address)
        found.append(replace(item, data=b"", transfer=target))
    return tuple(found)


def generate(
    node: NodeProcess,
    prompt: Sequence[int],
    params: SamplingParams = GREEDY,
    items: tuple[Item, ...] = (),
) -> list[int]:
    """One node's tokens."""
    name = f"r{next(_names)}"
    node.add(AddRequest(request_id=name, token_ids=array("I", prompt), params=params, items=items))
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
        first = first_attended(length, group.window, group.chunked)
        least += (length - first) * per_token * ITEM_SIZE[model.kv_dtype]
        first -= first % cell.d_block_size
        most += (length - first) * per_token * ITEM_SIZE[model.kv_dtype]
    return least, most


def run_cell(cell: Cell, nodes: Nodes) -> None:
    p, d, alone = nodes.of(cell)
    before, folder = [side.books().counters for side in (p, d)], nodes.model(cell.family)
    lengths = list(LENGTHS)
    for length in LENGTHS:
        prompt = prompt_of(length)
        assert hand_over(p, d, prompt) == generate(alone, prompt), f"a prompt of {length} tokens"
    if cell.family in WITH_IMAGES:
        lengths += run_images(cell, nodes)
    books = p.books(), d.books()
    for side in books:
        assert (side.leftovers, side.imbalance) == ({}, 0)
    at_p, at_d = (gained(side.counters, was) for side, was in zip(books, before, strict=True))
    needed = (needed_bytes(folder, cell, length) for length in lengths)
    least, most = map(sum, zip(*needed, strict=True))
    planned, sent = (at_p[f"kvbaton_transfer_{name}_bytes_total"] for name in ("posted", "sent"))
    assert at_p["kvbaton_transfer_needed_bytes_total"] == least
    assert least <= sent == planned <= most
    assert at_d['kvbaton_prompt_tokens_total{source="transferred"}'] == sum(lengths)
    assert at_d["kvbaton_transfer_digests_checked_total"] > 0
    assert at_d["kvbaton_transfer_digests_failed_total"] == 0


def run_images(cell: Cell, nodes: Nodes) -> list[int]:
    """Prompts with images that P encodes, then with images that E does: their lengths.

    E's rows cross to P once, in whole blocks.
    """
    (p, d, alone), e, folder = nodes.of(cell), nodes.encoder(cell), nodes.model(cell.family)
    before, lengths, rows = [side.books().counters for side in (p, d, e)], [], 0
    for encoder in (None, e):
        for sizes in SIZES:
            request = prompt_with_images(folder, sizes)
            prompt, items, asked = request.token_ids, request.items, request.items
            if encoder is not None:
                asked, rows = encode(encoder, items), rows + sum(i.padded_rows for i in items)
            got = hand_over(p, d, prompt, items=asked)
            assert got == generate(alone, prompt, items=items), f"{sizes}, encoder: {encoder}"
            lengths.append(len(prompt))
    count = sum(map(len, SIZES))
    books = [side.books() for side in (p, d, e)]
    at_p, at_d, at_e = (gained(side.counters, was) for side, was in zip(books, before, strict=True))
    encoded = 'kvbaton_encoder_items_total{source="%s"}'
    assert [at[encoded % "encoded"] for at in (at_p, at_d, at_e)] == [count, 0, count]
    assert at_p[encoded % "transferred"] == count
    model = load_model_config(folder)
    row = model.require_vision().levels * model.hidden_size * ITEM_SIZE[model.dtype]
    for name in ("needed", "posted", "sent"):
        assert at_e[f"kvbaton_transfer_{name}_bytes_total"] == rows * row
    assert at_p["kvbaton_encoder_transfer_digests_failed_total"] == 0
    assert (books[2].leftovers, books[2].imbalance) == ({}, 0)
    return lengths


def gained(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in now.items()}

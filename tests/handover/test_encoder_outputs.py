"""Encoder outputs cross like KV: from a node that encodes to one that wants the rows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from kvbaton.connectors.keys import block_keys, root_key
from kvbaton.engine.build import encoder_identity
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.model_config import load_model_config
from kvbaton.engine.request import extras_of
from kvbaton.messages.engine import Item, TransferSpec
from tests.support.chats import picture
from tests.support.encoder_items import expected_rows, item_of, padded, request_for, worker_of
from tests.support.engine_node import Call, Hold, Node
from tests.support.engine_pair import Pair
from tests.support.waiting import until

ENCODER: dict[str, Any] = {"encoder_only": True, "encoder_cache_tokens": 1024}
SIZES = ((80, 50), (64, 64), (33, 17), (31, 160), (80, 80))


@pytest.fixture(scope="session", params=["qwen2_5_vl", "qwen3_vl"])
def folder(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(family=request.param)


@pytest.fixture
def items(folder: Path) -> list[Item]:
    return [item_of(folder, picture(seed, *size)) for seed, size in enumerate(SIZES)]


@pytest.fixture
def encoders(make_pair: Callable[..., Pair]) -> Callable[..., Pair]:
    """Makes pairs of encoders: P encodes, D receives."""

    def make(d: dict[str, Any] | None = None, **settings: Any) -> Pair:
        return make_pair(p=ENCODER, d=ENCODER | (d or {}), **settings)

    return make


def hand_over(pair: Pair, item: Item, name: str, *, data: bool = True) -> tuple[Call, Call]:
    """Ask P to encode an item for D; D gets the image too if it shall be able to help itself."""
    transfer_id = os.urandom(16)
    source = TransferSpec(role="source", transfer_id=transfer_id)
    target = TransferSpec(role="target", transfer_id=transfer_id, peer=pair.address)
    wanted = item if data else msgspec.structs.replace(item, data=b"")
    return (
        pair.p.add(request_for(item, name, transfer=source)),
        pair.d.add(request_for(wanted, name, transfer=target)),
    )


def rows_in(node: Node, folder: Path, item: Item) -> Tensor:
    """What a node's cache holds of an item: [padded, levels, hidden]."""
    model = load_model_config(folder)
    identity = encoder_identity(EngineConfig(model=str(folder)), model)
    root = root_key(identity.digest(), "")
    chain = block_keys(root, (0,) * padded(item), 32, extras=extras_of((item,)))
    blocks = torch.tensor(node.scheduler.blocks.pool.match(chain))
    assert len(blocks) == len(chain), "not all of it is cached"
    offsets = torch.arange(32).repeat(len(blocks))
    return worker_of(node.core.executor).cache.gather(blocks.repeat_interleave(32), offsets)


def encoded(node: Node) -> float:
    return node.counters()['kvbaton_encoder_items_total{source="encoded"}']


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_rows_move_and_nobody_encodes_twice(
    encoders: Callable[..., Pair], folder: Path, items: list[Item], transport: str
) -> None:
    pair = encoders(transport=transport)
    calls = [hand_over(pair, item, f"r{n}", data=False) for n, item in enumerate(items)]
    for _, call in calls:
        assert call.result() == [0]
    pair.settle()
    for item in items:
        rows = rows_in(pair.d, folder, item)
        assert torch.equal(rows, rows_in(pair.p, folder, item))
        assert rows[: item.length].abs().sum(2).all()
        assert not rows[item.length :].any()
    counters = pair.d.counters()
    total = sum(map(padded, items))
    assert counters['kvbaton_prompt_tokens_total{source="transferred"}'] == total
    assert counters["kvbaton_transfer_digests_failed_total"] == 0
    assert (encoded(pair.p), encoded(pair.d)) == (len(items), 0)


def test_an_item_that_both_have_moves_nothing(
    encoders: Callable[..., Pair], items: list[Item]
) -> None:
    pair = encoders()
    for number in range(2):
        assert hand_over(pair, items[0], f"r{number}", data=False)[1].result() == [0]
        pair.settle()
    moved = pair.d.counters()['kvbaton_prompt_tokens_total{source="transferred"}']
    assert moved == padded(items[0])
    assert encoded(pair.p) == 1


def test_equal_items_at_once_are_encoded_once(
    encoders: Callable[..., Pair], items: list[Item]
) -> None:
    pair = encoders()
    calls = [hand_over(pair, items[0], f"r{number}", data=False) for number in range(4)]
    assert [call.result() for pair_of in calls for call in pair_of] == [[0]] * 8
    pair.settle()
    assert encoded(pair.p) == 1


def test_a_flipped_byte_is_seen_and_the_target_encodes(
    encoders: Callable[..., Pair], folder: Path, items: list[Item]
) -> None:
    pair = encoders(transport="faulty:" + json.dumps({"inner": "memory", "corrupt": [0]}))
    assert hand_over(pair, items[0], "r")[1].result() == [0]
    pair.settle()
    assert pair.d.counters()["kvbaton_transfer_digests_failed_total"] == 1
    assert encoded(pair.d) == 1
    rows = rows_in(pair.d, folder, items[0])[: items[0].length]
    torch.testing.assert_close(rows, expected_rows(folder, items[0]))


def test_an_image_that_p_cant_decode_is_an_error_on_both_and_harms_nobody(
    encoders: Callable[..., Pair], items: list[Item]
) -> None:
    pair = encoders()
    cut = msgspec.structs.replace(items[0], data=items[0].data[:80])
    bad, good = hand_over(pair, cut, "bad"), hand_over(pair, items[1], "good", data=False)
    for call in bad:
        call.result()
        assert call.finish_reason == "error"
        assert "can't decode the image" in (call.error or "")
    assert [call.result() for call in good] == [[0], [0]]
    pair.settle()


def test_without_the_image_a_lost_source_is_an_error(
    encoders: Callable[..., Pair], items: list[Item]
) -> None:
    pair = encoders(d={"kv_load_failure_policy": "fail"})
    cut = msgspec.structs.replace(items[0], data=items[0].data[:80])
    with Hold(pair.p.core.executor.group.threads[0]):
        _, call = hand_over(pair, cut, "r")
        until(lambda: pair.p.leases() == 1, "a reservation")
    call.result()
    assert "could not be loaded" in (call.error or "")
    assert "can't decode the image" in (call.error or ""), "P says why"
    assert encoded(pair.d) == 0
    pair.settle()


def test_a_second_life_loads_what_the_first_encoded(
    folder: Path, items: list[Item], tmp_path: Path
) -> None:
    settings = ENCODER | {"store": f'filesystem:{{"path": "{tmp_path}"}}'}
    kept: list[Tensor] = []
    for life in range(2):
        node = Node("e", folder, **settings, store_lookup_timeout=20.0)
        for number, item in enumerate(items):
            assert node.add(request_for(item, f"r{number}")).result() == [0]
        until(lambda: node.ask("drain"), "everything is saved")  # noqa: B023
        assert encoded(node) == (0 if life else len(items))
        rows = [rows_in(node, folder, item) for item in items]
        assert not kept or all(map(torch.equal, kept, rows))
        kept = [tensor.clone() for tensor in rows]
        assert node.imbalance == 0
        node.mailbox.kill()
        node.bury()

"""Items at a node's door: what reaches the engine, and what is refused by name."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kvbaton.text.tokenizer import Tokenizer
from tests.node_server.conftest import Node, served

GENERATE = "/inference/v1/generate"
DATA = b"an image, which is decoded by the engine only"
TRANSFER = {
    "role": "target",
    "transfer_id": b64encode(bytes(16)).decode(),
    "peer": "tcp://127.0.0.1:5",
    "peer_node": "e",
}


@pytest.fixture
async def seeing(checkpoint: Callable[..., Path]) -> AsyncIterator[Node]:
    """A node whose model takes images."""
    async with served(Tokenizer.load(checkpoint(family="qwen2_5_vl")), "Hi.") as node:
        yield node


def prompt(node: Node, *items: dict[str, Any]) -> dict[str, Any]:
    """Two words, six placeholders, two words, six placeholders; and items of six rows."""
    vision = node.client.tokenizer.vision
    assert vision is not None
    pads = [vision.image_token_id] * 6
    item = {
        "start": 2,
        "length": 6,
        "grid": [1, 4, 6],
        "digest": b64encode(vision.digest(DATA)).decode(),
        "data": b64encode(DATA).decode(),
    }
    return {
        "token_ids": [50, 51, *pads, 52, 53, *pads],
        "items": [item | changes for changes in items],
        "sampling_params": {"max_tokens": 2},
    }


async def test_items_reach_the_engine(seeing: Node) -> None:
    handed = {"start": 10, "transfer": TRANSFER, "data": ""}
    status, answer = await seeing.post(GENERATE, prompt(seeing, {}, handed))
    assert status == 200, answer
    first, second = seeing.client.requests[0].items
    assert (first.start, first.length, first.grid, first.data) == (2, 6, (1, 4, 6), DATA)
    assert first.transfer is None
    assert second.transfer is not None
    assert (second.start, second.data, second.transfer.peer) == (10, b"", TRANSFER["peer"])
    assert first.digest == second.digest


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([{"start": 10}, {}], "items[1]"),
        ([{}, {}], "items[1]"),
        ([{}, {"start": 7}], "items[1]"),
        ([{"start": 1}], "items[0]"),
        ([{"start": 3}], "items[0]"),
        ([{"start": 11}], "items[0]"),
        ([{"start": 1 << 40}], "items[0]"),
        ([{"length": 5}], "items[0]"),
        ([{"length": 1 << 30}], "items[0]"),
        ([{"grid": [1, 6, 6]}], "items[0]"),
        ([{"grid": [2, 2, 6]}], "items[0]"),
        ([{"grid": [1, 3, 8]}], "items[0]"),
        ([{"grid": [1, 0, 0]}], "items[0]"),
        ([{"digest": b64encode(bytes(32)).decode()}], "items[0]"),
        ([{"data": b64encode(b"another").decode()}], "items[0]"),
        ([{"data": ""}], "items[0]"),
        ([{"transfer": TRANSFER | {"role": "source"}}], "items[0].transfer"),
        ([{"transfer": TRANSFER | {"peer": None}}], "items[0].transfer"),
        ([{"transfer": TRANSFER | {"peer": "tcp://[half"}}], "items[0].transfer"),
        ([{"transfer": TRANSFER | {"peer": "tcp://127.0.0.1:x"}}], "items[0].transfer"),
        ([{"transfer": TRANSFER | {"peer": "tcp://127.0.0.1"}}], "items[0].transfer"),
        ([{"transfer": TRANSFER | {"peer": "tcp://127.0.0.1:5/x"}}], "items[0].transfer"),
        ([{"transfer": TRANSFER | {"peer": "tcp://u@127.0.0.1:5"}}], "items[0].transfer"),
        ([{"transfer": TRANSFER | {"peer": "ipc:///tmp/x"}}], "items[0].transfer"),
    ],
)
async def test_what_is_wrong_is_named(seeing: Node, items: Any, param: str) -> None:
    status, answer = await seeing.post(GENERATE, prompt(seeing, *items))
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert seeing.client.requests == []


@pytest.mark.parametrize("peer", ["tcp://node-1.example:7", "tcp://[::1]:7", "tcp://NODE:7"])
async def test_addresses_of_encoder_nodes(seeing: Node, peer: str) -> None:
    body = prompt(seeing, {"transfer": TRANSFER | {"peer": peer}})
    status, answer = await seeing.post(GENERATE, body)
    assert status == 200, answer


async def test_a_text_model_takes_no_items(node: Node, seeing: Node) -> None:
    status, answer = await node.post(GENERATE, prompt(seeing, {}))
    assert (status, answer["error"]["param"]) == (400, "items")
    assert "text only" in answer["error"]["message"]


async def test_a_request_has_only_so_many_items(seeing: Node) -> None:
    status, answer = await seeing.post(GENERATE, prompt(seeing, *[{}] * 65))
    assert status == 400, answer
    assert answer["error"]["param"] == "items"
    assert "--limit-images is 64" in answer["error"]["message"]

"""What nodes are asked: their parts in hand-overs of a prompt and of its items."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from msgspec.structs import replace

from kvbaton.messages.engine import AddRequest, Item, SamplingParams, TransferSpec
from kvbaton.messages.nodes import GenerateRequest, NodeInfo
from kvbaton.router.actions import Leg
from kvbaton.router.pairing import Route


def transfer_params(leg: Leg, route: Route, transfer_id: bytes) -> dict[str, object] | None:
    """A leg's part in the hand-over, in vLLM's field names; None for a node that serves alone."""
    source = route.source
    if source is None:
        return None
    params: dict[str, object] = {
        "do_remote_decode": leg.side == "source",
        "do_remote_prefill": leg.side == "target",
        "transfer_id": transfer_id.hex(),
        "attempt": leg.attempt,
    }
    if leg.side == "target":
        address = urlsplit(source.control_address or "")
        params |= {
            "remote_engine_id": source.node_id,
            "remote_request_id": transfer_id.hex(),
            "remote_host": address.hostname,
            "remote_port": address.port,
            "remote_block_ids": [[]],
            "tp_size": source.tp_size,
        }
    return params


def item_body(
    request: AddRequest, index: int, transfer_id: bytes, attempt: int, deadline_s: float
) -> GenerateRequest:
    """What an encoder node is asked: the item as a prompt of its own, whose KV is its output."""
    item = request.items[index]
    return GenerateRequest(
        token_ids=(0,) * item.padded_rows,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
        request_id=f"{request.request_id[:200]}.{attempt}.{index}",
        stream=True,
        cache_salt=request.cache_salt or None,
        priority=request.priority,
        deadline_s=deadline_s,
        kv_transfer_params={
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer_id.hex(),
            "attempt": attempt,
        },
        items=(replace(item, start=0, transfer=None),),
    )


def prompt_items(
    items: Sequence[Item],
    encoders: Sequence[NodeInfo | None],
    transfer_ids: Sequence[bytes],
    attempt: int,
) -> tuple[Item, ...]:
    """A prompt's items for the node that prefills it: who hands which over. All keep their data."""
    return tuple(
        item if encoder is None else replace(item, transfer=_target(encoder, transfer_id, attempt))
        for item, encoder, transfer_id in zip(
            items, encoders or [None] * len(items), transfer_ids, strict=True
        )
    )


def _target(encoder: NodeInfo, transfer_id: bytes, attempt: int) -> TransferSpec:
    return TransferSpec(
        role="target",
        transfer_id=transfer_id,
        attempt=attempt,
        peer=encoder.control_address,
        peer_node=encoder.node_id,
    )


def rows_left(items: Sequence[Item]) -> list[int]:
    """Rows of each different item that no other node hands over."""
    handed = {item.digest for item in items if item.transfer is not None}
    return list({item.digest: item.length for item in items if item.digest not in handed}.values())

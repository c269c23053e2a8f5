"""Builds the requests to single nodes that a client's request is made of."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from kvbaton.messages.engine import AddRequest, Item, PrefixAt, SamplingParams, TransferSpec
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.loads import NodeLoad
from kvbaton.router.route import Route

Side = Literal["source", "target", "successor", "encoder"]
CLIENT_FAULTS = (400, 413, 422)
"""HTTP statuses with which a node blames the request itself."""


@dataclass(slots=True, eq=False)
class NodeRequest:
    """One request to one node; attempt, side and item identify it within the client's request.

    Attributes:
        attempt: Attempt of the client's request, from 0.
        side: What the node does; a successor becomes the target when it takes over.
        node: The node.
        request: The request that it gets.
        load: The request's load at the node.
        item: Index in the prompt of the item that an encoder encodes; 0 for other sides.
        num_items: Number of different items that the node has to encode itself.
        prefills: Whether the node computes the prompt: a source, or a target that serves alone.
        open: Whether the relay still accepts the node's outputs.
    """

    attempt: int
    side: Side
    node: NodeInfo
    request: AddRequest
    load: NodeLoad
    item: int = 0
    num_items: int = 0
    prefills: bool = False
    open: bool = True

    @property
    def part(self) -> str:
        """The node's part in the client's request, as metrics and marks name it."""
        return "alone" if self.side == "target" and self.prefills else self.side

    @property
    def name(self) -> str:
        """Name of the side for people."""
        return f"encoder of item {self.item}" if self.side == "encoder" else self.side


@dataclass(frozen=True)
class NodeError:
    """Why a request to a node failed.

    Attributes:
        message: Message for people.
        status: HTTP status of the node's answer; None if there was no answer.
        param: `param` of its error.
        code: `code` of its error.
        lost: Whether the node is gone, with all its requests: no sign of overload.
        leaving: Whether it was lost because it was told to stop: then the request is not to blame,
            nor the node that replaces it.
        final: Whether the request would fail on every node, even if resumed.
    """

    message: str
    status: int | None = None
    param: str | None = None
    code: str | None = None
    lost: bool = False
    leaving: bool = False
    final: bool = False

    @property
    def summary(self) -> str:
        """First line, for clients: a node's message may hold a whole traceback."""
        return self.message.partition("\n")[0][:300]

    @property
    def blames_client(self) -> bool:
        """Whether every node would refuse the request; the router's own fields do not count."""
        ours = (self.param or "").startswith(("kv_transfer_params", "transfer"))
        return self.status in CLIENT_FAULTS and not ours


def node_requests(
    request: AddRequest,
    route: Route,
    attempt: int,
    *,
    transfer_id: bytes,
    item_ids: Sequence[bytes],
) -> list[NodeRequest]:
    """All requests to nodes for an attempt: source if there is one, encoders, target.

    The target's comes last: it has time until the prompt is computed.

    Args:
        request: The client's request, with the attempt's id, resumed tokens and remaining deadline.
        route: Nodes that serve the attempt.
        attempt: Its number.
        transfer_id: Transfer id of the prompt's hand-over.
        item_ids: Transfer ids of the items' hand-overs.
    """
    tokens = len(request.token_ids) + len(request.resume_ids)
    items, own_rows, encodings = request.items, dict[bytes, int](), list[NodeRequest]()
    if items:
        items, encodings = _handed_over(request, route.encoders, item_ids, attempt)
        handed = {item.digest for item in items if item.transfer is not None}
        own_rows = {item.digest: item.length for item in items if item.digest not in handed}
    rows, num_items = sum(own_rows.values()), len(own_rows)
    new = max(1, tokens - max(route.cached, route.held))
    prefix = None
    if route.holder is not None:
        assert route.holder.control_address is not None, "a holder has a control address"
        prefix = PrefixAt(peer=route.holder.control_address, num_tokens=route.held)
    work_s = 0.0 if route.predicted is None else route.predicted.work_s
    work_us, late = int(work_s * 1e6), route.predicted is not None and route.predicted.late
    told_s = min(work_s, request.deadline_s)
    prefilled = replace(request, items=items, prefix=prefix, prefill_s=told_s)
    if route.source is None:
        load = NodeLoad(new, 1, tokens, rows, 1, work_us, tokens - new, int(late))
        asked = NodeRequest(attempt, "target", route.target, prefilled, load, 0, num_items, True)
        return [*encodings, asked]
    expected = _received_from(route.source, transfer_id, attempt)
    # The TTFT objective is the source's.
    received = replace(request, transfer=expected, ttft_s=0.0)
    transfer = TransferSpec(role="source", transfer_id=transfer_id, attempt=attempt, goes_on=True)
    pushed = replace(prefilled, transfer=transfer)
    load = NodeLoad(sequences=1, tokens=tokens, pending=1, late=int(late))
    prefill = NodeLoad(new, rows=rows, prefill_us=work_us, cached_tokens=tokens - new)
    return [
        NodeRequest(attempt, "source", route.source, pushed, prefill, 0, num_items, True),
        *encodings,
        # The target needs no encoder outputs: the prompt's KV comes from the source.
        NodeRequest(attempt, "target", route.target, received, load),
    ]


def _handed_over(
    request: AddRequest,
    encoders: Sequence[NodeInfo | None],
    item_ids: Sequence[bytes],
    attempt: int,
) -> tuple[tuple[Item, ...], list[NodeRequest]]:
    """Items for the prefill node, with the encoders that hand them over, and requests to encoders.

    All items keep their data, in case an encoder fails.
    """
    items, encodings = list(request.items), []
    for index, encoder in enumerate(encoders):
        if encoder is not None:
            item, item_id = items[index], item_ids[index]
            asked = _encoding(request, index, item_id, attempt)
            load = NodeLoad(rows=item.length)
            encodings.append(NodeRequest(attempt, "encoder", encoder, asked, load, index, 1))
            items[index] = replace(item, transfer=_received_from(encoder, item_id, attempt))
    return tuple(items), encodings


def _received_from(source: NodeInfo, transfer_id: bytes, attempt: int) -> TransferSpec:
    return TransferSpec(
        role="target",
        transfer_id=transfer_id,
        attempt=attempt,
        peer=source.control_address,
        peer_node=source.node_id,
    )


def _encoding(request: AddRequest, index: int, item_id: bytes, attempt: int) -> AddRequest:
    """Request to an encoder node: the item as a prompt, whose KV is the encoder output."""
    item = request.items[index]
    return AddRequest(
        request_id=f"{request.request_id}.{index}",
        token_ids=array("I", [0]) * item.padded_rows,
        params=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, seed=0),
        priority=request.priority,
        cache_salt=request.cache_salt,
        deadline_s=request.deadline_s,
        transfer=TransferSpec(role="source", transfer_id=item_id, attempt=attempt),
        items=(replace(item, start=0, transfer=None),),
        timed=request.timed,
        traceparent=request.traceparent,
    )

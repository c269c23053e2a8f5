"""What one node is asked for a client's request: its part in hand-overs of prompt and items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from msgspec.structs import replace

from kvbaton.messages.engine import AddRequest, Item, Output, SamplingParams, TransferSpec
from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.pairing import Route

Side = Literal["source", "target", "encoder"]
CLIENT_FAULTS = (400, 413, 422)
"""Statuses with which a node blames the request itself."""


@dataclass(slots=True, eq=False)
class NodeRequest:
    """One request to one node; attempt, side and item name it within the client's request.

    Attributes:
        attempt: of the client's request, from 0.
        side: what the node does for it.
        node: who is asked.
        request: what it is asked.
        item: what an encoder encodes, by its index in the prompt; 0 for other sides.
        open: the relay still heeds what the node says.
    """

    attempt: int
    side: Side
    node: NodeInfo
    request: AddRequest
    item: int = 0
    open: bool = True

    @property
    def name(self) -> str:
        """For people."""
        return f"encoder of item {self.item}" if self.side == "encoder" else self.side

    @property
    def prefills(self) -> bool:
        """Whether the node computes the prompt: a source, or a target that serves alone."""
        alone = self.side == "target" and self.request.transfer is None
        return alone or self.side == "source"

    @property
    def rows(self) -> list[int]:
        """Rows of each different item that the node is to encode itself."""
        if self.side == "target" and not self.prefills:
            return []
        items = self.request.items
        handed = {item.digest for item in items if item.transfer is not None}
        mine = {item.digest: item.length for item in items if item.digest not in handed}
        return list(mine.values())


@dataclass(frozen=True)
class NodeError:
    """Why a node's request failed.

    Attributes:
        message: for people.
        status: the HTTP status that the node answered, or None if there was no answer.
        param: of its error.
        code: of its error.
    """

    message: str
    status: int | None = None
    param: str | None = None
    code: str | None = None

    @property
    def summary(self) -> str:
        """For a client: what a node reports may hold a whole traceback."""
        return self.message.partition("\n")[0][:300]

    @property
    def blames_client(self) -> bool:
        """Whether no node would take this request; what the router itself added is our fault."""
        ours = (self.param or "").startswith(("kv_transfer_params", "transfer"))
        return self.status in CLIENT_FAULTS and not ours


class Listener(Protocol):
    """Who hears what a node says to a request."""

    def output(self, asked: NodeRequest, output: Output) -> None:
        """It made tokens."""
        ...

    def ended(self, asked: NodeRequest) -> None:
        """It has said all, in good order."""
        ...

    def failed(self, asked: NodeRequest, error: NodeError, *, unreachable: bool = False) -> None:
        """It refused, or broke off; `unreachable` says that nobody listens at its address."""
        ...


def node_requests(
    request: AddRequest,
    route: Route,
    attempt: int,
    *,
    transfer_id: bytes,
    item_ids: Sequence[bytes],
) -> list[NodeRequest]:
    """All that an attempt asks of nodes: target, source if there is one, encoders.

    Args:
        request: as an attempt goes on with it: resumed tokens and remaining deadline are set.
        route: who serves the attempt.
        attempt: its number.
        transfer_id: of the prompt's hand-over.
        item_ids: transfer ids of the items' hand-overs.
    """
    # Ids of their own for each attempt: a node may not yet have buried the last one.
    request = replace(request, request_id=f"{request.request_id[:200]}.{attempt}")
    items = _handed_over(request.items, route.encoders, item_ids, attempt)
    if route.source is None:
        asked = [NodeRequest(attempt, "target", route.target, replace(request, items=items))]
    else:
        transfer = _received_from(route.source, transfer_id, attempt)
        pushed = TransferSpec(role="source", transfer_id=transfer_id, attempt=attempt)
        # The target needs no items: the prompt's KV comes from the source.
        asked = [
            NodeRequest(attempt, "target", route.target, replace(request, transfer=transfer)),
            NodeRequest(
                attempt, "source", route.source, replace(request, transfer=pushed, items=items)
            ),
        ]
    return asked + [
        NodeRequest(
            attempt, "encoder", encoder, _encoding(request, index, item_ids[index], attempt), index
        )
        for index, encoder in enumerate(route.encoders)
        if encoder is not None
    ]


def _handed_over(
    items: Sequence[Item],
    encoders: Sequence[NodeInfo | None],
    item_ids: Sequence[bytes],
    attempt: int,
) -> tuple[Item, ...]:
    """Items for the node that prefills: which come from whom. All keep their data, in case."""
    return tuple(
        item
        if encoder is None
        else replace(item, transfer=_received_from(encoder, item_id, attempt))
        for item, encoder, item_id in zip(
            items, encoders or [None] * len(items), item_ids, strict=True
        )
    )


def _received_from(source: NodeInfo, transfer_id: bytes, attempt: int) -> TransferSpec:
    return TransferSpec(
        role="target",
        transfer_id=transfer_id,
        attempt=attempt,
        peer=source.control_address,
        peer_node=source.node_id,
    )


def _encoding(request: AddRequest, index: int, item_id: bytes, attempt: int) -> AddRequest:
    """What an encoder node is asked: the item as a prompt of its own, whose KV is its output."""
    item = request.items[index]
    return AddRequest(
        request_id=f"{request.request_id}.{index}",
        token_ids=(0,) * item.padded_rows,
        params=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, seed=0),
        priority=request.priority,
        cache_salt=request.cache_salt,
        deadline_s=request.deadline_s,
        transfer=TransferSpec(role="source", transfer_id=item_id, attempt=attempt),
        items=(replace(item, start=0, transfer=None),),
    )

"""What a node brings to hand-overs: transports with memory registered, and its identity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from kvbaton.connectors.protocol.events import Identity
from kvbaton.messages.control import RankCard
from kvbaton.types import NodeId, TransferTimers

if TYPE_CHECKING:
    from kvbaton.connectors.base import Memory, Transport
    from kvbaton.connectors.layout import KVLayout


@dataclass(frozen=True)
class HandoverConfig:
    """A node's settings for hand-overs.

    Attributes:
        transport: ``NAME[:JSON]`` or a dotted path; see `registry.load_transport`.
        host: address that control channel and transport listen on.
        control_port: of the control channel; 0 takes a free one.
        cluster_key: secret shared by all nodes; without it everything stays on loopback.
        peers: control addresses that may be dialled beside those the router vouches for.
        timers: of the protocol.
        max_transfers: hand-overs that a source has alive at once; it puts off those beyond.
        max_blocks_per_peer: blocks that a target has reserved or in quarantine for one source;
            None for no limit.
    """

    transport: str = "nixl"
    host: str = "127.0.0.1"
    control_port: int = 0
    cluster_key: str | None = field(default=None, repr=False)
    peers: tuple[str, ...] = ()
    timers: TransferTimers = field(default_factory=TransferTimers)
    max_transfers: int = 65_536
    max_blocks_per_peer: int | None = None


@dataclass(frozen=True)
class Endpoint:
    """What one side of a node's hand-overs brings.

    Attributes:
        transports: one per rank, its memory registered.
        identity: what the node says of itself.
    """

    transports: list[Transport]
    identity: Identity


def open_endpoint(
    config: HandoverConfig,
    node: NodeId,
    side: Literal["source", "target"],
    digest: bytes,
    record: dict[str, str],
    memories: Sequence[Sequence[Memory]],
    layouts: Sequence[Sequence[KVLayout]],
) -> Endpoint:
    """Open a side's transports, and register each rank's memory in order.

    Args:
        config: settings.
        node: this life of this node.
        side: of hand-overs that they are for.
        digest: of its identity record.
        record: the identity record, readable.
        memories: per rank, the pools of its groups.
        layouts: per rank, one layout per group.

    Raises:
        ConfigError: the transport is unknown, or can't start.
        TransportError: memory can't be registered.
    """
    # Here, since the HTTP process wants the settings above, and no numpy.
    from kvbaton.connectors.registry import load_transport

    transports, cards = [], []
    for rank, (pools, groups) in enumerate(zip(memories, layouts, strict=True)):
        name = f"{node.node}-{node.generation.hex()}-{side}-{rank}"
        transport = load_transport(config.transport, name=name, host=config.host)
        for memory in pools:
            transport.register(memory)
        transports.append(transport)
        cards.append(RankCard(rank, transport.card(), msgspec.msgpack.encode(list(groups))))
    kind = config.transport.partition(":")[0]
    return Endpoint(transports, Identity(node, digest, record, kind, tuple(cards)))

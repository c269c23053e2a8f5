"""What a node brings to a hand-over: its transports with memory registered, and its identity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from kvbaton.connectors.protocol.events import Identity, TransferTimers
from kvbaton.wire import NodeId, RankCard

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
    """

    transport: str = "nixl"
    host: str = "127.0.0.1"
    control_port: int = 0
    cluster_key: str | None = field(default=None, repr=False)
    peers: tuple[str, ...] = ()
    timers: TransferTimers = field(default_factory=TransferTimers)


def open_transports(
    config: HandoverConfig, node: NodeId, memories: Sequence[Sequence[Memory]]
) -> list[Transport]:
    """One transport per rank, with the rank's memory registered in order.

    Raises:
        ConfigError: the transport is unknown, or can't start.
        TransportError: memory can't be registered.
    """
    # Here, since the HTTP process wants the settings above, and no numpy.
    from kvbaton.connectors.registry import load_transport

    transports = []
    for rank, pools in enumerate(memories):
        name = f"{node.node}-{node.generation.hex()}-{rank}"
        transport = load_transport(config.transport, name=name, host=config.host)
        for memory in pools:
            transport.register(memory)
        transports.append(transport)
    return transports


def make_identity(
    config: HandoverConfig,
    node: NodeId,
    digest: bytes,
    record: dict[str, str],
    transports: Sequence[Transport],
    layouts: Sequence[Sequence[KVLayout]],
) -> Identity:
    """What the node says of itself in `Hello` and `Welcome`."""
    cards = tuple(
        RankCard(rank, transport.card(), msgspec.msgpack.encode(list(layouts[rank])))
        for rank, transport in enumerate(transports)
    )
    return Identity(node, digest, record, config.transport.partition(":")[0], cards)

"""Settings of hand-overs."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbaton.types import TransferTimers


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

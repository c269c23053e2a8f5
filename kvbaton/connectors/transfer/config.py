"""Settings of hand-overs."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbaton.types import TransferTimers


@dataclass(frozen=True)
class HandoverConfig:
    """A node's settings for hand-overs.

    Attributes:
        transport: ``NAME[:JSON]`` or a dotted path; see `registry.load_transport`.
        host: Address that control channel and transport listen on.
        control_port: Port of the control channel; 0 takes a free one.
        cluster_key: Secret shared by all nodes; without it everything stays on loopback.
        peers: Control addresses that may be dialled beside those that the router vouches for.
        timers: Timers of the protocol.
        max_transfers: Maximum number of live hand-overs of a source; it refuses others for now.
        max_blocks_per_peer: Maximum number of blocks that a target has reserved or in quarantine
            for one source; None for no limit.
    """

    transport: str = "nixl"
    host: str = "127.0.0.1"
    control_port: int = 0
    cluster_key: str | None = field(default=None, repr=False)
    peers: tuple[str, ...] = ()
    timers: TransferTimers = field(default_factory=TransferTimers)
    max_transfers: int = 65_536
    max_blocks_per_peer: int | None = None

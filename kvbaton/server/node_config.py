"""A node's settings: one frozen dataclass; command-line defaults are read from it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from kvbaton.config import Port, flag
from kvbaton.connectors.transfer.endpoint import HandoverConfig
from kvbaton.engine.config import EngineConfig
from kvbaton.errors import ConfigError
from kvbaton.server.cluster_token import is_loopback
from kvbaton.server.endpoint_config import EndpointConfig

NodeRole = Literal["prefill", "decode", "encode"]


@dataclass(frozen=True, kw_only=True)
class NodeConfig(EndpointConfig):
    """All that a node needs to know.

    Attributes:
        engine: settings of its engine.
        role: what it does for others.
        node_id: its name, stable over its lives.
        router: base URL of the router to register with; None for a node that stands alone or is
            named by the router's flags.
        peers: control addresses ``tcp://host:port`` that may be dialled beside those the router
            vouches for.
        transport: ``NAME[:JSON]``.
        control_port: of the control channel; 0 takes a free one.
        workers: processes that answer HTTP on the port.
        engine_port: where the engine listens for routers, if there is a cluster key; 0 takes a free
            one.
        max_transfers: hand-overs that a prefill node has alive at once.
        max_blocks_per_peer: blocks that a decode node has reserved or in quarantine for one prefill
            node; None for no limit.
        grace_s: how long requests and hand-overs may go on after the node was told to stop.

    Raises:
        ConfigError: values that do not fit together.
    """

    GROUP: ClassVar[str | None] = "node"

    engine: EngineConfig
    role: NodeRole
    router: str | None = flag(None, "register with this router", metavar="URL")
    peers: tuple[str, ...] = flag(
        (),
        "control address that may be dialled; may be given more than once",
        name="--peer",
        action="append",
        metavar="tcp://HOST:PORT",
    )
    control_port: Port = flag(0, metavar="PORT")
    engine_port: Port = flag(
        0,
        "where routers connect to the engine, if there is a cluster key (0: a free one)",
        metavar="PORT",
    )
    workers: int = flag(1, "processes that answer HTTP on the port", metavar="N")
    node_id: str = flag("", "stable name of this node", metavar="NAME")
    max_transfers: int = flag(
        HandoverConfig.max_transfers,
        "hand-overs alive at once; those beyond are put off",
        metavar="N",
    )
    max_blocks_per_peer: int | None = flag(
        None, "blocks reserved or in quarantine for one prefill node (no limit)", metavar="N"
    )
    transport: str = flag("nixl", "moves the KV cache", metavar="NAME[:JSON]", group=None)
    grace_s: float = 5.0

    def __post_init__(self) -> None:
        if self.cluster_key is None and not is_loopback(self.host):
            raise ConfigError(
                "--host", f"{self.host} is not loopback: that needs a --cluster-key of all nodes"
            )
        if not self.node_id or "/" in self.node_id:
            raise ConfigError("--node-id", "must not be empty and not contain a slash")
        for name, limit in (
            ("--workers", self.workers),
            ("--max-transfers", self.max_transfers),
            ("--max-blocks-per-peer", self.max_blocks_per_peer),
        ):
            if limit is not None and limit < 1:
                raise ConfigError(name, f"{limit} is not positive")
        for peer in self.peers:
            _check_peer(peer)
        if self.router is not None and urlsplit(self.router).scheme not in ("http", "https"):
            raise ConfigError("--router", f"{self.router!r} is no http URL")

    @property
    def model_name(self) -> str:
        """As clients name the model."""
        return self.served_model_name or self.engine.model

    @cached_property
    def handover(self) -> HandoverConfig:
        """What hand-overs need of it."""
        mine = {item.name for item in fields(HandoverConfig)} & {item.name for item in fields(self)}
        return HandoverConfig(**{name: getattr(self, name) for name in mine})


def _check_peer(peer: str) -> None:
    try:
        parts = urlsplit(peer)
        ok = parts.scheme == "tcp" and bool(parts.hostname) and bool(parts.port)
    except ValueError:  # a port that is no number
        ok = False
    if not ok:
        raise ConfigError("--peer", f"{peer!r} is not of the form tcp://host:port")

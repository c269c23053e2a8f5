"""A node's settings: one frozen dataclass; command-line defaults are read from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal
from urllib.parse import urlsplit

from kvbaton.connectors.transfer.endpoint import HandoverConfig
from kvbaton.engine.config import EngineConfig
from kvbaton.errors import ConfigError
from kvbaton.server.cluster_token import is_loopback
from kvbaton.server.media import MediaConfig
from kvbaton.text.generation import GenerationConfigMode

NodeRole = Literal["prefill", "decode", "encode"]


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """All that a node needs to know.

    Attributes:
        engine: settings of its engine.
        role: what it does for others.
        node_id: its name, stable over its lives.
        host: address that HTTP, control channel and transport listen on.
        port: of HTTP; 0 takes a free one.
        served_model_name: as clients name the model; None takes the folder as given.
        api_keys: any of them opens the endpoint; none leaves it open.
        router: base URL of the router to register with; None for a node that stands alone or is
            named by the router's flags.
        peers: control addresses ``tcp://host:port`` that may be dialled beside those the router
            vouches for.
        cluster_key: secret shared by all nodes; without it the node must listen on loopback.
        chat_template: file with another chat template than the model's.
        generation_config: whether the model recommends sampling defaults; see `text.generation`.
        media: what images clients may bring.
        transport: ``NAME[:JSON]``.
        control_port: of the control channel; 0 takes a free one.
        engine_port: where the engine listens for routers, if there is a cluster key; 0 takes a free
            one.
        max_transfers: hand-overs that a prefill node has alive at once.
        max_blocks_per_peer: blocks that a decode node has reserved or in quarantine for one prefill
            node; None for no limit.
        log_level: of the log on standard error.
        grace_s: how long requests and hand-overs may go on after the node was told to stop.

    Raises:
        ConfigError: values that do not fit together.
    """

    engine: EngineConfig
    role: NodeRole
    node_id: str
    host: str = "127.0.0.1"
    port: int = 0
    served_model_name: str | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    router: str | None = None
    peers: tuple[str, ...] = ()
    cluster_key: str | None = field(default=None, repr=False)
    chat_template: str | None = None
    generation_config: GenerationConfigMode = "auto"
    media: MediaConfig = field(default_factory=MediaConfig)
    transport: str = "nixl"
    control_port: int = 0
    engine_port: int = 0
    max_transfers: int = HandoverConfig.max_transfers
    max_blocks_per_peer: int | None = None
    log_level: str = "info"
    grace_s: float = 5.0

    def __post_init__(self) -> None:
        if self.cluster_key is None and not is_loopback(self.host):
            raise ConfigError(
                "--host", f"{self.host} is not loopback: that needs a --cluster-key of all nodes"
            )
        if not self.node_id or "/" in self.node_id:
            raise ConfigError("--node-id", "must not be empty and not contain a slash")
        for name, limit in (
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
        return HandoverConfig(
            transport=self.transport,
            host=self.host,
            control_port=self.control_port,
            cluster_key=self.cluster_key,
            peers=self.peers,
            max_transfers=self.max_transfers,
            max_blocks_per_peer=self.max_blocks_per_peer,
        )


def _check_peer(peer: str) -> None:
    try:
        parts = urlsplit(peer)
        ok = parts.scheme == "tcp" and bool(parts.hostname) and bool(parts.port)
    except ValueError:  # a port that is no number
        ok = False
    if not ok:
        raise ConfigError("--peer", f"{peer!r} is not of the form tcp://host:port")

"""Settings of endpoints and nodes; their fields are flags. Imports nothing heavy."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from kvbaton.config import (
    Count,
    Host,
    LogLevel,
    Port,
    Seconds,
    check_positive,
    check_workers,
    flag,
    secret_flag,
)
from kvbaton.connectors.address import check_dialable, host_of, is_loopback
from kvbaton.connectors.transfer.config import HandoverConfig
from kvbaton.engine.config import EngineConfig
from kvbaton.errors import ConfigError
from kvbaton.server.network import TlsConfig
from kvbaton.text.output_parser import ReasoningParserName, ToolCallParserName
from kvbaton.types import MAX_NAME

GenerationConfigMode = Literal["auto", "none"]
"""Defaults of sampling parameters: ``auto`` takes the model's, ``none`` those of the API."""

MEDIA_HOST = re.compile(r"\*|[\w-]+(\.[\w-]+)*\.?|(?=.*:.*:)[0-9a-fA-F:.]+", re.ASCII)
"""A host name (ASCII, as it is resolved), an IPv6 address, or ``*``."""


@dataclass(frozen=True, kw_only=True)
class MediaConfig:
    """Which images clients may send.

    Attributes:
        allowed_media_domains: Hosts that images may be fetched from; a name includes its
            subdomains, and ``*`` is every host. Empty: no image is fetched.
        allow_private_media: Also fetch from private networks and this machine.
        max_images: Maximum number of images in a request.
        max_image_bytes: Maximum bytes of all images of a request.
        image_timeout_s: Seconds within which each image must be fetched.

    Raises:
        ConfigError: An allowed host is not a host name, so it would match nothing.
    """

    GROUP: ClassVar[str | None] = "endpoint"

    allowed_media_domains: tuple[str, ...] = flag(
        (),
        "hosts that images may be fetched from, and their subdomains; * for all (none)",
        nargs="+",
        metavar="HOST",
    )
    allow_private_media: bool = flag(
        False, "also fetch images from private networks and this machine", action="store_true"
    )
    max_images: Count = flag(64, "most images in a request", name="--limit-images", metavar="N")
    max_image_bytes: int = 16 << 20
    image_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        for host in self.allowed_media_domains:
            if MEDIA_HOST.fullmatch(host) is None:
                wrong = f"{host!r} is no host, like example.com (with all below it), nor *"
                raise ConfigError("--allowed-media-domains", wrong)


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """Where an endpoint listens, which clients it serves, and under which model name.

    Attributes:
        host: Address to listen on.
        port: TCP port; 0 takes a free one.
        served_model_name: Names that clients may use for the model; answers and nodes use the
            first. Empty: the model's folder as given, or at the router the names that nodes have.
        chat_template: File with a chat template that replaces the model's.
        tool_call_parser: Parser of tool calls in chats; see `text.output_parser`.
        reasoning_parser: Parser of reasoning in chats.
        generation_config: Whether the model's recommended sampling parameters are defaults; see
            `frontend.sampling_defaults`.
        media: Which images clients may send.
        tls: Certificates.
        api_keys: Keys of clients, any of which is accepted; empty leaves the endpoint open.
        operator_keys: Keys of operators. If there are any, API keys do not give operators' rights:
            tenants have those.
        min_priority: Lowest priority that requests may have. None is 0 if there are several API
            keys, because lower numbers go before requests of other tenants, else any number.
        cluster_key: Secret shared by all nodes and the router; None restricts the cluster to this
            machine.
        allowed_origins: Origins of web pages that may send requests from a browser; * for any.
        timeout_keep_alive_s: Seconds after which a connection is closed that has not sent the
            whole head of a request: it is idle, or the head comes byte by byte.
        shutdown_timeout_s: Seconds that requests and hand-overs may go on after SIGTERM.
        otlp_traces_endpoint: URL to which traces of requests are sent, by OTLP over HTTP; None
            takes ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` of the environment, without which there
            are no traces.
        log_level: Level of the log on standard error.

    Raises:
        ConfigError: A key is empty, so that everybody would know it.
    """

    GROUP: ClassVar[str | None] = "endpoint"

    host: Host = flag("127.0.0.1", "address to listen on", metavar=None)
    port: Port = flag(0, "0 takes a free one", metavar=None)
    served_model_name: tuple[str, ...] = flag(
        (), "names that clients may use; answers use the first", nargs="+", metavar="NAME"
    )
    chat_template: str | None = flag(
        None, "jinja template to use instead of the model's", metavar="FILE"
    )
    tool_call_parser: ToolCallParserName = flag(
        "auto", "how the model writes tool calls; auto looks at its chat template"
    )
    reasoning_parser: ReasoningParserName = flag("auto", "how the model writes its reasoning")
    generation_config: GenerationConfigMode = flag(
        "auto", "whether the model's generation_config.json gives sampling defaults"
    )
    media: MediaConfig = field(default_factory=MediaConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    api_keys: tuple[str, ...] = secret_flag(
        "clients need one", "KVBATON_API_KEY", (), name="--api-key", nargs="+", metavar="KEY"
    )
    operator_keys: tuple[str, ...] = secret_flag(
        "operators need one, instead of an --api-key",
        "KVBATON_OPERATOR_KEY",
        (),
        name="--operator-key",
        nargs="+",
        metavar="KEY",
    )
    min_priority: int | None = flag(
        None,
        "lowest priority that requests may have; lower goes first (0 with several keys, else any)",
        metavar="N",
    )
    cluster_key: str | None = secret_flag(
        "secret of all nodes and the router", "KVBATON_CLUSTER_KEY", metavar="SECRET"
    )
    allowed_origins: tuple[str, ...] = flag(
        (),
        "origins of web pages that may send requests, as https://chat.example; * for all (none)",
        nargs="+",
        metavar="ORIGIN",
    )
    timeout_keep_alive_s: Seconds = flag(
        120.0,
        "seconds until a connection without a whole request head is closed; set it longer than "
        "proxies in front keep theirs open",
        name="--timeout-keep-alive",
        metavar="S",
    )
    shutdown_timeout_s: Seconds = flag(
        5.0,
        "seconds that requests and hand-overs may go on after SIGTERM",
        name="--shutdown-timeout",
        metavar="S",
    )
    otlp_traces_endpoint: str | None = flag(
        None,
        "where traces of requests are sent, by OTLP over HTTP; needs kvbaton[otel] "
        "($OTEL_EXPORTER_OTLP_TRACES_ENDPOINT)",
        metavar="URL",
    )
    log_level: LogLevel = flag(
        "info", "level of the log on standard error ($KVBATON_LOG_FORMAT=json: as JSON)"
    )

    def __post_init__(self) -> None:
        for key in self.api_keys:
            check_api_key("--api-key", key)
        for key in self.operator_keys:
            check_api_key("--operator-key", key)
        check_secret("--cluster-key", self.cluster_key)
        if (self.min_priority or 0) > 0:
            raise ConfigError("--min-priority", f"{self.min_priority} is above 0, which is usual")
        if not all(self.served_model_name):
            raise ConfigError("--served-model-name", "is empty; give a name, or leave it out")
        for origin in self.allowed_origins:
            if origin != "*":
                check_url("--allowed-origins", origin)
                if urlsplit(origin).path:
                    raise ConfigError("--allowed-origins", f"{origin!r} is none: it has a path")
        if not self.timeout_keep_alive_s:  # aiohttp would wait for ever
            raise ConfigError("--timeout-keep-alive", "must be above 0")


def check_secret(name: str, value: str | None) -> None:
    """Raise `ConfigError` for a secret that is empty (from an unset variable) or not UTF-8."""
    if value is not None and not value.strip():
        raise ConfigError(name, "is empty; give a secret, or leave it out")
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:
        raise ConfigError(name, "is not UTF-8") from error


def check_api_key(name: str, value: str | None) -> None:
    """Raise `ConfigError` for what `check_secret` refuses, and for several words.

    In environment variables each word is a key, so each word alone would be accepted.
    """
    check_secret(name, value)
    if value is not None and value.split() != [value]:
        raise ConfigError(name, "has white space; a key is one word, and several are several keys")


def check_url(name: str, url: str) -> None:
    """Raise `ConfigError` for a URL that is not of HTTP."""
    try:
        parts = urlsplit(url)
        ok = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        ok = False
    if not ok:
        raise ConfigError(name, f"{url!r} is no http URL (http://HOST:PORT)")


@dataclass(frozen=True, kw_only=True)
class ModelEndpointConfig(EndpointConfig):
    """An endpoint that has one or several engines of its own.

    Attributes:
        engine: Settings of each engine.
        transport: Transport of hand-overs, ``NAME[:JSON]``.

    Raises:
        ConfigError: There is no such transport.
    """

    engine: EngineConfig
    transport: str = flag("nixl", "moves the KV cache", metavar="NAME[:JSON]", group=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        from kvbaton.connectors.registry import TRANSPORTS, check_spec

        check_spec(TRANSPORTS, self.transport)  # before an engine starts in vain

    @property
    def model_name(self) -> str:
        """Name of the model in answers."""
        return next(iter(self.served_model_name), self.engine.model)


NodeRole = Literal["any", "prefill", "decode", "encode"]
"""``any`` is source and target of hand-overs; ``prefill`` and ``decode`` are one of the two."""


@dataclass(frozen=True, kw_only=True)
class NodeConfig(ModelEndpointConfig):
    """All settings of a node.

    Attributes:
        role: What the node does for others.
        node_id: Name of the node, the same after a restart.
        routers: Base URLs of the routers to register with; a host name stands for every address
            that it resolves to. Empty for a node that is alone or named by the router's flags.
        peers: Control addresses ``tcp://host:port`` that the node may connect to, beside those that
            the router vouches for.
        control_port: Port of the control channel; 0 takes a free one.
        workers: Number of processes that answer HTTP on the port.
        engine_port: Port on which the engine listens for routers, if there is a cluster key; 0
            takes a free one.
        max_transfers: Maximum number of live hand-overs of a source.
        max_blocks_per_peer: Maximum number of blocks that a target has reserved or in quarantine
            for one source; None for no limit.

    Raises:
        ConfigError: Values that do not fit together.
    """

    GROUP: ClassVar[str | None] = "node"

    role: NodeRole
    routers: tuple[str, ...] = flag(
        (),
        "register with this router, or with all that its host name resolves to; may be given again",
        name="--router",
        action="append",
        metavar="URL",
    )
    peers: tuple[str, ...] = flag(
        (),
        "control address that the node may connect to; may be given again",
        name="--peer",
        action="append",
        metavar="tcp://HOST:PORT",
    )
    control_port: Port = flag(0, "port for other nodes' control messages", metavar="PORT")
    engine_port: Port = flag(
        0,
        "port for routers' connections to the engine, if there is a cluster key (0: a free one)",
        metavar="PORT",
    )
    workers: int = flag(1, "processes that answer HTTP on the port", metavar="N")
    node_id: str = flag("", "stable name of this node", metavar="NAME")
    max_transfers: int = flag(
        HandoverConfig.max_transfers,
        "most live hand-overs; further ones are put off",
        metavar="N",
    )
    max_blocks_per_peer: int | None = flag(
        None, "most blocks reserved or in quarantine for one source (no limit)", metavar="N"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_dialable(self.host)  # a node says where it is: to the router, and to its peers
        if self.cluster_key is None and not is_loopback(self.host):
            raise ConfigError(
                "--host", f"{self.host} is not loopback: that needs a --cluster-key of all nodes"
            )
        own = self.node_id
        if not 0 < len(own) <= MAX_NAME or "/" in own or not own.isprintable():
            problem = f"must have 1 to {MAX_NAME} printable characters, and no slash among them"
            raise ConfigError("--node-id", problem)
        check_workers(self.workers)
        check_positive("--max-transfers", self.max_transfers)
        check_positive("--max-blocks-per-peer", self.max_blocks_per_peer)
        for peer in self.peers:
            try:
                host_of(peer)
            except ValueError:
                problem = f"{peer!r} is not of the form tcp://host:port"
                raise ConfigError("--peer", problem) from None
        for router in self.routers:
            check_url("--router", router)

    @cached_property
    def handover(self) -> HandoverConfig:
        """The settings of hand-overs among these."""
        mine = {item.name for item in fields(HandoverConfig)} & {item.name for item in fields(self)}
        return HandoverConfig(**{name: getattr(self, name) for name in mine})

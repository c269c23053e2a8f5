"""Settings of endpoints and nodes, whose fields are flags; imports nothing heavy."""

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
"""``auto`` takes the model's recommendations as defaults, ``none`` the API's own defaults."""

MEDIA_HOST = re.compile(r"\*|[\w-]+(\.[\w-]+)*\.?|(?=.*:.*:)[0-9a-fA-F:.]+", re.ASCII)
"""Names are compared as they are dialled, in ASCII."""


@dataclass(frozen=True, kw_only=True)
class MediaConfig:
    """What images clients may bring.

    Attributes:
        allowed_media_domains: hosts that images may be fetched from; a name also stands for those
            below it, and ``*`` for all. None are visited by default.
        allow_private_media: also visit addresses in private networks, and this machine.
        max_images: of one request.
        max_image_bytes: of all images of one request.
        image_timeout_s: in which each must have been fetched.

    Raises:
        ConfigError: what should be a host is none, and would let nothing in.
    """

    GROUP: ClassVar[str | None] = "endpoint"

    allowed_media_domains: tuple[str, ...] = flag(
        (),
        "hosts that images are fetched from, those below them too; * for all (none)",
        nargs="+",
        metavar="HOST",
    )
    allow_private_media: bool = flag(
        False, "fetch images from private networks and this machine, too", action="store_true"
    )
    max_images: Count = flag(64, "of one request", name="--limit-images", metavar="N")
    max_image_bytes: int = 16 << 20
    image_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        for host in self.allowed_media_domains:
            if MEDIA_HOST.fullmatch(host) is None:
                wrong = f"{host!r} is no host, like example.com (with all below it), nor *"
                raise ConfigError("--allowed-media-domains", wrong)


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """Where an endpoint listens, whom it serves, and as what.

    Attributes:
        host: address to listen on.
        port: 0 takes a free one.
        served_model_name: as clients may name the model, of which answers and nodes say the first;
            without any its folder as given, or at the router the nodes' own names.
        chat_template: file with another chat template than the model's.
        tool_call_parser: which calls are told apart in chats; see `text.output_parser`.
        reasoning_parser: the same for reasoning.
        generation_config: whether the model recommends sampling defaults; see
            `frontend.sampling_defaults`.
        media: what images clients may bring.
        tls: certificates.
        api_keys: any of them opens the endpoint; none leaves it open.
        operator_keys: open what is for operators, and then no API key does: tenants have those.
        min_priority: lowest that requests may name; None is 0 where there are several keys, since
            lower ones go before those of other tenants, and any number elsewhere.
        cluster_key: secret shared by all nodes and the router; None restricts the cluster to this
            machine.
        allowed_origins: of web pages that may ask from a browser; * for any.
        timeout_keep_alive_s: a connection is closed that has brought no whole head of a request
            for so long: because it is idle, or because somebody sends it by drops.
        shutdown_timeout_s: how long requests and hand-overs may go on after SIGTERM.
        otlp_traces_endpoint: where traces of requests go, by OTLP over HTTP; None takes what the
            environment says (``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT``), and makes none if it says
            nothing.
        log_level: of the log on standard error.

    Raises:
        ConfigError: a key is empty, which everybody would know.
    """

    GROUP: ClassVar[str | None] = "endpoint"

    host: Host = flag("127.0.0.1", "address to listen on", metavar=None)
    port: Port = flag(0, "0 takes a free one", metavar=None)
    served_model_name: tuple[str, ...] = flag(
        (), "as clients may name the model; answers say the first", nargs="+", metavar="NAME"
    )
    chat_template: str | None = flag(
        None, "jinja template to use instead of the model's", metavar="FILE"
    )
    tool_call_parser: ToolCallParserName = flag(
        "auto", "how the model writes calls of tools; auto looks at its chat template"
    )
    reasoning_parser: ReasoningParserName = flag("auto", "the same for its reasoning")
    generation_config: GenerationConfigMode = flag(
        "auto", "whether the model's generation_config.json gives sampling defaults"
    )
    media: MediaConfig = field(default_factory=MediaConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    api_keys: tuple[str, ...] = secret_flag(
        "asked of clients", "KVBATON_API_KEY", (), name="--api-key", nargs="+", metavar="KEY"
    )
    operator_keys: tuple[str, ...] = secret_flag(
        "asked of operators, in place of --api-key",
        "KVBATON_OPERATOR_KEY",
        (),
        name="--operator-key",
        nargs="+",
        metavar="KEY",
    )
    min_priority: int | None = flag(
        None,
        "lowest priority that requests may name; lower goes first (0 with several keys, else any)",
        metavar="N",
    )
    cluster_key: str | None = secret_flag(
        "shared by all nodes and the router", "KVBATON_CLUSTER_KEY", metavar="SECRET"
    )
    allowed_origins: tuple[str, ...] = flag(
        (),
        "web pages from there may ask from a browser, as https://chat.example; * for all (none)",
        nargs="+",
        metavar="ORIGIN",
    )
    timeout_keep_alive_s: Seconds = flag(
        120.0,
        "seconds that a connection may be without a whole head of a request; longer than proxies "
        "in front keep theirs open",
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
        "send a trace of each request there, by OTLP over HTTP; needs kvbaton[otel] "
        "($OTEL_EXPORTER_OTLP_TRACES_ENDPOINT)",
        metavar="URL",
    )
    log_level: LogLevel = flag("info")

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
    """Raise `ConfigError` for a secret that is empty, as of a variable that was not set."""
    if value is not None and not value.strip():
        raise ConfigError(name, "is empty; give a secret, or leave it out")
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:
        raise ConfigError(name, "is not UTF-8") from error


def check_api_key(name: str, value: str | None) -> None:
    """Raise `ConfigError` for what `check_secret` refuses, and for several words.

    Variables of the environment have a key in each word; so each would open what the key does.
    """
    check_secret(name, value)
    if value is not None and value.split() != [value]:
        raise ConfigError(name, "has white space; a key is one word, and several are several keys")


def check_url(name: str, url: str) -> None:
    """Raise `ConfigError` for what can't be asked over HTTP."""
    try:
        parts = urlsplit(url)
        ok = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        ok = False
    if not ok:
        raise ConfigError(name, f"{url!r} is no http URL (http://HOST:PORT)")


@dataclass(frozen=True, kw_only=True)
class ModelEndpointConfig(EndpointConfig):
    """An endpoint over engines of its own, one or several.

    Attributes:
        engine: settings of each engine.
        transport: ``NAME[:JSON]``.

    Raises:
        ConfigError: there is no such transport.
    """

    engine: EngineConfig
    transport: str = flag("nixl", "moves the KV cache", metavar="NAME[:JSON]", group=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        from kvbaton.connectors.registry import TRANSPORTS, check_spec

        check_spec(TRANSPORTS, self.transport)  # before an engine starts in vain

    @property
    def model_name(self) -> str:
        """As clients name the model."""
        return next(iter(self.served_model_name), self.engine.model)


NodeRole = Literal["any", "prefill", "decode", "encode"]
"""``any`` is source and target of hand-overs; ``prefill`` and ``decode`` are one of the two."""


@dataclass(frozen=True, kw_only=True)
class NodeConfig(ModelEndpointConfig):
    """All that a node needs to know.

    Attributes:
        role: what it does for others.
        node_id: its name, stable over its lives.
        routers: base URLs of the routers to register with, a host name for all that it resolves to;
            none for a node that stands alone or is named by the router's flags.
        peers: control addresses ``tcp://host:port`` that may be dialled beside those the router
            vouches for.
        control_port: of the control channel; 0 takes a free one.
        workers: processes that answer HTTP on the port.
        engine_port: where the engine listens for routers, if there is a cluster key; 0 takes a free
            one.
        max_transfers: hand-overs that a source has alive at once.
        max_blocks_per_peer: blocks that a target has reserved or in quarantine for one source; None
            for no limit.

    Raises:
        ConfigError: values that do not fit together.
    """

    GROUP: ClassVar[str | None] = "node"

    role: NodeRole
    routers: tuple[str, ...] = flag(
        (),
        "register with this router, or with all that its host name resolves to; may be given more "
        "than once",
        name="--router",
        action="append",
        metavar="URL",
    )
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
        None, "blocks reserved or in quarantine for one source (no limit)", metavar="N"
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
        """What hand-overs need of it."""
        mine = {item.name for item in fields(HandoverConfig)} & {item.name for item in fields(self)}
        return HandoverConfig(**{name: getattr(self, name) for name in mine})

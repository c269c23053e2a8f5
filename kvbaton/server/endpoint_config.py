"""Settings that every endpoint has, of a node, of the router and of a whole cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from kvbaton.config import LogLevel, Port, flag
from kvbaton.server.media import MediaConfig
from kvbaton.text.generation import GenerationConfigMode


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """Where an endpoint listens, whom it serves, and as what.

    Attributes:
        host: address to listen on.
        port: 0 takes a free one.
        served_model_name: as clients name the model; None takes its folder as given, or at the
            router the nodes' own name.
        chat_template: file with another chat template than the model's.
        generation_config: whether the model recommends sampling defaults; see `text.generation`.
        media: what images clients may bring.
        api_keys: any of them opens the endpoint; none leaves it open.
        cluster_key: secret shared by all nodes and the router; None restricts the cluster to this
            machine.
        log_level: of the log on standard error.
    """

    GROUP: ClassVar[str | None] = "endpoint"

    host: str = flag("127.0.0.1", "address to listen on", metavar=None)
    port: Port = flag(0, "0 takes a free one", metavar=None)
    served_model_name: str | None = flag(None, "as clients name the model", metavar="NAME")
    chat_template: str | None = flag(
        None, "jinja template to use instead of the model's", metavar="FILE"
    )
    generation_config: GenerationConfigMode = flag(
        "auto", "whether the model's generation_config.json gives sampling defaults"
    )
    media: MediaConfig = field(default_factory=MediaConfig)
    api_keys: tuple[str, ...] = flag(
        (),
        "asked of clients ($KVBATON_API_KEY)",
        name="--api-key",
        variable="KVBATON_API_KEY",
        secret=True,
        nargs="+",
        metavar="KEY",
    )
    cluster_key: str | None = flag(
        None,
        "shared by all nodes and the router ($KVBATON_CLUSTER_KEY)",
        variable="KVBATON_CLUSTER_KEY",
        secret=True,
        metavar="SECRET",
    )
    log_level: LogLevel = flag("info")

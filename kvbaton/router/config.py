"""The router's settings; command-line defaults are read from here."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbaton.router.dispatch import DispatchConfig
from kvbaton.router.membership import MembershipTimers
from kvbaton.server.media import MediaConfig
from kvbaton.text.generation import GenerationConfigMode


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """All that a router needs to know.

    Attributes:
        model: folder of the model, for its tokenizer; None asks the first static node.
        served_model_name: as clients name it; None takes the nodes' own name, or the folder's.
        host: address to listen on.
        port: 0 takes a free one.
        fd: an inherited socket that already listens; overrides host and port.
        prefill: URLs of prefill nodes that do not register themselves.
        decode: URLs of decode nodes that do not register themselves.
        encode: URLs of encoder nodes that do not register themselves.
        api_keys: accepted from clients.
        node_api_key: sent to the nodes; None takes the first of `api_keys`.
        chat_template: file with another chat template than the model's.
        generation_config: whether the model recommends sampling defaults; see `text.generation`.
        media: what images clients may bring.
        cluster_key: from which the token for registration is derived; None restricts the cluster
            to this machine.
        start_timeout_s: how long a static node may take to say what model it serves.
        grace_s: how long requests may go on after the router was told to stop.
        log_level: of the log on standard error.
        membership: timers.
        dispatch: timers and policy.
    """

    model: str | None = None
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    fd: int | None = None
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    encode: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    node_api_key: str | None = field(default=None, repr=False)
    chat_template: str | None = None
    generation_config: GenerationConfigMode = "auto"
    media: MediaConfig = field(default_factory=MediaConfig)
    cluster_key: str | None = field(default=None, repr=False)
    start_timeout_s: float = 600.0
    grace_s: float = 5.0
    log_level: str = "info"
    membership: MembershipTimers = field(default_factory=MembershipTimers)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)

    @property
    def key_for_nodes(self) -> str | None:
        """The API key with which nodes are asked."""
        return self.node_api_key or next(iter(self.api_keys), None)

    @property
    def static_nodes(self) -> list[tuple[str, str]]:
        """(url, role) of each node named by a flag."""
        named = {"prefill": self.prefill, "decode": self.decode, "encode": self.encode}
        return [(url, role) for role, urls in named.items() for url in urls]

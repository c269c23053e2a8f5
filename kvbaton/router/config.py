"""The router's settings; command-line defaults are read from here."""

from __future__ import annotations

from argparse import SUPPRESS
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvbaton.config import Count, flag
from kvbaton.router.dispatch import DispatchConfig
from kvbaton.router.membership import MembershipTimers
from kvbaton.server.endpoint_config import EndpointConfig


def _static(role: str) -> Any:
    text = f"{role} node that does not register itself; may be given more than once"
    return flag((), text, action="append", metavar="URL", group="nodes")


@dataclass(frozen=True, kw_only=True)
class RouterConfig(EndpointConfig):
    """All that a router needs to know.

    Attributes:
        model: folder of the model, for its tokenizer; None asks the first static node,
            or waits for the first node that registers.
        workers: processes that answer, behind one port.
        fd: an inherited socket that already listens; overrides host and port.
        prefill: URLs of prefill nodes that do not register themselves.
        decode: URLs of decode nodes that do not register themselves.
        encode: URLs of encoder nodes that do not register themselves.
        node_api_key: sent to the nodes; None takes the first of `api_keys`.
        start_timeout_s: how long a static node may take to say what model it serves.
        grace_s: how long requests may go on after the router was told to stop.
        membership: timers.
        dispatch: timers and policy.
    """

    GROUP: ClassVar[str | None] = None

    model: str | None = flag(
        None,
        "folder of the model, for its tokenizer; without it, where the first node says",
        metavar="DIR",
    )
    workers: Count = flag(1, "processes that answer, behind one port", metavar="N")
    fd: int | None = flag(None, SUPPRESS)
    node_api_key: str | None = flag(
        None,
        "presented to nodes (the first --api-key; $KVBATON_NODE_API_KEY)",
        variable="KVBATON_NODE_API_KEY",
        secret=True,
        metavar="KEY",
    )
    prefill: tuple[str, ...] = _static("prefill")
    decode: tuple[str, ...] = _static("decode")
    encode: tuple[str, ...] = _static("encode")
    start_timeout_s: float = 600.0
    grace_s: float = 5.0
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

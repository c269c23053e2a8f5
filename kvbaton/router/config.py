"""The router's settings; light, since commands read them, too."""

from __future__ import annotations

import math
from argparse import SUPPRESS
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvbaton.config import Count, check_positive, check_workers, flag
from kvbaton.errors import ConfigError
from kvbaton.server.config import EndpointConfig, check_api_key, check_url
from kvbaton.server.network import bearer


@dataclass(frozen=True)
class MembershipTimers:
    """Periods and limits.

    Attributes:
        heartbeat_s: a registered node calls this often.
        missed: heartbeats missed until a node is unhealthy.
        probe_period_s: every node's health is asked this often.
        probe_timeout_s: and must be answered within this time.
        failures: failed probes in a row until a node is unhealthy.
        forget_s: a registered node that was silent for this long is forgotten.
    """

    heartbeat_s: float = 1.0
    missed: int = 5
    probe_period_s: float = 1.0
    probe_timeout_s: float = 2.0
    failures: int = 3
    forget_s: float = 60.0


@dataclass(frozen=True)
class RelayTimers:
    """Limits of one request.

    Attributes:
        idle_s: a target that says nothing for this long has failed.
        finish_grace_s: how long the target may take to confirm an end that the source announced.
        max_retries: attempts after the first.
        move_s: how long another node may take to be ready to go on in the target's place.
        marks_s: how long the end of a timed request waits for what others than the target mark.
    """

    idle_s: float = 120.0
    finish_grace_s: float = 2.0
    max_retries: int = 2
    move_s: float = 30.0
    marks_s: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Objectives:
    """Within which times tokens are to come.

    Attributes:
        ttft_slo: milliseconds within which a first token is to come; None for no objective.
        itl_slo: milliseconds within which each further token is to come: a request's mean.
        itl_percentile: of a request's times between tokens, instead of their mean.
        max_itl: milliseconds that no token is to take: nodes compute prompts in chunks that are
            short enough for who generates beside them, but for those that would be late by that;
            None takes `itl_slo`.
    """

    ttft_slo: float | None = flag(None, "the first token is to come within this", metavar="MS")
    itl_slo: float | None = flag(None, "each further token is to come within this", metavar="MS")
    itl_percentile: float | None = flag(
        None,
        "of a request's times between tokens, which --itl-slo is for (not given: their mean)",
        metavar="P",
    )
    max_itl: float | None = flag(
        None,
        "compute prompts in chunks so short that no token beside them takes longer (--itl-slo)",
        metavar="MS",
    )

    def __post_init__(self) -> None:
        check_positive("--ttft-slo", self.ttft_slo)
        check_positive("--itl-slo", self.itl_slo)
        check_positive("--max-itl", self.max_itl)
        percentile = self.itl_percentile
        if percentile is not None and not 0 < percentile < 100:
            raise ConfigError("--itl-percentile", f"{percentile:g} is not between 0 and 100")
        if percentile is not None and self.itl_slo is None:
            raise ConfigError("--itl-percentile", "without --itl-slo it is of no objective")
        if self.max_itl is None:
            object.__setattr__(self, "max_itl", self.itl_slo)


@dataclass(frozen=True, kw_only=True)
class RoutingPolicy(Objectives):
    """Which work is given to other nodes, as a user decides it.

    Attributes:
        min_handover_tokens: shorter prompts are served on one node.
        min_fetch_tokens: a cached prefix is fetched from another node, by a policy that knows who
            has which, if so many tokens need not be computed then; 0 fetches none.
        min_encode_rows: of items that encoder nodes get; None lets the router estimate (see
            `choose.with_encoders`).
        policy: name of the policy, or its dotted path; see `router.policies`.
        max_ttft: milliseconds; a request whose first token is expected later is refused (429). None
            refuses those that would come after their deadline, and no others.
        retry_budget: retries per request that a router makes on average, beside 10 per second and
            those of requests whose node was lost.
    """

    min_handover_tokens: int = flag(
        0, "serve shorter prompts on one node (0: hand over always)", metavar="N"
    )
    min_fetch_tokens: Count = flag(
        256, "fetch what another node has cached, from so many tokens on (0: never)", metavar="N"
    )
    min_encode_rows: Count | None = flag(
        None,
        "let encoder nodes encode images of at least so many tokens, and no others "
        "(0: all; not given: each image where that is estimated to be faster)",
        metavar="N",
    )
    policy: str = flag(
        "cost",
        "who gets a request: round-robin, least-loaded, prefix-aware, sticky, threshold, cost, or "
        "package.module:Class",
        metavar="NAME",
    )
    max_ttft: float | None = flag(
        None, "refuse (429) requests whose first token is expected later", metavar="MS"
    )
    retry_budget: float = flag(
        0.2,
        "requests that are tried again because nodes refuse or fail: at most so many per request",
        metavar="SHARE",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("--max-ttft", self.max_ttft)
        if not 0 <= self.retry_budget < math.inf:
            raise ConfigError("--retry-budget", f"{self.retry_budget} is no number from 0 on")
        if self.min_handover_tokens < 0:
            raise ConfigError("--min-handover-tokens", f"{self.min_handover_tokens} is negative")


@dataclass(frozen=True)
class DispatchConfig(RoutingPolicy):
    """How requests are dispatched.

    Attributes:
        timers: of each request.
    """

    timers: RelayTimers = field(default_factory=RelayTimers)


def _static(role: str) -> Any:
    text = f"{role} node that does not register itself; may be given more than once"
    return flag((), text, name=f"--{role}", action="append", metavar="URL", group="nodes")


@dataclass(frozen=True, kw_only=True)
class RouterConfig(EndpointConfig):
    """All that a router needs to know.

    Attributes:
        model: folder of the model, for its tokenizer; None asks the first static node,
            or waits for the first node that registers.
        workers: processes that answer, behind one port.
        fd: an inherited socket that already listens; overrides host and port.
        any_role: URLs of nodes of the role ``any`` that do not register themselves.
        prefill: URLs of prefill nodes that do not register themselves.
        decode: URLs of decode nodes that do not register themselves.
        encode: URLs of encoder nodes that do not register themselves.
        node_api_key: with which nodes' HTTP endpoints are asked; None takes the first of
            `api_keys`.
        start_timeout_s: how long a static node may take to say what model it serves.
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
    any_role: tuple[str, ...] = _static("any")
    prefill: tuple[str, ...] = _static("prefill")
    decode: tuple[str, ...] = _static("decode")
    encode: tuple[str, ...] = _static("encode")
    start_timeout_s: float = 600.0
    membership: MembershipTimers = field(default_factory=MembershipTimers)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_workers(self.workers)
        check_api_key("--node-api-key", self.node_api_key)
        for url, role in self.static_nodes:
            check_url(f"--{role}", url)

    @property
    def node_headers(self) -> dict[str, str]:
        """With which nodes' HTTP endpoints are asked."""
        return bearer(self.node_api_key or next(iter(self.api_keys), None))

    @property
    def static_nodes(self) -> list[tuple[str, str]]:
        """(url, role) of each node named by a flag."""
        named = {
            "any": self.any_role,
            "prefill": self.prefill,
            "decode": self.decode,
            "encode": self.encode,
        }
        return [(url, role) for role, urls in named.items() for url in urls]

"""The router's settings; a light module, since commands read it, too."""

from __future__ import annotations

import math
from argparse import SUPPRESS
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvbaton.config import Count, check_positive, check_workers, flag, secret_flag
from kvbaton.errors import ConfigError
from kvbaton.server.config import EndpointConfig, check_api_key, check_url
from kvbaton.server.network import bearer


@dataclass(frozen=True)
class MembershipTimers:
    """Periods and limits of `Membership`.

    Attributes:
        heartbeat_s: Seconds between heartbeats of a registered node.
        missed: Missed heartbeats until a node is unhealthy.
        probe_period_s: Seconds between health probes of each node.
        probe_timeout_s: Seconds within which a probe must be answered.
        failures: Failed probes in a row until a node is unhealthy.
        forget_s: Seconds of silence after which a registered node is forgotten.
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
        idle_s: Seconds without output after which a target has failed; before its first one, after
            which it is checked whether its engine hangs, since the request may be in its queue.
        finish_grace_s: Seconds that the target may take to confirm an end that the source
            announced.
        max_retries: Maximum number of attempts after the first.
        move_s: Seconds that a successor may take until it can replace the target.
    """

    idle_s: float = 120.0
    finish_grace_s: float = 2.0
    max_retries: int = 2
    move_s: float = 30.0


@dataclass(frozen=True, kw_only=True)
class Objectives:
    """Latency objectives of requests.

    Attributes:
        ttft_slo: TTFT objective in milliseconds; None for no objective.
        itl_slo: ITL objective in milliseconds; None for no objective.
        max_itl: Maximum ITL in milliseconds beside prompts, at most `itl_slo`: nodes compute
            prompts in chunks that are short enough for it. None takes `itl_slo`.
    """

    ttft_slo: float | None = flag(None, "TTFT objective: time until the first token", metavar="MS")
    itl_slo: float | None = flag(None, "ITL objective: time between tokens", metavar="MS")
    max_itl: float | None = flag(
        None,
        "compute prompts in chunks so short that decode steps take no longer (--itl-slo)",
        metavar="MS",
    )

    def __post_init__(self) -> None:
        check_positive("--ttft-slo", self.ttft_slo)
        check_positive("--itl-slo", self.itl_slo)
        check_positive("--max-itl", self.max_itl)
        if self.max_itl is None:
            object.__setattr__(self, "max_itl", self.itl_slo)
        elif self.itl_slo is not None and self.max_itl > self.itl_slo:
            problem = f"{self.max_itl:g} ms would break --itl-slo, {self.itl_slo:g} ms"
            raise ConfigError("--max-itl", problem)


@dataclass(frozen=True, kw_only=True)
class RoutingPolicy(Objectives):
    """How work is distributed to nodes, as a user decides it.

    Attributes:
        min_handover_tokens: Minimum prompt tokens for a hand-over; shorter prompts are served by
            one node.
        min_fetch_tokens: Minimum number of tokens saved for which a cached prefix is fetched from
            another node, by a policy that uses prefixes; 0 fetches none.
        min_encode_rows: Minimum rows of items that encoder nodes get; None lets the router estimate
            (see `choose.with_encoders`).
        policy: Name of the policy, or its dotted path; see `router.policies`.
        max_ttft: Maximum predicted TTFT in milliseconds; beyond it a request is refused (429). None
            refuses only requests that would miss their deadlines.
        retry_budget: Mean number of retries per request that a router makes, beside 10 per second
            and retries after a node was lost.
    """

    min_handover_tokens: Count = flag(
        0, "serve shorter prompts on one node (0: always hand over)", metavar="N"
    )
    min_fetch_tokens: Count = flag(
        256,
        "fetch a prefix cached by another node if it saves N tokens or more (256; 0: never)",
        metavar="N",
    )
    min_encode_rows: Count | None = flag(
        None,
        "let encoder nodes encode images of N tokens or more, and no others "
        "(0: all; default: each image where that is estimated to be faster)",
        metavar="N",
    )
    policy: str = flag(
        "cost",
        "routing policy: round-robin, least-loaded, prefix-aware, sticky, threshold, cost, or "
        "package.module:Class",
        metavar="NAME",
    )
    max_ttft: float | None = flag(
        None, "refuse (429) requests whose predicted TTFT is longer", metavar="MS"
    )
    retry_budget: float = flag(
        0.2,
        "maximum number of retries per request, on average, when nodes refuse or fail",
        metavar="SHARE",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("--max-ttft", self.max_ttft)
        if not 0 <= self.retry_budget < math.inf:
            raise ConfigError("--retry-budget", f"{self.retry_budget} is no number from 0 on")


@dataclass(frozen=True)
class DispatchConfig(RoutingPolicy):
    """How requests are dispatched.

    Attributes:
        timers: Limits of each request.
    """

    timers: RelayTimers = field(default_factory=RelayTimers)


def _static(role: str) -> Any:
    text = f"{role} node that does not register itself; may be given more than once"
    return flag((), text, name=f"--{role}", action="append", metavar="URL", group="nodes")


@dataclass(frozen=True, kw_only=True)
class RouterConfig(EndpointConfig):
    """All settings of a router.

    Attributes:
        model: Folder of the model, for its tokenizer; None asks the first static node, or waits for
            the first node that registers.
        workers: Number of processes that answer, behind one port.
        fd: Inherited socket that already listens; overrides host and port.
        any_role: URLs of nodes of role ``any`` that do not register themselves.
        prefill: URLs of prefill nodes that do not register themselves.
        decode: URLs of decode nodes that do not register themselves.
        encode: URLs of encoder nodes that do not register themselves.
        node_api_key: API key for nodes' HTTP endpoints; None takes the first of `api_keys`.
        membership: Timers of membership.
        dispatch: Timers and policy of dispatch.
    """

    GROUP: ClassVar[str | None] = None

    model: str | None = flag(
        None,
        "folder of the model, for its tokenizer; without it, the one that the first node reports",
        metavar="DIR",
    )
    workers: Count = flag(1, "processes that answer, behind one port", metavar="N")
    fd: int | None = flag(None, SUPPRESS)
    node_api_key: str | None = secret_flag(
        "API key for nodes, else the first --api-key", "KVBATON_NODE_API_KEY", metavar="KEY"
    )
    any_role: tuple[str, ...] = _static("any")
    prefill: tuple[str, ...] = _static("prefill")
    decode: tuple[str, ...] = _static("decode")
    encode: tuple[str, ...] = _static("encode")
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
        """Headers of requests to nodes' HTTP endpoints."""
        return bearer(self.node_api_key or next(iter(self.api_keys), None))

    @property
    def static_nodes(self) -> list[tuple[str, str]]:
        """(url, role) of each node that a flag names."""
        named = {
            "any": self.any_role,
            "prefill": self.prefill,
            "decode": self.decode,
            "encode": self.encode,
        }
        return [(url, role) for role, urls in named.items() for url in urls]

"""The interface between an engine core and what brings KV into it or takes KV out of it.

Hand-overs (`SourceConnector`, `TargetConnector`), stores (`StoreConnector`) and publishers of the
prefix cache's events are connectors. A core has any number of them, in any combination.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from kvbaton.engine import request as requests
from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest, HistogramCounts, Output, TransferSpec
from kvbaton.types import Spans

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

REST_S = 0.5
"""Seconds for which a failing connector is not called, and between log lines about failures."""


@dataclass(frozen=True, eq=False)
class Load:
    """Blocks of one sequence that a connector fills.

    They stay marked *incoming*, whatever becomes of the sequence, until the connector reports that
    no write can land in them any more (`KVCacheManager.release_incoming`).

    Attributes:
        sequence: Sequence that owns the blocks.
        start: Tokens whose KV it has already.
        end: Tokens whose KV it has after the load.
        spans: Per group, the blocks to fill.
        connector: Connector that fills them.
    """

    sequence: requests.Sequence
    start: int
    end: int
    spans: Spans
    connector: KVConnector


@dataclass(frozen=True)
class HeldBlocks:
    """Blocks that a connector may write, and those that it may read; for the audit."""

    incoming: Collection[Spans] = ()
    outgoing: Collection[Spans] = ()


def transfer_consumed(transfer: TransferSpec) -> RequestError:
    """The error for a request whose transfer has begun before."""
    return RequestError(
        f"transfer {transfer.transfer_id.hex()} attempt {transfer.attempt} is in use",
        param="kv_transfer_params.transfer_id",
        status=409,
        code="transfer_consumed",
    )


class KVConnector:
    """Hooks around the KV cache that a connector overrides; here, they do nothing.

    All hooks are called in the core's thread, between steps, and must not block. Exceptions are
    contained (`Connectors`).

    Attributes:
        name: Name of its part in the debugging dump.
        transfer_role: Role of this node in a `TransferSpec` that it serves; None if it serves none.
        medium: Where the KV that it loads comes from: a hand-over of a whole prompt, a store, or
            a prefix's blocks on another node.
        most_blocks: Maximum number of blocks that may wait for one peer; None for no limit.
        waits_for_room: Whether a request whose KV it can load waits until there is room; else the
            request is computed when nothing else loads.
        control_address: Address at which peers reach it; None if they never do.
        wake_fds: Descriptors that are readable while `poll` has something to do.
        contained: Whether an exception ends only what the connector owes; else it ends the core.
    """

    name = "connector"
    transfer_role: str | None = None
    medium: Literal["transferred", "store", "peer"] = "transferred"
    most_blocks: int | None = None
    waits_for_room = False
    control_address: str | None = None
    wake_fds: Sequence[int] = ()
    contained = True

    # --- the life of a request ---

    def accept(self, request: AddRequest) -> AddRequest:
        """Check a new request; returns it as it shall run.

        Raises:
            RequestError: This node can't do what the request asks for.
        """
        return request

    def added(self, sequence: requests.Sequence) -> bool:
        """A new request was queued; True parks it until the connector calls `unpark`."""
        return False

    def match(self, sequence: requests.Sequence, num_cached: int) -> int | None:
        """How many tokens beyond a cached prefix it can load for the first of the queue.

        None means not known yet: the sequence is parked until the connector calls `unpark`.
        """
        return 0

    def start_load(self, load: Load) -> None:
        """Fill the blocks of what `match` has offered.

        A load ends with one `Scheduler.finish_load` or `fail_load`, unless the sequence ends first.
        """

    def load_failed(self, sequence: requests.Sequence) -> bool:
        """A hand-over failed and its target is queued again; True parks it, as with `added`."""
        return False

    def started(self, sequence: requests.Sequence) -> None:
        """A sequence was admitted: it takes part in steps from now on."""

    def launched(self, step: requests.InFlightStep) -> None:
        """A step was launched, and no later one yet."""

    def progressed(self, request: requests.Request) -> None:
        """A step computed tokens of a source; the blocks are still referenced."""

    def committed(self, sequence: requests.Sequence, g: int, first: int, end: int) -> None:
        """Logical blocks [first, end) of a sequence were offered to group `g`'s prefix cache."""

    def emitted(self, outputs: list[Output]) -> list[Output]:
        """Outputs are about to be sent to clients; returns those to send."""
        return outputs

    def finished(self, request: requests.Request) -> None:
        """A request has ended."""

    def decline(self, transfer: TransferSpec) -> None:
        """Tell the source of a hand-over that the hand-over is not needed."""

    # --- the core's loop ---

    def poll(self, now: float) -> list[Output]:
        """Handle what is due or has arrived, once per turn of the loop; returns new outputs."""
        return []

    def flush(self) -> None:
        """A turn of the loop is over: publish what happened in it."""

    def awaits(self) -> bool:
        """Whether a message may come while a step runs that should be handled before its end.

        A core that would only wait for a step with prompts then polls connectors for a while, and
        launches the next step later.
        """
        return False

    def next_deadline(self) -> float | None:
        """Monotonic time when `poll` has to be called though no descriptor is readable."""
        return None

    def busy(self) -> bool:
        """Whether it has work that must be finished before a drained node stops."""
        return False

    def close(self) -> None:
        """Stop everything that moves blocks, and release all resources."""

    # --- events elsewhere ---

    def set_members(self, addresses: Sequence[str]) -> None:
        """Take the control addresses that the router vouches for."""

    def reset_prefix_cache(self) -> int:
        """The prefix cache was cleared; clear own caches, and return how many blocks they held."""
        return 0

    def reset_store(self) -> Future[int] | None:
        """Delete what this engine keeps in a store; a future of the number of objects, or None.

        The future is completed in `poll`, and may have a `StoreError`. None if there is no store.
        """
        return None

    def removed(self, medium: str, g: int, keys: list[bytes]) -> None:
        """Blocks of group `g` that were `saved` are no longer in a medium."""

    def saved(self, medium: str, g: int, keys: list[bytes]) -> None:
        """Another connector has saved blocks of group `g` with these keys to a medium."""

    # --- accounts ---

    def held_blocks(self) -> HeldBlocks:
        """Blocks that it may write or read now."""
        return HeldBlocks()

    def imbalance(self) -> int:
        """Discrepancies in its own pools; always 0."""
        return 0

    def counters(self) -> dict[str, float]:
        """Monotonic totals by Prometheus name."""
        return {}

    def gauges(self) -> dict[str, float]:
        """Current values by Prometheus name."""
        return {}

    def histograms(self) -> dict[str, HistogramCounts]:
        """Distributions of durations by Prometheus name."""
        return {}

    def state(self) -> dict[str, Any]:
        """Its part of the debugging dump."""
        return {}


class Connectors:
    """All connectors of a core, in the order in which they are asked.

    An exception in one of them ends neither the core nor the other connectors: it is logged,
    counted and noted in `raised`. After an exception that was not about one request, a connector is
    *failing* until `poll` succeeds.

    Attributes:
        all: The connectors.
        having: By hook of `KVConnector`, the connectors that override it.
        failures: Number of exceptions by connector.
        failing: By failing connector, the monotonic time until which it is not called.
        raised: Failures not handled yet: the connector, the request if it was about one, and why.
    """

    def __init__(self, connectors: Sequence[KVConnector] = ()) -> None:
        self.all = tuple(connectors)
        self.failures = {connector.name: 0 for connector in connectors}
        self.failing: dict[KVConnector, float] = {}
        self.raised: list[tuple[KVConnector, requests.Request | None, str]] = []
        self._log_at = 0.0
        self.having = {
            hook: [c for c in connectors if getattr(type(c), name) is not hook]
            for name, hook in vars(KVConnector).items()
            if callable(hook)
        }

    def __iter__(self) -> Iterator[KVConnector]:
        return iter(self.all)

    def call(
        self, hook: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call a hook on all connectors that override it; returns their results."""
        said = []
        for connector in self.having[hook]:
            try:
                said.append(getattr(connector, hook.__name__)(*args, **kwargs))
            except Exception as error:
                self.contain(connector, error, *args)
        return said

    def contain(self, connector: KVConnector, error: Exception, *about: object) -> str:
        """Record an exception of a hook that was called with `about`; returns it as text."""
        if not connector.contained:
            raise error
        now, (first, *_) = time.monotonic(), (*about, None)
        if isinstance(first, Load):
            first = first.sequence
        request = first.request if isinstance(first, requests.Sequence) else first
        if not isinstance(request, requests.Request):
            request = None
            self.failing.setdefault(connector, now + REST_S)
        self.failures[connector.name] += 1
        reason = f"the {connector.name} connector failed: {type(error).__name__}: {error}"
        self.raised.append((connector, request, reason))
        if now >= self._log_at:
            self._log_at = now + REST_S
            logger.error("%s", reason, exc_info=error)
        return reason

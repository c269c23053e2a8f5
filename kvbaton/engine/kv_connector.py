"""The seam between an engine core and what brings KV into it or takes KV out of it.

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
"""A connector that fails is left alone for so long, and each line in the log is so far apart."""


@dataclass(frozen=True, eq=False)
class Load:
    """Blocks of one sequence that a connector fills.

    They are marked *incoming*, whatever becomes of the sequence, until the connector says that no
    write can land in them any more (`KVCacheManager.release_incoming`).

    Attributes:
        sequence: whose.
        start: tokens that it has already.
        end: tokens that it shall have.
        spans: per group, the blocks to fill.
        connector: who fills them.
    """

    sequence: requests.Sequence
    start: int
    end: int
    spans: Spans
    connector: KVConnector


@dataclass(frozen=True)
class HeldBlocks:
    """What a connector may write, and what it may read; for the audit."""

    incoming: Collection[Spans] = ()
    outgoing: Collection[Spans] = ()


def transfer_consumed(transfer: TransferSpec) -> RequestError:
    """Why a request is refused whose transfer was begun before."""
    return RequestError(
        f"transfer {transfer.transfer_id.hex()} attempt {transfer.attempt} is in use",
        param="kv_transfer_params.transfer_id",
        status=409,
        code="transfer_consumed",
    )


class KVConnector:
    """What happens around the KV cache, as one connector hears it. Every hook does nothing here.

    All of them are called in the core's thread, between steps, and never block. What one raises is
    contained (`Connectors`).

    Attributes:
        name: of its part in the debugging dump.
        transfer_role: the role that a request's `TransferSpec` gives to this node, if it serves it.
        medium: where the KV that it loads comes from: a hand-over of a whole prompt, a store, or
            blocks of a prefix that another node has.
        most_blocks: that may wait for one peer of its role; None for any number.
        waits_for_room: a request that it can load for waits until there is room; else it is
            computed when nothing else loads.
        control_address: where peers reach it; None if nobody dials it.
        wake_fds: readable while `poll` has something to do.
        contained: what it raises ends what it owes and no more; else it ends the core.
    """

    name = "connector"
    transfer_role: str | None = None
    medium: Literal["transferred", "store", "peer"] = "transferred"
    most_blocks: int | None = None
    waits_for_room = False
    control_address: str | None = None
    wake_fds: Sequence[int] = ()
    contained = True

    # --- a request's way ---

    def accept(self, request: AddRequest) -> AddRequest:
        """Check a request at the door; return it as it shall be run.

        Raises:
            RequestError: this node can't do what it asks for.
        """
        return request

    def added(self, sequence: requests.Sequence) -> bool:
        """A new request is in the queue; True parks it until the connector calls `unpark`."""
        return False

    def match(self, sequence: requests.Sequence, num_cached: int) -> int | None:
        """How many tokens beyond a cached prefix it can bring to the first of the queue.

        None, if that is not known yet, parks the sequence until the connector calls `unpark`.
        """
        return 0

    def start_load(self, load: Load) -> None:
        """Fill the blocks of what `match` has offered.

        It ends with one `Scheduler.finish_load` or `fail_load`, unless the sequence ends first.
        """

    def load_failed(self, sequence: requests.Sequence) -> bool:
        """A hand-over failed, and its target is in the queue again; True parks it, as `added`."""
        return False

    def started(self, sequence: requests.Sequence) -> None:
        """A sequence takes part in steps from now on."""

    def launched(self, step: requests.InFlightStep) -> None:
        """A step is on its way. No later one was launched yet."""

    def progressed(self, request: requests.Request) -> None:
        """A step computed tokens of a source request; its blocks are still referenced."""

    def committed(self, sequence: requests.Sequence, g: int, first: int, end: int) -> None:
        """Logical blocks [first, end) of a sequence were offered to group `g`'s prefix cache."""

    def emitted(self, outputs: list[Output]) -> list[Output]:
        """Outputs on their way to the clients; returns them as they shall be sent."""
        return outputs

    def finished(self, request: requests.Request) -> None:
        """A request is over."""

    def decline(self, transfer: TransferSpec) -> None:
        """Tell the source of a hand-over that it is not needed."""

    # --- the core's loop ---

    def poll(self, now: float) -> list[Output]:
        """Do what has become due or was answered; once a turn. Returns new outputs."""
        return []

    def flush(self) -> None:
        """A turn is over: publish what happened in it."""

    def awaits(self) -> bool:
        """Whether something may come while a step runs that had better be known before it is over.

        A core that would wait for a step with prompts then hears it for a while, and launches the
        next one later.
        """
        return False

    def next_deadline(self) -> float | None:
        """When `poll` has something to do that makes no descriptor readable."""
        return None

    def busy(self) -> bool:
        """Whether it has work that this process must see through (for draining)."""
        return False

    def close(self) -> None:
        """Stop all that moves blocks, and give everything back."""

    # --- what happens around ---

    def set_members(self, addresses: Sequence[str]) -> None:
        """Control addresses that the router vouches for."""

    def reset_prefix_cache(self) -> int:
        """The prefix cache was emptied; returns how many blocks of its own it has forgotten."""
        return 0

    def reset_store(self) -> Future[int] | None:
        """Forget what this engine keeps outside of it; gets how many objects, None if nothing is.

        Its future is done when `poll` has heard of it, and may have a `StoreError`.
        """
        return None

    def removed(self, medium: str, g: int, keys: list[bytes]) -> None:
        """Blocks of group `g` that were `saved` are no longer in a medium."""

    def saved(self, medium: str, g: int, keys: list[bytes]) -> None:
        """Another connector has put blocks of group `g` with these keys into a medium."""

    # --- accounts ---

    def held_blocks(self) -> HeldBlocks:
        """Blocks that it may write or read now."""
        return HeldBlocks()

    def imbalance(self) -> int:
        """Discrepancies in pools of its own; always 0."""
        return 0

    def counters(self) -> dict[str, float]:
        """Monotonic totals by Prometheus name."""
        return {}

    def gauges(self) -> dict[str, float]:
        """Values now by Prometheus name."""
        return {}

    def histograms(self) -> dict[str, HistogramCounts]:
        """How long things took, by Prometheus name."""
        return {}

    def state(self) -> dict[str, Any]:
        """All that a person who looks for a fault wants to see."""
        return {}


class Connectors:
    """All connectors of a core, in the order in which they are asked.

    What one of them raises ends neither the core nor what the others do: it is logged, counted and
    noted in `raised`. A connector is *failing* from an exception that was not about one
    request until `poll` has raised none again.

    Attributes:
        all: the connectors.
        having: those that have a hook of their own, by hook of `KVConnector`.
        failures: exceptions, by connector.
        failing: until when those that fail are left alone, on the monotonic clock.
        raised: what nobody has taken: by whom, about which request if any, and why.
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
        """Call a hook of `KVConnector` of all that have one of their own; returns what they say."""
        said = []
        for connector in self.having[hook]:
            try:
                said.append(getattr(connector, hook.__name__)(*args, **kwargs))
            except Exception as error:
                self.contain(connector, error, *args)
        return said

    def contain(self, connector: KVConnector, error: Exception, *about: object) -> str:
        """Take note of what a hook has raised that was called with `about`; returns it as text."""
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

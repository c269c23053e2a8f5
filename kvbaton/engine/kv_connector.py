"""The seam between an engine core and what brings KV into it or takes KV out of it.

Hand-overs (`SourceConnector`, `TargetConnector`), stores (`StoreConnector`) and publishers of the
prefix cache's events are connectors. A core has any number of them, in any combination.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from kvbaton.engine import request as requests
from kvbaton.messages.engine import AddRequest, Output, TransferSpec
from kvbaton.types import Spans

if TYPE_CHECKING:
    from kvbaton.engine.executor import Executor
    from kvbaton.engine.process import Surroundings
    from kvbaton.engine.scheduler import Scheduler


class Pending(enum.Enum):
    """An answer that is not known yet."""

    PENDING = "pending"


PENDING = Pending.PENDING


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
        medium: where the KV comes from.
    """

    sequence: requests.Sequence
    start: int
    end: int
    spans: Spans
    medium: Literal["transferred", "store"]


@dataclass(frozen=True)
class HeldBlocks:
    """What a connector may write, and what it may read; for the audit."""

    incoming: Collection[Spans] = ()
    outgoing: Collection[Spans] = ()


class KVConnector:
    """What happens around the KV cache, as one connector hears it. Every hook does nothing here.

    All of them are called in the core's thread, between steps, and never block.

    Attributes:
        name: of its part in the debugging dump.
        transfer_role: the role that a request's `TransferSpec` gives to this node, if it serves it.
        medium: where the KV that it loads comes from.
        waits_for_room: a request that it can load for waits until there is room; else it is
            computed when nothing else loads.
        control_address: where peers reach it; None if nobody dials it.
        wake_fds: readable while `poll` has something to do.
    """

    name = "connector"
    transfer_role: str | None = None
    medium: Literal["transferred", "store"] = "transferred"
    waits_for_room = False
    control_address: str | None = None
    wake_fds: Sequence[int] = ()

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

    def match(self, sequence: requests.Sequence, num_cached: int) -> int | Pending:
        """How many tokens beyond a cached prefix it can bring to the first of the queue.

        `PENDING` parks the sequence until the connector calls `unpark`.
        """
        return 0

    def start_load(self, load: Load) -> None:
        """Fill the blocks of what `match` has offered.

        It ends with one `Scheduler.finish_load` or `fail_load`, unless the sequence ends first.
        """

    def started(self, sequence: requests.Sequence) -> None:
        """A sequence takes part in steps from now on."""

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

    def state(self) -> dict[str, Any]:
        """All that a person who looks for a fault wants to see."""
        return {}


class ConnectorFactory(Protocol):
    """Makes a connector in the core's process; crosses into it by pickle, from parent to child."""

    @property
    def sends_blocks(self) -> bool:
        """Whether blocks are handed over from this node, so that their digests must be kept."""
        ...

    @property
    def items(self) -> ConnectorFactory:
        """Makes the connector of the encoder beside a language model, which receives outputs."""
        ...

    def __call__(
        self, executor: Executor, scheduler: Scheduler, surroundings: Surroundings
    ) -> KVConnector:
        """Make it and start what it needs."""
        ...


def add_up(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Values by name, those of equal names added."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total

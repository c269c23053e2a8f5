"""What makes a node a prefill or a decode node, as the engine core sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kvbaton.engine.request import Request
from kvbaton.messages.engine import AddRequest, Output, TransferSpec
from kvbaton.types import Spans


class Role(Protocol):
    """Called by the core's thread only; no call may block.

    The core knows no role: it tells what happened to requests, and lets the role speak between
    steps. A role that has something to say from another thread makes `wake_fd` readable.
    """

    @property
    def control_address(self) -> str | None:
        """Where peers reach this node's control channel."""
        ...

    @property
    def wake_fd(self) -> int:
        """A file descriptor that is readable when `poll` has something to do."""
        ...

    def accept(self, request: AddRequest) -> AddRequest:
        """Check a request's part in a hand-over at the door; return it as it shall be run.

        Raises:
            RequestError: this node can't play that part.
        """
        ...

    def added(self, request: AddRequest) -> None:
        """The scheduler has taken a request that `accept` returned."""
        ...

    def progressed(self, request: Request) -> None:
        """A step computed tokens of a source request; its blocks are still referenced."""
        ...

    def emitted(self, outputs: Sequence[Output]) -> list[Output]:
        """Outputs on their way to the clients; returns them as they shall be sent."""
        ...

    def decline(self, transfer: TransferSpec) -> None:
        """Tell the source of a hand-over that it is not needed."""
        ...

    def begin(self) -> None:
        """Start the hand-overs of requests that the scheduler has just admitted."""
        ...

    def poll(self) -> list[Output]:
        """Carry out what the hand-over decided; returns new outputs."""
        ...

    def ended(self, request_id: str) -> None:
        """A request was aborted or expired before it finished."""
        ...

    def busy(self) -> bool:
        """Whether a hand-over still needs this process (for draining)."""
        ...

    def counters(self) -> dict[str, float]:
        """Monotonic totals by Prometheus name."""
        ...

    def gauges(self) -> dict[str, float]:
        """Values now by Prometheus name."""
        ...

    def claims(self) -> tuple[list[Spans], list[Spans]]:
        """Blocks of live hand-overs: those that a peer may write, and those that are read."""
        ...

    def state(self) -> dict[str, Any]:
        """All that a person who looks for a fault wants to see."""
        ...

    def set_members(self, addresses: Sequence[str]) -> None:
        """Control addresses that the router vouches for."""
        ...

    def close(self) -> None:
        """Stop all hand-overs and give everything back."""
        ...

"""The role of an engine that stands alone: it computes, and hands nothing over."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest, Output, TransferSpec

if TYPE_CHECKING:
    from kvbaton.engine.executor import Executor
    from kvbaton.engine.process import Surroundings
    from kvbaton.engine.request import Request
    from kvbaton.engine.scheduler import Scheduler
    from kvbaton.types import Spans


class SoloFactory:
    """Makes the role inside the engine core's process."""

    sends_blocks: ClassVar[bool] = False

    @property
    def items(self) -> SoloFactory:
        """See `process.RoleFactory`."""
        return self

    def __call__(
        self, executor: Executor, scheduler: Scheduler, surroundings: Surroundings
    ) -> SoloRole:
        """See `process.RoleFactory`."""
        return SoloRole()


class SoloRole:
    """See `role.Role`; it has nobody to talk to."""

    control_address = None

    def __init__(self) -> None:
        self.wake_fd = os.eventfd(0)

    def accept(self, request: AddRequest) -> AddRequest:
        """Refuse parts in hand-overs.

        Raises:
            RequestError: the request has one.
        """
        if request.transfer is not None:
            raise RequestError(
                "this engine stands alone and hands nothing over", param="kv_transfer_params"
            )
        return request

    def added(self, request: AddRequest) -> None:
        """Nothing to prepare."""

    def progressed(self, request: Request) -> None:
        """Nobody waits for blocks."""

    def emitted(self, outputs: Sequence[Output]) -> list[Output]:
        """As they are."""
        return list(outputs)

    def decline(self, transfer: TransferSpec) -> None:
        """Nobody is known here."""

    def begin(self) -> None:
        """No hand-over starts."""

    def poll(self) -> list[Output]:
        """Nothing happens elsewhere."""
        return []

    def ended(self, request_id: str) -> None:
        """Nothing was kept for it."""

    def busy(self) -> bool:
        """Never."""
        return False

    def counters(self) -> dict[str, float]:
        """None beside the scheduler's."""
        return {}

    def gauges(self) -> dict[str, float]:
        """None beside the scheduler's."""
        return {}

    def claims(self) -> tuple[list[Spans], list[Spans]]:
        """None."""
        return [], []

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def set_members(self, addresses: Sequence[str]) -> None:
        """It dials nobody."""

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.wake_fd)

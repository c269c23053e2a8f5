"""The encoder beside a language model: an engine core of its own, turned by the other one's loop.

Its prompts are items (`items.py`), its executor computes encoder outputs, its prefix cache is the
encoder cache, its role receives from encoder nodes, and its store keeps outputs. No turn blocks:
steps run in the executor's thread and wake the loop when they are over.
"""

from __future__ import annotations

from typing import Any

from kvbaton.engine.core import EngineCore
from kvbaton.engine.encoder.cache_manager import Abort, Decline, EncoderCacheManager, Submit
from kvbaton.engine.encoder.pool import EncoderPool
from kvbaton.messages.engine import AbortRequest, FromCore, Outputs, Rejected, ToCore

PREFIX = "kvbaton_"
OWN = "kvbaton_encoder_"


class Desk:
    """The `Mailbox` of a core in the same thread.

    Attributes:
        sent: what the core said and nobody has read.
    """

    def __init__(self) -> None:
        self.sent: list[FromCore] = []

    def receive(self, timeout: float, wake_fd: int) -> list[ToCore]:
        """Nothing comes this way: whoever turns the core calls it."""
        return []

    def send(self, message: FromCore) -> None:
        """Leave a message to be read."""
        self.sent.append(message)


class EncoderSide:
    """Turns the encoder's core.

    Args:
        core: over items; its executor must not block.
        desk: its mailbox.
        pool: where outputs are, for the language model's runner.
    """

    def __init__(self, core: EngineCore, desk: Desk, pool: EncoderPool) -> None:
        self.core, self.desk, self.pool = core, desk, pool
        self.wake_fd = core.wake_fd

    def turn(self, items: EncoderCacheManager) -> None:
        """Do all that can be done at once."""
        self.core.scheduler.pinned = items.pins
        for order in items.take_orders():
            match order:
                case Submit(request):
                    self.core.add(request)
                case Abort(request_id):
                    self.core.abort(AbortRequest(request_id=request_id))
                case Decline(transfer):
                    self.core.role.decline(transfer)
        self.core.listen()
        self._collect(items)
        self.core.launch()
        while self._is_stuck() and items.give_up_one():
            self.core.launch()
        self.core.update()
        self._collect(items)

    def patience(self, items: EncoderCacheManager) -> float:
        """Seconds that the loop may sleep for all that this side knows."""
        return 0.0 if items.has_orders else self.core.patience()

    def _collect(self, items: EncoderCacheManager) -> None:
        """Pin what is done before anything else takes its place in the cache."""
        sent, self.desk.sent = self.desk.sent, []
        for message in sent:
            match message:
                case Outputs(outputs=outputs):
                    for output in outputs:
                        if output.finish_reason is not None:
                            items.ended(output)
                case Rejected():
                    items.rejected(message)

    def _is_stuck(self) -> bool:
        """Whether the first in the queue has no room, and nothing that runs will make any."""
        scheduler = self.core.scheduler
        works = scheduler.running or scheduler.loading or self.core.in_flight
        return bool(scheduler.waiting) and not works

    def counters(self) -> dict[str, float]:
        """The core's totals, under names of their own."""
        return {_own(name): value for name, value in self.core.counters().items()}

    def gauges(self) -> dict[str, float]:
        """The core's gauges, likewise."""
        return {_own(name): value for name, value in self.core.gauges().items()}

    def state(self) -> dict[str, Any]:
        """The core's debugging dump."""
        return self.core.state()


def _own(name: str) -> str:
    return name if name.startswith(OWN) else OWN + name.removeprefix(PREFIX)

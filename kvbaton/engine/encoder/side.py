"""The encoder beside a language model: an engine core of its own, turned by the other one's loop.

Its prompts are items (`items.py`), its executor computes encoder outputs, its prefix cache is the
encoder cache, its role receives from encoder nodes, and its store keeps outputs. No turn blocks:
steps run in the executor's thread and wake the loop when they are over.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from kvbaton.engine.core import EngineCore
from kvbaton.engine.encoder.cache_manager import Abort, Decline, Submit
from kvbaton.engine.encoder.pool import EncoderPool
from kvbaton.engine.kv_connector import KVConnector
from kvbaton.engine.scheduler import Scheduler
from kvbaton.messages.engine import AbortRequest, FromCore, Output, Outputs, Rejected, ToCore

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


class EncoderSide(KVConnector):
    """Turns the encoder's core.

    Args:
        core: over items; its executor must not block.
        desk: its mailbox.
        pool: where outputs are, for the language model's runner.
        scheduler: of the language model, over this core's outputs.
    """

    name = "encoder"

    def __init__(
        self, core: EngineCore, desk: Desk, pool: EncoderPool, scheduler: Scheduler
    ) -> None:
        self.core, self.desk, self.pool = core, desk, pool
        self.wake_fds = (core.wake_fd,)
        self._scheduler, self._items = scheduler, scheduler.items
        core.scheduler.pinned = self._items.pins

    @override
    def poll(self, now: float) -> list[Output]:
        for order in self._items.take_orders():
            match order:
                case Submit(request):
                    self.core.add(request)
                case Abort(request_id):
                    self.core.abort(AbortRequest(request_id=request_id))
                case Decline(transfer):
                    for connector in self.core.connectors:
                        connector.decline(transfer)
        self.core.poll()
        self._collect()
        self.core.launch()
        while self._is_stuck() and self._items.give_up_one():
            self.core.launch()
        self.core.update()
        self._collect()
        return self._scheduler.end_failed()

    @override
    def next_deadline(self) -> float:
        return time.monotonic() + (0.0 if self._items.has_orders else self.core.patience())

    @override
    def busy(self) -> bool:
        return not self.core.is_idle()

    def _collect(self) -> None:
        """Pin what is done before anything else takes its place in the cache."""
        sent, self.desk.sent = self.desk.sent, []
        for message in sent:
            match message:
                case Outputs(outputs=outputs):
                    for output in outputs:
                        if output.finish_reason is not None:
                            self._items.ended(output)
                case Rejected():
                    self._items.rejected(message)

    def _is_stuck(self) -> bool:
        """Whether the first in the queue has no room, and nothing that runs will make any."""
        scheduler = self.core.scheduler
        works = scheduler.running or scheduler.loading or self.core.in_flight
        return bool(scheduler.waiting) and not works

    @override
    def set_members(self, addresses: Sequence[str]) -> None:
        self.core.set_members(addresses)

    @override
    def reset_prefix_cache(self) -> int:
        return self.core.reset_prefix_cache()

    @override
    def imbalance(self) -> int:
        return self.core.imbalance()

    @override
    def counters(self) -> dict[str, float]:
        return {_own(name): value for name, value in self.core.counters().items()}

    @override
    def gauges(self) -> dict[str, float]:
        return {_own(name): value for name, value in self.core.gauges().items()}

    @override
    def state(self) -> dict[str, Any]:
        return self.core.state()

    @override
    def close(self) -> None:
        self.core.close()


def _own(name: str) -> str:
    """A name of the core's metrics among those of the language model's core."""
    return name if name.startswith(OWN) else OWN + name.removeprefix(PREFIX)

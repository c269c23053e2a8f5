"""What the HTTP face needs of its engine; `engine.client.EngineClient` is one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from kvbaton.messages.engine import AddRequest, Metrics, Output, Ready


class NodeClient(Protocol):
    """An engine core as the HTTP process sees it."""

    @property
    def ready(self) -> Ready:
        """What the core said of itself when it came up."""
        ...

    @property
    def metrics(self) -> Metrics | None:
        """The latest counters and gauges."""
        ...

    @property
    def dead(self) -> str | None:
        """Why the core is gone; None while it lives."""
        ...

    def generate(self, request: AddRequest) -> AsyncGenerator[Output]:
        """See `edge.source.TokenSource`."""
        ...

    async def command(self, name: str, argument: Any = None) -> Any:
        """Ask the core something; see `wire.Command`.

        Raises:
            EngineDeadError: it is gone.
            TimeoutError: no answer in time.
            ValueError: it does not know the command.
        """
        ...

"""What `RequestMachine` speaks of: legs, why they fail, and the actions it asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvbaton.errors import RequestError
from kvbaton.messages.engine import Output
from kvbaton.messages.nodes import GenerateRequest, NodeInfo

Side = Literal["source", "target", "encoder"]
CLIENT_FAULTS = (400, 413, 422)
"""Statuses with which a node blames the request itself."""


@dataclass(frozen=True)
class Leg:
    """One HTTP request to one node; attempt, side and item name it within its request.

    Attributes:
        item: what an encoder encodes, by its index in the prompt; 0 for other sides.
    """

    attempt: int
    side: Side
    node: NodeInfo = field(compare=False)
    item: int = 0

    @property
    def name(self) -> str:
        """For people."""
        return f"encoder of item {self.item}" if self.side == "encoder" else self.side


@dataclass(frozen=True)
class LegError:
    """Why a leg failed.

    Attributes:
        message: for people.
        status: the HTTP status that the node answered, or None if there was no answer.
        param: of its error body.
        code: of its error body.
    """

    message: str
    status: int | None = None
    param: str | None = None
    code: str | None = None

    @property
    def summary(self) -> str:
        """For a client: what a node reports may hold a whole traceback."""
        return self.message.partition("\n")[0][:300]

    @property
    def blames_client(self) -> bool:
        """Whether no node would take this request; what the router itself added is our fault."""
        ours = (self.param or "").startswith("kv_transfer_params")
        return self.status in CLIENT_FAULTS and not ours


@dataclass(frozen=True)
class StartLeg:
    """Send this to the leg's node and report what it says."""

    leg: Leg
    body: GenerateRequest


@dataclass(frozen=True)
class CancelLeg:
    """Close the leg's connection at once."""

    leg: Leg


@dataclass(frozen=True)
class Emit:
    """Give this to the client."""

    output: Output


@dataclass(frozen=True)
class Finish:
    """All choices are complete. Legs still open end by themselves."""


@dataclass(frozen=True)
class Raise:
    """The request failed."""

    error: RequestError


Action = StartLeg | CancelLeg | Emit | Finish | Raise

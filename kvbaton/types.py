"""Types that several rooms share: names of blocks, nodes and attempts; bounds of messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

MAX_MESSAGE_BYTES = 64 << 20
"""A longer message is dropped unread and counted."""

ENCODER_BLOCK_ROWS = 32
"""Rows of one block of encoder output; an item's last block is filled up with zeros."""

Count = Annotated[int, Meta(ge=0, le=1 << 62)]

TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]

Id128 = Annotated[bytes, Meta(min_length=16, max_length=16)]

Key = Annotated[bytes, Meta(min_length=32, max_length=32)]

MAX_NAME = 256

Name = Annotated[str, Meta(max_length=MAX_NAME)]

MAX_TEXT = 4096

Text = Annotated[str, Meta(max_length=MAX_TEXT)]


def clip_text(text: str) -> str:
    """A text of any length as a `Text`: what is too long loses its middle."""
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[: MAX_TEXT - 515]} ... {text[-510:]}"


class NodeId(Struct, frozen=True):
    """A peer: a node and one life of it. A restarted node has another generation."""

    node: Name
    generation: Id128


class BlockSpan(Struct, frozen=True):
    """Consecutive logical blocks of one group and the physical blocks behind them."""

    first: Count
    blocks: tuple[Count, ...]


class TopLogprob(Struct, frozen=True, array_like=True):
    """One candidate of a position."""

    token: TokenId
    logprob: float
    rank: int


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Log probabilities at one position: the chosen token's own, and the best candidates."""

    logprob: float
    rank: int
    top: tuple[TopLogprob, ...] = ()


class ChoiceStart(Struct, frozen=True):
    """What P sampled for one choice: token 0 and what belongs to it."""

    token: TokenId
    logprobs: TokenLogprobs | None = None
    finish_reason: Name | None = None
    stop_reason: int | str | None = None


Spans = tuple[tuple[BlockSpan, ...], ...]
"""Blocks per group: element g lists the spans of group g."""


class Attempt(NamedTuple):
    """One attempt of one transfer."""

    transfer_id: bytes
    number: int


@dataclass(frozen=True)
class TransferTimers:
    """Every timer of the protocol, in seconds. `docs/protocol.md` says who owns which.

    Attributes:
        resend: until an unanswered question is asked again.
        progress_period: P sends `Progress` this often.
        progress_deadline: D gives up when nothing was heard of a transfer, or of the node that it
            waits for, for this long.
        total: D gives up after this long in any case, unless the request brought another value.
        lease: P holds blocks of a transfer this long after its last sign of life from D, and
            keeps a session twice as long.
        unclaimed: P waits this long for the `Reserve` of a request that it has computed.
        unannounced: P waits this long for the request of a `Reserve`; short, since D waits with it.
        fence_retry: between two attempts to fence a lost peer.
        quarantine_limit: a node with a quarter of its blocks in quarantine for longer is unhealthy.
        tombstone: ended attempts are remembered this long, to answer late messages right.
        silence: D ends its sessions with a peer of which it heard nothing for this long, and tries
            to fence it if it left blocks in quarantine.
        put_out: D asks nothing of a peer for this long after several mismatches.
    """

    resend: float = 0.5
    progress_period: float = 0.25
    progress_deadline: float = 5.0
    total: float = 300.0
    lease: float = 30.0
    unclaimed: float = 300.0
    fence_retry: float = 0.2
    quarantine_limit: float = 60.0
    tombstone: float = 600.0
    silence: float = 20.0
    put_out: float = 60.0
    unannounced: float = 15.0

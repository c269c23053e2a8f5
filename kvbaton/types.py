"""Types that several rooms share: names of blocks, nodes and attempts; bounds of messages."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from msgspec import Meta, Struct

MAX_MESSAGE_BYTES = 64 << 20
"""A longer message is dropped unread and counted."""

ENCODER_BLOCK_ROWS = 32
"""Rows of one block of encoder output; an item's last block is filled up with zeros."""

PINNED_SHARE_PER_PEER = 4
"""A source pins a quarter of its pool for the block keys of one peer, and refuses what is more."""

Count = Annotated[int, Meta(ge=0, le=1 << 62)]

Size = Annotated[int, Meta(ge=1, le=1 << 31)]

Positive = Annotated[float, Meta(gt=0)]

TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]

if TYPE_CHECKING:
    TokenIds = array[int]
else:
    TokenIds = array  # 3.11's takes no parameter
"""Token ids of a prompt, ``array("I", ids)``: copied, hashed and sent as memory. A list or a tuple
of 100,000 takes milliseconds of each process that it passes."""

Id128 = Annotated[bytes, Meta(min_length=16, max_length=16)]

KEY_BYTES = 32

Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]

MAX_NAME = 256

Name = Annotated[str, Meta(max_length=MAX_NAME)]

MAX_TEXT = 4096

Text = Annotated[str, Meta(max_length=MAX_TEXT)]


def clip_text(text: str) -> str:
    """A text of any length as a `Text`: what is too long loses its middle."""
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[: MAX_TEXT - 515]} ... {text[-510:]}"


def first_attended(position: Any, window: int, chunked: bool) -> Any:
    """First token that one at a position attends to.

    Args:
        position: an int, or an array or a tensor of them.
        window: tokens of a sliding window, the token's own included; 0 for all before it.
        chunked: it is of a chunk instead: tokens attend to those of their own chunk, which begin at
            multiples of `window`.
    """
    if not window:
        return position * 0
    if chunked:
        return position - position % window
    return (position - window + 1) * (position >= window)


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


class PromptLimits(Struct, frozen=True):
    """How long prompts may be on a node, by the blocks that its idle KV cache has for them.

    Attributes:
        computed: tokens of the longest prompt that it computes.
        received: of the longest one with a single choice that it takes from another node; what is
            longer it computes, though the other one did.
        choices: most that a prompt which it takes may have.
        choice_tokens: it must be so many tokens shorter for each choice beyond the first.
        lent: tokens of the longest prefix that it sends to one other node at a time; None of one
            that does not say.
    """

    computed: Count
    received: Count = 0
    choices: Count = 0
    choice_tokens: Count = 0
    lent: Count | None = None

    def receives(self, num_tokens: int, choices: int = 1) -> bool:
        """Whether a prompt is taken from another node."""
        longest = self.received - (choices - 1) * self.choice_tokens
        return choices <= self.choices and num_tokens <= longest


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
        resend: until whatever is repeated is said or tried again.
        progress_deadline: D gives up when nothing was heard of a transfer, or of the node that it
            waits for, for this long.
        total: D gives up after this long in any case, unless the request brought another value;
            P remembers a prompt that nobody has reserved this long after it was computed.
        lease: either side does without a sign of life of the other for this long. P holds blocks
            until then, waits so long for the request of a `Reserve`, and keeps a session twice as
            long; D ends its sessions, and tries to fence the peer if it left blocks in quarantine.
        quarantine_limit: a node with a quarter of its blocks in quarantine for longer is unhealthy;
            D asks nothing of a peer for this long after several mismatches.
        tombstone: ended attempts are remembered this long, to answer late messages right.
    """

    resend: float = 0.5
    progress_deadline: float = 5.0
    total: float = 300.0
    lease: float = 20.0
    quarantine_limit: float = 60.0
    tombstone: float = 600.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"timer {name} must be positive, not {value}")

"""Types that several packages share: names of blocks, nodes and attempts; bounds of messages."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from msgspec import Meta, Struct

MAX_MESSAGE_BYTES = 64 << 20
"""Maximum size of a message; longer ones are dropped unread and counted."""

ENCODER_BLOCK_ROWS = 32
"""Rows of a block of encoder output; the last block of an item is padded with zeros."""

PINNED_SHARE_PER_PEER = 4
"""A source pins at most one part in this many of its pool for block keys of one peer."""

Count = Annotated[int, Meta(ge=0, le=1 << 62)]

Size = Annotated[int, Meta(ge=1, le=1 << 31)]

Positive = Annotated[float, Meta(gt=0)]

TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]

if TYPE_CHECKING:
    TokenIds = array[int]
else:
    TokenIds = array  # 3.11's takes no parameter
"""Token ids of a prompt, ``array("I", ids)``, which are copied, hashed and sent as memory. A list
or tuple of 100,000 would take milliseconds in each process."""

Id128 = Annotated[bytes, Meta(min_length=16, max_length=16)]

KEY_BYTES = 32

Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]

MAX_NAME = 256

Name = Annotated[str, Meta(max_length=MAX_NAME)]

MAX_TEXT = 4096

Text = Annotated[str, Meta(max_length=MAX_TEXT)]


def clip_text(text: str) -> str:
    """Shorten a text to a `Text`; one that is too long loses its middle."""
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[: MAX_TEXT - 515]} ... {text[-510:]}"


def first_attended(position: Any, window: int, chunked: bool) -> Any:
    """Position of the first token that a token attends to.

    Args:
        position: Position of the token: an int, or an array or tensor of them.
        window: Number of tokens in a sliding window, the token itself included; 0 for no window.
        chunked: Whether `window` is the size of a chunk instead: tokens attend within their own
            chunk, and chunks begin at multiples of `window`.
    """
    if not window:
        return position * 0
    if chunked:
        return position - position % window
    return (position - window + 1) * (position >= window)


class NodeId(Struct, frozen=True):
    """A peer: one life of a node. A restarted node has another generation."""

    node: Name
    generation: Id128


class BlockSpan(Struct, frozen=True):
    """Consecutive logical blocks of one group, from `first` on, and their physical blocks."""

    first: Count
    blocks: tuple[Count, ...]


class TopLogprob(Struct, frozen=True, array_like=True):
    """One candidate token at a position."""

    token: TokenId
    logprob: float
    rank: int


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Log probabilities at one position: the chosen token's own, and the best candidates."""

    logprob: float
    rank: int
    top: tuple[TopLogprob, ...] = ()


class SampledToken(Struct, frozen=True):
    """A token that P sampled, its log probabilities, and why the choice ended with it if it did."""

    token: TokenId
    logprobs: TokenLogprobs | None = None
    finish_reason: Name | None = None
    stop_reason: int | str | None = None


class ChoiceStart(SampledToken, frozen=True):
    """Token 0 of a choice, and those that P sampled after it while its KV crossed."""

    more: tuple[SampledToken, ...] = ()


class PromptLimits(Struct, frozen=True):
    """The longest prompts of a node, by the blocks that its idle KV cache has for them.

    Attributes:
        computed: Tokens of the longest prompt that the node computes.
        received: Tokens of the longest prompt with a single choice that it receives from another
            node; it computes a longer one itself, although the other node has computed it.
        choices: Maximum number of choices of a prompt that it receives.
        choice_tokens: Tokens by which `received` is less for each choice beyond the first.
        lent: Tokens of the longest prefix that it sends to one other node at a time; None if the
            node does not say.
    """

    computed: Count
    received: Count = 0
    choices: Count = 0
    choice_tokens: Count = 0
    lent: Count | None = None

    def receives(self, num_tokens: int, choices: int = 1) -> bool:
        """Whether the node can receive a prompt of this length from another node."""
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
    """Every timer of the protocol, in seconds. `docs/protocol.md` says which side owns which.

    Attributes:
        resend: Interval at which messages and fences are repeated.
        progress_deadline: D gives up after this time without news of a transfer, or of the node
            that it waits for.
        total: D gives up after this time in any case, unless the request brought another value. P
            remembers a prompt without a `Reserve` for this time after it was computed.
        lease: Time that either side goes on without a sign of life of the other. P holds blocks
            until then, waits as long for the request of a `Reserve`, and keeps a session twice as
            long; D ends its sessions, and tries to fence the peer if it left blocks in quarantine.
        quarantine_limit: A node with a quarter of its blocks in quarantine for longer is unhealthy;
            D asks nothing of a peer for this time after several mismatches.
        tombstone: Time for which ended attempts are remembered, to answer late messages right.
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

"""Events and actions of the two state machines of the hand-over.

A machine is called with one event and the current time, and returns a list of actions, which the
transfer thread carries out in order. Machines do no I/O, read no clock and never wait. Times are
seconds on any monotonic clock.

All actions of one call are carried out before the next event is handled: an event that an action
causes (`Closed`, `Fenced`, `PeerGone`) waits until the list is done. Otherwise a `Reserve` might be
sent after its blocks were freed, and P would write into blocks that belong to another request.

A *transfer* is named by `Attempt` (transfer id and attempt number) within one session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import Struct

from kvbaton.connectors.digest import PendingSums
from kvbaton.connectors.pairing import GroupPairing
from kvbaton.connectors.plan import BlockTable
from kvbaton.messages.control import Control, DigestRun, RankCard
from kvbaton.types import Attempt, ChoiceStart, NodeId, Spans


class Link(NamedTuple):
    """One control connection to a peer, identified by the channel; replies use the same link."""

    id: bytes


@dataclass(frozen=True)
class Identity:
    """How a node identifies itself in `Hello` and `Welcome`.

    Attributes:
        node: Id and generation of the node.
        digest: Identity digest, 32 bytes; must be equal on both sides.
        record: The identity record in plain text, so that a refusal can name both values.
        transport: Name of the transport; must be equal on both sides.
        ranks: One card per rank.
    """

    node: NodeId
    digest: bytes
    record: dict[str, str]
    transport: str
    ranks: tuple[RankCard, ...]


class SourceEvent:
    """An event for P's machine."""


class TargetEvent:
    """An event for D's machine."""


Event = SourceEvent | TargetEvent


class Action:
    """An action that a machine returns."""


class AboutAttempt(Struct, frozen=True):
    """An event or action of one attempt of one transfer."""

    attempt: Attempt


# --- events of both sides ---


class Received(Struct, SourceEvent, TargetEvent, frozen=True):
    """A control message arrived."""

    link: Link
    message: Control


class PeerGone(Struct, SourceEvent, TargetEvent, frozen=True):
    """The transport or the channel found a peer's process to be gone."""

    node: NodeId


class Tick(Struct, SourceEvent, TargetEvent, frozen=True):
    """Time has passed; nothing else happened."""


# --- events of the source (P) ---


class Announce(AboutAttempt, SourceEvent, frozen=True):
    """The request of a transfer has arrived on P. A second one of the same attempt is refused.

    Attributes:
        prompt_key: Chained key over all prompt tokens.
        num_tokens: Prompt length.
    """

    prompt_key: bytes
    num_tokens: int


class BlocksReady(AboutAttempt, SourceEvent, frozen=True):
    """Tokens [start, end) of a reserved transfer are final in these blocks.

    Ranges of one attempt arrive in order and without gaps, from the `start` of `Engage` on. `end`
    is a multiple of the source's block size or the end of the prompt.

    The engine submits this event when the step that computes the tokens is launched or done. The
    transfer thread passes it to the machine once all `sums` are there: then the step is done.

    Attributes:
        spans: Per group, source blocks that hold at least [start, end).
        sums: Per group, the first block that is part of the digests, and the sums of the blocks
            from it on; opaque to the machine.
    """

    start: int
    end: int
    spans: Spans
    sums: tuple[tuple[int, PendingSums], ...] = ()


class FirstTokens(AboutAttempt, SourceEvent, frozen=True):
    """P sampled each choice's first tokens; all blocks of the prompt have been reported ready.

    For a transfer by block keys there are no choices, and the blocks reported ready are all that P
    holds.
    """

    choices: tuple[ChoiceStart, ...]
    cached_tokens: int = 0
    result_at: float | None = None
    """Time at which the engine had the result of the sampling step, for the timeline."""


class SourceFailed(AboutAttempt, SourceEvent, frozen=True):
    """P's engine can't finish this prompt (aborted by its client, error, shutting down)."""

    reason: str


class WriteEnded(AboutAttempt, SourceEvent, frozen=True):
    """The share of one rank pair in a write has ended.

    Attributes:
        write: Number of the write.
        source_rank: Rank that wrote.
        target_rank: Rank that was written to.
        ok: The bytes are visible at the target.
        drained: The share is terminal. If False (only with ``ok=False``), its bytes may still land,
            and another `WriteEnded` with ``drained=True`` follows.
        error: Why the write failed.
    """

    write: int
    source_rank: int
    target_rank: int
    ok: bool
    drained: bool = True
    error: str = ""


class Closed(Struct, SourceEvent, frozen=True):
    """`ClosePeer` was carried out: no write of that session reads P's memory any more.

    This proves nothing about D: bytes that were read before may still land there, unless a
    `WriteEnded` with ``drained`` said otherwise. Writes that are not terminal stay watched: their
    `WriteEnded` may follow, and P reports it to D when D asks.
    """

    session: bytes


class Stop(Struct, SourceEvent, frozen=True):
    """P shuts down: all live attempts fail, and are drained as far as that can still be proven."""


# --- events of the target (D) ---


class Start(AboutAttempt, TargetEvent, frozen=True):
    """D's engine has reserved blocks to be filled by P.

    Attributes:
        address: P's control address, already checked to be a member's.
        prompt_key: Chained key over all prompt tokens.
        num_tokens: Prompt length.
        spans: Per group, the reserved blocks.
        deadline_s: Hard limit in seconds from now; 0 means `TransferTimers.total`.
        keys: Keys of the wanted blocks, if P should send those that it holds; see
            `control.Reserve`.
    """

    address: str
    prompt_key: bytes
    num_tokens: int
    spans: Spans
    deadline_s: float = 0.0
    keys: bytes = b""


class Unneeded(Struct, TargetEvent, frozen=True):
    """D holds the whole prompt, or gave it up before reserving blocks: P need not compute it."""

    attempt: Attempt
    address: str


class Landed(AboutAttempt, TargetEvent, frozen=True):
    """A notice arrived at one of D's ranks: a part of a rank pair's share of a write has landed.

    Attributes:
        start: First token of the write.
        end: One past its last token.
        part: Number of the part; the pair's share has landed once all `parts` have.
        digests: P's digests of the pair's share; in one of the parts.
    """

    session: bytes
    write: int
    start: int
    end: int
    source_rank: int
    target_rank: int
    part: int = 0
    parts: int = 1
    digests: tuple[DigestRun, ...] = ()


class Verified(AboutAttempt, TargetEvent, frozen=True):
    """The digests of one write were compared, on all of D's ranks.

    Attributes:
        bad: Token ranges [start, end) whose digests do not match; empty if all match.
        error: Why they could not be compared; empty if they were.
    """

    write: int
    bad: tuple[tuple[int, int], ...] = ()
    error: str = ""


class CancelTarget(AboutAttempt, TargetEvent, frozen=True):
    """D's engine does not want the transfer any more (client gone, deadline, shutdown)."""


class Fenced(Struct, TargetEvent, frozen=True):
    """`Fence` succeeded: no byte of that peer generation can land here any more."""

    node: NodeId


class Unreachable(Struct, TargetEvent, frozen=True):
    """An address can't be dialled at all: it is invalid."""

    address: str
    reason: str


class SetMembers(Struct, TargetEvent, frozen=True):
    """The addresses of the Ps that D may use: sessions with them are opened before they are needed.

    An address that is no longer among them is forgotten once nothing needs it.
    """

    addresses: frozenset[str]


# --- actions of both sides ---


class SendMessage(Struct, Action, frozen=True):
    """Send a control message. If `link` is None (D's first message), dial `address`."""

    message: Control
    link: Link | None = None
    address: str | None = None


class OpenPeer(Struct, Action, frozen=True):
    """A session is up: connect the transport to the peer's ranks.

    On P this comes before any `Post` of the session; D needs it to fence the peer later.

    Attributes:
        pairs: The (source rank, target rank) pairs that share bytes.
    """

    session: bytes
    node: NodeId
    ranks: tuple[RankCard, ...]
    pairs: frozenset[tuple[int, int]]


# --- actions of the source ---


class ClosePeer(Struct, Action, frozen=True):
    """Close the transport's connections of a session; answer with `Closed`."""

    session: bytes


class Engage(AboutAttempt, Action, frozen=True):
    """A `Reserve` was accepted: the engine shall report `BlocksReady` from `start` on.

    The engine pins the blocks that it reports until `Release`. If the request has already ended,
    it is run again; most of its blocks are prefix hits then.

    Attributes:
        counted: Per group, the first token that digests cover; see `checks.counted_from`.
        keys: Keys of the blocks from `start` on, 32 bytes each, for a transfer by block keys. The
            engine computes nothing. It reports the blocks that it holds at once, in one
            `BlocksReady` and a `FirstTokens` without choices, or `SourceFailed` if it holds none.
    """

    start: int
    counted: tuple[int, ...]
    keys: bytes = b""


class Post(AboutAttempt, Action, frozen=True):
    """Write tokens [start, end) to the target; the notices carry the digests.

    The transfer thread plans and posts a write for each (source rank, target rank) pair of the
    session. A pair that shares no bytes of this write still sends its notice, so that the write has
    landed once every pair's notice is there. Each pair's share ends in a `WriteEnded`.

    Attributes:
        start: A multiple of the least common multiple of both block sizes, or the first token of
            the reservation.
        end: A multiple of the same, or the end of the prompt.
        pairings: Pairings of the groups.
        source: Per group, the source's block table of the whole prompt, see `plan.block_tables`.
        target: Likewise of the target.
    """

    session: bytes
    write: int
    start: int
    end: int
    pairings: Sequence[GroupPairing]
    source: Sequence[BlockTable]
    target: Sequence[BlockTable]


class RefuseAnnounce(AboutAttempt, Action, frozen=True):
    """The request of an `Announce` can't be used for a hand-over: the engine ends it.

    Attributes:
        code: ``conflict`` (an attempt of that name is live), ``too_many``, or how an earlier
            attempt of that name ended: ``expired``, ``cancelled``, ``not_needed``, else
            ``consumed``.
    """

    code: str


class Release(AboutAttempt, Action, frozen=True):
    """The attempt has ended and no write reads its blocks any more: the engine unpins them.

    Emitted exactly once for each `Engage`.

    Attributes:
        outcome: ``acked``, ``not_needed``, ``cancelled``, ``expired``, ``failed`` or ``lost``.
    """

    outcome: str


class StopSource(AboutAttempt, Action, frozen=True):
    """The prompt is not wanted any more: the engine aborts the request if it is still computed.

    Emitted before `Release`, for every attempt that ends before its `FirstTokens`. If the prompt
    was computed but not reserved in time, the engine forgets the request.
    """


class EvictSource(AboutAttempt, Action, frozen=True):
    """D found digest mismatches: the blocks of these token ranges leave P's prefix cache."""

    bad: tuple[tuple[int, int], ...]


class Abandon(Struct, Action, frozen=True):
    """Stop watching the writes of a closed session: D will not ask for them any more."""

    session: bytes


# --- actions of the target ---


class Verify(AboutAttempt, Action, frozen=True):
    """Compare the digests of a write that has landed; answer with `Verified`.

    Attributes:
        pairings: Pairings of the groups.
        target: Per group, the target's block table of the whole prompt, see `plan.block_tables`.
        counted: Per group, the first token that digests cover; see `checks.counted_from`.
    """

    write: int
    start: int
    end: int
    pairings: Sequence[GroupPairing]
    target: Sequence[BlockTable]
    counted: tuple[int, ...]
    digests: tuple[DigestRun, ...]


class Crossing(Struct, frozen=True):
    """How long the tokens of one attempt took to arrive; times on the machine's clock.

    Attributes:
        address: Control address of the source.
        fetched: The blocks were requested by key. Then the measurement covers all tokens from the
            `Start` on. Otherwise it begins at `Complete`, when all is posted, and covers the tokens
            that were not verified by then.
        tokens: Number of tokens measured.
        began: Begin of the measurement, see `fetched`.
        ended: Time at which all tokens had been verified.
    """

    address: str
    fetched: bool
    tokens: int
    began: float
    ended: float


class Deliver(AboutAttempt, Action, frozen=True):
    """All bytes have landed and are verified: the engine may use the blocks. Ends the attempt.

    Attributes:
        choices: First tokens of each choice; empty for a transfer by block keys.
        cached_tokens: Prompt tokens that were prefix hits on P.
        num_tokens: Tokens that arrived; for a transfer by block keys maybe fewer than wanted.
        times: When it was accepted, its first and last bytes landed, and all were verified.
        crossing: Measurement of the path from this source.
    """

    choices: tuple[ChoiceStart, ...]
    cached_tokens: int
    num_tokens: int
    times: tuple[tuple[str, float], ...] = ()
    crossing: Crossing | None = None


class Fail(AboutAttempt, Action, frozen=True):
    """The hand-over failed: the engine applies its load-failure policy. Ends the attempt for it.

    Attributes:
        valid_through: Tokens [start of the reservation, valid_through) are verified and usable.
        reason: Text for the log and for the policy ``fail``.
        answered: P refused or failed by itself, so the connection to it is not to blame.
    """

    valid_through: int
    reason: str
    answered: bool = False


class Unquarantine(AboutAttempt, Action, frozen=True):
    """No write of the attempt can land any more: its blocks may be freed or reused.

    Emitted exactly once for each `Start`, also after `Deliver`.
    """


class Fence(Struct, Action, frozen=True):
    """Ask the transport to fence a peer generation; on success answer with `Fenced`."""

    node: NodeId


class ForgetPeer(Struct, Action, frozen=True):
    """No blocks are reserved for a generation, nor will be: close the connections to it."""

    node: NodeId


class HangUp(Struct, Action, frozen=True):
    """An address is not used any more: close the control link to it."""

    address: str

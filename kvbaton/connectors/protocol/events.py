"""What goes into the two state machines of the hand-over, and what comes out.

A machine is called with one event and the time now, and answers with a list of actions, which the
transfer thread carries out in order. No machine does I/O, reads a clock or waits. Times are seconds
on any monotonic clock.

All actions of one call are carried out before the next event is handed in: an event that an action
causes (`Closed`, `Fenced`, `PeerGone`) waits until the list is done. A `Reserve` that left after
its blocks were freed would be a write into somebody else's memory.

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
    """One control connection to a peer, as the channel names it; replies go where it came from."""

    id: bytes


@dataclass(frozen=True)
class Identity:
    """What a side says of itself in `Hello` and `Welcome`.

    Attributes:
        node: this life of this node.
        digest: 32 bytes; must be equal on both sides.
        record: the same, readable, to name both values in a refusal.
        transport: name of the transport; must be equal on both sides.
        ranks: one card per rank.
    """

    node: NodeId
    digest: bytes
    record: dict[str, str]
    transport: str
    ranks: tuple[RankCard, ...]


class SourceEvent:
    """What P's machine takes."""


class TargetEvent:
    """What D's machine takes."""


Event = SourceEvent | TargetEvent


class Action:
    """What a machine answers with."""


class AboutAttempt(Struct, frozen=True):
    """An event or action that is about one attempt of one transfer."""

    attempt: Attempt


# --- events that both sides take ---


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
        prompt_key: chained key over all prompt tokens.
        num_tokens: prompt length.
    """

    prompt_key: bytes
    num_tokens: int


class BlocksReady(AboutAttempt, SourceEvent, frozen=True):
    """Tokens [start, end) of a reserved transfer are final in these blocks.

    Ranges of one attempt arrive in order and without gaps, from the `start` that `Engage` named.
    `end` is a multiple of the source's block size unless it is the end of the prompt.

    The engine submits it once a step has computed them; the transfer thread hands it in when all
    `sums` are there, which proves that the step is over.

    Attributes:
        spans: source blocks that hold at least [start, end), per group.
        sums: per group, the first block whose digest counts, and the sums of the blocks from it on;
            opaque to the machine.
    """

    start: int
    end: int
    spans: Spans
    sums: tuple[tuple[int, PendingSums], ...] = ()


class FirstTokens(AboutAttempt, SourceEvent, frozen=True):
    """P sampled token 0 of every choice; all blocks of the prompt have been reported ready.

    Of block keys there are no choices, and what has been reported ready is all that P holds.
    """

    choices: tuple[ChoiceStart, ...]
    cached_tokens: int = 0
    result_at: float | None = None
    """When the engine had the result of the step that sampled them, for the timeline."""


class SourceFailed(AboutAttempt, SourceEvent, frozen=True):
    """P's engine can't finish this prompt (aborted by its client, error, shutting down)."""

    reason: str


class WriteEnded(AboutAttempt, SourceEvent, frozen=True):
    """One rank pair's part of a write ended.

    Attributes:
        write: number of the write.
        source_rank: who wrote.
        target_rank: to whom.
        ok: the bytes are visible at the target.
        drained: terminal; if False (only with ``ok=False``) its bytes may still land and another
            `WriteEnded` with ``drained=True`` follows.
        error: why it failed.
    """

    write: int
    source_rank: int
    target_rank: int
    ok: bool
    drained: bool = True
    error: str = ""


class Closed(Struct, SourceEvent, frozen=True):
    """`ClosePeer` was carried out: nothing reads our memory for that session any more.

    It proves nothing about the far side: bytes that were read before may still land there, unless
    a `WriteEnded` with ``drained`` said otherwise. Writes that were not terminal are watched on:
    their `WriteEnded` may follow, and is told D if it asks.
    """

    session: bytes


class Stop(Struct, SourceEvent, frozen=True):
    """P stops: whatever is left over fails, and is drained as far as that still can be proven."""


# --- events of the target (D) ---


class Start(AboutAttempt, TargetEvent, frozen=True):
    """D's engine has reserved blocks and wants them filled.

    Attributes:
        address: P's control address, already checked to be a member.
        prompt_key: chained key over all prompt tokens.
        num_tokens: prompt length.
        spans: target blocks wanted, per group.
        deadline_s: hard limit in seconds from now; 0 takes `TransferTimers.total`.
        keys: of the blocks wanted, if P shall send what it holds; see `control.Reserve`.
    """

    address: str
    prompt_key: bytes
    num_tokens: int
    spans: Spans
    deadline_s: float = 0.0
    keys: bytes = b""


class Unneeded(Struct, TargetEvent, frozen=True):
    """D has the whole prompt, or wants it no more and has reserved nothing: P may stop."""

    attempt: Attempt
    address: str


class Landed(AboutAttempt, TargetEvent, frozen=True):
    """A notice arrived at one of D's ranks: a part of a rank pair's share of a write has landed.

    Attributes:
        start: first token of the write.
        end: past its last.
        part: which of `parts` it is; the bytes of a pair have landed when all of them have.
        digests: what P claims of the pair's bytes; in one of the parts.
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
        bad: token ranges [start, end) that do not match; empty if all do.
        error: why they could not be compared; empty if they were.
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
    """An address can't be dialled at all: it is none."""

    address: str
    reason: str


class SetMembers(Struct, TargetEvent, frozen=True):
    """D may hand over with the Ps at these addresses: open sessions before they are needed.

    An address that is no longer among them is forgotten once nothing needs it.
    """

    addresses: frozenset[str]


# --- actions of both sides ---


class SendMessage(Struct, Action, frozen=True):
    """Send a control message. `link` is None for D's own first message: then `address` dials."""

    message: Control
    link: Link | None = None
    address: str | None = None


class OpenPeer(Struct, Action, frozen=True):
    """A session is up: connect the transport to the peer's ranks.

    On P this comes before any `Post` of the session; D needs it to fence the peer later.

    Attributes:
        pairs: (source rank, target rank): who writes to whom.
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

    It holds (pins) the blocks that it reports until `Release`. If the request has already ended, it
    is run again: its blocks are cache hits mostly.

    Attributes:
        counted: per group, the first token that digests count; see `checks.counted_from`.
        keys: of blocks from `start` on, 32 bytes each. Those that it holds it reports at once, in
            one `BlocksReady` and `FirstTokens` without choices; without any, `SourceFailed`.
            Nothing is run.
    """

    start: int
    counted: tuple[int, ...]
    keys: bytes = b""


class Post(AboutAttempt, Action, frozen=True):
    """Write tokens [start, end) to the target; the digests go in the notices.

    The transfer thread plans and posts a write for each of the session's (source rank, target rank)
    pairs; one that shares no bytes of this write still gets its notice, so that "all notices" is
    simply all pairs. Each ends in a `WriteEnded`.

    Attributes:
        start: multiple of the least common multiple of both block sizes, or where the reservation
            begins.
        end: multiple of the same, or the end of the prompt.
        pairings: of the groups.
        source: per group, the block table of the whole prompt, see `plan.block_tables`.
        target: likewise.
    """

    session: bytes
    write: int
    start: int
    end: int
    pairings: Sequence[GroupPairing]
    source: Sequence[BlockTable]
    target: Sequence[BlockTable]


class RefuseAnnounce(AboutAttempt, Action, frozen=True):
    """The request of an `Announce` may not be used for a hand-over: the engine ends it.

    Attributes:
        code: ``conflict`` (an attempt of that name is alive), ``consumed``, ``expired``,
            ``cancelled`` or ``not_needed`` (it was, and ended so), ``too_many``.
    """

    code: str


class Release(AboutAttempt, Action, frozen=True):
    """The attempt is over and no write reads its blocks any more: the engine drops its holds.

    Emitted exactly once for each `Engage`.

    Attributes:
        outcome: ``acked``, ``not_needed``, ``cancelled``, ``expired``, ``failed``, ``lost``.
    """

    outcome: str


class StopSource(AboutAttempt, Action, frozen=True):
    """Nobody wants the prompt any more: the engine aborts the request if it still computes.

    Comes before `Release`, for every attempt that ends before its `FirstTokens`. Of one that was
    computed, and that nobody has reserved in time, it lets the engine forget the request.
    """


class EvictSource(AboutAttempt, Action, frozen=True):
    """D found bytes that do not match: blocks holding these token ranges leave P's prefix cache."""

    bad: tuple[tuple[int, int], ...]


class Abandon(Struct, Action, frozen=True):
    """Watch the writes of a closed session no longer: nobody will ask after them."""

    session: bytes


# --- actions of the target ---


class Verify(AboutAttempt, Action, frozen=True):
    """Compare the digests of a write that has landed; answer with `Verified`.

    Attributes:
        pairings: of the groups.
        target: per group, the block table of the whole prompt, see `plan.block_tables`.
        counted: per group, the first token that digests count; see `checks.counted_from`.
    """

    write: int
    start: int
    end: int
    pairings: Sequence[GroupPairing]
    target: Sequence[BlockTable]
    counted: tuple[int, ...]
    digests: tuple[DigestRun, ...]


class Crossing(Struct, frozen=True):
    """How long tokens of one attempt were on their way, on the machine's clock.

    Attributes:
        address: of the source's control channel.
        fetched: they were asked for by key: then from the `Start` on, and all of them. Else from
            `Complete` on, by which all is posted: those that had not landed and been verified.
        tokens: so many.
        began: see `fetched`.
        ended: all was here and verified.
    """

    address: str
    fetched: bool
    tokens: int
    began: float
    ended: float


class Deliver(AboutAttempt, Action, frozen=True):
    """All bytes are here and verified: the engine may use the blocks. Ends the attempt.

    Attributes:
        choices: token 0 of each; none of block keys.
        cached_tokens: that P did not have to compute.
        num_tokens: that are here; of block keys perhaps fewer than were wanted.
        times: when it was accepted, its first and last bytes landed, and all were verified.
        crossing: what it says of the way from that source.
    """

    choices: tuple[ChoiceStart, ...]
    cached_tokens: int
    num_tokens: int
    times: tuple[tuple[str, float], ...] = ()
    crossing: Crossing | None = None


class Fail(AboutAttempt, Action, frozen=True):
    """The hand-over failed: the engine applies its load-failure policy. Ends the attempt for it.

    Attributes:
        valid_through: tokens [start of the reservation, valid_through) are verified and usable.
        reason: for the log and for the policy ``fail``.
        answered: P has said that it will not or can't: the way from there is not to blame.
    """

    valid_through: int
    reason: str
    answered: bool = False


class Unquarantine(AboutAttempt, Action, frozen=True):
    """No write of the attempt can land any more: its reserved blocks may be freed.

    Emitted exactly once for each `Start`, also after `Deliver`.
    """


class Fence(Struct, Action, frozen=True):
    """Ask the transport to fence a peer generation; on success answer with `Fenced`."""

    node: NodeId


class ForgetPeer(Struct, Action, frozen=True):
    """Nothing is reserved for a generation, and none will be: close the connections to it."""

    node: NodeId


class HangUp(Struct, Action, frozen=True):
    """Nothing is asked of an address any more: close the link to it."""

    address: str

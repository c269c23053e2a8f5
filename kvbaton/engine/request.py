"""Requests and their sequences as the scheduler sees them, and the rules that end a sequence."""

from __future__ import annotations

import enum
import struct
import sys
from collections.abc import Collection, Iterable
from dataclasses import InitVar, dataclass, field
from typing import Any

from kvbaton.connectors.keys import Extra, block_keys
from kvbaton.engine.step import ItemRows
from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest, Item, Mark, SamplingParams
from kvbaton.types import TokenIds, TokenLogprobs

Tables = list[list[int]]
"""One block table per KV group (see `kv_cache_manager`)."""


class SequenceState(enum.Enum):
    """Stages in the life of a sequence."""

    WAITING = "waiting"
    """In the queue; it has not run yet and holds no block."""
    PARKED = "parked"
    """Beside the queue: it waits for a connector, an encoder output or a grammar."""
    LOADING = "loading"
    """A connector fills its blocks: a hand-over or a store."""
    RUNNING = "running"
    """It has blocks for all its tokens and takes part in steps."""
    PREEMPTED = "preempted"
    """In the queue again: its blocks were given to others, its tokens are kept."""
    FINISHED = "finished"
    """It has ended and holds no block."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request.

    Attributes:
        request: Request that the sequence belongs to.
        choice: Index of the choice.
        tokens: All known tokens: prompt, resumed and generated.
        num_groups: Number of KV groups; the sequence begins without blocks.
        tables: Block table of each group.
        rank: Order of service: priority, whether it goes last or first of that priority
            (`LateRequests`; 0 for neither), start tag, arrival, choice.
        state: See `SequenceState`.
        handle: Its number at the runner; 0 if the runner does not know it. A preempted sequence
            gets a new one.
        parent: Sequence to fork it from, until the fork is in a plan.
        num_computed: Positions whose KV is final.
        num_scheduled: Positions whose KV is final or computed by a step in flight.
        pending: Tokens that steps in flight will sample.
        sent: Per group, number of blocks of the table that the runner knows.
        committed: Per group, number of blocks that were offered to the prefix cache.
        trimmed: Per group, number of blocks behind the window, which were given back.
        shares_tail: Whether the block that it writes next is shared: it needs a private copy.
        chains: Keys of its full blocks, by block size.
        finish_reason: Why it ended; None before.
    """

    request: Request
    choice: int
    tokens: TokenIds
    num_groups: InitVar[int]
    tables: Tables = field(init=False)
    rank: tuple[int, int, int, int, int] = field(init=False)
    state: SequenceState = SequenceState.WAITING
    handle: int = field(init=False)
    parent: Sequence | None = field(init=False)
    num_computed: int = field(init=False)
    num_scheduled: int = field(init=False)
    pending: int = 0
    sent: list[int] = field(init=False)
    committed: list[int] = field(init=False)
    trimmed: list[int] = field(init=False)
    shares_tail: bool = field(init=False)
    chains: dict[int, list[bytes]] = field(default_factory=dict)
    finish_reason: str | None = None

    def __post_init__(self, num_groups: int) -> None:
        request = self.request
        self.rank = request.spec.priority, 0, request.start_tag, request.arrival, self.choice
        self.reset(num_groups)

    def reset(self, num_groups: int) -> None:
        """Hold no blocks in any group: nothing is computed, and the runner does not know it."""
        self.tables = [[] for _ in range(num_groups)]
        self.sent, self.committed, self.trimmed = ([0] * num_groups for _ in range(3))
        self.num_computed = self.num_scheduled = self.handle = 0
        self.shares_tail, self.parent = False, None

    @property
    def is_over(self) -> bool:
        """Whether it has ended and given its blocks back."""
        return self.state is SequenceState.FINISHED

    @property
    def num_generated(self) -> int:
        """Number of tokens after the prompt, resumed ones included."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def is_ending(self) -> bool:
        """Whether the token in flight reaches the length limit, so that it is the last."""
        return self.pending > 0 and len(self.tokens) + self.pending >= self.request.limit

    @property
    def unforked(self) -> int:
        """Number of choices still to be forked from this sequence when its prompt ends."""
        return self.request.params.n - len(self.request.sequences)

    def chain(self, block_size: int) -> list[bytes]:
        """Keys of all full blocks of its tokens, for blocks of `block_size` tokens."""
        known = self.chains.get(block_size, [])
        if len(known) < len(self.tokens) // block_size:
            known = block_keys(
                self.request.root,
                self.tokens,
                block_size,
                parent_keys=known,
                extras=self.request.extras,
            )
            self.chains[block_size] = known
        return known


@dataclass(slots=True, eq=False)
class Request:
    """A request in the engine.

    Attributes:
        request_id: Unique name.
        prompt: Prompt tokens, as the client gave them.
        num_known: Number of tokens known from the start: prompt and resumed ones.
        params: Sampling parameters.
        limit: Number of tokens, prompt included, at which every choice ends.
        start_tag: See `FairShares`.
        arrival: Number in order of arrival.
        deadline: Time on the scheduler's clock at which the request is ended.
        due: Time on the scheduler's clock when its first token is due; None without an objective.
        root: Root of its block keys.
        extras: What its items contribute to the block keys.
        source: Whether it prefills for another node.
        items: Multimodal items whose encoder outputs the prompt needs.
        spec: The message that the client sent.
        sequences: Choices that exist; the others are forked when the prompt ends.
        cached_tokens: Prompt tokens found in the prefix cache when it first got blocks, or that its
            source found; None before.
        transferred_tokens: Prompt tokens received from another node.
        received: Number of leading tokens whose KV came from another node.
        prompt_logprobs: Those reported so far; None if not wanted, or already sent.
        marks: Events since the last output; None unless the request is timed.
    """

    request_id: str
    prompt: TokenIds
    num_known: int
    params: SamplingParams
    limit: int
    start_tag: int
    arrival: int
    deadline: float
    due: float | None
    root: bytes
    extras: tuple[Extra, ...]
    source: bool
    items: tuple[Item, ...]
    spec: AddRequest
    sequences: list[Sequence] = field(default_factory=list)
    cached_tokens: int | None = None
    transferred_tokens: int = 0
    received: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    marks: list[Mark] | None = None

    def mark(self, name: str, at: float) -> None:
        """Record an event and its monotonic time, if the request is timed."""
        if self.marks is not None:
            self.marks.append(Mark(name, at))

    def take_marks(self) -> tuple[Mark, ...]:
        """Events since the last call."""
        if not self.marks:
            return ()
        marks, self.marks = self.marks, []
        return tuple(marks)

    @property
    def is_target(self) -> bool:
        """Whether another node computes its prompt."""
        return self.spec.transfer is not None and not self.source

    @property
    def state(self) -> SequenceState:
        """State of the first choice that has not ended."""
        live = (sequence.state for sequence in self.sequences if not sequence.is_over)
        return next(live, SequenceState.FINISHED)

    def final_tokens(self) -> int:
        """Number of the tokens known from the start whose KV is final."""
        return min(self.sequences[0].num_computed, self.num_known)

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """All prompt logprobs, for the first output; None unless the whole prompt was computed."""
        reported, self.prompt_logprobs = self.prompt_logprobs, None
        if reported is None or len(reported) != len(self.prompt) - 1:
            return None
        return (None, *reported)

    def describe(self) -> dict[str, Any]:
        """Facts for the debugging dump."""
        return {
            "request_id": self.request_id,
            "state": self.state.value,
            "priority": self.spec.priority,
            "prompt": len(self.prompt),
            "known": self.num_known,
            "deadline": self.deadline,
            "traceparent": self.spec.traceparent,
            "choices": [
                {
                    "choice": sequence.choice,
                    "state": sequence.state.value,
                    "tokens": len(sequence.tokens),
                    "computed": sequence.num_computed,
                    "blocks": [len(table) for table in sequence.tables],
                }
                for sequence in self.sequences
            ],
        }

    @property
    def reads_cache(self) -> bool:
        """Whether a cached prefix may be used; no, if prompt logprobs need the prompt computed.

        That holds for targets too: one that found its whole prompt in the cache would call off the
        source, which computes the logprobs.
        """
        return self.prompt_logprobs is None


@dataclass(frozen=True)
class ScheduledSequence:
    """Part of one sequence in a step in flight.

    Attributes:
        sequence: The sequence.
        handle: Its handle when planned; if it has another now, it was preempted or has ended.
        start: First position computed.
        end: Position after the last known token; draft tokens follow it.
        targets: Sequences that get the sampled tokens, in order.
        num_draft: Number of draft tokens.
    """

    sequence: Sequence
    handle: int
    start: int
    end: int
    targets: tuple[Sequence, ...]
    num_draft: int = 0


@dataclass(frozen=True)
class InFlightStep:
    """A plan that was handed out and whose result was not applied yet."""

    number: int
    scheduled: tuple[ScheduledSequence, ...]


def extras_of(items: Iterable[Item]) -> tuple[Extra, ...]:
    """What the items of a prompt contribute to the keys of its blocks.

    The grid is included because it decides positions, and no other check binds a client's grid to
    the item's digest.
    """
    return tuple(
        Extra(item.start, item.length, item.digest + struct.pack("<3q", *item.grid))
        for item in items
    )


def finish_of(
    sequence: Sequence, token: int, *, eos: Collection[int]
) -> tuple[str | None, int | None]:
    """How a sequence ends with `token`, its newest: (finish_reason, stop_reason), else Nones."""
    params = sequence.request.params
    if not params.min_tokens or sequence.num_generated >= params.min_tokens:
        if token in eos and not params.ignore_eos:
            return "stop", None
        if token in params.stop_token_ids:
            return "stop", token
    return ("length", None) if len(sequence.tokens) >= sequence.request.limit else (None, None)


class ItemOutputs:
    """Encoder outputs of a text-only model; `EncoderCacheManager` serves multimodal models."""

    def check(self, request: AddRequest) -> None:
        """Refuse items that can never be encoded.

        Raises:
            RequestError: Items overlap, lie outside of the prompt or are too large, or the model
                takes none.
        """
        if request.items:
            raise RequestError("this model takes text only", param="items")

    def request(self, sequence: Sequence, start: int) -> None:
        """Request the items from `start` on; only the next one if there was no room for all."""

    def ready_until(self, sequence: Sequence, start: int) -> int:
        """Start of the first item not ready from `start` on; beyond all tokens if all are."""
        return sys.maxsize

    def wait(self, sequence: Sequence, start: int) -> None:
        """Park a sequence that lacks the item at `start`."""

    def rows(self, sequence: Sequence, start: int, end: int) -> tuple[ItemRows, ...]:
        """Where the encoder outputs that tokens [start, end) need are."""
        return ()

    def computed(self, sequence: Sequence) -> None:
        """Release outputs whose tokens are computed."""

    def retired(self, sequence: Sequence) -> None:
        """Note that a sequence has ended."""

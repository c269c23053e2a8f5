"""Requests and their sequences as the scheduler sees them, and when a sequence ends."""

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
    """Where a sequence is in its life."""

    WAITING = "waiting"
    """In the queue, never ran; it holds no block."""
    PARKED = "parked"
    """Beside the queue: it waits for a store's answer or load, or for an encoder output."""
    LOADING = "loading"
    """A hand-over or a store is filling its blocks."""
    RUNNING = "running"
    """Has blocks for all its tokens; takes part in steps."""
    PREEMPTED = "preempted"
    """In the queue again: its blocks went to others, its tokens are kept."""
    FINISHED = "finished"
    """Over; it holds no block."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request.

    Attributes:
        request: whose.
        choice: its number.
        tokens: all known tokens: prompt, resumed, generated.
        num_groups: KV groups; it begins without blocks.
        tables: block tables per group.
        rank: order of service: priority, whether it goes last of that (`LateRequests`), start tag,
            arrival, choice.
        state: see `SequenceState`.
        handle: its name at the runner; 0 while the runner does not know it. A preempted
            sequence comes back under a new one.
        parent: the sequence to fork it from, until the runner was told.
        num_computed: positions whose KV is final.
        num_scheduled: positions whose KV is final or being computed by a step in flight.
        pending: tokens being sampled by steps in flight.
        sent: per group, blocks of its table that the runner knows.
        committed: per group, blocks that were offered to the prefix cache.
        trimmed: per group, blocks that its window has passed: given back, if it had them.
        shares_tail: the block that it writes next is not its own: it needs a private copy.
        chains: keys of its full blocks, by block size.
        finish_reason: why it ended.
    """

    request: Request
    choice: int
    tokens: TokenIds
    num_groups: InitVar[int]
    tables: Tables = field(init=False)
    rank: tuple[int, bool, int, int, int] = field(init=False)
    state: SequenceState = SequenceState.WAITING
    handle: int = 0
    parent: Sequence | None = None
    num_computed: int = 0
    num_scheduled: int = 0
    pending: int = 0
    sent: list[int] = field(init=False)
    committed: list[int] = field(init=False)
    trimmed: list[int] = field(init=False)
    shares_tail: bool = False
    chains: dict[int, list[bytes]] = field(default_factory=dict)
    finish_reason: str | None = None

    def __post_init__(self, num_groups: int) -> None:
        request = self.request
        self.rank = request.spec.priority, False, request.start_tag, request.arrival, self.choice
        self.tables = [[] for _ in range(num_groups)]
        self.sent = [0] * num_groups
        self.committed = [0] * num_groups
        self.trimmed = [0] * num_groups

    @property
    def is_over(self) -> bool:
        """Whether it has ended and its blocks are given back."""
        return self.state is SequenceState.FINISHED

    @property
    def num_generated(self) -> int:
        """Tokens after the prompt, resumed ones included."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def is_ending(self) -> bool:
        """Whether the token being sampled is its last, whatever it is."""
        return self.pending > 0 and len(self.tokens) + self.pending >= self.request.limit

    @property
    def unforked(self) -> int:
        """Choices that will be forked from this sequence when its prompt ends."""
        return self.request.params.n - len(self.request.sequences)

    def chain(self, block_size: int) -> list[bytes]:
        """Keys of all full blocks of its tokens."""
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
        request_id: its name.
        prompt: as the client gave it.
        num_known: tokens known from the start: the prompt and what was resumed.
        params: sampling.
        limit: tokens, the prompt included, at which a choice ends in any case.
        start_tag: see `FairShares`.
        arrival: its number in order of arrival.
        deadline: when it is ended, on the scheduler's clock.
        due: when its first token is to come, likewise; None for no objective.
        root: root of its block keys.
        extras: what its items add to them.
        source: it prefills for another node.
        items: multimodal items whose encoder outputs its prompt needs.
        spec: what the client sent.
        sequences: choices that exist; the others are forked when the prompt ends.
        cached_tokens: prompt tokens taken from the cache at its first admission; None before.
        transferred_tokens: prompt tokens received from another node.
        received: where the tokens end whose KV another node computed.
        prompt_logprobs: what steps have reported so far; None once it was put out.
        marks: what happened since the last output; None unless the request is timed.
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
        """Note when something happened, on the monotonic clock, if the request is timed."""
        if self.marks is not None:
            self.marks.append(Mark(name, at))

    def take_marks(self) -> tuple[Mark, ...]:
        """What happened since the last call."""
        if not self.marks:
            return ()
        marks, self.marks = self.marks, []
        return tuple(marks)

    @property
    def is_target(self) -> bool:
        """Another node computes its prompt."""
        return self.spec.transfer is not None and not self.source

    @property
    def state(self) -> SequenceState:
        """That of its first choice which is not over."""
        live = (sequence.state for sequence in self.sequences if not sequence.is_over)
        return next(live, SequenceState.FINISHED)

    def final_tokens(self) -> int:
        """Tokens known from the start whose KV is final."""
        return min(self.sequences[0].num_computed, self.num_known)

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """All of them with the first output, if the whole prompt was computed here."""
        reported, self.prompt_logprobs = self.prompt_logprobs, None
        if reported is None or len(reported) != len(self.prompt) - 1:
            return None
        return (None, *reported)

    def describe(self) -> dict[str, Any]:
        """For the debugging dump."""
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
        """Whether a cached prefix may be used: prompt logprobs need the prompt computed.

        A target, too: if it had all of the prompt, it would call off the source that computes them.
        """
        return self.prompt_logprobs is None


@dataclass(frozen=True)
class ScheduledSequence:
    """What a step in flight does for one sequence.

    Attributes:
        sequence: which.
        handle: its name then; another one now means that it was preempted or is over.
        start: first position computed.
        end: past the last one whose token is known; a draft's come after it.
        targets: who gets the sampled tokens, in order.
        num_draft: tokens of the draft.
    """

    sequence: Sequence
    handle: int
    start: int
    end: int
    targets: tuple[Sequence, ...]
    num_draft: int = 0


@dataclass(frozen=True)
class InFlightStep:
    """A plan that was handed out and whose result has not been applied."""

    number: int
    scheduled: tuple[ScheduledSequence, ...]


def extras_of(items: Iterable[Item]) -> tuple[Extra, ...]:
    """What the items of a prompt add to the keys of its blocks.

    The grid is part of it: it decides positions, and nobody else holds a client to the truth.
    """
    return tuple(
        Extra(item.start, item.length, item.digest + struct.pack("<3q", *item.grid))
        for item in items
    )


def finish_of(
    sequence: Sequence, token: int, *, eos: Collection[int]
) -> tuple[str | None, int | None]:
    """Whether a sequence ends with `token`, its newest: (finish_reason, stop_reason)."""
    params = sequence.request.params
    if not params.min_tokens or sequence.num_generated >= params.min_tokens:
        if token in eos and not params.ignore_eos:
            return "stop", None
        if token in params.stop_token_ids:
            return "stop", token
    return ("length", None) if len(sequence.tokens) >= sequence.request.limit else (None, None)


class ItemOutputs:
    """Of a model that takes text only. `EncoderCacheManager` is that of a model that sees."""

    def check(self, request: AddRequest) -> None:
        """Refuse items that can never be encoded.

        Raises:
            RequestError: they overlap, lie outside of the prompt, or one is too large; or the model
                takes none.
        """
        if request.items:
            raise RequestError("this model takes text only", param="items")

    def request(self, sequence: Sequence, start: int) -> None:
        """Ask for items with tokens from `start` on: for all, unless there was no room for them."""

    def ready_until(self, sequence: Sequence, start: int) -> int:
        """Where the first item begins that is not here, at least `start`; beyond all if all are."""
        return sys.maxsize

    def wait(self, sequence: Sequence, start: int) -> None:
        """Let a sequence that lacks the item at `start` wait beside the queue."""

    def rows(self, sequence: Sequence, start: int, end: int) -> tuple[ItemRows, ...]:
        """Where the outputs are that tokens [start, end) need."""
        return ()

    def computed(self, sequence: Sequence) -> None:
        """Let go of outputs whose tokens are computed."""

    def retired(self, sequence: Sequence) -> None:
        """A sequence is over."""

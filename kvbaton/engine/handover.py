"""The scheduler's side of hand-overs: blocks reserved for a source, blocks shown to a target.

A target's fresh blocks are marked *incoming* from the reservation until `unquarantine`, whatever
becomes of the request: a late write may still land in them. The marks alone keep them from being
handed out again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbaton.connectors.keys import prompt_key
from kvbaton.engine import request as requests
from kvbaton.engine.block_pool import NULL_BLOCK
from kvbaton.engine.kv_cache_manager import GroupSpec, Match
from kvbaton.messages.engine import Output, TransferSpec
from kvbaton.types import Attempt, BlockSpan, ChoiceStart, Spans

if TYPE_CHECKING:
    from kvbaton.engine.scheduler import Scheduler


@dataclass(frozen=True)
class Admitted:
    """A target whose blocks are reserved, or that needs none.

    Attributes:
        request_id: whose.
        transfer: as the client sent it.
        num_tokens: tokens to be handed over, counted from position 0: all that are known.
        cached_tokens: how many of them are here already.
        prompt_key: chained key over all of them.
        spans: per group, the blocks wanted.
        deadline_s: seconds until the request ends.
        full_hit: everything is here; nothing is reserved, and the request runs already.
    """

    request_id: str
    transfer: TransferSpec
    num_tokens: int
    cached_tokens: int
    prompt_key: bytes
    spans: Spans
    deadline_s: float
    full_hit: bool = False


class Handover:
    """Reserves, delivers and gives back.

    Attributes:
        reserved: blocks with an incoming mark, by attempt.
        admitted: targets that the role has not seen yet.
    """

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self.reserved: dict[Attempt, Spans] = {}
        self.admitted: list[Admitted] = []
        self._scheduler = scheduler
        self._blocks = scheduler.blocks
        self._clock = clock

    # --- target ---

    def reserve(self, sequence: requests.Sequence, match: Match) -> None:
        """Take blocks for all that the cache lacks, and let a source write them."""
        total = len(sequence.tokens)
        self._scheduler.adopt(sequence, match)
        self._blocks.skip_unneeded(sequence.tables, total)
        spans = self._blocks.reserve(sequence.tables, total)
        self._scheduler.load(sequence)
        self._admit(sequence.request, match.num_tokens, spans)

    def skip(self, sequence: requests.Sequence) -> None:
        """A sequence is about to run: if it was a target, it needs nothing from its source."""
        if sequence.request.attempt is not None:
            nothing: Spans = tuple(() for _ in self._blocks.groups)
            self._admit(sequence.request, len(sequence.tokens), nothing, full_hit=True)

    def _admit(
        self, request: requests.Request, cached: int, spans: Spans, *, full_hit: bool = False
    ) -> None:
        assert request.spec.transfer is not None
        assert request.attempt is not None
        if not full_hit:
            self.reserved[request.attempt] = spans
        request.attempt = None
        known = request.sequences[0].tokens
        self.admitted.append(
            Admitted(
                request_id=request.request_id,
                transfer=request.spec.transfer,
                num_tokens=len(known),
                cached_tokens=cached,
                prompt_key=prompt_key(
                    request.root, known, extras=requests.extras_of(request.spec.items)
                ),
                spans=spans,
                deadline_s=max(0.0, request.deadline - self._clock()),
                full_hit=full_hit,
            )
        )

    def loaded(
        self, request_id: str, choices: Sequence[ChoiceStart], cached_tokens: int
    ) -> list[Output]:
        """Everything is here and verified: go on with the tokens that the source sampled."""
        sequence = self._scheduler.loading.get(request_id)
        if sequence is None:
            return []
        request, total = sequence.request, len(sequence.tokens)
        if len(choices) != request.params.n:
            reason = f"the source sent {len(choices)} first tokens for n={request.params.n}"
            return self.load_failed(request_id, total, reason)
        self._scheduler.totals.cached_at_source += cached_tokens
        if any(self._is_too_early(sequence, choice.token) for choice in choices):
            self._requeue(sequence, total)
            return []
        self._arrived(sequence, total)
        self._scheduler.run(sequence)
        self._fork_all(sequence)
        return self._start(request, choices)

    def _is_too_early(self, sequence: requests.Sequence, token: int) -> bool:
        """Whether a token would end the text before `min_tokens`, and must be sampled anew here.

        A proxy that asks the source for one token can't tell it of `min_tokens`.
        """
        params = sequence.request.params
        ends = () if params.ignore_eos else self._scheduler.config.eos_token_ids
        is_end = token in params.stop_token_ids or token in ends
        return is_end and sequence.num_generated < params.min_tokens

    def _arrived(self, sequence: requests.Sequence, end: int) -> None:
        """Tokens up to `end` have valid KV, from now on for everybody."""
        request, before = sequence.request, sequence.num_computed
        sequence.num_computed = sequence.num_scheduled = max(before, end)
        request.received = sequence.num_computed
        sequence.commit(self._blocks)
        request.transferred_tokens = sequence.num_computed - before
        self._scheduler.totals.prompt_tokens["transferred"] += request.transferred_tokens

    def _fork_all(self, sequence: requests.Sequence) -> None:
        request = sequence.request
        for choice in range(1, request.params.n):
            child = self._scheduler.new_sequence(request, choice, list(sequence.tokens))
            self._scheduler.fork(sequence, child)
            child.parent = None  # The runner does not know it; the child comes with its tokens.

    def _start(self, request: requests.Request, choices: Sequence[ChoiceStart]) -> list[Output]:
        outputs = []
        for sequence, choice in zip(request.sequences, choices, strict=True):
            # The source was perhaps asked for one token only: its "length" is no limit of ours.
            told = choice.finish_reason == "stop"
            finish = (choice.finish_reason, choice.stop_reason) if told else None
            outputs.append(self._scheduler.append(sequence, choice.token, choice.logprobs, finish))
        for sequence in [s for s in request.sequences if s.finish_reason is not None]:
            self._scheduler.retire(sequence)
        return outputs

    def load_failed(self, request_id: str, valid_through: int, reason: str) -> list[Output]:
        """Apply the load-failure policy.

        What was verified, in whole blocks, goes to the prefix cache; the request goes back to the
        queue as an ordinary one and gets fresh blocks for the rest when it is admitted.
        """
        sequence = self._scheduler.loading.get(request_id)
        if sequence is None:
            return []
        self._scheduler.totals.load_failures += 1
        if self._scheduler.config.kv_load_failure_policy == "fail":
            error = f"the KV cache could not be loaded: {reason}"
            return self._scheduler.end(sequence.request, "error", error)
        self._requeue(sequence, min(valid_through, len(sequence.tokens)))
        return []

    def _requeue(self, sequence: requests.Sequence, valid: int) -> None:
        """Keep the whole blocks of `valid` tokens in the cache and queue for the rest."""
        self._arrived(sequence, valid - valid % self._blocks.alignment)
        self._scheduler.requeue(sequence)

    def unquarantine(self, attempt: Attempt) -> None:
        """No write of an attempt can land any more: its blocks may be handed out again."""
        spans = self.reserved.pop(attempt, None)
        if spans is not None:
            self._blocks.release_incoming(spans)

    # --- source ---

    def computed(self, request_id: str) -> int | None:
        """Prompt tokens whose KV is final; None for a request that is not live."""
        request = self._scheduler.requests.get(request_id)
        if request is None:
            return None
        return min(request.sequences[0].num_computed, request.num_known)

    def spans(self, request_id: str, start: int, end: int) -> Spans:
        """Blocks that hold tokens [start, end) of a live request, per group."""
        tables = self._scheduler.requests[request_id].sequences[0].tables
        return tuple(
            _span(group, table, start, end)
            for group, table in zip(self._blocks.groups, tables, strict=True)
        )

    def evict(self, spans: Spans, bad: Sequence[tuple[int, int]]) -> None:
        """Take blocks that hold tokens of these ranges out of the prefix cache."""
        for group, pool, group_spans in zip(
            self._blocks.groups, self._blocks.pools, spans, strict=True
        ):
            for span in group_spans:
                for i, block in enumerate(span.blocks, start=span.first):
                    start, end = i * group.block_size, (i + 1) * group.block_size
                    if any(low < end and start < high for low, high in bad):
                        pool.evict([block])


def _span(group: GroupSpec, table: list[int], start: int, end: int) -> tuple[BlockSpan, ...]:
    """Blocks of one group that hold tokens [start, end), without those that it does not keep."""
    first, past = start // group.block_size, group.blocks_for(end)
    while first < past and table[first] == NULL_BLOCK:
        first += 1
    return (BlockSpan(first, tuple(table[first:past])),) if first < past else ()

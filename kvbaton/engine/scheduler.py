"""Decides what the engine computes next: the scheduler, as the core loop and the roles see it.

Sans-IO: requests and step results in, plans and outputs out, and an injected clock.

- `validate.py` refuses what can never be served;
- `roster.py` holds the requests and moves them through their states;
- `admission.py` is the one rule by which a request gets its blocks;
- `planner.py` makes the steps;
- `handover.py` is the part that the prefill and decode roles use;
- `stash.py` is the part that a store fills and is filled from;
- `blocks.py` and `pool.py` account for every block; `ledger.py` audits them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvbaton.engine import request as requests
from kvbaton.engine.encoder.cache_manager import EncoderCacheManager
from kvbaton.engine.handover import Admitted, Handover
from kvbaton.engine.kv_cache_manager import KVCacheManager, Tables
from kvbaton.engine.planner import Item, Planner
from kvbaton.engine.request import Request
from kvbaton.engine.roster import Roster, SchedulerConfig
from kvbaton.engine.step import Sampled, StepPlan, StepResult
from kvbaton.engine.store_connector import StoreConnector, StoreConnectorConfig
from kvbaton.engine.validate import validate_request
from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest, Output
from kvbaton.types import Attempt, ChoiceStart, Spans

__all__ = ["Admitted", "Scheduler", "SchedulerConfig"]


class Scheduler:
    """Continuous batching with chunked prefill, prefix caching and preemption by recompute.

    Args:
        config: its settings.
        root_key: root of the block keys of requests with a given cache salt.
        clock: monotonic seconds.
        stash: settings of the store, if there is one.
        outputs: where the encoder outputs of prompts come from; None if they have no items.

    Attributes:
        blocks: all block pools.
        roster: the live requests.
        stash: decides what the store does; None without one.
        items: decides which encoder outputs are asked for and kept; None without an encoder.
        pinned: blocks that somebody else than requests and hand-overs refers to.
        on_progress: called for a source request after each step that computed some of it, before
            the blocks of a finished one are given back.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        root_key: Callable[[str], bytes],
        clock: Callable[[], float] = time.monotonic,
        on_progress: Callable[[Request], None] | None = None,
        stash: StoreConnectorConfig | None = None,
        outputs: Scheduler | None = None,
    ) -> None:
        self.config = config
        self.blocks = KVCacheManager(config.groups, enable_caching=config.enable_prefix_caching)
        self.roster = Roster(config, self.blocks)
        self.on_progress = on_progress
        self.root_key = root_key
        self._clock = clock
        self._handover = Handover(self.roster, clock)
        self.stash = None if stash is None else StoreConnector(stash, self.roster, clock)
        self.items = (
            None
            if outputs is None
            else EncoderCacheManager(self.roster, outputs.blocks, outputs.root_key)
        )
        self.pinned: Callable[[], Iterable[Tables]] = tuple
        self._planner = Planner(self.roster, self._handover, self.stash, self.items)
        self._arrivals = 0

    # --- requests ---

    def add(self, request: AddRequest) -> None:
        """Take a request into the queue.

        Raises:
            RequestError: it can never be served here; names the field and the limit.
        """
        validate_request(request, self.config, self.blocks)
        self._check_items(request)
        attempt = self._check_names(request)
        known = [*request.token_ids, *request.resume_ids]
        source = request.transfer is not None and request.transfer.role == "source"
        params = request.params
        limit = len(known) + 1 if source else len(request.token_ids) + params.max_tokens
        self._arrivals += 1
        entered = Request(
            request_id=request.request_id,
            prompt=request.token_ids,
            num_known=len(known),
            params=params,
            limit=min(limit, self.config.max_model_len),
            priority=request.priority,
            arrival=self._arrivals,
            deadline=self._clock() + request.deadline_s,
            root=self.root_key(request.cache_salt),
            source=source,
            attempt=attempt,
            spec=request,
            prompt_logprobs=None if params.prompt_logprobs is None else [],
        )
        self.roster.enter(entered, known)
        (sequence,) = entered.sequences
        if self.stash is not None and self.stash.ask(sequence):
            self.roster.ask(sequence)
        elif self.items is not None and attempt is None:
            # The last token is computed in any case, and may be one of an item.
            cached = min(self._cached(sequence), len(known) - 1) if entered.reads_cache else 0
            self.items.ask(sequence, cached)

    def _check_items(self, request: AddRequest) -> None:
        if self.items is not None:
            self.items.check(request)
        elif request.items and not self.config.whole_prompts:
            raise RequestError("this model takes text only", param="items")

    def _check_names(self, request: AddRequest) -> Attempt | None:
        """Refuse names in use; returns the attempt that a target awaits."""
        if request.request_id in self.roster.requests:
            raise RequestError(
                f"request id {request.request_id!r} is in use", param="request_id", status=409
            )
        attempt, transfer = None, request.transfer
        if transfer is not None and transfer.role == "target":
            attempt = Attempt(transfer.transfer_id, transfer.attempt)
        awaited = {live.attempt for live in self.roster.requests.values()}
        if attempt is not None and (attempt in awaited or attempt in self._handover.reserved):
            raise RequestError(
                f"transfer {attempt.transfer_id.hex()} attempt {attempt.number} is in use",
                param="kv_transfer_params.transfer_id",
                status=409,
                code="transfer_consumed",
            )
        return attempt

    def request(self, request_id: str) -> Request | None:
        """A live request."""
        return self.roster.requests.get(request_id)

    def is_cached(self, request_id: str) -> bool:
        """Whether the prefix cache holds all tokens of a live request, in whole blocks."""
        (sequence, *_) = self.roster.requests[request_id].sequences
        return self._cached(sequence) == len(sequence.tokens)

    def _cached(self, sequence: requests.Sequence) -> int:
        """Tokens of the longest prefix in the prefix cache."""
        chains = [sequence.chain(group.block_size) for group in self.blocks.groups]
        return self.blocks.match(chains, len(sequence.tokens)).num_tokens

    def abort(self, request_id: str, reason: str = "abort") -> list[Output]:
        """End a request now; unknown ids are ignored.

        Any reason but ``abort`` makes it an error with that text.
        """
        request = self.roster.requests.get(request_id)
        if request is None:
            return []
        if reason == "abort":
            return self.roster.end(request, "abort")
        return self.roster.end(request, "error", reason)

    def end_failed(self) -> list[Output]:
        """End requests whose encoder outputs can't be had."""
        outputs: list[Output] = []
        for request, error in () if self.items is None else self.items.take_failed():
            outputs += self.roster.end(request, "error", error)
        return outputs

    def expire(self, now: float) -> list[Output]:
        """End requests whose deadline has passed; with them come those that could never fit."""
        outputs = self._flush()
        if self.stash is not None:
            outputs += self.stash.expire(now)
        for request in self.roster.due(now):
            error = f"the request's deadline of {request.spec.deadline_s:g} s has passed"
            outputs += self.roster.end(request, "error", error)
        return outputs

    def next_deadline(self) -> float | None:
        """When `expire` has something to do, on the clock given."""
        if self.roster.outbox:
            return self._clock()
        stash = None if self.stash is None else self.stash.next_deadline()
        deadlines = (self.roster.next_deadline(), stash)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _flush(self) -> list[Output]:
        outputs, self.roster.outbox = self.roster.outbox, []
        return outputs

    # --- steps ---

    def has_work(self) -> bool:
        """Whether any request is live, any step in flight, or any output unsent."""
        return bool(self.roster.requests or self._planner.in_flight or self.roster.outbox)

    def can_schedule(self) -> bool:
        """Whether `schedule` would do something now."""
        return self._planner.can_plan()

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None if there is nothing to compute now.

        May be called again while one earlier plan has not been updated.
        """
        return self._planner.plan()

    def update(self, result: StepResult) -> list[Output]:
        """Apply what the oldest step in flight has computed and sampled."""
        flight = self._planner.in_flight.popleft()
        assert flight.number == result.number, f"step {result.number} is not the oldest in flight"
        sampled = {sample.handle: sample for sample in result.sampled}
        outputs = self._flush()
        for item in flight.items:
            outputs += self._apply(item, sampled.get(item.handle))
        self.blocks.settle(flight.number)
        return outputs

    def _apply(self, item: Item, sampled: Sampled | None) -> list[Output]:
        """One sequence's part of a step. Of a preempted one only the sampled tokens count."""
        if sampled is not None and sampled.error is not None:
            return self._failed(item, sampled.error)
        live = item.sequence.handle == item.handle
        if live:
            self._computed(item, sampled)
        outputs = self._append(item, sampled) if item.targets else []
        if live and item.sequence.request.source and self.on_progress is not None:
            self.on_progress(item.sequence.request)
        for sequence in item.targets:
            if sequence.finish_reason is not None and not sequence.is_over:
                self.roster.retire(sequence)
        return outputs

    def _failed(self, item: Item, error: str) -> list[Output]:
        """What a step could not compute ends its request."""
        for sequence in item.targets:
            sequence.pending -= 1
        return self.roster.end(item.sequence.request, "error", error)

    def _computed(self, item: Item, sampled: Sampled | None) -> None:
        sequence, request = item.sequence, item.sequence.request
        sequence.num_computed = item.end
        sequence.commit(self.blocks)
        if self.items is not None:
            self.items.computed(sequence)
        of_prompt = min(item.end, len(request.prompt)) - item.start
        self.roster.totals.prompt_tokens["computed"] += max(0, of_prompt)
        if request.prompt_logprobs is not None and sampled is not None:
            request.prompt_logprobs += sampled.prompt_logprobs or ()

    def _append(self, item: Item, sampled: Sampled | None) -> list[Output]:
        assert sampled is not None, f"the ranks sampled nothing for handle {item.handle}"
        outputs = []
        for i, sequence in enumerate(item.targets):
            sequence.pending -= 1
            if sequence.finish_reason is None:
                logprobs = sampled.logprobs[i] if sampled.logprobs else None
                outputs.append(self.roster.take(sequence, sampled.token_ids[i], logprobs))
        return outputs

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; returns how many blocks held one."""
        return self.blocks.reset_cache()

    # --- hand-overs: what the roles use ---

    @property
    def reserved(self) -> dict[Attempt, Spans]:
        """Blocks with an incoming mark, by attempt."""
        return dict(self._handover.reserved)

    def take_admitted(self) -> list[Admitted]:
        """Targets admitted since the last call."""
        admitted, self._handover.admitted = self._handover.admitted, []
        return admitted

    def untaken(self) -> Sequence[Admitted]:
        """Targets that `take_admitted` has yet to hand over."""
        return tuple(self._handover.admitted)

    def loaded(
        self, request_id: str, choices: Sequence[ChoiceStart], cached_tokens: int
    ) -> list[Output]:
        """A target's KV is here and verified: emit the source's first tokens and go on from them.

        Args:
            request_id: unknown or late ones are ignored.
            choices: one per choice.
            cached_tokens: how many tokens the source had in its cache.
        """
        return self._handover.loaded(request_id, choices, cached_tokens)

    def load_failed(self, request_id: str, valid_through: int, reason: str) -> list[Output]:
        """A target's KV did not come, or only its tokens before `valid_through` are verified."""
        return self._handover.load_failed(request_id, valid_through, reason)

    def unquarantine(self, attempt: Attempt) -> None:
        """No write of an attempt can land any more. Unknown attempts are ignored."""
        self._handover.unquarantine(attempt)

    def computed(self, request_id: str) -> int | None:
        """Prompt tokens of a live request whose KV is final."""
        return self._handover.computed(request_id)

    def spans(self, request_id: str, start: int, end: int) -> Spans:
        """Blocks that hold tokens [start, end) of a live request, per group."""
        return self._handover.spans(request_id, start, end)

    def hold_outgoing(self, spans: Spans) -> None:
        """Keep blocks as they are: a transfer may read them."""
        self.blocks.hold_outgoing(spans)

    def release_outgoing(self, spans: Spans) -> None:
        """Undo one `hold_outgoing`."""
        self.blocks.release_outgoing(spans)

    def evict(self, spans: Spans, bad: Sequence[tuple[int, int]]) -> None:
        """Take blocks that hold tokens of the ranges `bad` out of the prefix cache."""
        self._handover.evict(spans, bad)

    # --- accounts ---

    def counters(self) -> dict[str, float]:
        """Monotonic totals by Prometheus name."""
        totals = self.roster.totals
        return {
            "kvbaton_requests_received_total": float(totals.received),
            **_labelled("kvbaton_requests_finished_total", "reason", totals.finished.items()),
            **_labelled("kvbaton_prompt_tokens_total", "source", totals.prompt_tokens.items()),
            "kvbaton_prompt_tokens_cached_at_source_total": float(totals.cached_at_source),
            "kvbaton_generation_tokens_total": float(totals.generated),
            "kvbaton_preemptions_total": float(totals.preemptions),
            "kvbaton_load_failures_total": float(totals.load_failures),
            **({} if self.stash is None else self.stash.counters()),
            **({} if self.items is None else self.items.counters()),
        }

    def gauges(self) -> dict[str, float]:
        """Values now by Prometheus name."""
        values = {
            "kvbaton_sequences_waiting": float(len(self.roster.waiting) + len(self.roster.asking)),
            "kvbaton_sequences_running": float(len(self.roster.running)),
            "kvbaton_sequences_loading": float(len(self.roster.loading)),
        }
        for g in range(len(self.blocks.groups)):
            for owner, count in self.blocks.owners(g).items():
                values[f'kvbaton_blocks{{group="{g}",owner="{owner}"}}'] = float(count)
        return values | ({} if self.stash is None else self.stash.gauges())

    def state(self) -> dict[str, Any]:
        """All that a person who looks for a fault wants to see."""
        owners: list[Counter[str]] = [self.blocks.owners(g) for g in range(len(self.blocks.groups))]
        return {
            "blocks": [dict(counts) for counts in owners],
            "steps_in_flight": [flight.number for flight in self._planner.in_flight],
            "reserved": [f"{a.transfer_id.hex()}/{a.number}" for a in self._handover.reserved],
            "stash": None if self.stash is None else self.stash.state(),
            "requests": [_describe(request) for request in self.roster.requests.values()],
        }


def _labelled(name: str, label: str, counts: Iterable[tuple[str, int]]) -> dict[str, float]:
    return {f'{name}{{{label}="{value}"}}': float(count) for value, count in counts}


def _describe(request: Request) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "state": request.state.value,
        "priority": request.priority,
        "prompt": len(request.prompt),
        "known": request.num_known,
        "deadline": request.deadline,
        "choices": [
            {
                "choice": sequence.choice,
                "state": sequence.state.value,
                "tokens": len(sequence.tokens),
                "computed": sequence.num_computed,
                "blocks": [len(table) for table in sequence.tables],
            }
            for sequence in request.sequences
        ],
    }

"""Who is in the engine: the live requests, the queue, those who run, and what they put out."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from kvbaton.engine.config import LoadFailurePolicy
from kvbaton.engine.kv_cache_manager import GroupSpec, KVCacheManager, Match
from kvbaton.engine.request import Request, Sequence, State, finish_of
from kvbaton.errors import ConfigError
from kvbaton.messages.engine import Output
from kvbaton.types import TokenLogprobs, clip_text


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler needs to know. Names as in `EngineConfig`.

    Attributes:
        groups: one per KV group.
        max_model_len: longest prompt plus output.
        vocab_size: the model's; all token ids are below it.
        max_num_seqs: most sequences that run, or load, at a time.
        max_num_batched_tokens: most tokens in one step.
        whole_prompts: compute a prompt in one step; one that is longer than a step may be has the
            step for itself.
        enable_prefix_caching: reuse blocks of equal prefixes.
        eos_token_ids: the model's own end tokens.
        kv_load_failure_policy: what to do when handed-over bytes do not arrive.
        max_loading_share: share of a pool that hand-overs may have reserved, quarantine included,
            so that a crowd of them does not take what running requests grow into. A hand-over that
            is alone is never refused by it.
        debug_forbid_prompt_compute: end requests that would compute a prompt token but the last.
    """

    groups: tuple[GroupSpec, ...]
    max_model_len: int
    vocab_size: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    eos_token_ids: tuple[int, ...] = ()
    kv_load_failure_policy: LoadFailurePolicy = "recompute"
    max_loading_share: float = 0.75
    debug_forbid_prompt_compute: bool = False
    whole_prompts: bool = False

    def __post_init__(self) -> None:
        for flag in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, flag) < 1:
                name = "--" + flag.replace("_", "-")
                raise ConfigError(name, f"{getattr(self, flag)} is too small; at least 1")


@dataclass
class Totals:
    """Monotonic totals.

    Attributes:
        received: requests taken.
        finished: requests that are over, by finish reason of their last choice.
        prompt_tokens: prompt tokens by source: ``computed``, ``local_cache``, ``transferred``,
            ``store``.
        cached_at_source: of the transferred ones, those that the source had in its cache.
        generated: tokens put out.
        preemptions: sequences whose blocks went to others.
        load_failures: hand-overs and loads from a store that failed.
    """

    received: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: Counter[str] = field(default_factory=Counter)
    cached_at_source: int = 0
    generated: int = 0
    preemptions: int = 0
    load_failures: int = 0


class Roster:
    """Moves sequences between the states of their life, and makes their outputs.

    Attributes:
        config: the scheduler's settings.
        blocks: all pools.
        requests: live ones by id.
        waiting: the queue, in order of service.
        running: sequences with blocks, in order of service.
        asking: sequences beside the queue that wait for a store or for an item.
        loading: sequences that a hand-over or a store fills, by request id.
        ended: handles that the runner has yet to forget.
        outbox: outputs made while a step was planned.
        totals: what happened so far.
        on_retire: each is called with a sequence that is over.
    """

    def __init__(self, config: SchedulerConfig, blocks: KVCacheManager) -> None:
        self.config = config
        self.blocks = blocks
        self.requests: dict[str, Request] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.asking: set[Sequence] = set()
        self.loading: dict[str, Sequence] = {}
        self.ended: list[int] = []
        self.outbox: list[Output] = []
        self.totals = Totals()
        self.on_retire: list[Callable[[Sequence], None]] = []
        self._deadlines: list[tuple[float, int, Request]] = []

    def sequences(self) -> Iterator[Sequence]:
        """All sequences that may hold blocks."""
        return (s for request in self.requests.values() for s in request.sequences)

    # --- into the queue and out of it ---

    def enter(self, request: Request, tokens: list[int]) -> None:
        """Take a new request into the queue."""
        self.requests[request.request_id] = request
        heapq.heappush(self._deadlines, (request.deadline, request.arrival, request))
        self.totals.received += 1
        sequence = self.new_sequence(request, 0, tokens)
        request.sequences.append(sequence)
        self.wait(sequence, State.WAITING)

    def new_sequence(self, request: Request, choice: int, tokens: list[int]) -> Sequence:
        """A choice without blocks."""
        sequence = Sequence(request, choice, tokens, self.blocks.empty())
        sequence.sent = [0] * len(sequence.tables)
        sequence.committed = [0] * len(sequence.tables)
        return sequence

    def wait(self, sequence: Sequence, state: State) -> None:
        """Put a sequence into the queue, where its priority and arrival belong."""
        sequence.state = state
        insort(self.waiting, sequence, key=lambda s: s.rank)

    def ask(self, sequence: Sequence) -> None:
        """From now on a sequence waits for a store or for an item, beside the queue."""
        self.leave(sequence)
        sequence.state = State.ASKING
        self.asking.add(sequence)

    def wait_again(self, sequence: Sequence) -> None:
        """Put a sequence that has asked back into the queue."""
        self.leave(sequence)
        self.wait(sequence, State.WAITING)

    def requeue(self, sequence: Sequence) -> None:
        """Put a sequence that was loading back into the queue, without its blocks."""
        self.leave(sequence)
        sequence.clear(self.blocks)
        self.wait(sequence, State.WAITING)

    def run(self, sequence: Sequence) -> None:
        """From now on a sequence takes part in steps."""
        self.leave(sequence)
        sequence.request.stored = range(0)
        sequence.state = State.RUNNING
        insort(self.running, sequence, key=lambda s: s.rank)

    def load(self, sequence: Sequence) -> None:
        """From now on a hand-over or a store fills a sequence's blocks."""
        self.leave(sequence)
        sequence.request.stored = range(0)
        sequence.state = State.LOADING
        self.loading[sequence.request.request_id] = sequence

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue, or from those who run or load."""
        match sequence.state:
            case State.RUNNING:
                self.running.remove(sequence)
            case State.ASKING:
                self.asking.remove(sequence)
            case State.LOADING:
                del self.loading[sequence.request.request_id]
            case State.WAITING | State.PREEMPTED if sequence in self.waiting:
                self.waiting.remove(sequence)

    def adopt(self, sequence: Sequence, match: Match) -> None:
        """Give a sequence the blocks of a cached prefix."""
        request = sequence.request
        sequence.tables = [list(table) for table in match.tables]
        self.blocks.ref(sequence.tables)
        sequence.num_computed = sequence.num_scheduled = match.num_tokens
        sequence.committed = [match.num_tokens // group.block_size for group in self.blocks.groups]
        if request.cached_tokens is None:
            # Of a prompt that is cached to its end the last token is computed again.
            known = len(sequence.tokens)
            request.cached_tokens = min(match.num_tokens, len(request.prompt), known - 1)
            self.totals.prompt_tokens["local_cache"] += request.cached_tokens

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a new choice run on the blocks of another whose prompt is scheduled to its end."""
        child.tables = [list(table) for table in parent.tables]
        self.blocks.ref(child.tables)
        child.num_computed = child.num_scheduled = parent.num_scheduled
        child.committed = [child.num_computed // group.block_size for group in self.blocks.groups]
        child.chains = dict(parent.chains)
        child.shares_tail, child.parent = True, parent
        child.request.sequences.append(child)
        self.run(child)

    def preempt(self, sequence: Sequence) -> None:
        """Give a running sequence's blocks to others; it goes on from its tokens later."""
        self.totals.preemptions += 1
        if sequence.request.prompt_logprobs:
            sequence.request.prompt_logprobs.clear()  # the prompt will be computed again
        self._part(sequence)
        self.wait(sequence, State.PREEMPTED)

    def _part(self, sequence: Sequence) -> None:
        """Take a sequence from the runner and from its blocks."""
        self.leave(sequence)
        if sequence.handle is not None:
            self.ended.append(sequence.handle)
        sequence.handle = sequence.parent = None
        sequence.sent = [0] * len(sequence.tables)
        sequence.clear(self.blocks)
        for sibling in sequence.request.sequences:
            if sibling.parent is sequence:
                sibling.parent = None

    # --- tokens and ends ---

    def take(
        self,
        sequence: Sequence,
        token: int,
        logprobs: TokenLogprobs | None,
        finish: tuple[str | None, int | str | None] | None = None,
    ) -> Output:
        """Append a sampled token; `finish` overrides our own stop rules."""
        request, index = sequence.request, sequence.num_generated
        sequence.tokens.append(token)
        self.totals.generated += 1
        sequence.finish_reason, stop_reason = finish or finish_of(
            sequence, token, eos=self.config.eos_token_ids
        )
        return self._output(
            request,
            sequence.choice,
            index,
            token_ids=(token,),
            logprobs=None if logprobs is None else (logprobs,),
            prompt_logprobs=self._prompt_logprobs(request),
            finish_reason=sequence.finish_reason,
            stop_reason=stop_reason,
        )

    def _output(self, request: Request, choice: int, index: int, **fields: object) -> Output:
        output = Output(
            request_id=request.request_id,
            choice=choice,
            index=index,
            cached_tokens=request.cached_tokens or 0,
            transferred_tokens=request.transferred_tokens,
        )
        return msgspec.structs.replace(output, **fields)

    def _prompt_logprobs(self, request: Request) -> tuple[TokenLogprobs | None, ...] | None:
        """All of them with the first output, if the whole prompt was computed here."""
        reported, request.prompt_logprobs = request.prompt_logprobs, None
        if reported is None or len(reported) != len(request.prompt) - 1:
            return None
        return (None, *reported)

    def retire(self, sequence: Sequence) -> None:
        """A sequence has its finish reason: give its blocks back."""
        assert sequence.finish_reason is not None
        self._part(sequence)
        sequence.state = State.FINISHED
        for listener in self.on_retire:
            listener(sequence)
        request = sequence.request
        if not sequence.unforked and request.state is State.FINISHED:
            self.totals.finished[sequence.finish_reason] += 1
            del self.requests[request.request_id]

    def end(self, request: Request, reason: str, error: str | None = None) -> list[Output]:
        """End all choices of a request, whatever state they are in."""
        outputs = []
        while request.sequences[0].unforked > 0:
            known = request.sequences[0].tokens[: request.num_known]
            choice = len(request.sequences)
            request.sequences.append(self.new_sequence(request, choice, known))
        for sequence in [s for s in request.sequences if s.finish_reason is None]:
            outputs.append(self.fail(sequence, reason, error))
        return outputs

    def fail(self, sequence: Sequence, reason: str, error: str | None = None) -> Output:
        """End one choice without a token."""
        sequence.finish_reason = reason
        output = self._output(
            sequence.request,
            sequence.choice,
            sequence.num_generated,
            finish_reason=reason,
            error=None if error is None else clip_text(error),
        )
        self.retire(sequence)
        return output

    # --- deadlines ---

    def next_deadline(self) -> float | None:
        """When the first live request must end."""
        while self._deadlines and not self._is_live(self._deadlines[0][2]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def due(self, now: float) -> list[Request]:
        """Live requests whose deadline has passed."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if self._is_live(request):
                late.append(request)
        return late

    def _is_live(self, request: Request) -> bool:
        return self.requests.get(request.request_id) is request

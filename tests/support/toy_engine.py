"""A deterministic toy model over real block tables, and a loop that drives the scheduler with it.

The "KV" of a position is a hash of its token and of all KV that it attends to, read through the
block tables. So a wrong, stale, wrongly shared or prematurely reused block changes the tokens.
"""

from __future__ import annotations

import os
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.connectors.keys import root_key
from kvbaton.connectors.layout import GroupKind
from kvbaton.connectors.protocol.events import Deliver, Fail, Start, Unneeded, Unquarantine
from kvbaton.decode.target_connector import TargetConnector
from kvbaton.engine.audit import audit
from kvbaton.engine.config import SchedulerConfig, SpeculativeConfig
from kvbaton.engine.kv_cache_manager import GroupSpec
from kvbaton.engine.kv_connector import Connectors, KVConnector
from kvbaton.engine.request import Sequence as Sequence_
from kvbaton.engine.request import SequenceState
from kvbaton.engine.scheduler import Scheduler
from kvbaton.engine.step import Sampled, SequenceStep, StepPlan, StepResult
from kvbaton.messages.engine import AddRequest, Output, SamplingParams, TransferSpec
from kvbaton.types import Attempt, ChoiceStart, Spans, TokenLogprobs

VOCAB = 23
EOS = 3
MASK = (1 << 61) - 1
FULL = GroupSpec(block_size=4, num_blocks=17)
WINDOW = GroupSpec(block_size=4, num_blocks=17, kind=GroupKind.WINDOW, window=6)
CHUNK = GroupSpec(block_size=4, num_blocks=17, kind=GroupKind.CHUNK, window=8)
STATE = GroupSpec(block_size=4, num_blocks=17, kind=GroupKind.STATE)


def mix(*parts: int) -> int:
    value = 0x9E3779B97F4A7C15
    for part in parts:
        value = ((value ^ part) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & MASK
        value ^= value >> 29
    return value


def lowest(group: GroupSpec, position: int) -> int:
    """First position that `position` attends to; for a state, the previous one."""
    if group.kind is GroupKind.CHUNK:
        return position // group.window * group.window
    reach = 2 if group.kind is GroupKind.STATE else group.window
    return max(0, position - reach + 1) if reach else 0


def kv_of(g: int, group: GroupSpec, tokens: list[int]) -> list[int]:
    """The toy KV of every position of a sequence, computed without blocks."""
    kv: list[int] = []
    for position, token in enumerate(tokens):
        kv.append(mix(g, position, token, *kv[lowest(group, position) :]))
    return kv


def scores(prompt: Sequence[int]) -> list[TokenLogprobs]:
    """Prompt logprobs of every token, as if the first one had any."""
    return [TokenLogprobs(-1.0 - token, position) for position, token in enumerate(prompt)]


def next_token(attended: list[list[int]], choice: int) -> int:
    return mix(choice, *(value for row in attended for value in row)) % VOCAB


@dataclass
class Row:
    tokens: list[int]
    params: SamplingParams
    choice: int
    tables: list[list[int]]
    num_prompt: int = 0
    branches: tuple[int, tuple[int, ...]] | None = None


class ToyRanks:
    """Executes plans strictly as `engine/step.py` specifies."""

    def __init__(self, groups: tuple[GroupSpec, ...]) -> None:
        self.groups = groups
        self.memory: dict[tuple[int, int], int] = {}  # of all groups: they share blocks
        self.rows: dict[int, Row] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for handle in plan.ended:
            del self.rows[handle]
        for copy in plan.copies:
            for slot in range(self.groups[copy.group].block_size):
                self.memory[copy.target, slot] = self.memory.get((copy.source, slot), 0)
        for fork in plan.forks:
            parent = self.rows[fork.parent]
            assert parent.branches is not None
            length, tokens = parent.branches
            assert len(parent.tokens) == length + 1, "the parent has moved on before its fork"
            self._add(
                fork.child,
                [*parent.tokens[:length], tokens[fork.choice]],
                parent.params,
                fork.choice,
            )
        for new in plan.new:
            self._add(new.handle, list(new.token_ids), new.params, new.choice)
            self.rows[new.handle].num_prompt = new.num_prompt
        kinds = [not step.decodes for step in plan.steps]
        assert len({step.handle for step in plan.steps}) == len(plan.steps)
        assert kinds == sorted(kinds), "decoding sequences come first"
        scores = {step.handle: self._scores(step) for step in plan.steps}
        ran = (self._verify(s) if s.draft else self._step(s) for s in plan.steps)
        sampled = (msgspec.structs.replace(s, prompt_logprobs=scores[s.handle]) for s in ran)
        return StepResult(plan.number, tuple(sampled))

    def _add(self, handle: int, tokens: list[int], params: SamplingParams, choice: int) -> None:
        assert handle not in self.rows, "a handle is never used twice"
        self.rows[handle] = Row(tokens, params, choice, [[] for _ in self.groups])

    def _step(self, step: SequenceStep) -> Sampled:
        row = self.rows[step.handle]
        if step.num_samples:
            del row.tokens[step.start + step.count :]  # rejected tokens of an earlier draft
        fields = step.handle, step.start, step.count, step.new_blocks, step.num_samples
        return self._compute(*fields)

    def _scores(self, step: SequenceStep) -> tuple[TokenLogprobs, ...] | None:
        """`scores` of the prompt tokens that follow those of a step."""
        row = self.rows[step.handle]
        if row.params.prompt_logprobs is None:
            return None
        first, past = step.start + 1, min(step.start + step.count + 1, row.num_prompt)
        return tuple(scores(row.tokens[: row.num_prompt])[first:past])

    def _verify(self, step: SequenceStep) -> Sampled:
        """Compute the draft token by token, and sample after each."""
        row, found = self.rows[step.handle], list[int]()
        assert step.decodes
        assert step.num_samples == 1
        del row.tokens[step.start + 1 :]
        for i, guess in enumerate((*step.draft, None)):
            blocks = step.new_blocks if i == 0 else ((),) * len(self.groups)
            sampled = self._compute(step.handle, step.start + i, 1, blocks, 1)
            found += sampled.token_ids
            if guess is not None:
                row.tokens[-1] = guess
        row.tokens[step.start + 1 :] = found
        pairs = zip(step.draft, found, strict=False)
        good = next((i for i, (a, b) in enumerate(pairs) if a != b), len(step.draft))
        return Sampled(step.handle, tuple(found[: good + 1]))

    def _compute(
        self,
        handle: int,
        start: int,
        count: int,
        new_blocks: tuple[tuple[int, ...], ...],
        num_samples: int,
    ) -> Sampled:
        row = self.rows[handle]
        for table, blocks in zip(row.tables, new_blocks, strict=True):
            table.extend(blocks)
        assert start + count <= len(row.tokens), "the runner does not have that token"
        attended: list[list[int]] = []
        for g, group in enumerate(self.groups):
            if group.kind is GroupKind.STATE:
                attended.append(self._scan(g, row, start, start + count))
                continue
            for position in range(start, start + count):
                low = lowest(group, position)
                before = [self._read(g, row, i) for i in range(low, position)]
                value = mix(g, position, row.tokens[position], *before)
                block = row.tables[g][position // group.block_size]
                assert block != 0, "the null block is never written"
                self.memory[block, position % group.block_size] = value
            attended.append([*before, value])
        if not num_samples:
            return Sampled(handle, ())
        assert start + count == len(row.tokens)
        choices = [row.choice] if num_samples == 1 else list(range(num_samples))
        tokens = tuple(next_token(attended, choice) for choice in choices)
        if num_samples > 1:
            row.branches = (len(row.tokens), tokens)
        row.tokens.append(tokens[0])
        return Sampled(handle, tokens)

    def _scan(self, g: int, row: Row, start: int, end: int) -> list[int]:
        """Advance a state over tokens [start, end); the last two values."""
        size, table = self.groups[g].block_size, row.tables[g]
        values = [self.memory[table[(start - 1) // size], 0]] if start else []
        border = end - end % size
        for position in range(start, end):
            values.append(mix(g, position, row.tokens[position], *values[-1:]))
            kept = position + 1 == border and table[position // size]
            if kept or position + 1 == end:
                assert table[position // size] != 0, "the null block is never written"
                self.memory[table[position // size], 0] = values[-1]
        return values[-2:]

    def _read(self, g: int, row: Row, position: int) -> int:
        size = self.groups[g].block_size
        return self.memory[row.tables[g][position // size], position % size]

    def receive(self, spans: Spans, tokens: list[int], end: int) -> None:
        """Write the KV of tokens before `end` into the blocks of `spans`, as a source does."""
        for g, group in enumerate(self.groups):
            kv = kv_of(g, group, tokens)
            for span in spans[g]:
                for i, block in enumerate(span.blocks, start=span.first):
                    for slot in range(group.span_tokens):
                        position = i * group.span_tokens + slot
                        if position < min(end, len(tokens)):
                            self.memory[block, slot] = kv[position]

    def scribble(self, spans: Spans) -> None:
        """Overwrite the blocks of `spans` with garbage, as a late write would."""
        for g, group in enumerate(self.groups):
            for span in spans[g]:
                for block in span.blocks:
                    for slot in range(group.block_size):
                        self.memory[block, slot] = -1


def direct(
    groups: tuple[GroupSpec, ...], request: AddRequest, choice: int, max_model_len: int
) -> tuple[list[int], str]:
    """Expected (new tokens, finish reason) of a request, computed without blocks or batches."""
    params = request.params
    tokens = [*request.token_ids, *request.resume_ids]
    kv = [kv_of(g, group, tokens) for g, group in enumerate(groups)]
    new: list[int] = []
    while True:
        last = len(tokens) - 1
        rows = [kv[g][lowest(group, last) :] for g, group in enumerate(groups)]
        # Each choice has its own noise; its first token is sampled from the shared prompt.
        token = next_token(rows, choice)
        tokens.append(token)
        new.append(token)
        for g, group in enumerate(groups):
            kv[g].append(mix(g, last + 1, token, *kv[g][lowest(group, last + 1) :]))
        generated = len(tokens) - len(request.token_ids)
        if generated >= params.min_tokens:
            if token == EOS and not params.ignore_eos:
                return new, "stop"
            if token in params.stop_token_ids:
                return new, "stop"
        if generated >= params.max_tokens or len(tokens) >= max_model_len:
            return new, "length"


class ToyTransfers:
    """The transfer thread as a target sees it; the test plays its peers.

    Attributes:
        told: Submitted items that were not read yet.
        actions: Actions that the target receives next.
    """

    def __init__(self) -> None:
        self.outbox_fd = os.eventfd(0)
        self.failure: str | None = None
        self.junk = 0
        self.receiver, self.sender = self, None
        self.published: dict[str, float] = {}
        self.told: list[Any] = []
        self.actions: list[Any] = []

    def submit(self, *items: Any) -> None:
        self.told += items

    def take(self) -> list[Any]:
        actions, self.actions = self.actions, []
        return actions

    def close(self) -> None:
        os.close(self.outbox_fd)


@dataclass(frozen=True)
class Admitted:
    """A message to a source: the target requests its prompt, or needs nothing."""

    request_id: str
    attempt: Attempt
    num_tokens: int
    cached_tokens: int
    prompt_key: bytes = b""
    spans: Spans = ()
    deadline_s: float = 0.0
    full_hit: bool = False


class ToySource(KVConnector):
    """Lets requests prefill for other nodes, without holding blocks."""

    transfer_role = "source"


@dataclass
class Stream:
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class ToyProposer:
    """Proposes the expected tokens, with some errors."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._texts: dict[tuple[str, int], list[int]] = {}

    def propose(self, tokens: npt.NDArray[np.int32], count: int) -> tuple[int, ...]:
        known = tokens.tolist()
        lie = mix(*known)
        proposed = [token % VOCAB for token in range(lie, lie + lie % (count + 1))]
        for name, request in self._loop.requests.items():
            for choice in range(request.params.n):
                if (name, choice) not in self._texts:
                    given = [*request.token_ids, *request.resume_ids]
                    self._texts[name, choice] = given + self._loop.expected(name, choice)[0]
                text = self._texts[name, choice]
                if text[: len(known)] == known:
                    proposed = text[len(known) :][:count]
        if proposed and lie % 3:
            proposed[lie % len(proposed)] = lie % VOCAB
        return tuple(proposed)


class Loop:
    """The core's loop over the toy ranks; checks the ledger after every event."""

    def __init__(
        self,
        groups: tuple[GroupSpec, ...] = (FULL,),
        *,
        depth: int = 1,
        max_model_len: int = 60,
        drafts: int = 0,
        **settings: object,
    ) -> None:
        if any(group.kind is GroupKind.STATE for group in groups):
            drafts = 0  # nodes reject drafts for models with states
        speculative = SpeculativeConfig(
            method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=2, prompt_lookup_min=1
        )
        config = SchedulerConfig(
            groups=groups,
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            max_num_seqs=8,
            speculative=speculative if drafts else None,
        )
        self.config = replace(config, **settings)  # type: ignore[arg-type]
        self.clock = Clock()
        self.scheduler = Scheduler(
            self.config, root_key=lambda salt: root_key(bytes(32), salt), clock=self.clock
        )
        if drafts:
            self.scheduler.propose = ToyProposer(self).propose
        self.transfers = ToyTransfers()
        self.target = self.make_target(self.scheduler, self.transfers)
        self.scheduler.connectors = Connectors((self.target, ToySource()))
        self.ranks = ToyRanks(groups)
        self.depth = depth
        self.in_flight: deque[StepResult] = deque()
        self.touched: deque[set[int]] = deque()
        self.plans: list[StepPlan] = []
        self.streams: dict[tuple[str, int], Stream] = defaultdict(Stream)
        self.requests: dict[str, AddRequest] = {}
        self.outputs: list[Output] = []
        self.scored: dict[str, tuple[TokenLogprobs | None, ...]] = {}
        self.admitted: list[Admitted] = []
        self.outgoing: list[Spans] = []

    @staticmethod
    def make_target(scheduler: Scheduler, transfers: ToyTransfers) -> TargetConnector:
        return TargetConnector(
            transfers,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            scheduler,
            members=(),
            trust_loopback=True,
        )

    # --- events from sources ---

    def loaded(
        self, request_id: str, choices: Sequence[ChoiceStart], cached_tokens: int
    ) -> list[Output]:
        """Report that a hand-over is complete."""
        attempt = self.attempt(request_id)
        asked = self.requests[request_id]
        num_tokens = len(asked.token_ids) + len(asked.resume_ids)
        return self.hear(Deliver(attempt, tuple(choices), cached_tokens, num_tokens))

    def load_failed(self, request_id: str, valid_through: int, reason: str) -> list[Output]:
        """Report that a hand-over failed."""
        return self.hear(Fail(self.attempt(request_id), valid_through, reason))

    def unquarantine(self, attempt: Attempt) -> None:
        """Report that no write of an attempt can arrive any more."""
        assert self.hear(Unquarantine(attempt)) == []

    def hear(self, action: Any) -> list[Output]:
        self.transfers.actions.append(action)
        return self.target.poll(self.clock())

    def attempt(self, request_id: str) -> Attempt:
        transfer = self.requests[request_id].transfer
        assert transfer is not None
        return Attempt(transfer.transfer_id, transfer.attempt)

    @property
    def reserved(self) -> dict[Attempt, Spans]:
        """Blocks that sources may write, by attempt."""
        return dict(self.target._reserved)

    # --- actions ---

    def add(self, request: AddRequest) -> None:
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.check()

    def emit(self, outputs: list[Output]) -> list[Output]:
        for output in outputs:
            stream = self.streams[output.request_id, output.choice]
            assert stream.finish is None, "an output after the last one"
            resumed = len(self.requests[output.request_id].resume_ids)
            assert output.index == resumed + len(stream.tokens)
            stream.tokens += output.token_ids
            stream.finish, stream.error = output.finish_reason, output.error
            if output.prompt_logprobs is not None:
                assert output.request_id not in self.scored, "they are told once"
                self.scored[output.request_id] = output.prompt_logprobs
        self.outputs += outputs
        self.check()
        return outputs

    def launch(self) -> bool:
        plan = self.scheduler.plan()
        self.take()
        self.check()
        if plan is None:
            assert self.scheduler.plan() is None, "the loop would sleep over it"
            return False
        assert plan.steps
        assert len(plan.steps) <= self.config.max_num_seqs
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        self.plans.append(plan)
        self.check_immutable(plan)
        self.in_flight.append(self.ranks.run(plan))
        self.touched.append(self.touched_by(plan))
        self.check()
        return True

    def touched_by(self, plan: StepPlan) -> set[int]:
        """Blocks that a step may read or write."""
        touched = {copy.source for copy in plan.copies}
        for step in plan.steps:
            tables = self.ranks.rows[step.handle].tables
            for group, table in zip(self.config.groups, tables, strict=True):
                touched.update(table[group.first_needed(step.start) :])
        return touched

    def take(self) -> None:
        """Read the target's messages to its transfer thread."""
        names = {self.attempt(name): name for name, r in self.requests.items() if r.transfer}
        told, self.transfers.told = self.transfers.told, []
        for item in told:
            name = names[item.attempt]
            if isinstance(item, Start):
                start = self.scheduler.loading[name].start
                admitted = Admitted(
                    name, item.attempt, item.num_tokens, start, item.prompt_key, item.spans,
                    item.deadline_s,
                )  # fmt: skip
                self.admitted.append(admitted)
            elif isinstance(item, Unneeded):
                known = len(self.requests[name].token_ids)
                self.admitted.append(Admitted(name, item.attempt, known, known, full_hit=True))

    def update(self) -> None:
        if self.in_flight:
            outputs = self.scheduler.update(self.in_flight.popleft())
            self.touched.popleft()
            self.emit(outputs)

    def step(self) -> None:
        self.emit(self.scheduler.expire(self.clock()))
        while len(self.in_flight) < self.depth and self.launch():
            pass
        self.update()

    def run(self, limit: int = 2000) -> None:
        """Step until no work is left."""
        for _ in range(limit):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError(f"still at work after {limit} steps: {self.scheduler.state()}")

    def run_until(self, condition: Callable[[], bool], limit: int = 200) -> None:
        """Step until a condition holds."""
        for _ in range(limit):
            if condition():
                return
            self.step()
        raise AssertionError(f"not so after {limit} steps: {self.scheduler.state()}")

    # --- checking ---

    def check(self) -> None:
        incoming = self.target.held_blocks().incoming
        found = audit(self.scheduler, incoming=incoming, outgoing=self.outgoing)
        assert not any(found.values()), found
        blocks = self.scheduler.blocks
        owned = sum(owners.total() for owners in blocks.owners())
        assert 1 + owned + blocks.pool.num_uncached == blocks.pool.num_blocks
        lists = blocks.pool.lists()
        for touched in self.touched:
            assert not touched & {*lists["free"], *lists["cached"]}, "free before its step"
        for sequence in self.scheduler.sequences():
            self.check_windows(sequence)

    def check_windows(self, sequence: Sequence_) -> None:
        """Check that a sequence holds only the blocks of its window and a step or two."""
        steps = self.depth * self.config.max_num_batched_tokens
        for group, table in zip(self.config.groups, sequence.tables, strict=True):
            if not group.window:
                continue
            behind = lowest(group, sequence.num_computed) // group.block_size
            if sequence.num_computed and sequence.state is SequenceState.RUNNING:
                assert not any(table[:behind]), "kept behind its window"
            held = sum(block != 0 for block in table)
            assert held <= -(-(group.window + steps) // group.block_size) + 1, "more than a window"

    def check_immutable(self, plan: StepPlan) -> None:
        """Check that a step writes no block in the prefix cache or under a transfer's read."""
        tables = {s.handle: s.tables for s in self.scheduler.sequences()}
        for step in plan.steps:
            for g, group in enumerate(self.config.groups):
                pool = self.scheduler.blocks.pool
                first = step.start // group.block_size
                past = group.blocks_for(step.start + step.count)
                for block in filter(None, tables[step.handle][g][first:past]):
                    assert pool.keys[block] is None, "a cached block is written"
                    assert pool.refs[block] == 1 or step.num_samples, "a shared block is written"

    def check_empty(self) -> None:
        pool, owners = self.scheduler.blocks.pool, self.scheduler.blocks.owners()
        cached = sum(of_group["cached"] for of_group in owners)
        assert pool.num_uncached + cached == pool.num_blocks - 1, owners
        assert not self.scheduler.requests

    def expected(self, request_id: str, choice: int = 0) -> tuple[list[int], str]:
        request = self.requests[request_id]
        if request.transfer is not None and request.transfer.role == "source":
            params = msgspec.structs.replace(request.params, max_tokens=len(request.resume_ids) + 1)
            request = msgspec.structs.replace(request, params=params)
        return direct(self.config.groups, request, choice, self.config.max_model_len)

    def expected_of(self, request: AddRequest) -> tuple[list[int], str]:
        """Expected output of a request in this loop."""
        return direct(self.config.groups, request, 0, self.config.max_model_len)

    def check_stream(self, request_id: str, choice: int = 0) -> None:
        """Check that a choice gave the expected tokens, or ended early for a known reason."""
        stream, request = self.streams[request_id, choice], self.requests[request_id]
        tokens, reason = self.expected(request_id, choice)
        if request.params.prompt_logprobs is not None and stream.tokens and not request.transfer:
            assert self.scored[request_id] == (None, *scores(request.token_ids)[1:])
        if stream.finish in ("abort", "error"):
            assert stream.tokens == tokens[: len(stream.tokens)]
            return
        assert (stream.tokens, stream.finish) == (tokens, reason)

    def check_streams(self) -> None:
        """Check all choices; only requests larger than the pool may end with an error."""
        for request in self.requests.values():
            for choice in range(request.params.n):
                self.check_stream(request.request_id, choice)
                stream = self.streams[request.request_id, choice]
                if stream.finish == "error":
                    length = len(request.token_ids) + len(stream.tokens)
                    assert self.scheduler.blocks.too_large(length) is not None


def prompt(length: int, start: int = 1) -> list[int]:
    """`length` tokens, which differ by `start`."""
    return [(start + 7 * i) % 23 for i in range(length)]


def ask(request_id: str, tokens: list[int], **fields: object) -> AddRequest:
    """A request; `fields` are fields of the request, or else sampling parameters."""
    names = set(AddRequest.__struct_fields__)
    own = {name: value for name, value in fields.items() if name in names}
    sampling = {name: value for name, value in fields.items() if name not in names}
    return AddRequest(
        request_id=request_id,
        token_ids=array("I", tokens),
        params=SamplingParams(**{"max_tokens": 8, **sampling}),  # type: ignore[arg-type]
        **own,  # type: ignore[arg-type]
    )


def target(number: int) -> TransferSpec:
    return TransferSpec(
        role="target", transfer_id=number.to_bytes(16, "big"), peer="tcp://127.0.0.1:1"
    )


def source(number: int) -> TransferSpec:
    return TransferSpec(role="source", transfer_id=number.to_bytes(16, "big"))

"""One rank's work of a step: from a plan to sampled tokens.

Forks come before ends, so that a plan may end a parent and go on with its children.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvbaton.engine.attention import Batch, PagedAttention
from kvbaton.engine.cache import KVCache, Slots
from kvbaton.engine.encoder.pool import EncoderPool
from kvbaton.engine.item_tokens import item_tokens
from kvbaton.engine.models.llama import Encoded, LlamaForCausalLM
from kvbaton.engine.mrope import merge_size
from kvbaton.engine.sampler import Logprobs, SampleRows, has_penalty, logprobs_of, sample
from kvbaton.engine.sequences import Sequences
from kvbaton.engine.step import Sampled, SequenceStep, StepPlan, StepResult
from kvbaton.types import TokenLogprobs

LOGITS_ELEMENTS = 1 << 24
"""Logits of prompt tokens held at a time."""


@dataclass
class StepOutput:
    """What a step computed, still on the device.

    Attributes:
        plan: the step.
        tokens: sampled tokens of all steps, one after the other.
        logprobs: of those rows of `tokens` whose sequence asked for them.
        prompt_logprobs: by number of the plan's step, in pieces.
    """

    plan: StepPlan
    tokens: Tensor | None = None
    logprobs: Logprobs | None = None
    logprob_counts: list[int | None] = field(default_factory=list)
    prompt_logprobs: dict[int, list[tuple[TokenLogprobs, ...]]] = field(default_factory=dict)

    def result(self) -> StepResult:
        """Bring it to the host."""
        tokens = [] if self.tokens is None else self.tokens.tolist()
        messages = self._messages()
        sampled, row = [], 0
        for number, step in enumerate(self.plan.steps):
            end = row + step.num_samples
            prompt = self.prompt_logprobs.get(number)
            if step.num_samples or prompt is not None:
                told = messages[row:end]
                sampled.append(
                    Sampled(
                        step.handle,
                        tuple(tokens[row:end]),
                        tuple(m for m in told if m is not None) if any(told) else None,
                        None if prompt is None else tuple(m for piece in prompt for m in piece),
                    )
                )
            row = end
        return StepResult(self.plan.number, tuple(sampled))

    def _messages(self) -> list[TokenLogprobs | None]:
        """Per sampled token, its log probabilities if they were asked for."""
        asked = [count for count in self.logprob_counts if count is not None]
        found = iter(self.logprobs.messages(asked) if self.logprobs is not None else ())
        return [None if count is None else next(found) for count in self.logprob_counts]


class Runner:
    """Runs steps, one after the other, in one thread.

    Args:
        model: its weights.
        cache: its KV pool.
        eos_token_ids: the model's own end tokens.
        max_model_len: longest sequence.
        max_num_seqs: sequences expected at a time; more are fine.

    Attributes:
        encoder: where the outputs lie that items' tokens stand for; set before a step has some.
    """

    encoder: EncoderPool | None = None

    def __init__(
        self,
        model: LlamaForCausalLM,
        cache: KVCache,
        *,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        max_num_seqs: int,
    ) -> None:
        self.model, self.cache, self.eos_token_ids = model, cache, eos_token_ids
        self.device = cache.data.device
        # A step that was launched before an end of text was seen may run one token over.
        self.sequences = Sequences(
            rows=max_num_seqs,
            max_tokens=max_model_len + 2,
            max_blocks=(max_model_len + 1) // cache.block_size + 1,
            device=self.device,
            merge_size=merge_size(model.config),
        )

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        """Do what the plan says."""
        self._prepare(plan)
        output = StepOutput(plan)
        if plan.steps:
            rows = self.sequences.rows([step.handle for step in plan.steps])
            for row, step in zip(rows, plan.steps, strict=True):
                self.sequences.append_blocks(row, step.new_blocks[0])
            hidden, batch = self._forward(plan.steps, rows)
            ends = np.cumsum(batch.query_lens)
            self._report_prompts(output, rows, hidden, ends)
            self._sample(output, rows, hidden, ends)
        return output

    def _prepare(self, plan: StepPlan) -> None:
        for fork in plan.forks:
            self.sequences.fork(fork)
        for handle in plan.ended:
            self.sequences.end(handle)
        if plan.copies:
            self.cache.copy([c.source for c in plan.copies], [c.target for c in plan.copies])
        for new in plan.new:
            self.sequences.add(new)

    def _batch(
        self, steps: Sequence[SequenceStep], rows: npt.NDArray[np.int64]
    ) -> tuple[Batch, Tensor, Tensor]:
        """The batch, its token ids and its rotary positions."""
        starts = np.array([step.start for step in steps], np.int64)
        counts = np.array([step.count for step in steps], np.int64)
        context_lens = starts + counts
        assert (context_lens <= self.sequences.lengths[rows]).all(), "a step is ahead of its tokens"
        first = np.cumsum(counts) - counts
        positions = np.arange(counts.sum()) - np.repeat(first - starts, counts)
        token_rows = np.repeat(rows, counts)
        size = self.cache.block_size
        blocks = self.sequences.tables[token_rows, positions // size]
        assert blocks.all(), "a step has no block for its tokens"
        most = int(-(-context_lens.max() // size))
        slots = Slots(
            blocks=self._to_device(blocks),
            offsets=self._to_device(positions % size),
            positions=self._to_device(positions),
            host_blocks=blocks,
            host_offsets=positions % size,
        )
        tokens = self.sequences.tokens[self._to_device(token_rows), slots.positions].long()
        rotary = self._to_device(self.sequences.rotary_positions(rows, positions, counts))
        tables = self.sequences.tables[rows, :most]
        return Batch(slots, counts, context_lens, tables), tokens, rotary

    def _forward(
        self, steps: Sequence[SequenceStep], rows: npt.NDArray[np.int64]
    ) -> tuple[Tensor, Batch]:
        batch, token_ids, rotary = self._batch(steps, rows)
        self.cache.forget_overwritten(batch.slots)
        attention = PagedAttention(self.cache, batch)
        hidden: Tensor = self.model(token_ids, rotary, attention, self._encoded(steps))
        self.cache.count_written(batch.slots)
        return hidden, batch

    def _encoded(self, steps: Sequence[SequenceStep]) -> Encoded | None:
        """Rows of the items whose tokens the steps compute."""
        found = item_tokens(steps) if self.sequences.have_items else None
        if found is None:
            return None
        at, blocks, offsets = found
        return Encoded(self._to_device(at), self._gather(blocks, offsets))

    def _gather(self, blocks: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> Tensor:
        assert self.encoder is not None, "items come after their pool was attached"
        return self.encoder.gather(self._to_device(blocks), self._to_device(offsets))

    def _sample(
        self,
        output: StepOutput,
        rows: npt.NDArray[np.int64],
        hidden: Tensor,
        ends: npt.NDArray[np.int64],
    ) -> None:
        """Sample for the steps that ask for it, and append what was sampled."""
        samples = np.array([step.num_samples for step in output.plan.steps], np.int64)
        sampling = np.flatnonzero(samples)
        if not len(sampling):
            return
        logits = self.model.logits(hidden[self._to_device(ends[sampling] - 1)])
        if samples.max() > 1:
            logits = logits.repeat_interleave(self._to_device(samples[sampling]), dim=0)
        sample_rows = self._sample_rows(np.repeat(rows, samples), self._choices(rows, samples))
        raw = self._raw_logprobs(output, logits, sample_rows)
        output.tokens = sample(logits, sample_rows, self.eos_token_ids)
        if raw is not None:
            index, logprobs, most = raw
            output.logprobs = logprobs_of(logprobs, output.tokens[index], most)
        self._append(rows[sampling], samples[sampling], output.tokens)

    def _choices(
        self, rows: npt.NDArray[np.int64], samples: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Choice of each sample: all of a request's, or the sequence's own."""
        nth = np.arange(samples.sum()) - np.repeat(np.cumsum(samples) - samples, samples)
        own = np.repeat(self.sequences.choices[rows], samples)
        return np.where(np.repeat(samples, samples) > 1, nth, own)

    def _sample_rows(
        self, rows: npt.NDArray[np.int64], choices: npt.NDArray[np.int64]
    ) -> SampleRows:
        params = [self.sequences.sampling(row) for row in rows]
        lengths = self.sequences.lengths[rows]
        tokens = None
        if any(has_penalty(param) for param in params):
            tokens = self.sequences.tokens[self._to_device(rows), : int(lengths.max())]
        return SampleRows(params, self.sequences.num_prompt[rows], lengths, choices, tokens)

    def _raw_logprobs(
        self, output: StepOutput, logits: Tensor, rows: SampleRows
    ) -> tuple[Tensor, Tensor, int] | None:
        """Rows that report log probabilities, these, and the most candidates of a row."""
        output.logprob_counts = [params.logprobs for params in rows.params]
        asked = [(i, n) for i, n in enumerate(output.logprob_counts) if n is not None]
        if not asked:
            return None
        index = torch.tensor([i for i, _ in asked], device=self.device)
        return index, logits[index].log_softmax(dim=-1), max(n for _, n in asked)

    def _append(
        self, rows: npt.NDArray[np.int64], samples: npt.NDArray[np.int64], tokens: Tensor
    ) -> None:
        """Each sequence goes on with its own choice's token; the others are kept for forks."""
        first = np.cumsum(samples) - samples
        for row, start, count in zip(rows, first, samples, strict=True):
            if count > 1:
                self.sequences.branch(row, tokens[start : start + count])
        own = first + np.where(samples > 1, self.sequences.choices[rows], 0)
        self.sequences.append_tokens(rows, tokens[self._to_device(own)])

    def _report_prompts(
        self,
        output: StepOutput,
        rows: npt.NDArray[np.int64],
        hidden: Tensor,
        ends: npt.NDArray[np.int64],
    ) -> None:
        """Log probabilities of the prompt tokens that follow the positions computed now."""
        for number, (row, step) in enumerate(zip(rows, output.plan.steps, strict=True)):
            count = self.sequences.sampling(row).prompt_logprobs
            last = min(step.start + step.count, int(self.sequences.num_prompt[row]) - 1)
            if count is None or step.start >= last:
                continue
            first = int(ends[number]) - step.count
            states = hidden[first : first + last - step.start]
            targets = self.sequences.tokens[row, step.start + 1 : last + 1].long()
            chunk = max(1, LOGITS_ELEMENTS // self.model.config.vocab_size)
            output.prompt_logprobs[number] = [
                self._prompt_piece(state, target, count)
                for state, target in zip(
                    torch.split(states, chunk), torch.split(targets, chunk), strict=True
                )
            ]

    def _prompt_piece(
        self, hidden: Tensor, targets: Tensor, count: int
    ) -> tuple[TokenLogprobs, ...]:
        logprobs = self.model.logits(hidden).log_softmax(dim=-1)
        return logprobs_of(logprobs, targets, count).messages([count] * len(targets))

    def _to_device(self, array: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

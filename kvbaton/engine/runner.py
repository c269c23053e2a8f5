"""One rank's work of a step: from a plan to sampled tokens.

Forks come before ends, so that a plan may end a parent and go on with its children. A step with a
draft is computed as one step per draft token, all at once: each layer writes K and V of all these
tokens before any attends. So drafts are verified by the same code that decodes, CUDA graphs
included. Only the reader of the samples then knows how long a sequence is; the next step's plan
tells the runner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvbaton.engine.attention import PagedAttention, PagedBatch
from kvbaton.engine.cache import KVCache
from kvbaton.engine.encoder.pool import EncoderPool, item_tokens, last_keys
from kvbaton.engine.models.layers import AttentionContext
from kvbaton.engine.models.llama import Encoded, LlamaForCausalLM
from kvbaton.engine.sampler import Logprobs, SampleRows, logprobs_of, needs_tokens, sample
from kvbaton.engine.sequences import Sequences, merge_size
from kvbaton.engine.state_blocks import StateBatch, step_states
from kvbaton.engine.step import Sampled, SequenceStep, StepColumns, StepPlan, StepResult
from kvbaton.engine.upload import upload, upload_ids
from kvbaton.errors import ConfigError
from kvbaton.types import TokenLogprobs

Ints = npt.NDArray[np.int64]

NO_ROWS: Ints = np.zeros(0, np.int64)

LOGITS_ELEMENTS = 1 << 24
"""Maximum number of elements of prompt logits in memory at a time."""

NO_TOKEN = (
    "no token can be chosen: the model's logits are NaN or infinite, so its weights are broken or "
    "overflow in this dtype (--dtype bfloat16 or float32 reach further than float16)"
)


@dataclass
class StepOutput:
    """What a step computed, still on the device.

    Attributes:
        plan: Plan of the step.
        steps: Steps of the plan's sequences; a step with a draft as one step per token.
        columns: Columns of `steps`.
        tokens: Sampled tokens of all steps in order; -1 if none can be sampled, see `NO_TOKEN`.
        logprobs: Logprobs of the rows of `tokens` whose sequences asked for them.
        prompt_logprobs: By index of the step, in pieces.
    """

    plan: StepPlan
    steps: Sequence[SequenceStep]
    columns: StepColumns
    tokens: Tensor | None = None
    logprobs: Logprobs | None = None
    logprob_counts: list[int | None] = field(default_factory=list)
    prompt_logprobs: dict[int, list[tuple[TokenLogprobs, ...]]] = field(default_factory=dict)

    @property
    def drafted(self) -> bool:
        """Whether any step has a draft."""
        return len(self.steps) > len(self.plan.steps)

    def result(self) -> StepResult:
        """Bring the result to the host."""
        tokens = [] if self.tokens is None else self.tokens.tolist()
        asked = [count for count in self.logprob_counts if count is not None]
        found = iter(self.logprobs.messages(asked) if self.logprobs is not None else ())
        messages = [None if count is None else next(found) for count in self.logprob_counts]
        sampled, row, number = [], 0, 0
        for step in self.plan.steps:
            end = row + step.num_samples + len(step.draft)
            past = end - len(step.draft) + accepted(step.draft, tokens[row:end])
            prompt = self.prompt_logprobs.get(number)
            if step.num_samples or prompt is not None:
                told, chosen = messages[row:past], tuple(tokens[row:past])
                sampled.append(
                    Sampled(
                        step.handle,
                        chosen,
                        tuple(m for m in told if m is not None) if any(told) else None,
                        None if prompt is None else tuple(m for piece in prompt for m in piece),
                        *((NO_TOKEN, "no_token") if -1 in chosen else ()),
                    )
                )
            row, number = end, number + 1 + len(step.draft)
        return StepResult(self.plan.number, tuple(sampled))


def accepted(draft: Sequence[int], sampled: Sequence[int]) -> int:
    """Number of leading draft tokens that equal the tokens sampled in their places."""
    pairs = enumerate(zip(draft, sampled, strict=False))
    return next((i for i, (guess, token) in pairs if guess != token), len(draft))


@dataclass(frozen=True)
class StepTokens:
    """The tokens that a step computes, sequence after sequence; on the host.

    Attributes:
        starts: [sequences], position of each sequence's first token.
        query_lens: [sequences], number of tokens to compute.
        context_lens: [sequences], number of tokens, cached ones included.
        positions: [tokens], absolute positions.
        rows: [tokens], rows of their sequences.
        blocks: [groups of K and V, tokens], blocks that they are written to.
        offsets: [tokens], slots within the block.
        last_keys: [tokens], last position that each token attends to; None if that is its own
            position for all tokens.
    """

    starts: Ints
    query_lens: Ints
    context_lens: Ints
    positions: Ints
    rows: Ints
    blocks: Ints
    offsets: Ints
    last_keys: Ints | None


class Runner:
    """Runs steps, one after the other, in one thread.

    Args:
        model: The rank's share of the model.
        cache: The rank's KV pool.
        max_model_len: Length of the longest sequence.
        max_num_seqs: Maximum number of sequences in one step.

    Attributes:
        encoder: Pool of encoder outputs that items' tokens stand for; set before a step has items.
    """

    encoder: EncoderPool | None = None
    sequences_class: type[Sequences] = Sequences

    def __init__(
        self, model: LlamaForCausalLM, cache: KVCache, *, max_model_len: int, max_num_seqs: int
    ) -> None:
        self.model, self.cache, self.device = model, cache, cache.data.device
        # A step launched before an end of text was seen may compute one token too many. Kernels
        # are compiled for row lengths that are multiples of 16.
        blocks = (max_model_len + 1) // cache.block_size + 1
        try:
            self.sequences = self.sequences_class(
                rows=2 * max_num_seqs,
                max_tokens=max_model_len + 2,
                max_blocks=-(-blocks // 16) * 16,
                device=self.device,
                merge_size=merge_size(model.config),
                groups=len(cache.groups),
            )
        except (RuntimeError, MemoryError) as error:  # torch's, NumPy's
            raise ConfigError(
                "--max-num-seqs",
                f"room for {max_num_seqs} sequences of {max_model_len} tokens can't be had "
                f"({str(error).partition(chr(10))[0]}): lower it, or --max-model-len",
            ) from error

    def attach_encoder(self, pool: EncoderPool) -> None:
        """Set the pool that encoder outputs are read from."""
        self.encoder = pool

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        """Carry out a plan; on a device, enqueue it."""
        for fork in plan.forks:
            self.sequences.fork(fork)
        for handle in plan.ended:
            self.sequences.end(handle)
        if plan.copies:
            self.cache.copy([c.source for c in plan.copies], [c.target for c in plan.copies])
        self.sequences.add(plan.new)
        output = StepOutput(plan, plan.steps, plan.columns)
        if plan.steps:
            columns, rows = plan.columns, self.sequences.rows(plan.steps)
            for index, group, blocks in columns.new_blocks:
                self.sequences.append_blocks(int(rows[index]), group, blocks)
            sampling = columns.samples > 0
            self.sequences.cut(rows[sampling], columns.known[sampling])
            if (drafts := columns.starts + columns.counts - columns.known).any():
                output.steps = [part for step in plan.steps for part in step.apart()]
                output.columns = StepColumns.of(output.steps)
                self.sequences.put_drafts(plan.steps)
                rows = np.repeat(rows, 1 + drafts)
            self._compute(output, rows)
        return output

    def _compute(self, output: StepOutput, rows: Ints) -> None:
        """Run the layers over the step's tokens, and sample."""
        tokens = self._tokens(output, rows)
        numbers = tokens.blocks * self.cache.block_size + tokens.offsets
        turned = self.sequences.rotary_positions(rows, tokens.positions, tokens.query_lens)
        slots, positions, token_rows, rotary = upload(
            [numbers, tokens.positions, tokens.rows, turned], self.device
        )
        slots = slots.view(numbers.shape)
        most = int(-(-tokens.context_lens.max() // self.cache.block_size))
        tables = self.sequences.tables[rows, :, :most]
        batch = PagedBatch(slots, tokens.query_lens, tokens.context_lens, tables, tokens.last_keys)
        hidden = self._layers(
            self.sequences.tokens[token_rows, positions].long(),
            positions,
            rotary.view(turned.shape),
            slots,
            PagedAttention(self.cache, batch, self._states(tokens, rows)),
            self._encoded(output.steps),
        )
        ends = np.cumsum(tokens.query_lens)
        self._report_prompts(output, rows, hidden, ends)
        self._sample(output, rows, tokens.context_lens, hidden, ends)

    def _states(self, tokens: StepTokens, rows: Ints) -> StateBatch | None:
        """The states that a step updates; None for a model without states."""
        cache = self.cache
        if cache.states is None:
            return None
        tables = self.sequences.tables[rows, cache.num_kv_groups :]
        return step_states(
            cache.states, cache.places, cache.block_size, tokens.starts, tokens.query_lens, tables
        )

    def _tokens(self, output: StepOutput, rows: Ints) -> StepTokens:
        """The tokens that a step computes; the cache takes note of their writes."""
        starts, counts = output.columns.starts, output.columns.counts
        context_lens = starts + counts
        assert (context_lens <= self.sequences.lengths[rows]).all(), "a step is ahead of its tokens"
        positions = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - context_lens, counts)
        token_rows = np.repeat(rows, counts)
        blocks, offsets = self._places(token_rows, positions)
        last, vision = None, self.model.config.vision
        if vision is not None and vision.bidirectional and self.sequences.with_items:
            last = last_keys(output.steps, positions)
        return StepTokens(
            starts, counts, context_lens, positions, token_rows, blocks, offsets, last
        )

    def _places(self, rows: Ints, positions: Ints) -> tuple[Ints, Ints]:
        """Blocks [groups, tokens] and slots of tokens; the cache takes note of the writes."""
        size, groups = self.cache.block_size, self.cache.num_kv_groups
        at = positions // size
        blocks, offsets = self.sequences.tables[rows, :groups, at].T, positions % size
        assert blocks.all(), "a step has no block for its tokens"
        everywhere = (np.tile(x, len(blocks)) for x in (offsets, positions))
        self.cache.note_writes(blocks.ravel(), *everywhere)
        return blocks, offsets

    def _layers(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rotary: Tensor,
        slots: Tensor,
        attention: AttentionContext,
        encoded: Encoded | None = None,
        *,
        forward: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """Run the model, and update the digest sums of the blocks that it writes.

        Args:
            token_ids: [tokens] int64.
            positions: [tokens] int64, absolute.
            rotary: See the model.
            slots: [groups of K and V, tokens] int64.
            attention: Attention over the same tokens.
            encoded: See the model.
            forward: Runs the model in place of its own `forward`.
        """
        everywhere = slots.flatten()
        self.cache.start_sums(everywhere)
        hidden = (forward or self.model)(token_ids, rotary, attention, encoded)
        self.cache.add_sums(everywhere, positions.repeat(len(slots)))
        if attention.states is not None:
            attention.states.sign()
        return hidden

    def _encoded(self, steps: Sequence[SequenceStep]) -> Encoded | None:
        """Encoder outputs of the items whose tokens the steps compute."""
        found = item_tokens(steps) if self.sequences.with_items else None
        if found is None:
            return None
        at, blocks, offsets = found
        return Encoded(upload_ids(at, self.device), self._gather(blocks, offsets))

    def _gather(self, blocks: Ints, offsets: Ints) -> Tensor:
        assert self.encoder is not None, "items come after their pool was attached"
        return self.encoder.gather(*upload([blocks, offsets], self.device))

    def _sample(
        self, output: StepOutput, rows: Ints, known: Ints, hidden: Tensor, ends: Ints
    ) -> None:
        """Sample and append tokens for the steps that ask for it, after `known` tokens."""
        samples = output.columns.samples
        sampling = np.flatnonzero(samples)
        if not len(sampling):
            return
        logits = self.model.logits(hidden[upload_ids(ends[sampling] - 1, self.device)])
        if samples.max() > 1:
            counts = upload_ids(samples[sampling], self.device)
            logits = logits.repeat_interleave(counts, dim=0)
        sample_rows = self._sample_rows(rows, samples, known, output.plan)
        output.logprob_counts = [params.logprobs for params in sample_rows.params]
        asked = [(i, n) for i, n in enumerate(output.logprob_counts) if n is not None]
        raw = None
        if asked:
            index = upload_ids([i for i, _ in asked], self.device)
            raw = logits[index].log_softmax(dim=-1)  # `sample` overwrites logits
        output.tokens = sample(logits, sample_rows, self.model.config.eos_token_ids)
        tokens = output.tokens.clamp(min=0)  # a sequence without token ends once the host sees it
        if raw is not None:
            most = max(n for _, n in asked)
            output.logprobs = logprobs_of(raw, tokens[index], most)
        # Each sequence goes on with its own choice's token; the others are kept for its forks.
        rows, samples, known = rows[sampling], samples[sampling], known[sampling]
        first = np.cumsum(samples) - samples
        for row, start, count in zip(rows, first, samples, strict=True):
            if count > 1:
                self.sequences.branch(row, tokens[start : start + count])
        own = first + np.where(samples > 1, self.sequences.choices[rows], 0)
        self.sequences.put_tokens(rows, known, tokens, own)

    def _sample_rows(self, rows: Ints, samples: Ints, known: Ints, plan: StepPlan) -> SampleRows:
        """The sampler's inputs for each sample, which follows `known` tokens."""
        of = np.repeat(np.arange(len(rows)), samples)
        nth = np.arange(len(of)) - (np.cumsum(samples) - samples)[of]
        rows, lengths, many = rows[of], known[of], samples[of] > 1
        choices = np.where(many, nth, self.sequences.choices[rows])
        params = [self.sequences.sampling(row) for row in rows]
        tokens = None
        if any(needs_tokens(param) for param in params):
            index = upload_ids(rows, self.device)
            tokens = self.sequences.tokens[index, : int(lengths.max())]
        governed, masks = list[Ints](), list[npt.NDArray[np.uint8]]()
        row = 0
        for step in plan.steps if plan.masks else ():
            end = row + step.num_samples + len(step.draft)
            if step.handle in plan.masks:
                governed.append(np.arange(row, end))
                mask = plan.masks[step.handle]  # the same for all choices of a prompt
                masks.append(np.broadcast_to(mask, (end - row, mask.shape[1])))
            row = end
        return SampleRows(
            params,
            self.sequences.num_prompt[rows],
            lengths,
            choices,
            tokens,
            np.concatenate(governed) if governed else NO_ROWS,
            np.concatenate(masks) if masks else None,
        )

    def _report_prompts(self, output: StepOutput, rows: Ints, hidden: Tensor, ends: Ints) -> None:
        """Compute logprobs of the prompt tokens that follow the positions computed now."""
        if self.sequences.reporting.isdisjoint(rows.tolist()):
            return
        for number, (row, step) in enumerate(zip(rows, output.steps, strict=True)):
            count = self.sequences.sampling(row).prompt_logprobs
            last = min(step.start + step.count, int(self.sequences.num_prompt[row]) - 1)
            if count is None or step.start >= last:
                continue
            first = int(ends[number]) - step.count
            states = hidden[first : first + last - step.start]
            targets = self.sequences.tokens[row, step.start + 1 : last + 1].long()
            chunk = max(1, LOGITS_ELEMENTS // self.model.config.vocab_size)
            pieces = output.prompt_logprobs[number] = []
            parts = torch.split(states, chunk), torch.split(targets, chunk)
            for state, target in zip(*parts, strict=True):
                logprobs = self.model.logits(state).log_softmax(dim=-1)
                entries = logprobs_of(logprobs, target, count)
                pieces.append(entries.messages([count] * len(target)))

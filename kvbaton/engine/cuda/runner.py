"""One rank's work of a step on a CUDA device: enqueued, never waited for.

A step in which every sequence decodes replays a CUDA graph, which reads its inputs from a fixed
buffer, takes the token sampled last from the device, and leaves the next one there. Any other step
is enqueued kernel by kernel. What only few requests ask for (truncation, penalties, log
probabilities) runs through the plain sampler, which may wait for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvbaton.engine.cuda.attention import DecodeBatch, KernelAttention
from kvbaton.engine.cuda.cache import CudaKVCache
from kvbaton.engine.cuda.graphs import DecodeGraphs
from kvbaton.engine.cuda.sequences import CudaSequences
from kvbaton.engine.cuda.staging import fetch, upload
from kvbaton.engine.encoder.pool import EncoderPool
from kvbaton.engine.models.llama import Encoded, LlamaForCausalLM
from kvbaton.engine.mrope import merge_size
from kvbaton.engine.pending import Pending
from kvbaton.engine.runner import Runner, StepOutput
from kvbaton.engine.sampler import Logprobs
from kvbaton.engine.step import StepPlan
from kvbaton.kernels.prefill_attention import PrefillBatch
from kvbaton.kernels.sample_tokens import sample_tokens

T = TypeVar("T")
Ints = npt.NDArray[np.int64]

LOOK_S = 20e-6
"""Pause between two looks at a step of several ranks."""

SHORT_CONTEXT = 2048
"""Shorter tables make the prefill kernel take smaller tiles."""


def enqueued(take: Callable[[], T], *, patience_s: float | None = None) -> Pending[T]:
    """What is there once the current stream has come as far as it is filled now.

    Args:
        take: gives it then.
        patience_s: for `wait`; None waits as the driver does, without a limit.
    """
    over = torch.cuda.Event()  # type: ignore[no-untyped-call]
    over.record()

    def ready() -> bool:
        return bool(over.query())  # type: ignore[no-untyped-call]

    def wait() -> None:
        if patience_s is None:
            over.synchronize()
            return
        deadline = time.monotonic() + patience_s
        while not ready():
            if time.monotonic() > deadline:
                raise TimeoutError(f"a step took longer than {patience_s:g} s")
            time.sleep(LOOK_S)

    return Pending(ready, take, wait)


def fetched(output: StepOutput) -> StepOutput:
    """Set an output on its way into pinned memory."""
    if output.tokens is not None:
        output.tokens = fetch(output.tokens)
    if output.logprobs is not None:
        columns = (getattr(output.logprobs, field.name) for field in fields(Logprobs))
        output.logprobs = Logprobs(*(fetch(column) for column in columns))
    return output


class CudaRunner(Runner):
    """Enqueues steps on the current stream; one thread at a time.

    Args:
        model: its weights.
        cache: its KV pool.
        eos_token_ids: the model's own end tokens.
        max_model_len: longest sequence.
        max_num_seqs: most sequences in one step.
        use_graphs: decode in CUDA graphs.
    """

    cache: CudaKVCache
    sequences: CudaSequences
    _far_stream: torch.cuda.Stream | None = None

    def __init__(
        self,
        model: LlamaForCausalLM,
        cache: CudaKVCache,
        *,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        max_num_seqs: int,
        use_graphs: bool,
    ) -> None:
        self.model, self.cache, self.eos_token_ids = model, cache, eos_token_ids
        self.device = cache.data.device
        # A step that was launched before an end of text was seen may run one token over. Kernels
        # are compiled for row lengths that are multiples of 16.
        blocks = (max_model_len + 1) // cache.block_size + 1
        self.sequences = CudaSequences(
            rows=2 * max_num_seqs,
            max_tokens=max_model_len + 2,
            max_blocks=-(-blocks // 16) * 16,
            device=self.device,
            merge_size=merge_size(model.config),
        )
        self.graphs = (
            DecodeGraphs(self._decode_step, self.sequences, max_num_seqs) if use_graphs else None
        )

    def attach_encoder(self, pool: EncoderPool) -> None:
        """Take encoder outputs from here; from another device on a stream of our own.

        On that device's default stream they would wait for its rank's step, which waits for ours.
        One row is taken now: what the driver sets up for it, it may not while a rank waits.
        """
        self.encoder = pool
        if pool.data.device != self.device:
            self._far_stream = torch.cuda.Stream(pool.data.device)  # type: ignore[no-untyped-call]
        with torch.inference_mode():
            self._gather(np.zeros(1, np.int64), np.zeros(1, np.int64))

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        """Enqueue what the plan says."""
        self._prepare(plan)
        output = StepOutput(plan)
        if plan.steps:
            rows = self.sequences.rows([step.handle for step in plan.steps])
            for row, step in zip(rows, plan.steps, strict=True):
                self.sequences.append_blocks(row, step.new_blocks[0])
            self.sequences.flush()
            if _all_decode(plan, self.sequences.have_items):
                self._decode(output, rows)
            else:
                self._mixed(output, rows)
        return output

    # --- all sequences decode ---

    def _decode(self, output: StepOutput, rows: Ints) -> None:
        starts = self.sequences.lengths[rows] - 1
        assert [step.start for step in output.plan.steps] == starts.tolist(), "not the last token"
        size = self.cache.block_size
        blocks = self.sequences.tables[rows, starts // size]
        assert blocks.all(), "a step has no block for its tokens"
        self.cache.note_writes(blocks, starts % size, starts)
        columns = self._columns(rows, starts)
        if self.graphs is not None:
            hidden, tokens = self.graphs.run(columns)
        else:
            (inputs,) = upload([columns], self.device)
            hidden, tokens = self._decode_step(inputs.view(columns.shape))
        if self.sequences.plain[rows].all():
            output.logprob_counts = [None] * len(rows)
            output.tokens = tokens
            self.sequences.lengths[rows] += 1
        else:
            self._report_prompts(output, rows, hidden, np.arange(1, len(rows) + 1))
            self._sample(output, rows, hidden, np.arange(1, len(rows) + 1))

    def _columns(self, rows: Ints, positions: Ints) -> Ints:
        """Inputs of `_decode_step`: [6, sequences]; float64 temperatures as their bits."""
        sequences = self.sequences
        temperatures = sequences.temperatures[rows].view(np.int64)
        rotary = positions + sequences.deltas[rows]
        return np.stack(
            (rows, positions, sequences.seeds[rows], sequences.choices[rows], temperatures, rotary)
        )

    def _decode_step(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """One token of each sequence, with the host out of the loop.

        Args:
            inputs: see `_columns`; a position of -1 is padding.

        Returns:
            Hidden states [sequences, hidden_size], and tokens sampled by temperature and seed
            alone [sequences], which are appended to the sequences too.
        """
        rows, positions, seeds, choices, temperatures, rotary = inputs.unbind()
        size, sequences = self.cache.block_size, self.sequences
        at = positions.clamp(min=0)
        tables = sequences.device_tables.index_select(0, rows)
        blocks = tables.gather(1, (at // size)[:, None])[:, 0]
        slots = torch.where(positions >= 0, blocks * size + at % size, -1)
        attention = KernelAttention(
            self.cache, slots, DecodeBatch(tables, (positions + 1).int()), None
        )
        hidden = self._layers(sequences.tokens[rows, at].long(), at, rotary, slots, attention)
        tokens = sample_tokens(
            self.model.narrow_logits(hidden),
            temperatures.view(torch.float64), seeds, positions + 1, choices,
        )  # fmt: skip
        sequences.tokens[rows, positions + 1] = tokens.int()
        return hidden, tokens

    # --- prompts, and whoever decodes beside them ---

    def _mixed(self, output: StepOutput, rows: Ints) -> None:
        starts = np.array([step.start for step in output.plan.steps], np.int64)
        counts = np.array([step.count for step in output.plan.steps], np.int64)
        hidden = self._forward_mixed(rows, starts, counts, self._encoded(output.plan.steps))
        ends = np.cumsum(counts)
        self._report_prompts(output, rows, hidden, ends)
        samples = np.array([step.num_samples for step in output.plan.steps], np.int64)
        sampling = np.flatnonzero(samples)
        if samples.max() == 1 and self.sequences.plain[rows[sampling]].all():
            self._sample_plainly(output, rows[sampling], hidden, ends[sampling])
        else:
            self._sample(output, rows, hidden, ends)

    def _forward_mixed(
        self, rows: Ints, starts: Ints, counts: Ints, encoded: Encoded | None
    ) -> Tensor:
        size, context_lens = self.cache.block_size, starts + counts
        assert (context_lens <= self.sequences.lengths[rows]).all(), "a step is ahead of its tokens"
        positions = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - context_lens, counts)
        token_rows = np.repeat(rows, counts)
        blocks = self.sequences.tables[token_rows, positions // size]
        assert blocks.all(), "a step has no block for its tokens"
        self.cache.note_writes(blocks, positions % size, positions)
        leading = int(np.argmax(counts > 1)) if (counts > 1).any() else len(counts)
        bounds = np.concatenate(([0], np.cumsum(counts[leading:])))
        slots = blocks * size + positions % size
        turned = self.sequences.rotary_positions(rows, positions, counts)
        at, of, slot_mapping, seq_rows, lens, cu, rotary = upload(
            [positions, token_rows, slots, rows, context_lens, bounds, turned], self.device
        )
        tables, lens = self.sequences.device_tables.index_select(0, seq_rows), lens.int()
        decode = DecodeBatch(tables[:leading], lens[:leading]) if leading else None
        prefill = None
        if leading < len(counts):
            width = self._width(int(context_lens[leading:].max()))
            prefill = PrefillBatch(
                block_tables=tables[leading:, :width].contiguous(),
                cu_seqlens=cu.int(),
                context_lens=lens[leading:].clone(),
                query_lens=tuple(counts[leading:].tolist()),
                prefix_lens=tuple(starts[leading:].tolist()),
            )
        attention = KernelAttention(self.cache, slot_mapping, decode, prefill)
        tokens, rotary = self.sequences.tokens[of, at].long(), rotary.view(turned.shape)
        return self._layers(tokens, at, rotary, slot_mapping, attention, encoded)

    def _width(self, context_len: int) -> int:
        """Blocks to show the prefill kernel: one of two numbers, since it is compiled for each."""
        size, most = self.cache.block_size, self.sequences.tables.shape[1]
        short = (SHORT_CONTEXT // size - 1) // 16 * 16
        return short if context_len <= short * size and short < most else most

    def _sample_plainly(self, output: StepOutput, rows: Ints, hidden: Tensor, ends: Ints) -> None:
        """Sample by temperature and seed alone, one token each."""
        if not len(rows):
            return
        columns = self._columns(rows, self.sequences.lengths[rows])
        inputs, last = upload([columns, ends - 1], self.device)
        seq_rows, positions, seeds, choices, temperatures, _ = inputs.view(columns.shape).unbind()
        tokens = sample_tokens(
            self.model.narrow_logits(hidden.index_select(0, last)),
            temperatures.view(torch.float64), seeds, positions, choices,
        )  # fmt: skip
        self.sequences.tokens[seq_rows, positions] = tokens.int()
        self.sequences.lengths[rows] += 1
        output.logprob_counts = [None] * len(rows)
        output.tokens = tokens

    # --- both ---

    def _layers(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rotary: Tensor,
        slots: Tensor,
        attention: KernelAttention,
        encoded: Encoded | None = None,
    ) -> Tensor:
        """Run the model, and keep the digest sums of what it writes."""
        self.cache.start_sums(slots)
        hidden = cast(Tensor, self.model(token_ids, rotary, attention, encoded))
        self.cache.add_sums(slots, positions)
        return hidden

    def _gather(self, blocks: Ints, offsets: Ints) -> Tensor:
        if self._far_stream is None or self.encoder is None:
            return super()._gather(blocks, offsets)
        with torch.cuda.stream(self._far_stream):
            rows = self.encoder.gather(*upload([blocks, offsets], self.encoder.data.device))
            return rows.to(self.device, non_blocking=True)

    def _to_device(self, array: Ints) -> Tensor:
        return upload([array], self.device)[0].view(array.shape)


def _all_decode(plan: StepPlan, have_items: bool) -> bool:
    """Whether all steps are the last token of their sequence, and no image ends with it."""
    if have_items and any(step.items for step in plan.steps):
        return False
    return all(step.count == 1 and step.num_samples == 1 for step in plan.steps)

"""One rank's work of a step on a CUDA device: enqueued, never waited for.

A step in which all sequences decode, with or without drafts, replays a CUDA graph, also if some
have two known tokens to compute. The graph reads its inputs from a fixed buffer, reads the last
sampled token from the device, and leaves the next one there. A step with prompts and few tokens
replays one graph, or one between every two attentions; other steps are enqueued kernel by kernel.
Features that few requests use (masks, biases, logprobs) are computed by torch afterwards, from the
logits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvbaton.engine.cache import KVCache
from kvbaton.engine.cuda.attention import DecodeBatch, KernelAttention
from kvbaton.engine.cuda.graphs import DecodeGraphs
from kvbaton.engine.cuda.prompt_graphs import PromptGraphs
from kvbaton.engine.cuda.sequences import CudaSequences
from kvbaton.engine.encoder.pool import EncoderPool
from kvbaton.engine.models.llama import LlamaForCausalLM
from kvbaton.engine.runner import Ints, Runner, StepOutput
from kvbaton.engine.sampler import sampling_from
from kvbaton.engine.state_blocks import StateBatch
from kvbaton.engine.step import MOST_KNOWN
from kvbaton.engine.upload import upload, upload_ids
from kvbaton.kernels.prefill_attention import PrefillBatch
from kvbaton.kernels.sample_tokens import sample_tokens

SHORT_CONTEXT = 2048
"""Context in tokens below which tables are cut: the prefill kernel then takes smaller tiles."""

RANK_CONTEXT = 256
"""Context in tokens, times the square of the ranks, below which a step's prompts, if several, share
one launch of a slower kernel. cuDNN is launched for each prompt, which takes n ranks as long, while
each of them has an n-th of the work."""


class CudaRunner(Runner):
    """Enqueues steps on the current stream; one thread at a time.

    Args:
        model: The rank's share of the model.
        cache: The rank's KV pool.
        max_model_len: Length of the longest sequence.
        max_num_seqs: Maximum number of sequences in one step.
        use_graphs: Whether to use CUDA graphs, for decode steps and steps with few prompt tokens.
        max_num_batched_tokens: Maximum number of tokens in one step.

    Attributes:
        token_counts: [max_num_seqs, vocab_size] int32, see `Penalties`.
    """

    sequences: CudaSequences
    sequences_class = CudaSequences
    _far_stream: torch.cuda.Stream | None = None

    def __init__(
        self,
        model: LlamaForCausalLM,
        cache: KVCache,
        *,
        max_model_len: int,
        max_num_seqs: int,
        use_graphs: bool,
        max_num_batched_tokens: int = 0,
    ) -> None:
        super().__init__(model, cache, max_model_len=max_model_len, max_num_seqs=max_num_seqs)
        self.token_counts = torch.zeros(
            (max_num_seqs, model.config.vocab_size), dtype=torch.int32, device=self.device
        )
        self.graphs = (
            DecodeGraphs(self._decode_step, self.sequences, max_num_seqs) if use_graphs else None
        )
        self.prompt_graphs: PromptGraphs | None = None
        if use_graphs and cache.states is None and model.config.vision is None:
            most = self.sequences.tables.shape[-1]
            self.prompt_graphs = PromptGraphs(
                model, cache, most_tokens=max_num_batched_tokens, most_sequences=max_num_seqs,
                most_blocks=most,
            )  # fmt: skip

    def attach_encoder(self, pool: EncoderPool) -> None:
        """Set the pool that encoder outputs are read from; on another device, on our own stream.

        On that device's default stream, reads would wait for its rank's step, which waits for ours.
        One row is read now, since the driver's setup for it is not possible while a rank waits.
        """
        super().attach_encoder(pool)
        if pool.data.device != self.device:
            self._far_stream = torch.cuda.Stream(pool.data.device)  # type: ignore[no-untyped-call]
        with torch.inference_mode():
            self._gather(np.zeros(1, np.int64), np.zeros(1, np.int64))

    def _compute(self, output: StepOutput, rows: Ints) -> None:
        """Enqueue the layers and the sampling; see `Runner._compute`."""
        self.sequences.flush()
        # An image that ends with its prompt's last token can't be an input of a decode graph.
        images = self.sequences.with_items and any(step.items for step in output.steps)
        columns = output.columns
        most = 1 if self.cache.states is not None else MOST_KNOWN
        if not images and (columns.counts <= most).all() and (columns.samples == 1).all():
            self._decode(output, rows)
        else:
            self._mixed(output, rows)

    # --- all sequences decode ---

    def _decode(self, output: StepOutput, rows: Ints) -> None:
        starts, counts = output.columns.starts, output.columns.counts
        known, ends = starts + counts, np.cumsum(counts)
        assert (known <= self.sequences.lengths[rows]).all(), "a step is ahead of its tokens"
        of, at, kept = rows, starts, None
        if len(rows) < ends[-1]:  # one row per token; the graph writes a sample behind each
            of, at = np.repeat(rows, counts), np.arange(ends[-1]) + np.repeat(known - ends, counts)
            earlier = np.delete(np.arange(ends[-1]), ends - 1)
            kept = upload([of[earlier], at[earlier] + 1], self.device)
            known_tokens = self.sequences.tokens[tuple(kept)]
        self._places(of, at)
        columns = self._columns(of, at)
        if self.graphs is not None and len(of) <= self.graphs.sizes[-1]:
            hidden, tokens = self.graphs.run(columns)
        else:
            (inputs,) = upload([columns], self.device)
            hidden, tokens = self._decode_step(inputs.view(columns.shape))
        if kept is not None:
            self.sequences.tokens[tuple(kept)] = known_tokens
        if self.sequences.plain[rows].all():
            output.logprob_counts = [None] * len(rows)
            output.tokens = tokens if kept is None else tokens[upload_ids(ends - 1, self.device)]
            self.sequences.lengths[rows] = known + 1
        else:
            if output.drafted:  # the graph has overwritten the drafts with its samples
                self.sequences.put_drafts(output.plan.steps)
            self._report_prompts(output, rows, hidden, ends)
            self._sample(output, rows, known, hidden, ends)

    def _columns(self, rows: Ints, positions: Ints) -> Ints:
        """Inputs of `_decode_step`: [5 + WORDS, sequences] int64."""
        of = self.sequences
        turned = positions + of.deltas[rows]
        known = of.choices[rows], of.num_prompt[rows]
        return np.vstack((rows, positions, turned, *known, of.words[rows].T))

    def _decode_step(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Compute one token of each sequence, without the host.

        Args:
            inputs: See `_columns`; a position of -1 is padding.

        Returns:
            Hidden states [sequences, hidden_size], and tokens chosen by `sample_tokens`
            [sequences], which are also appended to the sequences.
        """
        rows, positions, rotary, *_ = inputs.unbind()
        size, sequences = self.cache.block_size, self.sequences
        at = positions.clamp(min=0)
        tables = sequences.device_tables.index_select(0, rows)
        blocks, groups = _blocks_at(tables, at // size), self.cache.num_kv_groups
        slots = torch.where(positions >= 0, blocks[:groups] * size + at % size, -1)
        states = None
        if self.cache.states is not None:
            before = _blocks_at(tables, (at - 1).clamp(min=0) // size)
            states = StateBatch(
                self.cache.states,
                self.cache.places,
                reads=torch.where(positions > 0, before[groups:].long(), 0),
                writes=torch.where(positions >= 0, blocks[groups:].long(), 0),
                ends=at,
                num_decodes=len(rows),
                live=positions >= 0,
            )
        decode = DecodeBatch(tables, (positions + 1).int())
        attention = KernelAttention(self.cache, slots, decode, states=states)
        hidden = self._layers(sequences.tokens[rows, at].long(), at, rotary, slots, attention)
        tokens = self._sampled(hidden, inputs, positions + 1)
        sequences.tokens[rows, positions + 1] = tokens.clamp(min=0).int()
        return hidden, tokens

    # --- prompts, with or without decoding sequences ---

    def _mixed(self, output: StepOutput, rows: Ints) -> None:
        tokens, encoded = self._tokens(output, rows), self._encoded(output.steps)
        counts, context_lens = tokens.query_lens, tokens.context_lens
        leading = int(np.argmax(counts > 1)) if (counts > 1).any() else len(counts)
        bounds = np.concatenate(([0], np.cumsum(counts[leading:])))
        slots = tokens.blocks * self.cache.block_size + tokens.offsets
        turned = self.sequences.rotary_positions(rows, tokens.positions, counts)
        last = tokens.last_keys
        arrays = [tokens.positions, tokens.rows, slots, rows, context_lens, bounds, turned]
        at, of, slot_mapping, seq_rows, lens, cu, rotary, *lasts = upload(
            arrays if last is None else [*arrays, last[leading:]], self.device
        )
        tables, lens = self.sequences.device_tables.index_select(0, seq_rows), lens.int()
        decode = DecodeBatch(tables[:leading], lens[:leading]) if leading else None
        prefill = []
        if leading < len(counts):
            # Show the kernel one of two table widths, since it is compiled for each.
            size, width = self.cache.block_size, self.sequences.tables.shape[-1]
            short = (SHORT_CONTEXT // size - 1) // 16 * 16
            if context_lens[leading:].max() <= short * size:
                width = min(short, width)
            cu_seqlens, rest = cu.int(), lens[leading:].clone()
            last_keys = lasts[0].int() if lasts else None
            several = len(counts) - leading > 1
            least = RANK_CONTEXT * self.model.shard.size**2 if several else 0
            prefill = [
                PrefillBatch(
                    block_tables=table[leading:, :width].contiguous(),
                    cu_seqlens=cu_seqlens,
                    context_lens=rest,
                    query_lens=tuple(counts[leading:].tolist()),
                    prefix_lens=tuple(tokens.starts[leading:].tolist()),
                    last_keys=last_keys,
                    min_context=least,
                )
                for table in tables[:, : self.cache.num_kv_groups].unbind(1)
            ]
        slot_mapping = slot_mapping.view(slots.shape)
        states = self._states(tokens, rows)
        attention = KernelAttention(self.cache, slot_mapping, decode, prefill, states)
        token_ids, turned_at = self.sequences.tokens[of, at].long(), rotary.view(turned.shape)
        hidden = self._layers(
            token_ids, at, turned_at, slot_mapping, attention, encoded, forward=self.prompt_graphs
        )
        ends = np.cumsum(counts)
        self._report_prompts(output, rows, hidden, ends)
        samples = output.columns.samples
        sampling = np.flatnonzero(samples)
        if samples.max() == 1 and self.sequences.plain[rows[sampling]].all():
            known = context_lens[sampling]
            self._sample_plainly(output, rows[sampling], known, hidden, ends[sampling])
        else:
            self._sample(output, rows, context_lens, hidden, ends)

    def _sample_plainly(
        self, output: StepOutput, rows: Ints, known: Ints, hidden: Tensor, ends: Ints
    ) -> None:
        """Sample one token each with `sample_tokens`, after `known` tokens."""
        if not len(rows):
            return
        columns = self._columns(rows, known)
        inputs, last = upload([columns, ends - 1], self.device)
        inputs = inputs.view(columns.shape)
        seq_rows, positions, *_ = inputs.unbind()
        tokens = self._sampled(hidden.index_select(0, last), inputs, positions)
        self.sequences.tokens[seq_rows, positions] = tokens.clamp(min=0).int()
        self.sequences.lengths[rows] = known + 1
        output.logprob_counts = [None] * len(rows)
        output.tokens = tokens

    def _sampled(self, hidden: Tensor, columns: Tensor, positions: Tensor) -> Tensor:
        """Sample tokens [rows] at `positions`, with the inputs of `_columns`.

        At most `max_num_seqs` rows are sampled at a time; with drafts there are more rows.
        """
        logits, most = self.model.narrow_logits(hidden), len(self.token_counts)
        known = self.sequences.tokens
        parts = (
            torch.split(logits, most),
            torch.split(columns, most, 1),
            torch.split(positions, most),
        )
        tokens = [
            sample_tokens(part, sampling_from(told[3:], at, told[0], known, self.token_counts))
            for part, told, at in zip(*parts, strict=True)
        ]
        return tokens[0] if len(tokens) == 1 else torch.cat(tokens)

    def _gather(self, blocks: Ints, offsets: Ints) -> Tensor:
        if self._far_stream is None or self.encoder is None:
            return super()._gather(blocks, offsets)
        with torch.cuda.stream(self._far_stream):
            rows = self.encoder.gather(*upload([blocks, offsets], self.encoder.data.device))
            return rows.to(self.device, non_blocking=True)


def _blocks_at(tables: Tensor, number: Tensor) -> Tensor:
    """Physical block of one logical block of each sequence: [groups, sequences].

    Args:
        tables: [sequences, groups, blocks].
        number: [sequences] int64, logical block.
    """
    return (
        tables.gather(2, number[:, None, None].expand(-1, tables.shape[1], 1))[:, :, 0]
        .t()
        .contiguous()
    )

"""Steps with prompts as CUDA graphs: whole ones with a few short prompts, others by piece.

What a layer's products, norms and sums launch depends on the number of tokens alone, and is padded
to one of a few; its attention depends on every sequence. So what lies between two attentions is a
graph (vLLM calls it piecewise), and attention is launched as it is; but for a few prompts, with or
without others that decode, and for a longer one alone, whose attention has a launch that suits all,
and is within one graph with the rest. The host is quick then, which counts where the device is,
too: for few tokens, and for ranks. Launching the attention of 32 layers takes it 6 to 11 ms, for
which the tokens of the step before wait as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbaton.engine.cache import KVCache
from kvbaton.engine.chunk_limit import PADDED, size_step
from kvbaton.engine.cuda.attention import DecodeBatch, KernelAttention
from kvbaton.engine.models.layers import AttentionContext, Heads, LatentHeads, Rotary
from kvbaton.engine.models.llama import Encoded, LlamaForCausalLM
from kvbaton.engine.step import WHOLE_TOKENS
from kvbaton.kernels.prefill_attention import PrefillBatch, cudnn_fits, is_far, planning

RANKS_TOKENS = 512
"""With more tokens a device is slower than the host, times the square of the ranks: each of n
computes an n-th in no less than an n-th of the time."""

WHOLE_PROMPTS = 4
"""Most prompts of one: the attention's launch is as if each had all the tokens."""

LONG_TOKENS = 2048
"""Most tokens of one: launching what has more takes the host less time than the device needs."""

MIXED_TOKENS, PADDED_TOKENS = PADDED
"""A graph with sequences that decode has a multiple of the first: every other size of few tokens
will do. A step without graphs has one of the second: cuBLAS takes 1 to 2 ms to choose a kernel for
each product by a number of tokens that it has not seen. Most of its tiles have as many rows."""

Attend = Callable[[KernelAttention], object]
"""Launches the attention of a step."""

StepKind = tuple[int, bool]
"""How many prompts the attention of a graph is for, and whether for sequences that decode, too."""

BY_PIECE: StepKind = 0, False
WHOLE: StepKind = WHOLE_PROMPTS, False
MIXED: StepKind = WHOLE_PROMPTS, True
LONE: StepKind = 1, False
"""A prompt without prefix, which cuDNN attends to: what pads it comes behind, so none sees it."""

SLOWER = 1.03
"""A size whose products take so many times as long as a larger one's is not used: for some numbers
of rows cuBLAS chooses badly (8B on an H200: 448 take 18.8 ms, 512 16.3)."""
TIMED_PIECES = 5
"""So many layers are timed for that."""


def padded_sizes(most: int) -> list[int]:
    """Numbers of tokens to capture: in sixteens, from 128 on in quarters of a power of two."""
    sizes = list(range(16, min(most, 128) + 1, 16))
    while sizes and sizes[-1] < most:
        sizes.append(sizes[-1] + size_step(sizes[-1], 16))
    return [size for size in sizes if size <= most]


def worth_padding_to(seconds: Mapping[int, float]) -> set[int]:
    """Of sizes and what they take, those that no larger one is faster than."""
    best, kept = math.inf, set[int]()
    for size in sorted(seconds, reverse=True):
        if seconds[size] <= SLOWER * best:
            kept.add(size)
        best = min(best, seconds[size])
    return kept


def padded_forward(
    model: LlamaForCausalLM, token_ids: Tensor, positions: Tensor, attention: KernelAttention
) -> Tensor:
    """The model without graphs, on `PADDED_TOKENS`; see `LlamaForCausalLM.forward`."""
    n = len(token_ids)
    more = -n % PADDED_TOKENS
    attention.pad(more)
    inputs = F.pad(token_ids, (0, more)), F.pad(positions, (0, more))
    return model(*inputs, attention)[:n]  # type: ignore[no-any-return]


def borrowed(tensor: Tensor) -> Tensor:
    """The same elements, without keeping their memory: a graph's pool gives it to later pieces."""
    item, strides = tensor.element_size(), tensor.stride()
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True))
    told = {
        "shape": (reach * item,), "typestr": "|u1", "version": 2,
        "data": (tensor.data_ptr(), False),
    }  # fmt: skip
    owner = SimpleNamespace(__cuda_array_interface__=told)
    flat = torch.as_tensor(owner, device=tensor.device).view(tensor.dtype)
    return flat.as_strided(tensor.shape, strides)


@dataclass(frozen=True)
class GraphPiece:
    """What one graph computes, and the attention that follows it, but for the last one."""

    graph: torch.cuda.CUDAGraph
    attend: Attend | None = None


@dataclass(frozen=True)
class CapturedStep:
    """A step of one number of tokens.

    Attributes:
        pieces: in their order.
        hidden: [tokens, hidden_size]; overwritten by the next replay of any.
        attention: holds what the graphs read.
    """

    pieces: list[GraphPiece]
    hidden: Tensor
    attention: KernelAttention


class Recorder:
    """`AttentionContext` of a trial, and then while graphs are captured.

    Args:
        pool: of the graphs, as torch names it.
        attention: over their inputs. If it has prompts, all becomes one graph; else a graph ends
            where attention begins, and the next one begins behind it.

    Attributes:
        attention: as given.
        pieces: what was recorded.
    """

    states = None

    def __init__(self, pool: Any, attention: KernelAttention) -> None:
        self._pool, self.attention = pool, attention
        self._graph: torch.cuda.CUDAGraph | None = None
        self.pieces: list[GraphPiece] = []

    def begin(self) -> None:
        """Begin a graph."""
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self, attend: Attend | None = None) -> None:
        """End it, before an attention or as the last one."""
        assert self._graph is not None
        self._graph.capture_end()
        self.pieces.append(GraphPiece(self._graph, attend))

    def attend(self, layer: int, heads: Heads, rotary: Rotary | None) -> Tensor:
        """See `AttentionContext.attend`."""
        stored = self.attention.store(layer, heads, rotary)
        made = torch.zeros_like(heads.query, memory_format=torch.contiguous_format)
        if self.attention.prefill or self._graph is None:
            return self.attention.attend_stored(layer, stored, made)
        key, value = (None if x is None else borrowed(x) for x in (stored.key, stored.value))
        lent = stored._replace(query=borrowed(stored.query), key=key, value=value)
        out = borrowed(made)
        self.end(lambda attention: attention.attend_stored(layer, lent, out))
        self.begin()
        return made

    def attend_latent(self, layer: int, heads: LatentHeads, rotary: Rotary) -> Tensor:
        """See `AttentionContext.attend_latent`."""
        self.attention.store_latent(layer, heads, rotary)
        made = heads.query.new_zeros(*heads.query.shape[:2], heads.projection.mla.value_dim)
        if self._graph is None:
            return made
        query, latent, key_rope, out = map(borrowed, (*heads[:3], made))
        lent = LatentHeads(query, latent, key_rope, heads.projection)
        self.end(lambda attention: attention.attend_latent_stored(layer, lent, out))
        self.begin()
        return made


class GraphInputs:
    """What graphs read; what is more than a step has is padding.

    Args:
        cache: the pool.
        tokens: most of a step.
        sequences: most that decode.
        blocks: most of a sequence, in one group.
        beside: see `KernelAttention`.
    """

    def __init__(
        self,
        cache: KVCache,
        tokens: int,
        sequences: int,
        blocks: int,
        beside: torch.cuda.Stream | None = None,
    ) -> None:
        self._cache, device, groups = cache, cache.data.device, cache.num_kv_groups
        self._beside = beside
        self._token_ids, self._positions = torch.zeros((2, tokens), dtype=torch.long, device=device)
        self._slots = torch.full((groups, tokens), -1, device=device)
        lens = torch.zeros(2 * WHOLE_PROMPTS + 1, dtype=torch.int32, device=device)
        self._context_lens, self._cu_seqlens = lens[:WHOLE_PROMPTS], lens[WHOLE_PROMPTS:]
        zeros = torch.zeros(
            (WHOLE_PROMPTS + sequences, groups, blocks), dtype=torch.int32, device=device
        )
        self._tables, tables = zeros[:WHOLE_PROMPTS].transpose(0, 1), zeros[WHOLE_PROMPTS:]
        self._decode = DecodeBatch(tables, lens.new_zeros(sequences))

    def fill(self, token_ids: Tensor, positions: Tensor, attention: KernelAttention) -> None:
        """Take a step's; of one with many prompts its tokens alone."""
        n, prompts, decodes = len(token_ids), attention.num_prompts, attention.num_decodes
        self._token_ids[:n], self._positions[:n] = token_ids, positions
        self._slots.fill_(-1)
        self._slots[:, :n] = attention.slots
        if not 0 < prompts <= WHOLE_PROMPTS:
            return
        prefill, decode = attention.prefill, attention.decode
        self._context_lens.zero_()
        self._context_lens[:prompts] = prefill[0].context_lens
        self._cu_seqlens.fill_(n)
        self._cu_seqlens[: prompts + 1] = prefill[0].cu_seqlens
        self._cu_seqlens[: prompts + 1] += decodes
        for table, batch in zip(self._tables, prefill, strict=True):
            table[:prompts, : batch.block_tables.shape[1]] = batch.block_tables
        if decode is not None:
            self._decode.context_lens.zero_()
            self._decode.context_lens[:decodes] = decode.context_lens
            self._decode.block_tables[:decodes] = decode.block_tables

    def of(self, size: int) -> tuple[Tensor, Tensor]:
        """Tokens and positions of a step of so many."""
        return self._token_ids[:size], self._positions[:size]

    def attention(self, size: int, kind: StepKind) -> KernelAttention:
        """Over so many tokens; of `BY_PIECE` there is none."""
        prompts, decodes = kind
        decode = beside = None
        if decodes:
            decode = DecodeBatch(self._decode.block_tables[:size], self._decode.context_lens[:size])
            beside = self._beside
        batches = [
            PrefillBatch(
                block_tables=table[:prompts],
                cu_seqlens=self._cu_seqlens[: prompts + 1],
                context_lens=self._context_lens[:prompts],
                query_lens=(size, *[0] * (prompts - 1)),
                prefix_lens=(0,) * prompts,
                min_context=0 if kind == LONE else size + 1,
            )
            for table in self._tables
        ]
        slots, prefill = self._slots[:, :size], batches if prompts else ()
        return KernelAttention(self._cache, slots, decode, prefill, prompts_at=0, beside=beside)


class PromptGraphs:
    """Called as its model is; replays graphs for a step that has few enough tokens.

    Not of models with a state, whose layers need more of the sequences than attention does, nor of
    those that see images, whose rotary positions have another shape.

    Args:
        model: what to capture.
        cache: its pool.
        most_tokens: of any step.
        most_sequences: that decode in one.
        most_blocks: of a sequence, in one group.

    Attributes:
        sizes: numbers of tokens to capture, ascending.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        cache: KVCache,
        *,
        most_tokens: int,
        most_sequences: int,
        most_blocks: int,
    ) -> None:
        self._model, ranks = model, model.shard.size
        padded = padded_sizes(min(most_tokens, max(WHOLE_TOKENS, RANKS_TOKENS * ranks**2)))
        whole = WHOLE_TOKENS if ranks == 1 else LONG_TOKENS
        lone_most = min(most_tokens, most_blocks * cache.block_size, LONG_TOKENS)
        of_kind: dict[StepKind, Iterable[int]] = {BY_PIECE: padded}
        if model.config.mla is None:
            of_kind[WHOLE] = [size for size in padded if size <= whole]
            of_kind[MIXED] = [size for size in of_kind[WHOLE] if size % MIXED_TOKENS == 0]
            of_kind[LONE] = range(WHOLE_TOKENS + PADDED_TOKENS, lone_most + 1, PADDED_TOKENS)
        self._sizes = {kind: set(sizes) for kind, sizes in of_kind.items()}
        self.sizes = sorted(set().union(*self._sizes.values()))
        self._captured: dict[StepKind, dict[int, CapturedStep]] = {kind: {} for kind in of_kind}
        tokens, config = max(self.sizes, default=0), model.config
        device = cache.data.device
        query = torch.empty(0, 1, config.head_dim, dtype=cache.compute_dtype, device=device)
        whole_groups = any(group.window == 0 for group in cache.groups)
        self._far_apart = (
            whole_groups and not config.family.sinks and cudnn_fits(query, cache.block_size)
        )
        self._stream, beside = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._inputs = GraphInputs(cache, tokens, min(most_sequences, tokens), most_blocks, beside)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionContext,
        encoded: Encoded | None = None,
    ) -> Tensor:
        """See `LlamaForCausalLM.forward`."""
        n = len(token_ids)
        assert isinstance(attention, KernelAttention)
        assert encoded is None, "models that see have no graphs"
        captured = self._find(n, attention)
        if captured is None:
            return padded_forward(self._model, token_ids, positions, attention)
        self._inputs.fill(token_ids, positions, attention)
        for piece in captured.pieces:
            piece.graph.replay()
            if piece.attend is not None:
                piece.attend(attention)
        return captured.hidden[:n]

    def _find(self, n: int, attention: KernelAttention) -> CapturedStep | None:
        kinds = [BY_PIECE]
        if 0 < attention.num_prompts <= WHOLE_PROMPTS:
            fresh, starts = attention.prefill[0].query_lens, attention.prefill[0].prefix_lens
            far = self._far_apart and not attention.num_decodes and any(map(is_far, fresh, starts))
            # Else cuDNN is much faster.
            if not far and (n <= WHOLE_TOKENS or max(starts) <= LONG_TOKENS):
                kinds.insert(0, MIXED if attention.num_decodes else WHOLE)
            if n > WHOLE_TOKENS and not attention.num_decodes and starts == (0,):
                kinds.insert(0, LONE)
        for kind in kinds:
            captured = self._captured.get(kind, {})
            if size := min((size for size in captured if size >= n), default=0):
                return captured[size]
        return None

    def load(self, size: int) -> None:
        """Run steps of so many tokens once, to load what they need: a capture can't."""
        for kind in self._kinds(size):
            with planning():
                self._model(*self._inputs.of(size), self._recorder(size, kind))

    def capture(self, size: int) -> None:
        """Record steps of so many tokens; the largest first, since the others share its memory."""
        for kind in self._kinds(size):
            recording = self._recorder(size, kind)
            torch.cuda.synchronize()
            with torch.cuda.stream(self._stream):
                recording.begin()
                try:
                    hidden: Tensor = self._model(*self._inputs.of(size), recording)
                finally:
                    recording.end()
            self._captured[kind][size] = CapturedStep(
                recording.pieces, borrowed(hidden), recording.attention
            )

    def drop_slow_sizes(self) -> None:
        """Forget sizes whose products take longer than a larger one's.

        Not with several ranks, which would have to agree.
        """
        if self._model.shard.size > 1:
            return
        seconds = dict[int, float]()
        for size, captured in self._captured[BY_PIECE].items():
            pieces = captured.pieces[:TIMED_PIECES]
            seconds[size] = min(_seconds(pieces) for _ in range(3))
        for size in seconds.keys() - worth_padding_to(seconds):
            for by_size in self._captured.values():
                by_size.pop(size, None)

    def _kinds(self, size: int) -> list[StepKind]:
        return [kind for kind, sizes in self._sizes.items() if size in sizes]

    def _recorder(self, size: int, kind: StepKind) -> Recorder:
        return Recorder(self._pool, self._inputs.attention(size, kind))


def _seconds(pieces: Iterable[GraphPiece]) -> float:
    """What graphs take the device, without attention."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for piece in pieces:
        piece.graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3

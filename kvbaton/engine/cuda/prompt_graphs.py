"""Steps with prompts as CUDA graphs: whole steps if the prompts are few and short, else pieces.

The kernels of a layer's products, norms and sums depend only on the number of tokens, which is
padded to one of a few sizes; attention depends on every sequence. So the work between two
attentions is captured as a graph (vLLM calls this piecewise), and attention is launched in between.
Two kinds of steps fit into one graph with their attention, whose launch then suits all of them: a
few short prompts, with or without decoding sequences, and one longer prompt alone. Graphs save time
of the host, which matters when the device is quick: with few tokens, and with several ranks.
Launching the attention of 32 layers takes the host 6 to 11 ms, for which the tokens of the previous
step wait as well.
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
"""Tokens, times the square of the ranks, beyond which the device is slower than the host: each of n
ranks computes an n-th, in no less than an n-th of the time."""

WHOLE_PROMPTS = 4
"""Maximum number of prompts in a whole step's graph: attention is launched as if each prompt had
all the tokens."""

LONG_TOKENS = 2048
"""Maximum number of tokens in a whole step's graph: larger steps keep the device busier than the
host."""

MIXED_TOKENS, PADDED_TOKENS = PADDED
"""Granularity of step sizes in tokens. With decoding sequences, only multiples of the first have
graphs: every other one of the small sizes suffices. Without graphs, steps are padded to a multiple
of the second, the number of rows of most cuBLAS tiles: cuBLAS takes 1 to 2 ms to choose a kernel
per product for a number of tokens that it has not seen."""

Attend = Callable[[KernelAttention], object]
"""Launches the attention of a step, in one layer."""

StepKind = tuple[int, bool]
"""Kind of a graph: number of prompts in its attention, and whether sequences decode in it too."""

BY_PIECE: StepKind = 0, False
WHOLE: StepKind = WHOLE_PROMPTS, False
MIXED: StepKind = WHOLE_PROMPTS, True
LONE: StepKind = 1, False
"""One prompt without prefix, attended to by cuDNN; padding follows it, so no token sees that."""

SLOWER = 1.03
"""A size is dropped if its products take this multiple of a larger size's time: for some numbers of
rows cuBLAS chooses badly (8B on an H200: 448 rows take 18.8 ms, 512 take 16.3)."""
TIMED_PIECES = 5
"""Number of layers that are timed for this decision."""


def padded_sizes(most: int) -> list[int]:
    """Numbers of tokens to capture: multiples of 16, from 128 on quarters of a power of two."""
    sizes = list(range(16, min(most, 128) + 1, 16))
    while sizes and sizes[-1] < most:
        sizes.append(sizes[-1] + size_step(sizes[-1], 16))
    return [size for size in sizes if size <= most]


def worth_padding_to(seconds: Mapping[int, float]) -> set[int]:
    """The sizes that no larger size is faster than, given the seconds of each."""
    best, kept = math.inf, set[int]()
    for size in sorted(seconds, reverse=True):
        if seconds[size] <= SLOWER * best:
            kept.add(size)
        best = min(best, seconds[size])
    return kept


def padded_forward(
    model: LlamaForCausalLM, token_ids: Tensor, positions: Tensor, attention: KernelAttention
) -> Tensor:
    """Run the model without graphs, padded to `PADDED_TOKENS`; see `LlamaForCausalLM.forward`."""
    n = len(token_ids)
    more = -n % PADDED_TOKENS
    attention.pad(more)
    inputs = F.pad(token_ids, (0, more)), F.pad(positions, (0, more))
    return model(*inputs, attention)[:n]  # type: ignore[no-any-return]


def borrowed(tensor: Tensor) -> Tensor:
    """A view that does not keep its memory alive, so that later pieces of a graph may reuse it."""
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
    """One graph, and the attention that follows it, except after the last graph."""

    graph: torch.cuda.CUDAGraph
    attend: Attend | None = None


@dataclass(frozen=True)
class CapturedStep:
    """A captured step of one number of tokens.

    Attributes:
        pieces: Graphs in order.
        hidden: [tokens, hidden_size]; overwritten by the next replay of any step.
        attention: Owns tensors that the graphs read.
    """

    pieces: list[GraphPiece]
    hidden: Tensor
    attention: KernelAttention


class Recorder:
    """`AttentionContext` of a trial run, and then of a capture.

    Args:
        pool: Memory pool of the graphs, as torch names it.
        attention: Attention over the graphs' inputs. If it has prompts, everything becomes one
            graph; else a graph ends before each attention, and the next begins after it.

    Attributes:
        attention: As given.
        pieces: The graphs captured so far.
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
        """End the graph, before an attention or as the last one."""
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
    """Input tensors of graphs; the part that a step does not fill is padding.

    Args:
        cache: The KV pool.
        tokens: Maximum number of tokens in a step.
        sequences: Maximum number of decoding sequences.
        blocks: Maximum number of blocks of a sequence, in one group.
        beside: See `KernelAttention`.
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
        """Copy a step's inputs; of a step with many prompts, only its tokens."""
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
        """Tokens and positions of a step of `size` tokens."""
        return self._token_ids[:size], self._positions[:size]

    def attention(self, size: int, kind: StepKind) -> KernelAttention:
        """Attention over `size` tokens; with `BY_PIECE`, without sequences."""
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
    """Called like its model; replays graphs if the step has few enough tokens.

    It does not support models with states, whose layers need more of the sequences than attention
    does, nor models that take images, whose rotary positions have another shape.

    Args:
        model: Model to capture.
        cache: Its KV pool.
        most_tokens: Maximum number of tokens in a step.
        most_sequences: Maximum number of decoding sequences in a step.
        most_blocks: Maximum number of blocks of a sequence, in one group.

    Attributes:
        sizes: Numbers of tokens to capture, ascending.
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
            # Far from the start of a prompt, or after a long prefix, cuDNN is much faster.
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
        """Run steps of `size` tokens once to load kernels, which is impossible during a capture."""
        for kind in self._kinds(size):
            with planning():
                self._model(*self._inputs.of(size), self._recorder(size, kind))

    def capture(self, size: int) -> None:
        """Capture steps of `size` tokens; the largest size first, whose memory the others share."""
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
        """Drop sizes whose products take longer than a larger size's.

        Not with several ranks, which would have to agree on them.
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
    """Seconds that graphs take on the device, without attention."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for piece in pieces:
        piece.graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3

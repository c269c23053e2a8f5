"""Steps with prompts as CUDA graphs by piece: what lies between two attentions is one launch.

What a layer's products, norms and sums launch depends on the number of tokens alone, and is padded
to one of a few; its attention depends on every sequence, and is launched as it is. So a step costs
the host a graph and an attention a layer, which counts where the device is quick: for few tokens,
and for ranks, whose threads share an interpreter. (vLLM calls it a piecewise CUDA graph.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvbaton.engine.cuda.attention import KernelAttention
from kvbaton.engine.models.layers import AttentionContext, LatentProjection
from kvbaton.engine.models.llama import Encoded, LlamaForCausalLM
from kvbaton.kernels.rope_write import HeadNorms

ALONE_TOKENS = 512
"""With more tokens the device of a single rank is slower than the host is without graphs. Of n
ranks each computes an n-th, and launching takes them more than n times as long."""

Attend = Callable[[KernelAttention, int], object]
"""Launches an attention of a step of so many tokens."""


def padded_sizes(most: int) -> list[int]:
    """Numbers of tokens to capture: in sixteens, from 128 on in quarters of a power of two."""
    sizes = list(range(16, min(most, 128) + 1, 16))
    while sizes and sizes[-1] < most:
        sizes.append(sizes[-1] + max(16, 1 << (sizes[-1].bit_length() - 3)))
    return [size for size in sizes if size <= most]


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
class Piece:
    """What one graph computes, and the attention that follows it, but for the last one."""

    graph: torch.cuda.CUDAGraph
    attend: Attend | None = None


@dataclass(frozen=True)
class Captured:
    """A step of one number of tokens; `hidden` is overwritten by the next replay of any."""

    pieces: list[Piece]
    hidden: Tensor


class Break:
    """`AttentionContext` that ends a graph at each attention, and begins the next one.

    Args:
        pool: of the graphs, as torch names it.
    """

    states = None

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._rotary: dict[Tensor, Tensor] = {}
        self.pieces: list[Piece] = []
        self.begin()

    def begin(self) -> None:
        """Begin a graph."""
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self, attend: Attend | None = None) -> None:
        """End it, before an attention or as the last one."""
        self._graph.capture_end()
        self.pieces.append(Piece(self._graph, attend))

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
        scale: float | None = None,
        sinks: Tensor | None = None,
        norms: HeadNorms | None = None,
        interleaved: bool = False,
    ) -> Tensor:
        """See `AttentionContext.attend`."""
        made = torch.zeros_like(query, memory_format=torch.contiguous_format)
        q, out = borrowed(query), borrowed(made)
        k, v = (None if x is None else borrowed(x) for x in (key, value))
        turns = None if rotary is None else self._turns(rotary)

        def attend(attention: KernelAttention, n: int) -> None:
            k_n, v_n = (None if x is None else x[:n] for x in (k, v))
            options = scale, sinks, norms, interleaved
            attention.attend(layer, q[:n], k_n, v_n, turns, *options, out[:n])

        self._next(attend)
        return made

    def attend_latent(
        self,
        layer: int,
        query: Tensor,
        latent: Tensor,
        key_rope: Tensor,
        rotary: tuple[Tensor, Tensor],
        projection: LatentProjection,
    ) -> Tensor:
        """See `AttentionContext.attend_latent`."""
        made = query.new_zeros(*query.shape[:2], projection.mla.value_dim)
        parts, turns = [borrowed(x) for x in (query, latent, key_rope, made)], self._turns(rotary)

        def attend(attention: KernelAttention, n: int) -> None:
            q, kv, k, out = (x[:n] for x in parts)
            attention.attend_latent(layer, q, kv, k, turns, projection, out=out)

        self._next(attend)
        return made

    def _next(self, attend: Attend) -> None:
        self.end(attend)
        self.begin()

    def _turns(self, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The same tensors for all layers that turn alike."""
        for part in rotary:
            if part not in self._rotary:
                self._rotary[part] = borrowed(part)
        return self._rotary[rotary[0]], self._rotary[rotary[1]]


class PromptGraphs:
    """Called as its model is; replays graphs for a step that has few enough tokens.

    Not of models with a state, whose layers need more of the sequences than attention does, nor of
    those that see images, whose rotary positions have another shape.

    Args:
        model: what to capture.
        most_tokens: of any step.
        device: the model's.

    Attributes:
        sizes: numbers of tokens to capture, ascending.
    """

    def __init__(self, model: LlamaForCausalLM, most_tokens: int, device: torch.device) -> None:
        self._model, self._collectives = model, model.shard.collectives
        self.sizes = padded_sizes(min(most_tokens, ALONE_TOKENS * model.shard.size**2))
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._captured: dict[int, Captured] = {}
        shape = 2, max(self.sizes, default=0)
        self._token_ids, self._positions = torch.zeros(shape, dtype=torch.int64, device=device)

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionContext,
        encoded: Encoded | None = None,
    ) -> Tensor:
        """See `LlamaForCausalLM.forward`."""
        n = len(token_ids)
        size = min((size for size in self._captured if size >= n), default=None)
        if size is None:
            return self._model(token_ids, positions, attention, encoded)  # type: ignore[no-any-return]
        assert isinstance(attention, KernelAttention)
        assert encoded is None
        self._token_ids[:n], self._positions[:n] = token_ids, positions
        captured = self._captured[size]
        for piece in captured.pieces:
            piece.graph.replay()
            self._collectives.tick()
            if piece.attend is not None:
                piece.attend(attention, n)
        return captured.hidden[:n]

    def capture(self, size: int) -> None:
        """Record a step of so many tokens; the largest first, since the others share its memory.

        A step of as many must have been run before, which loads and caches what it needs.
        """
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            pieces = Break(self._pool)
            try:
                inputs = self._token_ids[:size], self._positions[:size]
                hidden: Tensor = self._model(*inputs, pieces)
            finally:
                pieces.end()
        self._captured[size] = Captured(pieces.pieces, borrowed(hidden))

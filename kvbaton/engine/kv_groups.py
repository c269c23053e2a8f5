"""The KV groups of a model: sets of layers that share a block table, as one declarative list.

Blocks of all groups have the same number of bytes, so groups share one pool of memory and one free
list: memory that short windows do not need is used by long prompts, whatever the load. (Separate
pools would have to be sized by a guess of prompt lengths.) vLLM's hybrid KV cache manager makes
groups in the same way. To get equal blocks, layers of a larger kind are split into several groups;
a group whose layers need less than the largest leaves part of its blocks unused. A layer that reads
another layer's K and V is in no group.

A block of a group of states contains one state of each of its layers, independent of the number of
tokens. It fits if blocks have enough tokens (`least_block_size`), as in vLLM; the alternative would
be separate pools, sized by a guess of the number of states. Groups depend on the model alone, not
on block size or ranks, so both sides of a hand-over have the same groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbaton.connectors.layout import ITEM_SIZE, GroupKind

STATE_DTYPE = "float32"
"""dtype of states: with fewer bits, rounding at every token would make them drift."""

MAX_GROUPS = 8
"""Maximum number of groups, unless there are more kinds of layers. More groups would save a little
memory, but each costs tables and launches in every step."""


@dataclass(frozen=True, kw_only=True)
class LayerKV:
    """What a layer stores per token, and which tokens it attends to.

    Attributes:
        window: Tokens that a token attends to, itself included; 0 for all.
        chunked: Whether the window is a chunk, see `types.first_attended`.
        heads: KV heads of the whole model, split over ranks, or replicated if there are too few.
        head_dim: Elements per head.
        value_dim: For latent rows, which are key and value at once (multi-head latent attention),
            number of leading features that form the value; 0 for separate K and V.
        state_rows: For a layer with a state instead of tokens, rows of `head_dim` float32 per head;
            heads are split over ranks. 0 for tokens.
    """

    window: int = 0
    chunked: bool = False
    heads: int
    head_dim: int
    value_dim: int = 0
    state_rows: int = 0

    @property
    def planes(self) -> int:
        """2 for K and V, 1 for a latent row."""
        return 1 if self.value_dim else 2

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Everything that determines the shape of its memory, except for the layers."""
        return self.heads, self.head_dim, self.value_dim, self.state_rows

    @property
    def kind(self) -> GroupKind:
        """Kind of its group."""
        if self.state_rows:
            return GroupKind.STATE
        if self.window:
            return GroupKind.CHUNK if self.chunked else GroupKind.WINDOW
        return GroupKind.FULL


@dataclass(frozen=True, kw_only=True)
class KVGroup(LayerKV):
    """Equal layers that share a block table.

    Attributes:
        layers: Numbers of the layers, ascending.
    """

    layers: tuple[int, ...]


def kv_groups(layers: Sequence[LayerKV | None]) -> tuple[KVGroup, ...]:
    """The groups of a model's layers: those of one shape are consecutive, those of states last.

    Args:
        layers: What each layer stores; None if it reads what another layer stores.
    """
    kinds: dict[LayerKV, list[int]] = {}
    for number, layer in enumerate(layers):
        if layer is not None:
            kinds.setdefault(layer, []).append(number)
    most = _elements_per_group(kinds)
    least = {kind.shape: min(k.window for k in kinds if k.shape == kind.shape) for kind in kinds}

    def order(kind: LayerKV) -> Any:
        return bool(kind.state_rows), least[kind.shape], kind.shape, kind.window

    groups = []
    for kind in sorted(kinds, key=order):
        numbers = kinds[kind]
        count = -(-len(numbers) // (most // _elements(kind, kinds)))
        for i in range(count):
            first, past = (len(numbers) * n // count for n in (i, i + 1))
            groups.append(KVGroup(layers=tuple(numbers[first:past]), **vars(kind)))
    return tuple(groups)


def _elements_per_group(kinds: Mapping[LayerKV, Sequence[int]]) -> int:
    """Elements per token in the largest group, chosen so that the worst kind wastes the least.

    Args:
        kinds: Layers by kind.
    """
    sizes = [(len(layers), _elements(kind, kinds)) for kind, layers in kinds.items()]

    def waste(most: int) -> tuple[float, int]:
        groups = [-(-count // (most // each)) for count, each in sizes]
        pairs = zip(groups, sizes, strict=True)
        worst = max(most * n / (count * each) for n, (count, each) in pairs)
        return worst, sum(groups)

    largest = max(each for _, each in sizes)
    tried = {n * each for count, each in sizes for n in range(1, count + 1) if n * each >= largest}
    most = max(MAX_GROUPS, len(sizes))
    return min((size for size in sorted(tried) if waste(size)[1] <= most), key=waste)


def _elements(kind: LayerKV, kinds: Iterable[LayerKV]) -> int:
    """Elements per token in one layer; a layer with a state counts like the largest other kind."""
    if kind.state_rows:
        return max((_elements(k, kinds) for k in kinds if not k.state_rows), default=1)
    return kind.heads * kind.planes * kind.head_dim


def least_block_size(groups: Sequence[KVGroup], dtype: str) -> int:
    """Fewest tokens per block with room for a state; 1 for a model without states.

    Args:
        groups: Groups of a model; more ranks than KV heads need no more.
        dtype: dtype of K and V.
    """
    states = [
        len(group.layers) * group.heads * group.state_rows * group.head_dim for group in groups
    ]
    need = max(states) * ITEM_SIZE[STATE_DTYPE]
    return max(1, -(-need // block_bytes(groups, 1, 1, dtype)))


def block_bytes(groups: Sequence[KVGroup], block_size: int, ranks: int, dtype: str) -> int:
    """Bytes per block on one of `ranks` ranks, the same for all groups.

    They are whole pages of each group; a page is a block of one head, layer and plane.
    """
    tokens = [group for group in groups if not group.state_rows]
    most = max(
        max(1, group.heads // ranks) * len(group.layers) * group.planes * group.head_dim
        for group in tokens
    )
    unit = math.lcm(*(group.head_dim for group in tokens))
    return -(-most // unit) * unit * block_size * ITEM_SIZE[dtype]

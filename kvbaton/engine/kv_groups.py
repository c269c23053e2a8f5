"""Which layers share a block table: the KV groups of a model, one declarative list.

All groups of a model have blocks of equal bytes, so they share one pool of memory and one list of
free blocks: what short windows leave, long prompts take, whatever the load. (A pool of its own for
each group must be cut to some guess of how long prompts are.) vLLM's hybrid KV cache manager makes
groups in the same way. To be equal, a kind of layers that takes more is split into several groups;
a group whose layers take less than the largest leaves a part of its blocks unused. A layer that
reads another's K and V is in no group.

A block of a group of states holds one state of each of its layers, whatever the number of tokens.
It fits where blocks have tokens enough (`least_block_size`), as in vLLM; pools of their own, cut to
a guess of how many states are wanted, would be the other way. Groups are those of the model alone,
never of block size or ranks, so that both sides of a hand-over have the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbaton.connectors.layout import ITEM_SIZE, GroupKind

STATE_DTYPE = "float32"
"""Of states: rounded to fewer bits at every token, they would drift."""

MAX_GROUPS = 8
"""More would use memory a little better; each one costs tables and launches in every step."""


@dataclass(frozen=True, kw_only=True)
class LayerKV:
    """What a layer keeps of a token, and which tokens it attends to.

    Attributes:
        window: tokens that a token attends to, itself included; 0 for all.
        chunked: the window is a chunk, see `types.first_attended`.
        heads: KV heads of the whole model; ranks share them, or replicate one.
        head_dim: elements per head.
        value_dim: of a latent row, which is key and value in one (multi-head latent attention), its
            first features, which are the value; 0 for K and V apart.
        state_rows: it keeps one state instead of tokens: so many rows of `head_dim` float32 per
            head, whose heads ranks share; 0 for tokens.
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
        """All that memory is shaped by: groups of one shape are alike but for their layers."""
        return self.heads, self.head_dim, self.value_dim, self.state_rows

    @property
    def kind(self) -> GroupKind:
        """What a block of its group means."""
        if self.state_rows:
            return GroupKind.STATE
        if self.window:
            return GroupKind.CHUNK if self.chunked else GroupKind.WINDOW
        return GroupKind.FULL


@dataclass(frozen=True, kw_only=True)
class KVGroup(LayerKV):
    """Layers that share a block table, all alike.

    Attributes:
        layers: their numbers, ascending.
    """

    layers: tuple[int, ...]


def kv_groups(layers: Sequence[LayerKV | None]) -> tuple[KVGroup, ...]:
    """The groups of a model's layers: those of one shape follow each other, those of states last.

    Args:
        layers: of each layer, what it keeps; None if it reads what another one keeps.
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
    """Elements of a token in the largest group: so that the worst kind wastes as little as can be.

    Args:
        kinds: their layers.
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
    """Of a token in one layer; a layer with a state takes the place of any other."""
    if kind.state_rows:
        return max((_elements(k, kinds) for k in kinds if not k.state_rows), default=1)
    return kind.heads * kind.planes * kind.head_dim


def least_block_size(groups: Sequence[KVGroup], dtype: str) -> int:
    """Fewest tokens of a block that has room for a state; 1 where there are none.

    Args:
        groups: of a model; more ranks than KV heads would need no more.
        dtype: of K and V.
    """
    states = [
        len(group.layers) * group.heads * group.state_rows * group.head_dim for group in groups
    ]
    need = max(states) * ITEM_SIZE[STATE_DTYPE]
    return max(1, -(-need // block_bytes(groups, 1, 1, dtype)))


def block_bytes(groups: Sequence[KVGroup], block_size: int, ranks: int, dtype: str) -> int:
    """Bytes of one block on one of so many ranks, whichever group it serves.

    They are whole pages of each group: a page is a block of one head, layer and plane.
    """
    tokens = [group for group in groups if not group.state_rows]
    most = max(
        max(1, group.heads // ranks) * len(group.layers) * group.planes * group.head_dim
        for group in tokens
    )
    unit = math.lcm(*(group.head_dim for group in tokens))
    return -(-most // unit) * unit * block_size * ITEM_SIZE[dtype]

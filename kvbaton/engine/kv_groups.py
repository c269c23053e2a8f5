"""Which layers share a block table: the KV groups of a model, one declarative list.

All groups of a model have blocks of equal bytes, so they share one pool of memory and one list of
free blocks: what short windows leave, long prompts take, whatever the load. (A pool of its own for
each group must be cut to some guess of how long prompts are.) vLLM's hybrid KV cache manager makes
groups in the same way. To be equal, a kind of layers that is more numerous is split into several
groups; a group that has fewer layers than the largest leaves a part of its blocks unused.

A block of a group of states holds one state of each of its layers, whatever the number of tokens.
It fits where blocks have tokens enough (`least_block_size`), as in vLLM; pools of their own, cut to
a guess of how many states are wanted, would be the other way. Groups are those of the model alone,
never of block size or ranks, so that both sides of a hand-over have the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbaton.connectors.layout import ITEM_SIZE, GroupKind

STATE_DTYPE = "float32"
"""Of states: rounded to fewer bits at every token, they would drift."""

MAX_GROUPS = 8
"""More would use memory a little better; each one costs tables and launches in every step."""


@dataclass(frozen=True, kw_only=True)
class KVGroup:
    """Layers that share a block table, and what one token is in one of them.

    Attributes:
        layers: their numbers, ascending.
        window: tokens that a token attends to, itself included; 0 for all.
        heads: KV heads of the whole model; ranks share them, or replicate one.
        head_dim: elements per head.
        value_dim: of a latent row, which is key and value in one (multi-head latent attention), its
            first features, which are the value; 0 for K and V apart.
        state_rows: a block holds one state of each layer instead of tokens: so many rows of
            `head_dim` float32 per head, whose heads ranks share; 0 for tokens.
    """

    layers: tuple[int, ...]
    window: int = 0
    heads: int
    head_dim: int
    value_dim: int = 0
    state_rows: int = 0

    @property
    def planes(self) -> int:
        """2 for K and V, 1 for a latent row."""
        return 1 if self.value_dim else 2

    @property
    def kind(self) -> GroupKind:
        """What a block of it means."""
        if self.state_rows:
            return GroupKind.STATE
        return GroupKind.WINDOW if self.window else GroupKind.FULL


@dataclass(frozen=True)
class StateShape:
    """The state of one layer: float32 [heads, rows, features], of the whole model."""

    heads: int
    rows: int
    features: int


def kv_groups(
    windows: Sequence[int | None],
    *,
    heads: int,
    head_dim: int,
    value_dim: int = 0,
    state: StateShape | None = None,
) -> tuple[KVGroup, ...]:
    """The groups of a model whose layers differ in their windows, or have a state; those last.

    Args:
        windows: per layer, as `KVGroup.window`; None for one with a state.
        heads: see `KVGroup`.
        head_dim: see `KVGroup`.
        value_dim: see `KVGroup`.
        state: of those layers.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    size = _layers_per_group([len(layers) for layers in kinds.values()])
    groups = []
    for window, layers in sorted(kinds.items(), key=lambda kind: (kind[0] is None, kind[0])):
        count = -(-len(layers) // size)
        for i in range(count):
            first, past = (len(layers) * n // count for n in (i, i + 1))
            part = tuple(layers[first:past])
            group = KVGroup(
                layers=part,
                window=window or 0,
                heads=heads,
                head_dim=head_dim,
                value_dim=value_dim,
            )
            if window is None:
                assert state is not None, "layers with a state come with its shape"
                group = KVGroup(
                    layers=part,
                    heads=state.heads,
                    head_dim=state.features,
                    state_rows=state.rows,
                )
            groups.append(group)
    return tuple(groups)


def _layers_per_group(counts: Sequence[int]) -> int:
    """Layers of the largest group: the kind that wastes most wastes as little as can be.

    Args:
        counts: layers of each kind.
    """

    def waste(size: int) -> tuple[float, int]:
        groups = [-(-count // size) for count in counts]
        worst = max(size * n / count for n, count in zip(groups, counts, strict=True))
        return worst, sum(groups)

    most = max(MAX_GROUPS, len(counts))
    sizes = range(1, max(counts) + 1)
    return min((size for size in sizes if waste(size)[1] <= most), key=waste)


def block_layers(groups: Sequence[KVGroup]) -> int:
    """Layers of K and V for which a block has room."""
    return max(len(group.layers) for group in groups if not group.state_rows)


def least_block_size(groups: Sequence[KVGroup], dtype: str) -> int:
    """Fewest tokens of a block that has room for a state; 1 where there are none.

    Args:
        groups: of a model; more ranks than KV heads would need no more.
        dtype: of K and V.
    """
    states = [
        len(group.layers) * group.heads * group.state_rows * group.head_dim for group in groups
    ]
    return max(
        1,
        -(-max(states) * ITEM_SIZE[STATE_DTYPE] // block_bytes(groups, 1, groups[0].heads, dtype)),
    )


def block_bytes(groups: Sequence[KVGroup], block_size: int, heads: int, dtype: str) -> int:
    """Bytes of one block on a rank with so many heads, whichever group it serves."""
    first = groups[0]
    tokens = heads * block_layers(groups) * first.planes * block_size
    return tokens * first.head_dim * ITEM_SIZE[dtype]

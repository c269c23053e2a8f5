"""Which layers share a block table: the KV groups of a model, one declarative list.

All groups of a model have blocks of equal bytes, so they share one pool of memory and one list of
free blocks: what short windows leave, long prompts take, whatever the load. (A pool of its own for
each group must be cut to some guess of how long prompts are.) vLLM's hybrid KV cache manager makes
groups in the same way. To be equal, a kind of layers that is more numerous is split into several
groups; a group that has fewer layers than the largest leaves a part of its blocks unused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbaton.connectors.layout import ITEM_SIZE, GroupKind

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
    """

    layers: tuple[int, ...]
    window: int = 0
    heads: int
    head_dim: int
    value_dim: int = 0

    @property
    def planes(self) -> int:
        """2 for K and V, 1 for a latent row."""
        return 1 if self.value_dim else 2

    @property
    def kind(self) -> GroupKind:
        """What a block of it means."""
        return GroupKind.WINDOW if self.window else GroupKind.FULL


def kv_groups(
    windows: Sequence[int], *, heads: int, head_dim: int, value_dim: int = 0
) -> tuple[KVGroup, ...]:
    """The groups of a model whose layers differ in their windows only.

    Args:
        windows: per layer, as `KVGroup.window`.
        heads: see `KVGroup`.
        head_dim: see `KVGroup`.
        value_dim: see `KVGroup`.
    """
    kinds: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    size = _layers_per_group([len(layers) for layers in kinds.values()])
    groups = []
    for window, layers in sorted(kinds.items()):
        count = -(-len(layers) // size)
        for i in range(count):
            first, past = (len(layers) * n // count for n in (i, i + 1))
            part = tuple(layers[first:past])
            group = KVGroup(
                layers=part, window=window, heads=heads, head_dim=head_dim, value_dim=value_dim
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
    """Layers for which a block has room."""
    return max(len(group.layers) for group in groups)


def block_bytes(groups: Sequence[KVGroup], block_size: int, heads: int, dtype: str) -> int:
    """Bytes of one block on a rank with so many heads, whichever group it serves."""
    first = groups[0]
    tokens = heads * block_layers(groups) * first.planes * block_size
    return tokens * first.head_dim * ITEM_SIZE[dtype]

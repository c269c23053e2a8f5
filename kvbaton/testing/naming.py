"""How objects are named: who has the same names shares objects, and nobody else does."""

from __future__ import annotations

from dataclasses import dataclass

from kvbaton.connectors.keys import Extra, IdentityRecord, block_keys, root_key
from kvbaton.connectors.layout import GroupKind, KVLayout, contiguous_plane
from kvbaton.connectors.objects import ObjectForm

TOKENS = tuple(range(100, 164))


@dataclass(frozen=True)
class Owner:
    """All that decides which objects a request may use; its tokens are always `TOKENS`.

    Attributes:
        record: of the engine.
        salt: of the request.
        adapter: of the request.
        layouts: of the engine's ranks.
        items: multimodal items among the tokens.
    """

    record: IdentityRecord
    salt: str
    adapter: bytes
    layouts: tuple[KVLayout, ...]
    items: tuple[Extra, ...] = ()

    def keys(self) -> list[bytes]:
        """The objects of a prompt of `TOKENS`."""
        form = ObjectForm(self.layouts)
        root = root_key(self.record.digest(), self.salt, self.adapter)
        keys = block_keys(root, TOKENS, form.block_size, extras=self.items)
        return [form.key(key) for key in keys]


def make_owner(weights: str) -> Owner:
    """Somebody, who differs from others in the weights only."""
    record = IdentityRecord(
        weights=weights,
        revision="main",
        rope="",
        dtype="bfloat16",
        kv_dtype="bfloat16",
        kv_scales="",
        adapter="",
        encoder="",
        draft="",
    )
    return Owner(record, "", b"", (make_layout(),))


def make_layout(
    *,
    dtype: str = "bfloat16",
    block_size: int = 16,
    layers: tuple[int, ...] = (0, 1),
    heads: int = 4,
    head_start: int = 0,
    head_dim: int = 8,
) -> KVLayout:
    """A small layout: one of `heads` of four heads."""
    plane = contiguous_plane(
        num_blocks=2,
        block_size=block_size,
        num_heads=heads,
        head_dim=head_dim,
        layers=layers,
        dtype=dtype,
        head_start=head_start,
        head_total=4,
    )
    return KVLayout(0, GroupKind.FULL, block_size, 2, (plane,))

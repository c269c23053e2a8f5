"""Objects of blocks: the same bytes and digests from any sharding, and headers that say no."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.connectors import objects
from kvbaton.connectors.base import Memory
from kvbaton.connectors.layout import AXES, Axis, GroupKind, KVLayout, contiguous_plane
from kvbaton.connectors.objects import HEADER_BYTES, ObjectForm, ObjectHeader
from kvbaton.engine.block_staging import CpuBlockStaging
from kvbaton.kernels.digest import block_sums

HEADS, LAYERS, DIM, SIZE, BLOCKS = 4, 3, 8, 4, 6
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Side:
    """Ranks of one tensor parallelism with pools in this process."""

    def __init__(
        self,
        tp: int,
        *,
        dtype: str = "float32",
        order: tuple[Axis, ...] = AXES,
        stages: int = 1,
        heads: int = HEADS,
    ) -> None:
        layers = np.array_split(np.arange(LAYERS), stages)
        self.layouts, self.pools = [], []
        for stage in layers:
            for rank in range(tp):
                count = max(1, heads // tp)
                plane = contiguous_plane(
                    num_blocks=BLOCKS,
                    block_size=SIZE,
                    num_heads=count,
                    head_dim=DIM,
                    layers=tuple(stage.tolist()),
                    dtype=dtype,
                    head_start=rank * heads // tp,
                    head_total=heads,
                    order=order,
                )
                self.layouts.append(KVLayout(0, GroupKind.FULL, SIZE, BLOCKS, (plane,)))
                elements = BLOCKS * count * len(stage) * 2 * SIZE * DIM
                self.pools.append(torch.zeros(elements, dtype=DTYPES[dtype]))
        self.form = ObjectForm(self.layouts)
        memories = [
            [Memory(pool.data_ptr(), pool.numel() * pool.element_size(), owner=pool)]
            for pool in self.pools
        ]
        self.staging = CpuBlockStaging([self.form], memories)

    def view(self, rank: int) -> torch.Tensor:
        """A rank's pool along `AXES`."""
        plane = self.layouts[rank].planes[0]
        steps = [stride // plane.item_size for stride in plane.strides]
        return self.pools[rank].as_strided(plane.shape, steps)

    def fill(self, whole: torch.Tensor) -> None:
        """Every rank's share of [block, head, layer, kv, token, feature] of the whole model."""
        for rank in range(len(self.layouts)):
            self.view(rank)[:] = self.share(whole, rank)

    def share(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        plane = self.layouts[rank].planes[0]
        start, count = plane.head_start, plane.shape[1]
        return whole[:, start : start + count, list(plane.layers)]

    def sums(self, blocks: Sequence[int], first: int) -> list[npt.NDArray[np.uint64]]:
        return [
            block_sums(
                self.view(rank), torch.tensor(blocks), first * SIZE, first * SIZE,
                (first + len(blocks)) * SIZE,
            ).numpy().view(np.uint64)
            for rank in range(len(self.layouts))
        ]  # fmt: skip

    def read(self, block: int) -> bytes:
        return b"".join(self.staging.fetch(0, [block]).pieces[0])

    def write(self, block: int, data: bytes) -> None:
        batch, at = self.staging.lend(0, [block]), 0
        for piece in batch.pieces[0]:
            piece[:] = data[at : at + len(piece)]
            at += len(piece)
        assert at == len(data)
        batch.write_back()


def whole_pool(seed: int, dtype: str = "float32", heads: int = HEADS) -> torch.Tensor:
    shape = (BLOCKS, heads, LAYERS, 2, SIZE, DIM)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])


sides: dict[str, Any] = {
    "tp": st.sampled_from([1, 2, 4, 8]),
    "stages": st.integers(1, LAYERS),
    "order": st.permutations(AXES[1:]).map(lambda rest: ("block", *rest)),
}


@settings(max_examples=60, deadline=None)
@given(
    saver=st.fixed_dictionaries(sides),
    loader=st.fixed_dictionaries(sides),
    dtype=st.sampled_from(sorted(DTYPES)),
    seed=st.integers(0, 99),
)
def test_any_sharding_reads_what_any_other_wrote(
    saver: dict[str, Any], loader: dict[str, Any], dtype: str, seed: int
) -> None:
    whole = whole_pool(seed, dtype)
    first, second = Side(dtype=dtype, **saver), Side(dtype=dtype, **loader)
    first.fill(whole)
    blocks = random.Random(seed).sample(range(1, BLOCKS), 3)
    expected = torch.zeros_like(whole)
    for block in blocks:
        assert first.read(block) == whole[block].contiguous().view(torch.uint8).numpy().tobytes()
        second.write(block, first.read(block))
        expected[block] = whole[block]
    for rank in range(len(second.layouts)):
        assert torch.equal(second.view(rank), second.share(expected, rank))
    number = seed % 7
    values = first.form.digests(first.sums(blocks, number))
    assert values == second.form.digests(second.sums(blocks, number))
    assert first.form.key(bytes(32)) == second.form.key(bytes(32))
    assert first.form.num_bytes == second.form.num_bytes


def test_a_block_is_one_run_where_it_can_be() -> None:
    assert len(Side(1).form.runs) == 1
    assert len(Side(2).form.runs) == 2
    assert Side(8).form.replicas
    assert not Side(4).form.replicas


def test_every_changed_bit_changes_the_digest() -> None:
    side = Side(2)
    side.fill(whole_pool(0))
    good = side.form.digests(side.sums([2], 5))
    data = side.read(2)
    for place in range(0, len(data), 37):
        spoiled = bytearray(data)
        spoiled[place] ^= 1
        side.write(2, bytes(spoiled))
        assert side.form.digests(side.sums([2], 5)) != good
    side.write(2, data)
    assert side.form.digests(side.sums([2], 6)) != good, "other tokens"
    assert side.form.digests(side.sums([3], 5)) != good, "another block"


def test_what_decides_the_bytes_decides_the_key() -> None:
    plain = Side(1).form
    others = [
        Side(1, dtype="bfloat16").form,
        Side(1, heads=2).form,
        ObjectForm([_layout(block_size=8)]),
        ObjectForm([_layout(head_dim=16)]),
        ObjectForm([_layout(layers=(0, 1))]),
        ObjectForm([_layout(kv=1)]),
        ObjectForm([_layout(group=1)]),
    ]
    assert ObjectForm([_layout()]).key(bytes(32)) == plain.key(bytes(32))
    keys = {form.key(bytes(32)) for form in (plain, *others)}
    assert len(keys) == 1 + len(others)
    assert plain.key(bytes(31) + b"1") not in keys


def _layout(group: int = 0, **changed: Any) -> KVLayout:
    plain: dict[str, Any] = {
        "num_blocks": 9,
        "block_size": SIZE,
        "num_heads": HEADS,
        "head_dim": DIM,
        "layers": tuple(range(LAYERS)),
        "dtype": "float32",
    }
    arguments = plain | changed
    plane = contiguous_plane(**arguments)
    return KVLayout(group, GroupKind.FULL, arguments["block_size"], 9, (plane,))


HEADER = ObjectHeader(b"i" * 32, b"k" * 32, 4096, 16)


@settings(max_examples=200, deadline=None)
@given(
    digest=st.integers(0, 2**64 - 1), place=st.integers(0, HEADER_BYTES - 1), bit=st.integers(0, 7)
)
def test_a_header_with_one_wrong_bit_is_a_miss(digest: int, place: int, bit: int) -> None:
    data = bytearray(HEADER.pack(digest))
    assert len(data) == HEADER_BYTES
    assert HEADER.check(data) == digest
    data[place] ^= 1 << bit
    assert HEADER.check(data) is None


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=2 * HEADER_BYTES))
def test_junk_is_a_miss(data: bytes) -> None:
    assert HEADER.check(data) is None


@pytest.mark.parametrize(
    "other",
    [
        ObjectHeader(b"j" * 32, b"k" * 32, 4096, 16),
        ObjectHeader(b"i" * 32, b"l" * 32, 4096, 16),
        ObjectHeader(b"i" * 32, b"k" * 32, 4097, 16),
        ObjectHeader(b"i" * 32, b"k" * 32, 4096, 15),
    ],
)
def test_another_objects_header_is_a_miss(other: ObjectHeader) -> None:
    assert HEADER.check(other.pack(7)) is None


def test_objects_of_an_older_format_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their digests were made in another way: they must be missed, not found wrong."""
    form = Side(1).form
    now = form.key(bytes(32))
    monkeypatch.setattr(objects, "VERSION", objects.VERSION - 1)
    old, header = form.key(bytes(32)), HEADER.pack(7)
    monkeypatch.undo()
    assert old != now
    assert HEADER.check(header) is None


@pytest.mark.parametrize("tp", [1, 2])
def test_a_digest_covers_every_plane(tp: int) -> None:
    """Of blocks of data with scales; equal whatever the sharding."""
    rng = np.random.default_rng(0)
    whole = [rng.integers(1 << 63, size=(2, LAYERS, 2, HEADS)).astype(np.uint64) for _ in range(2)]
    held = HEADS // tp
    layouts, sums = [], []
    for rank in range(tp):
        arguments: dict[str, Any] = {
            "num_blocks": 9, "block_size": SIZE, "num_heads": held, "layers": tuple(range(LAYERS)),
            "dtype": "float32", "head_start": rank * held, "head_total": HEADS,
        }  # fmt: skip
        planes = (
            contiguous_plane(**arguments, head_dim=DIM),
            contiguous_plane(**arguments, head_dim=1, name="scales", region=1),
        )
        layouts.append(KVLayout(0, GroupKind.FULL, SIZE, 9, planes))
        mine = [x[..., rank * held : (rank + 1) * held].reshape(2, -1) for x in whole]
        sums.append(np.concatenate(mine, 1))
    form = ObjectForm(layouts)
    good = form.digests(sums)
    assert good == [6510543232518760670, 5153127688262277380]
    for column in (0, -1):
        spoiled = [x.copy() for x in sums]
        spoiled[-1][1, column] ^= np.uint64(1 << 63)
        first, second = form.digests(spoiled)
        assert first == good[0]
        assert second != good[1]


def test_keys_are_checked() -> None:
    form = ObjectForm([_layout()])
    with pytest.raises(ValueError, match="32 bytes"):
        form.key(b"short")
    assert len(form.key(bytes(32))) == 32

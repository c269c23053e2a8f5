"""Digests of a hand-over: both sides agree on good bytes, and on nothing else.

The bytes go through a real plan between real memory of two sides of different sharding and block
size; sums are those of the kernels' reference.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbaton.connectors.digest import claims, fold, mismatches, unit_sums
from kvbaton.connectors.layout import GroupKind, KVLayout, Plane, contiguous_plane
from kvbaton.connectors.pairing import GroupPairing
from kvbaton.connectors.plan import plan
from kvbaton.messages.control import DigestRun
from kvbaton.types import Attempt
from tests.support.digests import block_sums_reference

LAYERS, DIM = (4, 5, 9), 4
TRANSFER = bytes(range(16))


@dataclasses.dataclass
class Node:
    """One side of a hand-over: memory and layout of each rank, and a sequence's blocks.

    `scales` is the memory of a second plane, one value per row, of ranks that have one.
    """

    pools: list[Tensor]
    scales: list[Tensor]
    layouts: list[KVLayout]
    blocks: list[int]
    block_size: int

    def sums(self, start: int, end: int) -> tuple[int, list[np.ndarray]]:
        """Number of the first block that holds tokens of the range, and sums per rank."""
        first, last = start // self.block_size, -(-end // self.block_size)
        ids = torch.tensor(self.blocks[first:last])
        base = first * self.block_size
        found = []
        for rank, layout in enumerate(self.layouts):
            planes = [
                block_sums_reference(self.memory(rank, plane), ids, base, start, end)
                for plane in layout.planes
            ]
            sums = planes[0] if len(planes) == 1 else torch.cat([x.flatten(1) for x in planes], 1)
            found.append(sums.numpy().view(np.uint64))
        return first, found

    def memory(self, rank: int, plane: Plane) -> Tensor:
        return (self.scales if plane.name == "scales" else self.pools)[rank]

    def region(self, rank: int, region: int) -> Tensor:
        """The bytes of a region."""
        return (self.scales if region else self.pools)[rank].view(torch.uint8).flatten()


def make_node(
    tp: int,
    block_size: int,
    num_tokens: int,
    heads: int,
    *,
    stages: int = 1,
    planes: tuple[str, ...] = ("data",),
) -> Node:
    used = -(-num_tokens // block_size)
    pools, scales, layouts = [], [], []
    for stage in range(stages):
        layers = LAYERS[stage * 2 : stage * 2 + 2] if stages > 1 else LAYERS
        for rank in range(tp):
            of = {
                name: contiguous_plane(
                    num_blocks=used + 3,
                    block_size=block_size,
                    num_heads=max(1, heads // tp),
                    head_dim=DIM if name == "data" else 1,
                    layers=layers,
                    dtype="float32",
                    head_start=rank * heads // tp,
                    head_total=heads,
                    name=name,
                    region=int(name == "scales"),
                )
                for name in ("data", "scales")
            }
            mine = tuple(of[name] for name in planes)
            layouts.append(KVLayout(0, GroupKind.FULL, block_size, used + 3, mine))
            pools.append(torch.full(of["data"].shape, torch.nan))
            scales.append(torch.full(of["scales"].shape, torch.nan))
    blocks = (torch.randperm(used + 2)[:used] + 1).tolist()
    return Node(pools, scales, layouts, blocks, block_size)


def fill(node: Node, tokens: Tensor) -> None:
    """Write tokens [T, heads, global layers, 2, D] into a node's memory, and scales of them."""
    for rank, layout in enumerate(node.layouts):
        for plane in layout.planes:
            heads = slice(plane.head_start, plane.head_start + plane.shape[1])
            layers = [LAYERS.index(layer) for layer in plane.layers]
            for t, token in enumerate(tokens):
                block, row = node.blocks[t // node.block_size], token[heads][:, layers]
                value = row.abs().amax(-1, keepdim=True) if plane.name == "scales" else row
                node.memory(rank, plane)[block, :, :, :, t % node.block_size] = value


def push(source: Node, target: Node, start: int, end: int) -> None:
    pairing = GroupPairing(source.layouts, target.layouts)
    planned = plan(pairing, np.array(source.blocks), np.array(target.blocks), start, end)
    for (s, t), ranges in planned.items():
        for s_region, s_at, t_region, t_at, length, count, s_step, t_step in ranges.tolist():
            read, write = source.region(s, s_region), target.region(t, t_region)
            for i in range(count):
                a, b = s_at + i * s_step, t_at + i * t_step
                write[b : b + length] = read[a : a + length]


def claim(source: Node, target: Node, start: int, end: int) -> tuple[DigestRun, ...]:
    first, sums = source.sums(start, end)
    pairing = GroupPairing(source.layouts, target.layouts)
    return tuple(claims(pairing, sums, first_block=first, attempt=Attempt(TRANSFER, 1)))


def verify(
    source: Node,
    target: Node,
    runs: tuple[DigestRun, ...],
    start: int,
    end: int,
    *,
    transfer_id: bytes = TRANSFER,
    attempt: int = 1,
) -> list[tuple[int, int]]:
    first, sums = target.sums(start, end)
    return mismatches(
        GroupPairing(source.layouts, target.layouts), sums, runs,
        first_block=first, start=start, end=end, attempt=Attempt(transfer_id, attempt),
    )  # fmt: skip


@given(
    heads=st.sampled_from([1, 2, 4]),
    tps=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    stages=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    cuts=st.lists(st.integers(0, 25), min_size=2, max_size=5, unique=True).map(sorted),
    bad=st.integers(0, 25),
)
@settings(max_examples=60, deadline=None)
def test_sides_agree_whatever_the_sharding(
    heads: int,
    tps: tuple[int, int],
    stages: tuple[int, int],
    sizes: tuple[int, int],
    cuts: list[int],
    bad: int,
) -> None:
    """Any pushes, aligned or not, verify; one changed element is found where it is."""
    torch.manual_seed(0)
    source, target = (
        make_node(tp, size, cuts[-1], heads, stages=stage)
        for tp, size, stage in zip(tps, sizes, stages, strict=True)
    )
    fill(source, torch.randn(cuts[-1], heads, len(LAYERS), 2, DIM))
    for start, end in itertools.pairwise(cuts):
        push(source, target, start, end)
        runs = claim(source, target, start, end)
        assert verify(source, target, runs, start, end) == []
        if start <= bad < end:
            target.pools[-1][target.blocks[bad // sizes[1]], -1, -1, -1, bad % sizes[1], 2] += 1
            found = verify(source, target, runs, start, end)
            assert len(found) == 1
            assert found[0][0] <= bad < found[0][1]


@pytest.fixture
def pair() -> tuple[Node, Node, tuple[DigestRun, ...]]:
    """TP 2 with blocks of 4 has handed 22 tokens to TP 1 with blocks of 6; units are 12 tokens."""
    torch.manual_seed(0)
    source, target = make_node(2, 4, 22, 4), make_node(1, 6, 22, 4)
    fill(source, torch.randn(22, 4, len(LAYERS), 2, DIM))
    push(source, target, 0, 22)
    return source, target, claim(source, target, 0, 22)


def swap_heads(pool: Tensor, block: int) -> None:
    pool[block, [0, 1]] = pool[block, [1, 0]]


def swap_layers(pool: Tensor, block: int) -> None:
    pool[block][:, [0, 1]] = pool[block][:, [1, 0]]


def swap_kv(pool: Tensor, block: int) -> None:
    pool[block] = pool[block].flip(2)


def shift_tokens(pool: Tensor, block: int) -> None:
    pool[block] = pool[block].roll(1, 3)


def lose_half(pool: Tensor, block: int) -> None:
    pool[block, 2:] = torch.nan


def flip_signs_of_two_heads(pool: Tensor, block: int) -> None:
    """Top bits of words, twice: a plain sum of sums would cancel."""
    pool[block, :2, 0, 0, 0, 1] *= -1


def nothing_arrived(pool: Tensor, block: int) -> None:
    pool[block] = 0


@pytest.mark.parametrize(
    "damage",
    [
        swap_heads,
        swap_layers,
        swap_kv,
        shift_tokens,
        lose_half,
        flip_signs_of_two_heads,
        nothing_arrived,
    ],
)
@pytest.mark.parametrize("block", [0, 2])
def test_damage_is_found_where_it_is(
    pair: tuple[Node, Node, tuple[DigestRun, ...]],
    damage: Callable[[Tensor, int], None],
    block: int,
) -> None:
    source, target, runs = pair
    assert verify(source, target, runs, 0, 22) == []
    damage(target.pools[0], target.blocks[block])
    assert verify(source, target, runs, 0, 22) == [[(0, 12), (0, 12), (12, 22)][block]]


def test_swapped_and_stale_blocks_are_found(
    pair: tuple[Node, Node, tuple[DigestRun, ...]],
) -> None:
    source, target, runs = pair
    swapped = dataclasses.replace(target, blocks=[target.blocks[i] for i in (2, 1, 0, 3)])
    assert verify(source, swapped, runs, 0, 22) == [(0, 22)]
    stale = make_node(1, 6, 22, 4)
    fill(stale, torch.randn(22, 4, len(LAYERS), 2, DIM))
    assert verify(source, stale, runs, 0, 22) == [(0, 22)]


def test_claims_belong_to_one_transfer_attempt_and_place(
    pair: tuple[Node, Node, tuple[DigestRun, ...]],
) -> None:
    source, target, runs = pair
    other = bytes(16)
    assert verify(source, target, runs, 0, 22, transfer_id=other) == [(0, 22)]
    assert verify(source, target, runs, 0, 22, attempt=2) == [(0, 22)]
    moved = tuple(msgspec.structs.replace(run, first_unit=1) for run in runs)
    assert verify(source, target, moved, 0, 22) == [(0, 22)]
    values = [run.values for run in runs]
    crossed = tuple(
        msgspec.structs.replace(run, values=data)
        for run, data in zip(runs, values[::-1], strict=True)
    )
    assert verify(source, target, crossed, 0, 22) == [(0, 22)]


def test_tokens_past_the_end_do_not_count(
    pair: tuple[Node, Node, tuple[DigestRun, ...]],
) -> None:
    source, target, runs = pair
    target.pools[0][target.blocks[3], :, :, :, 4:] = 7
    source.pools[0][source.blocks[5], :, :, :, 2:] = 8
    assert claim(source, target, 0, 22) == runs
    assert verify(source, target, runs, 0, 22) == []


def test_incomplete_or_odd_claims_are_bad(
    pair: tuple[Node, Node, tuple[DigestRun, ...]],
) -> None:
    """A peer may send anything: it never raises, and never passes."""
    source, target, runs = pair
    change = msgspec.structs.replace
    first, second = runs
    assert verify(source, target, (), 0, 22) == [(0, 22)]
    assert verify(source, target, (first,), 0, 22) == [(0, 22)]
    assert verify(source, target, (*runs, first), 0, 22) == [(0, 22)]
    assert verify(source, target, (first, change(second, target_rank=7)), 0, 22) == [(0, 22)]
    assert verify(source, target, (first, change(second, group=1)), 0, 22) == [(0, 22)]
    short = change(second, values=second.values[:13])
    assert verify(source, target, (first, short), 0, 22) == [(12, 22)]
    assert verify(source, target, (first, change(second, first_unit=1 << 62)), 0, 22) == [(0, 22)]
    other_group = change(first, group=1)
    assert verify(source, target, (*runs, other_group), 0, 22) == []
    longer = change(second, values=second.values + bytes(8))
    assert verify(source, target, (first, longer), 0, 22) == []


@pytest.mark.parametrize("tps", [(1, 1), (2, 1), (2, 4)])
def test_every_plane_is_checked(tps: tuple[int, int]) -> None:
    """Data and scales, named in another order by each side: an error in either is found."""
    torch.manual_seed(0)
    source = make_node(tps[0], 4, 22, 4, planes=("data", "scales"))
    target = make_node(tps[1], 6, 22, 4, planes=("scales", "data"))
    fill(source, torch.randn(22, 4, len(LAYERS), 2, DIM))
    push(source, target, 0, 22)
    runs = claim(source, target, 0, 22)
    assert verify(source, target, runs, 0, 22) == []
    for pool in (target.scales[-1], target.pools[-1]):
        kept = pool.clone()
        pool[target.blocks[3], -1, -1, -1, 2] *= -1
        assert verify(source, target, runs, 0, 22) == [(12, 22)]
        pool.copy_(kept)
    assert verify(source, target, runs, 0, 22) == []


def test_sums_of_some_planes_only_are_no_sums_of_a_group() -> None:
    torch.manual_seed(0)
    node = make_node(1, 4, 8, 4, planes=("data", "scales"))
    fill(node, torch.randn(8, 4, len(LAYERS), 2, DIM))
    sums = [block_sums_reference(node.pools[0], torch.tensor(node.blocks), 0, 0, 8)]
    with pytest.raises(AssertionError, match="planes"):
        claims(
            GroupPairing(node.layouts, node.layouts), [x.numpy().view(np.uint64) for x in sums],
            first_block=0, attempt=Attempt(TRANSFER, 1),
        )  # fmt: skip


def test_golden_value_of_a_fold() -> None:
    """Neighbouring releases compare these."""
    sums = np.arange(24, dtype=np.uint64).reshape(2, 2, 2, 3)
    values = fold(
        sums, attempt=Attempt(TRANSFER, 3), group=1, plane="data", first_unit=5, layers=(2, 7),
        head_start=4,
    )  # fmt: skip
    assert values.tolist() == [6577758232315472078, 1060754380578241566]


def test_a_fold_of_a_part_is_a_part_of_the_keys() -> None:
    """Layers and heads are named globally: another rank's cut gives other values."""
    sums = np.ones((1, 1, 2, 2), np.uint64)

    def value(**changed: object) -> int:
        names: dict[str, object] = {
            "attempt": Attempt(TRANSFER, 0), "group": 0, "plane": "data", "first_unit": 0,
            "layers": (0,), "head_start": 0,
        }  # fmt: skip
        return int(fold(sums, **(names | changed))[0])  # type: ignore[arg-type]

    seen = {
        value(),
        value(attempt=Attempt(bytes(16), 0)),
        value(attempt=Attempt(TRANSFER, 1)),
        value(group=1),
        value(plane="scales"),
        value(first_unit=1),
        value(layers=(1,)),
        value(head_start=2),
    }
    assert len(seen) == 8


def test_unit_sums_add_whole_and_cut_units() -> None:
    sums = np.arange(7, dtype=np.uint64).reshape(7, 1, 1, 1) + np.uint64(2**64 - 3)
    first, units = unit_sums(sums, 5, 4, 12)
    assert first == 1
    wide = [v + 2**64 - 3 for v in range(7)]
    expected = [wide[0], sum(wide[1:4]), sum(wide[4:7])]
    assert units.ravel().tolist() == [v % 2**64 for v in expected]
    assert unit_sums(sums, 5, 4, 4)[1] is sums

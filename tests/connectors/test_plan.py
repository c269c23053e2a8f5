"""Plans against a copy of every element, over real memory."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.connectors.base import RangeColumn
from kvbaton.connectors.layout import AXES, Axis, GroupKind, KVLayout, Plane, contiguous_plane
from kvbaton.connectors.pairing import GroupPairing, pair_groups
from kvbaton.connectors.plan import (
    BlockTable,
    block_tables,
    needed_bytes,
    plan,
    swap,
    total_bytes,
)
from kvbaton.errors import LayoutMismatchError
from kvbaton.types import BlockSpan

Bytes = npt.NDArray[np.uint8]
POISON = 0xA5
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclasses.dataclass(frozen=True)
class Model:
    """What both sides share."""

    heads: int
    layers: tuple[int, ...]
    kv: int
    dim: int
    scales: bool
    kind: GroupKind = GroupKind.FULL


@dataclasses.dataclass(frozen=True)
class Side:
    """One side: `stages` cut the layers, `tp` ranks of each cut the heads or are replicas."""

    tp: int
    stages: int
    block_size: int
    blocks: tuple[int, ...]
    num_blocks: int
    listed: tuple[bool, ...]
    order: tuple[Axis, ...]
    padding: int
    layer_shuffle: int = 0

    @property
    def table(self) -> BlockTable:
        return np.where(self.listed, self.blocks, -1)

    def holds(self, token: int) -> bool:
        return self.listed[token // self.block_size]

    def slot(self, token: int) -> tuple[int, int]:
        return self.blocks[token // self.block_size], token % self.block_size


def layouts(model: Model, side: Side) -> list[KVLayout]:
    """One layout per rank; planes of a rank share region 0, scales lie in region 1."""
    made = []
    per_stage = -(-len(model.layers) // side.stages)
    for stage in range(side.stages):
        layers = model.layers[stage * per_stage : (stage + 1) * per_stage]
        if side.layer_shuffle:
            layers = tuple(random.Random(side.layer_shuffle).sample(layers, len(layers)))
        for rank in range(side.tp):
            heads = max(1, model.heads // side.tp)
            common: dict[str, Any] = {
                "num_blocks": side.num_blocks,
                "block_size": side.block_size,
                "num_heads": heads,
                "layers": layers,
                "head_start": rank * model.heads // side.tp,
                "head_total": model.heads,
                "kv": model.kv,
                "order": side.order,
            }
            planes = [
                contiguous_plane(head_dim=model.dim, dtype="float32", offset=side.padding, **common)
            ]
            if model.scales:
                planes.append(
                    contiguous_plane(head_dim=1, dtype="int8", region=1, name="scales", **common)
                )
            made.append(KVLayout(0, model.kind, side.block_size, side.num_blocks, tuple(planes)))
    return made


def memory(layout: KVLayout, fill: int) -> list[Bytes]:
    """One buffer per region, with room to spare."""
    sizes = {0: 0, 1: 0}
    for plane in layout.planes:
        last = sum((n - 1) * s for n, s in zip(plane.shape, plane.strides, strict=True))
        sizes[plane.region] = plane.offset + last + plane.item_size + 64
    return [np.full(size, fill, np.uint8) for size in sizes.values()]


def elements(buffer: Bytes, plane: Plane) -> npt.NDArray[Any]:
    """The plane's elements in `buffer`, [block, head, layer, kv, token, feature]."""
    word = np.dtype(WORDS[plane.item_size])
    start = buffer[plane.offset : plane.offset + word.itemsize].view(word)
    return np.lib.stride_tricks.as_strided(start, plane.shape, plane.strides)


def values(plane: Plane, token: int) -> npt.NDArray[Any]:
    """What a token has in a plane, [head, layer, kv, feature]: another number everywhere."""
    _, heads, _, kv, _, dim = plane.shape
    number = np.add.outer(np.arange(heads) + plane.head_start, 64 * np.array(plane.layers))
    number = np.add.outer(number, 64 * 64 * np.arange(kv))
    number = np.add.outer(number, 64 * 64 * 2 * np.arange(dim)) + (64 * 64 * 2 * 64) * token
    number = number * 2654435761 % (1 << 32) >> (32 - 8 * plane.item_size)
    word: npt.NDArray[Any] = number.astype(WORDS[plane.item_size])
    return word


def fill_source(layout: KVLayout, side: Side, num_tokens: int) -> list[Bytes]:
    buffers = memory(layout, 0xEE)
    for plane in layout.planes:
        view = elements(buffers[plane.region], plane)
        for token in range(num_tokens):
            if side.holds(token):
                block, slot = side.slot(token)
                view[block, :, :, :, slot] = values(plane, token)
    return buffers


def expect(layout: KVLayout, side: Side, tokens: Sequence[int]) -> tuple[list[Bytes], list[Bytes]]:
    """The target's memory after the copy, and a mark on every byte that has to be written."""
    buffers, marks = memory(layout, POISON), memory(layout, 0)
    for plane in layout.planes:
        view = elements(buffers[plane.region], plane)
        mark = elements(marks[plane.region], plane)
        for token in tokens:
            block, slot = side.slot(token)
            view[block, :, :, :, slot] = values(plane, token)
            mark[block, :, :, :, slot] = np.iinfo(mark.dtype).max // 255
    return buffers, marks


def execute(ranges: npt.NDArray[np.int64], source: list[Bytes], target: list[Bytes]) -> None:
    for row in ranges.tolist():
        s_region, s_offset, t_region, t_offset, length, count, s_stride, t_stride = row
        for i in range(count):
            s, t = s_offset + i * s_stride, t_offset + i * t_stride
            assert s + length <= len(source[s_region])
            assert t + length <= len(target[t_region])
            target[t_region][t : t + length] = source[s_region][s : s + length]


def count_writes(ranges: npt.NDArray[np.int64], target: list[Bytes]) -> None:
    for row in ranges.tolist():
        _, _, region, offset, length, count, _, stride = row
        for i in range(count):
            target[region][offset + i * stride : offset + i * stride + length] += 1


def check_plan(
    model: Model, source: Side, target: Side, start: int, end: int
) -> dict[tuple[int, int], npt.NDArray[np.int64]]:
    """Execute a plan on memory and compare every byte."""
    mine, theirs = layouts(model, source), layouts(model, target)
    planned = plan(GroupPairing(mine, theirs), source.table, target.table, start, end)
    sent = [fill_source(layout, source, end) for layout in mine]
    tokens = [t for t in range(start, end) if source.holds(t) and target.holds(t)]
    for rank, layout in enumerate(theirs):
        wanted, marks = expect(layout, target, tokens)
        got, writes = memory(layout, POISON), memory(layout, 0)
        for (source_rank, target_rank), ranges in planned.items():
            assert ranges.dtype == np.int64
            assert len(ranges)
            if target_rank == rank:
                execute(ranges, sent[source_rank], got)
                count_writes(ranges, writes)
        for region in range(2):
            assert np.array_equal(writes[region], marks[region])
            assert np.array_equal(got[region], wanted[region])
    return planned


def check_needed(model: Model, source: Side, target: Side, start: int, end: int) -> None:
    """Against a count of the elements that the tokens have which are wanted."""
    window = 3 if model.kind in (GroupKind.WINDOW, GroupKind.CHUNK) else 0
    mine, theirs = (
        [msgspec.structs.replace(layout, window=window) for layout in layouts(model, side)]
        for side in (source, target)
    )
    num_tokens = end + 1  # the write is not the prompt's last
    first = max(0, num_tokens - window + 1) if window else 0
    if model.kind is GroupKind.CHUNK:
        first = num_tokens // 3 * 3
    seen = range(max(start, first), end)
    tokens = [token for token in seen if target.holds(token)]
    marks = [expect(layout, target, tokens)[1] for layout in theirs]
    needed = needed_bytes(GroupPairing(mine, theirs), target.table, start, end, num_tokens)
    assert needed == sum(int(buffer.sum()) for rank in marks for buffer in rank)


@st.composite
def sides(draw: st.DrawFn, model: Model, num_tokens: int, gaps: bool) -> Side:
    block_size = 1 if model.kind is GroupKind.STATE else draw(st.integers(1, 7))
    used = -(-num_tokens // block_size)
    num_blocks = used + draw(st.integers(1, 4))
    ids = list(range(num_blocks))
    if draw(st.booleans()):  # else physically consecutive
        random.Random(draw(st.integers(0, 999))).shuffle(ids)
    listed = draw(st.lists(st.booleans(), min_size=used, max_size=used)) if gaps else [True] * used
    order = draw(st.one_of(st.just(AXES), st.permutations(AXES).map(tuple)))
    tps = [tp for tp in (1, 2, 3, 4, 6) if tp % model.heads == 0 or model.heads % tp == 0]
    return Side(
        tp=draw(st.sampled_from(tps)),
        stages=draw(st.integers(1, min(2, len(model.layers)))),
        block_size=block_size,
        blocks=tuple(ids[:used]),
        num_blocks=num_blocks,
        listed=tuple(listed),
        order=order,
        padding=4 * draw(st.integers(0, 5)),
        layer_shuffle=draw(st.sampled_from([0, 0, 1, 2])),
    )


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_plan_moves_every_element_once(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(GroupKind))
    model = Model(
        heads=data.draw(st.sampled_from([1, 2, 4, 6])),
        layers=data.draw(st.sampled_from([(0,), (0, 1, 2), (1, 3, 5, 6), (7, 2, 9)])),
        kv=data.draw(st.integers(1, 2)),
        dim=data.draw(st.integers(1, 3)),
        scales=data.draw(st.booleans()),
        kind=kind,
    )
    num_tokens = data.draw(st.integers(1, 23))
    gaps = kind is not GroupKind.FULL
    source = data.draw(sides(model, num_tokens, gaps))
    target = data.draw(sides(model, num_tokens, gaps))
    start = data.draw(st.integers(0, num_tokens))
    end = data.draw(st.integers(start, num_tokens))
    check_plan(model, source, target, start, end)
    check_needed(model, source, target, start, end)


# --- shapes of plans ---

PLAIN = Model(heads=4, layers=(0, 1, 2), kv=2, dim=8, scales=False)


def side(blocks: Sequence[int], *, tp: int = 1, block_size: int = 4, **rest: Any) -> Side:
    return Side(
        tp=tp,
        stages=1,
        block_size=block_size,
        blocks=tuple(blocks),
        num_blocks=64,
        listed=(True,) * len(blocks),
        order=rest.pop("order", AXES),
        padding=0,
    )


def rows(planned: dict[tuple[int, int], npt.NDArray[np.int64]]) -> dict[tuple[int, int], int]:
    return {pair: len(ranges) for pair, ranges in planned.items()}


BLOCK_BYTES = 4 * 3 * 2 * 4 * 8 * 4
"""Of a block of `PLAIN` with 4 tokens on one rank."""


def test_a_whole_block_is_one_row() -> None:
    planned = check_plan(PLAIN, side([5, 9, 2, 30]), side([8, 1, 40, 22]), 0, 16)
    assert rows(planned) == {(0, 0): 4}
    assert (planned[0, 0][:, RangeColumn.LENGTH] == BLOCK_BYTES).all()
    assert (planned[0, 0][:, RangeColumn.COUNT] == 1).all()
    assert total_bytes(planned[0, 0]) == 4 * BLOCK_BYTES


def test_consecutive_blocks_are_one_row() -> None:
    source, target = side(range(5, 13)), side(range(20, 28))
    planned = check_plan(PLAIN, source, target, 0, 32)
    assert planned[0, 0][:, 4].tolist() == [8 * BLOCK_BYTES]


def test_blocks_must_follow_each_other_on_both_sides() -> None:
    planned = check_plan(PLAIN, side([1, 2, 3, 4]), side([1, 2, 4, 3]), 0, 16)
    assert planned[0, 0][:, 4].tolist() == [2 * BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES]


def test_resharding_is_one_run_per_block_and_rank() -> None:
    planned = check_plan(PLAIN, side([5, 9, 2, 30]), side([8, 1, 40, 22], tp=2), 0, 16)
    assert rows(planned) == {(0, 0): 4, (0, 1): 4}
    assert (planned[0, 1][:, RangeColumn.LENGTH] == BLOCK_BYTES // 2).all()
    consecutive = check_plan(PLAIN, side(range(8), tp=2), side(range(9, 17)), 0, 32)
    assert rows(consecutive) == {(0, 0): 1, (1, 0): 1}
    assert consecutive[0, 0][0, RangeColumn.COUNT] == 8


def test_other_block_sizes_are_counted_runs() -> None:
    planned = check_plan(PLAIN, side([5, 9, 2, 30]), side([8, 3], block_size=8), 0, 16)
    assert rows(planned) == {(0, 0): 4}
    assert (planned[0, 0][:, RangeColumn.COUNT] == 4 * 3 * 2).all()
    assert (planned[0, 0][:, RangeColumn.LENGTH] == 4 * 8 * 4).all()


def test_a_partial_block_moves_valid_tokens_only() -> None:
    planned = check_plan(PLAIN, side([5, 9]), side([8, 1]), 1, 6)
    assert total_bytes(planned[0, 0]) == 5 * BLOCK_BYTES // 4
    assert rows(planned) == {(0, 0): 2}


def test_tokens_that_lie_flat_are_one_row_across_blocks() -> None:
    order: tuple[Axis, ...] = ("block", "token", "layer", "kv", "head", "feature")
    source = side(range(3, 9), order=order)
    target = side(range(10, 18), block_size=3, order=order)
    assert rows(check_plan(PLAIN, source, target, 2, 23)) == {(0, 0): 1}


def test_blocks_that_continue_a_series_lengthen_it() -> None:
    order: tuple[Axis, ...] = ("block", "layer", "kv", "token", "head", "feature")
    source, target = side(range(8), order=order), side(range(9, 17), tp=2, order=order)
    planned = check_plan(PLAIN, source, target, 0, 32)
    assert rows(planned) == {(0, 0): 1, (0, 1): 1}
    assert planned[0, 0][0, RangeColumn.COUNT] == 8 * 3 * 2 * 4


def test_layers_in_another_order() -> None:
    many = dataclasses.replace(PLAIN, layers=(0, 1, 2, 3, 4, 5, 8, 10))
    target = dataclasses.replace(side([8, 1]), layer_shuffle=1)
    check_plan(many, side([5, 9]), target, 0, 8)


def test_layer_major_pools_take_a_row_per_series() -> None:
    order: tuple[Axis, ...] = ("layer", "kv", "block", "token", "head", "feature")
    planned = check_plan(PLAIN, side(range(1, 9), order=order), side(range(8), order=order), 0, 32)
    assert rows(planned) == {(0, 0): 1}
    assert planned[0, 0][0, RangeColumn.COUNT] == 6


def test_replicas_share_the_work() -> None:
    """MLA: one latent head on all ranks; each target rank is served once, by one replica."""
    latent = Model(heads=1, layers=(0, 1), kv=1, dim=8, scales=True)
    planned = check_plan(latent, side([1, 2], tp=2), side([3, 4], tp=4), 0, 8)
    assert sorted(planned) == [(0, 0), (0, 2), (1, 1), (1, 3)]
    assert sorted(check_plan(latent, side([1, 2], tp=4), side([3, 4], tp=1), 0, 8)) == [(0, 0)]


def test_replicated_heads_share_the_work() -> None:
    grouped = dataclasses.replace(PLAIN, heads=2)
    planned = check_plan(grouped, side([1, 2], tp=4), side([3, 4], tp=4), 0, 8)
    assert sorted(planned) == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_nothing_to_move() -> None:
    pairing = GroupPairing(layouts(PLAIN, side([1])), layouts(PLAIN, side([2])))
    one, none = np.array([1]), np.array([-1])
    assert plan(pairing, one, none, 0, 4) == {}
    assert plan(pairing, one, one, 3, 3) == {}


def test_a_state_moves_with_its_token() -> None:
    """The snapshot after 10 tokens is logical block 9; only the push that ends there has it."""
    state = dataclasses.replace(PLAIN, kind=GroupKind.STATE)
    pairing = GroupPairing(*(layouts(state, side([0], block_size=1)) for _ in range(2)))
    spans = [((BlockSpan(9, (block,)),),) for block in (5, 7)]
    here, there = (block_tables(one, [pairing.sources[0]], 10)[0] for one in spans)
    assert plan(pairing, here, there, 0, 8) == {}
    planned = plan(pairing, here, there, 8, 10)
    assert total_bytes(planned[0, 0]) == BLOCK_BYTES // 4


def test_offsets_are_64_bits_wide() -> None:
    """Block 70,000 of 1 MiB each lies past 2**32 bytes; ids arrive as Python integers."""
    plane = contiguous_plane(
        num_blocks=80_000, block_size=16, num_heads=8, head_dim=128, layers=tuple(range(32)),
        dtype="bfloat16",
    )  # fmt: skip
    layout = KVLayout(0, GroupKind.FULL, 16, 80_000, (plane,))
    pairing = GroupPairing([layout], [layout])
    ranges = plan(pairing, np.array([70_000]), np.array([1]), 0, 16)[0, 0]
    assert ranges[0, RangeColumn.SOURCE_OFFSET] == 70_000 * (2 << 20)


def test_swap_is_the_way_back() -> None:
    ranges = np.arange(16, dtype=np.int64).reshape(2, 8)
    assert swap(ranges)[0].tolist() == [2, 3, 0, 1, 4, 5, 7, 6]
    assert np.array_equal(swap(swap(ranges)), ranges)


# --- what can't be paired ---


def replaced(layout: KVLayout, **plane: Any) -> KVLayout:
    first = msgspec.structs.replace(layout.planes[0], **plane)
    return msgspec.structs.replace(layout, planes=(first, *layout.planes[1:]))


def mismatches() -> list[Any]:
    good = layouts(PLAIN, side([1]))[0]
    scaled = layouts(dataclasses.replace(PLAIN, scales=True), side([1]))[0]
    wide = layouts(dataclasses.replace(PLAIN, dim=9), side([1]))[0]
    more = layouts(dataclasses.replace(PLAIN, layers=(0, 1, 4)), side([1]))[0]
    state = layouts(dataclasses.replace(PLAIN, kind=GroupKind.STATE), side([1], block_size=1))[0]
    shape = (*good.planes[0].shape[:4], 9, good.planes[0].shape[5])
    change = msgspec.structs.replace
    return [
        pytest.param(replaced(good, dtype="int8"), "float32.*int8", id="dtype"),
        pytest.param(replaced(good, dtype="fp4"), "fp4", id="unknown dtype"),
        pytest.param(scaled, r"\['data'\].*\['data', 'scales'\]", id="plane"),
        pytest.param(wide, "feature.*8.*9", id="feature"),
        pytest.param(replaced(good, head_total=5), "heads.*4.*5", id="heads"),
        pytest.param(more, "layer 4", id="layer"),
        pytest.param(change(good, group=3), "group.*0.*3", id="group"),
        pytest.param(change(good, kind=GroupKind.WINDOW), "full.*window", id="kind"),
        pytest.param(change(good, window=8), "window.*0.*8", id="window"),
        pytest.param(change(state, block_size=2), "state", id="state"),
        pytest.param(replaced(good, shape=shape), "token.*9.*4", id="shape"),
        pytest.param(replaced(good, offset=-1), "-1", id="negative"),
        pytest.param(replaced(good, strides=(1 << 62,) * 6), "strides", id="huge"),
        pytest.param(replaced(good, layers=(0, 0, 1)), "layers", id="twice"),
        pytest.param(change(good, planes=()), "0 planes", id="empty"),
    ]


@pytest.mark.parametrize(("other", "message"), mismatches())
def test_what_differs_is_named(other: KVLayout, message: str) -> None:
    good = layouts(PLAIN, side([1]))
    pair_groups([good], [good])
    with pytest.raises(LayoutMismatchError, match=message):
        pair_groups([good], [[other]])


def test_groups_must_be_as_many() -> None:
    good = layouts(PLAIN, side([1]))
    with pytest.raises(LayoutMismatchError, match=r"\[1\].*\[2\]"):
        pair_groups([good], [good * 2])
    with pytest.raises(LayoutMismatchError, match="groups"):
        pair_groups([], [good])


def test_ranks_of_a_side_must_tile_the_heads() -> None:
    first, second = layouts(PLAIN, side([1], tp=2))
    pair_groups([[first], [second]], [[second]])
    with pytest.raises(LayoutMismatchError, match=r"\[2, 4\)"):
        pair_groups([[first]], [[second]])
    whole = layouts(PLAIN, side([1]))[0]
    with pytest.raises(LayoutMismatchError, match="exactly once"):
        pair_groups([[whole], [first]], [[second], [first]])


def test_block_sizes_of_one_side_must_agree() -> None:
    first, second = layouts(PLAIN, side([1], tp=2))
    other = layouts(PLAIN, side([1], tp=2, block_size=8))[1]
    with pytest.raises(LayoutMismatchError, match=r"block size.*4.*8"):
        pair_groups([[first], [second]], [[first], [other]])


def test_a_block_outside_of_its_pool_is_refused() -> None:
    good = layouts(PLAIN, side([1]))
    inside, outside = np.array([63]), np.array([64])
    pairing = GroupPairing(good, good)
    plan(pairing, inside, inside, 0, 4)
    with pytest.raises(LayoutMismatchError, match="target names block 64"):
        plan(pairing, inside, outside, 0, 4)

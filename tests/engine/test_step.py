"""A plan that goes to another process comes there as it was."""

from __future__ import annotations

from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvbaton.engine.step import (
    BlockCopy,
    Fork,
    ItemRows,
    NewSequence,
    SequenceStep,
    StepPlan,
)
from kvbaton.messages.engine import Item, SamplingParams

NUMBERS = st.integers(0, 2**40)
SOME = st.lists(NUMBERS, max_size=4).map(tuple)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    seed=st.none() | st.integers(0, 2**63 - 1),
    top_k=st.integers(1, 50),
    logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=3),
    logprobs=st.none() | st.integers(0, 5),
)
ITEMS = st.builds(
    Item, start=NUMBERS, length=st.integers(1, 9), digest=st.binary(min_size=32, max_size=32),
    grid=st.tuples(NUMBERS, NUMBERS, NUMBERS),
)  # fmt: skip
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=9).map(lambda ids: array("I", ids))
PLANS = st.builds(
    StepPlan,
    number=NUMBERS,
    ended=SOME,
    copies=st.lists(st.builds(BlockCopy, NUMBERS, NUMBERS, NUMBERS), max_size=2).map(tuple),
    forks=st.lists(st.builds(Fork, NUMBERS, NUMBERS, NUMBERS), max_size=2).map(tuple),
    new=st.lists(
        st.builds(
            NewSequence, NUMBERS, TOKENS, NUMBERS, NUMBERS, PARAMS,
            st.lists(ITEMS, max_size=2).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
    steps=st.lists(
        st.builds(
            SequenceStep, NUMBERS, NUMBERS, NUMBERS, st.lists(SOME, max_size=3).map(tuple),
            NUMBERS, st.lists(st.builds(ItemRows, NUMBERS, NUMBERS, SOME), max_size=2).map(tuple),
            SOME,
        ),
        max_size=3,
    ).map(tuple),
)  # fmt: skip


@given(PLANS, st.dictionaries(NUMBERS, st.integers(1, 3), max_size=2))
def test_a_plan_survives_the_way_to_another_process(plan: StepPlan, rows: dict[int, int]) -> None:
    rng = np.random.default_rng(len(rows))
    masks = {handle: rng.integers(0, 256, (count, 7), np.uint8) for handle, count in rows.items()}
    came = StepPlan.decode(replace(plan, masks=masks).encoded)
    assert _fields(came) == _fields(plan)
    assert came.masks.keys() == masks.keys()
    assert all(np.array_equal(came.masks[handle], mask) for handle, mask in masks.items())


def test_bytes_of_images_stay_here() -> None:
    item = Item(start=0, length=1, digest=bytes(32), grid=(1, 2, 2), data=b"\x89PNG" * 1000)
    plan = StepPlan(1, new=(NewSequence(1, array("I", (3,)), 1, 0, SamplingParams(), (item,)),))
    assert len(plan.encoded) < 1000
    (new,) = StepPlan.decode(plan.encoded).new
    assert (new.items[0].grid, new.items[0].data) == ((1, 2, 2), b"")
    assert plan.new[0].items[0].data


def _fields(plan: StepPlan) -> tuple[object, ...]:
    return tuple(getattr(plan, name) for name in plan.__struct_fields__[:-1])

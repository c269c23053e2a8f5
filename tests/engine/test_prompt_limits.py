"""What a node says of the prompts it takes is what its scheduler does with them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.connectors.layout import GroupKind
from kvbaton.engine.kv_cache_manager import GroupSpec
from kvbaton.errors import RequestError
from tests.support.toy_engine import Loop, ask, target

KINDS = {
    "full": (GroupKind.FULL, 0),
    "window": (GroupKind.WINDOW, 9),
    "chunk": (GroupKind.CHUNK, 8),
    "state": (GroupKind.STATE, 0),
}


def make(kinds: list[str], blocks: int, seats: int, both: bool) -> Loop:
    specs = [KINDS[kind] for kind in kinds]
    groups = tuple(GroupSpec(4, blocks, kind, window) for kind, window in specs)
    loop = Loop(groups, max_num_seqs=seats, max_model_len=120, max_num_batched_tokens=16)
    loop.scheduler.both_sides = both
    return loop


def takes(loop: Loop, length: int, choices: int) -> bool:
    """Whether an idle scheduler lets a prompt be loaded."""
    try:
        loop.add(ask("a", [1 + i % 20 for i in range(length)], n=choices, transfer=target(1)))
    except RequestError:
        return False
    loop.step()
    return not loop.admitted[-1].full_hit


@given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3),
    blocks=st.integers(2, 60),
    seats=st.integers(1, 9),
    both=st.booleans(),
    choices=st.integers(1, 5),
    shorter=st.integers(0, 30),
)
def test_what_a_node_says_that_it_takes_it_takes(
    kinds: list[str], blocks: int, seats: int, both: bool, choices: int, shorter: int
) -> None:
    limits = make(kinds, blocks, seats, both).scheduler.prompt_limits()
    length = limits.received - (choices - 1) * limits.choice_tokens - shorter
    if length > 0 and limits.receives(length, choices):
        assert takes(make(kinds, blocks, seats, both), length, choices)
    if limits.choices and limits.received:
        assert takes(make(kinds, blocks, seats, both), limits.received, 1)
    assert not takes(make(kinds, blocks, seats, both), limits.received + 1, 1)
    assert not limits.receives(limits.received + 1)


@given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3),
    blocks=st.integers(2, 60),
)
def test_the_longest_prompt_that_it_computes(kinds: list[str], blocks: int) -> None:
    loop = make(kinds, blocks, 4, False)
    longest = loop.scheduler.prompt_limits().computed
    with pytest.raises(RequestError, match="tokens"):
        loop.add(ask("a", [1] * (longest + 1)))
    if longest:
        loop.add(ask("b", [1 + i % 20 for i in range(longest)], max_tokens=1))
        loop.run()
        loop.check_stream("b")


def test_what_one_peer_may_hold_bounds_what_is_taken() -> None:
    loop = make(["full"], 40, 4, False)
    assert loop.scheduler.prompt_limits().received == 119, "as the model"
    assert loop.scheduler.prompt_limits(most_blocks=7).received == 28


@pytest.mark.parametrize(
    ("kinds", "lent"),
    [(["full"], 40), (["full", "full"], 20), (["full", "window"], 28), (["state"], 119)],
)
def test_the_longest_prefix_that_it_lends_takes_a_quarter_of_its_pool(
    kinds: list[str], lent: int
) -> None:
    """Ten blocks, of all groups together."""
    assert make(kinds, 40, 4, True).scheduler.prompt_limits().lent == lent

"""Prefill and decode nodes with stores of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engine_pair import Expected, Pair
from tests.support.held_store import Box
from tests.support.prompts import prompt_of
from tests.support.store_nodes import count, rest
from tests.support.waiting import until

PATIENT = {"store_lookup_timeout": 60.0, "store_load_timeout": 4.0}
MakePair = Callable[..., Pair]
PROMPT = prompt_of(61)
TOKENS = 61


def with_store(spec: str) -> dict[str, object]:
    return {"store": spec, **PATIENT}


def own(spec: str) -> str:
    """The same store, of which a node thinks that it has it for itself."""
    return spec.replace("}", ', "shared": false}')


def hand_over(pair: Pair, expected: Expected) -> None:
    _, at_d = pair.hand_over(PROMPT)
    assert at_d.result() == expected(PROMPT)
    pair.settle()
    for node in (pair.p, pair.d):
        rest(node)


def forget(pair: Pair) -> None:
    pair.p.ask("reset_prefix_cache")
    pair.d.ask("reset_prefix_cache")


def test_p_does_not_compute_what_its_store_holds_and_d_gets_it_once(
    make_pair: MakePair, expected: Expected, box: Box
) -> None:
    pair = make_pair(p=with_store(box.spec))
    hand_over(pair, expected)
    forget(pair)
    computed = count(pair.p, "prompt_tokens", source="computed")
    transferred = count(pair.d, "prompt_tokens", source="transferred")
    hand_over(pair, expected)
    assert count(pair.p, "prompt_tokens", source="store") == 60
    again = count(pair.p, "transfers_revived")
    assert 1 <= count(pair.p, "prompt_tokens", source="computed") - computed <= 1 + again
    assert count(pair.d, "prompt_tokens", source="transferred") - transferred == TOKENS
    assert count(pair.d, "transfer_digests_failed") == 0


def test_d_loads_from_its_own_store_and_reserves_the_rest(
    make_pair: MakePair, expected: Expected, box: Box
) -> None:
    pair = make_pair(d=with_store(own(box.spec)))
    hand_over(pair, expected)
    # What arrived was saved, with digests made from memory; so was what D computed.
    assert len(box.objects) == (TOKENS + 12 - 1) // 4
    forget(pair)
    transferred = count(pair.d, "prompt_tokens", source="transferred")
    hand_over(pair, expected)
    assert count(pair.d, "store_load_blocks", outcome="corrupt") == 0
    assert count(pair.d, "prompt_tokens", source="store") == 60
    assert count(pair.d, "prompt_tokens", source="transferred") - transferred == 1


def test_both_share_a_store(make_pair: MakePair, expected: Expected, box: Box) -> None:
    pair = make_pair(p=with_store(box.spec), d=with_store(box.spec))
    for _ in range(3):
        hand_over(pair, expected)
        forget(pair)
    # A run for a late reservation computes the last token once more.
    again = count(pair.p, "transfers_revived")
    assert TOKENS + 2 <= count(pair.p, "prompt_tokens", source="computed") <= TOKENS + 2 + again
    assert count(pair.d, "prompt_tokens", source="computed") == 0
    expect_saved_once(pair)
    assert box.calls["store"] == len(box.objects)


def expect_saved_once(pair: Pair) -> None:
    """P saved the blocks that it computed, D those that it did, and D loaded nothing."""
    saved_by_p, saved_by_d = TOKENS // 4, (TOKENS + 12 - 1) // 4 - TOKENS // 4
    assert count(pair.p, "store_save_blocks", outcome="stored") == saved_by_p
    assert count(pair.d, "store_save_blocks", outcome="stored") == saved_by_d
    bytes_per_block = count(pair.p, "store_bytes", direction="save") / saved_by_p
    assert count(pair.d, "store_bytes", direction="save") == saved_by_d * bytes_per_block
    assert count(pair.d, "store_lookups") == 0
    assert count(pair.d, "store_bytes", direction="load") == 0


def test_both_share_files(make_pair: MakePair, expected: Expected, tmp_path: Path) -> None:
    store = f'filesystem:{{"path": "{tmp_path}"}}'
    pair = make_pair(p=with_store(store), d=with_store(store))
    for _ in range(2):
        hand_over(pair, expected)
        forget(pair)
    expect_saved_once(pair)
    assert len(list(tmp_path.rglob("*.safetensors"))) == (TOKENS + 12 - 1) // 4


def test_d_saves_what_its_source_does_not(
    make_pair: MakePair, expected: Expected, box: Box
) -> None:
    pair = make_pair(d=with_store(box.spec))
    hand_over(pair, expected)
    assert box.calls["store"] == len(box.objects) == (TOKENS + 12 - 1) // 4


def test_d_asks_the_shared_store_when_its_source_dies(
    make_pair: MakePair, expected: Expected, box: Box
) -> None:
    pair = make_pair(p=with_store(box.spec), d=with_store(box.spec))
    hand_over(pair, expected)
    pair.d.ask("reset_prefix_cache")
    pair.kill("p")
    at_d = pair.hand_over_to_d(PROMPT)
    assert at_d.result() == expected(PROMPT)
    assert count(pair.d, "prompt_tokens", source="store") == 60
    assert count(pair.d, "prompt_tokens", source="computed") == 1


@pytest.mark.parametrize("side", ["p", "d"])
@pytest.mark.parametrize("kind", ["lookup", "load", "lost", "corrupt", "late"])
def test_a_failing_store_beside_a_hand_over(
    make_pair: MakePair, expected: Expected, box: Box, side: str, kind: str
) -> None:
    pair = make_pair(**{side: with_store(own(box.spec)) | {"store_load_timeout": 0.3}})
    hand_over(pair, expected)
    forget(pair)
    keys = list(box.objects)
    if kind in ("lookup", "load"):
        box.failing.add(kind)
    elif kind == "lost":
        box.lost |= set(keys[len(keys) // 2 :])
    elif kind == "corrupt":
        box.corrupt(keys[len(keys) // 2 :])
    else:
        with box.held("load"):
            _, at_d = pair.hand_over(PROMPT)
            assert at_d.result() == expected(PROMPT)
    hand_over(pair, expected)
    assert count(getattr(pair, side), "store_load_blocks", outcome="corrupt") == (
        pytest.approx(len([k for k in keys[len(keys) // 2 :]]), abs=4) if kind == "corrupt" else 0
    )


@pytest.mark.parametrize("side", ["p", "d"])
@pytest.mark.parametrize("kind", ["lookup", "load", "store"])
def test_aborts_beside_a_hand_over(
    make_pair: MakePair, expected: Expected, box: Box, side: str, kind: str
) -> None:
    pair = make_pair(**{side: with_store(own(box.spec))})
    if kind != "store":
        hand_over(pair, expected)
        forget(pair)
    with box.held(kind):
        calls = pair.hand_over(PROMPT, max_tokens=100)
        until(lambda: box.is_waiting(kind), "a call that is held")
        for call in calls:
            call.abort()
        until(lambda: all(call.over() for call in calls), "the ends")
    hand_over(pair, expected)


def test_outputs_are_those_of_the_baseline_whatever_fails_to_load(
    make_pair: MakePair, expected: Expected, box: Box
) -> None:
    """As the reference system's test: baseline, then failures at once, then failures later."""
    prompts = [prompt_of(30 + seed, seed) for seed in range(6)]
    writer = make_pair(p=with_store(box.spec))
    for prompt in prompts:
        writer.hand_over(prompt)[1].result()
    rest(writer.p)
    baseline = [expected(prompt) for prompt in prompts]
    at_once, later = make_pair(d=with_store(own(box.spec))), make_pair(d=with_store(own(box.spec)))
    keys = sorted(box.objects)
    box.failing.add("load")
    assert outputs(at_once, prompts) == baseline
    assert count(at_once.d, "load_failures") > 0
    box.failing.clear()
    box.lost |= set(keys[::3])
    box.corrupt(keys[1::3])
    assert outputs(later, prompts) == baseline
    assert count(later.d, "load_failures") > 0
    for pair in (at_once, later):
        pair.settle()


def outputs(pair: Pair, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    calls = [pair.hand_over(prompt)[1] for prompt in prompts]
    return [call.result() for call in calls]

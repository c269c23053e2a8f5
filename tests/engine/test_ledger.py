from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbaton.engine.audit import audit
from tests.support.toy_engine import Loop, ask, target


def busy() -> Loop:
    """Someone runs, someone loads, and something is cached."""
    loop = Loop()
    loop.add(ask("done", list(range(9)), max_tokens=1))
    loop.run()
    loop.add(ask("runs", list(range(5, 12)), max_tokens=20, ignore_eos=True))
    loop.add(ask("loads", list(range(7, 16)), transfer=target(1)))
    loop.step()
    return loop


def imbalance(loop: Loop) -> dict[str, int]:
    reserved = list(loop.reserved.values())
    found = audit(loop.scheduler, incoming=reserved)
    return {kind: count for kind, count in found.items() if count}


def leak_reference(loop: Loop) -> None:
    loop.scheduler.blocks.pool.allocate(1)


def lose_reference(loop: Loop) -> None:
    loop.scheduler.running[0].tables[0].pop()


def forget_mark(loop: Loop) -> None:
    loop.scheduler.blocks.release_incoming(next(iter(loop.reserved.values())))


def leak_hold(loop: Loop) -> None:
    blocks, (runs,) = loop.scheduler.blocks, loop.scheduler.requests["runs"].sequences
    blocks.hold_outgoing(blocks.spans(runs.tables, 0, 4))


def free_twice(loop: Loop) -> None:
    pool = loop.scheduler.blocks.pool
    pool._free.append(pool._free[0])


def free_in_use(loop: Loop) -> None:
    block = loop.scheduler.running[0].tables[0][0]
    loop.scheduler.blocks.pool._free.append(block)


def lose_block(loop: Loop) -> None:
    loop.scheduler.blocks.pool._free.pop()


def cross_keys(loop: Loop) -> None:
    pool = loop.scheduler.blocks.pool
    (by_key,) = pool.by_key
    one, two = list(by_key)[:2]
    by_key[one], by_key[two] = by_key[two], by_key[one]


def test_a_busy_engine_balances_and_its_blocks_have_owners():
    loop = busy()
    assert imbalance(loop) == {}
    (owners,) = loop.scheduler.blocks.owners()
    assert +owners == {"request": 5, "cached": 2}
    gauges = loop.scheduler.gauges()
    assert gauges['kvbaton_blocks{owner="free"}'] == 9.0
    assert gauges['kvbaton_blocks{group="0",owner="cached"}'] == 2.0


@pytest.mark.parametrize(
    ("plant", "kinds"),
    [
        (leak_reference, {"references", "lists"}),
        (lose_reference, {"references", "lists"}),
        (forget_mark, {"incoming"}),
        (leak_hold, {"outgoing"}),
        (free_twice, {"lists"}),
        (free_in_use, {"lists"}),
        (lose_block, {"lists"}),
        (cross_keys, {"keys"}),
    ],
)
def test_a_planted_fault_moves_the_ledger(plant: Callable[[Loop], None], kinds: set[str]):
    loop = busy()
    plant(loop)
    assert set(imbalance(loop)) == kinds


def test_a_mark_of_the_cache_that_no_key_has_moves_the_ledger():
    loop = busy()
    loop.scheduler.blocks.pool.keyed[loop.scheduler.blocks.pool._free[0]] = 1
    assert set(imbalance(loop)) == {"keys"}


def test_marks_without_a_live_transfer_are_found():
    loop = busy()
    assert audit(loop.scheduler)["incoming"] == 3


def test_counters_and_state_tell_what_happened():
    loop = busy()
    counters = loop.scheduler.counters()
    assert counters["kvbaton_requests_received_total"] == 3
    assert counters['kvbaton_requests_finished_total{reason="length"}'] == 1
    assert counters['kvbaton_prompt_tokens_total{source="computed"}'] == 16
    state = loop.scheduler.state()
    assert [(r["request_id"], r["state"]) for r in state["requests"]] == [
        ("runs", "running"),
        ("loads", "loading"),
    ]
    assert loop.scheduler.gauges()["kvbaton_sequences_loading"] == 1

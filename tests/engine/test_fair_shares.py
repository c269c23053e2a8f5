"""Tenants get equal shares of an engine that is asked for more than it can do."""

from __future__ import annotations

import itertools
from collections import Counter

from msgspec.structs import replace

from kvbaton.engine.service_order import MAX_TENANTS, FairShares
from tests.support.toy_engine import Loop, ask, prompt


def ended(loop: Loop) -> list[str]:
    return [output.request_id for output in loop.outputs if output.finish_reason is not None]


def test_who_asks_for_much_does_not_delay_who_asks_for_little() -> None:
    loop = Loop(max_num_seqs=1)
    for i in range(20):
        request = ask(f"much-{i}", prompt(12, i), max_tokens=4, ignore_eos=True)
        loop.add(replace(request, tenant="much"))
    for i in range(3):
        request = ask(f"little-{i}", prompt(12, 50 + i), max_tokens=4, ignore_eos=True)
        loop.add(replace(request, tenant="little"))
    loop.run()
    order = ended(loop)
    assert max(order.index(f"little-{i}") for i in range(3)) <= 6
    for name in ("much", "little"):  # each one's own requests: first come, first served
        mine = [request_id for request_id in order if request_id.startswith(name)]
        assert mine == sorted(mine, key=lambda request_id: int(request_id.rpartition("-")[2]))


def test_priority_goes_before_shares() -> None:
    loop = Loop(max_num_seqs=1)
    for i in range(4):
        loop.add(replace(ask(f"a{i}", prompt(12, i), max_tokens=2, ignore_eos=True), tenant="a"))
    loop.add(replace(ask("b", prompt(12, 9), max_tokens=2), tenant="b", priority=1))
    loop.run()
    assert ended(loop)[-1] == "b"


def test_what_is_generated_counts() -> None:
    """Each has three requests in the queue, always; one generates ten times as much."""
    loop, number = Loop(max_num_seqs=1), itertools.count()

    def come(name: str) -> None:
        i, most = next(number), 20 if name == "long" else 2
        request = ask(f"{name}-{i}", prompt(12, i), max_tokens=most, ignore_eos=True)
        loop.add(replace(request, tenant=name))

    for name in 3 * ("long", "short"):
        come(name)
    seen = 0
    while seen < 24:
        loop.step()
        for request_id in ended(loop)[seen:]:
            seen += 1
            come(request_id.partition("-")[0])
    turns = Counter(request_id.partition("-")[0] for request_id in ended(loop)[:24])
    assert turns["short"] > 2 * turns["long"] > 0


def test_tags_of_the_many_are_bounded_and_go_on() -> None:
    shares, last = FairShares(), 0
    for i in range(3 * MAX_TENANTS):
        shares.enter(f"tenant-{i}", 10)
        shares.charge("busy", 1)
        assert len(shares._finish) <= MAX_TENANTS + 1
        last, before = shares.enter("busy", 1), last
        assert last >= before, "a tenant's own requests keep their order"

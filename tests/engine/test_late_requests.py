"""Of requests with an objective as many as possible are in time; the others go last."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kvbaton.engine.kv_cache_manager import GroupSpec
from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest
from tests.support.toy_engine import Loop, ask, prompt

WORK_S = 1.0
"""Of a prompt, and so of a step: one prompt at a time runs, and generates one token."""


def timed(
    name: str, number: int, ttft_s: float, work_s: float = WORK_S, tokens: int = 12
) -> AddRequest:
    request = ask(name, prompt(tokens, number), max_tokens=1, ignore_eos=True)
    return replace(request, ttft_s=ttft_s, prefill_s=work_s)


def one_at_a_time() -> Loop:
    return Loop(max_num_seqs=1, depth=1)


def step(loop: Loop) -> list[str]:
    """Names of requests that end in the next step."""
    before = len(loop.outputs)
    loop.step()
    return [output.request_id for output in loop.outputs[before:]]


def serve(loop: Loop) -> dict[str, float]:
    """When each request was over, steps taking as long as their requests told."""
    ends: dict[str, float] = {}
    while loop.scheduler.has_work():
        names = step(loop)
        loop.clock.now += sum(loop.requests[name].prefill_s for name in names)
        ends.update(dict.fromkeys(names, loop.clock.now))
    return ends


def test_a_queue_longer_than_the_objective_makes_few_late() -> None:
    loop = one_at_a_time()
    begin = loop.clock.now
    for i in range(8):
        loop.add(timed(f"r{i}", i, 4.5))
    loop.clock.now += 2.0  # something else held the node up: two of the first are late now
    ends = serve(loop)
    late = [name for name, end in ends.items() if end > begin + 4.5]
    assert len(late) == 6
    assert list(ends)[-len(late) :] == late, "they go last"
    assert late == sorted(late), "and come first, are served first"


def test_the_longest_steps_back_for_the_others() -> None:
    loop = one_at_a_time()
    begin = loop.clock.now
    loop.add(timed("first", 0, 5.0))
    loop.add(timed("long", 1, 5.0, 4.0))
    for i in range(3):
        loop.add(timed(f"short-{i}", 2 + i, 5.0))
    ends = serve(loop)
    assert list(ends) == ["first", "short-0", "short-1", "short-2", "long"]
    assert sum(end > begin + 5.0 for end in ends.values()) == 1


def test_a_token_that_comes_when_others_of_its_step_are_computed_is_not_expected_before() -> None:
    loop = Loop(max_num_batched_tokens=36, depth=1)
    begin = loop.clock.now
    for i in range(3):
        loop.add(timed(f"first-{i}", i, 8.5))
    loop.add(timed("long", 3, 8.5, 3.0, tokens=36))
    for i in range(2):  # alone they would end after 8 s, the long one before them
        loop.add(timed(f"short-{i}", 4 + i, 8.5))
    loop.step()
    loop.clock.now += 3 * WORK_S
    loop.add(timed("later", 6, 8.5))  # makes that 9
    ends = serve(loop)
    assert list(ends) == ["short-0", "short-1", "later", "long"]
    assert [name for name, end in ends.items() if end > begin + 8.5] == ["long"]


def test_ranks_do_not_change_while_no_time_passes() -> None:
    loop = one_at_a_time()
    for i in range(4):
        loop.add(timed(f"r{i}", i, 4.5))
    loop.step()
    loop.clock.now += WORK_S
    scheduler, found = loop.scheduler, []
    for _ in range(30):  # plans
        scheduler.late.rank(scheduler.waiting, scheduler.running, loop.clock.now)
        found.append([(one.request.request_id, one.rank) for one in scheduler.waiting])
    assert [rank[1] for _, rank in found[0]] == [0, 0, 1], "one waits for the longest step, too"
    assert all(ranks == found[0] for ranks in found)


def begun(ttft_s: float, *, priority: int = 0, **settings: Any) -> Loop:
    """A loop of steps of 12 tokens, the first of which computed a quarter of a long prompt.

    One of `timed` takes a step, too.
    """
    loop = Loop(max_num_batched_tokens=12, depth=1, **settings)
    loop.add(replace(timed("long", 0, ttft_s, 4.0, tokens=48), priority=priority))
    assert not step_on(loop)
    return loop


def step_on(loop: Loop) -> list[str]:
    """Names of requests that end in the next step, which takes `WORK_S`."""
    names = step(loop)
    loop.clock.now += WORK_S
    return names


def finish(loop: Loop) -> list[str]:
    """Names of requests in the order of their ends."""
    ended = list[str]()
    while loop.scheduler.has_work():
        ended += step_on(loop)
    return ended


def test_what_is_left_of_a_prompt_that_is_late_waits_for_those_that_can_be_in_time() -> None:
    """A prompt of 100,000 tokens made all that came behind it late, for 10 s."""
    loop = begun(2.5)
    for i in range(2):
        loop.add(timed(f"short-{i}", 1 + i, 3.5))
    begin = loop.clock.now
    assert finish(loop) == ["short-0", "short-1", "long"]
    assert loop.clock.now == begin + 5 * WORK_S, "three steps were left, and none is repeated"


def test_a_prompt_that_can_be_in_time_is_finished_first() -> None:
    loop = begun(5.5)
    loop.add(timed("short", 1, 5.5))
    assert finish(loop) == ["long", "short"]


def test_a_prompt_without_room_keeps_none_that_is_late_from_being_computed() -> None:
    loop = begun(2.5, max_num_seqs=1)
    begin = loop.clock.now
    loop.add(timed("short", 1, 9.0))
    assert finish(loop) == ["long", "short"]
    assert loop.clock.now == begin + 4 * WORK_S


def test_choices_of_a_prompt_that_is_late_come_after_the_one_that_they_are_forked_from() -> None:
    """That one was the last while its step ran, so it gave its blocks up before its forks began."""
    loop = Loop((GroupSpec(block_size=4, num_blocks=9),), max_num_batched_tokens=16, depth=2)
    late = ask("late", prompt(30), n=3, max_tokens=4, ignore_eos=True)
    loop.add(replace(late, ttft_s=0.5, prefill_s=1.0))
    loop.launch()
    loop.clock.now += WORK_S
    loop.add(timed("short", 1, 9.0))  # there is no room for it yet
    loop.run()
    loop.check_streams()
    loop.check_empty()


def test_a_better_priority_passes_a_prompt_that_is_being_computed() -> None:
    loop = begun(0.0, priority=1)
    loop.add(timed("urgent", 1, 0.0))
    assert finish(loop) == ["urgent", "long"]


def test_what_is_left_of_a_prompt_that_is_late_has_its_turn() -> None:
    loop = begun(2.5, enable_prefix_caching=False)  # else it gets what is left of other steps
    ended, number = list[str](), 1
    while "long" not in ended:
        assert number < 200, "it never had its turn"
        while len(loop.scheduler.waiting) < 2:  # there is always one that can be in time
            loop.add(timed(f"r{number}", number, 10.0))
            number += 1
        ended += step_on(loop)
    assert ended.index("long") > 10, "but others go first for long"


def test_nobody_steps_back_for_another_tenant_or_a_worse_priority() -> None:
    loop = one_at_a_time()
    loop.add(replace(timed("long", 0, 5.0, 4.0), tenant="one"))
    for i in range(3):
        loop.add(replace(timed(f"other-{i}", 1 + i, 5.0), tenant="two"))
    loop.add(replace(timed("unimportant", 8, 5.0), tenant="one", priority=1))
    ends = serve(loop)
    assert list(ends).index("long") < list(ends).index("other-1")
    assert list(ends)[-1] == "unimportant"


def test_who_is_late_is_not_starved() -> None:
    loop = one_at_a_time()
    loop.add(timed("running", 0, 1.5))
    loop.add(timed("late", 1, 0.5))
    served, number = list[str](), 2
    while "late" not in served:
        assert number < 60, "it never had its turn"
        while len(loop.scheduler.waiting) < 3:  # there is always one that can be in time
            loop.add(timed(f"r{number}", number, 10.0))
            number += 1
        served += (names := step(loop))
        loop.clock.now += WORK_S * len(names)
    assert served.index("late") > 10, "but others go first for long"
    serve(loop)


@pytest.mark.parametrize("count", [2, 3])
def test_who_is_late_is_not_passed_for_ever_by_requests_without_an_objective(count: int) -> None:
    """One of one left, or both of two: nobody whose token would be in time gains from it."""
    loop = one_at_a_time()
    for i in range(count):
        loop.add(timed(f"r{i}", i, 1.5))
    served = list[str]()
    for number in range(20):  # as many as are served: the queue is never empty
        loop.add(timed(f"untimed-{number}", 100 + number, 0.0))
        served += (names := step(loop))
        loop.clock.now += WORK_S * len(names)
    assert {f"r{i}" for i in range(count)} <= set(served[: count + 3]), served
    serve(loop)


def test_without_objectives_first_come_is_first_served() -> None:
    loop = one_at_a_time()
    for i, work_s in enumerate((3.0, 1.0, 2.0)):
        loop.add(timed(f"r{i}", i, 0.0, work_s))
    assert list(serve(loop)) == ["r0", "r1", "r2"]


@pytest.mark.parametrize("field", ["ttft_s", "prefill_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_what_is_no_time_is_refused(field: str, value: float) -> None:
    loop = one_at_a_time()
    with pytest.raises(RequestError, match=field):
        loop.scheduler.add(replace(timed("r", 0, 1.0), **{field: value}))

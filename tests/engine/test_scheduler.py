from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from kvbaton.engine.kv_cache_manager import GroupSpec
from kvbaton.errors import RequestError
from tests.support.toy_engine import CHUNK, EOS, FULL, STATE, WINDOW, Loop, ask, direct, prompt

# --- windows ---


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_prompt_holds_its_window_only(depth: int):
    groups = replace(FULL, num_blocks=24), replace(WINDOW, num_blocks=24)
    loop = Loop(groups, depth=depth, max_num_batched_tokens=4)
    loop.add(ask("a", prompt(50), max_tokens=9, ignore_eos=True))
    loop.run()  # the loop checks after each step what is held and what is read
    loop.check_stream("a")
    assert loop.streams["a", 0].finish == "length"
    loop.add(ask("b", prompt(50), max_tokens=1))
    loop.run()
    loop.check_stream("b")
    assert loop.outputs[-1].cached_tokens > 40, "blocks behind the window were cached first"


# --- one request ---


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 17])
@pytest.mark.parametrize("budget", [1, 3, 64])
def test_a_request_gives_its_tokens(depth: int, length: int, budget: int):
    loop = Loop(depth=depth, max_num_batched_tokens=budget)
    loop.add(ask("a", prompt(length), max_tokens=9, ignore_eos=True))
    loop.run()
    loop.check_stream("a")
    assert len(loop.streams["a", 0].tokens) == 9
    loop.check_empty()


@pytest.mark.parametrize("depth", [1, 2])
def test_chunked_prefill_never_takes_more_than_the_budget(depth: int):
    loop = Loop(depth=depth, max_num_batched_tokens=5)
    loop.add(ask("a", prompt(17), max_tokens=2, ignore_eos=True))
    loop.run()
    assert [plan.steps[0].count for plan in loop.plans] == [5, 5, 5, 2, 1]
    assert [plan.steps[0].num_samples for plan in loop.plans] == [0, 0, 0, 1, 1]


def test_depth_two_schedules_the_next_token_before_the_last_is_known():
    loop = Loop(depth=2)
    loop.add(ask("a", prompt(5), max_tokens=3, ignore_eos=True))
    assert loop.launch()
    assert loop.launch()
    assert loop.plans[1].steps[0].start == 5
    assert not loop.outputs


def test_depth_two_does_not_run_past_max_tokens():
    loop = Loop(depth=2)
    loop.add(ask("a", prompt(5), max_tokens=3, ignore_eos=True))
    loop.run()
    assert sum(plan.num_tokens for plan in loop.plans) == 5 + 2


def test_a_stop_drops_what_the_next_step_computes_and_keeps_its_blocks_until_then():
    loop = Loop(depth=2)
    tokens, _ = Loop().expected_of(ask("a", prompt(6), max_tokens=20, ignore_eos=True))
    loop.add(ask("a", prompt(6), max_tokens=20, ignore_eos=True, stop_token_ids=(tokens[0],)))
    assert loop.launch()
    assert loop.launch()
    loop.update()
    assert loop.streams["a", 0].finish == "stop"
    assert loop.scheduler.blocks.owners()[0]["fenced"] == 2
    loop.update()
    assert loop.streams["a", 0].tokens == tokens[:1]
    loop.check_empty()


# --- ends ---


def test_end_of_text_has_no_stop_reason_and_a_stop_token_is_one():
    tokens, _ = Loop().expected_of(ask("a", prompt(3), max_tokens=50, ignore_eos=True))
    loop = Loop()
    loop.add(ask("a", prompt(3), max_tokens=50, stop_token_ids=(tokens[2],), ignore_eos=True))
    loop.run()
    at = tokens.index(tokens[2])
    assert loop.streams["a", 0].tokens == tokens[: at + 1]
    assert loop.outputs[-1].stop_reason == tokens[2]
    eos = find_eos()
    loop = Loop()
    loop.add(ask("b", eos, max_tokens=50))
    loop.run()
    assert loop.streams["b", 0].tokens[-1] == EOS
    assert (loop.outputs[-1].finish_reason, loop.outputs[-1].stop_reason) == ("stop", None)


def find_eos() -> list[int]:
    """A prompt after which end of text comes within a few tokens, but not at once."""
    for start in range(1, 200):
        tokens, reason = Loop().expected_of(ask("a", prompt(3, start), max_tokens=20))
        if reason == "stop" and 2 < len(tokens) < 15:
            return prompt(3, start)
    raise AssertionError("the toy model never ends a text")


def test_min_tokens_holds_stops_back():
    eos = find_eos()
    stops = len(Loop().expected_of(ask("a", eos, max_tokens=20))[0])
    loop = Loop()
    loop.add(ask("a", eos, max_tokens=20, min_tokens=stops + 1))
    loop.run()
    assert len(loop.streams["a", 0].tokens) > stops
    loop.check_stream("a")


def test_max_model_len_ends_with_length():
    loop = Loop(max_model_len=10)
    loop.add(ask("a", prompt(7), max_tokens=50, ignore_eos=True))
    loop.run()
    assert len(loop.streams["a", 0].tokens) == 3
    assert loop.streams["a", 0].finish == "length"


def test_resumed_tokens_count_as_generated():
    whole, _ = Loop().expected_of(ask("a", prompt(6), max_tokens=9, ignore_eos=True))
    loop = Loop()
    loop.add(
        ask("a", prompt(6), resume_ids=tuple(whole[:4]), max_tokens=9, ignore_eos=True),
    )
    loop.run()
    assert loop.outputs[0].index == 4
    assert loop.streams["a", 0].tokens == whole[4:]


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_ends_every_choice(depth: int):
    loop = Loop(depth=depth)
    loop.add(ask("a", prompt(6), n=3, max_tokens=30, ignore_eos=True))
    for _ in range(4):
        loop.step()
    ended = loop.emit(loop.scheduler.abort("a"))
    assert [(o.choice, o.finish_reason) for o in ended] == [(i, "abort") for i in range(3)]
    assert loop.scheduler.abort("a") == []
    loop.run()
    loop.check_empty()


def test_abort_before_anything_ran():
    loop = Loop()
    loop.add(ask("a", prompt(6), n=2))
    ended = loop.emit(loop.scheduler.abort("a", "the peer refused"))
    assert [(o.finish_reason, o.error) for o in ended] == [("error", "the peer refused")] * 2
    assert not loop.scheduler.has_work()


def test_what_is_over_is_forgotten_before_its_deadline():
    """A far one was kept while nearer ones were live: on a busy node, always."""
    loop = Loop()
    loop.add(ask("lasting", prompt(6), deadline_s=5.0, max_tokens=40, ignore_eos=True))
    request = ask("short", prompt(6), deadline_s=1e6)
    forgotten = weakref.ref(request.token_ids)
    loop.scheduler.add(request)
    del request
    loop.scheduler.abort("short")
    gc.collect()  # a request and its sequences know each other
    assert loop.scheduler.next_deadline() == 105.0
    assert forgotten() is None


def test_a_request_ends_by_its_deadline_whether_it_runs_or_waits():
    loop = Loop(max_num_seqs=1)
    loop.add(ask("a", prompt(6), deadline_s=5.0, max_tokens=40, ignore_eos=True))
    loop.add(ask("b", prompt(6), deadline_s=9.0))
    loop.step()
    assert loop.scheduler.next_deadline() == 105.0
    assert loop.scheduler.expire(104.0) == []
    loop.clock.now = 105.0
    (ended,) = loop.emit(loop.scheduler.expire(105.0))
    assert (ended.request_id, ended.finish_reason) == ("a", "error")
    assert "deadline" in (ended.error or "")
    assert loop.scheduler.next_deadline() == 109.0
    assert [o.request_id for o in loop.emit(loop.scheduler.expire(109.0))] == ["b"]
    loop.check_empty()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tokens": prompt(60)}, "prompt"),
        ({"tokens": []}, "prompt"),
        ({"tokens": prompt(3), "n": 9}, "n"),
        ({"tokens": prompt(3), "max_tokens": 0}, "max_tokens"),
        (
            {
                "tokens": prompt(3),
                "min_tokens": 1,
                "stop_token_ids": (7, 8),
                "allowed_token_ids": (8,),
            },
            "allowed_token_ids",
        ),
        ({"tokens": prompt(3), "resume_ids": (1, 2), "max_tokens": 2}, "resume_token_ids"),
    ],
)
def test_what_can_never_be_served_is_refused(fields: dict[str, object], param: str):
    loop = Loop()
    with pytest.raises(RequestError) as refused:
        loop.add(ask("a", **fields))  # type: ignore[arg-type]
    assert refused.value.param == param
    assert not loop.scheduler.has_work()


def test_a_prompt_larger_than_the_pool_is_refused_with_both_numbers():
    loop = Loop((GroupSpec(block_size=4, num_blocks=4),))
    with pytest.raises(RequestError, match=r"13 tokens need 4 KV blocks.*the pool has 3"):
        loop.add(ask("a", prompt(13)))
    loop.add(ask("a", prompt(12), max_tokens=1))
    with pytest.raises(RequestError, match="in use"):
        loop.add(ask("a", prompt(3)))
    loop.run()
    loop.check_stream("a")


# --- the prefix cache ---


def test_a_full_hit_computes_one_token_in_a_private_copy():
    loop = Loop()
    loop.add(ask("a", prompt(8), max_tokens=4, ignore_eos=True))
    loop.run()
    loop.add(ask("b", prompt(8), max_tokens=4, ignore_eos=True))
    first = len(loop.plans)
    loop.run()
    plan = loop.plans[first]
    assert [(s.start, s.count) for s in plan.steps] == [(7, 1)]
    (copy,) = plan.copies
    assert plan.steps[0].new_blocks[0][1] == copy.target != copy.source
    assert loop.outputs[-1].cached_tokens == 7
    counters = loop.scheduler.counters()
    sources = {n: c for n, c in counters.items() if n.startswith("kvbaton_prompt_tokens_total")}
    assert sum(sources.values()) == 16, "every prompt token has one source"
    loop.check_stream("b")


def test_a_full_hit_without_room_for_the_copy_still_runs():
    loop = Loop((GroupSpec(block_size=4, num_blocks=3),))
    for name in "ab":
        loop.add(ask(name, prompt(8), max_tokens=1))
        loop.run()
        loop.check_stream(name)


def test_generated_tokens_are_cached_too_and_other_salts_share_nothing():
    loop = Loop()
    loop.add(ask("a", prompt(5), max_tokens=8, ignore_eos=True))
    loop.run()
    known = [*prompt(5), *loop.streams["a", 0].tokens]
    loop.add(ask("b", known))
    loop.run()
    loop.add(ask("c", known, cache_salt="other"))
    loop.run()
    cached = {o.request_id: o.cached_tokens for o in loop.outputs}
    assert (cached["b"], cached["c"]) == (12, 0)


def test_without_caching_nothing_is_reused():
    loop = Loop(enable_prefix_caching=False)
    for name in "ab":
        loop.add(ask(name, prompt(9)))
        loop.run()
        loop.check_stream(name)
    assert loop.scheduler.counters()['kvbaton_prompt_tokens_total{source="computed"}'] == 18
    assert loop.scheduler.blocks.owners()[0]["cached"] == 0


def test_reset_prefix_cache_forgets():
    loop = Loop()
    loop.add(ask("a", prompt(9), max_tokens=1))
    loop.run()
    assert loop.scheduler.blocks.pool.reset_cache() == 2
    loop.add(ask("b", prompt(9), max_tokens=1))
    loop.run()
    assert loop.outputs[-1].cached_tokens == 0


def test_prompt_logprobs_bypass_the_cache():
    loop = Loop()
    loop.add(ask("a", prompt(9), max_tokens=1))
    loop.run()
    loop.add(ask("b", prompt(9), max_tokens=1, prompt_logprobs=0))
    loop.run()
    assert loop.plans[-1].steps[0].count == 9


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("n", [1, 3])
def test_prompt_logprobs_outlive_a_preemption(depth: int, n: int):
    """Also where the step that computes the prompt's end is in flight then."""
    preempted = set()
    for length, before in itertools.product((8, 12), range(2, 9)):
        groups = (GroupSpec(block_size=4, num_blocks=8),)
        loop = Loop(groups, depth=depth, max_num_batched_tokens=8)
        loop.add(ask("first", prompt(7), priority=0, max_tokens=16, ignore_eos=True))
        for _ in range(before):
            loop.step()
        fields = {"priority": 1, "n": n, "ignore_eos": True, "prompt_logprobs": 0}
        loop.add(ask("late", prompt(length, 2), max_tokens=9, **fields))
        loop.run()
        preempted.add(loop.scheduler.totals.preemptions > 0)
        for choice in range(n):
            loop.check_stream("late", choice)
    assert True in preempted


# --- order, admission, preemption ---


def test_priority_first_then_arrival():
    loop = Loop(max_num_seqs=1)
    for name, priority in [("a", 1), ("b", 0), ("c", 1), ("d", -1)]:
        loop.add(ask(name, prompt(3), priority=priority, max_tokens=1))
    loop.run()
    assert [o.request_id for o in loop.outputs] == ["d", "b", "a", "c"]


def test_the_head_of_the_queue_is_not_skipped():
    loop = Loop((GroupSpec(block_size=4, num_blocks=9),))
    loop.add(ask("a", prompt(19), max_tokens=3, ignore_eos=True))
    loop.add(ask("big", prompt(25, 2), max_tokens=1))
    loop.add(ask("small", prompt(2, 3), max_tokens=1))
    loop.run()
    order = [o.request_id for o in loop.outputs if o.finish_reason]
    assert order == ["a", "big", "small"]


def test_admission_leaves_running_requests_their_next_block():
    loop = Loop((GroupSpec(block_size=4, num_blocks=4),))
    loop.add(ask("a", prompt(4), max_tokens=4, ignore_eos=True))
    loop.add(ask("b", prompt(8, 2), max_tokens=1))
    loop.step()
    assert [o.request_id for o in loop.outputs] == ["a"]
    loop.run()
    assert loop.scheduler.totals.preemptions == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_growth_preempts_the_last_in_order_and_it_goes_on_later(depth: int):
    loop = Loop((GroupSpec(block_size=4, num_blocks=8),), depth=depth)
    loop.add(ask("late", prompt(7), priority=1, max_tokens=12, ignore_eos=True))
    loop.add(ask("first", prompt(7, 2), priority=0, max_tokens=14, ignore_eos=True))
    loop.run()
    assert loop.scheduler.totals.preemptions > 0
    ends = [o.request_id for o in loop.outputs if o.finish_reason]
    assert ends == ["first", "late"]
    for name in ("first", "late"):
        loop.check_stream(name)
    loop.check_empty()


def test_a_request_that_outgrows_the_pool_ends_with_an_error():
    loop = Loop((GroupSpec(block_size=4, num_blocks=4),))
    loop.add(ask("a", prompt(5), max_tokens=40, ignore_eos=True))
    loop.run()
    stream = loop.streams["a", 0]
    assert stream.finish == "error"
    assert "the pool has 3" in (stream.error or "")
    assert len(stream.tokens) == 12 - 5 + 1
    loop.check_empty()


def test_forbidden_prompt_compute_ends_the_request():
    loop = Loop(debug_forbid_prompt_compute=True)
    loop.add(ask("a", prompt(6)))
    loop.run()
    assert loop.streams["a", 0].finish == "error"
    assert not loop.plans


# --- several choices ---


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [3, 4, 9])
def test_choices_share_the_prompt_and_go_their_own_ways(depth: int, length: int):
    loop = Loop(depth=depth)
    loop.add(ask("a", prompt(length), n=3, max_tokens=7))
    loop.run()
    for choice in range(3):
        loop.check_stream("a", choice)
    computed = 'kvbaton_prompt_tokens_total{source="computed"}'
    assert loop.scheduler.counters()[computed] == length
    assert len(loop.plans[1].forks) == 2 - (depth == 1) * _ended_at_once(loop)
    loop.check_empty()


def _ended_at_once(loop: Loop) -> int:
    return sum(len(loop.expected("a", choice)[0]) == 1 for choice in (1, 2))


@pytest.mark.parametrize("depth", [1, 2])
def test_choices_are_preempted_one_by_one(depth: int):
    loop = Loop((GroupSpec(block_size=4, num_blocks=7),), depth=depth)
    loop.add(ask("a", prompt(7), n=3, max_tokens=12, ignore_eos=True))
    loop.run()
    assert loop.scheduler.totals.preemptions > 0
    for choice in range(3):
        loop.check_stream("a", choice)
    loop.check_empty()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_choice_that_is_left_alone_needs_no_copy_of_a_block_that_it_shared(depth: int):
    """There is no room for one: it waited for itself until its deadline."""
    loop = Loop((GroupSpec(block_size=4, num_blocks=9),), depth=depth)
    request = ask("a", prompt(30), n=2, max_tokens=2, ignore_eos=True)
    first, *_ = direct(loop.config.groups, request, 0, 60)[0]  # ends the other choice at once
    loop.add(
        structs.replace(request, params=structs.replace(request.params, stop_token_ids=(first,)))
    )
    loop.run()
    loop.check_streams()
    assert len(loop.streams["a", 1].tokens) == 2
    loop.check_empty()


# --- any workload ---

ADDS = st.fixed_dictionaries(
    {
        "start": st.integers(1, 3),
        "length": st.integers(1, 22),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "max_tokens": st.integers(1, 24),
        "priority": st.integers(0, 2),
        "ignore_eos": st.booleans(),
        "prompt_logprobs": st.sampled_from([None, None, 0]),
        "cache_salt": st.sampled_from(["", "", "x"]),
        "transfer": st.just(None),
        "ttft_s": st.sampled_from([0.0, 0.5, 1.5, 4.0]),
        "prefill_s": st.sampled_from([0.1, 1.0]),
    }
)
OPS = st.lists(
    st.one_of(
        ADDS,
        st.integers(0, 8),  # abort
        st.sampled_from(["step", "step", "launch", "update", "reset"]),
    ),
    max_size=40,
)
GROUPS = st.sampled_from(
    [
        (FULL,),
        (GroupSpec(block_size=4, num_blocks=8),),
        (GroupSpec(block_size=2, num_blocks=20), GroupSpec(block_size=4, num_blocks=20)),
        (replace(FULL, num_blocks=13), replace(WINDOW, num_blocks=13)),
        (replace(WINDOW, num_blocks=8),),
        (FULL, WINDOW, replace(WINDOW, window=1)),
        (FULL, CHUNK),
        (replace(CHUNK, window=7), WINDOW),
        (replace(FULL, num_blocks=14), replace(STATE, num_blocks=14)),
        (FULL, WINDOW, STATE, STATE),
    ]
)


@settings(deadline=None, max_examples=150)
@given(
    ops=OPS,
    groups=GROUPS,
    depth=st.sampled_from([1, 2]),
    budget=st.sampled_from([1, 3, 8, 64]),
    caching=st.booleans(),
    drafts=st.sampled_from([0, 1, 4]),
)
def test_any_workload_gives_the_right_tokens_and_ends_balanced(
    ops: list[object],
    groups: tuple[GroupSpec, ...],
    depth: int,
    budget: int,
    caching: bool,
    drafts: int,
):
    loop = Loop(
        groups,
        depth=depth,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        max_num_seqs=5,
        drafts=drafts,
    )
    for op in ops:
        perform(loop, op)
    loop.run()
    loop.check_streams()
    loop.check_empty()


def perform(loop: Loop, op: object) -> None:
    match op:
        case dict():
            fields = dict(op)
            tokens = prompt(fields.pop("length"), fields.pop("start"))
            timed = {name: fields.pop(name) for name in ("ttft_s", "prefill_s")}
            if loop.scheduler.blocks.too_large(len(tokens)) is None:
                loop.add(structs.replace(ask(f"r{len(loop.requests)}", tokens, **fields), **timed))
        case int():
            loop.emit(loop.scheduler.abort(f"r{op}"))
        case "launch" if len(loop.in_flight) < loop.depth:
            loop.launch()
        case "update":
            loop.update()
        case "step":
            loop.clock.now += 0.1
            loop.step()
        case "reset":
            loop.scheduler.blocks.pool.reset_cache()
            loop.check()

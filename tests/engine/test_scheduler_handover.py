from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from kvbaton.connectors.keys import prompt_key, root_key
from kvbaton.connectors.layout import GroupKind
from kvbaton.connectors.protocol.events import Unneeded
from kvbaton.engine.audit import audit
from kvbaton.engine.kv_cache_manager import GroupSpec
from kvbaton.engine.kv_connector import Connectors, KVConnector, Load
from kvbaton.engine.request import Request, Sequence, SequenceState
from kvbaton.engine.scheduler import Scheduler
from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest
from kvbaton.types import Attempt, ChoiceStart, SampledToken, Spans
from tests.support.toy_engine import (
    CHUNK,
    FULL,
    STATE,
    WINDOW,
    Admitted,
    Loop,
    ToySource,
    ask,
    direct,
    prompt,
    source,
    target,
)


def attempt_of(admitted: Admitted) -> Attempt:
    return admitted.attempt


def known(request: AddRequest) -> list[int]:
    return [*request.token_ids, *request.resume_ids]


def blocks_of(spans: Spans) -> set[tuple[int, int]]:
    return {(g, b) for g, part in enumerate(spans) for span in part for b in span.blocks}


def starts(loop: Loop, request: AddRequest) -> list[ChoiceStart]:
    """What a source would sample first: each choice's token, without knowing when it ends."""
    return [
        ChoiceStart(direct(loop.config.groups, request, choice, 1 << 30)[0][0])
        for choice in range(request.params.n)
    ]


def deliver(loop: Loop, admitted: Admitted) -> None:
    request = loop.requests[admitted.request_id]
    loop.ranks.receive(admitted.spans, known(request), admitted.num_tokens)
    loop.emit(loop.loaded(request.request_id, starts(loop, request), 5))


def load(loop: Loop, request: AddRequest) -> Admitted:
    """Add a target and let it be admitted."""
    loop.add(request)
    loop.step()
    return loop.admitted[-1]


# --- target ---


def test_a_block_that_a_window_cuts_is_not_cached() -> None:
    """Digests count what is needed; where block sizes differ, a source may hold nothing before."""
    loop = Loop((GroupSpec(4, 80), GroupSpec(3, 80, GroupKind.WINDOW, 6)))
    first = load(loop, ask("a", prompt(13), transfer=target(1)))
    assert first.spans[1][0].first == 2, "with tokens 6 and 7, and with 8, the first one needed"
    deliver(loop, first)
    loop.unquarantine(attempt_of(first))
    loop.run()
    second = load(loop, ask("b", [*prompt(12), 22, 22, 22, 22], transfer=target(2)))
    assert second.cached_tokens == 0, "after 12 tokens, token 7 is needed too"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [1, 4, 7, 12])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (FULL, CHUNK)])
def test_a_target_computes_no_prompt_token(depth: int, length: int, groups: tuple[GroupSpec, ...]):
    loop = Loop(groups, depth=depth, debug_forbid_prompt_compute=True)
    admitted = load(loop, ask("a", prompt(length), transfer=target(1), deadline_s=9.0))
    assert admitted.prompt_key == prompt_key(root_key(bytes(32), ""), prompt(length))
    assert (admitted.num_tokens, admitted.cached_tokens, admitted.full_hit) == (length, 0, False)
    assert admitted.deadline_s == 9.0
    assert not loop.plans
    assert loop.scheduler.plan() is None
    deliver(loop, admitted)
    assert loop.outputs[0].index == 0
    assert loop.outputs[0].transferred_tokens == length
    loop.unquarantine(attempt_of(admitted))
    loop.run()
    loop.check_stream("a")
    loop.check_empty()


def test_only_missing_blocks_are_reserved():
    loop = Loop()
    loop.add(ask("a", prompt(9), max_tokens=1))
    loop.run()
    admitted = load(loop, ask("b", prompt(14), transfer=target(1)))
    assert admitted.cached_tokens == 8
    ((span,),) = admitted.spans
    assert (span.first, len(span.blocks)) == (2, 2)
    deliver(loop, admitted)
    assert (loop.outputs[-1].cached_tokens, loop.outputs[-1].transferred_tokens) == (8, 6)
    loop.run()
    loop.check_stream("b")


def test_a_window_group_reserves_its_last_window_only():
    loop = Loop((FULL, WINDOW))
    admitted = load(loop, ask("a", prompt(19), transfer=target(1)))
    (full,), (window,) = admitted.spans
    assert (full.first, len(full.blocks)) == (0, 5)
    assert (window.first, len(window.blocks)) == (3, 2)  # tokens 14 to 18 of those before 19
    deliver(loop, admitted)
    loop.run()
    loop.check_stream("a")


def test_who_is_over_before_its_admission_declines_its_prompt():
    loop = Loop()
    spec = target(1)
    loop.add(ask("a", prompt(24), transfer=spec))
    loop.emit(loop.scheduler.abort("a"))
    assert loop.transfers.told == [Unneeded(spec.name, spec.peer or "")]
    loop.check_empty()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_full_hit_needs_no_hand_over(depth: int):
    loop = Loop(depth=depth)
    loop.add(ask("a", prompt(8), max_tokens=4))
    loop.run()
    admitted = load(loop, ask("b", prompt(8), max_tokens=4, transfer=target(1)))
    assert admitted.full_hit
    assert blocks_of(admitted.spans) == set()
    assert not loop.reserved
    assert loop.loaded("b", [ChoiceStart(1)], 0) == []
    loop.run()
    loop.check_stream("b")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [7, 8])
def test_choices_of_a_target_are_forked_from_what_arrived(depth: int, length: int):
    loop = Loop(depth=depth, debug_forbid_prompt_compute=True)
    admitted = load(loop, ask("a", prompt(length), n=3, max_tokens=6, transfer=target(1)))
    deliver(loop, admitted)
    assert [o.choice for o in loop.outputs] == [0, 1, 2]
    loop.run()
    for choice in range(3):
        loop.check_stream("a", choice)
    loop.unquarantine(attempt_of(admitted))
    loop.check_empty()


def test_a_resumed_target_is_handed_over_whole_and_numbered_on():
    whole, _ = Loop().expected_of(ask("a", prompt(5), max_tokens=9, ignore_eos=True))
    resumed = ask(
        "a",
        prompt(5),
        resume_ids=tuple(whole[:4]),
        max_tokens=9,
        ignore_eos=True,
        transfer=target(1),
    )
    loop = Loop(debug_forbid_prompt_compute=True)
    admitted = load(loop, resumed)
    assert admitted.num_tokens == 9
    deliver(loop, admitted)
    loop.run()
    assert loop.outputs[0].index == 4
    assert loop.streams["a", 0].tokens == whole[4:]
    assert loop.outputs[0].transferred_tokens == 5, "of the prompt"
    assert loop.scheduler.totals.prompt_tokens["transferred"] == 5


def test_the_sources_finish_reason_is_respected_and_its_limit_is_ours():
    loop = Loop()
    admitted = load(loop, ask("a", prompt(5), transfer=target(1)))
    stop = ChoiceStart(9, finish_reason="stop", stop_reason=9)
    (output,) = loop.emit(loop.loaded("a", [stop], 0))
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ((9,), "stop", 9)
    loop.unquarantine(attempt_of(admitted))
    loop.check_empty()
    admitted = load(loop, ask("b", prompt(6, 2), max_tokens=1, transfer=target(2)))
    (output,) = loop.emit(loop.loaded("b", [ChoiceStart(9)], 0))
    assert output.finish_reason == "length"
    load(loop, ask("c", prompt(7, 3), max_tokens=3, transfer=target(3)))
    theirs = ChoiceStart(9, finish_reason="length")  # a proxy asks a source for one token
    (output,) = loop.emit(loop.loaded("c", [theirs], 0))
    assert output.finish_reason is None


def test_all_tokens_of_the_source_are_taken_and_computed():
    request = ask("a", prompt(8), max_tokens=6, transfer=target(1))
    first, second, *_ = Loop().expected_of(request)[0]
    loop = Loop(debug_forbid_prompt_compute=True)
    admitted = load(loop, request)
    loop.ranks.receive(admitted.spans, known(request), admitted.num_tokens)
    outputs = loop.loaded("a", [ChoiceStart(first, more=(SampledToken(second),))], 0)
    assert [output.token_ids for output in loop.emit(outputs)] == [(first,), (second,)]
    loop.run()
    loop.check_stream("a")
    assert loop.plans[0].num_tokens == 2


@pytest.mark.parametrize("begun", [0, 2], ids=["from the beginning", "resumed"])
def test_a_second_token_of_the_source_may_end_the_text_once_min_tokens_are_there(begun: int):
    request = ask("a", prompt(8), max_tokens=6, transfer=target(1))
    answer = Loop().expected_of(request)[0]
    first, second = answer[begun : begun + 2]
    params = structs.replace(request.params, min_tokens=begun + 1, stop_token_ids=(second,))
    loop = Loop(debug_forbid_prompt_compute=True)
    admitted = load(loop, structs.replace(request, params=params, resume_ids=tuple(answer[:begun])))
    loop.ranks.receive(admitted.spans, [*request.token_ids, *answer[:begun]], admitted.num_tokens)
    stop = SampledToken(second, None, "stop", second)
    outputs = loop.emit(loop.loaded("a", [ChoiceStart(first, more=(stop,))], 0))
    assert [output.token_ids for output in outputs] == [(first,), (second,)]
    assert outputs[-1].finish_reason == "stop"
    loop.unquarantine(attempt_of(admitted))
    loop.check_empty()


def test_tokens_of_the_source_do_not_wait_for_the_chunks_of_a_prompt():
    loop = Loop(max_num_batched_tokens=6, max_num_mixed_tokens=6)
    long, request = ask("long", prompt(40)), ask("a", prompt(8, 2), transfer=target(1))
    loop.add(long)
    loop.step()
    admitted = load(loop, request)
    loop.ranks.receive(admitted.spans, known(request), admitted.num_tokens)
    first, second, *_ = Loop().expected_of(request)[0]
    outputs = loop.loaded("a", [ChoiceStart(first, more=(SampledToken(second),))], 0)
    loop.emit(outputs)
    before = len(loop.plans)
    loop.step()
    assert sorted(step.count for step in loop.plans[before].steps) == [2, 4]
    loop.run()
    loop.check_stream("a")
    loop.check_stream("long")


def test_nothing_follows_a_token_of_the_source_that_ends_the_text():
    loop = Loop()
    load(loop, ask("a", prompt(5), transfer=target(1)))
    stop = ChoiceStart(9, None, "stop", 9, more=(SampledToken(1),))
    (output,) = loop.emit(loop.loaded("a", [stop], 0))
    assert (output.token_ids, output.finish_reason) == ((9,), "stop")


@pytest.mark.parametrize("token", [3, 1 << 30], ids=["ends the text too early", "unknown"])
def test_a_wrong_second_token_of_the_source_is_sampled_anew(token: int):
    loop = Loop()
    request = ask("a", prompt(8), transfer=target(1), min_tokens=2, stop_token_ids=(3,))
    admitted = load(loop, request)
    loop.ranks.receive(admitted.spans, known(request), admitted.num_tokens)
    first = starts(loop, request)[0].token
    assert loop.loaded("a", [ChoiceStart(first, more=(SampledToken(token),))], 0) == []
    loop.unquarantine(attempt_of(admitted))
    loop.run()
    loop.check_stream("a")


def test_blocks_are_in_the_prefix_cache_only_once_they_are_verified():
    loop = Loop()
    admitted = load(loop, ask("a", prompt(9), transfer=target(1)))
    loop.add(ask("b", prompt(9), max_tokens=1))
    loop.step()
    assert loop.outputs[-1].cached_tokens == 0
    loop.scheduler.blocks.pool.reset_cache()
    deliver(loop, admitted)
    loop.add(ask("c", prompt(9), max_tokens=1))
    loop.step()
    assert {o.request_id: o.cached_tokens for o in loop.outputs}["c"] == 8


def test_too_few_first_tokens_are_a_failed_load():
    loop = Loop()
    admitted = load(loop, ask("a", prompt(8), n=2, transfer=target(1)))
    loop.ranks.receive(admitted.spans, prompt(8), 8)
    assert loop.loaded("a", [ChoiceStart(1)], 0) == []
    loop.run()
    for choice in range(2):
        loop.check_stream("a", choice)


def test_an_end_before_min_tokens_is_sampled_anew_here():
    """The source did not know of `min_tokens`: its token 0 must not end the text."""
    loop = Loop(debug_forbid_prompt_compute=True)
    request = ask("a", prompt(8), transfer=target(1), min_tokens=2, stop_token_ids=(3,))
    admitted = load(loop, request)
    loop.ranks.receive(admitted.spans, known(request), admitted.num_tokens)
    assert loop.loaded("a", [ChoiceStart(3, None, "stop", 3)], 0) == []
    loop.unquarantine(attempt_of(admitted))
    loop.run()
    tokens = [token for output in loop.outputs for token in output.token_ids]
    assert tokens[:1] == [starts(loop, request)[0].token]
    assert sum(plan.num_tokens for plan in loop.plans[:1]) == 1, "more than the last was computed"
    loop.check_empty()


def test_other_requests_run_while_one_loads_and_the_cap_holds_further_ones_back():
    loop = Loop((GroupSpec(block_size=4, num_blocks=13),), max_loading_share=0.5)
    first = load(loop, ask("a", prompt(16), transfer=target(1)))
    loop.add(ask("b", prompt(5, 2), max_tokens=2, ignore_eos=True))
    loop.step()
    loop.step()
    assert loop.streams["b", 0].finish == "length"
    loop.add(ask("c", prompt(16, 3), transfer=target(2)))
    loop.step()
    assert [a.request_id for a in loop.admitted] == ["a"]
    assert loop.scheduler.waiting
    assert not loop.scheduler.lacking_tokens(), "what comes from elsewhere is not to be computed"
    deliver(loop, first)
    loop.unquarantine(attempt_of(first))
    loop.run_until(lambda: len(loop.admitted) == 2)
    deliver(loop, loop.admitted[1])
    loop.run()
    for name in "abc":
        loop.check_stream(name)


def test_one_hand_over_larger_than_the_cap_is_admitted_when_it_is_alone():
    loop = Loop((GroupSpec(block_size=4, num_blocks=9),), max_loading_share=0.25)
    assert load(loop, ask("a", prompt(28), transfer=target(1))).request_id == "a"


# --- nodes that prefill for others, too ---


def both_sides(**settings: Any) -> Loop:
    loop = Loop(**settings)
    loop.scheduler.both_sides = True
    return loop


def test_prompts_for_others_do_not_wait_behind_who_waits_for_room_to_load():
    """Else two nodes whose loads wait for each other's prompts would wait for ever."""
    loop = both_sides(groups=(GroupSpec(block_size=4, num_blocks=17),))
    first = load(loop, ask("a", prompt(24), transfer=target(1)))
    loop.add(ask("b", prompt(24, 2), transfer=target(2)))
    loop.add(ask("c", prompt(24, 3), max_tokens=1, transfer=source(3)))
    loop.run_until(lambda: loop.streams["c", 0].finish is not None)
    assert [admitted.request_id for admitted in loop.admitted] == ["a"]
    deliver(loop, first)
    loop.unquarantine(attempt_of(first))
    loop.run_until(lambda: len(loop.admitted) == 2)
    deliver(loop, loop.admitted[1])
    loop.run()
    for name in "ab":
        loop.check_stream(name)


def test_a_load_that_leaves_no_room_for_prompts_of_others_is_computed():
    loop = both_sides(groups=(GroupSpec(block_size=4, num_blocks=13),))
    loop.add(ask("a", prompt(28), max_tokens=2, ignore_eos=True, transfer=target(1)))
    loop.run()
    assert [admitted.full_hit for admitted in loop.admitted] == [True], "it needs nothing"
    loop.check_stream("a")


SIXTEEN = (GroupSpec(block_size=4, num_blocks=17),)


class Prefixes(KVConnector):
    """Says that it has 16 tokens of the prompt that comes, and has nothing."""

    def __init__(self, scheduler: Scheduler, *, of_sources: bool = False) -> None:
        self.scheduler, self.loads, self.of_sources = scheduler, list[Load](), of_sources

    def match(self, sequence: Sequence, num_cached: int) -> int:
        request = sequence.request
        wanted = request.source if self.of_sources else request.spec.transfer is None
        return 16 - num_cached if wanted and not self.loads else 0

    def start_load(self, load: Load) -> None:
        self.loads.append(load)
        self.scheduler.blocks.release_incoming(load.spans)
        self.scheduler.cut_load(load, load.start)


def compute_for_another(loop: Loop, length: int = 24) -> None:
    """A prompt for another node must be computed, whoever else loads or waits."""
    loop.add(ask("s", prompt(length, 9), max_tokens=1, transfer=source(9)))
    loop.run_until(lambda: loop.streams["s", 0].finish is not None)


def end_load(loop: Loop, admitted: Admitted) -> None:
    deliver(loop, admitted)
    loop.unquarantine(attempt_of(admitted))


def test_prompts_for_others_do_not_wait_behind_who_waits_for_room_for_a_prefix():
    loop = both_sides(groups=SIXTEEN)
    prefixes = Prefixes(loop.scheduler)
    loop.scheduler.connectors = Connectors((loop.target, prefixes, ToySource()))
    first = load(loop, ask("a", prompt(24), transfer=target(1)))
    loop.add(ask("b", prompt(24, 2)))
    compute_for_another(loop)
    assert not prefixes.loads
    end_load(loop, first)
    loop.run()
    assert len(prefixes.loads) == 1
    for name in "ab":
        loop.check_stream(name)


def test_prompts_for_others_do_not_wait_for_room_for_a_prefix_of_their_own():
    loop = both_sides(groups=SIXTEEN)
    prefixes = Prefixes(loop.scheduler, of_sources=True)
    loop.scheduler.connectors = Connectors((loop.target, prefixes, ToySource()))
    first = load(loop, ask("a", prompt(24), transfer=target(1)))
    compute_for_another(loop)
    assert not prefixes.loads, "it is computed"
    end_load(loop, first)
    loop.run()
    loop.check_stream("a")
    loop.add(ask("t", prompt(24, 5), max_tokens=1, transfer=source(5)))
    loop.run()
    assert len(prefixes.loads) == 1, "there is room"


def test_prompts_for_others_do_not_wait_behind_who_has_no_room_beside_loads():
    loop = both_sides(groups=SIXTEEN)
    first = load(loop, ask("a", prompt(24), transfer=target(1)))
    loop.add(ask("b", prompt(40, 2)))
    compute_for_another(loop)
    assert not loop.streams["b", 0].tokens
    end_load(loop, first)
    loop.run()
    for name in "ab":
        loop.check_stream(name)


@pytest.mark.parametrize("depth", [1, 2])
def test_who_grows_until_there_is_no_room_beside_loads_lets_others_pass(depth: int):
    loop = both_sides(groups=SIXTEEN, depth=depth)
    first = load(loop, ask("a", prompt(24), transfer=target(1)))
    loop.add(ask("b", prompt(24, 2), max_tokens=30, ignore_eos=True))
    loop.step()
    compute_for_another(loop)
    assert 14 <= len(loop.streams["b", 0].tokens) < 30
    end_load(loop, first)
    loop.run()
    for name in "ab":
        loop.check_stream(name)


def test_half_of_the_blocks_is_left_beside_cached_prefixes_and_the_next_token():
    loop = both_sides(groups=SIXTEEN, max_num_batched_tokens=64)
    loop.add(ask("a", prompt(32), max_tokens=1, transfer=target(1)))  # and one token more
    compute_for_another(loop, 32)
    loop.add(ask("b", prompt(44), max_tokens=1, transfer=target(2)))  # 7 blocks are cached
    loop.run()
    assert [admitted.full_hit for admitted in loop.admitted] == [True, True], "they load nothing"


def test_no_load_overtakes_who_waits_for_the_end_of_one():
    loop = both_sides(groups=(GroupSpec(block_size=4, num_blocks=33),), max_model_len=200)
    first = load(loop, ask("a", prompt(40), transfer=target(1)))
    loop.add(ask("b", prompt(96, 2)))
    loop.add(ask("c", prompt(8, 3), transfer=target(3)))
    compute_for_another(loop)
    assert [admitted.request_id for admitted in loop.admitted] == ["a"]
    end_load(loop, first)
    loop.run_until(lambda: len(loop.admitted) == 2)
    assert loop.streams["b", 0].tokens
    end_load(loop, loop.admitted[1])
    loop.run()
    for name in "abc":
        loop.check_stream(name)


@pytest.mark.parametrize("whole", [False, True])
def test_a_load_does_not_wait_behind_a_prompt_for_which_a_step_has_no_tokens(whole: bool):
    """It needs none; its source would be done before it is asked, and compute the prompt again."""
    loop = Loop(max_num_batched_tokens=12, whole_prompts=whole)
    loop.add(ask("a", prompt(11 if whole else 40)))
    loop.add(ask("b", prompt(9, 2)))
    loop.add(ask("c", prompt(5, 3), transfer=target(1)))
    loop.step()
    assert [admitted.request_id for admitted in loop.admitted] == ["c"]
    assert [s.request.request_id for s in loop.scheduler.waiting] == ["b"]
    deliver(loop, loop.admitted[0])
    loop.unquarantine(attempt_of(loop.admitted[0]))
    loop.run()
    for name in "abc":
        loop.check_stream(name)
    loop.check_empty()


def test_a_load_waits_behind_a_prompt_for_which_there_are_no_blocks():
    loop = Loop((GroupSpec(block_size=4, num_blocks=12),), max_num_batched_tokens=12)
    loop.add(ask("a", prompt(20), max_tokens=8))
    loop.add(ask("b", prompt(30, 2)))
    loop.add(ask("c", prompt(5, 3), transfer=target(1)))
    loop.step()
    loop.step()
    assert not loop.admitted, "b would wait for blocks for ever if others took all that come free"
    loop.run_until(lambda: bool(loop.admitted))
    assert loop.streams["a", 0].tokens
    deliver(loop, loop.admitted[0])
    loop.unquarantine(attempt_of(loop.admitted[0]))
    loop.run()
    for name in "abc":
        loop.check_stream(name)


def test_who_leaves_while_others_wait_for_the_end_of_a_load_holds_nobody_up():
    loop = both_sides(groups=(GroupSpec(block_size=4, num_blocks=33),), max_model_len=200)
    load(loop, ask("a", prompt(40), transfer=target(1)))
    loop.add(ask("b", prompt(96, 2)))
    loop.step()
    loop.emit(loop.scheduler.abort("b"))
    load(loop, ask("c", prompt(8, 3), transfer=target(3)))
    assert [admitted.request_id for admitted in loop.admitted] == ["a", "c"]


def test_loads_leave_less_than_half_where_no_prompt_needs_it():
    loop = both_sides(
        groups=(GroupSpec(block_size=4, num_blocks=65),), max_num_seqs=16, max_model_len=32
    )
    for number in range(8):
        loop.add(ask(f"d{number}", prompt(24, number), transfer=target(number)))
    compute_for_another(loop, 31)
    assert len(loop.admitted) == 6, (
        "of 7 blocks; 8 for the longest prompt and 8 for choices are left"
    )


def test_loads_of_many_choices_leave_half_of_the_seats():
    loop = both_sides(groups=(GroupSpec(block_size=4, num_blocks=200),), max_num_seqs=4)
    for number in range(2):
        loop.add(ask(f"d{number}", prompt(8, number), n=2, transfer=target(number)))
    compute_for_another(loop)
    assert len(loop.scheduler.loading) == 1
    for admitted in loop.admitted:  # grows as loads end
        end_load(loop, admitted)
        loop.step()
    assert len(loop.admitted) == 2


def test_loads_leave_half_of_the_seats():
    loop = both_sides(groups=(GroupSpec(block_size=4, num_blocks=200),))
    for number in range(8):
        loop.add(ask(f"d{number}", prompt(8, number), transfer=target(number)))
    loop.add(ask("s", prompt(8, 9), max_tokens=1, transfer=source(9)))
    loop.run_until(lambda: loop.streams["s", 0].finish is not None)
    assert len(loop.scheduler.loading) == 4
    for admitted in loop.admitted:  # grows as loads end
        deliver(loop, admitted)
        loop.unquarantine(attempt_of(admitted))
        loop.step()
    assert len(loop.admitted) == 8


# --- failed loads ---


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("valid", [0, 3, 4, 9, 11])
def test_recompute_keeps_what_was_verified_and_takes_fresh_blocks(depth: int, valid: int):
    loop = Loop(depth=depth)
    admitted = load(loop, ask("a", prompt(11), ignore_eos=True, transfer=target(1)))
    loop.ranks.receive(admitted.spans, prompt(11), valid)
    assert loop.emit(loop.load_failed("a", valid, "lost")) == []
    loop.step()
    (row,) = loop.scheduler.sequences()
    reserved = [block for _, block in sorted(blocks_of(admitted.spans))]
    kept = valid // 4
    assert row.tables[0][:kept] == reserved[:kept]
    assert not set(row.tables[0][kept:]) & set(reserved)
    assert loop.plans[0].steps[0].start == kept * 4
    loop.run()
    assert loop.outputs[0].transferred_tokens == kept * 4
    loop.check_stream("a")
    loop.unquarantine(attempt_of(admitted))
    loop.check_empty()


def test_policy_fail_ends_with_an_error():
    loop = Loop(kv_load_failure_policy="fail")
    admitted = load(loop, ask("a", prompt(11), n=2, transfer=target(1)))
    outputs = loop.emit(loop.load_failed("a", 4, "digest mismatch"))
    assert [(o.choice, o.finish_reason) for o in outputs] == [(0, "error"), (1, "error")]
    assert "digest mismatch" in (outputs[0].error or "")
    loop.unquarantine(attempt_of(admitted))
    loop.check_empty()


def test_quarantined_blocks_are_absent_until_unquarantine():
    loop = Loop((GroupSpec(block_size=4, num_blocks=5),))
    admitted = load(loop, ask("a", prompt(12), transfer=target(1)))
    loop.load_failed("a", 0, "lost")
    loop.check()
    loop.step()
    assert not loop.plans
    assert loop.scheduler.plan() is None
    assert loop.scheduler.blocks.owners()[0]["incoming"] == 3
    loop.ranks.scribble(admitted.spans)
    loop.unquarantine(attempt_of(admitted))
    loop.run()
    loop.check_stream("a")


@pytest.mark.parametrize("how", ["abort", "expire"])
def test_a_loading_request_can_end_at_any_time(how: str):
    loop = Loop()
    admitted = load(loop, ask("a", prompt(9), deadline_s=5.0, transfer=target(1)))
    if how == "abort":
        (output,) = loop.emit(loop.scheduler.abort("a"))
        assert output.finish_reason == "abort"
    else:
        (output,) = loop.emit(loop.scheduler.expire(105.0))
        assert output.finish_reason == "error"
    assert loop.scheduler.blocks.owners()[0]["incoming"] == 3
    assert loop.loaded("a", [ChoiceStart(1)], 0) == []
    assert loop.load_failed("a", 0, "late") == []
    loop.unquarantine(attempt_of(admitted))
    loop.unquarantine(attempt_of(admitted))
    loop.check_empty()


def test_an_attempt_is_used_once_at_a_time():
    loop = Loop()
    loop.add(ask("a", prompt(9), transfer=target(1)))
    with pytest.raises(RequestError, match="in use"):
        loop.add(ask("b", prompt(9), transfer=target(1)))
    loop.step()
    loop.scheduler.abort("a")
    with pytest.raises(RequestError, match="in use"):
        loop.add(ask("b", prompt(9), transfer=target(1)))
    loop.unquarantine(attempt_of(loop.admitted[0]))
    loop.add(ask("b", prompt(9), transfer=target(1)))


def test_a_planted_early_free_is_caught_by_the_audit():
    loop = Loop()
    admitted = load(loop, ask("a", prompt(9), transfer=target(1)))
    loop.scheduler.abort("a")
    loop.scheduler.blocks.release_incoming(admitted.spans)
    found = audit(loop.scheduler, incoming=[admitted.spans])
    assert found["incoming"] == 3
    assert found["lists"] == 3


# --- source ---


class Reporter(ToySource):
    """Holds what has become final, as it becomes final."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.reports: dict[str, list[tuple[int, int, Spans]]] = {}
        loop.scheduler.connectors = Connectors((loop.target, self))

    def progressed(self, request: Request) -> None:
        assert request.state is not SequenceState.FINISHED
        blocks, (sequence, *_) = self.loop.scheduler.blocks, request.sequences
        reports = self.reports.setdefault(request.request_id, [])
        computed = min(sequence.num_computed, request.num_known)
        end = computed if computed == request.num_known else computed - computed % 4
        start = reports[-1][1] if reports else 0
        if end > start:
            spans = blocks.spans(sequence.tables, start, end)
            blocks.hold_outgoing(spans)
            self.loop.outgoing.append(spans)
            reports.append((start, end, spans))

    def release(self, name: str) -> None:
        for _, _, spans in self.reports.pop(name, []):
            self.loop.scheduler.blocks.release_outgoing(spans)
            self.loop.outgoing.remove(spans)

    def sent(self, name: str) -> dict[int, int]:
        """Position -> KV, as a transfer would read it now."""
        seen: dict[int, int] = {}
        for start, end, spans in self.reports.get(name, []):
            for span in spans[0]:
                for i, block in enumerate(span.blocks, start=span.first):
                    for position in range(max(start, 4 * i), min(end, 4 * i + 4)):
                        seen[position] = self.loop.ranks.memory[block, position % 4]
        return seen


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("n", [1, 3])
def test_a_source_stops_after_one_token_and_its_blocks_can_be_held(depth: int, n: int):
    loop = Loop(depth=depth, max_num_batched_tokens=5)
    reporter = Reporter(loop)
    loop.add(ask("a", prompt(11), n=n, max_tokens=9, ignore_eos=True, transfer=source(1)))
    loop.run()
    assert [(start, end) for start, end, _ in reporter.reports["a"]] == [(0, 4), (4, 8), (8, 11)]
    assert [len(loop.streams["a", c].tokens) for c in range(n)] == [1] * n
    assert {o.finish_reason for o in loop.outputs} == {"length"}
    assert loop.scheduler.blocks.owners()[0]["outgoing"] == 3
    assert "a" not in loop.scheduler.requests
    loop.add(ask("b", prompt(50, 2), max_tokens=2, ignore_eos=True))
    loop.run()
    again = Loop()
    again.add(ask("a", prompt(11), max_tokens=1))
    again.run()
    fresh = [again.ranks.memory[1 + i // 4, i % 4] for i in range(11)]
    assert [reporter.sent("a")[i] for i in range(11)] == fresh
    reporter.release("a")
    loop.check_empty()


def test_a_real_stop_at_a_source_is_a_stop():
    first, _ = Loop().expected_of(ask("a", prompt(6), max_tokens=1, ignore_eos=True))
    loop = Loop()
    loop.add(ask("a", prompt(6), stop_token_ids=(first[0],), max_tokens=9, transfer=source(1)))
    loop.run()
    assert loop.outputs[-1].finish_reason == "stop"


def test_hits_of_a_source_are_final_at_once():
    loop = Loop(max_num_batched_tokens=2)
    loop.add(ask("a", prompt(9), max_tokens=1))
    loop.run()
    reporter = Reporter(loop)
    loop.add(ask("b", prompt(13), transfer=source(1)))
    loop.step()
    assert [(start, end) for start, end, _ in reporter.reports["b"]] == [(0, 8)]


def test_evict_takes_only_the_blocks_of_bad_tokens_out_of_the_cache():
    loop = Loop()
    reporter = Reporter(loop)
    loop.add(ask("a", prompt(12), max_tokens=1, transfer=source(1)))
    loop.run()
    for _, _, spans in reporter.reports["a"]:
        loop.scheduler.blocks.evict(spans, [(5, 6)])
    reporter.release("a")
    loop.check()
    loop.add(ask("b", prompt(12), max_tokens=1))
    loop.run()
    assert loop.outputs[-1].cached_tokens == 4


def test_who_is_preempted_with_a_token_in_flight_waits_for_it():
    loop = Loop((GroupSpec(block_size=4, num_blocks=8),), depth=2)
    reporter = Reporter(loop)
    loop.add(ask("s", prompt(12), max_tokens=1, transfer=source(1)))
    loop.run()
    for name, start in [("a", 2), ("b", 3)]:
        loop.add(ask(name, prompt(7, start), max_tokens=9, ignore_eos=True))
    assert loop.launch()
    assert loop.launch()
    loop.update()
    assert not loop.launch()  # "a" needs a block and takes those of "b", behind their fence
    reporter.release("s")
    assert loop.launch()
    assert [step.start for step in loop.plans[-1].steps] == [8]
    loop.run()
    for name in "ab":
        loop.check_stream(name)


def test_a_source_is_not_preempted_while_its_last_step_is_in_flight():
    loop = Loop((GroupSpec(block_size=4, num_blocks=9),), depth=2, max_num_batched_tokens=8)
    reporter = Reporter(loop)
    loop.add(ask("a", prompt(5), max_tokens=9, ignore_eos=True))
    loop.add(ask("s", prompt(24, 2), max_tokens=1, transfer=source(1)))
    assert loop.launch()
    for _ in range(3):
        assert loop.launch()
        loop.update()
    assert loop.plans[-1].steps[1].start == 17
    assert not loop.launch()  # "a" needs a block, and "s" has all the others for one more step
    loop.update()
    assert [end for _, end, _ in reporter.reports["s"]][-1] == 24
    reporter.release("s")
    loop.run()
    for name in "as":
        loop.check_stream(name)
    assert loop.scheduler.totals.preemptions == 0


def test_who_grows_takes_no_blocks_of_a_source():
    """Those that were reported would stay held: it would wait for them, and the source for it."""
    loop = Loop(SIXTEEN, max_num_batched_tokens=4)
    reporter = Reporter(loop)
    loop.add(ask("a", prompt(16), max_tokens=24, ignore_eos=True))
    loop.run_until(lambda: bool(loop.streams["a", 0].tokens))
    loop.add(ask("s", prompt(44, 2), max_tokens=1, transfer=source(1)))
    loop.run_until(lambda: loop.streams["s", 0].finish is not None)
    assert len(loop.streams["a", 0].tokens) < 24
    reporter.release("s")
    loop.run()
    for name in "as":
        loop.check_stream(name)
    assert loop.scheduler.totals.preemptions == 0


# --- any workload ---

OPS = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {
                "start": st.integers(1, 3),
                "length": st.integers(1, 20),
                "n": st.sampled_from([1, 1, 2]),
                "max_tokens": st.integers(1, 12),
                "priority": st.integers(0, 1),
                "role": st.sampled_from(["target", "target", "source", "plain"]),
            }
        ),
        st.sampled_from(
            ["step", "step", "launch", "update", "deliver", "fail", "drain", "abort", "release"]
        ),
    ),
    max_size=50,
)
GROUPS = st.sampled_from(
    [
        (FULL,),
        (GroupSpec(block_size=4, num_blocks=9),),
        (replace(FULL, num_blocks=13), replace(WINDOW, num_blocks=13)),
        (FULL, WINDOW, WINDOW),
        (FULL, CHUNK),
        (FULL, replace(CHUNK, window=7), WINDOW),
        (replace(FULL, num_blocks=15), replace(STATE, num_blocks=15)),
    ]
)


class Storm:
    """Random hand-overs; every reserved block is spoiled right up to its unquarantine."""

    def __init__(self, loop: Loop, seed: int) -> None:
        self.loop, self.random = loop, random.Random(seed)
        self.reporter = Reporter(loop)
        self.number = 0
        self.gone: set[Attempt] = set()

    def perform(self, op: object) -> None:
        if isinstance(op, dict):
            self.add(dict(op))
        elif op == "launch":
            if len(self.loop.in_flight) < self.loop.depth:
                self.loop.launch()
        elif op in ("step", "update"):
            getattr(self.loop, str(op))()
        else:
            getattr(self, str(op))()
        self.loop.check()

    def add(self, fields: dict[str, object]) -> None:
        self.number += 1
        roles = {"target": target(self.number), "source": source(self.number), "plain": None}
        role = roles[str(fields.pop("role"))]
        length, start = fields.pop("length"), fields.pop("start")
        assert isinstance(length, int)
        assert isinstance(start, int)
        tokens = prompt(length, start)
        self.loop.add(ask(f"r{self.number}", tokens, transfer=role, **fields))

    def loading(self) -> Admitted | None:
        live = self.loop.scheduler.loading
        found = [a for a in self.loop.admitted if a.request_id in live]
        return self.random.choice(found) if found else None

    def deliver(self) -> None:
        admitted = self.loading()
        if admitted is not None:
            deliver(self.loop, admitted)

    def fail(self) -> None:
        admitted = self.loading()
        if admitted is None:
            return
        valid = self.random.randrange(admitted.cached_tokens, admitted.num_tokens + 1)
        tokens = known(self.loop.requests[admitted.request_id])
        self.loop.ranks.receive(admitted.spans, tokens, valid)
        self.loop.emit(self.loop.load_failed(admitted.request_id, valid, "lost"))

    def drain(self) -> None:
        """End the quarantine of an attempt; until then a late write may spoil its blocks."""
        live = {attempt_of(a) for a in self.loop.admitted if a.request_id in self._loading()}
        over = sorted(set(self.loop.reserved) - live)
        if over:
            attempt = self.random.choice(over)
            self.spoil(attempt)
            self.loop.unquarantine(attempt)
            self.loop.check()

    def _loading(self) -> set[str]:
        return set(self.loop.scheduler.loading)

    def spoil(self, attempt: Attempt) -> None:
        """Spoil what no request uses: a write that comes after the target gave up."""
        blocks = self.loop.scheduler.blocks
        pool = blocks.pool
        for g, spans in enumerate(self.loop.reserved[attempt]):
            for block in (block for span in spans for block in span.blocks):
                if not pool.refs[block] and pool.keys[block] is None:
                    for slot in range(blocks.groups[g].block_size):
                        self.loop.ranks.memory[block, slot] = -1

    def abort(self) -> None:
        name = f"r{self.random.randint(1, self.number or 1)}"
        self.loop.emit(self.loop.scheduler.abort(name))

    def release(self) -> None:
        if self.reporter.reports:
            self.reporter.release(self.random.choice(sorted(self.reporter.reports)))

    def finish(self) -> None:
        """Let every hand-over end and every request with it."""
        for _ in range(600):
            if not self.loop.scheduler.has_work() and not self.loop.reserved:
                break
            self.loop.step()
            self.random.choice((self.deliver, self.fail))()
            self.drain()
            self.release()
        while self.reporter.reports:
            self.release()


@settings(deadline=None, max_examples=100)
@given(
    ops=OPS,
    groups=GROUPS,
    depth=st.sampled_from([1, 2]),
    budget=st.sampled_from([2, 7, 64]),
    seed=st.integers(0, 1 << 16),
    drafts=st.sampled_from([0, 3]),
    both=st.booleans(),
)
def test_any_hand_over_gives_the_right_tokens_and_ends_balanced(
    ops: list[object],
    groups: tuple[GroupSpec, ...],
    depth: int,
    budget: int,
    seed: int,
    drafts: int,
    both: bool,
):
    settings = {"max_num_batched_tokens": budget, "max_num_seqs": 5}
    loop = Loop(groups, depth=depth, drafts=drafts, **settings)
    loop.scheduler.both_sides = both
    storm = Storm(loop, seed)
    for op in ops:
        storm.perform(op)
    storm.finish()
    loop.check_empty()
    loop.check_streams()

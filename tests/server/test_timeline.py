"""Stages of a prompt's time: whatever is marked, those on a path follow each other and add up."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.messages.engine import Mark
from kvbaton.server.timeline import RequestTimeline, Stage

ARRIVED, SUBMITTED, FIRST, SECOND, ENDED = 100.0, 100.1, 102.0, 103.0, 104.0


def timeline_of(*marks: Mark, role: str = "", second: float | None = SECOND) -> RequestTimeline:
    """Of an answer whose tokens were written at `FIRST` and `second`."""
    timeline = RequestTimeline(ARRIVED, role)
    timeline.submitted = SUBMITTED
    timeline.add(marks)
    timeline.written["first_token"] = FIRST
    if second is not None:
        timeline.written["second_token"] = second
    timeline.ended = ENDED
    return timeline


def marks_of(part: str, attempt: int = 0, /, **times: float) -> list[Mark]:
    return [Mark(name, at, f"node of {part}", part, attempt) for name, at in times.items()]


def lengths(stages: list[Stage]) -> dict[str, float]:
    for before, after in itertools.pairwise(stages):
        assert before.end == after.start
    return {stage.name: pytest.approx(stage.end - stage.start) for stage in stages}  # type: ignore[misc]


SOURCE = marks_of("source", asked=100.2, received=100.3, scheduled=100.7, first_token=101.5)
# fmt: off
TARGET = marks_of(
    "target", asked=100.2, received=100.3, loading=100.4, accepted=100.5, first_landed=101.0,
    landed=101.7, verified=101.8, first_token=101.9, second_token=102.5,
)
FAILED = marks_of(
    "target", asked=100.2, loading=100.4, accepted=100.5, load_failed=101.6, scheduled=101.6,
    first_token=102.2, second_token=102.5,
)
# fmt: on


def test_a_hand_over() -> None:
    timeline = timeline_of(*SOURCE, *TARGET)
    first = {"tokenize": 0.1, "route": 0.1, "queue": 0.5, "prefill": 0.8}
    assert lengths(timeline.path("first_token")) == {**first, "respond": 0.5}
    second = {**first, "wire": 0.2, "verify": 0.1, "first_decode": 0.7, "respond": 0.5}
    assert lengths(timeline.path("second_token")) == second
    beside = [(s.name, s.part.part) for s in timeline.stages() if not s.paths and s.part]
    assert beside == [("queue", "target"), ("reserve", "target")]
    responses = [stage for stage in timeline.stages() if stage.name == "respond"]
    assert [stage.paths for stage in responses] == [("first_token",), ("second_token",)]


def test_a_second_token_of_the_source_waits_for_no_hand_over() -> None:
    source = [*SOURCE, *marks_of("source", second_token=101.6)]
    timeline = timeline_of(*source, *TARGET)
    path = lengths(timeline.path("second_token"))
    first = {"tokenize": 0.1, "route": 0.1, "queue": 0.5, "prefill": 0.8}
    assert path == {**first, "first_decode": 0.1, "respond": 1.4}
    beside = [stage for stage in timeline.stages() if not stage.paths and stage.part]
    assert [stage.name for stage in beside] == ["queue", "reserve", "wire", "verify"]
    assert lengths(beside[2:]) == {"wire": 0.2, "verify": 0.1}


def test_the_wire_of_an_attempt_begins_with_its_own_first_token() -> None:
    again = marks_of("source", 1, asked=101.85, scheduled=101.86, first_token=101.95)
    timeline = timeline_of(*SOURCE, *TARGET, *again)
    (wire,) = [stage for stage in timeline.stages() if stage.name == "wire"]
    assert (wire.start, wire.end) == (101.5, 101.7)


def test_a_hand_over_that_failed_is_computed_anew() -> None:
    path = timeline_of(*SOURCE, *FAILED).path("second_token")
    assert [stage.name for stage in path[4:]] == ["wire", "recompute", "first_decode", "respond"]


def test_a_retry_is_part_of_the_path() -> None:
    lost = marks_of("alone", asked=100.2, failed=100.9)
    again = marks_of(
        "alone", 1, asked=101.0, scheduled=101.1, first_token=101.4, second_token=102.1
    )
    names = lengths(timeline_of(*lost, *again).path("first_token"))
    assert names == {"tokenize": 0.1, "retry": 0.9, "queue": 0.1, "prefill": 0.3, "respond": 0.6}


def test_an_attempt_after_the_first_token_is_not_on_its_path() -> None:
    one = marks_of("alone", asked=100.2, scheduled=100.3, first_token=101.0, failed=102.4)
    other = marks_of("alone", 1, asked=102.5, scheduled=102.6, first_token=102.7)
    timeline = timeline_of(*one, *other)
    assert [stage.name for stage in timeline.path("first_token")][1] == "route"
    assert [stage.name for stage in timeline.path("second_token")][1] == "retry"


def test_who_takes_over_has_no_part_in_the_first_tokens() -> None:
    later = [Mark("first_token", 103.5, "its successor", "target", 0)]
    moved = timeline_of(*SOURCE, *TARGET, *later)
    assert moved.path("second_token") == timeline_of(*SOURCE, *TARGET).path("second_token")


def test_without_a_token_there_is_no_path() -> None:
    timeline = timeline_of(*SOURCE, second=None)
    assert timeline.path("second_token") == []
    assert timeline.timings().second_token_ms is None
    assert RequestTimeline(ARRIVED).path("first_token") == []
    assert RequestTimeline(ARRIVED).timings().first_token == {}


NAMES = ("asked", "received", "scheduled", "loading", "accepted", "landed", "verified", "failed")
any_mark = st.builds(
    Mark,
    st.sampled_from([*NAMES, "load_failed", "first_token", "second_token", "of a later release"]),
    st.floats(90.0, 110.0),
    st.just("node"),
    st.sampled_from(["source", "target", "alone", "encoder", "encoder-1", "odd"]),
    st.integers(0, 2),
)


@given(st.lists(any_mark, max_size=30))
def test_paths_add_up_whatever_is_told(marks: list[Mark]) -> None:
    """Also by engines of other releases, with a wrong clock, or with half of it missing."""
    timeline = timeline_of(*marks)
    for token, end in (("first_token", FIRST), ("second_token", SECOND)):
        path = timeline.path(token)  # type: ignore[arg-type]
        lengths(path)
        assert (path[0].start, path[-1].end) == (ARRIVED, end)
        assert all(stage.start <= stage.end for stage in path)
    assert all(stage.start <= stage.end for stage in timeline.stages())
    timeline.timings()


def test_tokens_are_timed_once_written(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 2.0, 3.0])
    its_time = SimpleNamespace(monotonic=lambda: next(clock))  # other threads have theirs
    monkeypatch.setattr("kvbaton.server.timeline.time", its_time)
    timeline = RequestTimeline(0.0)
    timeline.wrote(0)
    timeline.wrote(3, choice=1)
    timeline.wrote(1)
    timeline.wrote(1)
    timeline.wrote(1)
    assert timeline.written == {"first_token": 1.0, "second_token": 2.0}
    assert timeline.num_written == 6
    both = RequestTimeline(0.0)
    both.wrote(2)
    assert both.written == {"first_token": 3.0, "second_token": 3.0}

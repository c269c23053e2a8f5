"""Each fault does what it says, to the writes it is meant for, and again with the same seed."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvbaton.connectors.base import Status
from kvbaton.connectors.transports.faulty import FaultyTransport
from kvbaton.errors import ConfigError
from kvbaton.testing.transport_rig import Pair, pack, random_rows

INNER = ["memory", "tcp", "nixl"]
ROW = (0, 5, 0, 11, 1_000, 3, 2_000, 1_500)
_names = itertools.count()


@contextmanager
def faulty(inner: str = "memory", **options: Any) -> Iterator[Pair]:
    def make() -> tuple[FaultyTransport, FaultyTransport]:
        one, two = (f"f{next(_names)}" for _ in range(2))
        return FaultyTransport(one, inner=inner, **options), FaultyTransport(two, inner=inner)

    pair = Pair(make)
    try:
        yield pair
    finally:
        pair.close()


def injected(pair: Pair) -> dict[str, int]:
    assert isinstance(pair.source, FaultyTransport)
    return dict(pair.source.injected)


def wrong_bytes(pair: Pair) -> int:
    pairs = zip(pair.target_memory, pair.expected, strict=True)
    return sum(int((a != b).sum()) for a, b in pairs)


@pytest.mark.parametrize("inner", INNER)
def test_corrupt_flips_a_byte_and_leaves_the_source_alone(inner: str) -> None:
    with faulty(inner, corrupt=[1]) as pair:
        before = [memory.copy() for memory in pair.source_memory]
        for number in range(3):
            pair.complete(pair.write([ROW], b"x"))
            assert wrong_bytes(pair) == (number == 1)
        pair.wait(lambda: len(pair.notices) == 3, "all notices")
        assert all(np.array_equal(a, b) for a, b in zip(before, pair.source_memory, strict=True))
        assert injected(pair) == {"corrupt": 1}


@pytest.mark.parametrize("row", [(0, 0, 0, 0, 1, 1, 0, 0), (1, 9, 1, 7, 8, 2, 8, 9)])
def test_corrupt_takes_the_shortest_ranges(row: tuple[int, ...]) -> None:
    with faulty(corrupt=1.0) as pair:
        pair.complete(pair.write([row]))  # type: ignore[list-item]
        assert wrong_bytes(pair) == 1


@pytest.mark.parametrize("inner", INNER)
def test_partial_lands_some_bytes_fails_and_is_not_notified(inner: str) -> None:
    with faulty(inner, partial=[0]) as pair:
        handle = pair.write([ROW], b"partial")
        assert pair.finish(handle) is not Status.DONE
        assert "injected" in (handle.error() or "")
        pair.wait(lambda: handle.status() is Status.DRAINED, "drained")
        assert wrong_bytes(pair) > 1_000
        assert np.array_equal(pair.target_memory[0][11:1_011], pair.expected[0][11:1_011])
        pair.complete(pair.source.write(pair.peer, pack([ROW]), b"whole"))
        pair.wait(lambda: bool(pair.notices), "a notice")
        assert pair.notices == [b"whole"]
        pair.compare("after a write without faults")


@pytest.mark.parametrize("inner", INNER)
def test_a_lost_notice_leaves_the_bytes(inner: str) -> None:
    with faulty(inner, lose_notice=[0, 2]) as pair:
        for number in range(4):
            pair.complete(pair.write([ROW], bytes([number])))
        pair.wait(lambda: len(pair.notices) == 2, "two notices")
        assert sorted(pair.notices) == [b"\1", b"\3"]
        pair.compare("after lost notices")


def test_an_error_posts_nothing_and_is_drained() -> None:
    with faulty(error=[0]) as pair:
        handle = pair.source.write(pair.peer, pack([ROW]), b"x")
        assert [handle.status() for _ in range(3)] == [
            Status.ERROR,
            Status.DRAINED,
            Status.DRAINED,
        ]
        pair.compare("after an error")
        assert not pair.notices


def test_a_delayed_write_lands_after_its_polls() -> None:
    with faulty(delay=[0], delay_polls=50) as pair:
        handle = pair.write([ROW], b"late")
        for _ in range(49):
            assert handle.status() is Status.PENDING
        assert handle.status() is Status.DONE
        pair.compare("after a delay")


def test_a_delayed_write_does_not_land_after_a_fence() -> None:
    with faulty(delay=[0], delay_polls=3) as pair:
        handle = pair.source.write(pair.peer, pack([ROW]), b"late")
        assert pair.target.fence(pair.back)
        assert pair.finish(handle) is Status.DRAINED
        pair.compare("after a fence")


@pytest.mark.parametrize("inner", INNER)
def test_disconnect_closes_the_peer_and_reports_it(inner: str) -> None:
    with faulty(inner, disconnect=[1]) as pair:
        pair.complete(pair.write([ROW]))
        handle = pair.source.write(pair.peer, pack([ROW]), b"x")
        assert pair.finish(handle) is not Status.DONE
        assert list(pair.source.lost()) == [pair.peer]


def test_probabilities_repeat_with_the_seed() -> None:
    def run(seed: int) -> list[Status]:
        with faulty(error=0.3, lose_notice=0.3, seed=seed) as pair:
            rows = random_rows(pair.random, 40)
            ends = [pair.finish(pair.write([row])) for row in rows]
            assert 0 < injected(pair)["error"] == 40 - ends.count(Status.DONE) < 40
            return ends

    assert run(1) == run(1)
    assert run(1) != run(2)


@pytest.mark.parametrize("schedule", [1.5, -0.1, "often", ["0"]])
def test_a_schedule_that_is_none_is_refused(schedule: Any) -> None:
    with pytest.raises(ConfigError, match="corrupt must be"):
        FaultyTransport("x", corrupt=schedule)

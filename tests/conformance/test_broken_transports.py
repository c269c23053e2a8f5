"""The kit can fail: each broken transport is caught by its case, and by none before it."""

from dataclasses import replace

import pytest

from kvbaton.connectors.base import Capabilities, Peer, Ranges, Transport
from kvbaton.connectors.transports.memory import MemoryHandle, MemoryHub, MemoryTransport
from kvbaton.testing.check import Subject
from kvbaton.testing.kit import CaseVerdict, Outcome, run_case
from kvbaton.testing.transport_rig import Pair, fresh_name, pair_of
from tests.connectors_broken.transports import BROKEN


def first_failure(broken: type[MemoryTransport]) -> Outcome | None:
    def make_rig() -> Pair:
        hub = MemoryHub()

        def make() -> tuple[Transport, Transport]:
            return broken(fresh_name(), hub=hub), broken(fresh_name(), hub=hub)

        return Pair(make, patience=0.3)

    for case in Subject("memory", "transport").cases():
        outcome = run_case(case, make_rig, limit=10.0)
        if outcome.verdict in (CaseVerdict.FAILED, CaseVerdict.BROKE):
            return outcome
    return None


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_the_first_case_to_fail_is_the_one_for_it(broken: type[MemoryTransport]) -> None:
    failure = first_failure(broken)
    assert failure is not None
    assert (failure.case, failure.verdict) == (BROKEN[broken], CaseVerdict.FAILED), failure.text


def test_done_is_not_believed_of_a_process_that_is_stopped() -> None:
    spec = "tests.connectors_broken.processes:DoneWhenSent"
    cases = {case.id: case for case in Subject(spec, "transport").cases()}
    outcome = run_case(cases["L3.a-stopped-target"], lambda: pair_of(spec), limit=60.0)
    assert outcome.verdict is CaseVerdict.FAILED, outcome.text
    assert "its bytes are not there" in outcome.text


def test_the_transport_that_they_mutate_passes() -> None:
    assert first_failure(MemoryTransport) is None


@pytest.mark.parametrize("most", [1, 7])
def test_the_kit_asks_no_more_than_is_declared(most: int) -> None:
    class TakesFewRanges(MemoryTransport):
        @property
        def capabilities(self) -> Capabilities:
            return replace(super().capabilities, max_ranges=most)

        def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
            assert ranges.ndim != 2 or len(ranges) <= most
            return super().write(peer, ranges, notice)

    assert first_failure(TakesFewRanges) is None

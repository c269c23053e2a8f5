"""The kit can fail: each broken transport is caught by its case, and by none before it."""

from dataclasses import replace

import pytest

from kvbaton.connectors.base import Peer, Ranges, Transport
from kvbaton.connectors.transports.memory import MemoryHandle, MemoryHub, MemoryTransport
from kvbaton.testing.check import Subject
from kvbaton.testing.kit import CaseVerdict, Outcome, run_case
from kvbaton.testing.transport_rig import Pair, fresh_name
from tests.connectors_broken.transports import BROKEN, Prepares


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


BETWEEN_PROCESSES = {
    "DoneWhenSent": ("L3.a-stopped-target", "its bytes are not there"),
    "DoneWhenBroken": ("L3.a-killed-target", "a write to the killed can't be done"),
    "DrainedWhenHungUp": ("L3.a-stopped-target", "landed after it had DRAINED"),
    "TakesHalfCloses": ("L3.a-killed-idle-target", "a dead peer is lost: not in time"),
    "AdmitsOldCards": ("L2.fence", "dials once more"),
}
"""Each transport, the case that must catch it, and what that says."""


@pytest.mark.parametrize("broken", BETWEEN_PROCESSES)
def test_its_case_catches_what_breaks_between_processes(broken: str) -> None:
    spec = f"tests.connectors_broken.processes:{broken}"
    subject = Subject(spec, "transport")
    (case,) = (case for case in subject.cases() if case.id == BETWEEN_PROCESSES[broken][0])
    outcome = subject.run(case)
    assert outcome.verdict is CaseVerdict.FAILED, outcome
    assert BETWEEN_PROCESSES[broken][1] in outcome.text


@pytest.mark.parametrize("sound", [MemoryTransport, Prepares])
def test_the_transports_that_they_mutate_pass(sound: type[MemoryTransport]) -> None:
    assert first_failure(sound) is None


@pytest.mark.parametrize("most", [1, 7])
def test_the_kit_asks_no_more_than_is_declared(most: int) -> None:
    class TakesFewRanges(MemoryTransport):
        capabilities = replace(MemoryTransport.capabilities, max_ranges=most)

        def write(self, peer: Peer, ranges: Ranges, notice: bytes) -> MemoryHandle:
            assert ranges.ndim != 2 or len(ranges) <= most
            return super().write(peer, ranges, notice)

    assert first_failure(TakesFewRanges) is None

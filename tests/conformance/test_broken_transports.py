"""The kit can fail: each broken transport is caught by its case, and by none before it."""

from dataclasses import replace

import pytest

from kvbaton.connectors.base import Peer, Ranges, Transport
from kvbaton.connectors.transports.memory import MemoryHandle, MemoryHub, MemoryTransport
from kvbaton.testing.check import Subject
from kvbaton.testing.kit import CaseVerdict, Outcome, run_case
from kvbaton.testing.transport_rig import Pair, fresh_name
from tests.connectors_broken.transports import BROKEN, Prepares

PATIENCE_S = 0.3
LONG_PATIENCE_S = 3.0
"""Where most cases are to pass, on a machine that has other things to do."""
CASES = {case.id: case for case in Subject("memory", "transport").cases()}


def outcome_of(case: str, broken: type[MemoryTransport], patience: float) -> Outcome:
    def make_rig() -> Pair:
        hub = MemoryHub()

        def make() -> tuple[Transport, Transport]:
            return broken(fresh_name(), hub=hub), broken(fresh_name(), hub=hub)

        return Pair(make, patience=patience)

    return run_case(CASES[case], make_rig, limit=30.0)


def first_failure(broken: type[MemoryTransport]) -> Outcome | None:
    for case in CASES:
        outcome = outcome_of(case, broken, LONG_PATIENCE_S)
        if outcome.verdict in (CaseVerdict.FAILED, CaseVerdict.BROKE):
            return outcome
    return None


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_its_case_catches_it(broken: type[MemoryTransport]) -> None:
    outcome = outcome_of(BROKEN[broken], broken, PATIENCE_S)
    assert outcome.verdict is CaseVerdict.FAILED, outcome.text


@pytest.mark.slow
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_no_case_before_it_does(broken: type[MemoryTransport]) -> None:
    failure = first_failure(broken)
    assert failure is not None
    assert (failure.case, failure.verdict) == (BROKEN[broken], CaseVerdict.FAILED), failure.text


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *(("register", "a Region"), ("card", "bytes"), ("connect", "a Peer")),
        *(("write", "a Handle"), ("notices", "a sequence of Notice")),
    ],
)
def test_an_answer_of_a_wrong_type_is_the_transports_failure_in_every_case(
    method: str, kind: str
) -> None:
    """It was the kit's, which went on with it until something did not fit."""
    broken = type("Silent", (MemoryTransport,), {method: lambda self, *words: None})
    for case in ("L1.empty-write", "L1.notice-lengths"):
        outcome = outcome_of(case, broken, PATIENCE_S)
        assert outcome.verdict is CaseVerdict.FAILED, outcome.text
        assert outcome.text == f"{method} answered None, which is not {kind}"


BETWEEN_PROCESSES = {
    "DoneWhenSent": ("L3.a-stopped-target", "its bytes are not there"),
    "WaitsInWrite": ("L3.a-stopped-target", "write took "),
    "DoneWhenBroken": ("L3.a-killed-target", "a write to the killed can't be done"),
    "DrainedWhenHungUp": ("L3.a-stopped-target", "landed after it had DRAINED"),
    "TakesHalfCloses": ("L3.a-killed-idle-target", "a dead peer is lost: not within"),
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

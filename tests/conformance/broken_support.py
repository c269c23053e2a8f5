"""Runs the kit over connectors that are broken on purpose."""

from __future__ import annotations

from kvbaton.testing.check import Subject
from kvbaton.testing.kit import CaseVerdict, Outcome

LIMIT_S = 60.0


def first_failure(subject: Subject) -> Outcome | None:
    for case in subject.cases(level=5):
        outcome = subject.run(case, LIMIT_S)
        if outcome.verdict in (CaseVerdict.FAILED, CaseVerdict.BROKE):
            return outcome
    return None


def expect_first_failure(subject: Subject, case: str) -> None:
    failure = first_failure(subject)
    assert failure is not None, "nothing has caught it"
    assert (failure.case, failure.verdict) == (case, CaseVerdict.FAILED), failure.text


def expect_caught(subject: Subject, case: str) -> None:
    (its_case,) = (other for other in subject.cases(level=5) if other.id == case)
    outcome = subject.run(its_case, LIMIT_S)
    assert outcome.verdict is CaseVerdict.FAILED, outcome.text

"""The kit as pytest classes, for a connector's own test suite.

One class has all cases::

    class TestMyStore(StoreTests):
        spec = 'my_package:MyStore:{"path": "{tmp}"}'

If the spec is only known while tests run, define a fixture named ``spec`` in the class.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from kvbaton.testing.check import Subject, make_subject
from kvbaton.testing.kit import Case, CaseVerdict, KitBroke, Outcome


class _Suite:
    """Common base of the classes for stores and transports.

    Attributes:
        spec: See `Subject`.
        back_door: See `Subject`.
        depth: See `Subject`.
        limit: Time limit of each case in seconds; None for the default of `Subject.run`.
    """

    spec: Any = ""
    back_door: ClassVar[Any] = None
    depth: ClassVar[int] = 1
    limit: ClassVar[float | None] = None

    @pytest.fixture(name="spec")
    def _spec(self) -> str:
        return str(self.spec)

    def check(self, spec: str, kind: str, case: Case[Any]) -> None:
        """Run a case and report its outcome to pytest."""
        subject = make_subject(spec, kind, depth=self.depth)
        subject = replace(subject, back_door=type(self).back_door)
        tell_pytest(subject.run(case, self.limit))


def _params(kind: str) -> list[Any]:
    """All cases of a kind; those that take long have the marker ``slow``."""
    return [
        pytest.param(case, id=case.id, marks=[pytest.mark.slow] if case.slow else [])
        for case in Subject("", kind).cases()
    ]


class StoreTests(_Suite):
    """All cases for stores."""

    @pytest.mark.parametrize("case", _params("store"))
    def test_store(self, spec: str, case: Case[Any]) -> None:
        """One case."""
        self.check(spec, "store", case)


class TransportTests(_Suite):
    """All cases for transports."""

    @pytest.mark.parametrize("case", _params("transport"))
    def test_transport(self, spec: str, case: Case[Any]) -> None:
        """One case."""
        self.check(spec, "transport", case)


def tell_pytest(outcome: Outcome) -> None:
    """Pass, skip or fail the running test; raise `KitBroke` if the kit broke."""
    if outcome.verdict is CaseVerdict.SKIPPED:
        pytest.skip(outcome.text)
    if outcome.verdict is CaseVerdict.FAILED:
        pytest.fail(f"{outcome.case}: {outcome.law}\n{outcome.text}", pytrace=False)
    if outcome.verdict is CaseVerdict.BROKE:
        raise KitBroke(outcome.text)

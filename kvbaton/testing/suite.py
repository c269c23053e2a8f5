"""The kit as test classes, for a connector's own suite of tests.

One class is a whole suite::

    class TestMyStore(StoreTests):
        spec = 'my_package:MyStore:{"path": "{tmp}"}'

A spec that is known only while tests run comes from a fixture named ``spec`` in the class.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from kvbaton.testing.check import Subject
from kvbaton.testing.kit import Case, CaseVerdict, KitBroke, Outcome


class _Suite:
    """What both kinds share.

    Attributes:
        spec: see `Subject`.
        back_door: see `Subject`.
        depth: see `Subject`.
        limit: seconds for each case; None for that of `Subject.run`.
    """

    spec: Any = ""
    back_door: ClassVar[Any] = None
    depth: ClassVar[int] = 1
    limit: ClassVar[float | None] = None

    @pytest.fixture(name="spec")
    def _spec(self) -> str:
        return str(self.spec)

    def check(self, spec: str, kind: str, case: Case[Any]) -> None:
        """Run a case and pass its outcome on to pytest."""
        subject = Subject(spec, kind, type(self).back_door, self.depth)
        tell_pytest(subject.run(case, self.limit))


def _params(kind: str) -> list[Any]:
    """All cases; those that take long have the marker ``slow``."""
    return [
        pytest.param(case, id=case.id, marks=[pytest.mark.slow] if case.slow else [])
        for case in Subject("", kind).cases()
    ]


class StoreTests(_Suite):
    """Every case of a store."""

    @pytest.mark.parametrize("case", _params("store"))
    def test_store(self, spec: str, case: Case[Any]) -> None:
        """One case."""
        self.check(spec, "store", case)


class TransportTests(_Suite):
    """Every case of a transport."""

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

"""A store that is not `shared` may lock its folder: the kit never has it open twice at a time."""

from __future__ import annotations

import pytest

from kvbaton.testing.check import make_subject
from kvbaton.testing.kit import Case, CaseVerdict
from kvbaton.testing.store_rig import StoreRig
from tests.conformance.broken_support import LIMIT_S

SUBJECT = make_subject(
    'tests.support.exclusive_store:ExclusiveStore:{"path": "{tmp}/kv"}', kind="store"
)
CASES = [case for case in SUBJECT.cases() if case.level in (0, 3) or "gives-everything" in case.id]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_store_for_one_process_at_a_time_is_checked_as_such(case: Case[StoreRig]) -> None:
    outcome = SUBJECT.run(case, LIMIT_S)
    assert outcome.verdict in (CaseVerdict.PASSED, CaseVerdict.SKIPPED), outcome.text

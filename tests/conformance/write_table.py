"""Run the kit over the built-in connectors and write the table in docs/connectors.md.

``python -m tests.conformance.write_table [NAME...]``: over those of these names, or over all that
this environment has; the rows of others stay.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvbaton.testing.check import Subject, print_outcome, write_json
from kvbaton.testing.kit import CaseVerdict, Outcome
from tests.conformance import test_stores_conform as stores
from tests.conformance import test_transports_conform as transports
from tests.conformance.table import main as write_table
from tests.conformance.test_remote_stores_conform import LIMITS, REMOTE

PAGE = Path(__file__).parents[2] / "docs" / "connectors.md"
SUBJECTS = [
    *(Subject(suite.spec, "store", suite.back_door) for suite in stores.BUILT_IN),
    *(Subject(suite.spec, "transport") for suite in transports.BUILT_IN),
]


def main(names: list[str]) -> None:
    """See the module."""
    with tempfile.TemporaryDirectory() as folder:
        reports = list[Path]()

        def report(subject: Subject, limits: Mapping[str, str]) -> None:
            reports.append(Path(folder, f"{len(reports)}.json"))
            write_json(subject, _outcomes(subject, limits), reports[-1])

        for subject in SUBJECTS:
            if not names or subject.spec.partition(":")[0] in names:
                report(subject, {})
        for name, serve in REMOTE.items():
            if names and name not in names:
                continue
            try:
                with serve(Path(folder)) as spec:
                    report(Subject(spec, "store"), LIMITS.get(name, {}))
            except pytest.skip.Exception as reason:
                print(f"{name} keeps its row: {reason}")
        write_table([str(PAGE), *map(str, reports)])


def _outcomes(subject: Subject, limits: Mapping[str, str]) -> list[Outcome]:
    print(f"{subject.kind} {subject.spec}")
    outcomes = []
    for case in subject.cases():
        reason = limits.get(case.id)
        if reason is None:
            outcomes.append(subject.run(case))
        else:
            outcomes.append(Outcome(case.id, case.law, CaseVerdict.SKIPPED, reason))
        print_outcome(outcomes[-1])
    return outcomes


if __name__ == "__main__":
    main(sys.argv[1:])

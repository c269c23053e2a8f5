"""Run the kit over the built-in connectors and write the table in docs/connectors.md.

``python -m tests.conformance.write_table [REPORT...]``: further reports, of connectors that need a
server, become rows as well.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from kvbaton.testing.check import run_cases
from kvbaton.testing.report import Report
from kvbaton.testing.subject import Subject
from kvbaton.testing.table import main as write_table
from tests.conformance import test_stores_conform as stores
from tests.conformance import test_transports_conform as transports

PAGE = Path(__file__).parents[2] / "docs" / "connectors.md"
SUBJECTS = [
    *(Subject(suite.spec, "store", suite.back_door) for suite in stores.BUILT_IN),
    *(Subject(suite.spec, "transport") for suite in transports.BUILT_IN),
]


def main() -> None:
    """See the module."""
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder, f"{number}.json") for number in range(len(SUBJECTS))]
        for subject, path in zip(SUBJECTS, reports, strict=True):
            print(f"{subject.kind} {subject.spec}")
            report = Report(subject, tuple(run_cases(subject, level=5, limit=120.0)))
            report.write_json(path)
        write_table([str(PAGE), *map(str, reports), *sys.argv[1:]])


if __name__ == "__main__":
    main()

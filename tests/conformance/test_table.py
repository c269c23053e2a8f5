"""The table in docs/connectors.md tells what the kit checks of the connectors as they are now."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvbaton.testing.check import Subject, main
from kvbaton.testing.kit import CaseVerdict
from tests.conformance.table import BEGIN, END, row, table
from tests.conformance.table import main as write_table
from tests.conformance.test_remote_stores_conform import LIMITS, REMOTE
from tests.conformance.write_table import PAGE, SUBJECTS


def planned_row(subject: Subject, limits: Mapping[str, str]) -> str:
    """The row of a connector that passes all that applies, without running any case."""
    results = []
    with subject.rig() as rig:
        for case in subject.cases(level=5):
            reasons = [reason for need in case.needs if (reason := rig.lacks(need)) is not None]
            reasons = [limits[case.id]] if case.id in limits else reasons
            verdict = CaseVerdict.SKIPPED if reasons else CaseVerdict.PASSED
            results.append((case.id, verdict, "".join(reasons[:1])))
    return row(subject.kind, subject.spec, results)


def expect_row(subject: Subject, limits: Mapping[str, str]) -> None:
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert planned_row(subject, limits) in text.splitlines(), (
        "the table is old: python -m tests.conformance.write_table writes it anew"
    )


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.spec)
def test_the_page_has_the_row_of(subject: Subject) -> None:
    expect_row(subject, {})


@pytest.mark.filterwarnings("ignore:.*LoggingHandler.*:DeprecationWarning")
@pytest.mark.parametrize("store", REMOTE)
def test_the_page_has_the_row_of_remote(store: str, tmp_path: Path) -> None:
    with REMOTE[store](tmp_path) as spec:
        expect_row(Subject(spec, "store"), LIMITS.get(store, {}))


def test_rows_without_a_report_stay() -> None:
    old = ["| store `kept` | 1 |", "| store `memory` | 1 |", "| --- |"]
    new = {"kind": "store", "spec": "memory", "cases": []}
    kept, renewed = table([new], old)[2:]
    assert kept == old[0]
    assert renewed.startswith("| store `memory` | - |")


def test_a_report_becomes_a_row(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    spec = "tests.connectors_broken.stores:FindsEverything"
    assert main(Subject(spec, "store"), level=0, json_path=report) == 1
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_table([str(page), str(report)])
    lines = page.read_text().splitlines()
    assert lines[:2] == ["before", BEGIN]
    assert lines[-2:] == [END, "after"]
    assert "**L0.a-miss-is-no-error failed**" in lines[4]
    assert lines[2:-2] == table([json.loads(report.read_text())])

"""docs/compatibility.md tells of the matrix as it is, and of nothing that failed."""

from __future__ import annotations

from pathlib import Path

from tests.matrix.cells import ALL, REFUSED
from tests.matrix.page import BEGIN, END, read_reports, tables

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def test_the_page_has_every_cell() -> None:
    generated = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    every = dict.fromkeys([*(cell.id for cell in ALL), *REFUSED], True)
    assert generated == tables(every).strip(), "the page is old: make test-matrix writes it anew"


def test_a_failure_in_any_report_is_told(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    bad, good = ALL[0].id, ALL[1].id
    name = "test_what_cannot_pair_is_refused_by_name"
    report.write_text(
        "<testsuites><testsuite>"
        f'<testcase name="test_every_cell[{bad}]"><failure/></testcase>'
        f'<testcase name="test_every_cell[{good}]"/>'
        f'<testcase name="{name}[dtypes-fail]"/>'
        f'<testcase name="{name}[dtypes-recompute]"><error/></testcase>'
        "</testsuite></testsuites>"
    )
    passed = read_reports([report])
    assert passed == {bad: False, good: True, "dtypes": False}
    told = tables(dict.fromkeys([*(cell.id for cell in ALL), *REFUSED], True) | passed)
    assert told.count("❌") > 1

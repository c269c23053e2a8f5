"""Write the table of results into a page: ``python -m tests.conformance.table PAGE REPORT...``.

The reports are what ``kvbaton connectors check SPEC --json REPORT`` wrote. The table stands between
two markers in the page; a cell tells how many cases of a level passed and which failed, the column
behind them why others did not apply. Rows of connectors without a report stay as they are.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvbaton.connectors.registry import STORES, split_spec
from kvbaton.testing.kit import LEVELS, CaseVerdict

BEGIN, END = "<!-- conformance:begin -->", "<!-- conformance:end -->"

Results = Iterable[tuple[str, CaseVerdict, str]]
"""Case, how it ended, and why."""


def main(words: Sequence[str]) -> int:
    """See the module."""
    page, *reports = map(Path, words)
    before, _, rest = page.read_text().partition(BEGIN)
    old, _, after = rest.partition(END)
    lines = table([json.loads(report.read_text()) for report in reports], old.splitlines())
    page.write_text("\n".join([before + BEGIN, *lines, END]) + after)
    return 0


def table(reports: Sequence[dict[str, Any]], old: Sequence[str] = ()) -> list[str]:
    """A Markdown table of reports as read from JSON, and of rows of an old one."""
    heads = [f"L{number} {about}" for number, about in enumerate(LEVELS)]
    rows = [line for line in old if line.startswith(("| store `", "| transport `"))]
    for report in reports:
        results = [(c["case"], CaseVerdict(c["verdict"]), c["text"]) for c in report["cases"]]
        new = row(report["kind"], report["spec"], results)
        rows = [line for line in rows if line.split("|")[1] != new.split("|")[1]] + [new]
    return [
        f"| connector | {' | '.join(heads)} | does not apply |",
        f"| --- |{' --- |' * (len(heads) + 1)}",
        *sorted(rows),
    ]


def row(kind: str, spec: str, results: Results) -> str:
    """One connector's row."""
    cells: list[list[str]] = [[] for _ in LEVELS]
    passed, reasons = Counter[int](), Counter[str]()
    for case, verdict, text in results:
        level = int(case[1])
        if verdict is CaseVerdict.PASSED:
            passed[level] += 1
        elif verdict is CaseVerdict.SKIPPED:
            reasons[text.removeprefix("not declared: ").partition(" (")[0]] += 1
        else:
            cells[level].append(f"**{case} {verdict.value}**")
    texts = [" ".join([str(passed[i] or "-"), *cell]) for i, cell in enumerate(cells)]
    why = ", ".join(f"{reason} ({count})" for reason, count in sorted(reasons.items()))
    return f"| {kind} {_name(spec)} | {' | '.join(texts)} | {why} |"


def _name(spec: str) -> str:
    target, options = split_spec(spec, STORES)
    inner = options.get("inner")
    if not isinstance(inner, str):
        return f"`{target}`"
    return f"`{target}` over {_name(inner)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""``kvbaton connectors check SPEC``: run the conformance kit over one connector, and report."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvbaton.testing.kit import LEVELS, Outcome, Verdict
from kvbaton.testing.report import Report, print_outcome
from kvbaton.testing.subject import Subject, make_subject

PASSED, FAILED, BROKE = 0, 1, 3
"""Exit statuses; 2 is for a wrong setting."""


def main(
    spec: str,
    *,
    kind: str | None = None,
    level: int = len(LEVELS) - 1,
    back_door: str | None = None,
    depth: int = 1,
    seed: int = 0,
    limit: float = 120.0,
    json_path: Path | None = None,
    junit_path: Path | None = None,
) -> int:
    """Check a connector, print the report and write it to files.

    Args:
        spec: as ``--store`` or ``--transport`` takes it; ``{tmp}`` in it becomes an empty folder,
            another one for each case.
        kind: ``"store"`` or ``"transport"``; None to find out.
        level: the highest level to check, 0 to 5.
        back_door: ``package.module:Class`` of a `BackDoor`, for stores.
        depth: multiplies examples, repetitions and seconds.
        seed: of everything random but the keys, which are new in every run.
        limit: seconds after which a case has failed.
        json_path: where to write the report as JSON.
        junit_path: where to write it as JUnit XML.

    Returns:
        0 if nothing failed, 1 if a case failed, 3 if none did but the kit broke.

    Raises:
        ConfigError: the spec names no connector, or one that can't be built or opened.
    """
    subject = make_subject(spec, kind, back_door=back_door, depth=depth, seed=seed)
    subject.probe()
    print(f"{subject.kind} {spec}", flush=True)
    outcomes = run_cases(subject, level, limit)
    report = Report(subject, tuple(outcomes))
    print(report.summary(), flush=True)
    if json_path is not None:
        report.write_json(json_path)
    if junit_path is not None:
        report.write_junit(junit_path)
    status = exit_status(outcomes)
    if any(outcome.hung for outcome in outcomes):
        # The interpreter would wait at its end for the threads of what hangs.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def exit_status(outcomes: list[Outcome]) -> int:
    """See `main`."""
    verdicts = {outcome.verdict for outcome in outcomes}
    if Verdict.FAILED in verdicts:
        return FAILED
    return BROKE if Verdict.BROKE in verdicts else PASSED


def run_cases(subject: Subject, level: int, limit: float) -> list[Outcome]:
    """Run all cases up to a level, and print each outcome."""
    outcomes = []
    for case in subject.cases(level):
        outcomes.append(subject.run(case, limit))
        print_outcome(outcomes[-1])
    return outcomes

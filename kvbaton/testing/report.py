"""The report of a run: on the screen, as JSON, as JUnit XML."""

from __future__ import annotations

import json
import platform
from collections import Counter
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from kvbaton.testing.kit import Outcome, Verdict
from kvbaton.testing.subject import Subject

SCHEMA = 1
"""Of the JSON report."""

_SHOWN = {
    Verdict.PASSED: "passed ",
    Verdict.FAILED: "FAILED ",
    Verdict.SKIPPED: "skipped",
    Verdict.BROKE: "KIT BROKE",
}


def print_outcome(outcome: Outcome) -> None:
    """One line per case; more if there is more to say."""
    line = f"  {_SHOWN[outcome.verdict]} {outcome.case:<40} {outcome.seconds:7.2f} s"
    if outcome.verdict is Verdict.SKIPPED:
        line += f"  ({outcome.text})"
    print(line, flush=True)
    if outcome.verdict in (Verdict.FAILED, Verdict.BROKE):
        told = [f"law: {outcome.law}", *outcome.text.splitlines()]
        print("\n".join(f"          {text}" for text in told), flush=True)


@dataclass(frozen=True)
class Report:
    """All outcomes of one run over one connector."""

    subject: Subject
    outcomes: tuple[Outcome, ...]

    def counts(self) -> Counter[Verdict]:
        """How many cases ended in each way."""
        return Counter(outcome.verdict for outcome in self.outcomes)

    def summary(self) -> str:
        """One line."""
        counts = self.counts()
        parts = [f"{counts[verdict]} {verdict.value}" for verdict in Verdict]
        return f"{', '.join(parts)} in {self.seconds():.1f} s"

    def seconds(self) -> float:
        """Of all cases together."""
        return sum(outcome.seconds for outcome in self.outcomes)

    def write_json(self, path: Path) -> None:
        """Everything, for programs."""
        subject = self.subject
        content: dict[str, Any] = {
            "schema": SCHEMA,
            "kind": subject.kind,
            "spec": subject.spec,
            "seed": subject.seed,
            "depth": subject.depth,
            "kvbaton": _version(),
            "python": platform.python_version(),
            "counts": {verdict.value: self.counts()[verdict] for verdict in Verdict},
            "cases": [asdict(o) | {"verdict": o.verdict.value} for o in self.outcomes],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")

    def write_junit(self, path: Path) -> None:
        """What CI systems read: failures and errors (the kit broke) are told apart."""
        counts = self.counts()
        suite = ElementTree.Element(
            "testsuite",
            name=f"{self.subject.kind} {self.subject.spec}",
            tests=str(len(self.outcomes)),
            failures=str(counts[Verdict.FAILED]),
            errors=str(counts[Verdict.BROKE]),
            skipped=str(counts[Verdict.SKIPPED]),
            time=f"{self.seconds():.3f}",
        )
        for outcome in self.outcomes:
            _add_junit(suite, self.subject.kind, outcome)
        path.parent.mkdir(parents=True, exist_ok=True)
        ElementTree.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)


def _add_junit(suite: ElementTree.Element, kind: str, outcome: Outcome) -> None:
    words = {"classname": f"kvbaton.{kind}", "name": outcome.case, "time": f"{outcome.seconds:.3f}"}
    element = ElementTree.SubElement(suite, "testcase", words)
    tags = {Verdict.FAILED: "failure", Verdict.BROKE: "error", Verdict.SKIPPED: "skipped"}
    if outcome.verdict in tags:
        # XML has no way to write control characters, and bytes may be shown in a text.
        text = "".join(c if c.isprintable() or c == "\n" else "?" for c in outcome.text)
        inner = ElementTree.SubElement(element, tags[outcome.verdict], message=outcome.law)
        inner.text = text


def _version() -> str:
    try:
        return version("kvbaton")
    except PackageNotFoundError:
        return "unknown"

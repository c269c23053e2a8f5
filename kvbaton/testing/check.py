"""``kvbaton connectors check SPEC``: run the conformance kit over one connector, and report."""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import kvbaton
from kvbaton.connectors.registry import (
    STORES,
    TRANSPORTS,
    class_of,
    list_connectors,
    load_class,
    split_spec,
)
from kvbaton.connectors.registry import Kind as RegistryKind
from kvbaton.errors import (
    INTERRUPTED,
    ConfigError,
    KvbatonError,
    StoreError,
    TransportError,
    writing,
)
from kvbaton.testing import (
    store_api,
    store_basics,
    store_crash,
    store_extras,
    store_load,
    store_objects,
    store_scale,
    transport_cases,
    transport_processes,
)
from kvbaton.testing.kit import (
    LEVELS,
    THREAD,
    Case,
    CaseFailure,
    CaseVerdict,
    Kit,
    Outcome,
    hangs_in,
    run_case,
    tasks_per_core,
)
from kvbaton.testing.store_rig import (
    MIN_CAPACITY,
    MIN_KEYS,
    STORE_KIT,
    BackDoor,
    StoreRig,
    remove_folders,
)
from kvbaton.testing.transport_rig import TRANSPORT_KIT, pair_of

CASES = (
    *(store_api, store_basics, store_extras, store_objects),
    *(store_load, store_scale, store_crash),
    *(transport_cases, transport_processes),
)
"""Modules of the cases; importing them fills the kits."""

SCHEMA = 2
"""Version of the JSON report."""

EXCLUDED = "excluded"
"""Prefix of the text of cases that the connector's author excludes, with a reason."""

LIMIT_S = 120.0
"""Time limit of a case in seconds."""
SLOW_S = 10.0
"""Seconds above which a case is marked as slow."""

_SHOWN = {
    CaseVerdict.PASSED: "passed ",
    CaseVerdict.FAILED: "FAILED ",
    CaseVerdict.SKIPPED: "skipped",
    CaseVerdict.BROKE: "KIT BROKE",
}


@dataclass(frozen=True)
class Subject:
    """A connector to check, and how thoroughly.

    Attributes:
        spec: Spec as for ``--store`` or ``--transport``; ``{tmp}`` in it becomes an empty folder, a
            new one for each case.
        kind: ``"store"`` or ``"transport"``.
        back_door: Makes a back door from an opened store; None if there is none.
        depth: Factor on the number of examples and repetitions, and on durations.
        seed: Seed of all random values except keys.
        patience: Seconds to wait for each answer on an idle machine; see `tasks_per_core`.
        exclusions: Cases that are not run, with the reasons of the connector's author.
    """

    spec: str
    kind: str
    back_door: Callable[[Any], BackDoor] | None = None
    depth: int = 1
    seed: int = 0
    patience: float = 20.0
    exclusions: Mapping[str, str] = field(default_factory=dict)

    @property
    def registry(self) -> RegistryKind:
        """Registry of the connectors of this kind."""
        return STORES if self.kind == "store" else TRANSPORTS

    def cases(
        self, level: int = len(LEVELS) - 1, only: Sequence[str] = (), *, quick: bool = False
    ) -> list[Case[Any]]:
        """The cases of this kind up to a level.

        Args:
            level: Highest level.
            only: Texts; only cases whose id contains one of them are returned. Empty for all.
            quick: Leave out slow cases.

        Raises:
            ConfigError: A text is in no case's id.
        """
        kit: Kit[Any] = STORE_KIT if self.kind == "store" else TRANSPORT_KIT
        cases = [case for case in kit.cases(level) if not (quick and case.slow)]
        for text in only:
            if not any(text in case.id for case in cases):
                known = ", ".join(case.id for case in cases)
                raise ConfigError("--case", f"no case's name contains {text!r}; known are {known}")
        return [c for c in cases if not only or any(text in c.id for text in only)]

    def rig(self) -> AbstractContextManager[Any]:
        """A fresh rig; entering it opens the connector."""
        patience = self.patience * tasks_per_core()
        pressure: Any = {"seed": self.seed, "depth": self.depth, "patience": patience}
        if self.kind == "store":
            return StoreRig(self.spec, back_door=self.back_door, **pressure)
        return pair_of(self.spec, **pressure)

    def run(self, case: Case[Any], limit: float | None = None) -> Outcome:
        """Run one case over a fresh rig, unless it is excluded.

        `limit` is in seconds; None means `LIMIT_S`, and more on a busy machine.
        """
        if (reason := self.exclusions.get(case.id)) is not None:
            return Outcome(case.id, case.law, CaseVerdict.SKIPPED, f"{EXCLUDED}: {reason}")
        return run_case(case, self.rig, limit or LIMIT_S * tasks_per_core())

    def probe(self) -> None:
        """Check that the connector can be built, opened and closed.

        Raises:
            ConfigError: It can't, or not within the time limit of a case.
        """
        limit, errors = LIMIT_S * tasks_per_core(), list[BaseException]()

        def look() -> None:
            try:
                self._probe()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=look, name=f"{THREAD} probe", daemon=True)
        thread.start()
        thread.join(limit)
        if thread.is_alive():
            told = f"{self.spec} is not built, opened and closed within {limit:g} s; it hangs in"
            raise ConfigError(f"--{self.kind}", f"{told}\n{hangs_in(thread)}")
        if errors:
            raise errors[0]

    def _probe(self) -> None:
        flag = f"--{self.kind}"
        try:
            with self.rig() as rig:
                try:
                    capacity = rig.store.usage().capacity if self.kind == "store" else None
                except Exception:
                    capacity = None  # the cases report that
                if isinstance(capacity, int) and capacity < MIN_CAPACITY:
                    text = f"{self.spec} holds {capacity} bytes; the kit needs {MIN_CAPACITY}"
                    raise ConfigError(flag, text)
                if self.kind == "store" and (n := rig.store.capabilities.max_keys) < MIN_KEYS:
                    text = f"{self.spec} takes {n} keys in a call; the kit needs {MIN_KEYS}"
                    raise ConfigError(flag, text)
        except CaseFailure:
            return  # the store could not be closed: the cases report that
        except (StoreError, TransportError) as error:
            raise ConfigError(flag, f"{self.spec} can't be opened: {error}") from error
        except KvbatonError:
            raise
        except (Exception, SystemExit) as error:
            told = f"{self.spec} can't be opened: {type(error).__name__}: {error}; raised in\n"
            where = traceback.format_tb(error.__traceback__)[-4:]
            raise ConfigError(flag, told + "".join(where).rstrip()) from error


def make_subject(
    spec: str,
    kind: str | None = None,
    *,
    back_door: str | None = None,
    depth: int = 1,
    seed: int = 0,
    exclude: Sequence[str] = (),
) -> Subject:
    """Make a subject from the arguments of a command line.

    Args:
        spec: See `Subject`.
        kind: ``"store"``, ``"transport"``, or None to infer it from the spec.
        back_door: ``package.module:Class``; None for none.
        depth: See `Subject`.
        seed: See `Subject`.
        exclude: Exclusions ``CASE=REASON``, in addition to the connector's attribute
            ``kit_exclusions``.

    Raises:
        ConfigError: The kind can't be inferred, the back door can't be imported, or an exclusion
            has no reason or names no case.
    """
    if kind is None:
        target, _ = split_spec(spec, STORES)
        if ":" in target:
            found, calls = _imported("SPEC", target), {"store": "lookup", "transport": "write"}
            kinds = [kind for kind, call in calls.items() if hasattr(found, call)][:1]
            problem = "has no lookup, as a store, and no write, as a transport; a Backend is given "
            problem += "to a ThreadedStore"
        else:
            named = {kind.noun: list_connectors(kind) for kind in (STORES, TRANSPORTS)}
            kinds = [kind for kind, names in named.items() if target in names]
            known = ", ".join(sorted({name for names in named.values() for name in names}))
            both = "is both a store and a transport: say which kind"
            problem = both if kinds else f"is not installed; {known} are"
        if len(kinds) != 1:
            raise ConfigError("--kind", f"{target!r} {problem}")
        (kind,) = kinds
    door = _imported("--back-door", back_door) if back_door else None
    subject = Subject(spec, kind, door, max(1, depth), seed)
    exclusions = dict(getattr(class_of(subject.registry, spec), "kit_exclusions", {}))
    for text in exclude:
        case, _, reason = text.partition("=")
        if not reason.strip():
            raise ConfigError("--exclude", f"{text!r} is not CASE=REASON")
        exclusions[case] = reason.strip()
    if unknown := exclusions.keys() - {case.id for case in subject.cases()}:
        raise ConfigError("--exclude", f"there is no case {min(unknown)!r}")
    return replace(subject, exclusions=exclusions)


def _imported(flag: str, path: str) -> Any:
    return load_class(flag, EntryPoint(path, path, ""))


def print_outcome(outcome: Outcome) -> None:
    """Print one line per case; for failures also the law and the text."""
    line = f"  {_SHOWN[outcome.verdict]} {outcome.case:<40} {outcome.seconds:7.2f} s"
    if outcome.verdict is CaseVerdict.SKIPPED:
        line += f"  ({outcome.text})"
    elif outcome.seconds > SLOW_S:
        line += "  (slow)"
    print(line, flush=True)
    if outcome.verdict in (CaseVerdict.FAILED, CaseVerdict.BROKE):
        told = [f"law: {outcome.law}", *outcome.text.splitlines()]
        print("\n".join(f"          {text}" for text in told), flush=True)


def not_certified(subject: Subject, outcomes: Sequence[Outcome]) -> list[str]:
    """Reasons why a run without failures is not enough for a certificate; empty if it is.

    Cases skipped because a capability is not declared do not count, nor do cases that the author
    excludes, which are reported separately.
    """
    ran = {outcome.case for outcome in outcomes}
    left_out = sum(case.id not in ran for case in subject.cases())
    why = Counter(
        outcome.text
        for outcome in outcomes
        if outcome.verdict is CaseVerdict.SKIPPED
        and not outcome.text.startswith(("not declared", EXCLUDED))
    )
    told = [f"{text} ({count} case{'s' * (count > 1)})" for text, count in why.items()]
    return [*told, *([f"{left_out} cases were not asked for"] if left_out else [])]


def write_json(subject: Subject, outcomes: Sequence[Outcome], path: Path) -> None:
    """Write the outcomes of a run over one connector as JSON."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": subject.kind,
        "spec": subject.spec,
        "seed": subject.seed,
        "depth": subject.depth,
        "kvbaton": kvbaton.__version__,
        "python": platform.python_version(),
        "not_certified": not_certified(subject, outcomes),
        "counts": {verdict.value: counts[verdict] for verdict in CaseVerdict},
        "cases": [asdict(o) | {"verdict": o.verdict.value} for o in outcomes],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def main(
    subject: Subject,
    *,
    level: int = len(LEVELS) - 1,
    json_path: Path | None = None,
    only: Sequence[str] = (),
    stop_at_failure: bool = False,
    quick: bool = False,
) -> int:
    """Check a connector, print each outcome and write the report to a file.

    Args:
        subject: The connector to check.
        level: Highest level to check, 0 to 5.
        json_path: Path of the JSON report; None for none.
        only: See `Subject.cases`.
        stop_at_failure: Run no case after one that failed.
        quick: See `Subject.cases`.

    Returns:
        0 if the connector is certified, 1 if a case failed, 3 if none failed but the kit broke, 4
        if none failed but cases of declared capabilities did not run, or `INTERRUPTED`.

    Raises:
        ConfigError: The connector can't be built or opened, or a text of `only` names no case.
    """
    cases = subject.cases(level, only, quick=quick)
    outcomes, status, _ = check_all(subject, cases, stop_at_failure=stop_at_failure)
    if json_path is not None:
        with writing("--json"):
            write_json(subject, outcomes, json_path)
    end(outcomes, status)
    return status


def end(outcomes: Sequence[Outcome], status: int) -> None:
    """Exit the process now if a case hangs, as the interpreter would wait for its threads."""
    if any(outcome.hung for outcome in outcomes):
        remove_folders()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def check_all(
    subject: Subject, cases: Sequence[Case[Any]], *, stop_at_failure: bool = False
) -> tuple[list[Outcome], int, str]:
    """Run cases and print each; returns the outcomes, the exit status of `main`, and the verdict.

    Raises:
        ConfigError: The connector can't be built or opened.
    """
    subject.probe()
    print(f"{subject.kind} {subject.spec}", flush=True)
    outcomes: list[Outcome] = []
    interrupted = False
    try:
        for case in cases:
            outcomes.append(subject.run(case))
            print_outcome(outcomes[-1])
            if stop_at_failure and outcomes[-1].verdict is CaseVerdict.FAILED:
                break
    except KeyboardInterrupt:  # report the outcomes so far
        interrupted = True
    counts = Counter(outcome.verdict for outcome in outcomes)
    if slow := [o for o in outcomes if o.seconds > SLOW_S]:
        told = ", ".join(f"{outcome.case} ({outcome.seconds:.0f} s)" for outcome in slow)
        print(f"slow: {told}; most other stores and transports take less than {SLOW_S:g} s")
    told = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in CaseVerdict)
    print(f"{told} in {sum(outcome.seconds for outcome in outcomes):.1f} s", flush=True)
    lacking = not_certified(subject, outcomes)
    if interrupted:
        status, verdict = INTERRUPTED, "interrupted"
    elif counts[CaseVerdict.FAILED] or counts[CaseVerdict.BROKE]:
        status, verdict = (1 if counts[CaseVerdict.FAILED] else 3), "not passed"
    elif lacking:
        status, verdict = 4, f"passed, not certified: {'; '.join(lacking)}"
    else:
        count = sum(outcome.text.startswith(EXCLUDED) for outcome in outcomes)
        status, verdict = 0, "certified" + (f", {count} excluded with a reason" if count else "")
    print(f"{subject.spec}: {verdict}", flush=True)
    return outcomes, status, verdict

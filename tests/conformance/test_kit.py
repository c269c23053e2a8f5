"""The kit's own ways: verdicts told apart, limits, reports, exit statuses, the plugin."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from threading import Event, Thread
from threading import enumerate as enumerate_threads
from typing import Any
from xml.etree import ElementTree

import pytest

from kvbaton.cli import main as command
from kvbaton.connectors.store import Found
from kvbaton.connectors.stores.memory import MemoryStore
from kvbaton.errors import ConfigError, StoreError
from kvbaton.testing import check
from kvbaton.testing.check import Subject, main, make_subject
from kvbaton.testing.kit import THREAD, Case, CaseVerdict, Kit, KitBroke, Outcome, require, run_case
from kvbaton.testing.store_rig import STORE_KIT
from tests.support.few_keys import FEW_KEYS
from tests.support.waiting import PATIENCE_S

BROKEN = "tests.connectors_broken.stores:FindsEverything"


class Bench:
    """A rig without a connector."""

    def lacks(self, need: str) -> str | None:
        return None if need == "air" else f"there is no {need}"


def run(check: Callable[[Bench], object], *needs: str, limit: float = 10.0) -> Outcome:
    def make_rig() -> AbstractContextManager[Bench]:
        return nullcontext(Bench())

    def checked(bench: Bench) -> None:
        check(bench)

    return run_case(Case(0, "L0.any", "a law", needs, checked), make_rig, limit)


def raise_it(error: BaseException) -> None:
    raise error


def test_a_case_that_returns_has_passed() -> None:
    assert run(lambda bench: None, "air").verdict is CaseVerdict.PASSED


def test_a_lack_skips_by_name() -> None:
    outcome = run(lambda bench: require(False, "never"), "air", "water")
    assert (outcome.verdict, outcome.text) == (CaseVerdict.SKIPPED, "there is no water")


def test_what_a_connector_raises_is_its_failure() -> None:
    outcome = run(lambda bench: raise_it(StoreError("out of order")))
    assert outcome.verdict is CaseVerdict.FAILED
    assert "out of order" in outcome.text


def test_what_the_kit_raises_says_nothing_about_the_connector() -> None:
    assert run(lambda bench: raise_it(KitBroke("no process"))).verdict is CaseVerdict.BROKE

    bug = Kit[Bench]().case(0)
    assert run(lambda bench: bug(None)).verdict is CaseVerdict.BROKE  # type: ignore[arg-type]


def test_a_hanging_case_fails_in_time_and_says_where() -> None:
    never = Event()
    start = time.monotonic()
    outcome = run(lambda bench: never.wait(), limit=0.2)
    never.set()
    assert time.monotonic() - start < PATIENCE_S
    assert (outcome.verdict, outcome.hung) == (CaseVerdict.FAILED, True)
    assert "self._cond.wait" in outcome.text


def test_a_case_that_hangs_after_it_failed_tells_both() -> None:
    never = Event()

    @contextmanager
    def make_rig() -> Iterator[Bench]:
        try:
            yield Bench()
        finally:
            never.wait()

    case = Case[Bench](0, "L0.any", "a law", (), lambda bench: require(False, "it is gone"))
    outcome = run_case(case, make_rig, 0.2)
    never.set()
    assert outcome.verdict is CaseVerdict.FAILED
    assert outcome.text.startswith("it is gone\nnot over within 0.2 s; it hangs in\n")


def test_an_error_in_a_thread_fails_the_case() -> None:
    def stumble(bench: Bench) -> None:
        thread = Thread(target=lambda: raise_it(ValueError("unheard")))
        thread.start()
        thread.join()

    outcome = run(stumble)
    assert outcome.verdict is CaseVerdict.FAILED
    assert "unheard" in outcome.text


def test_a_case_that_was_given_up_hides_no_error_of_the_next() -> None:
    never = Event()
    assert run(lambda bench: never.wait(), limit=0.2).hung
    given_up = [thread for thread in enumerate_threads() if thread.name.startswith(THREAD)]

    def stumble(bench: Bench) -> None:
        never.set()
        for old in given_up:
            old.join(PATIENCE_S)
        thread = Thread(target=lambda: raise_it(ValueError("unheard")))
        thread.start()
        thread.join()

    assert run(stumble).verdict is CaseVerdict.FAILED


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("tcp", "transport"),
        ("filesystem", "store"),
        (BROKEN, "store"),
        ("tests.connectors_broken.transports:SpillsOver", "transport"),
    ],
)
def test_the_kind_of_a_spec_is_found(spec: str, kind: str) -> None:
    assert make_subject(spec).kind == kind


@pytest.mark.parametrize(
    ("spec", "options", "says"),
    [
        ("memory", {}, "--kind: 'memory' is both a store and a transport"),
        ("nothing", {}, "--kind: 'nothing' is not installed; .*filesystem,.* tcp,.* are"),
        (f"{__name__}:Bench", {}, "has no lookup, as a store, and no write, as a transport"),
        (f"{__name__}:run", {}, "--kind: .*:run' has no lookup, as a store, and no"),
        ("kvbaton.nowhere:X", {}, "SPEC: can't load kvbaton.nowhere:X"),
        ("memory", {"kind": "store", "back_door": "no.where"}, "--back-door: can't load no.where"),
        ("memory", {"kind": "store", "back_door": "json:__all__"}, "--back-door: .* not a class"),
        ("filesystem", {}, "--store: filesystem does not take these options: missing a required"),
        ('filesystem:{"path": "/proc/none"}', {}, "--store: .* can't be opened"),
    ],
)
def test_a_wrong_setting_is_named(spec: str, options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        main(make_subject(spec, **options))  # type: ignore[arg-type]


class WrongAnswers(MemoryStore):
    """Answers as its author is told to."""

    def __init__(self, name: str, *, call: str, answer: Any) -> None:
        super().__init__(name, max_bytes=16_000_000)
        self._call, self._answer = call, answer

    def _told(self, call: str, right: Future[Any]) -> Future[Any]:
        if self._call.partition(".")[0] != call:
            return right
        wrong: Future[Any] = Future()
        wrong.set_result(Found(tuple(self._answer)) if "." in self._call else self._answer)
        return wrong

    def lookup(self, *words: Any, **options: Any) -> Future[Any]:
        return self._told("lookup", super().lookup(*words, **options))

    def load(self, *words: Any) -> Future[Any]:
        return self._told("load", super().load(*words))

    def delete(self, *words: Any) -> Future[Any]:
        return self._told("delete", super().delete(*words))


@pytest.mark.parametrize(
    ("call", "answer", "says"),
    [
        ("lookup", [True], "lookup answered [True], which is not of type Found with a bool"),
        ("lookup.present", [1], "Found(present=(1,), ticket=None), which is not of type Found"),
        (
            "load",
            [None],
            "load answered [None], which is not of type list with a bool for each of 1 keys",
        ),
        ("load", ["x" * 999], f"load answered ['{'x' * 98}, which is not of type list with"),
        ("delete", None, "delete answered None, which is not of type int"),
        ("delete", True, "delete answered True, which is not of type int"),
    ],
)
def test_an_answer_of_a_wrong_type_is_told_with_the_right_one(
    call: str, answer: Any, says: str
) -> None:
    options = json.dumps({"call": call, "answer": answer})
    subject = make_subject(f"{__name__}:WrongAnswers:{options}")
    (case,) = subject.cases(only=["L0.answers-are-futures"])
    outcome = subject.run(case)
    assert outcome.verdict is CaseVerdict.FAILED
    assert says in outcome.text


def test_modules_that_break_when_they_are_imported_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "breaks_in_kit.py").write_text("class Broken(:")
    with pytest.raises(ConfigError, match="SPEC: can't load breaks_in_kit:X: SyntaxError: inv"):
        make_subject("breaks_in_kit:X")
    with pytest.raises(ConfigError, match="--back-door: can't load breaks_in_kit:X: SyntaxError"):
        make_subject("memory", "store", back_door="breaks_in_kit:X")


def test_reports_that_can_not_be_written_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["memory", "--kind=store"]
    assert command(["connectors", "check", *words, "--level=0", "--json=/dev/full"]) == 2
    assert "error: --json: can't be written: " in capsys.readouterr().err
    monkeypatch.setattr(Subject, "cases", lambda *_, **__: [])  # all of them take long
    assert command(["connectors", "certify", *words, "--out=/dev/full"]) == 2
    assert "error: --out: can't be written: " in capsys.readouterr().err


def test_a_check_that_is_interrupted_tells_what_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Subject.run

    def interrupted(subject: Subject, case: Case[Any]) -> Outcome:
        if case.id == "L0.close-twice":
            raise KeyboardInterrupt
        return run(subject, case)

    monkeypatch.setattr(Subject, "run", interrupted)
    cases = ("L0.a-miss-is-no-error", "L0.close-twice", "L1.outlives-close")
    path = tmp_path / "report.json"
    assert main(make_subject("memory", "store"), only=cases, json_path=path) == 130
    told = json.loads(path.read_text())
    assert [case["case"] for case in told["cases"]] == ["L0.a-miss-is-no-error"]
    monkeypatch.setattr(Subject, "cases", lambda *_: STORE_KIT.cases(0))
    words = ["connectors", "certify", "memory", "--kind=store", f"--out={tmp_path}"]
    assert command(words) == 130
    assert list(tmp_path.iterdir()) == [path], "a certificate of before may lie there"


@pytest.mark.parametrize("level", [-1, 6])
def test_a_level_that_is_none_is_refused(level: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was checked, and that had passed."""
    with pytest.raises(SystemExit, match="2"):
        command(["connectors", "check", "memory", "--kind=store", f"--level={level}"])
    assert f"--level: invalid choice: {level}" in capsys.readouterr().err


def test_check_reports_on_screen_and_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_path = tmp_path / "deep" / "report.json"
    cases = ("L0.a-miss-is-no-error", "L0.close-twice", "L1.outlives-close")
    assert main(make_subject(BROKEN), only=cases, json_path=json_path) == 1
    shown = capsys.readouterr().out
    assert "FAILED  L0.a-miss-is-no-error" in shown
    assert "law: For keys that nobody stored" in shown
    assert "skipped L1.outlives-close" in shown
    assert " 0 kit broke in " in shown.splitlines()[-2]
    assert shown.splitlines()[-1].endswith(": not passed")
    report = json.loads(json_path.read_text())
    verdicts = {case["case"]: case["verdict"] for case in report["cases"]}
    assert verdicts["L0.a-miss-is-no-error"] == "failed"
    assert verdicts["L1.outlives-close"] == "skipped"
    assert report["counts"]["failed"] == list(verdicts.values()).count("failed")


def test_a_part_of_the_kit_certifies_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(make_subject("memory", "store"), level=0) == 4
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"memory: passed, not certified: \d+ cases were not asked for", last)


def test_what_a_transport_does_not_declare_is_skipped_by_name() -> None:
    subject = make_subject("memory", "transport")
    (case,) = subject.cases(only=["L2.prepared-writes"])
    outcome = subject.run(case)
    assert (outcome.verdict, outcome.text) == (CaseVerdict.SKIPPED, "not declared: prepare")


LONG = ("random-schedule", "memory-stays-level", "small-objects-in-a-race", "done-once")


@pytest.mark.parametrize(
    "case",
    [c for c in STORE_KIT.cases() if not c.slow and not c.id.endswith(LONG)],
    ids=lambda case: case.id,
)
def test_a_store_is_given_no_more_keys_in_a_call_than_it_takes(
    case: Case[Any],
) -> None:
    """It was told that it had failed."""
    outcome = Subject(FEW_KEYS, "store").run(case)
    assert outcome.verdict in (CaseVerdict.PASSED, CaseVerdict.SKIPPED), outcome.text


def test_a_store_of_too_few_keys_is_refused() -> None:
    spec = f'{FEW_KEYS}:{{"max_keys": 3}}'
    with pytest.raises(ConfigError, match="takes 3 keys in a call; the kit needs 4"):
        Subject(spec, "store").probe()


def test_a_store_that_hangs_does_not_hang_the_command(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(
        "import threading\n"
        "from kvbaton.connectors.stores.memory import MemoryStore\n"
        "class Hangs(MemoryStore):\n"
        "    def load(self, keys, targets):\n"
        "        return self._pool('load').submit(threading.Event().wait)\n"
    )
    code = (
        "from kvbaton.testing import check; import sys\n"
        "check.LIMIT_S, check.tasks_per_core = 0.5, lambda: 1.0\n"
        "sys.exit(check.main(check.make_subject('hanging:Hangs'), level=0))"
    )
    (temporary := tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert "not over within 0.5 s; it hangs in" in done.stdout
    assert list(temporary.iterdir()) == []


class Late(MemoryStore):
    """Hangs in one of its calls until it may go on."""

    gate = Event()

    def __init__(self, name: str, *, hangs_in: str = "") -> None:
        super().__init__(name, max_bytes=16_000_000)
        self._hangs_in = hangs_in

    def open(self) -> None:
        if self._hangs_in == "licence":
            sys.exit("no licence")
        if self._hangs_in == "nowhere":
            raise KeyError("of its own")
        if self._hangs_in == "open":
            self.gate.wait()
        super().open()

    def close(self) -> None:
        if self._hangs_in == "close":
            self.gate.wait()
        super().close()


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("open", "not built, opened and closed within 2 s; it hangs in(.|\n)*self.gate.wait"),
        ("close", "not built, opened and closed within 2 s; it hangs in(.|\n)*self.gate.wait"),
        ("licence", "can't be opened: SystemExit: no licence"),
        ("nowhere", "can't be opened: KeyError: 'of its own'; raised in(.|\n)*KeyError..of its o"),
    ],
)
def test_a_store_that_can_not_be_opened_or_closed_is_refused(
    where: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "LIMIT_S", 2.0)
    monkeypatch.setattr(check, "tasks_per_core", lambda: 1.0)
    subject = make_subject(f'tests.conformance.test_kit:Late:{{"hangs_in": "{where}"}}')
    try:
        with pytest.raises(ConfigError, match=says):
            subject.probe()
    finally:
        Late.gate.set()
        for thread in enumerate_threads():
            if thread.name.startswith(THREAD):
                thread.join(PATIENCE_S)
        Late.gate.clear()


def pytest_run(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "kvbaton.testing.plugin", "-q", "-rfs", *words],
        cwd=folder,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout + done.stderr


def test_the_plugin_runs_the_cases_beside_the_tests_of_a_project(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n")
    words = ("--kvbaton-store", BROKEN, "-k", "test_own or L0", "--junitxml", "report.xml")
    said = pytest_run(tmp_path, *words)
    assert "FAILED ::store tests.connectors_broken.stores:FindsEverything::L0.a-miss" in said
    cases = len(STORE_KIT.cases(0))
    assert f"1 failed, {cases} passed" in said, said  # and the project's own
    (suite,) = ElementTree.parse(tmp_path / "report.xml").getroot()
    assert (suite.attrib["tests"], suite.attrib["failures"]) == (str(1 + cases), "1")
    (failure,) = suite.findall(".//failure")
    assert "For keys that nobody stored" in (failure.text or "")


def test_the_plugin_refuses_a_wrong_spec(tmp_path: Path) -> None:
    said = pytest_run(tmp_path, "--kvbaton-transport", "nothing")
    assert "unknown transport 'nothing'" in said


TELLS_LIMITS = """
from kvbaton.testing.check import Subject

run = Subject.run

def told(self, case, limit):
    print("limit:", limit)
    return run(self, case, limit)

Subject.run = told
"""


@pytest.mark.parametrize(("words", "limit"), [((), "None"), (("--kvbaton-limit", "9"), "9.0")])
def test_the_plugins_own_limit_is_that_of_the_command(
    tmp_path: Path, words: tuple[str, ...], limit: str
) -> None:
    """Without an option it grows on a busy machine."""
    (tmp_path / "conftest.py").write_text(TELLS_LIMITS)
    said = pytest_run(tmp_path, "--kvbaton-store", "memory", "-s", "-k", "L0.close-twice", *words)
    assert f"limit: {limit}\n" in said, said


def test_a_class_is_a_suite(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "from kvbaton.testing.suite import StoreTests\n"
        "class TestMine(StoreTests):\n"
        "    spec = 'memory'\n"
    )
    said = pytest_run(tmp_path, "-k", "L0 or L3")
    assert "13 passed, 7 skipped" in said, said
    assert "not declared: persistent" in said


def test_a_suite_leaves_out_what_the_connector_excludes(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "from kvbaton.connectors.stores.memory import MemoryStore\n"
        "from kvbaton.testing.suite import StoreTests\n"
        "class Mine(MemoryStore):\n"
        "    kit_exclusions = {'L0.close-twice': 'it is closed once'}\n"
        "class TestMine(StoreTests):\n"
        "    spec = 'test_mine:Mine'\n"
    )
    said = pytest_run(tmp_path, "-k", "L0.close-twice or L0.not-open")
    assert "1 passed, 1 skipped" in said, said
    assert "excluded: it is closed once" in said

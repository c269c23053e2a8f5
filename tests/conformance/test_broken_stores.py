"""The kit can fail: each broken store is caught by its case, and by none before it."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvbaton.testing import check
from kvbaton.testing.check import Subject
from kvbaton.testing.kit import CaseVerdict
from kvbaton.testing.store_objects import Owner
from tests.conformance.broken_support import expect_caught, expect_first_failure, first_failure
from tests.connectors_broken.extras import BROKEN_EXTRAS
from tests.connectors_broken.files import BROKEN_FILES, BrokenFilesystem
from tests.connectors_broken.stores import BROKEN, BROKEN_NAMES, BrokenMemory
from tests.connectors_broken.subtle import BROKEN_SUBTLE

PATIENCE_S = 2.0
LONG_PATIENCE_S = 8.0
"""Where most cases are to pass, on a machine that has other things to do."""


def in_memory(broken: type[BrokenMemory]) -> Subject:
    return Subject(f"{broken.__module__}:{broken.__name__}", "store", patience=PATIENCE_S)


def with_files(broken: type[BrokenFilesystem]) -> Subject:
    _, door = BROKEN_FILES.get(broken, ("", None))
    spec = f'{broken.__module__}:{broken.__name__}:{{"path": "{{tmp}}/objects"}}'
    return Subject(spec, "store", door, patience=PATIENCE_S)


@pytest.fixture(autouse=True)
def names(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test is of a broken way to name objects, that is the owners'."""
    name = request.node.callspec.params.get("name", "").removeprefix(NAMES)
    if name in BROKEN_NAMES:
        monkeypatch.setattr(Owner, "keys", BROKEN_NAMES[name][0])


@pytest.fixture(autouse=True)
def patience_is_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of them hang for seconds, which a busy machine's patience would outlast."""
    monkeypatch.setattr(check, "tasks_per_core", lambda: 1.0)


@pytest.fixture(autouse=True)
def what_they_leave_is_no_litter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Temporary files of a store that removes none are where pytest tidies up."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


NAMES = "names that "
SOUND = Subject("memory", "store", patience=PATIENCE_S)
IN_MEMORY = BROKEN | BROKEN_EXTRAS | BROKEN_SUBTLE
CATCHERS = {
    **{broken.__name__: (in_memory(broken), case) for broken, case in IN_MEMORY.items()},
    **{broken.__name__: (with_files(broken), case) for broken, (case, _) in BROKEN_FILES.items()},
    **{NAMES + name: (SOUND, case) for name, (_, case) in BROKEN_NAMES.items()},
}


@pytest.mark.parametrize("name", CATCHERS)
def test_its_case_catches_it(name: str) -> None:
    subject, case = CATCHERS[name]
    if case == "L5.thousands-of-loads":
        subject = replace(subject, depth=4)  # time for as many on a machine that is busy
    expect_caught(subject, case)


ANSWERS = "tests.store_connector.misbehaving"


@pytest.mark.parametrize(
    ("store", "case", "told"),
    [
        ("NoFuture", "L1.one-key-twice", "lookup answered Found"),
        (
            "ShortLoad",
            "L1.pieces",
            "load answered [], which is not of type list with a bool for each of 1 keys",
        ),
        ("ShortLookup", "L1.deleted-is-gone", "which is not of type Found with "),
        ("WrongUsage", "L1.a-large-object", "which is not a Usage"),
    ],
)
def test_an_answer_of_a_wrong_type_or_length_is_the_stores_failure(
    store: str, case: str, told: str
) -> None:
    """It was the kit's, which went on with it until something did not fit."""
    subject = Subject(f"{ANSWERS}:{store}", "store", patience=PATIENCE_S)
    (found,) = subject.cases(only=[case])
    outcome = subject.run(found)
    assert outcome.verdict is CaseVerdict.FAILED, outcome.text
    assert told in outcome.text


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CATCHERS.keys() - {"FindsWhatIsTorn"}))
def test_no_case_before_it_does(name: str) -> None:
    # All but one, which is slow and `WritesInPlace` once more.
    subject, case = CATCHERS[name]
    expect_first_failure(replace(subject, patience=LONG_PATIENCE_S), case)


@pytest.mark.slow
@pytest.mark.parametrize("subject", [in_memory(BrokenMemory), with_files(BrokenFilesystem)])
def test_what_they_mutate_passes(subject: Subject) -> None:
    assert first_failure(replace(subject, patience=LONG_PATIENCE_S)) is None

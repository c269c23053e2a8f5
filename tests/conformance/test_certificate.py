"""What a certificate tells, in three forms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kvbaton.cli import main
from kvbaton.connectors.store import Usage
from kvbaton.connectors.stores.memory import MemoryStore
from kvbaton.errors import ConfigError, StoreError
from kvbaton.testing import certificate
from kvbaton.testing.certificate import certify, hide_secrets, write
from kvbaton.testing.check import Subject, make_subject

REASON = "objects of such a <size> don't come"
SOME = ("L0.says-who-it-is", "L1.deleted-is-gone", "L1.outlives-close", "L1.a-large-object")


class Vendors(MemoryStore):
    """A plug-in that excludes a case by itself."""

    contract = "1.0"
    kit_exclusions = {"L1.a-large-object": REASON}  # noqa: RUF012

    def __init__(self, name: str, *, max_bytes: int = 32 << 20, password: str = "") -> None:
        super().__init__(name, max_bytes=max_bytes)


@pytest.fixture(autouse=True)
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    every = Subject.cases
    monkeypatch.setattr(
        Subject,
        "cases",
        lambda *words, **more: [case for case in every(*words, **more) if case.id in SOME],
    )


def test_three_forms(tmp_path: Path) -> None:
    spec = f'{__name__}:Vendors:{{"password": "hunter2"}}'
    rows: Sequence[dict[str, Any]] = [{"what": "copy", "GiB/s": 7.0}]
    done, status = certify(
        make_subject(spec, exclude=[f"{SOME[1]}=for lack of time"]), lambda _: rows
    )
    assert status == 0
    assert done.verdict == "certified, 2 excluded with a reason"
    told, junit, page = (path.read_text() for path in write(done, tmp_path))
    read = json.loads(told)
    assert read["options"] == {"password": "***"}
    assert read["contract"] == {"plugin": "1.0", "kvbaton": "1.2"}
    assert read["plugin"]["class"] == f"{__name__}:Vendors"
    assert read["capacity"] == 32 << 20
    assert read["door"] is None
    assert read["capabilities"]["pins"] is True
    assert read["exclusions"] == {SOME[3]: REASON, SOME[1]: "for lack of time"}
    assert {case["case"]: case["verdict"] for case in read["cases"]} == {
        SOME[0]: "passed", SOME[1]: "skipped", SOME[2]: "skipped", SOME[3]: "skipped",
    }  # fmt: skip
    suite = ElementTree.fromstring(junit)
    assert (suite.get("tests"), suite.get("skipped"), suite.get("failures")) == ("4", "3", "0")
    assert "hunter2" not in told + junit + page
    for text in ("such a &lt;size&gt;", "for lack of time", "certified, 2 excluded", "GiB/s"):
        assert text in page


def test_exclusions_have_a_case_and_a_reason() -> None:
    for text, told in (
        (SOME[0], "CASE=REASON"),
        (f"{SOME[0]}= ", "CASE=REASON"),
        ("L9.x=y", "no case"),
    ):
        with pytest.raises(ConfigError, match=told):
            make_subject("memory", "store", exclude=[text])


def test_what_is_hidden() -> None:
    options = {
        "url": "redis://me:pass@host:1/0", "secret_access_key": "x", "token": None,
        "inner": {"a": {"API_KEY": 5}}, "tiers": ["s3://user@bucket/p", {"s": {"auth_token": "t"}}],
        "text": 'my.stores:Mine:{"inner": "s3:{\\"secret_key\\": \\"x\\"}"}',
        "plain": 'm:{ "a": 1 }',
        "broken": "s3:{not JSON",
    }  # fmt: skip
    assert hide_secrets(options) == {
        "url": "redis://***@host:1/0", "secret_access_key": "***", "token": None,
        "inner": {"a": {"API_KEY": "***"}},
        "tiers": ["s3://***@bucket/p", {"s": {"auth_token": "***"}}],
        "text": 'my.stores:Mine:{"inner": "s3:{\\"secret_key\\": \\"***\\"}"}',
        "plain": 'm:{ "a": 1 }',
        "broken": "s3:{not JSON",
    }  # fmt: skip


def test_a_failure_is_no_certificate(tmp_path: Path) -> None:
    subject = Subject("tests.connectors_broken.stores:DeletesNothing", "store")
    done, status = certificate.certify(subject, lambda _: pytest.fail("is not measured"))
    assert (status, done.verdict) == (1, "not passed")
    _, junit, page = (path.read_text() for path in write(done, tmp_path))
    assert ElementTree.fromstring(junit).get("failures") == "1"
    assert "deleted-is-gone: failed" in page


class TellsNoUsage(MemoryStore):
    """A plug-in that never closes well, and whose usage can't be asked."""

    def usage(self) -> Usage:
        raise RuntimeError("no usage")

    def close(self) -> None:
        super().close()
        raise RuntimeError("never closes")


def test_what_fails_beside_the_cases_loses_no_certificate(tmp_path: Path) -> None:
    done, status = certify(Subject(f"{__name__}:TellsNoUsage", "store"), lambda _: [])
    assert (status, done.verdict, done.capacity) == (1, "not passed", None)
    assert len(write(done, tmp_path)) == 3

    def fails(subject: Subject) -> Sequence[dict[str, Any]]:
        raise StoreError("a call is not done within 60 s")

    done, status = certify(make_subject(f"{__name__}:Vendors"), fails)
    assert status == 0
    assert done.speed == [{"not measured": "a call is not done within 60 s"}]
    assert "a call is not done" in write(done, tmp_path)[2].read_text()


def test_a_folder_that_can_not_be_made_is_told_before_the_cases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    words = ["connectors", "certify", "memory", "--kind", "store"]
    assert main([*words, "--out", str(tmp_path / "file" / "folder")]) == 2
    out, error = capsys.readouterr()
    assert (out, "--out: can't be written" in error) == ("", True)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["connectors", "certify", "memory", "--kind", "store", "--out", str(tmp_path)]
    door = "tests.conformance.back_doors:MemoryBackDoor"
    status = main([*words, "--back-door", door, "--exclude", f"{SOME[3]}={REASON}"])
    assert status == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "memory.html")
    read = json.loads((tmp_path / "memory.json").read_text())
    assert read["door"] == door
    assert {row["what"] for row in read["speed"]} >= {"copy", "store", "load"}

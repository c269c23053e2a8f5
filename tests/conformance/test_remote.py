"""What the kit knows of a process at the far side, and that its start is the kit's own trouble."""

from __future__ import annotations

import os
import select
import threading
import time
from pathlib import Path

import pytest

from kvbaton.testing import remote
from kvbaton.testing.check import Subject
from kvbaton.testing.kit import CaseFailure, CaseVerdict, KitBroke
from kvbaton.testing.remote import RemoteProcess
from tests.support.fork_server import fork_server
from tests.support.processes import python

SAYS = "print('begin 0\\ndone 0\\nbegin 1\\ndone 1\\nhalf a', end='', flush=True); input()"
LIMIT_S = 3.0
LATER_S = 3.5

SLOW_TO_IMPORT = """
import os, pathlib, time
from kvbaton.connectors.stores.filesystem import FilesystemStore
while os.getpid() != KIT and not pathlib.Path("go").exists():
    time.sleep(0.05)
class Slow(FilesystemStore):
    pass
"""


def test_lines_that_were_skipped_or_never_asked_for_count_as_said() -> None:
    with RemoteProcess(python("-c", SAYS), 30.0) as process:
        assert process.line("begin") == ["begin", "0"]
        assert process.line("begin") == ["begin", "1"]
        process.kill()
        said = [["begin", "0"], ["done", "0"], ["begin", "1"], ["done", "1"]]
        assert process.all_lines() == process.all_lines() == said


@pytest.mark.parametrize(
    ("says", "blames"),
    [("", KitBroke), ("print('begun', flush=True); ", CaseFailure)],
    ids=["before-it-uses-the-connector", "while-the-connector-opens"],
)
def test_whose_fault_a_late_start_is(
    monkeypatch: pytest.MonkeyPatch, says: str, blames: type[Exception]
) -> None:
    with RemoteProcess(python("-c", f"{says}input()"), 30.0) as process:
        if says:
            assert select.select([process._out], [], [], 30.0)[0]  # its start is not tried here
        monkeypatch.setattr(remote, "STARTS_WITHIN_S", 0.5)
        with pytest.raises(blames, match="in time"):
            process.started()


def test_a_case_waits_for_imports_of_its_worker_past_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_to_import.py").write_text(SLOW_TO_IMPORT.replace("KIT", str(os.getpid())))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    subject = Subject('slow_to_import:Slow:{"path": "{tmp}/objects"}', "store")
    (case,) = subject.cases(only=["L3.a-killed-reader"])
    release = threading.Timer(LATER_S, (tmp_path / "go").touch)
    release.start()
    start = time.monotonic()
    try:
        outcome = subject.run(case, LIMIT_S)
    finally:
        (tmp_path / "go").touch()
        release.join()
        fork_server().close()
    assert outcome.verdict is CaseVerdict.PASSED, outcome.text
    assert time.monotonic() - start > LATER_S

"""Processes that are forked off one with their imports act as those that Python starts afresh."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest

from kvbaton.testing import remote
from kvbaton.testing.kit import CaseFailure
from kvbaton.testing.remote import RemoteProcess, start_worker
from tests.support import fork_server as module
from tests.support.fork_server import ForkServer, fork_server
from tests.support.forked_remote import ForkedPopen

SAYS = """
import os, sys, threading
if THREAD:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
def main(words):
    heard, threads = sys.stdin.readline(), threading.active_count()
    print("said", os.environ["TOLD"], threads, *words, heard, flush=True)
    sys.exit("no more to say")
if __name__ == "__main__":
    main(sys.argv[1:])
"""


@pytest.fixture
def imports_only_what_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of the test's own: torch, which others share, takes seconds."""
    monkeypatch.setattr(module, "SHARED", ())


@pytest.mark.usefixtures("imports_only_what_it_is_told")
@pytest.mark.parametrize("thread", [False, True], ids=["forked", "afresh-where-a-thread-ran"])
def test_a_process_has_its_words_streams_environment_and_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thread: bool
) -> None:
    (tmp_path / "says.py").write_text(SAYS.replace("THREAD", str(thread)))
    monkeypatch.chdir(tmp_path)
    server = fork_server()
    monkeypatch.setenv("TOLD", "later")  # than the server was started

    def says(command: Sequence[str], *, stderr: IO[bytes], **_: object) -> ForkedPopen:
        return ForkedPopen("says", command, ["no_such_module"], stderr.fileno())

    monkeypatch.setattr(remote, "Popen", says)
    try:
        for number in range(2):
            with RemoteProcess(["one", "two"], 20.0) as process:
                process.tell(f"number-{number}")
                threads = "2" if thread else "1"
                wanted = ["said", "later", threads, "one", "two", f"number-{number}"]
                assert process.line("said") == wanted
                with pytest.raises(CaseFailure, match="no more to say"):
                    process.line("said")
    finally:
        server.close()


def test_what_was_killed_has_ended_and_may_be_killed_again() -> None:
    with start_worker("transport", "tcp", 8, "cpu", patience=20.0) as process:
        process.started()
        process.kill()
        assert process.all_lines()[1][0] == "card", "its end of the stream is closed"
        process.kill()


@pytest.mark.usefixtures("imports_only_what_it_is_told")
def test_a_process_that_ends_at_once_ends_no_server() -> None:
    """Where they share a core, it may have ended before the server has looked at it."""
    server = ForkServer()
    os.sched_setaffinity(server._process.pid, {min(os.sched_getaffinity(0))})
    with open(os.devnull, "r+b") as null:
        for _ in range(150):
            server.start("no_such_module", [], [null.fileno()] * 3, [])
    server.close()
    assert server._process.returncode == 0

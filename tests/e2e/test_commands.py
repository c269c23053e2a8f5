"""Starting and stopping: what a user sees when it fails, and what stays behind (nothing)."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.forked_command import ForkedCommand
from tests.support.processes import descendants_of, is_alive
from tests.support.servers import poll

pytestmark = pytest.mark.e2e

STOP_S = 60.0
UP = ("--port=0", "--num-blocks=64", "--max-model-len=256")


def start(words: list[str], log: Path, **env: str) -> subprocess.Popen[bytes]:
    """Start ``kvbaton`` with these words, as a shell does."""
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "kvbaton", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        )


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, str, frozenset[int]]]:
    """Runs a command to its end; returns status, what it wrote and which processes it had."""

    def to_the_end(*words: str) -> tuple[int, str, frozenset[int]]:
        log, children = tmp_path / "log", frozenset[int]()
        with log.open("wb") as file:
            process = ForkedCommand(words, file.fileno())

        def has_ended() -> bool:
            nonlocal children
            children |= descendants_of(process.pid)
            return process.poll() is not None

        try:
            poll("its end", has_ended, 60.0, log.read_text)
            return process.wait(), log.read_text(), children
        finally:
            process.kill()

    return to_the_end


@pytest.fixture
def truncated(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A model folder whose weights end in the middle."""
    folder = tmp_path / "truncated"
    shutil.copytree(checkpoint(), folder)
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    return folder


def test_a_missing_model(
    run: Callable[..., tuple[int, str, frozenset[int]]], tmp_path: Path
) -> None:
    status, text, _ = run("prefill", f"--model={tmp_path / 'nowhere'}", "--port=0")
    assert status == 2
    assert "--model" in text
    assert "nowhere" in text
    assert "Traceback" not in text


def test_a_port_in_use(
    run: Callable[..., tuple[int, str, frozenset[int]]], checkpoint: Callable[..., Path]
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        status, text, _ = run("decode", f"--model={checkpoint()}", f"--port={port}")
    assert status == 2
    assert "--port" in text
    assert str(port) in text
    assert "Traceback" not in text


FAILS = """
import sys
if "--multiprocessing-fork" in sys.orig_argv:
    from kvbaton.engine import build

    def fail(*args, **options):
        raise RuntimeError("what nobody thought of")

    build.make_executor = fail
"""


def test_an_engine_that_fails_says_where_and_why(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAILS)
    path, log = os.pathsep.join([str(tmp_path), *sys.path]), tmp_path / "log"
    process = start(["serve", f"--model={checkpoint()}", *UP], log, PYTHONPATH=path)
    children = set[int]()

    def has_ended() -> bool:
        children.update(descendants_of(process.pid))
        return process.poll() is not None

    try:
        poll("its end", has_ended, STOP_S, log.read_text)
    finally:
        process.kill()
    text = log.read_text()
    assert process.wait() == 1, text
    assert text.splitlines()[-1] == "kvbaton: error: RuntimeError: what nobody thought of"
    assert text.count("Traceback") == 1
    assert "in build_engine" in text, "not where somebody waited for it"
    assert children
    poll("the end of all", lambda: not any(map(is_alive, children)), 10.0, lambda: text)


def test_up_shows_why_a_node_does_not_start_and_leaves_nothing(
    run: Callable[..., tuple[int, str, frozenset[int]]], truncated: Path
) -> None:
    words = ("up", f"--model={truncated}", *UP, "--prefill=1", "--decode=1")
    status, text, children = run(*words)
    assert len(children) >= 2
    assert not any(map(is_alive, children))
    assert status == 1
    assert "prefill-0: starting" in text
    last_words = text.partition("ended with status 2")[2]
    assert "its last lines:" in last_words
    assert "kvbaton: error: --model" in last_words
    assert "model.safetensors" in last_words
    assert "Traceback" not in text
    assert "not ready after" not in text


def interrupt(
    process: subprocess.Popen[bytes] | ForkedCommand, said: Callable[[], str], least: int
) -> None:
    """Ctrl-C ends a command and all that it has started, `least` processes, without a word."""
    children = descendants_of(process.pid)
    assert len(children) >= least
    os.killpg(process.pid, signal.SIGINT)
    process.wait(STOP_S)
    poll("no process", lambda: not any(map(is_alive, children)), 5.0, said)
    assert "Traceback" not in said()
    assert "killing" not in said()


def test_ctrl_c_leaves_nothing(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """While all start; while they serve: `test_readme.py` and `test_up.py`."""
    log = tmp_path / "log"
    process = start(["up", f"--model={checkpoint()}", *UP], log)
    try:
        poll("a sign of life", lambda: "starting" in log.read_text(), 120.0, log.read_text)
        interrupt(process, log.read_text, 1)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

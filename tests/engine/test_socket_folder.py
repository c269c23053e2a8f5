"""Folders for sockets: whose they are, and that killed processes leave none behind."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbaton.engine import socket_folder
from kvbaton.engine.socket_folder import PREFIX, SocketFolder

HOLDS_ONE = """
from kvbaton.engine.socket_folder import SocketFolder
print(SocketFolder().path, flush=True)
input()
"""


@pytest.fixture
def tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short one, in which they are made."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


@contextmanager
def another_process() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """One that has such a folder, which is its."""
    words = [sys.executable, "-c", HOLDS_ONE]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_what_a_killed_process_left_is_removed_when_the_next_is_made(tmpdir: Path) -> None:
    for name in ("kvbaton-bench-a1", "other"):
        (tmpdir / name).mkdir()
    with another_process() as (killed, left), another_process() as (_, used):
        (left / "engine").touch()
        killed.kill()
        killed.wait()
        assert left.is_dir()
        mine = SocketFolder()
        assert not left.exists()
        assert used.is_dir()
        assert stat.S_IMODE(os.stat(mine.path).st_mode) == 0o700
        again = SocketFolder()
        assert Path(mine.path).is_dir()
        for folder in (mine, again, mine):
            folder.close()
        assert {path.name for path in tmpdir.iterdir()} == {"kvbaton-bench-a1", "other", used.name}


def test_what_is_no_folder_or_another_users_stays(
    tmpdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmpdir / "target").mkdir()
    (tmpdir / f"{PREFIX}link").symlink_to(tmpdir / "target")
    (tmpdir / f"{PREFIX}file").touch()
    (tmpdir / f"{PREFIX}theirs").mkdir()
    before = set(tmpdir.iterdir())
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    SocketFolder().close()
    assert set(tmpdir.iterdir()) == before


def test_one_that_is_removed_before_it_is_locked_is_made_anew(
    tmpdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By who takes it for one that was left: that one may have opened it, or have it locked."""
    made: list[str] = []
    make = tempfile.mkdtemp

    def seen_by_another(**arguments: str) -> str:
        path = make(**arguments)
        made.append(path)
        if len(made) == 1:
            socket_folder._remove_unused(path)
        elif len(made) == 2:
            lock = socket_folder._locked(path, fcntl.LOCK_EX)

            def remove() -> None:
                os.rmdir(path)
                os.close(lock)

            threading.Timer(0.1, remove).start()
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", seen_by_another)
    folder = SocketFolder()
    assert len(made) == 3
    assert folder.path == made[2]
    assert list(tmpdir.iterdir()) == [Path(folder.path)]
    folder.close()

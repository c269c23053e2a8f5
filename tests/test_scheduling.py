"""A worker that dies in a test, or hangs where nothing but its end helps, costs that test only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFTEST = """
def pytest_xdist_make_scheduler(config, log):
    from tests.support.scheduling import Scheduling
    return Scheduling(config, log)
"""
TESTS = """
import ctypes, os, pytest

@pytest.mark.parametrize("number", range(6))
def test(number):
    if number == 1:
        os._exit(1)
    if number == 4:  # holds its thread in C, where no signal is looked at
        library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)
"""


def test_what_a_dead_worker_had_left_is_run_by_others(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_dies.py").write_text(TESTS)
    root = Path(__file__).parents[1]
    limits = "-o faulthandler_timeout=4 -o faulthandler_exit_on_timeout=true".split()
    plugins = "-p xdist -p no:cacheprovider".split()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "2", *limits, *plugins, str(tmp_path)],
        env={"PYTHONPATH": str(root), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "2 failed, 4 passed" in done.stdout, done.stdout + done.stderr
    for number in (1, 4):
        assert f"crashed while running 'test_dies.py::test[{number}]'" in done.stdout

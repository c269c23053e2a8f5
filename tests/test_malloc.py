"""Memory that a process frees and asks for again is there: no page of it is cleared anew."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

ROUNDS = 100
PROGRAM = f"""
import resource, sys
from kvbaton.malloc import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def work():
    for _ in range({ROUNDS}):
        held = [b"x" * 430_000 for _ in range(8)]
        del held
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
work()
print(faults())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="no glibc")
def test_what_is_freed_is_used_again() -> None:
    def faults(mode: str) -> int:
        words = [sys.executable, "-c", PROGRAM, mode]
        return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)

    assert faults("keep") < ROUNDS < 10 * ROUNDS < faults("leave")

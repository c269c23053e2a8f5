"""Where a thread is can be told whatever is collected meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading

from kvbaton.connectors.thread_stack import stack_of

SCRIPT = """
import gc, threading
from kvbaton.connectors.thread_stack import stack_of

class StartsAThread:
    def __init__(self):
        self.me = self  # garbage for the collector only

    def __del__(self):
        threading.Thread(target=int).start()

done = threading.Event()
threads = [threading.Thread(target=done.wait) for _ in range(50)]
for thread in threads:
    thread.start()
gc.set_threshold(10)
for _ in range(100):
    StartsAThread()
    assert stack_of(threads[0])
gc.set_threshold(0)
assert gc.isenabled()
done.set()
"""


def test_finalizers_that_start_threads_do_not_end_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_thread_that_has_ended_is_nowhere() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert stack_of(thread) == []

"""A process counts as gone only when that is proven."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvbaton.connectors.address import is_loopback, is_wildcard
from kvbaton.connectors.guard import ProcessCard, is_gone, this_process
from tests.support.waiting import until

# The main thread ends here while another still runs: the process shows as a zombie and is none.
LEADER_EXITS = """
import ctypes, sys, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("ready", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def card_of(pid: int) -> ProcessCard:
    return ProcessCard(this_process().host, pid, int(stat(pid)[19]))


def test_this_process_lives() -> None:
    assert not is_gone(this_process())
    assert this_process() == card_of(this_process().pid)


def test_an_ended_process_is_gone_before_and_after_it_is_reaped() -> None:
    process = subprocess.Popen(["sleep", "60"])
    card = card_of(process.pid)
    assert not is_gone(card)
    process.kill()
    until(lambda: is_gone(card), "it is gone")
    process.wait()
    assert is_gone(card)


def test_a_process_whose_main_thread_ended_is_not_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", LEADER_EXITS], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    card = card_of(process.pid)
    until(lambda: stat(process.pid)[0] == "Z", "a zombie")
    assert not is_gone(card)
    process.kill()
    process.communicate()
    assert is_gone(card)


def test_a_reused_pid_is_another_process_and_another_host_is_never_known() -> None:
    here = this_process()
    assert is_gone(msgspec.structs.replace(here, start=here.start + 1))
    assert not is_gone(msgspec.structs.replace(here, host="elsewhere", pid=1 << 22))


@pytest.mark.parametrize(
    ("host", "loopback", "wildcard"),
    [
        ("localhost", True, False),
        ("127.3.2.1", True, False),
        ("::1", True, False),
        ("::ffff:127.0.0.1", True, False),  # of 127.0.0.1, who listens at `::`
        ("::ffff:10.0.0.1", False, False),
        ("10.0.0.1", False, False),
        ("0.0.0.0", False, True),
        ("::", False, True),
        ("", False, True),
        ("node-7", False, False),
    ],
)
def test_kinds_of_hosts(host: str, loopback: bool, wildcard: bool) -> None:
    assert (is_loopback(host), is_wildcard(host)) == (loopback, wildcard)

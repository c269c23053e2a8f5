"""``kvbaton`` as a forked process, which starts fast, as do the processes that it starts.

The command, an engine's core, and the router and nodes of ``kvbaton up`` are forked from a process
that has imported their modules (see `tests.support.fork_server`); importing torch alone takes 1.5
s. They are ordinary processes, with their own session, arguments, environment and standard streams;
only ``exec`` is skipped.
"""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing.util
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

from tests.support.altered import alter
from tests.support.fork_server import end_with, exit_status, fork_server

IMPORTS = (
    "kvbaton.server.node",
    "kvbaton.router.app",
    "kvbaton.engine.build",
    "kvbaton.engine.loader",
    "kvbaton.engine.worker",
    "kvbaton.engine.encoder.worker",
    "kvbaton.roles",
    "kvbaton.prefill.source_connector",
    "kvbaton.decode.target_connector",
    "kvbaton.connectors.transports.nixl",
    "kvbaton.connectors.transports.tcp",
    "nixl_cu13",
    "tests.support.warmed",
)
QUICK_UCX = {"UCX_MEM_EVENTS": "n"}
"""Environment without UCX's memory hooks: it spins for 0.4 s to patch their code.

The hooks serve its registration cache, which memory that kvbaton registers does not need. The
tests' own processes, and those that execute Python anew, keep UCX's default. (Its alternative,
relocation tables, mixes two allocators, which has crashed a core.)
"""
PR_SET_PDEATHSIG = 1
CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x20000000, 0x40000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000


class ForkedCommand:
    """A command, with the subset of `subprocess.Popen` that tests need.

    Args:
        words: Arguments of the command line.
        output: Descriptor for its output.
        names: File of addresses by host name (JSON), read at each look-up, like DNS.
        env: Variables added to the test's environment.
        network: Name (of `ip`) of a network namespace to run in, with its own process table; the
            process then receives only ``SIGKILL`` and ``SIGSTOP``.
    """

    def __init__(
        self,
        words: Sequence[str],
        output: int,
        names: Path | None = None,
        env: Mapping[str, str] | None = None,
        network: str = "",
    ) -> None:
        self._status = os.memfd_create("status")
        self._close_status = weakref.finalize(self, os.close, self._status)
        status = f"/proc/{os.getpid()}/fd/{self._status}"
        words = [status, str(names or ""), network, json.dumps(dict(env or {})), *words]
        with open(os.devnull, "rb") as null:
            streams = (null.fileno(), output, output)
            pidfd = fork_server().start(__spec__.name, words, streams, IMPORTS)
        self._process = pidfd
        told = Path(f"/proc/self/fdinfo/{pidfd.pidfd}").read_text()
        (pid,) = re.findall(r"^Pid:\s*(-?\d+)", told, re.MULTILINE)
        self.pid = int(pid)

    def poll(self) -> int | None:
        """Exit status as from `subprocess`, -9 for any signal; None while it runs."""
        if not wait([self._process.pidfd], 0):
            return None
        if self._close_status.alive:
            self._returned = int(os.pread(self._status, 8, 0) or -signal.SIGKILL)
            self._close_status()
        return self._returned

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; returns its exit status.

        Raises:
            TimeoutExpired: It is still running.
        """
        if not wait([self._process.pidfd], timeout):
            raise subprocess.TimeoutExpired("kvbaton", timeout or 0)
        status = self.poll()
        assert status is not None
        return status

    def terminate(self) -> None:
        """Send ``SIGTERM``."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send ``SIGKILL``."""
        self._process.kill()


# --- in the process ---


def main(words: list[str]) -> None:
    """Run a command. It dies with the fork server, which dies with the tests."""
    told, names, network, env, *words = words
    file = open(told, "wb", buffering=0)
    os.environ.update(json.loads(env))
    if names:
        socket.getaddrinfo = partial(_look_up, Path(names), socket.getaddrinfo)

    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")  # with more threads no core can be forked
    quicken_ucx()
    quicken_trials()
    alter()
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in folders if folder and folder not in sys.path]

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    if network:
        _isolate(network)
    multiprocessing.util.spawnv_passfds = _fork  # type: ignore[assignment]
    subprocess._fork_exec = _fork_kvbaton  # type: ignore[attr-defined]
    status = exit_status(lambda: _command(words))
    file.write(b"%d" % status)
    file.close()
    sys.exit(status)


def _isolate(network: str) -> None:
    """Continue as the first process of new namespaces, as in a container; the parent waits."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{network}") as file:
        failed = [libc.setns(file.fileno(), CLONE_NEWNET)]
    failed.append(libc.unshare(CLONE_NEWNS | CLONE_NEWPID))
    if pid := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    failed.append(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    for kind, folder in ((b"proc", b"/proc"), (b"sysfs", b"/sys")):  # of these namespaces
        failed.append(libc.mount(kind, folder, kind, 0, None))
    if any(failed):
        raise OSError(ctypes.get_errno(), f"namespaces of {network}: {failed}")


def quicken_ucx() -> None:
    """Have `QUICK_UCX` in this process."""
    for name, value in QUICK_UCX.items():
        os.environ.setdefault(name, value)


def quicken_trials() -> None:
    """Let engines try few steps before they serve: costs of steps are measured by other tests."""
    from kvbaton.engine import step_costs

    step_costs.TRIAL_S = 0.0


def _command(words: list[str]) -> NoReturn:
    """Run ``kvbaton`` with these arguments."""
    from kvbaton import cli

    sys.exit(cli.main(words))


def _look_up(names: Path, real: Callable[..., Any], host: Any, *args: Any, **kwargs: Any) -> Any:
    """As `socket.getaddrinfo`, but with a file's addresses for the names in it."""
    addresses = json.loads(names.read_text()).get(host, [host])
    return [found for one in addresses for found in real(one, *args, **kwargs)]


_spawn: Callable[..., int] = multiprocessing.util.spawnv_passfds


def _fork(path: bytes, args: Sequence[str], passfds: Sequence[int]) -> int:
    """Replaces multiprocessing's execution of Python in a new process; returns its id."""
    alone = len(os.listdir("/proc/self/task")) == 1
    if not alone or "--multiprocessing-fork" not in args:
        return _spawn(path, args, passfds)
    if pid := os.fork():
        return pid

    def spawned() -> None:
        code = args[list(args).index("-c") + 1]
        sys.argv = ["-c", "--multiprocessing-fork"]
        exec(code, {})

    _become(passfds, spawned)


_exec: Callable[..., int] = subprocess._fork_exec  # type: ignore[attr-defined]


def _fork_kvbaton(args: Sequence[str], *rest: Any) -> int:
    """Replaces `subprocess`'s execution of a program in a new process; returns its id."""
    # Threads that wait for a child hold no lock that the new process would need.
    others = {one.name for one in threading.enumerate() if one is not threading.main_thread()}
    waiting = all(name.startswith("asyncio-waitpid-") for name in others)
    alone = waiting and len(os.listdir("/proc/self/task")) == len(threading.enumerate())
    if not alone or list(args[:3]) != [sys.executable, "-m", "kvbaton"]:
        return _exec(args, *rest)
    (_, _, passfds, _, env, stdin, _, _, stdout, _, _, _, failed, *_) = rest
    preexec = rest[-2]
    if pid := os.fork():
        return pid

    def forked() -> None:
        os.setsid()
        preexec()
        os.environ.clear()
        os.environb.update(line.split(b"=", 1) for line in env)
        logging.root.handlers.clear()
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
        _command(list(args[3:]))

    for number, descriptor in enumerate((stdin, stdout, stdout)):
        os.dup2(descriptor, number)
    _become([fd for fd in passfds if fd != failed], forked)


def _become(passfds: Sequence[int], run: Callable[[], None]) -> NoReturn:
    """In a forked process: run `run`, with these descriptors besides the standard ones."""

    def alone() -> None:
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        kept = sorted({0, 1, 2, *passfds})
        for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(low + 1, high)
        run()

    end_with(alone)


if __name__ == "__main__":
    main(sys.argv[1:])

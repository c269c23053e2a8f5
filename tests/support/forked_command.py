"""``kvbaton`` as a process that need not import all anew, and neither need its engine's core.

Both are forked off one process that has imported what nodes and routers need (see
`kvbaton.testing.fork_server`): torch alone takes 1.5 s. They are processes like any others, with
their own session, arguments, environment and standard streams; only ``exec`` is left out.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing.util
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

from kvbaton.testing.fork_server import fork_server

IMPORTS = (
    "kvbaton.server.node",
    "kvbaton.router.app",
    "kvbaton.engine.build",
    "kvbaton.engine.encoder.worker",
    "kvbaton.prefill",
    "kvbaton.decode",
    "kvbaton.connectors.transports.nixl",
    "kvbaton.connectors.transports.tcp",
)
PR_SET_PDEATHSIG = 1


class ForkedCommand:
    """A command, with as much of `subprocess.Popen` as tests need.

    Args:
        words: of the command line.
        log: takes what it writes.
        names: a file with addresses by host name (JSON), which is read at each look-up, as DNS is.
    """

    def __init__(self, words: Sequence[str], log: IO[bytes], names: Path | None = None) -> None:
        words = [str(names or ""), *words]
        with open(os.devnull, "rb") as null:
            streams = (null.fileno(), log.fileno(), log.fileno())
            pidfd = fork_server().start(__spec__.name, words, streams, IMPORTS)
        self._process = pidfd
        told = Path(f"/proc/self/fdinfo/{pidfd.pidfd}").read_text()
        (pid,) = re.findall(r"^Pid:\s*(-?\d+)", told, re.MULTILINE)
        self.pid = int(pid)

    def poll(self) -> int | None:
        """None while it runs; how it ended is not known."""
        return 0 if wait([self._process.pidfd], 0) else None

    def wait(self, timeout: float) -> None:
        """Wait for its end.

        Raises:
            TimeoutExpired: it goes on.
        """
        if not wait([self._process.pidfd], timeout):
            raise subprocess.TimeoutExpired("kvbaton", timeout)

    def terminate(self) -> None:
        """``SIGTERM``."""
        self._process.send_signal(signal.SIGTERM)


# --- in the process ---


def main(words: list[str]) -> None:
    """Run a command; it ends with the fork server, which ends with the tests."""
    from kvbaton import cli

    names, *words = words
    if names:
        socket.getaddrinfo = partial(_look_up, Path(names), socket.getaddrinfo)

    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")  # with a thread no core could be forked
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    multiprocessing.util.spawnv_passfds = _fork  # type: ignore[assignment]
    sys.exit(cli.main(words))


def _look_up(names: Path, real: Callable[..., Any], host: Any, *args: Any, **kwargs: Any) -> Any:
    """As `socket.getaddrinfo`, with a file's addresses of the names in it."""
    addresses = json.loads(names.read_text()).get(host, [host])
    return [found for one in addresses for found in real(one, *args, **kwargs)]


_spawn: Callable[..., int] = multiprocessing.util.spawnv_passfds


def _fork(path: bytes, args: Sequence[str], passfds: Sequence[int]) -> int:
    """What multiprocessing calls to execute Python in a new process; returns its id."""
    alone = len(os.listdir("/proc/self/task")) == 1
    if not alone or "--multiprocessing-fork" not in args:
        return _spawn(path, args, passfds)
    if pid := os.fork():
        return pid
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        kept = sorted({0, 1, 2, *passfds})
        for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(low + 1, high)
        code = args[list(args).index("-c") + 1]
        sys.argv = ["-c", "--multiprocessing-fork"]
        exec(code, {})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])

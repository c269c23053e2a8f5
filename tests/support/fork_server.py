"""Fast process starts: processes are forked from a server that has imported their modules.

`fork_server` starts ``python -m tests.support.fork_server FD`` once. Each request over that socket
brings a `_Start` and the new process's three standard streams; the answer is its pidfd. Modules
that the server imports must not start threads, which a fork would lose; if there are threads, the
new process executes Python anew.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

SHARED = ("torch",)
"""Modules that take seconds to import: the server imports them if its client has them."""
_MAX_BYTES = 1 << 20
_ROOT = str(Path(__file__).parent.parent.parent)


class _Start(msgspec.Struct):
    module: str
    words: list[str]
    environ: dict[str, str]
    imports: list[str]


class ForkedProcess:
    """Another process, known only by its `pidfd`."""

    def __init__(self, pidfd: int) -> None:
        self.pidfd = pidfd

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; no effect if the process has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """Send ``SIGKILL``."""
        self.send_signal(signal.SIGKILL)

    def wait(self) -> None:
        """Wait until the process has ended."""
        ended = select.poll()
        ended.register(self.pidfd, select.POLLIN)
        ended.poll()

    def __del__(self) -> None:
        os.close(self.pidfd)


class ForkServer:
    """Client of the fork server; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_BYTES)
        command = [sys.executable, "-m", __spec__.name, str(remote.fileno())]
        path = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
        # numpy's import starts threads else
        env = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": path}
        null, pass_fds = subprocess.DEVNULL, [remote.fileno()]
        self._process = subprocess.Popen(command, stdin=null, env=env, pass_fds=pass_fds)
        remote.close()
        atexit.register(self.close)

    def start(
        self,
        module: str,
        words: Sequence[str],
        streams: Sequence[int],
        imports: Sequence[str],
        env: Mapping[str, str] | None = None,
    ) -> ForkedProcess:
        """Start ``python -m MODULE WORDS...``, which runs that module's `main` with the words.

        Args:
            module: Module whose `main` to call.
            words: Its arguments.
            streams: Descriptors of its standard input, output and error.
            imports: Modules to import beforehand; failing imports are ignored.
            env: Variables added to our environment.

        Raises:
            OSError: The server has ended.
        """
        imports = [*imports, *(name for name in SHARED if name in sys.modules)]
        request = _Start(module, list(words), dict(os.environ) | dict(env or {}), imports)
        with self._lock:
            socket.send_fds(self._socket, [msgspec.msgpack.encode(request)], streams)
            data, pidfds, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not data:
            raise ConnectionResetError("the fork server has ended")
        return ForkedProcess(pidfds[0])

    def close(self) -> None:
        """End the server; processes that it has started live on."""
        self._socket.close()
        self._process.wait()


def fork_server() -> ForkServer:
    """The fork server of this process and working directory."""
    return _fork_server(os.getpid(), os.getcwd())


@functools.cache
def _fork_server(pid: int, folder: str) -> ForkServer:
    return ForkServer()


def _serve(requests: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then reaps children itself
    gc.disable()  # imported objects stay anyway
    while True:
        data, streams, _, _ = socket.recv_fds(requests, _MAX_BYTES, 3)
        if not data:
            return
        start = msgspec.msgpack.decode(data, type=_Start)
        for name in [*start.imports, start.module]:
            with suppress(Exception):  # the new process fails with the same error, and reports it
                importlib.import_module(name)
        alone = len(os.listdir("/proc/self/task")) == 1
        gc.freeze()  # a collection would touch, and so copy, the imports' memory
        held, begin = os.pipe()
        pid = os.fork()
        if not pid:
            requests.close()
            os.close(begin)
            os.read(held, 1)
            os.close(held)
            _become(start, streams, alone)
        pidfd = os.pidfd_open(pid)  # it starts only now: after its end, its id could be reused
        socket.send_fds(requests, [b"+"], [pidfd])
        for descriptor in (begin, held, pidfd, *streams):
            os.close(descriptor)


def _become(start: _Start, streams: Sequence[int], alone: bool) -> NoReturn:
    """Run in the new process."""

    def run() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.enable()
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(start.environ)
        if not alone:
            os.execv(sys.executable, [sys.executable, "-m", start.module, *start.words])
        sys.argv = [start.module, *start.words]
        importlib.import_module(start.module).main(start.words)

    end_with(run)


def end_with(run: Callable[[], object]) -> NoReturn:
    """In a forked process: run `run`, and exit as Python does."""
    status = 1
    try:
        status = exit_status(run)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def exit_status(run: Callable[[], object]) -> int:
    """Exit status of a process that runs `run`; errors are printed as by Python."""
    try:
        run()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))

"""A worker in a process of its own, and its stand-in in the core's process.

Threads of one interpreter launch one after the other, so each rank but the first has a process.
Calls reach it through channels: a socket, a thread that carries calls out, and one that answers in
order. One channel is for all that runs in the worker's own thread; a step is answered when it is
over, while the next one is launched. Two more channels, for kept sums and for digests, wait for no
step. Both ends belong to one program and one user, parent and child, so messages are pickled.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from kvbaton.connectors.digest import BlockRange, Sums
from kvbaton.engine.collectives import AbortedError
from kvbaton.engine.executor import Worker
from kvbaton.engine.pending import Pending
from kvbaton.engine.step import StepPlan, StepResult
from kvbaton.errors import ConfigError
from kvbaton.log import begin_log
from kvbaton.signals import begin_child

log = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""Seconds for a step or sums: far more than any takes, but finite if a device hangs."""
START_S = 600.0
"""Seconds for loading weights, and for warming up."""
END_S = 5.0
"""Seconds for a process to end by itself."""

STEPS, SUMS, DIGESTS = range(3)
"""Numbers of the channels."""

COMMAND = "from kvbaton.engine.worker_process import main; main()"


class Channel:
    """Calls that one thread of a process answers in order; any thread of ours may make them.

    Args:
        connection: Connection to the process.
        gone: Makes the error for when the process has ended.
    """

    def __init__(self, connection: Connection, gone: Callable[[], Exception]) -> None:
        self._connection, self._gone = connection, gone
        self._asking, self._reading = threading.Lock(), threading.Lock()
        self._poll = select.poll()  # `Connection.poll` makes a selector each time
        self._poll.register(connection, select.POLLIN)
        self._asked: deque[Future[Any]] = deque()

    def ask(
        self, name: str, *args: Any, patience_s: float = PATIENCE_S, **options: Any
    ) -> Pending[Any]:
        """Call a method of the worker; its error, or the process's end, is raised by the result.

        Args:
            name: Name of the method.
            args: Positional arguments of the method.
            patience_s: Seconds to wait for the answer before `TimeoutError`.
            options: Keyword arguments of the method.
        """
        future: Future[Any] = Future()
        with self._asking:
            self._asked.append(future)
            with suppress(OSError):  # reading the answer will raise it
                self._connection.send((name, args, options))

        def ready() -> bool:
            if not future.done() and self._reading.acquire(blocking=False):
                try:
                    self._read(0.0)
                finally:
                    self._reading.release()
            return future.done()

        def wait() -> None:
            deadline = time.monotonic() + patience_s
            while not future.done():
                left = deadline - time.monotonic()
                if left < 0:
                    raise TimeoutError(f"a rank did not answer within {patience_s:g} s: {name}")
                with self._reading:
                    if not future.done():
                        self._read(min(left, 1.0))

        return Pending(ready, lambda: future.result(0), wait)

    def close(self) -> None:
        """Tell the process that there will be no more calls."""
        with self._reading:
            self._connection.close()

    def _read(self, timeout_s: float) -> None:
        """Take the answers that have arrived; waits up to `timeout_s` for the first one."""
        try:
            while self._asked and (self._connection.closed or self._poll.poll(1000 * timeout_s)):
                (answer, error, field), timeout_s = self._connection.recv(), 0.0
                future = self._asked.popleft()
                if field is not None:
                    future.set_exception(ConfigError(field, error))
                elif error:
                    future.set_exception(RuntimeError(error))
                else:
                    future.set_result(answer)
        except (OSError, EOFError):
            while self._asked:
                self._asked.popleft().set_exception(self._gone())


class WorkerProcess(Worker):
    """`Worker` that another process runs; results of its steps are not transferred.

    The process dies with the thread that makes this object.

    Args:
        make: Makes the worker, in the process; is pickled.
        name: Name for error messages.
    """

    def __init__(self, make: Callable[[], Worker], name: str) -> None:
        self.name, self._killed = name, False
        pairs = [socket.socketpair() for _ in (STEPS, SUMS, DIGESTS)]
        descriptors = [theirs.fileno() for _, theirs in pairs]
        level = logging.getLogger().getEffectiveLevel()
        self._process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *map(str, (os.getpid(), level, *descriptors))],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
        )
        for _, theirs in pairs:
            theirs.close()
        self._channels = [Channel(Connection(ours.detach()), self._gone) for ours, _ in pairs]
        self._made = self._ask("make", make, patience_s=START_S)

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def _ask(self, name: str, *args: Any, **options: Any) -> Pending[Any]:
        return self._channels[STEPS].ask(name, *args, **options)

    def _gone(self) -> Exception:
        if self._killed:
            return AbortedError("another rank failed, or did not come in time")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        return RuntimeError(f"{self.name} ended with code {self._process.returncode}")

    def check(self) -> None:
        """See `Worker.check`."""
        if self._process.poll() is not None:
            raise self._gone()

    def wait_made(self) -> None:
        """Wait until the worker is made; raises its error."""
        self._made.result()

    def fit(self) -> int:
        """See `Worker.fit`."""
        blocks: int = self._ask("fit", patience_s=START_S).result()
        return blocks

    def start(self, num_blocks: int) -> None:
        """See `Worker.start`."""
        self._ask("start", num_blocks, patience_s=START_S).result()

    def forget(self) -> None:
        """See `Worker.forget`."""
        self._ask("forget").result()

    def run(self, plan: StepPlan) -> Pending[StepResult]:
        """See `Worker.run`; the result is None, since the first rank has the same."""
        return self._ask("run", plan.encoded)

    def sums(self, group: int, blocks: Sequence[int], *, in_flight: bool = False) -> Pending[Sums]:
        """See `Worker.sums`."""
        if in_flight:
            return self._ask("sums", group, blocks, in_flight=True)
        return self._channels[SUMS].ask("sums", group, blocks)

    def digest(self, ranges: Sequence[BlockRange], *, keep: bool = False) -> Pending[list[Sums]]:
        """See `Worker.digest`."""
        return self._channels[DIGESTS].ask("digest", ranges, keep=keep)

    def kill(self) -> None:
        """Kill the process, so that whatever waits for it fails."""
        self._killed = True
        self._process.kill()

    def close(self) -> None:
        """See `Worker.close`. Idempotent."""
        if not self._killed:  # else the worker's steps may hang, and so would `close`
            with suppress(Exception):
                self._ask("close").result()
        for channel in self._channels:
            channel.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)


# --- in the process ---


class _Served:
    """Holds the worker, which the first call makes."""

    worker: Worker

    def call(self, name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Call a method of the worker; the caller waits if the result is a `Pending`."""
        if name == "make":
            (make,) = args
            self.worker = make()
            return None
        if name == "run":
            step = self.worker.run(StepPlan.decode(*args))
            return Pending(step.ready, lambda: None, step.wait)
        return getattr(self.worker, name)(*args, **options)


def _serve(connection: Connection, served: _Served, answer: Callable[[Pending[Any]], None]) -> None:
    """Carry out the calls of a channel until it is closed."""
    while True:
        try:
            call = connection.recv()
        except (EOFError, OSError):  # the parent has closed it
            os._exit(0)  # nothing needs cleaning up, and a device may hang
        try:
            made = served.call(*call)
        except Exception as error:
            answer(Pending(lambda: True, partial(_raise, error)))
        else:
            answer(made if isinstance(made, Pending) else Pending.of(made))


def _raise(error: Exception) -> None:
    raise error


def _send(connection: Connection, made: Pending[Any]) -> None:
    """Send a result or an error, as `Channel` reads it."""
    answer: tuple[Any, str, str | None]
    try:
        answer = made.result(), "", None
    except ConfigError as error:
        answer = None, error.reason, error.field
    except Exception as error:
        log.exception("a rank fails")
        answer = None, f"{type(error).__name__}: {error}", None
    with suppress(OSError):  # the parent has died; `_serve` notices
        connection.send(answer)


def _tell(connection: Connection, waiting: SimpleQueue[Pending[Any]]) -> None:
    """Answer the calls of a channel in order, for ever."""
    while True:
        _send(connection, waiting.get())


def main() -> None:
    """Entry point of the process: ``parent's pid, log level, descriptors of the channels``."""
    parent, level, *descriptors = map(int, sys.argv[1:])
    # Die with the parent, whatever our threads wait for; see `_serve` for a parent that closes us.
    begin_child(signal.SIGTERM, parent=parent)
    faulthandler.enable()  # else a crash in a library would leave no trace
    begin_log(level)
    served = _Served()
    channels: list[tuple[Connection, _Served, Callable[[Pending[Any]], None]]] = []
    for descriptor in descriptors:
        connection, waiting = Connection(descriptor), SimpleQueue[Pending[Any]]()
        # A thread of its own for answers: the parent may read none before it has asked all.
        threading.Thread(target=_tell, args=(connection, waiting), daemon=True).start()
        channels.append((connection, served, waiting.put))
    for channel in channels[SUMS:]:
        threading.Thread(target=_serve, args=channel, daemon=True).start()
    _serve(*channels[STEPS])

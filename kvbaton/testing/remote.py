"""Controls another process that uses a connector, by lines of text and signals."""

from __future__ import annotations

import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from subprocess import PIPE, Popen
from typing import Self

from kvbaton.testing.kit import CaseFailure, KitBroke, kits_own_time, tasks_per_core

STARTS_WITHIN_S = 60.0
"""Maximum seconds until a process has started and done its imports, on an idle machine."""
WORKER = "kvbaton.testing.remote_worker"


class CaseLate(CaseFailure):
    """An answer did not come in time."""


class RemoteProcess:
    """A process that is killed at the end of the ``with`` block.

    Args:
        command: Command line of the process.
        patience: Seconds to wait for a line.
    """

    def __init__(self, command: Sequence[str], patience: float) -> None:
        self._patience = patience
        self._rest = b""
        self._lines: list[str] = []
        self._errors = tempfile.TemporaryFile()
        try:
            process = Popen(command, bufsize=0, stdin=PIPE, stdout=PIPE, stderr=self._errors)
        except OSError as error:
            raise KitBroke(f"can't start a process: {error}") from error
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._in, self._out = process, process.stdin, process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
        for file in (self._in, self._out, self._errors):
            file.close()

    def line(
        self, *wanted: str, within: float | None = None, idle: Callable[[], object] | None = None
    ) -> list[str]:
        """The words of the next line that begins with a wanted word; other lines are skipped.

        Args:
            wanted: Wanted first words.
            within: Seconds to wait; None means `patience`.
            idle: Called about every millisecond while waiting.

        Raises:
            CaseFailure: The line does not come in time (`CaseLate`), or the process ends first.
        """
        deadline = time.monotonic() + (within or self._patience)
        ready = select.poll()  # `select` takes no descriptor above 1,023
        ready.register(self._out, select.POLLIN)
        while True:
            while b"\n" not in self._rest:
                while not ready.poll(1.0 if idle else 1e3 * max(0.0, deadline - time.monotonic())):
                    late = f"the remote process did not say {' or '.join(wanted)} in time"
                    if time.monotonic() >= deadline:
                        raise CaseLate(late)
                    if idle is not None:
                        idle()
                chunk = os.read(self._out.fileno(), 1 << 16)
                if not chunk:
                    self._errors.seek(0)
                    last_words = self._errors.read().decode(errors="replace")[-2000:]
                    raise CaseFailure(f"the remote process has ended: {last_words}")
                self._rest += chunk
            line, _, self._rest = self._rest.partition(b"\n")
            self._lines.append(line.decode())
            words = line.decode().split()
            if words and words[0] in wanted:
                return words

    def all_lines(self) -> list[list[str]]:
        """The words of all lines of a dead process, including those that `line` skipped."""
        self._rest += self._out.read()
        *rest, self._rest = self._rest.split(b"\n")
        self._lines += [line.decode() for line in rest]
        return [line.split() for line in self._lines]

    def started(self) -> list[str]:
        """Wait for a line ``ready`` or ``card``; returns its words.

        Raises:
            CaseFailure: The process ends first, or is late after it has printed ``begun``.
            KitBroke: It is late before that, which is not the connector's fault.
        """
        within = STARTS_WITHIN_S * tasks_per_core()
        with kits_own_time():
            try:
                words = self.line("begun", "ready", "card", within=within)
            except CaseLate as late:
                raise KitBroke(f"a process starts too slowly: {late}") from late
        return self.line("ready", "card", within=within) if words == ["begun"] else words

    def card(self) -> bytes:
        """Wait for a started worker; returns the card of its transport."""
        return bytes.fromhex(self.started()[1])

    def tell(self, words: str) -> None:
        """Send a line."""
        self._in.write(words.encode() + b"\n")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Send ``SIGKILL`` and wait for the end."""
        self._process.kill()
        self._process.wait()


def start_worker(kind: str, spec: str, *words: object, patience: float) -> RemoteProcess:
    """Start a `remote_worker` over a connector; it may not be ready yet.

    Args:
        kind: ``store`` or ``transport``.
        spec: Spec of the connector.
        words: Further arguments of the worker.
        patience: See `RemoteProcess`.
    """
    command = [sys.executable, "-m", WORKER, kind, spec, *map(str, words)]
    return RemoteProcess(command, patience)

"""A hold on another process that works with a connector: lines out, lines in, signals."""

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
"""A process that was started, with all that it imports, on a machine that is not busy."""
WORKER = "kvbaton.testing.remote_worker"


class CaseLate(CaseFailure):
    """An answer did not come in time."""


class RemoteProcess:
    """A process that is surely gone at the end of the block.

    Args:
        command: of it.
        patience: seconds for which a line is waited for.
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
        """The words of the next line whose first word is one of those wanted; others are skipped.

        Args:
            wanted: first words.
            within: seconds; None takes the process's patience.
            idle: called about every millisecond until then.

        Raises:
            CaseFailure: it does not come in time (`CaseLate`), or the process ends first.
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
        """The words of each line of a process that is dead, those that `line` skipped included."""
        self._rest += self._out.read()
        *rest, self._rest = self._rest.split(b"\n")
        self._lines += [line.decode() for line in rest]
        return [line.split() for line in self._lines]

    def started(self) -> list[str]:
        """Wait for ``ready`` or a card.

        Raises:
            CaseFailure: the process ends first, or is late after it has said ``begun``.
            KitBroke: it is late before, which is not the connector's fault.
        """
        within = STARTS_WITHIN_S * tasks_per_core()
        with kits_own_time():
            try:
                words = self.line("begun", "ready", "card", within=within)
            except CaseLate as late:
                raise KitBroke(f"a process starts too slowly: {late}") from late
        return self.line("ready", "card", within=within) if words == ["begun"] else words

    def card(self) -> bytes:
        """Of the transport of a remote worker that was just started."""
        return bytes.fromhex(self.started()[1])

    def tell(self, words: str) -> None:
        """Send a line."""
        self._in.write(words.encode() + b"\n")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """``SIGKILL`` and wait."""
        self._process.kill()
        self._process.wait()


def start_worker(kind: str, spec: str, *words: object, patience: float) -> RemoteProcess:
    """A `remote_worker` over a connector; started, perhaps not ready.

    Args:
        kind: ``store`` or ``transport``.
        spec: of the connector.
        words: further arguments of the worker.
        patience: as of `RemoteProcess`.
    """
    command = [sys.executable, "-m", WORKER, kind, spec, *map(str, words)]
    return RemoteProcess(command, patience)

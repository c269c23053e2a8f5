"""The kit's remote processes, forked from one that has imported their modules.

A run of the kit starts dozens of them, and tests run it over dozens of connectors.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from subprocess import Popen
from typing import Any

from kvbaton.connectors.registry import STORES, TRANSPORTS, class_of
from kvbaton.testing.kit import kits_own_time
from kvbaton.testing.remote import WORKER
from tests.support.fork_server import fork_server
from tests.support.forked_command import QUICK_UCX


class ForkedPopen:
    """The subset of `subprocess.Popen` that `RemoteProcess` needs.

    Args:
        module: Module whose `main` is called.
        words: Its arguments.
        imports: Modules to import beforehand.
        errors: Descriptor for its standard error.
    """

    def __init__(
        self, module: str, words: Sequence[str], imports: Sequence[str], errors: int
    ) -> None:
        (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
        self.stdin, self.stdout = open(ours_in, "wb", 0), open(ours_out, "rb", 0)
        try:
            streams = [theirs_in, theirs_out, errors]
            with kits_own_time():  # the server imports the process' modules
                self._process = fork_server().start(module, words, streams, imports, QUICK_UCX)
        finally:
            os.close(theirs_in)
            os.close(theirs_out)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Send ``SIGKILL``."""
        self._process.kill()

    def wait(self) -> None:
        """Wait until the process has ended."""
        self._process.wait()


def popen(command: Sequence[str], **options: Any) -> ForkedPopen | Popen[bytes]:
    """Replaces `subprocess.Popen`: the kit's workers are forked."""
    _, *words = command
    if words[:2] != ["-m", WORKER]:
        return Popen(command, **options)
    kind, spec = words[2:4]
    module = class_of(STORES if kind == "store" else TRANSPORTS, spec).__module__
    return ForkedPopen(WORKER, words[2:], [module], options["stderr"].fileno())

"""One child process: started so that it can't outlive us, its output passed on line by line."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from kvbaton.engine.process import die_with_parent

TAIL_LINES = 30
MAX_LINE = 1 << 16


class Child:
    """A process of the cluster. Make one with `start`.

    It leads a process group of its own, so that Ctrl-C reaches only us and `kill` reaches all that
    it started; and Linux kills it when we die, however that happens.

    Attributes:
        name: as shown to people.
        tail: the last lines that it wrote.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process = process
        self.exited = asyncio.create_task(self._run(), name=f"exit of {name}")

    @classmethod
    async def start(
        cls,
        name: str,
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """Run ``kvbaton`` with these words."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "kvbaton",
            *words,
            env=env,
            pass_fds=tuple(pass_fds),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=MAX_LINE,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        return cls(name, process)

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self._process.pid

    def terminate(self) -> None:
        """Ask it to stop."""
        if not self.exited.done():
            with suppress(ProcessLookupError):  # it has just ended by itself
                self._process.terminate()

    def kill(self) -> None:
        """End it and all that it started, at once; also what a dead one left behind."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, grace_s: float) -> None:
        """Ask it to stop, and end it if it does not within `grace_s` seconds."""
        self.terminate()
        await asyncio.wait([self.exited], timeout=grace_s)
        if not self.exited.done():
            print(f"{self.name}: did not stop in {grace_s:g} s; killing it", file=sys.stderr)
        self.kill()
        await self.exited

    async def _run(self) -> int:
        assert self._process.stdout is not None
        output = self._process.stdout

        async def pass_on() -> None:
            while True:
                try:
                    line = await output.readline()
                except ValueError:  # longer than the limit: readline has dropped it
                    line = b"(a line too long to show)\n"
                if not line:
                    return
                text = line.decode(errors="replace").rstrip()
                self.tail.append(text)
                print(f"[{self.name}] {text}", file=sys.stderr, flush=True)

        reader = asyncio.create_task(pass_on())
        status = await self._process.wait()
        # Its last words are read before anybody is told; a grandchild may hold the pipe open.
        await asyncio.wait([reader], timeout=1.0)
        reader.cancel()
        return status

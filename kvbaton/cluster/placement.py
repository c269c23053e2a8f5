"""Where a cluster's nodes run, and the one place that needs nothing: this machine."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Self

from typing_extensions import override

from kvbaton.cluster.config import ClusterConfig, shares, visible_gpus
from kvbaton.connectors.address import is_loopback, is_wildcard
from kvbaton.signals import die_with_parent

TAIL_LINES = 30
SHOWN_LINES = 20
MAX_LINE = 1 << 16


class StartError(Exception):
    """The cluster did not come up, or fell apart; the text is for the user."""


class NodeProcess(ABC):
    """A process of the cluster, wherever it runs.

    Args:
        name: as shown to people.

    Attributes:
        name: as given.
        tail: the last lines that it wrote.
        exited: done when it has ended; the result tells how, in words.
    """

    exited: asyncio.Task[str]

    def __init__(self, name: str) -> None:
        self.name = name
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)

    async def heard(self, line: str) -> None:
        """It has written a line."""
        self.tail.append(line)
        with suppress(OSError):  # nobody reads ours any more; its own must be read all the same
            print(f"[{self.name}] {line}", file=sys.stderr, flush=True)

    @property
    def obituary(self) -> str:
        """How it ended, and its last lines."""
        lines = "\n".join(f"    {line}" for line in list(self.tail)[-SHOWN_LINES:])
        how = f"{self.name} {self.exited.result()}"
        return how + (f"; its last lines:\n{lines}" if lines else "")

    @abstractmethod
    async def stop(self, grace_s: float) -> None:
        """Ask it to stop, and end it if it does not within `grace_s` seconds."""

    @abstractmethod
    def kill(self) -> None:
        """End it and all that it started, at once."""


class Placement(ABC):
    """Where nodes run, and what of a machine each of them gets.

    Args:
        config: of the cluster; a placement may complete it.

    Attributes:
        config: as completed.
        address: of this machine, as nodes reach it when the router listens on all addresses.
    """

    address: str

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config

    @abstractmethod
    async def open(self) -> None:
        """Wait until there is room for all nodes.

        Raises:
            StartError: there will be none.
        """

    @abstractmethod
    async def start(self, index: int, router_url: str) -> NodeProcess:
        """Start a node, the first time or again.

        Args:
            index: which one of `ClusterConfig.node_names`.
            router_url: where it registers.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the room back; all nodes have ended."""


class LocalPlacement(Placement):
    """Nodes are children of this process, and share its machine."""

    def __init__(self, config: ClusterConfig) -> None:
        if config.cluster_key is None and not (
            is_loopback(config.host) or is_wildcard(config.host)
        ):
            # The router is not reached by loopback, by which it else knows who is on this machine.
            config = replace(config, cluster_key=secrets.token_hex(32))
        super().__init__(config)
        self.address = "[::1]" if config.host == "::" else "127.0.0.1"
        cores = len(os.sched_getaffinity(0))
        self._shares = shares(config.engine, len(config.node_names), visible_gpus(), cores)

    @override
    async def open(self) -> None:
        """There is always room."""

    @override
    async def start(self, index: int, router_url: str) -> NodeProcess:
        config, (flags, env) = self.config, self._shares[index]
        role, name = config.node_names[index]
        words = config.node_words(role, name, router_url, flags)
        return await Child.start(name, words, env={**os.environ, **config.node_env(name), **env})

    @override
    def close(self) -> None:
        """Nothing was taken."""


class Child(NodeProcess):
    """A process on this machine. Make one with `start`.

    It leads a process group of its own, so that Ctrl-C reaches only us and `kill` reaches all that
    it started; and Linux kills it when we die, however that happens.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        super().__init__(name)
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
    ) -> Self:
        """Run ``kvbaton`` with these words."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "kvbaton",
            *words,
            env={**env, "PYTHONUNBUFFERED": "1"},
            pass_fds=tuple(pass_fds),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=MAX_LINE,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        return cls(name, process)

    @override
    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    @override
    async def stop(self, grace_s: float) -> None:
        if not self.exited.done():
            with suppress(ProcessLookupError):  # it has just ended by itself
                self._process.terminate()
        await asyncio.wait([self.exited], timeout=grace_s)
        if not self.exited.done():
            self.kill()  # first: it may take long until the line is taken in
            await self.heard(f"did not stop in {grace_s:g} s; killed it")
        await self.exited

    async def _run(self) -> str:
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
                await self.heard(line.decode(errors="replace").rstrip())

        reader = asyncio.create_task(pass_on())
        status = await self._process.wait()
        # Its last words are read before anybody is told; a grandchild may hold the pipe open.
        await asyncio.wait([reader], timeout=1.0)
        reader.cancel()
        self.kill()  # what it left behind
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"

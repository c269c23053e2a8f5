"""Where a cluster's nodes run: the interface `Placement`, and the one for this machine."""

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
    """The cluster did not start, or its router ended; the text is for the user."""


class NodeProcess(ABC):
    """A process of the cluster, wherever it runs.

    Args:
        name: Name, as shown to people.

    Attributes:
        name: Name, as shown to people.
        tail: Last lines of its output.
        exited: Done when the process has ended; the result says how, for people.
    """

    exited: asyncio.Task[str]

    def __init__(self, name: str) -> None:
        self.name = name
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)

    async def heard(self, line: str) -> None:
        """Take a line of its output: keep it, and print it."""
        self.tail.append(line)
        with suppress(OSError):  # our output may be closed; the child's must be read all the same
            print(f"[{self.name}] {line}", file=sys.stderr, flush=True)

    @property
    def obituary(self) -> str:
        """How the process ended, and its last lines."""
        lines = "\n".join(f"    {line}" for line in list(self.tail)[-SHOWN_LINES:])
        how = f"{self.name} {self.exited.result()}"
        return how + (f"; its last lines:\n{lines}" if lines else "")

    @abstractmethod
    async def stop(self, grace_s: float) -> None:
        """Ask the process to stop, and kill it if it does not within `grace_s` seconds."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the process and all that it started."""


class Placement(ABC):
    """Starts nodes on machines, and gives each node its GPUs or cores.

    Args:
        config: Settings of the cluster; a placement may complete them.

    Attributes:
        config: Completed settings.
        address: Address of this machine for nodes, used if the router listens on all addresses.
    """

    address: str

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config

    async def open(self) -> None:  # noqa: B027
        """Wait until there is room for all nodes; unless overridden, there always is.

        Raises:
            StartError: There is no room in time.
        """

    @abstractmethod
    async def start(self, index: int, router_url: str) -> NodeProcess:
        """Start a node, the first time or again.

        Args:
            index: Index of the node in `ClusterConfig.node_names`.
            router_url: URL at which it registers.
        """

    def close(self) -> None:  # noqa: B027
        """Release the machines, if any are held, after all nodes have ended."""


class LocalPlacement(Placement):
    """Runs nodes as children of this process, on its machine."""

    def __init__(self, config: ClusterConfig) -> None:
        if config.cluster_key is None and not (
            is_loopback(config.host) or is_wildcard(config.host)
        ):
            # Nodes reach the router not by loopback, so the key must show that they may register.
            config = replace(config, cluster_key=secrets.token_hex(32))
        super().__init__(config)
        self.address = "[::1]" if config.host == "::" else "127.0.0.1"
        cores = len(os.sched_getaffinity(0))
        self._shares = shares(config.engine, len(config.node_names), visible_gpus(), cores)

    @override
    async def start(self, index: int, router_url: str) -> NodeProcess:
        config, (flags, env) = self.config, self._shares[index]
        role, name = config.node_names[index]
        words = config.node_words(role, name, router_url, flags)
        return await Child.start(name, words, env={**os.environ, **config.node_env(name), **env})


class Child(NodeProcess):
    """A child process on this machine. Make one with `start`.

    It leads a process group of its own, so that Ctrl-C reaches only this process, and `kill`
    reaches everything that the child started. Linux kills it when this process dies.
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
        """Run ``kvbaton`` with these arguments."""
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
            with suppress(ProcessLookupError):  # it has just ended
                self._process.terminate()
        await asyncio.wait([self.exited], timeout=grace_s)
        if not self.exited.done():
            self.kill()  # before `heard`, which may block
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
        # Read its last lines before `exited` is done; a grandchild may keep the pipe open.
        await asyncio.wait([reader], timeout=1.0)
        reader.cancel()
        self.kill()  # processes that it left behind
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"

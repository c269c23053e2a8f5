"""Starts a cluster, shows how it comes up, serves, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from kvbaton.cluster.config import ClusterConfig, shares, visible_gpus
from kvbaton.engine.process import die_with_parent
from kvbaton.messages.nodes import NodesView
from kvbaton.server.network import bearer, bind, registration_token, url_of

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""While it starts."""
WATCH_S = 1.0
"""While it serves."""
SHOWN_LINES = 20


class StartError(Exception):
    """The cluster did not come up, or fell apart; the text is for the user."""


def run(config: ClusterConfig) -> int:
    """Run a cluster until told to stop; returns the exit status.

    Raises:
        ConfigError: the router's address is taken.
    """
    logging.basicConfig(level=config.log_level.upper(), format="%(levelname)s %(message)s")
    return asyncio.run(Cluster(config).run())


class Cluster:
    """A router and its nodes.

    Args:
        config: see there.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.url = ""
        self.router: Child | None = None
        self.nodes: list[Child] = []
        self._shown: dict[str, str] = {}
        self._began = time.monotonic()
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Startup, serve, shutdown; returns the exit status."""

        def on_signal() -> None:
            if self._stop.is_set():  # the second time: no more patience
                for child in self._children():
                    child.kill()
            self._stop.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        living = asyncio.create_task(self._live())
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([living, stopped], return_when=asyncio.FIRST_COMPLETED)
            if living.done():
                return living.result()
            print("\nstopping", file=sys.stderr, flush=True)
            return 0
        except StartError as error:
            print(f"kvbaton: {error}", file=sys.stderr)
            return 1
        finally:
            living.cancel()
            stopped.cancel()
            await asyncio.gather(living, stopped, return_exceptions=True)
            await self.shutdown()

    async def _live(self) -> int:
        config = self.config
        await self.start()
        await self.until_ready()
        if config.prompt is None and config.chat is None:
            body = {"model": config.model_name, "prompt": "Hello", "max_tokens": 16}
            data = shlex.quote(msgspec.json.encode(body).decode())
            header = "-H 'Content-Type: application/json'"
            if config.api_keys:
                header += " -H 'Authorization: Bearer YOUR_API_KEY'"
            print(f"\nready: {self.url}/v1\n")
            print(f"curl {self.url}/v1/completions {header} -d {data}\n", flush=True)
            await self.serve()
            return 1
        from kvbaton.cluster.conversation import ask

        key = next(iter(config.api_keys), None)
        return await ask(self.url, config, bearer(key), self._member_headers())

    # --- startup ---

    async def start(self) -> None:
        """Start all processes.

        Raises:
            ConfigError: the router's address is taken.
        """
        config, env = self.config, self.config.environment()
        with bind(config.host, config.port) as listener:
            # Where the router listens on every address, it is reached by loopback.
            url = url_of(listener).replace("//0.0.0.0:", "//127.0.0.1:")
            self.url = url.replace("//[::]:", "//[::1]:")
            words = config.router_words(listener.fileno())
            fds = [listener.fileno()]
            self.router = await Child.start("router", words, env=env, pass_fds=fds)
        names, cores = config.node_names, len(os.sched_getaffinity(0))
        parts = shares(config.engine, len(names), visible_gpus(), cores)
        for (role, name), (flags, own_env) in zip(names, parts, strict=True):
            self._show(name, "starting")
            words = config.node_words(role, name, self.url, flags)
            self.nodes.append(await Child.start(name, words, env={**env, **own_env}))

    async def until_ready(self) -> None:
        """Wait until every node is ready and every pair may hand over.

        Raises:
            StartError: a process ended, or it takes too long.
        """
        give_up = time.monotonic() + self.config.start_timeout_s
        while True:
            for child in self._children():
                if child.exited.done():
                    raise StartError(_obituary(child))
            view = await self._nodes()
            if view is not None:
                for node in view.nodes:
                    self._show(node.node_id, node.state, time.monotonic() - self._began)
                ready = sum(state == "ready" for state in self._shown.values())
                pairs = len(view.pairs), len(view.encoder_pairs)
                if ready == len(self.nodes) and pairs == self.config.num_pairs:
                    return
            if time.monotonic() >= give_up:
                states = ", ".join(f"{name} is {state}" for name, state in self._shown.items())
                raise StartError(f"not ready after {self.config.start_timeout_s:g} s: {states}")
            await asyncio.wait(self._exits(), timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)

    async def _nodes(self) -> NodesView | None:
        """The router's answer to ``GET /nodes``; None while it does not answer."""
        # Takes half a second, in which the processes that were started before do the same.
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=5.0)
        try:
            async with (
                aiohttp.ClientSession(headers=self._member_headers(), timeout=timeout) as session,
                session.get(f"{self.url}/nodes") as response,
            ):
                response.raise_for_status()
                return msgspec.json.decode(await response.read(), type=NodesView)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            logger.debug("the router does not answer: %r", error)
            return None

    def _member_headers(self) -> Mapping[str, str]:
        key = self.config.cluster_key
        return bearer(registration_token(key) if key else None)

    def _show(self, name: str, state: str, seconds: float | None = None) -> None:
        """Say that a node is in a state, if it was in another; ready after so many seconds."""
        if self._shown.get(name) == state:
            return
        self._shown[name] = state
        took = f" in {seconds:.1f} s" if state == "ready" and seconds is not None else ""
        print(f"{name}: {state}{took}", flush=True)

    # --- serve ---

    async def serve(self) -> None:
        """Until something breaks that we can't go on without; show what happens.

        Raises:
            StartError: the router, or the last node, ended.
        """
        watching = asyncio.create_task(self._watch())
        gone: set[str] = set()
        try:
            while len(gone) < len(self.nodes):
                ends = [*self._exits(gone), watching]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                assert self.router is not None
                if self.router.exited.done():
                    raise StartError(_obituary(self.router))
                if watching.done():
                    watching.result()
                for child in self.nodes:
                    if child.exited.done() and child.name not in gone:
                        gone.add(child.name)
                        print(_obituary(child), file=sys.stderr)
            raise StartError("no node is left")
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self) -> None:
        """Show the cluster, for ever."""
        from kvbaton.cluster.display import ClusterDisplay

        with ClusterDisplay() as display:
            while True:
                view = await self._nodes()
                if view is not None:
                    states = {node.node_id: node.state for node in view.nodes}
                    for name in {**self._shown, **states}:
                        self._show(name, states.get(name, "gone"))
                    display.show(view)
                await asyncio.sleep(WATCH_S)

    def _exits(self, known: Set[str] = frozenset()) -> list[asyncio.Task[Any]]:
        assert self.router is not None
        return [c.exited for c in (self.router, *self.nodes) if c.name not in known]

    # --- shutdown ---

    def _children(self) -> list[Child]:
        return [*self.nodes, *([self.router] if self.router is not None else [])]

    async def shutdown(self) -> None:
        """Stop the nodes, then the router; kill what does not stop in time."""
        grace = self.config.stop_timeout_s
        await asyncio.gather(*(child.stop(grace) for child in self.nodes))
        if self.router is not None:
            await self.router.stop(grace)


def _obituary(child: Child) -> str:
    status = child.exited.result()
    lines = "\n".join(f"    {line}" for line in list(child.tail)[-SHOWN_LINES:])
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"{child.name} {how}" + (f"; its last lines:\n{lines}" if lines else "")


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

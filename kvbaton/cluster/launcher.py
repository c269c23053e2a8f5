"""Starts a cluster, shows its start, keeps it running, and stops all of its processes."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping

import msgspec

from kvbaton.cluster.config import ClusterConfig
from kvbaton.cluster.placement import Child, LocalPlacement, NodeProcess, Placement, StartError
from kvbaton.messages.nodes import NodesView
from kvbaton.router.config import RoutingPolicy
from kvbaton.server.network import bearer, bind, registration_token, url_of
from kvbaton.signals import STOP_SIGNALS

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""Seconds between looks at the nodes while the cluster starts."""
WATCH_S = 1.0
"""Seconds between looks at the nodes while the cluster serves."""
LIVE_S, LIVE_FAILURES = 10.0, 6
"""Seconds between looks at nodes' ``/live``, and failures in a row of a node until it is killed, as
in the Helm chart."""
PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Seconds until a node that ended is started again: at first, and at most if it keeps ending."""
STOP_MARGIN_S = 5.0
"""Seconds beyond those for its requests that each process may take to stop."""
LASTING_S = 60.0
"""Seconds after which a node that ends counts as having run well: the pause is `PAUSE_S` again."""


def run(config: ClusterConfig) -> int:
    """Run a cluster until told to stop; return the exit status.

    Raises:
        ConfigError: The router's address is taken, there is no such policy, or the Ray cluster
            can't be used.
    """
    logging.basicConfig(level=config.log_level.upper(), format="%(levelname)s %(message)s")
    if config.routing.policy != RoutingPolicy.policy:  # the router would say so after all started
        from kvbaton.router.costs import CostModel
        from kvbaton.router.policies import load_policy

        load_policy(config.routing, CostModel())
    if config.ray is None:
        placement: Placement = LocalPlacement(config)
    else:
        from kvbaton.cluster.ray_placement import RayPlacement

        placement = RayPlacement(config)
    try:
        return asyncio.run(Cluster(placement).run())
    finally:
        placement.close()


class Cluster:
    """A router, which is a child of this process, and its nodes.

    Args:
        placement: Starts the nodes.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.config = placement.config
        self.url = ""
        self.router: Child | None = None
        self.nodes: list[NodeProcess] = []
        self._node_url = ""
        self._shown: dict[str, str] = {}
        self._starting: dict[str, float] = {}
        # By node: the newest generation that the router knows, and the last one that has ended.
        self._lives: dict[str, str] = {}
        self._ended: dict[str, str | None] = {}
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Start, serve and shut down; return the exit status."""

        def on_signal(number: int) -> None:
            if self._stop.is_set() and number == signal.SIGINT:  # a second Ctrl-C: kill at once
                for child in self._children():
                    child.kill()
            self._stop.set()

        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, on_signal, number)
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
            if authority := config.tls.ssl_ca_certs or config.tls.ssl_certfile:
                header = f"--cacert {shlex.quote(authority)} {header}"
            print(f"\nready: {self.url}/v1\n")
            print(f"curl {self.url}/v1/completions {header} -d {data}\n", flush=True)
            await self.serve()
            return 1
        from kvbaton.cluster.chat import ask

        key = next(iter(config.api_keys), None)
        return await ask(self.url, config, bearer(key), self._member_headers())

    # --- startup ---

    async def start(self) -> None:
        """Start all processes.

        Raises:
            ConfigError: The router's address is taken.
            StartError: There is no room for the nodes.
        """
        config = self.config
        with bind(config.host, config.port) as listener:
            # If the router listens on every address, this process reaches it by loopback.
            url = url_of(listener, config.tls.scheme)
            self.url = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
            there = f"//{self.placement.address}:"
            self._node_url = url.replace("//0.0.0.0:", there).replace("//[::]:", there)
            words, fd = config.router_words(listener.fileno()), listener.fileno()
            env = {**os.environ, **config.secrets()}
            self.router = await Child.start("router", words, env=env, pass_fds=[fd])
        await self.placement.open()
        for index in range(len(config.node_names)):
            self.nodes.append(await self._start_node(index))

    async def _start_node(self, index: int) -> NodeProcess:
        _, name = self.config.node_names[index]
        self._starting[name] = time.monotonic()
        self._show(name, "starting")
        return await self.placement.start(index, self._node_url)

    async def until_ready(self) -> None:
        """Wait until every node is ready and every pair can hand over.

        Raises:
            StartError: A process ended, or it takes too long.
        """
        give_up = time.monotonic() + self.config.start_timeout_s
        while True:
            for child in self._children():
                if child.exited.done():
                    raise StartError(child.obituary)
            view = await self._nodes()
            if view is not None:
                self._show_changes(view)
                ready = sum(state == "ready" for state in self._shown.values())
                pairs = len(view.pairs), len(view.encoder_pairs)
                if ready == len(self.nodes) and pairs == self.config.num_pairs:
                    return
            if time.monotonic() >= give_up:
                states = ", ".join(f"{name} is {state}" for name, state in self._shown.items())
                raise StartError(f"not ready after {self.config.start_timeout_s:g} s: {states}")
            exits = [child.exited for child in self._children()]
            await asyncio.wait(exits, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)

    async def _nodes(self) -> NodesView | None:
        """The router's answer to ``GET /nodes``; None while it does not answer."""
        status, body = await self._get(f"{self.url}/nodes")
        return msgspec.json.decode(body, type=NodesView) if status == 200 else None

    async def _get(self, url: str) -> tuple[int, bytes]:
        """Status and body of a page of the router or a node; 0 and nothing without an answer."""
        # The import takes half a second; the processes started before import it meanwhile, too.
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=5.0)
        try:
            async with (
                aiohttp.ClientSession(headers=self._member_headers(), timeout=timeout) as session,
                session.get(url, ssl=self.config.tls.client(url)) as response,
            ):
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            logger.debug("%s does not answer: %r", url, error)
            return 0, b""

    def _member_headers(self) -> Mapping[str, str]:
        return bearer(registration_token(self.config.cluster_key))

    def _show_changes(self, view: NodesView) -> None:
        """Show changed states, except of generations that have ended: the router may be late."""
        for node in view.nodes:
            self._lives[node.node_id] = node.generation
            if node.generation != self._ended.get(node.node_id):
                self._show(node.node_id, node.state)
        for name in self._shown.keys() - {node.node_id for node in view.nodes}:
            if self._lives.get(name) != self._ended.get(name):
                self._show(name, "gone")

    def _show(self, name: str, state: str) -> None:
        if self._shown.get(name) == state:
            return
        self._shown[name] = state
        took = ""
        if state == "ready" and name in self._starting:
            took = f" in {time.monotonic() - self._starting.pop(name):.1f} s"
        print(f"{name}: {state}{took}", flush=True)

    # --- serve ---

    async def serve(self) -> None:
        """Serve until the router ends: show the cluster, and restart nodes that end.

        Raises:
            StartError: The router ended.
        """
        assert self.router is not None
        tasks = [asyncio.create_task(self._keep(index)) for index in range(len(self.nodes))]
        tasks += map(asyncio.create_task, (self._watch(), self._kill_broken()))
        try:
            await asyncio.wait([self.router.exited, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # tasks only end by an exception
            raise StartError(self.router.obituary)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, index: int) -> None:
        """Restart a node whenever it ends, after a pause that grows while it keeps ending early."""
        pause = PAUSE_S
        while True:
            node, began = self.nodes[index], time.monotonic()
            await asyncio.wait([node.exited])
            self._ended[node.name] = self._lives.get(node.name)
            print(node.obituary, file=sys.stderr, flush=True)
            if time.monotonic() - began > LASTING_S:
                pause = PAUSE_S
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_S)
            try:
                self.nodes[index] = await self._start_node(index)
            except OSError as error:  # no room for a process or a file
                told = f"{node.name} can't be started, trying on: {error}"
                print(told, file=sys.stderr, flush=True)

    async def _watch(self) -> None:
        """Show the cluster until cancelled."""
        from kvbaton.cluster.display import ClusterDisplay

        with ClusterDisplay() as display:
            while True:
                view = await self._nodes()
                if view is not None:
                    self._show_changes(view)
                    display.show(view)
                await asyncio.sleep(WATCH_S)

    async def _kill_broken(self) -> None:
        """Kill nodes that tell at ``/live`` that only a restart helps them, until cancelled."""
        failures: dict[str, int] = {}
        while True:
            await asyncio.sleep(LIVE_S)
            view = await self._nodes()
            nodes = [] if view is None else view.nodes
            urls = {node.node_id: node.url for node in nodes if node.state == "unhealthy"}
            for process in self.nodes:
                name, status, said = process.name, 0, b""
                if name in urls:
                    status, said = await self._get(f"{urls[name]}/live")
                failures[name] = failures.get(name, 0) + 1 if status == 503 else 0
                if failures[name] == LIVE_FAILURES:
                    why = said.decode(errors="replace")
                    print(f"{name}: killed, as it is broken: {why}", file=sys.stderr)
                    failures[name] = 0
                    process.kill()

    # --- shutdown ---

    def _children(self) -> list[NodeProcess]:
        return [*self.nodes, *([self.router] if self.router is not None else [])]

    async def shutdown(self) -> None:
        """Stop the nodes, then the router; kill processes that do not stop in time."""
        grace = self.config.shutdown_timeout_s + STOP_MARGIN_S
        await asyncio.gather(*(child.stop(grace) for child in self.nodes))
        if self.router is not None:
            await self.router.stop(grace)

"""Runs nodes on the machines of a Ray cluster: each is an actor that runs ``kvbaton`` as a child.

An actor has no KV cache, no CUDA and no transport itself: a node that crashes affects nothing else,
and restarts in a fresh process. If this process ends in any way, Ray ends the actors, and Linux
their children.

The router runs on this machine: its socket is at the address that the user asked for, it needs no
GPU, and under ``ray job submit`` this machine is part of the cluster, too.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from kvbaton.cluster.config import ClusterConfig
from kvbaton.cluster.placement import Child, NodeProcess, Placement, StartError
from kvbaton.connectors.address import is_loopback
from kvbaton.errors import ConfigError
from kvbaton.signals import die_with_parent

LINES_AHEAD = 1000
"""Maximum number of unread lines in an actor; beyond them its node blocks, as on a full pipe."""
WAIT_S = 1.0
PATIENCE_S = 5.0
"""Seconds until a message says what is waited for, and seconds beyond its grace that the end of a
node may take."""


class RayPlacement(Placement):
    """Runs nodes on a Ray cluster, each with its GPUs on one machine, spread over the machines.

    Args:
        config: Settings of the cluster; a missing cluster key is generated.

    Raises:
        ConfigError: There is no such Ray cluster, or its machines can't reach the router.
    """

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(replace(config, cluster_key=config.cluster_key or secrets.token_hex(32)))
        assert config.ray is not None
        self._ray = _connect(config.ray)
        address = self._ray.util.get_node_ip_address()
        self.address = f"[{address}]" if ":" in address else address
        machines = [machine for machine in self._ray.nodes() if machine["Alive"]]
        elsewhere = {m["NodeManagerAddress"] for m in machines} - {address}
        if is_loopback(config.host) and elsewhere:
            self.close()
            raise ConfigError(
                "--host",
                f"{config.host} can't be reached from {', '.join(sorted(elsewhere))}: let the "
                f"router listen on {address}, or on 0.0.0.0 wherever this runs",
            )
        self._gpus = config.engine.device == "cuda" or (
            config.engine.device == "auto" and self._ray.cluster_resources().get("GPU", 0) > 0
        )
        self._group: Any = None

    def _bundle(self, role: str) -> dict[str, float]:
        """Resources of a node; Ray assigns whole GPUs, and counts cores without enforcing them."""
        engine = self.config.engine
        ranks = 1 if role == "encode" else engine.tensor_parallel_size
        if self._gpus:
            return {"CPU": 1, "GPU": ranks}
        if engine.num_threads is not None:
            return {"CPU": engine.num_threads * ranks}
        # As on one machine, nodes share cores if there are fewer cores than threads.
        threads = len(self.config.node_names) * engine.tensor_parallel_size
        cores = max(1.0, self._ray.cluster_resources().get("CPU", 1.0))
        return {"CPU": ranks / math.ceil(threads / cores)}

    @override
    async def open(self) -> None:
        """Reserve resources for each node; Ray moves those of a lost machine."""
        bundles = [self._bundle(role) for role, _ in self.config.node_names]
        self._group = self._ray.util.placement_group(bundles, strategy="SPREAD")
        began, told = time.monotonic(), False
        while not await asyncio.to_thread(self._group.wait, WAIT_S):
            waited = time.monotonic() - began
            if waited > self.config.start_timeout_s:
                raise StartError(f"no room on the Ray cluster: {self._wanted(bundles)}")
            if waited > PATIENCE_S and not told:
                print(f"waiting for Ray: {self._wanted(bundles)}", flush=True)
                told = True

    def _wanted(self, bundles: Sequence[Mapping[str, float]]) -> str:
        words = ("CPU", "GPU")
        wanted = ", ".join(
            f"{name}: {_resources(bundle)}"
            for (_, name), bundle in zip(self.config.node_names, bundles, strict=True)
        )
        has = ", ".join(
            f"{m['NodeManagerAddress']}: {_resources({w: m['Resources'].get(w, 0) for w in words})}"
            for m in self._ray.nodes()
            if m["Alive"]
        )
        return f"nodes need {wanted}; its machines have, partly in use, {has or 'nothing'}"

    @override
    async def start(self, index: int, router_url: str) -> NodeProcess:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        config = self.config
        role, name = config.node_names[index]
        bundle, threads = self._bundle(role), config.engine.num_threads or 1
        flags = ["--device=cuda"] if self._gpus else ["--device=cpu", f"--num-threads={threads}"]
        actor = (
            self._ray.remote(NodeActor)
            .options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
            )
            .remote()
        )
        words = config.node_words(role, name, router_url, flags)
        # Passed as an argument: Ray shows the environment of actors to everybody.
        return RayNode(self._ray, actor, name, words, config.node_env(name))

    @override
    def close(self) -> None:
        self._ray.shutdown()


def _resources(amounts: Mapping[str, float]) -> str:
    return " + ".join(f"{amount:g} {name}" for name, amount in amounts.items())


def _connect(address: str) -> Any:
    """Join a Ray cluster and return the package `ray`.

    Raises:
        ConfigError: There is no such cluster, or the package is missing; it names ``--ray``.
    """
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    if named.startswith("ray://"):
        message = "a ray:// client is no part of its cluster; start this on one of its machines"
        raise ConfigError("--ray", f"{message}, or by `ray job submit`")
    try:
        import ray
    except ImportError as error:
        message = "needs the package ray: pip install 'kvbaton[ray]'"
        raise ConfigError("--ray", message) from error
    host, _, port = named.rpartition(":")
    try:
        if port.isdigit():  # if nothing listens there, Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="warning")
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise ConfigError("--ray", f"no Ray cluster at {named or address!r}: {error}") from error
    return ray


class NodeActor:
    """An actor that runs one node on its machine and forwards the node's output."""

    def __init__(self) -> None:
        self._child: ForwardingChild | None = None
        # When a raylet dies, Ray ends those of its actors that process 1 adopts; but with a service
        # manager or in a container often another process adopts them.
        die_with_parent(os.getppid())

    async def start(self, name: str, words: Sequence[str], env: Mapping[str, str]) -> str:
        """Run ``kvbaton`` with these arguments, on this machine's address, which is returned."""
        import ray

        address: str = ray.util.get_node_ip_address()
        self._child = await ForwardingChild.start(
            name, [*words, f"--host={address}"], env={**os.environ, **env}
        )
        return address

    async def read(self) -> tuple[list[str], str | None]:
        """Wait for new lines and return them; with the last lines, also how the node ended."""
        assert self._child is not None
        return await self._child.read()

    async def stop(self, grace_s: float) -> None:
        """Stop the node."""
        assert self._child is not None
        await self._child.stop(grace_s)


class ForwardingChild(Child):
    """A child whose output is read by another process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._lines: asyncio.Queue[str] = asyncio.Queue(LINES_AHEAD)
        super().__init__(name, process)

    @override
    async def heard(self, line: str) -> None:
        await self._lines.put(line)

    async def read(self) -> tuple[list[str], str | None]:
        """Wait for new lines or the end; return the lines, and how the child ended or None."""
        line = asyncio.create_task(self._lines.get())
        await asyncio.wait([line, self.exited], return_when=asyncio.FIRST_COMPLETED)
        lines = [line.result()] if line.done() else []
        line.cancel()
        while not self._lines.empty():
            lines.append(self._lines.get_nowait())
        return lines, self.exited.result() if self.exited.done() else None


class RayNode(NodeProcess):
    """A node that an actor runs.

    Args:
        ray: The package `ray`.
        actor: Handle of a `NodeActor`, which Ray may not have placed yet.
        name: Name of the node.
        words: Arguments of ``kvbaton``.
        env: Environment variables to add to those of its machine.
    """

    def __init__(
        self, ray: Any, actor: Any, name: str, words: Sequence[str], env: Mapping[str, str]
    ) -> None:
        super().__init__(name)
        self._ray = ray
        self._actor = actor
        self._machine = ""
        self.exited = asyncio.create_task(self._run(words, env), name=f"exit of {name}")

    async def _run(self, words: Sequence[str], env: Mapping[str, str]) -> str:
        ended = None
        try:
            self._machine = await self._actor.start.remote(self.name, words, env)
            print(f"{self.name}: on {self._machine}", flush=True)
            while ended is None:
                lines, ended = await self._actor.read.remote()
                for line in lines:
                    await self.heard(line)
        except self._ray.exceptions.RayError as error:
            self.tail.extend(line for line in str(error).splitlines() if line.strip())
            ended = "was lost with its actor"
        finally:
            self.kill()
        return f"on {self._machine or 'Ray'} {ended}"

    @override
    def kill(self) -> None:
        self._ray.kill(self._actor)

    @override
    async def stop(self, grace_s: float) -> None:
        if self._machine and not self.exited.done():
            self._actor.stop.remote(grace_s)
            await asyncio.wait([self.exited], timeout=grace_s + PATIENCE_S)
        self.kill()
        await asyncio.wait([self.exited], timeout=PATIENCE_S)
        self.exited.cancel()

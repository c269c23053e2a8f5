"""Machines of a test: network namespaces, in which scripts run unchanged, ports included."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.servers import poll
from tests.support.store_servers import need

READY_S = 120.0
STOP_S = 30.0
_numbers = itertools.count()


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{shlex.join(words)}: {done.stderr}"
    return done.stdout


class Machine:
    """A network namespace with its own loopback. Its processes end with it.

    Args:
        folder: Folder for output of its processes.

    Attributes:
        inside: Command prefix to run a command there. (``ip netns exec`` would hide mounts below
            /sys.)
    """

    def __init__(self, folder: Path) -> None:
        tools = all(map(shutil.which, ("ip", "nsenter", "curl")))
        need("netns", os.geteuid() == 0 and tools, "namespaces need root, ip and curl")
        self.name = f"kvbm{os.getpid()}n{next(_numbers)}"
        self.log = folder / f"{self.name}.log"
        self.log.touch()
        self.inside = ("nsenter", f"--net=/run/netns/{self.name}")
        self._started: list[subprocess.Popen[bytes]] = []
        run("ip", "netns", "add", self.name)
        run("ip", "-n", self.name, "link", "set", "lo", "up")

    def connect(self, other: Machine, ours: str, theirs: str) -> None:
        """Connect two machines; both get an address."""
        ends = (f"{self.name}c", f"{other.name}d")
        run("ip", "link", "add", ends[0], "type", "veth", "peer", ends[1])
        for machine, end, address in ((self, ends[0], ours), (other, ends[1], theirs)):
            run("ip", "link", "set", end, "netns", machine.name)
            run("ip", "-n", machine.name, "addr", "add", f"{address}/24", "dev", end)
            run("ip", "-n", machine.name, "link", "set", end, "up")

    def start(self, words: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Start a command on this machine, with the test's Python on the path."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        ours = {"PATH": path, "OMP_NUM_THREADS": "1", "UCX_TLS": "tcp,self"}
        with self.log.open("ab") as log:
            self._started.append(
                subprocess.Popen(
                    [*self.inside, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **ours, **(env or {})},
                    start_new_session=True,
                )
            )

    def curl(self, *words: str) -> tuple[int, str]:
        """Run ``curl``; its exit status and the answer."""
        done = subprocess.run(
            [*self.inside, "curl", "-sS", "--max-time", "60", *words],
            capture_output=True,
            text=True,
            timeout=90,
        )
        return done.returncode, done.stdout + done.stderr

    def get(self, url: str, *words: str) -> Any:
        """GET a JSON document; None if there is no answer."""
        status, answer = self.curl("--fail", *words, url)
        return json.loads(answer) if status == 0 else None

    def post(self, url: str, body: Any, *words: str) -> Any:
        header = ("-H", "Content-Type: application/json")
        status, answer = self.curl("--fail-with-body", *header, *words, "-d", json.dumps(body), url)
        assert status == 0, f"{answer}\n{self.said()}"
        return json.loads(answer)

    def until_pairs(self, router: str, count: int, *words: str) -> Any:
        """Wait until a router has `count` pairs, for prompts and encoder outputs together."""

        def found() -> Any:
            self.check()
            nodes = self.get(f"{router}/nodes", *words)
            if nodes and len(nodes["pairs"]) + len(nodes["encoder_pairs"]) == count:
                return nodes
            return None

        return poll(f"{count} pairs", found, READY_S, self.said)

    def transferred(self, nodes: Any, name: str, **labels: str) -> float:
        """Sum of a metric over all nodes that a router knows."""
        total = 0.0
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        for node in nodes["nodes"]:
            _, text = self.curl("--fail", f"{node['url']}/metrics")
            for line in re.findall(rf"^{name}[{{ ].*", text, re.MULTILINE):
                if all(one in line for one in wanted):
                    total += float(line.split()[-1])
        return total

    def check(self) -> None:
        """Check that all started processes are running."""
        for process in self._started:
            assert process.poll() is None, f"it ended with {process.poll()}\n{self.said()}"

    def said(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def stop(self) -> None:
        """Send SIGTERM to all; each must exit by itself, and leave no process behind."""
        for process in self._started:
            if process.poll() is None:
                process.terminate()
        try:
            for process in self._started:
                process.wait(STOP_S)
            poll("nobody is left", lambda: not self._pids(), STOP_S, self.said)
        finally:
            for pid in self._pids():
                os.kill(int(pid), signal.SIGKILL)
            for process in self._started:
                process.wait(STOP_S)
            run("ip", "netns", "del", self.name)

    def _pids(self) -> list[str]:
        return run("ip", "netns", "pids", self.name).split()

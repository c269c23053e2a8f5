"""The README's and the launch scripts' commands, run as they stand but for folder and ports.

The script's are executed anew, as `test_commands.py` does with ``kvbaton up``; README's same ones
are forked off a process that has imported what they need.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.docs.test_commands import PAGES, ROOT, blocks
from tests.e2e.test_commands import interrupt
from tests.support.forked_command import ForkedCommand
from tests.support.servers import poll

pytestmark = pytest.mark.e2e

(UP,) = (block for block in blocks(PAGES[0]) if "kvbaton up" in block)
(NODES,) = (block for block in blocks(PAGES[0]) if "kvbaton router" in block)
(OFFLINE,) = (block for block in blocks(PAGES[0]) if "LLM(" in block)
(CURL,) = re.findall(r"^curl (?:.*\\\n)*.*", UP, re.MULTILINE)
SCRIPT = (ROOT / "examples" / "node_by_node.sh").read_text()
STOP_S = 30.0
SMALL = "--num-blocks=64 --max-model-len=256"


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
            for _ in range(count)
        ]
        return [one.getsockname()[1] for one in sockets]


class Shell:
    """Runs commands of the README with free ports and a real model."""

    def __init__(self, model: Path, log: Path) -> None:
        ports = map(str, free_ports(3))
        self._ports = dict(zip(("8000", "8100", "8200"), ports, strict=True))
        self._model, self._log = str(model), log
        self._started: list[subprocess.Popen[bytes] | ForkedCommand] = []

    def _ours(self, text: str) -> str:
        """With our folder and ports."""
        text = re.sub(r"\bDIR\b", self._model, text)
        return re.sub(r"\b(8000|8100|8200)\b", lambda port: self._ports[port[0]], text)

    def fork(self, line: str) -> ForkedCommand:
        """One command, which needs no shell."""
        kvbaton, *words = shlex.split(self._ours(line), comments=True)
        assert kvbaton == "kvbaton"
        with self._log.open("ab") as out:
            process = ForkedCommand(words, out.fileno())
        self._started.append(process)
        return process

    def run(self, text: str) -> subprocess.Popen[bytes]:
        text = self._ours(text)
        text = re.sub(r"\bkvbaton (?=[a-z]+ )", f"{shlex.quote(sys.executable)} -m kvbaton ", text)
        with self._log.open("ab") as out:
            process = subprocess.Popen(
                ["bash", "-c", text, "README", self._model, *SMALL.split()],
                stdout=out,
                stderr=out,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def until_answered(self) -> None:
        """The README's request is answered, once a node is there."""
        # Asked without a shell: one that starts all the time takes the cores from those that start.
        poll("a node", self._has_nodes, 120.0, self.said)
        ask = f"{CURL} --fail --silent --max-time 20"
        poll("an answer", lambda: self.run(ask).wait(STOP_S) == 0, 120.0, self.said)

    def _has_nodes(self) -> bool:
        where = HTTPConnection("127.0.0.1", int(self._ports["8000"]), timeout=20)
        with suppress(OSError), closing(where):
            where.request("GET", "/health")
            return where.getresponse().status == 200
        return False

    def said(self) -> str:
        return self._log.read_text()

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
        for process in self._started:
            try:
                process.wait(STOP_S)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


@pytest.fixture
def shell(checkpoint: Callable[..., Path], tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(checkpoint(), tmp_path / "log")
    yield shell
    shell.close()


def test_node_by_node(shell: Shell) -> None:
    for line in NODES.splitlines():
        shell.fork(line if "router " in line[:15] else f"{line.partition('#')[0]} {SMALL}")
    shell.until_answered()


def test_one_command(shell: Shell) -> None:
    line = next(line for line in UP.splitlines() if "kvbaton up" in line)
    process = shell.fork(f"{line.partition('#')[0]} --port 8000 {SMALL}")  # what is the default
    shell.until_answered()
    poll(
        "what happens", lambda: "running, 0 waiting · 1 answered" in shell.said(), 60.0, shell.said
    )
    interrupt(process, shell.said, 5)


@pytest.mark.slow  # as the examples' other scripts; its commands are README's, forked above
def test_the_launch_script(shell: Shell) -> None:
    process = shell.run(SCRIPT)
    poll("an answer", lambda: '"choices"' in shell.said(), 120.0, shell.said)
    assert process.wait(STOP_S) == 0


def test_without_a_server(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder, script = tmp_path / "model", tmp_path / "offline.py"
    shutil.copytree(checkpoint(), folder)
    # Greedy: a random model's first token would be an end token now and then.
    (folder / "generation_config.json").write_text('{"do_sample": false}')
    script.write_text(re.sub(r"\bDIR\b", str(folder), OFFLINE))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()

"""Real servers for tests of remote stores, on their own ports, and specs for them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from kvbaton.connectors.registry import load_store
from kvbaton.connectors.store import Store

HOST = "127.0.0.1"
CHUNK_BYTES = 64 << 10
START_S = 120.0
S3_OPTIONS = {"access_key_id": "someone", "secret_access_key": "s3cr3t", "region": "us-east-1"}


class Server:
    """A server in its own process.

    Attributes:
        name: Name of the store that is tested with it.
        port: Port, the same after a restart.
        process: The running process.
    """

    process: subprocess.Popen[bytes]

    def __init__(
        self, name: str, command: Callable[[int], Sequence[str]], options: Callable[[int], Any]
    ) -> None:
        self.name = name
        self.port = free_port()
        self._command = list(command(self.port))
        self._options: dict[str, Any] = options(self.port)
        self.on_start: Callable[[], object] = lambda: None
        self.on_end: Callable[[], object] = lambda: None

    def start(self) -> None:
        quiet = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
        self.process = subprocess.Popen(
            self._command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | quiet,
        )
        give_up = time.monotonic() + START_S
        while not self._listens():
            assert time.monotonic() < give_up, f"{self._command} does not listen"
            time.sleep(0.01)
        self.on_start()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the server from answering until the end of the block."""
        self.pause(True)
        try:
            yield
        finally:
            self.pause(False)

    def pause(self, pausing: bool) -> None:
        """Stop the server from answering, or let it continue."""
        if not pausing:
            self.process.send_signal(signal.SIGCONT)
            return
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)  # all threads have stopped

    def spec(self, **options: Any) -> str:
        """Spec of a store on this server."""
        return f"{self.name}:{json.dumps(self._options | options)}"

    @contextmanager
    def store(self, **options: Any) -> Iterator[Store]:
        """Open a store on this server."""
        store = load_store(self.spec(**options))
        store.open()
        try:
            yield store
        finally:
            store.close()

    def _listens(self) -> bool:
        assert self.process.poll() is None, f"{self._command} ended"
        with socket.socket() as probe:
            return probe.connect_ex((HOST, self.port)) == 0


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """Run a server, and stop it at the end."""
    try:
        server.start()
        yield server
    finally:
        if hasattr(server, "process"):
            server.kill()
        server.on_end()


def redis_server(folder: Path, *flags: str) -> Server:
    """A Redis server without persistence."""
    need("redis-server", which("redis-server"), "the Debian package redis-server is not installed")
    need("redis", find_spec("redis"), "pip install 'kvbaton[redis]'")
    base = [
        "redis-server",
        "--bind",
        HOST,
        "--save",
        "",
        "--appendonly",
        "no",
        "--dir",
        str(folder),
    ]
    return Server(
        "redis",
        lambda port: [*base, "--port", str(port), *flags],
        lambda port: {"url": f"redis://{HOST}:{port}/0"},
    )


_S3 = """
import logging, sys
from moto.server import create_backend_app
from werkzeug.serving import run_simple
logging.getLogger("werkzeug").setLevel(logging.ERROR)
run_simple(sys.argv[1], int(sys.argv[2]), create_backend_app("s3"), threaded=True)
"""
"""Runs only one of moto's services: its own main searches the disk for all at each request."""


def s3_server() -> Server:
    """A moto server with an empty bucket, recreated at a restart."""
    need("moto", find_spec("moto"), "pip install 'moto[server]'")
    need("obstore", find_spec("obstore"), "pip install 'kvbaton[s3]'")
    server = Server(
        "s3",
        lambda port: [sys.executable, "-c", _S3, HOST, str(port)],
        lambda port: {
            "url": "s3://bucket/some/prefix",
            "endpoint": f"http://{HOST}:{port}",
            "options": S3_OPTIONS,
        },
    )
    server.on_start = lambda: _make_bucket(server.port)
    return server


def _make_bucket(port: int) -> None:
    request = urllib.request.Request(f"http://{HOST}:{port}/bucket", method="PUT")
    with urllib.request.urlopen(request):
        pass


def lmcache_server(gigabytes: float = 0.25) -> Server:
    """An LMCache server with `gigabytes` of memory."""
    need("lmcache", find_spec("lmcache"), "pip install 'kvbaton[lmcache]'")
    code = "import sys; from lmcache.cli.main import main; sys.argv[0] = 'lmcache'; main()"
    more = ["--eviction-policy", "LRU", "--supported-transfer-mode", "engine_driven"]
    size = ["--chunk-size", "16", "--l1-size-gb", str(gigabytes)]
    name = f"kvbaton-{uuid.uuid4().hex}"
    server = Server(
        "lmcache_server",
        lambda port: [
            *(sys.executable, "-c", code, "server", "--host", HOST, "--port", str(port)),
            *("--http-port", str(free_port()), "--shm-name", name, *size, *more),
        ],
        lambda port: {"url": f"tcp://{HOST}:{port}", "chunk_bytes": CHUNK_BYTES},
    )
    server.on_end = lambda: Path("/dev/shm", name).unlink(missing_ok=True)
    return server


_LENDS = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 512 << 20, 1 << 20, "tcp", "", sys.argv[1]) == 0
print("lends", flush=True)
sys.stdin.read()
"""


def mooncake_server() -> Server:
    """A Mooncake master, and a client that contributes memory."""
    try:
        store: Any = import_module("mooncake.store")
        reason = ""
    except ImportError as error:
        store, reason = None, str(error)
    need("mooncake", store, f"pip install mooncake-transfer-engine-non-cuda ({reason})")
    master = Path(store.__file__).with_name("mooncake_master") if store else Path()
    lender = list[subprocess.Popen[bytes]]()
    server = Server(
        "mooncake",
        lambda port: [
            *(str(master), f"--rpc_port={port}", f"--rpc_address={HOST}"),
            *(f"--metrics_port={free_port()}", f"--metrics_host={HOST}"),
        ],
        lambda port: {"master": f"{HOST}:{port}"},
    )

    def lend() -> None:
        command = [sys.executable, "-c", _LENDS, f"{HOST}:{server.port}"]
        pipe = subprocess.PIPE
        lender.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL))
        stdout = lender[-1].stdout
        assert stdout is not None
        assert any(line == b"lends\n" for line in stdout)

    def end() -> None:
        for process in lender:
            process.kill()
            process.communicate()

    server.on_start, server.on_end = lend, end
    return server


def need(name: str, found: object, reason: str) -> None:
    """Skip a test whose requirement is missing, or fail it if that must be installed.

    ``KVBATON_TESTS_NEED`` lists what must be installed, separated by commas.
    """
    if not found and name in os.environ.get("KVBATON_TESTS_NEED", "").split(","):
        pytest.fail(f"{name} is missing: {reason}")
    if not found:
        pytest.skip(f"{name} is missing: {reason}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])

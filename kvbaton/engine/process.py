"""The engine core as a process of its own: its entry point, and the client that starts it."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import multiprocessing
import multiprocessing.process
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures.thread import _threads_queues
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from types import ModuleType
from typing import TYPE_CHECKING, Self

import msgspec

from kvbaton.engine.client import EngineClient
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.frontends import EngineEndpoints, FrontendServer
from kvbaton.engine.socket_folder import SocketFolder
from kvbaton.errors import ConfigError, EngineDeadError
from kvbaton.log import begin_log
from kvbaton.malloc import keep_freed_memory
from kvbaton.messages.engine import Dead, Ready, Shutdown
from kvbaton.signals import begin_child
from kvbaton.types import NodeId, clip_text

if TYPE_CHECKING:
    from kvbaton.engine.build import ConnectorFactory

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
GIL_SWITCH_S = 0.0005
"""Seconds after which a thread must yield the interpreter. Python's 5 ms are as long as a whole
step, for which the core's thread would wait when it comes back from one (with another thread in
bursts of 8 ms, the p95 of that wait is 5.2 ms, and 0.7 ms with this value; a decode node's transfer
thread takes in a prompt of 2,000 tokens in bursts of 1.5 ms)."""
LAST_WORDS_S = 1.0
"""Seconds between a lost connection and the end of its requests, in which the child may say why."""

_reports = msgspec.msgpack.Decoder(Ready | Dead)


def core_main(
    config: EngineConfig,
    node: NodeId,
    connectors: Sequence[ConnectorFactory],
    endpoints: EngineEndpoints,
    parent: Connection,
    log_level: str,
) -> None:
    """Run the core in the child process; returns after its shutdown.

    Args:
        config: Settings of the engine.
        node: Identity of this run of the node.
        connectors: Make the connectors.
        endpoints: Where frontends connect.
        parent: Gets `Ready` when the core serves, or `Dead` when it can't start or go on.
        log_level: Level of the log on standard error.
    """
    begin_child(signal.SIGTERM)  # systemd and Slurm signal all processes of a node at once
    faulthandler.enable()  # else a crash in a library would leave no trace
    sys.setswitchinterval(GIL_SWITCH_S)
    keep_freed_memory()
    begin_log(log_level)
    frontends: FrontendServer | None = None
    try:
        frontends = FrontendServer(endpoints)
        # Only the child imports torch, and only here. The import makes 180,000 permanent objects:
        # collecting garbage meanwhile takes a sixth of the start, and later 0.1 s each time, in
        # which no tokens are sent.
        gc.disable()
        from kvbaton.engine.build import build_engine

        gc.freeze()
        gc.enable()
        engine = build_engine(config, node, connectors, frontends)
        try:
            ready = msgspec.structs.replace(engine.ready, engine_address=frontends.address)
            gc.collect()
            gc.freeze()
            frontends.send(ready)
            _report(ready, parent)
            engine.core.run()
            frontends.stop()
        finally:
            engine.core.close()
    except ConfigError as error:
        _report(Dead(error=clip_text(error.reason), field=error.field), parent)
    except BaseException as error:
        # Clients see one line. Log first: the parent may end this process once it has the report.
        logger.exception("the engine core ends")
        dead = Dead(error=clip_text(f"{type(error).__name__}: {error}"))
        _report(dead, parent)
        if frontends is not None:
            frontends.send(dead)
        raise SystemExit(1) from error
    finally:
        if frontends is not None:
            frontends.close()
    leave()


def leave() -> None:
    """End this process now if there are threads for which the interpreter would wait.

    One is a pool's thread that hangs in a store, even if a daemon thread started it.
    """
    this = threading.current_thread()
    waited_for = [t for t in threading.enumerate() if not t.daemon or t in _threads_queues]
    left = [t.name for t in waited_for if t is not this]
    if left:
        logger.warning("ends without waiting for the threads %s", ", ".join(left))
        logging.shutdown()
        os._exit(0)


def _report(message: Ready | Dead, parent: Connection) -> None:
    with suppress(BrokenPipeError):  # the parent has died, and this process will be ended
        parent.send_bytes(msgspec.msgpack.encode(message))


@contextmanager
def _no_main_module() -> Iterator[None]:
    """Hide the main module from `spawn`, which would run it again in the child.

    It is a user's script, which may start an engine without ``if __name__ == "__main__"``, or
    standard input, which can't be read again. The core does not need it.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class EngineProcess(EngineClient):
    """An engine core in a child process, and its local frontend; made by `start`.

    Attributes:
        local_address: Where other processes of the node connect as local frontends.
    """

    last_words_s = LAST_WORDS_S
    _process: multiprocessing.process.BaseProcess
    _at_exit: Finalize

    def __init__(self) -> None:
        super().__init__()
        self._folder = SocketFolder()
        self.local_address = f"ipc://{self._folder.path}/engine"
        self._reports, self._child_end = multiprocessing.get_context("spawn").Pipe(duplex=False)
        self._first_report: asyncio.Future[Ready] = self._loop.create_future()
        self._closing = self._closed = False
        self._exited = asyncio.Event()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        connectors: Sequence[ConnectorFactory],
        *,
        node: NodeId,
        host: str | None = None,
        port: int = 0,
        cluster_key: str | None = None,
        log_level: str = "warning",
    ) -> Self:
        """Start a core and wait until it serves.

        Args:
            config: Settings of the engine.
            connectors: Make the connectors, in the child.
            node: Identity of this run of the node.
            host: Address for remote frontends, see `EngineEndpoints`; None admits none.
            port: Port for remote frontends; 0 takes a free one.
            cluster_key: Key of the cluster.
            log_level: Level of the child's log on standard error.

        Raises:
            ConfigError: The core refused a setting.
            EngineDeadError: The core ended, or took longer than `START_TIMEOUT_S`.
        """
        client = cls()
        endpoints = EngineEndpoints(
            local=client.local_address, host=host, port=port, cluster_key=cluster_key
        )
        client._process = multiprocessing.get_context("spawn").Process(
            target=core_main,
            args=(config, node, connectors, endpoints, client._child_end, log_level),
            name=f"kvbaton-core-{node.node}",
            daemon=True,
        )
        # A parent's interpreter sends children SIGTERM at exit, and waits for them without limit.
        client._at_exit = Finalize(None, client._process.kill, exitpriority=0)
        try:
            with _no_main_module():
                client._process.start()
            client._child_end.close()
            client._loop.add_reader(client._reports.fileno(), client._read_report)
            client._loop.add_reader(client._process.sentinel, client._ended)
            async with asyncio.timeout(START_TIMEOUT_S):
                await client._first_report
                await client._open(client.local_address, None, True, START_TIMEOUT_S)
        except TimeoutError:
            await client.shutdown(0.0)
            raise EngineDeadError(f"the engine was not up within {START_TIMEOUT_S:g} s") from None
        except BaseException:
            await client.shutdown(0.0)
            raise
        return client

    def _read_report(self) -> None:
        """Take the child's report: it serves, or why it ends."""
        try:
            if not self._reports.poll():
                return
            report = _reports.decode(self._reports.recv_bytes())
        except EOFError:
            self._loop.remove_reader(self._reports.fileno())
            return
        if isinstance(report, Dead):
            self._died(report.error, report.field)
        elif not self._first_report.done():
            self._first_report.set_result(report)

    def _died(self, reason: str, field: str | None = None) -> None:
        if not self._first_report.done():
            error = ConfigError(field, reason) if field else EngineDeadError(reason)
            self._first_report.set_exception(error)
            self._first_report.exception()  # mark it as seen: perhaps nobody awaits it
        self._fail(reason)

    def _ended(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._read_report()
        self._read()
        self._process.join()
        self._exited.set()
        code = self._process.exitcode
        self._died(
            "the engine was shut down"
            if self._closing
            else f"the engine core exited with code {code}"
        )

    async def _exit(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the process to end."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._exited.wait(), timeout_s)

    async def shutdown(self, grace_s: float = 5.0) -> None:
        """Let requests finish for `grace_s` seconds, then end the core. Idempotent.

        A call while another one waits, or after one that was cancelled, waits for the end, too, by
        its own `grace_s`.
        """
        if self._closed:
            return
        self._closing = self.draining = True
        if self._process.pid is not None:
            # Watch the sentinel: of two threads that join a process, one may think that it lives.
            if self.dead is None and self._socket is not None:
                self._send(Shutdown(grace_s=grace_s))
                await self._exit(grace_s + 5.0)
                if not self._exited.is_set():
                    logger.warning("engine core did not stop in time; killing it")
            if not self._exited.is_set():  # kills also a core that is still starting
                self._process.kill()
                await self._exit(5.0)
            self._loop.remove_reader(self._process.sentinel)
        if self._closed:  # by another call
            return
        self._closed = True
        self._at_exit.cancel()  # only now: `shutdown` may be cancelled, or run in another loop
        self._loop.remove_reader(self._reports.fileno())
        self._fail("the engine was shut down")
        await self.close()
        self._reports.close()
        self._folder.close()

"""The engine core's own process."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvbaton.connectors.transfer.config import HandoverConfig
from kvbaton.engine import build
from kvbaton.engine.build import ConnectorContext, MakeConnectors
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.kv_connector import KVConnector
from kvbaton.engine.process import EngineProcess
from kvbaton.errors import ConfigError, RequestError
from kvbaton.messages.engine import AddRequest, SamplingParams
from kvbaton.roles import HandoverFactory
from kvbaton.server.node import tell_of_silence
from kvbaton.types import NodeId
from tests.support.engine_node import ENGINE, QueueMailbox
from tests.support.waiting import eventually

TIMEOUT_S = 60.0


class Interpreter(KVConnector):
    """Tells of the process in which it lives."""

    name = "interpreter"

    def gauges(self) -> dict[str, float]:
        return {
            "switch_interval": sys.getswitchinterval(),
            "pid": float(os.getpid()),
            "objects_looked_at": float(len(gc.get_objects())),
            "objects_frozen": float(gc.get_freeze_count()),
        }


@dataclass(frozen=True)
class InterpreterFactory:
    sends_blocks = False

    @property
    def items(self) -> InterpreterFactory:
        return self

    def __call__(self, surroundings: ConnectorContext) -> MakeConnectors:
        return lambda executor, scheduler: [Interpreter()]


class RefusingFactory(InterpreterFactory):
    def __call__(self, surroundings: ConnectorContext) -> MakeConnectors:
        raise ConfigError("--transport", "tcp's pinned_mib: must be at least 32")


async def test_what_a_connector_refuses_is_told(checkpoint: Callable[..., Path]) -> None:
    config = EngineConfig(model=str(checkpoint()), **ENGINE)
    with pytest.raises(ConfigError, match="--transport: tcp's pinned_mib: must be"):
        async with asyncio.timeout(TIMEOUT_S):
            await EngineProcess.start(config, [RefusingFactory()], node=NodeId("n", os.urandom(16)))


def test_connectors_are_opened_before_a_thread_loads_the_model(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX rewrites functions that it calls; and a model may take minutes."""
    config = EngineConfig(model=str(checkpoint()), **ENGINE)
    monkeypatch.setattr(build, "make_executor", lambda *_, **__: pytest.fail("it is loaded"))
    mailbox = QueueMailbox(lambda _: None, lambda: None)
    with pytest.raises(ConfigError, match="--transport: tcp's pinned_mib: must be"):
        build.build_engine(config, NodeId("n", bytes(16)), [RefusingFactory()], mailbox)


def test_a_control_port_that_is_taken_is_told_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        factory = HandoverFactory(HandoverConfig(transport="memory", control_port=port), "any")
        context = ConnectorContext(EngineConfig(model="none"), NodeId("n", bytes(16)), b"", {})
        with pytest.raises(ConfigError, match=f"--control-port: can't listen on .*:{port}"):
            factory(context)


async def test_nothing_holds_up_the_cores_thread_for_longer_than_a_step(
    checkpoint: Callable[..., Path],
) -> None:
    config = EngineConfig(model=str(checkpoint()), **ENGINE)
    node = NodeId("n", os.urandom(16))
    engine = await EngineProcess.start(config, [InterpreterFactory()], node=node)
    try:
        await engine.command("metrics")
        gauges = engine.metrics.gauges
        assert gauges["pid"] != os.getpid()
        assert gauges["switch_interval"] < 0.001 < sys.getswitchinterval()
        assert gauges["objects_frozen"] > 50_000, "what torch brings, at which no look is lost"
        assert gauges["objects_looked_at"] < 10_000
    finally:
        await engine.shutdown(0.0)


async def test_an_engine_that_hangs_is_told_and_one_that_is_idle_is_not(
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = EngineConfig(model=str(checkpoint()), **ENGINE)
    node = NodeId("n", os.urandom(16))
    engine = await EngineProcess.start(config, [InterpreterFactory()], node=node)
    monkeypatch.setattr("kvbaton.server.node.WATCH_S", 0.05)
    watching = asyncio.create_task(tell_of_silence(engine))
    try:
        await engine.command("metrics")
        heard_at = engine.heard_at
        await eventually(lambda: engine.heard_at > heard_at)  # unasked
        os.kill(int(engine.metrics.gauges["pid"]), signal.SIGSTOP)
        monkeypatch.setattr("kvbaton.engine.client.HUNG_S", 5.0)
        await eventually(lambda: "the engine hangs" in caplog.text)
        os.kill(int(engine.metrics.gauges["pid"]), signal.SIGCONT)
        with caplog.at_level("INFO"):
            await eventually(lambda: "is heard of again" in caplog.text)
    finally:
        watching.cancel()
        await engine.shutdown(0.0)


async def test_what_a_stop_cuts_off_is_told_that_the_node_stops(
    checkpoint: Callable[..., Path],
) -> None:
    config = EngineConfig(model=str(checkpoint()), **ENGINE)
    engine = await EngineProcess.start(config, [], node=NodeId("n", os.urandom(16)))
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    prompt = array("I", [1, 2, 3])
    outputs = engine.generate(AddRequest(request_id="cut", token_ids=prompt, params=params))
    await anext(outputs)
    stop = asyncio.create_task(engine.shutdown(0.0))
    with pytest.raises(RequestError, match="stopping") as caught:
        assert [o async for o in outputs][-1].finish_reason is None, "the stop came first"
    assert (caught.value.status, caught.value.code) == (503, "shutting_down")
    assert engine.draining, "it refuses requests, so /health tells others to send none"
    await stop


async def test_a_shutdown_that_was_given_up_can_be_asked_for_again(
    checkpoint: Callable[..., Path],
) -> None:
    """The second one returned at once, and the engine lived on."""
    config = EngineConfig(model=str(checkpoint()), **ENGINE)
    engine = await EngineProcess.start(config, [], node=NodeId("n", os.urandom(16)))
    patient = [asyncio.create_task(engine.shutdown(60.0)) for _ in range(2)]
    await asyncio.sleep(0)  # they have begun
    patient[0].cancel()
    await engine.shutdown(0.0)
    assert engine._exited.is_set()
    await patient[1]
    assert patient[0].cancelled()
    await engine.shutdown()


def test_numpy_imports_nothing_while_a_core_serves() -> None:
    """Its parts that come in when they are first called hold the interpreter for so long."""
    code = """
import sys
import kvbaton.engine.build
import numpy as np
before = set(sys.modules)
ids = np.arange(3)
np.unique(ids), np.union1d(ids, ids), np.isin(ids, ids), np.lexsort((ids, ids))
print(*set(sys.modules) - before)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not found.stdout.split()

"""Stand-ins for nodes: an HTTP endpoint for probes, and an engine's socket for requests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from aiohttp import web

from kvbaton.engine.frontends import EngineEndpoints, FrontendServer
from kvbaton.messages.engine import (
    AbortRequest,
    AddRequest,
    Output,
    Outputs,
    Ready,
    Rejected,
)
from kvbaton.messages.nodes import NodeInfo
from kvbaton.messages.openai import ErrorBody, ErrorInfo
from kvbaton.types import NodeId

VOCAB_SIZE = 500
MODEL = "tiny"
PORTS = {"prefill": 7000, "encode": 8000}


def token_at(prompt: Sequence[int], index: int, choice: int = 0) -> int:
    """Token that every healthy node generates."""
    return (sum(prompt) * 31 + index * 17 + choice * 7) % VOCAB_SIZE


@dataclass
class StandIn:
    """A stand-in for a node. Attributes make it misbehave.

    Attributes:
        received: Requests, in order.
        arrived: Set when a request has arrived.
        gate: While clear, nothing is answered.
        attends: While clear, its engine reads no messages, so that no frontend can connect.
        cancelled: Requests that the router cancelled.
        status: Error status to answer instead.
        die_after: Number of outputs after which its engine dies.
        shift: Added to every token of first attempts, so that the node disagrees with others.
        pause: Seconds between outputs.
        goes_on: Whether it samples a second token as a source.
        body: Body of the error.
        headers: Headers of HTTP requests, in lower case.
        friend: The only ``Authorization`` for which it resets its prefix cache.
        refusal: Reason for which it does not.
        babble: Bytes to answer instead.
    """

    info: NodeInfo
    received: list[AddRequest] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    attends: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: int = 0
    status: int | None = None
    body: dict[str, object] = field(default_factory=dict)
    die_after: int | None = None
    shift: int = 0
    pause: float = 0.0
    goes_on: bool = False
    healthy: bool = True
    runner: web.AppRunner | None = None
    headers: list[dict[str, str]] = field(default_factory=list)
    resets: int = 0
    friend: str | None = None
    refusal: str = ""
    babble: bytes = b""
    engine: EngineSocket | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_post("/reset_prefix_cache", self.reset)
        app.router.add_get("/node", self.node)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        port = self.runner.addresses[0][1]
        self.info = msgspec.structs.replace(self.info, url=f"http://127.0.0.1:{port}")

    def offer_socket(self, folder: Path) -> None:
        """Let routers connect as frontends of the engine."""
        self.engine = EngineSocket(self, folder)
        self.info = msgspec.structs.replace(self.info, engine_address=self.engine.address)

    async def stop(self) -> None:
        if self.engine is not None:
            await self.engine.stop()
            self.engine = None
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def reset(self, request: web.Request) -> web.Response:
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if self.friend is not None and request.headers.get("Authorization") != self.friend:
            return web.Response(status=403)
        self.resets += 1
        if self.babble:
            return web.Response(body=self.babble)
        if self.refusal:
            error = ErrorInfo(message=self.refusal, type="server_error")
            return web.Response(status=503, body=msgspec.json.encode(ErrorBody(error=error)))
        return web.json_response({"result": 0 if self.healthy else False})

    async def node(self, request: web.Request) -> web.Response:
        return web.Response(body=self.babble or msgspec.json.encode(self.info))

    async def answer(self, add: AddRequest, frontends: FrontendServer) -> None:
        """Send the engine's outputs for a request."""
        await self.gate.wait()
        if self.status is not None:
            what = {"message": "no", **self.body}
            frontends.send(Rejected(request_id=add.request_id, status=self.status, **what))  # type: ignore[arg-type]
            return
        for number, output in enumerate(self.outputs(add)):
            if number == self.die_after and self.engine is not None:
                self.engine.die()
                return
            frontends.send(Outputs(outputs=(output,)))
            await asyncio.sleep(self.pause)

    def outputs(self, add: AddRequest) -> list[Output]:
        """One token per output; a source stops after its first or second."""
        role = None if add.transfer is None else add.transfer.role
        source = role == "source"
        shift = self.shift if add.transfer is None or not add.transfer.attempt else 0
        base, limit = len(add.resume_ids), add.params.max_tokens
        end = base + 1 + self.goes_on if source else limit
        return [
            Output(
                request_id=add.request_id,
                choice=choice,
                index=index,
                token_ids=((token_at(add.token_ids, index, choice) + shift) % VOCAB_SIZE,),
                finish_reason="length" if index == end - 1 else None,
                cached_tokens=2 if source else 1,
                transferred_tokens=len(add.token_ids) if role == "target" else 0,
            )
            for index in range(base, end)
            for choice in range(add.params.n)
        ]


class EngineSocket:
    """The engine of a stand-in: a core's loop as a task."""

    def __init__(self, node: StandIn, folder: Path) -> None:
        self._node = node
        self._frontends = FrontendServer(
            EngineEndpoints(local=f"ipc://{folder}/{node.info.node_id}", host="127.0.0.1")
        )
        self.address = self._frontends.address
        self._frontends.send(
            Ready(
                node=NodeId(node.info.node_id, bytes(16)),
                control_address=None,
                num_blocks=8,
                block_size=16,
                max_model_len=400,
                eos_token_ids=(),
            )
        )
        self._running: dict[str, asyncio.Task[None]] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._turns = asyncio.create_task(self._turn())

    async def _turn(self) -> None:
        while await self._node.attends.wait():
            for message in self._frontends.receive(0.0, self._wake):
                match message:
                    case AddRequest(request_id=name):
                        self._node.received.append(message)
                        self._node.arrived.set()
                        work = self._node.answer(message, self._frontends)
                        self._running[name] = asyncio.create_task(work)
                    case AbortRequest(request_id=name) if name in self._running:
                        task = self._running.pop(name)
                        self._node.cancelled += not task.done()
                        task.cancel()
            await asyncio.sleep(0.002)

    def die(self) -> None:
        """End as a killed core does."""
        if not self._turns.done():
            self._turns.cancel()
            self._frontends.close()
            os.close(self._wake)

    async def stop(self) -> None:
        self.die()
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(self._turns, *self._running.values(), return_exceptions=True)


def stand_in(role: str, node_id: str) -> StandIn:
    info = NodeInfo(
        node_id=node_id,
        generation="1",
        role=role,
        url="",
        model=MODEL,
        control_address=f"tcp://127.0.0.1:{PORTS[role] + ord(node_id[-1])}"
        if role in PORTS
        else None,
        max_model_len=400,
        encoder_identity="ee",
        encodes=True,
    )
    node = StandIn(info)
    node.gate.set()
    node.attends.set()
    return node

"""Applications served on the test's event loop."""

from __future__ import annotations

from aiohttp import web

from kvbaton.server.app import serve_on
from kvbaton.server.config import EndpointConfig
from kvbaton.server.network import bind


async def listen(
    app: web.Application, host: str, port: int, *, grace_s: float = 5.0
) -> tuple[web.AppRunner, int]:
    """Serve an application; returns the runner, whose ``cleanup`` ends it, and the port."""
    runner = await serve_on(bind(host, port), app, EndpointConfig(shutdown_timeout_s=grace_s))
    return runner, runner.addresses[0][1]

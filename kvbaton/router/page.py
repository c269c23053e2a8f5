"""The router's status page, kept up to date by server-sent events.

The page is complete without scripts. With them it opens one stream (`GET /events`) and shows its
events: the same HTML, rendered once per interval for all streams. A stream whose reader is slow
skips to the newest state.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from importlib.resources import files

import jinja2
from aiohttp import web

from kvbaton.config import human_bytes
from kvbaton.errors import RequestError
from kvbaton.messages.nodes import NodesView, RouterTraffic
from kvbaton.router.status import HISTORY, INTERVAL_S, ClusterStatus
from kvbaton.server.frontend import FRONTEND
from kvbaton.server.openapi import contract
from kvbaton.server.sse import send_events

logger = logging.getLogger(__name__)

MAX_STREAMS = 64
"""Maximum number of pages that are kept up to date at the same time."""
RELOAD_S = 5
"""Seconds after which a page without scripts reloads itself."""

NOT_TOLD = "—"

_STYLE, _SCRIPT = (
    files(__package__).joinpath(f"page.{kind}").read_text(encoding="utf-8")
    for kind in ("css", "js")
)


def _source(text: str) -> str:
    """How a content security policy names an inline style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        f"default-src 'none'; style-src {_source(_STYLE)}; script-src {_source(_SCRIPT)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def _or_not_told(show: Callable[[float], str]) -> Callable[[float | None], str]:
    return lambda value: NOT_TOLD if value is None else show(value)


def _polyline(points: Sequence[float]) -> str:
    """Points of the last minute, scaled to its maximum."""
    top, first = max(points, default=0.0) or 1.0, HISTORY - len(points)
    return " ".join(f"{first + i},{22 - 20 * p / top:.1f}" for i, p in enumerate(points))


_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader(__package__, "."),
    autoescape=True,  # nodes' reports are not trusted
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {
    "bytes": _or_not_told(human_bytes),
    "polyline": _polyline,
    "number": _or_not_told("{:,}".format),
    "rate": _or_not_told(lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.1f}"),
    "share": _or_not_told("{:.0%}".format),
}


class StatusFeed:
    """Keeps status pages up to date.

    Args:
        status: Status of the cluster, sampled here.

    Attributes:
        status: As given.
        streams: Number of open streams.
    """

    def __init__(self, status: ClusterStatus) -> None:
        self.status = status
        self.streams = 0
        self._event = self._render(status.view())
        self._news = asyncio.Event()
        self._closed = False

    @asynccontextmanager
    async def served(self, app: web.Application) -> AsyncIterator[None]:
        """Sample for as long as the context lasts, for the routes of an application."""
        app[FEED] = self
        app.on_shutdown.append(self._close)
        sampling = asyncio.create_task(self._run())
        try:
            yield
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                view = self.status.sample()
                if self.streams:
                    self._event = self._render(view)
            except Exception:  # a page must not end the router
                logger.exception("the state of the cluster can't be shown")
            self._tell()

    async def _close(self, app: web.Application) -> None:
        """End all streams, for which the server would wait otherwise."""
        self._closed = True
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _render(self, view: NodesView) -> bytes:
        return b"data: %b\n\n" % fragment(view, self.status.history).encode()

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[AsyncIterator[bytes]]:
        """Events for one page: the current state, then the newest one whenever the reader is ready.

        Raises:
            RequestError: There are too many streams (503).
        """
        if self.streams >= MAX_STREAMS:
            raise RequestError(f"{MAX_STREAMS} pages are open already", status=503, code="busy")
        self.streams += 1
        try:
            async with aclosing(self._events()) as events:
                yield events
        finally:
            self.streams -= 1

    async def _events(self) -> AsyncGenerator[bytes]:
        if self.streams == 1:  # nothing is rendered without streams
            self._event = self._render(self.status.view())
        shown = None
        while not self._closed:
            news = self._news
            if self._event is not shown:
                shown = self._event
                yield shown
            else:
                await news.wait()


FEED = web.AppKey("feed", StatusFeed)


@contract(content_type="text/html")
async def page(request: web.Request) -> web.Response:
    """``GET /``: the state of the cluster, for people."""
    status = request.app[FEED].status
    body = _TEMPLATES.get_template("page.html").render(
        model=request.app[FRONTEND].config.model_name,
        reload=RELOAD_S,
        style=_STYLE,
        script=_SCRIPT,
        time=time.strftime("%H:%M:%S", time.gmtime()),
        status=fragment(status.view(), status.history),
    )
    return web.Response(text=body, content_type="text/html", headers=HEADERS)


@contract(content_type="text/event-stream")
async def events(request: web.Request) -> web.StreamResponse:
    """``GET /events``: the changing part of the page, as server-sent events."""
    async with request.app[FEED].stream() as stream:
        return await send_events(request, stream)


def fragment(view: NodesView, history: Iterable[RouterTraffic]) -> str:
    """The changing part as HTML on one line: traffic, and a table of the nodes."""
    known = list(history)
    flying = [point.running + point.waiting for point in known]
    template = _TEMPLATES.get_template("status.html")
    html = template.render(view=view, history=known, flying=flying, seconds=HISTORY)
    return " ".join(html.splitlines())  # nodes' reasons may have several lines

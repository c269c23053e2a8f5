"""The router's page: what the cluster does, for people, kept up to date by server-sent events.

A page is whole without scripts. With them it opens one stream (`GET /events`), and shows what
comes: the same HTML, made once per interval for all streams. A stream whose reader is behind gets
the newest state next, not all that it missed.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
from html import escape
from importlib.resources import files

from aiohttp import web

from kvbaton.config import human_bytes
from kvbaton.errors import RequestError
from kvbaton.messages.nodes import NodesView, NodeView, RouterTraffic
from kvbaton.router.status import HISTORY, INTERVAL_S, ClusterStatus
from kvbaton.server.frontend import FRONTEND
from kvbaton.server.openapi import contract
from kvbaton.server.sse import send_events

logger = logging.getLogger(__name__)

MAX_STREAMS = 64
"""Pages that are kept up to date at the same time."""
RELOAD_S = 5
"""A page without scripts loads itself anew so often."""

NOT_TOLD = "—"

_STYLE, _SCRIPT = (
    files(__package__).joinpath(f"page.{kind}").read_text(encoding="utf-8")
    for kind in ("css", "js")
)


def _source(text: str) -> str:
    """How a content security policy names what stands in the page."""
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

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>kvbaton: {model}</title>
<link rel="icon" href="data:,">
<noscript><meta http-equiv="refresh" content="{reload}"></noscript>
<style>{style}</style>
</head>
<body>
<header><h1>{model}</h1><p id="link" role="status">as of {time} UTC</p></header>
<main id="status">{status}</main>
<footer><a href="metrics">metrics</a><a href="nodes">nodes as JSON</a></footer>
<script>{script}</script>
</body>
</html>
"""


class StatusFeed:
    """Keeps pages up to date.

    Args:
        status: of the cluster; sampled here.

    Attributes:
        status: as given.
        streams: open.
    """

    def __init__(self, status: ClusterStatus) -> None:
        self.status = status
        self.streams = 0
        self._event = self._render(status.view())
        self._news = asyncio.Event()
        self._closed = False

    @asynccontextmanager
    async def served(self, app: web.Application) -> AsyncIterator[None]:
        """Sample for as long as the context lasts, for what an application answers."""
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
            except Exception:  # the pages are not worth the router
                logger.exception("the state of the cluster can't be shown")
            self._tell()

    async def _close(self, app: web.Application) -> None:
        """End all streams, which the server would wait for otherwise."""
        self._closed = True
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _render(self, view: NodesView) -> bytes:
        return b"data: %b\n\n" % fragment(view, self.status.history).encode()

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[AsyncIterator[bytes]]:
        """Events for one page: the state now, then the newest each time that the reader is ready.

        Raises:
            RequestError: 503, there are too many.
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
        if self.streams == 1:  # nobody was told of what happened before
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
    body = PAGE.format(
        model=escape(request.app[FRONTEND].config.model_name),
        reload=RELOAD_S,
        style=_STYLE,
        script=_SCRIPT,
        time=time.strftime("%H:%M:%S", time.gmtime()),
        status=fragment(status.view(), status.history),
    )
    return web.Response(text=body, content_type="text/html", headers=HEADERS)


@contract(content_type="text/event-stream")
async def events(request: web.Request) -> web.StreamResponse:
    """``GET /events``: the part of the page that changes, again and again (server-sent events)."""
    async with request.app[FEED].stream() as stream:
        return await send_events(request, stream)


# --- what changes, as HTML on one line; every value is escaped ---


def fragment(view: NodesView, history: Iterable[RouterTraffic]) -> str:
    """Figures of the traffic, and a table of the nodes."""
    html = f"{_figures(view.traffic, list(history))}<h2>Nodes</h2>{_table(view)}{_pairs(view)}"
    return " ".join(html.splitlines())  # nodes say why they fail in several, and may say anything


def _figures(traffic: RouterTraffic, history: list[RouterTraffic]) -> str:
    handed = f"{human_bytes(traffic.sent_bytes)} in all"
    tokens = f"{traffic.tokens:,} in all"
    ended = f"{traffic.finished:,} answered, {traffic.failed:,} failed"
    crossing = f"{human_bytes(traffic.sent_bytes_per_s)}/s"
    flying = [point.running + point.waiting for point in history]
    cards = (
        ("Requests", f"{traffic.running} running, {traffic.waiting} waiting", ended, flying),
        ("Tokens/s", _rate(traffic.tokens_per_s), tokens, [p.tokens_per_s for p in history]),
        ("KV handed over", crossing, handed, [p.sent_bytes_per_s for p in history]),
    )
    return f'<dl class="figures">{"".join(_card(*card) for card in cards)}</dl>'


def _card(name: str, value: str, more: str, points: list[float]) -> str:
    return (
        f'<div><dt>{name}</dt><dd class="value">{value}</dd>'
        f"<dd><small>{more}</small>{_sparkline(points)}</dd></div>"
    )


def _sparkline(points: list[float]) -> str:
    """The last minute, from 0 to its highest point."""
    top = max(points, default=0.0) or 1.0
    first = HISTORY - len(points)
    line = " ".join(f"{first + i},{22 - 20 * p / top:.1f}" for i, p in enumerate(points))
    return (
        f'<svg viewBox="0 0 {HISTORY - 1} 24" preserveAspectRatio="none" '
        f'aria-hidden="true"><polyline points="{line}"/></svg>'
    )


def _table(view: NodesView) -> str:
    encodes = any(node.role == "encode" for node in view.nodes)
    columns = ["Role", "State", "Running", "Waiting", "Prompt tokens in prefill", "Tokens/s"]
    columns += ["KV handed over", "KV cache in use"]
    columns += ["Stores"] * any(node.stores for node in view.nodes) + ["Rows to encode"] * encodes
    heads = "".join(
        f'<th scope="col" role="columnheader">{name}</th>' for name in ("Node", *columns)
    )
    rows = "".join(_row(node, columns) for node in view.nodes)
    empty = f'<tr role="row"><td role="cell" colspan="{1 + len(columns)}">no nodes yet</td></tr>'
    return (
        f'<table role="table" aria-label="Nodes"><thead role="rowgroup"><tr role="row">{heads}</tr>'
        f'</thead><tbody role="rowgroup">{rows or empty}</tbody></table>'
    )


def _row(node: NodeView, columns: list[str]) -> str:
    state = f"{node.state} ({node.reason})" if node.reason else node.state
    state += ", paused" if node.paused else ""
    shows_use = node.role == "any" and node.used_for
    stores = [
        f"{name}: {human_bytes(moved.get('load', 0))} read, "
        f"{human_bytes(moved.get('save', 0))} written"
        for name, moved in node.stores.items()
    ]
    cells = [
        escape(f"{node.role}: {', '.join(node.used_for)}" if shows_use else node.role),
        f'<span class="state {escape(node.state)}">{escape(state)}</span>',
        _said(node.running),
        _said(node.waiting),
        f"{node.prompt_tokens:,}",
        NOT_TOLD if node.tokens_per_s is None else _rate(node.tokens_per_s),
        NOT_TOLD if node.sent_bytes is None else human_bytes(node.sent_bytes),
        NOT_TOLD if node.kv_usage is None else f"{node.kv_usage:.0%}",
        *([escape("; ".join(stores)) or NOT_TOLD] if "Stores" in columns else []),
        f"{node.item_rows:,}",
    ]
    name = f"{escape(node.node_id)}<small>{escape(node.url)}</small>"
    shown = "".join(
        f'<td role="cell" data-label="{column}">{cell}</td>'
        for column, cell in zip(columns, cells, strict=False)
    )
    return f'<tr role="row"><th scope="row" role="rowheader">{name}</th>{shown}</tr>'


def _pairs(view: NodesView) -> str:
    counts = ((len(view.pairs), "prompts"), (len(view.encoder_pairs), "images"))
    said = [f"{n} {'pair' if n == 1 else 'pairs'} for {what}" for n, what in counts if n]
    return f'<p class="dim">Can hand over now: {", ".join(said) or "none"}.</p>'


def _said(count: int | None) -> str:
    return NOT_TOLD if count is None else f"{count:,}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"

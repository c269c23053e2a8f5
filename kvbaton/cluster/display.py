"""The display of `kvbaton up` while it serves: a live table in a terminal, lines elsewhere."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvbaton.config import human_bytes
from kvbaton.messages.nodes import NodesView, RouterTraffic

LINE_S = 5.0
"""Seconds between lines that sum up the traffic, if there is any."""
BARS = " ▁▂▃▄▅▆▇█"
HISTORY = 40
COLOURS = {"ready": "green", "unhealthy": "red", "gone": "red"}
NUMBERS = ("Running", "Waiting", "Tokens/s", "KV sent", "KV used")


class ClusterDisplay:
    """A context manager in which `show` displays the state of a cluster.

    Within it, printed and logged text appears above the table.
    """

    def __init__(self) -> None:
        self._live: Live | None = None
        self._handlers: list[logging.StreamHandler[Any]] = []
        self._rates: deque[float] = deque(maxlen=HISTORY)
        self._said_at = time.monotonic()
        self._said: RouterTraffic | None = None

    def __enter__(self) -> ClusterDisplay:
        terminal = sys.stdout is not None and sys.stdout.isatty()
        if terminal and os.environ.get("TERM") not in (None, "dumb"):
            error = sys.stderr
            self._live = Live(
                console=Console(highlight=False), auto_refresh=False, redirect_stderr=error.isatty()
            )
            self._live.start()
            self._handlers = [
                handler
                for handler in logging.getLogger().handlers
                if isinstance(handler, logging.StreamHandler) and handler.stream is error
            ]
            self._log_to_stderr()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._log_to_stderr()

    def _log_to_stderr(self) -> None:
        """Let log handlers write to the current standard error, which the table replaces."""
        for handler in self._handlers:
            handler.setStream(sys.stderr)

    def show(self, view: NodesView) -> None:
        """Display the current state."""
        self._rates.append(view.traffic.tokens_per_s)
        if self._live is not None:
            self._live.update(self._table(view), refresh=True)
            return
        now, traffic = time.monotonic(), view.traffic
        before = self._said or RouterTraffic()
        busy = traffic.running or traffic.waiting or traffic.tokens > before.tokens
        if busy and now - self._said_at >= LINE_S:
            self._said_at, self._said = now, traffic
            print(summary(traffic), flush=True)

    def _table(self, view: NodesView) -> Group:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("Node", "Role", "State"):
            table.add_column(name, overflow="fold")
        for name in NUMBERS:
            table.add_column(name, justify="right", no_wrap=True)
        for node in view.nodes:
            state = Text(node.state, COLOURS.get(node.state, "yellow"))
            state.append(" (paused)" if node.paused else "")
            table.add_row(
                Text(node.node_id, "bold"),
                Text(node.role),
                state,
                _said(node.running, "d"),
                _said(node.waiting, "d"),
                _said(node.tokens_per_s, ".1f"),
                "-" if node.sent_bytes is None else human_bytes(node.sent_bytes),
                _said(node.kv_usage, ".0%"),
            )
        top = max(self._rates) or 1.0
        bars = "".join(BARS[round(rate / top * (len(BARS) - 1))] for rate in self._rates)
        return Group("", table, Text(summary(view.traffic)), Text(bars, "cyan"))


def summary(traffic: RouterTraffic) -> str:
    """The traffic in one line."""
    said = [f"{traffic.running} running, {traffic.waiting} waiting"]
    said.append(
        f"{traffic.finished} answered" + f", {traffic.failed} failed" * bool(traffic.failed)
    )
    said.append(f"{traffic.tokens_per_s:.1f} tokens/s")
    rate = human_bytes(traffic.sent_bytes_per_s)
    said.append(f"KV handed over: {rate}/s, {human_bytes(traffic.sent_bytes)} in all")
    return " · ".join(said)


def _said(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)

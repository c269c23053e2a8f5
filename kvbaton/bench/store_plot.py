"""The figures of ``kvbaton connectors bench`` as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbaton.errors import ConfigError

try:
    from matplotlib.figure import Figure
except ImportError as error:
    raise ConfigError("--plot", "needs matplotlib: pip install 'kvbaton[plots]'") from error

Row = Mapping[str, Any]
MARKERS = {"copy": "s", "disk write": "v", "disk read": "x", "disk read cold": "*"}
"""Of the machine's own figures."""


def draw(title: str, rows: Sequence[Row], out: Path) -> None:
    """Speed and latency over the size of objects, a line per kind and concurrency, as PNG."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    figure.suptitle(title)
    speed, latency = figure.subplots(1, 2)
    lines = list(dict.fromkeys((row["what"], row["at once"]) for row in rows))
    for what, calls in lines:
        some = [row for row in rows if (row["what"], row["at once"]) == (what, calls)]
        ours = what not in MARKERS
        label, style = (f"{what}, {calls} at once", "o-") if ours else (what, "k:")
        sizes = [row["object KiB"] for row in some]
        marker = {} if ours else {"marker": MARKERS[what], "alpha": 0.5}
        speed.plot(sizes, [row["GiB/s"] for row in some], style, label=label, **marker)
        if ours:
            points = latency.plot(sizes, [row["p50 ms"] for row in some], "o-", label=label)
            p99 = [row["p99 ms"] for row in some]
            latency.plot(sizes, p99, "^--", color=points[0].get_color(), alpha=0.4)
    for axes, unit in ((speed, "GiB/s"), (latency, "ms (dashed: p99)")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("object, KiB")
        axes.set_ylabel(unit)
        axes.grid(alpha=0.3)
    speed.legend(fontsize="x-small")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png", dpi=120)

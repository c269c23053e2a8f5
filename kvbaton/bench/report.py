"""Reports of benchmarks: a table for people, JSON for programs, and the machine."""

from __future__ import annotations

import json
import math
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvbaton.errors import ConfigError, writing

T = TypeVar("T")


def rows_of(
    items: Sequence[T], measure: Callable[[T], list[dict[str, Any]]]
) -> tuple[list[dict[str, Any]], int]:
    """Measure items until Ctrl-C; return the rows, and the number of items not measured."""
    rows, left = list[dict[str, Any]](), len(items)
    with suppress(KeyboardInterrupt):
        for item in items:
            rows += measure(item)
            left -= 1
    return rows, left


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile (0 to 100) by linear interpolation; NaN without values."""
    return float(np.percentile(values, percent)) if values else float("nan")


def median(values: Sequence[float]) -> float:
    """Median; NaN without values."""
    return percentile(values, 50)


def prediction_error(pairs: Iterable[tuple[float | None, float | None]]) -> float:
    """Median error of (predicted, observed) pairs, as a share of the observed value."""
    return median([abs(told - seen) / seen for told, seen in pairs if told is not None and seen])


def new_figure(path: Path, height: float) -> Any:
    """Make an empty figure for a file.

    Raises:
        ConfigError: The path is a folder, matplotlib is missing, or it does not know the format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot", "needs matplotlib: pip install 'kvbaton[plots]'") from error
    if path.is_dir():
        raise ConfigError("--plot", f"can't be written: {path} is a folder")
    figure = Figure(figsize=(11, height), layout="constrained")
    known = figure.canvas.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in known:
        raise ConfigError("--plot", f"{path.suffix} is none of {', '.join(sorted(known))}")
    return figure


def machine() -> dict[str, Any]:
    """CPU, cores that this process may use, and their load: results mean nothing without them."""
    name = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": name[1] if name else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows of equal keys as a table."""
    if not rows:
        return "(nothing)"
    names = list(rows[0])
    cells = [names, *([_shown(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


def publish(
    name: str,
    settings: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    out: Path | None,
    **more: Sequence[Mapping[str, Any]],
) -> None:
    """Print the tables; write settings, machine and rows to `out`, if given.

    Args:
        name: Name of the benchmark.
        settings: Settings of the benchmark.
        rows: Rows of the main table.
        out: File for JSON, in which NaN is null and infinity is "inf".
        more: Rows of further tables, by name.

    Raises:
        ConfigError: The file can't be written; the tables were printed.
    """
    print(table(rows), flush=True)
    for title, others in more.items():
        print(f"\n{title}\n{table(others)}", flush=True)
    if out is not None:
        report = {"bench": name, "machine": machine(), "settings": settings, "rows": rows, **more}
        text = json.dumps(_plain(report), indent=2, default=str, allow_nan=False)
        with writing("--out"):
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text + "\n")


def _plain(value: Any) -> Any:
    """A report without the numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value

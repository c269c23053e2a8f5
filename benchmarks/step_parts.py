"""Cost of arrivals and ends to the steps around them, from `GET /debug/steps` of a node."""

from __future__ import annotations

import json
from urllib.request import urlopen

from kvbaton.bench.report import percentile, table

COUNTS = ("number", "at", "tokens", "sequences", "new", "received", "ended")


def step_parts(node: str, opens: float) -> dict[str, dict[str, float]]:
    """Milliseconds of each part of a node's steps since `opens`: p50 (and p95 of the whole).

    Returns:
        By kind of step: ``busy`` if a request arrived, was admitted or ended in it or in the step
        before, else ``quiet``.
    """
    with urlopen(f"{node}/debug/steps", timeout=30) as answer:
        told = json.load(answer)
    rows = [dict(zip(told["columns"], row, strict=True)) for row in told["rows"]]
    kinds: dict[str, list[dict[str, float]]] = {"quiet": [], "busy": []}
    before = False
    for row in rows:
        happens = bool(row["new"] or row["received"] or row["ended"])
        if row["at"] >= opens:
            kinds["busy" if happens or before else "quiet"].append(row)
        before = happens
    found = {}
    for kind, some in kinds.items():
        if some:
            parts = [name for name in some[0] if name not in COUNTS]
            found[kind] = {"steps": float(len(some))}
            found[kind]["step p95"] = 1e3 * percentile([row["step"] for row in some], 95)
            for part in parts:
                found[kind][part] = 1e3 * percentile([row[part] for row in some], 50)
    return found


def shown(parts: dict[str, dict[str, float]]) -> str:
    """Format as a table, with the difference if there are both kinds."""
    rows = [{"ms, p50": kind, **values} for kind, values in parts.items()]
    if len(rows) == 2:
        names = parts["busy"]
        more = {name: value - parts["quiet"][name] for name, value in names.items()}
        rows.append({"ms, p50": "more", **more})
    return table(rows)

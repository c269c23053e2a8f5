"""Parts of the time from P's last step to D's first one, from the nodes' timelines in ``/state``.

All times are on the machine's monotonic clock, so both nodes must run on one machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

import aiohttp

Marks = list[dict[str, Any]]

SEGMENTS = (
    ("result", "computed"),  # the transfer thread has the sums; negative: before the core
    ("computed", "posted"),
    ("posted", "landed"),
    ("landed", "verified"),
    ("verified", "delivered"),
    ("delivered", "launched"),
)
SUMMED = (
    ("result", "posted"),
    ("posted", "landed"),
    ("landed", "delivered"),
    ("delivered", "launched"),
    ("result", "launched"),
)


async def timelines(
    session: aiohttp.ClientSession, prefill: str, decode: str
) -> dict[str, dict[str, float]]:
    """Times of the events of each hand-over that both nodes remember; of its last write.

    ``rate`` is not a time, but GB/s of the last chunk.
    """
    states = []
    for url in (prefill, decode):
        async with session.get(f"{url}/state") as response:
            states.append(await response.json())
    at_p, at_d = states[0]["source"]["timelines"], states[1]["target"]["timelines"]
    loads: Mapping[str, Marks] = states[1]["target"]["loads"]
    found = {}
    for name in at_p.keys() & at_d.keys() & loads.keys():
        marks = (*at_p[name], *at_d[name], *loads[name])
        found[name] = {mark["what"]: mark["time"] for mark in marks}
        ready = found[name].get("computed", 0.0)  # the last report, for the end of the prompt
        last = [m for m in at_p[name] if m["what"] == "posted" and m["time"] >= ready]
        if last and "landed" in found[name]:
            seconds = found[name]["landed"] - min(mark["began"] for mark in last)
            found[name]["rate"] = sum(mark["num_bytes"] for mark in last) / seconds / 1e9
    return found


def print_parts(found: Mapping[str, Mapping[str, float]]) -> None:
    """Print median, minimum and maximum of each segment in milliseconds."""
    print(f"  of {len(found)} hand-overs, ms: median (least, most)")
    for title, segments in (("parts", SEGMENTS), ("in all", SUMMED)):
        for since, until in segments:
            taken = [
                1e3 * (marks[until] - marks[since])
                for marks in found.values()
                if since in marks and until in marks
            ]
            if taken:
                name = f"{since} to {until}"
                print(f"  {title:>6}: {name:24} {median(taken):7.2f} "
                      f"({min(taken):.2f}, {max(taken):.2f})")  # fmt: skip
    rates = [marks["rate"] for marks in found.values() if "rate" in marks]
    if rates:
        print(f"  wire of the last chunk, from before its first post to its last notice: "
              f"{median(rates):.1f} GB/s ({min(rates):.1f}, {max(rates):.1f})")  # fmt: skip
    ahead = sum("prepared" in marks for marks in found.values())
    print(f"  {ahead} of them had a write planned ahead", flush=True)

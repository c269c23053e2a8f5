"""The page of metrics has every metric of the engine."""

from __future__ import annotations

import re
from pathlib import Path

from kvbaton.server.metric_texts import TEXTS

DOCS = Path(__file__).parents[2] / "docs"
NAMED = re.compile(r"`(kvbaton_[a-z0-9_]+)[^`]*`((?:, `_[a-z_]+`)*)")


def names(page: str) -> set[str]:
    """Metrics that a page names; `_c` after `kvbaton_a_b` stands for `kvbaton_c`, `kvbaton_a_c`."""
    found = set[str]()
    for full, more in NAMED.findall(page):
        words = full.split("_")
        ends = re.findall(r"`(_[a-z_]+)`", more)
        found |= {full, *("_".join(words[:n]) + end for end in ends for n in range(1, len(words)))}
    return {name.removesuffix("_total") for name in found}


def test_every_metric_of_the_engine_is_on_the_page() -> None:
    known = set[str]().union(*(names(page.read_text()) for page in DOCS.glob("*.md")))
    assert set(TEXTS) - known == set()

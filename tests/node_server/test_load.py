"""Speeds that a node tells, from the totals of its core."""

from __future__ import annotations

import pytest

from kvbaton.messages.engine import NO_METRICS, Metrics
from kvbaton.server.node import LoadMeter


def report(**totals: float) -> Metrics:
    return Metrics(counters={f"kvbaton_{n}_total": v for n, v in totals.items()}, gauges={})


def test_nothing_is_told_before_anything_was_done() -> None:
    meter = LoadMeter()
    assert meter.measure(NO_METRICS) == {}
    assert meter.measure(report(encoder_rows=0.0, step_tokens=0.0)) == {}


def test_rates_are_those_of_late() -> None:
    meter = LoadMeter()
    first = report(
        encoder_rows=100.0,
        encoder_read_seconds=1.0,
        encoder_encode_seconds=3.0,
        step_tokens=10.0,
        step_seconds=5.0,
    )
    assert meter.measure(first) == {"encoder_row_s": 0.04, "prompt_token_s": 0.5}
    assert meter.measure(first) == {"encoder_row_s": 0.04, "prompt_token_s": 0.5}, "no news"
    later = report(encoder_rows=200.0, encoder_read_seconds=1.0, encoder_encode_seconds=3.0)
    assert meter.measure(later)["encoder_row_s"] == pytest.approx(0.02)
    assert meter.measure(later)["encoder_row_s"] == pytest.approx(0.02)

"""`benchmarks.bench_goodput`: its arithmetic, and all of it end to end with a tiny model."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import bench_simulated_goodput
from benchmarks.bench_goodput import Layout
from benchmarks.memory_wall import wall_of
from benchmarks.open_load import Load
from benchmarks.workload import llama_8b
from kvbaton.bench.serve import Shot
from kvbaton.simulate.engine_model import load_engine


def test_the_wall_of_the_8b_shape(tmp_path: Path) -> None:
    wall = wall_of(llama_8b(tmp_path / "model"), 2000, 1000, 4.2e12)
    assert wall.weights_s == pytest.approx(15.0e9 / 4.2e12, rel=0.01)
    assert wall.sequence_s == pytest.approx(2500 * 131072 / 4.2e12)
    assert wall.rate(0.012) == pytest.approx(9.0, abs=0.1)
    assert wall.rate(0.025) == pytest.approx(11.0, abs=0.1)


def test_a_request_meets_objectives_by_its_own_gaps() -> None:
    load = Load("", [], 1, ttft=1.0, itls=(0.02, 0.1))
    even = tuple(0.5 + 0.01 * i for i in range(101))
    assert load.met(Shot(0.0, even), 0.02)
    assert not load.met(Shot(0.0, even), 0.005)
    assert not load.met(Shot(-0.6, even), 0.02)
    assert not load.met(Shot(0.0, even, error="late"), 0.02)
    clumps = tuple(0.5 + 0.5 * (i // 25) for i in range(101))
    assert not load.met(Shot(0.0, clumps), 0.1)
    stalls = tuple(t + 0.05 * (i // 10) for i, t in enumerate(even))  # one gap in ten
    assert not load.met(Shot(0.0, stalls), 0.02)
    assert load.met(Shot(0.0, stalls), 0.1)


def test_bisection_finds_the_highest_rate_of_each_objective() -> None:
    layout, limits = Layout("any", [], 1.0, 1), (7.0, 10.3)
    asked = []
    while (rate := layout.next_rate([9.0, 11.0])) is not None:
        asked.append(rate)
        met = [1.0 if rate <= limit else 0.5 for limit in limits]
        layout.rows.append({"rate": rate, "met": met})
    assert len(asked) == len(set(asked)) < 12
    for objective, limit in enumerate(limits):
        low, high = layout.bounds(objective)
        assert low <= limit < high <= low / 0.95 + 0.01


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["cached", "1P1D"])
def test_rates_are_found_end_to_end(layout: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [
        sys.executable, "-m", "benchmarks.bench_goodput", "--device=cpu", "--input=48",
        "--output=16", "--ttft=20", "--start-rate=4", "--itl", "0.01", "5000", "--max-rates=2",
        "--clients=2", "--chunk=64", f"--layouts={layout}", "--one-gpu", f"--json={out}",
    ]  # fmt: skip
    bench = subprocess.Popen(command)
    try:
        assert bench.wait(500) == 0
    finally:
        if bench.poll() is None:
            bench.send_signal(signal.SIGINT)  # it takes its cluster along
            bench.wait(60)
    found = json.loads(out.read_bytes())
    tight, loose = found["goodput"]
    assert (tight["met/s"], tight["failed/s"]) == (0, min(row["rate"] for row in found["rates"]))
    assert loose["met/s"] > 0
    for row in found["rates"]:
        assert not set(row["errors"]) - {"late"}
        if row["met"][1] < 1.0:
            continue
        tokens = row["prompt_tokens"]
        assert row["ended"] == row["requests"] > 5
        if layout == "1P1D":
            assert tokens['source="transferred"'] > 0
        else:  # one token of each is computed
            assert tokens['source="local_cache"'] > 20 * tokens['source="computed"'] > 0
        busy = [parts["busy"] for parts in row["steps"].values()]
        assert all(part["steps"] > 0 and part["device"] > 0 for part in busy)


def test_a_simulated_load_counts_the_middle_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a low rate a text of 1,000 tokens meets 12 ms, and 5 ms never."""
    words = ["bench", "--policy", "cost@2A", "least-loaded@2D", "--rate", "1", "--life", "4"]
    for itl, share in (("12", "1.000"), ("5", "0.000")):
        monkeypatch.setattr("sys.argv", [*words, "--seeds", "1", "--itl", itl, "--live"])
        bench_simulated_goodput.main()
        rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
        assert rows == [["cost@2A", share], ["least-loaded@2D", share]]


@pytest.mark.slow
def test_two_nodes_share_prompts_where_chunks_of_them_fit() -> None:
    """Where all texts gather at one of them, 0.17: the other's long steps are too long."""
    load = argparse.Namespace(rate=9.3, itl=12.0, life=12.0, live=False)
    assert bench_simulated_goodput.met(load, load_engine(), "cost@2A", 1) > 0.5

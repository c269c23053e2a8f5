"""``kvbaton simulate``: serves a trace by several policies and layouts in virtual time."""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from kvbaton.bench.report import new_figure, percentile, prediction_error, publish, rows_of
from kvbaton.config import Count, flag
from kvbaton.errors import INTERRUPTED, ConfigError, writing
from kvbaton.router.config import Objectives, RoutingPolicy
from kvbaton.simulate.engine_model import H200_8B, EngineModel, load_engine
from kvbaton.simulate.generators import GENERATORS
from kvbaton.simulate.service import RequestRecord, ServiceReport, parse_nodes, simulate
from kvbaton.simulate.traces import TraceRequest, cut, read_trace

SLOWEST, FASTEST = 1 / 64, 64
"""Factors of the given rate that the search is limited to; beyond them the highest rate is 0 or
infinite."""
MOST_ERRORS = 3
"""Maximum number of different error messages printed per policy: many name lengths."""
MOST_REQUESTS = 10_000_000
"""Maximum number of generated requests; all take memory before the first one is served."""


@dataclass(frozen=True, kw_only=True)
class SimulateConfig(Objectives):
    """What to simulate, and the objectives.

    Attributes:
        trace: File in Mooncake's or Azure's format, or a generator's name.
        rate: Requests per second (for generators of conversations: new conversations per second);
            None keeps a recorded trace's own rate.
        seconds: Seconds of arrivals.
        begin: Seconds of a recorded trace to leave out.
        nodes: Layout for policies that name none.
        itl_percentile: Percentile of a request's ITLs that `itl_slo` judges; None for the mean.
        policies: Policies to compare, each with an optional layout: ``cost@4A``.
        engine: Measurements, see `simulate.engine_model`.
        min_handover_tokens: As for a router.
        goodput: Share of requests within both objectives, for which the highest rate is searched;
            None searches none.
        seeds: Seeds, one run each.

    Raises:
        ConfigError: A number is out of range.
    """

    trace: str = flag(
        text=f"file of Mooncake's or Azure's format, or one of {', '.join(GENERATORS)}",
        metavar="FILE|NAME",
    )
    rate: float | None = flag(None, "requests per second (of conversations: new ones)", metavar="N")
    seconds: float = flag(60.0, "seconds of arrivals", metavar="S")
    begin: float = flag(0.0, "seconds of a file to leave out", metavar="S")
    nodes: str = flag("2P2D", "P prefill, D decode (4D: all serve alone), A any", metavar="NODES")
    policies: tuple[str, ...] = flag(
        ("cost",),
        "policies to compare, each with optional nodes: cost@4A (cost)",
        name="--policy",
        nargs="+",
        metavar="NAME[@NODES]",
    )
    engine: Path = flag(H200_8B, "measured steps and hand-overs (an H200's)", metavar="FILE")
    itl_percentile: float | None = flag(
        None,
        "percentile of a request's times between tokens that --itl-slo judges (default: the mean)",
        metavar="P",
    )
    min_handover_tokens: Count = flag(0, "serve shorter prompts on one node", metavar="N")
    goodput: float | None = flag(
        None,
        "also find the highest rate at which this share (as 0.9) is served within both objectives",
        metavar="SHARE",
    )
    seeds: tuple[Count, ...] = flag(
        (0,), "of random numbers, one run each (0)", name="--seed", nargs="+", metavar="N"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("--rate", self.rate), ("--seconds", self.seconds)):
            if value is not None and not 0 < value < math.inf:
                wrong = "finite" if value == math.inf else "positive"
                raise ConfigError(name, f"{value} is not {wrong}")
        percentile = self.itl_percentile
        if percentile is not None and not 0 < percentile < 100:
            raise ConfigError("--itl-percentile", f"{percentile:g} is not between 0 and 100")
        if percentile is not None and self.itl_slo is None:
            raise ConfigError("--itl-percentile", "without --itl-slo it is of no objective")
        if self.begin < 0:
            raise ConfigError("--begin", f"{self.begin} is negative")
        if self.goodput is not None and not 0 < self.goodput <= 1:
            raise ConfigError("--goodput", f"{self.goodput} is no share: over 0, at most 1")
        if self.goodput is not None and self.ttft_slo is None:
            raise ConfigError("--goodput", "without --ttft-slo no rate is too high")
        if self.trace in GENERATORS:
            if self.begin:
                raise ConfigError("--begin", f"is for a file; {self.trace} is made as asked")
            if self.rate is None:
                raise ConfigError("--rate", f"how many requests per second of {self.trace}?")
            if self.rate * self.seconds > MOST_REQUESTS:
                text = f"{self.rate:g} a second for {self.seconds:g} s are too many requests"
                raise ConfigError("--rate", f"{text}; at most {MOST_REQUESTS}")

    def requests(self, seed: int, speed: float = 1.0) -> list[TraceRequest]:
        """The trace at `speed` times its rate: with more requests if faster, longer if slower.

        Raises:
            ConfigError: It can't be read, or no request is left.
        """
        if self.trace in GENERATORS:
            assert self.rate is not None
            found = GENERATORS[self.trace](seed, self.seconds, self.rate * max(speed, 1.0))
            if speed < 1:
                found = cut(found, speed=speed)
        else:
            whole = read_trace(Path(self.trace))
            own = len(whole) / max(whole[-1].at - whole[0].at, 1e-3)
            seconds = self.seconds / min(speed, 1.0)
            speed *= 1.0 if self.rate is None else self.rate / own
            found = cut(whole, begin=self.begin, seconds=seconds, speed=speed)
        if not found:
            raise ConfigError(
                "--begin" if self.begin else "--seconds", "no request comes in that time"
            )
        return found

    def is_met(self, outcome: RequestRecord) -> bool:
        """Whether a request was served within both objectives."""
        return is_good(outcome, self.ttft_slo, self.itl_slo, self.itl_percentile)

    def arrival_seconds(self, trace: Sequence[TraceRequest]) -> float:
        """Seconds in which requests come: a recorded trace may end early."""
        last = max(request.at for request in trace if request.after is None)
        return self.seconds if self.trace in GENERATORS or not last else last

    def routing(self, policy: str) -> RoutingPolicy:
        """The settings of a router."""
        wanted = {item.name: getattr(self, item.name) for item in fields(Objectives)}
        least = self.min_handover_tokens
        return RoutingPolicy(policy=policy, min_handover_tokens=least, **wanted)


def is_good(
    outcome: RequestRecord,
    ttft_slo: float | None,
    itl_slo: float | None,
    itl_percentile: float | None = None,
) -> bool:
    """Whether a request was served within its objectives (in milliseconds)."""
    if outcome.error is not None or outcome.ttft_s is None:
        return False
    late = ttft_slo is not None and outcome.ttft_s * 1e3 > ttft_slo
    return not late and (itl_slo is None or outcome.itl_of(itl_percentile) * 1e3 <= itl_slo)


def summary(done: ServiceReport, config: SimulateConfig) -> dict[str, float]:
    """The figures of one run."""
    outcomes = done.outcomes
    good = sum(map(config.is_met, outcomes))
    ttfts = [o.ttft_s * 1e3 for o in outcomes if o.ttft_s is not None]
    gaps = [gap for o in outcomes for gap in (o.gaps * 1e3).tolist()]
    itls = [o.itl_of() * 1e3 for o in outcomes if len(o.gaps)]
    ttft_pairs = [(d.ttft_s, d.observed_ttft_s) for d in done.decisions]
    itl_pairs = [(d.itl_s, d.observed_itl_s) for d in done.decisions]
    prompts = sum(o.request.prompt_tokens for o in outcomes)
    seconds = config.arrival_seconds([o.request for o in outcomes])
    return {
        "requests": len(outcomes),
        "good": good / len(outcomes),
        "good/s": good / max(seconds, max(o.begin for o in outcomes)),
        "ttft p50": percentile(ttfts, 50),
        "ttft p90": percentile(ttfts, 90),
        "ttft p99": percentile(ttfts, 99),
        "tpot p50": percentile(itls, 50),
        "tpot p90": percentile(itls, 90),
        "itl p99": percentile(gaps, 99),
        "hit": sum(o.cached for o in outcomes) / prompts,
        "failed": sum(o.error is not None for o in outcomes),
        "ttft error": prediction_error(ttft_pairs),
        "itl error": prediction_error(itl_pairs),
    }


def run_one(
    config: SimulateConfig, spec: str, model: EngineModel, trace: Sequence[TraceRequest], seed: int
) -> ServiceReport:
    """Run one policy over a trace."""
    policy, _, nodes = spec.partition("@")
    return simulate(
        trace, parse_nodes(nodes or config.nodes), model, config.routing(policy), seed=seed
    )


def highest_rate(config: SimulateConfig, spec: str, model: EngineModel) -> float:
    """Highest rate (requests or new conversations per second) at which `config.goodput` are good.

    DistServe (Zhong et al., OSDI 2024) calls it goodput, at 0.9. The rate is varied, for all seeds
    together, until it is known to a sixteenth; see `SLOWEST` and `FASTEST`. Requests come for the
    same time at each rate, as far as a recording goes: a short burst would only queue, and be
    served.
    """
    assert config.goodput is not None
    low, high, speed, rate = 0.0, math.inf, 1.0, 0.0
    while high > low * 17 / 16 and speed >= SLOWEST:
        good, count, seconds = 0, 0, 0.0
        for seed in config.seeds:
            trace = config.requests(seed, speed)
            good += sum(map(config.is_met, run_one(config, spec, model, trace, seed).outcomes))
            count += len(trace)
            seconds += config.arrival_seconds(trace)
        if good >= config.goodput * count:
            low = speed if speed < FASTEST else math.inf
            generated = config.rate if config.trace in GENERATORS else None
            rate = low * (generated or count / seconds / speed)
        else:
            high = speed
        speed = 2 * low if high == math.inf else (low + high) / 2
    return rate


def measure(
    config: SimulateConfig, name: str, out: Path | None
) -> tuple[int, list[dict[str, Any]], dict[str, list[RequestRecord]]]:
    """Simulate all that is to be compared, until interrupted; print the results and write them.

    Returns:
        The exit status, a row for each finished policy, and the records of their requests.
    """
    model = load_engine(config.engine)
    for spec in config.policies:  # report wrong ones before long runs
        parse_nodes(spec.partition("@")[2] or config.nodes)
    busy: list[dict[str, Any]] = []
    outcomes: dict[str, list[RequestRecord]] = {}
    gc.freeze()  # existing objects stay: keep them from repeated collection

    def compare(spec: str) -> list[dict[str, Any]]:
        runs, started = [], time.process_time()
        for seed in config.seeds:
            done = run_one(config, spec, model, config.requests(seed), seed)
            runs.append(summary(done, config))
            outcomes.setdefault(spec, []).extend(done.outcomes)
            shares = " ".join(f"{node} {share:.2f}" for node, share in done.busy.items())
            busy.append({"policy": spec, "seed": seed, "busy": shares})
        mean = {figure: sum(row[figure] for row in runs) / len(runs) for figure in runs[0]}
        row = {"policy": spec, **mean, "cpu s": time.process_time() - started}
        if config.goodput is not None:
            row["highest rate"] = highest_rate(config, spec, model)
        return [row]

    rows, left = rows_of(config.policies, compare)
    publish(name, {**asdict(config), "engine": str(config.engine)}, rows, out, nodes=busy)
    for spec, ended in outcomes.items():
        errors = Counter(o.error for o in ended if o.error is not None)
        for error, number in errors.most_common(MOST_ERRORS):
            print(f"failed, {spec}: {number} of {len(ended)}, {error}")
    if left:
        print(f"interrupted: {len(rows)} of {len(config.policies)} policies were simulated")
    return INTERRUPTED if left else 0, rows, outcomes


def run(config: SimulateConfig, out: Path | None = None, plot: Path | None = None) -> int:
    """``kvbaton simulate``: print, and draw if wanted; return the exit status."""
    figure = new_figure(plot, 4) if plot is not None else None
    status, _, outcomes = measure(config, "simulate", out)
    if figure is not None and plot is not None:
        draw(figure, config, outcomes, plot)
    return status


def run_advise(config: SimulateConfig, out: Path | None = None) -> int:
    """``kvbaton advise``: try every layout of a number of nodes; return the exit status.

    Raises:
        ConfigError: See `measure`; or there is no objective to judge layouts by.
    """
    if config.ttft_slo is None and config.itl_slo is None:
        raise ConfigError("--ttft-slo", "or --itl-slo must say what is good enough")
    count = len(parse_nodes(config.nodes))
    apart = tuple(f"prefix-aware@{p}P{count - p}D" for p in range(1, count))
    config = replace(config, policies=(f"prefix-aware@{count}D", *apart, f"cost@{count}A"))
    status, rows, _ = measure(config, "advise", out)
    if not status:
        print("\n" + "\n".join(advice(rows)))
    return status


def advice(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Conclusions from rows: nodes that serve alone, nodes of fixed roles, nodes of any role.

    The highest rate decides if it was searched.
    """
    alone, *apart, any_role = rows
    by_rate = "highest rate" in alone

    def told(row: Mapping[str, Any]) -> str:
        rate = f", up to {row['highest rate']:.3g}/s" if by_rate else ""
        return f"{row['policy'].partition('@')[2]} {row['good']:.1%}{rate}"

    def value(row: Mapping[str, Any]) -> float:
        return float(row["highest rate"] if by_rate else round(row["good"], 3))

    def clearly_above(figure: float) -> float:
        return figure * 17 / 16 if by_rate else figure + 0.01

    def merit(row: Mapping[str, Any]) -> tuple[float, ...]:
        return value(row), round(row["good"], 3), -row["ttft p50"]

    lines = [f"within the objectives: {told(alone)} where each node serves alone"]
    if apart:
        best = max(apart, key=merit)
        ours, theirs = value(best), value(alone)
        verdict = "changes little"
        if max(ours, theirs) > clearly_above(min(ours, theirs)):
            verdict = "pays" if ours > theirs else "does not pay"
        lines.append(f"fixed prefill and decode nodes: {told(best)} at best, which {verdict}")
    lines.append(f"any role, by cost: {told(any_role)}")
    if not any(row["good"] or value(row) for row in rows):
        return [*lines, "best: none, for no layout serves a request within the objectives"]
    best = max(rows, key=merit)
    policy, _, nodes = best["policy"].partition("@")
    lines.append(f"best: {nodes} with --policy {policy}")
    return lines


def draw(
    figure: Any, config: SimulateConfig, outcomes: dict[str, list[RequestRecord]], path: Path
) -> None:
    """Draw the distributions over requests of TTFT and of the time per token after it."""
    ttft, itl = figure.subplots(1, 2)
    for spec, ended in outcomes.items():
        firsts = sorted(o.ttft_s * 1e3 for o in ended if o.ttft_s is not None)
        itls = sorted(o.itl_of(config.itl_percentile) * 1e3 for o in ended if len(o.gaps))
        for axes, values in ((ttft, firsts), (itl, itls)):
            shares = [(i + 1) / len(values) for i in range(len(values))]
            axes.step(values, shares, where="post", label=spec)
    for axes, name, slo in (
        (ttft, "time to first token", config.ttft_slo),
        (itl, "time per token after it", config.itl_slo),
    ):
        axes.set(xlabel=f"{name} (ms)", ylabel="share of requests", xscale="log", ylim=(0, 1))
        axes.grid(alpha=0.3)
        if slo is not None:
            axes.axvline(slo, color="black", linestyle="--", linewidth=1)
    ttft.legend()
    figure.suptitle(config.trace)
    with writing("--plot"):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)

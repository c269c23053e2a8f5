"""The load of `bench_goodput` in the simulator: share of requests that meet their objectives.

    python -m benchmarks.bench_simulated_goodput --policy cost@2A least-loaded@2D --rate 6 --itl 25

Arrivals are Poisson, with 2,000 tokens in and 1,000 out. Requests count that arrive in three
lifetimes after the first two. With ``--live`` they count after the first lifetime, which begins
with as many sequences as are live at that rate, of all ages (their prompts all arrive at once).
Objectives are TTFT within 1 s, and the 95th percentile of a request's ITL. The output has a row per
policy, with the share of each seed.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import numpy as np

from kvbaton.router.config import RoutingPolicy
from kvbaton.simulate.engine_model import EngineModel, load_engine
from kvbaton.simulate.main import is_good
from kvbaton.simulate.service import parse_nodes, simulate
from kvbaton.simulate.traces import TraceRequest

H100_8B = Path(__file__).with_name("h100-8b.json")
INPUT, OUTPUT, TTFT_MS = 2000, 1000, 1000.0


def requests(seed: int, rate: float, seconds: float, live: int) -> list[TraceRequest]:
    """Arrivals within `seconds`, after `live` sequences of shorter output."""
    rng = np.random.default_rng(seed)
    asks = [(0.0, int(age)) for age in rng.integers(1, OUTPUT + 1, live)]
    at = 0.0
    while (at := at + rng.exponential(1 / rate)) < seconds:
        asks.append((at, OUTPUT))
    return [fresh(i, at, INPUT, tokens) for i, (at, tokens) in enumerate(asks)]


def fresh(number: int, at: float, length: int, tokens: int) -> TraceRequest:
    """A request with a new prompt."""
    return TraceRequest(at, ((2 * number + 2, length),), tokens, 2 * number + 3)


def settings_of(policy: str, ttft_slo: float, itl_slo: float) -> RoutingPolicy:
    """Settings of a policy. Only `cost` gets objectives: nodes would order prompts by them."""
    if policy != "cost":
        return RoutingPolicy(policy=policy)
    return RoutingPolicy(policy=policy, ttft_slo=ttft_slo, itl_slo=itl_slo)


def met(args: argparse.Namespace, model: EngineModel, spec: str, seed: int) -> float:
    """Share of the counted requests that meet both objectives."""
    policy, _, nodes = spec.partition("@")
    settings = settings_of(policy, TTFT_MS, args.itl)
    life, live = args.life, round(args.rate * args.life) if args.live else 0
    opens = life if args.live else 2 * life
    trace = requests(seed, args.rate, opens + 4 * life, live)
    done = simulate(trace, parse_nodes(nodes), model, settings, seed=seed)
    counts = [o for o in done.outcomes if opens <= o.begin < opens + 3 * life]
    return float(np.mean([is_good(o, TTFT_MS, args.itl, 95.0) for o in counts]))


def main() -> None:
    """Print the share of each policy."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--policy", nargs="+", default=["cost@2A", "least-loaded@2D"], metavar="NAME@NODES")
    add("--rate", type=float, required=True, help="requests per second")
    add("--itl", type=float, required=True, help="ITL objective in ms")
    add("--seeds", type=int, default=10)
    add("--life", type=float, default=12.0, help="assumed lifetime of a request in seconds")
    add("--live", action="store_true", help="begin with as many sequences as are live")
    add("--engine", type=Path, default=H100_8B, help="measured costs of steps and hand-overs")
    args = parser.parse_args()
    model = load_engine(args.engine)
    gc.freeze()
    for spec in args.policy:
        shares = [met(args, model, spec, seed) for seed in range(args.seeds)]
        each = " ".join(f"{share:.2f}" for share in shares)
        print(f"{spec:<20}{np.mean(shares):.3f}  {each}", flush=True)


if __name__ == "__main__":
    main()

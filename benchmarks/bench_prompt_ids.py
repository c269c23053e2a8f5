"""CPU time of handling a long prompt's token ids before its first step, with most of it cached.

    python benchmarks/bench_prompt_ids.py

The ids go from a frontend's list to the runner's rows as between processes: *asked* (checked, put
into an `AddRequest`, encoded), *read* by the core, *added* (checked again), *planned* (block keys
hashed, looked up and referenced) and *told* to the runner. In a hand-over, both nodes do all but
the first.
"""

from __future__ import annotations

import argparse
import random
import time
from itertools import pairwise
from pathlib import Path

import torch

from kvbaton.bench.report import publish
from kvbaton.connectors.keys import root_key
from kvbaton.engine.config import SchedulerConfig
from kvbaton.engine.kv_cache_manager import GroupSpec
from kvbaton.engine.scheduler import Scheduler
from kvbaton.engine.sequences import Sequences
from kvbaton.engine.step import Sampled, StepPlan, StepResult
from kvbaton.engine.validate import INT32, check_ids
from kvbaton.messages.engine import AddRequest, SamplingParams, decode_to_core, encode_to_core

BLOCK_SIZE, VOCAB, NEW = 16, 128_256, 64
PARTS = ("asked", "read", "added", "planned", "told")


class Engine:
    """A scheduler and a runner's token rows, without a model."""

    def __init__(self, tokens: int) -> None:
        group = GroupSpec(block_size=BLOCK_SIZE, num_blocks=3 * tokens // BLOCK_SIZE)
        config = SchedulerConfig(
            groups=(group,),
            max_model_len=2 * tokens,
            vocab_size=VOCAB,
            max_num_batched_tokens=16_384,
        )
        self.scheduler = Scheduler(config, root_key=lambda salt: root_key(bytes(32), salt))
        most = 2 * tokens // BLOCK_SIZE + 1
        device = torch.device("cpu")
        self.rows = Sequences(rows=8, max_tokens=2 * tokens, max_blocks=most, device=device)

    def plan(self) -> StepPlan:
        """Plan the next step."""
        plan = self.scheduler.plan()
        assert plan is not None
        return plan

    def finish(self, plan: StepPlan) -> None:
        """End a step whose new sequences the runner knows already, and run all further steps."""
        while True:
            sampled = (Sampled(step.handle, (7,)) for step in plan.steps if step.num_samples)
            self.scheduler.update(StepResult(plan.number, tuple(sampled)))
            for handle in plan.ended:
                self.rows.end(handle)
            if not self.scheduler.has_work():
                return
            plan = self.plan()
            self.rows.add(plan.new)


def turn(engine: Engine, name: str, ids: list[int]) -> list[float]:
    """CPU time in seconds of each part."""
    times = [time.process_time()]
    checked = check_ids("prompt", ids, VOCAB, most=INT32)
    params = SamplingParams(seed=1, max_tokens=1)
    sent = encode_to_core(AddRequest(request_id=name, token_ids=checked, params=params))
    times.append(time.process_time())
    request = decode_to_core(sent)
    times.append(time.process_time())
    assert isinstance(request, AddRequest)
    engine.scheduler.add(request)
    times.append(time.process_time())
    plan = engine.plan()
    times.append(time.process_time())
    engine.rows.add(plan.new)
    times.append(time.process_time())
    engine.finish(plan)
    return [end - begin for begin, end in pairwise(times)]


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16_384, 65_536])
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    for tokens in args.tokens:
        rng, engine = random.Random(1), Engine(tokens)
        known = [rng.randrange(VOCAB) for _ in range(tokens)]
        turn(engine, "first", known)
        took = [
            turn(engine, str(number), known + [rng.randrange(VOCAB) for _ in range(NEW)])
            for number in range(args.repeat)
        ]
        least = [round(1e3 * min(part), 2) for part in zip(*took, strict=True)]
        for part, ms in zip((*PARTS, "all"), (*least, round(sum(least), 2)), strict=True):
            rows.append({"figure": f"{tokens} + {NEW} tokens: {part}, ms", "value": ms})
    publish("prompt-ids", {"repeat": args.repeat}, rows, args.out)


if __name__ == "__main__":
    main()

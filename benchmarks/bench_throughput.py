"""Throughput of 16 requests on one CPU node against ``transformers``, outputs compared.

Three ways alternate within one run: kvbaton's engine with all requests at once; ``generate`` of
``transformers`` on the batch; and ``generate`` on one request after the other. Weights (fp32),
threads and greedy sampling are the same; prompts have one length, so the batch needs no padding.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.workload import SMALL
from kvbaton.bench.report import median, publish
from kvbaton.engine.build import make_scheduler
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.model_config import load_model_config
from kvbaton.engine.scheduler import Scheduler
from kvbaton.engine.worker import cpu_executor
from kvbaton.messages.engine import AddRequest, SamplingParams
from tests.support.checkpoints import make_checkpoint

Prompts = list[list[int]]


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    chance = random.Random(0)
    prompts = [chance.choices(range(3, 256), k=args.input_len) for _ in range(args.requests)]
    with tempfile.TemporaryDirectory() as folder:
        ways = make_ways(make_checkpoint(Path(folder, "model"), SMALL), args.threads)
        rows = measure(ways, prompts, args.output_len, args.rounds)
    publish("throughput", vars(args), rows, args.out)


def make_ways(folder: Path, threads: int) -> dict[str, Callable[[Prompts, int], Prompts]]:
    """Functions from prompts and a number of tokens to the generated tokens, by name."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = Engine(folder, threads)
    return {
        "kvbaton": engine.generate,
        "transformers, batch": lambda prompts, count: generate(model, prompts, count),
        "transformers, one by one": lambda prompts, count: [
            generate(model, [prompt], count)[0] for prompt in prompts
        ],
    }


def generate(model: Any, prompts: Prompts, count: int) -> Prompts:
    """Generate greedily with ``transformers``."""
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    tokens: Prompts = out[:, ids.shape[1] :].tolist()
    return tokens


class Engine:
    """kvbaton's scheduler and runner in this process."""

    def __init__(self, folder: Path, threads: int) -> None:
        config = EngineConfig(
            model=str(folder), device="cpu", num_threads=threads, enable_prefix_caching=False
        )
        model = load_model_config(config.model, config.dtype)
        self.executor = cpu_executor(config, model, track_sums=False)
        layouts = self.executor.layouts[0]
        self.scheduler: Scheduler = make_scheduler(config, model, layouts, bytes(32))

    def generate(self, prompts: Prompts, count: int) -> Prompts:
        """Run all requests at once. End tokens are forbidden, as for ``transformers``."""
        params = SamplingParams(temperature=0.0, max_tokens=count, min_tokens=count)
        for number, prompt in enumerate(prompts):
            self.scheduler.add(
                AddRequest(request_id=str(number), token_ids=array("I", prompt), params=params)
            )
        tokens: Prompts = [[] for _ in prompts]
        while self.scheduler.has_work():
            plan = self.scheduler.plan()
            assert plan is not None, "nothing else could be waited for"
            for output in self.scheduler.update(self.executor.launch(plan).result()):
                tokens[int(output.request_id)] += output.token_ids
        return tokens


def measure(
    ways: dict[str, Callable[[Prompts, int], Prompts]], prompts: Prompts, count: int, rounds: int
) -> list[dict[str, Any]]:
    """Run all ways in turn for some rounds; medians.

    Raises:
        SystemExit: The outputs differ.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        outputs = []
        for name, way in ways.items():
            began = time.perf_counter()
            outputs.append(way(prompts, count))
            if number:  # the first round is warm-up
                taken[name].append(time.perf_counter() - began)
        if any(output != outputs[0] for output in outputs):
            raise SystemExit("the outputs differ")
    ours = taken["kvbaton"]
    return [
        {
            "way": name,
            "s": median(seconds),
            "tokens/s": count * len(prompts) / median(seconds),
            "kvbaton is faster by": median([b / a for a, b in zip(ours, seconds, strict=True)]),
        }
        for name, seconds in taken.items()
    ]


if __name__ == "__main__":
    main()

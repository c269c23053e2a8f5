"""Gain of speculative decoding with prompt lookup: equal requests with and without drafts.

    python -m benchmarks.bench_speculative [--small] [--output-len 256]

Llama-3-8B's shape with dummy weights on a GPU, or with ``--small`` a small model on a CPU. Prompts
are repetitive, and so are greedy answers of random weights. Reported are ms per token and whether
the tokens are equal; in bfloat16, tokens may differ between batch sizes where two logits nearly
tie.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.workload import SMALL, llama_8b, random_prompts
from kvbaton import LLM, SamplingParams
from tests.support.checkpoints import make_checkpoint

BATCHES = (1, 8, 32)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--draft", type=int, default=4)
    args = parser.parse_args()
    drafts = {"method": "ngram", "num_speculative_tokens": args.draft, "prompt_lookup_min": 2}
    settings: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 64}
    settings |= {"enable_prefix_caching": False}
    params = SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True)
    found: dict[tuple[str, int], tuple[float, list[list[int]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if args.small:
            model = make_checkpoint(Path(folder, "model"), SMALL)
        else:
            model = llama_8b(Path(folder, "model"))
            settings |= {"load_format": "dummy"}
        for name, config in (("plain", None), ("drafts", json.dumps(drafts))):
            with LLM(str(model), speculative_config=config, **settings) as llm:
                for batch in BATCHES:
                    prompts = [list(p * 4) for p in random_prompts(batch, 16, seed=batch)]
                    llm.generate(prompts, params, use_tqdm=False)
                    began = time.perf_counter()
                    answers = llm.generate(prompts, params, use_tqdm=False)
                    seconds = time.perf_counter() - began
                    tokens = [list(answer.outputs[0].token_ids) for answer in answers]
                    found[name, batch] = seconds, tokens
    print(f"{'batch':>5}{'plain':>14}{'drafts':>14}{'ratio':>8}  equal answers")
    for batch in BATCHES:
        (plain, expected), (drafted, tokens) = found["plain", batch], found["drafts", batch]
        equal = sum(a == b for a, b in zip(tokens, expected, strict=True))
        each = [1000 * seconds / args.output_len for seconds in (plain, drafted)]
        print(
            f"{batch:>5}{each[0]:>11.2f} ms{each[1]:>11.2f} ms{plain / drafted:>8.2f}"
            f"  {equal} of {batch}"
        )


if __name__ == "__main__":
    main()

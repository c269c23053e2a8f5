"""Decode without anyone to compute the prompts: `decode_bench` under a whole engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvbaton import LLM, SamplingParams


def test_an_engine_takes_what_is_made_up_for_prompts_of_any_tokens(
    checkpoint: Callable[..., Path],
) -> None:
    prompts = [[(7 * i + j) % 250 for j in range(100)] for i in range(4)]
    how = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=8)
    store = 'decode_bench:{"dtype": "float32"}'
    with LLM(
        checkpoint(),
        num_blocks=64,
        num_threads=1,
        block_size=16,
        store=store,
        store_lookup_timeout=20.0,
    ) as llm:
        answers = llm.generate(prompts, how)
    assert [answer.num_cached_tokens for answer in answers] == [96] * 4
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [8] * 4

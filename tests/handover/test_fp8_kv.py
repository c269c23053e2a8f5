"""FP8 KV crosses as any other, in a quarter of the bytes; another dtype is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.engine_pair import Expected, Pair
from tests.support.prompts import prompt_of

FP8 = {"kv_cache_dtype": "fp8"}


def test_blocks_cross(make_pair: Callable[..., Pair]) -> None:
    plain, pair = make_pair(), make_pair(p=FP8, d=FP8)
    prompt, sent = prompt_of(50), []
    for each in (plain, pair):
        _, at_d = each.hand_over(prompt, max_tokens=12)
        tokens = at_d.result()
        assert each.d.counters()['kvbaton_prompt_tokens_total{source="transferred"}'] == 50
        sent.append(each.p.counters()["kvbaton_transfer_posted_bytes_total"])
        each.settle()
    assert sent[0] == 4 * sent[1]
    assert tokens == pair.p.generate(prompt, max_tokens=12).result()


def test_another_dtype_is_refused_by_name(
    make_pair: Callable[..., Pair], expected: Expected, folder: Path
) -> None:
    pair = make_pair(p=FP8)
    prompt = prompt_of(20)
    at_d = pair.hand_over_to_d(prompt)
    assert at_d.result() == expected(prompt)
    assert pair.d.counters()['kvbaton_prompt_tokens_total{source="computed"}'] == 20
    (worker,) = pair.d.transfers.workers
    told = str(pair.d.transfers.inspect(worker.state)["stories"])
    assert "float8_e4m3fn" in told
    assert "float32" in told

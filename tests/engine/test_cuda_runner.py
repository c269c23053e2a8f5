"""The CUDA runner without a GPU: its bookkeeping, over the kernels' plain torch references."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbaton.connectors.digest import BlockRange
from kvbaton.engine.cache import KVCache
from kvbaton.engine.collectives import Shard
from kvbaton.engine.cuda.graphs import graph_sizes
from kvbaton.engine.cuda.prompt_graphs import (
    LONE,
    MIXED,
    PADDED_TOKENS,
    WHOLE,
    WHOLE_PROMPTS,
    GraphInputs,
    Recorder,
    StepKind,
    padded_forward,
)
from kvbaton.engine.cuda.runner import CudaRunner
from kvbaton.engine.encoder.pool import EncoderPool
from kvbaton.engine.loader import load_model
from kvbaton.engine.model_config import load_model_config
from kvbaton.engine.runner import NO_TOKEN
from kvbaton.engine.step import BlockCopy, StepPlan, StepResult
from kvbaton.kernels.digest import add_sums, block_sums, start_sums
from kvbaton.messages.engine import SamplingParams
from tests.support.families import without_embedding

CPU = torch.device("cpu")
PROMPTS = [np.random.default_rng(n).integers(3, 384, n).tolist() for n in (37, 5, 64, 1, 16)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=64),
    SamplingParams(temperature=1.3, seed=(1 << 64) - 5),
    SamplingParams(temperature=0.7, seed=8, top_k=20, top_p=0.8, repetition_penalty=1.3),
    SamplingParams(temperature=1.7, seed=9, top_p=0.7, top_k=40),
    SamplingParams(temperature=0.7, seed=3, top_p=0.8, repetition_penalty=1.2, logprobs=2),
    SamplingParams(seed=4, allowed_token_ids=tuple(range(40, 52))),
    SamplingParams(temperature=0.0, bad_words_token_ids=tuple((a,) for a in range(3, 384, 2))),
    SamplingParams(temperature=2.0, seed=11, min_p=0.3),
    SamplingParams(temperature=0.0, top_p=0.5, top_k=3, min_p=0.1),
    SamplingParams(temperature=0.0, presence_penalty=0.7, frequency_penalty=0.4),
]


class Enqueued:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class CpuExecutor:
    """Just what a driver needs."""

    def __init__(self, folder: Path) -> None:
        config = load_model_config(folder)
        self.cache = KVCache(
            config.kv_groups(),
            dtype=config.dtype,
            num_blocks=1024,
            block_size=16,
            device=CPU,
            shard=Shard(),
            track_sums=True,
        )
        self.runner = CudaRunner(
            load_model(config, device=CPU),
            self.cache,
            max_model_len=128,
            max_num_seqs=2,
            use_graphs=False,
        )

    def launch(self, plan: StepPlan) -> Enqueued:
        return Enqueued(self.runner.run(plan).result())

    def attach_encoder(self, pool: EncoderPool) -> None:
        self.runner.attach_encoder(pool)

    def close(self) -> None:
        """Nothing to give back."""


RUNNERS = ("cpu", "tp2", "cuda-on-cpu")
"""The plain runner, two ranks, and the CUDA runner over the kernels' references."""


def driver_of(runner: str, folder: Path, pool: EncoderPool, drive: Any) -> Any:
    """A driver of one of `RUNNERS`, with a pool of encoder outputs."""
    made = drive(folder, tensor_parallel_size=2 if runner == "tp2" else 1)
    if runner == "cuda-on-cpu":
        made.executor.close()
        made.executor = CpuExecutor(folder)
    made.executor.attach_encoder(pool)
    return made


def both_runners(folder: Path, drive: Any, **settings: Any) -> tuple[Any, Any]:
    """Drivers of the plain runner and of the CUDA runner, on one model."""
    plain, other = (drive(folder, **settings) for _ in range(2))
    other.executor.close()
    other.executor = CpuExecutor(folder)
    return plain, other


@pytest.fixture
def drivers(checkpoint: Callable[..., Path], drive: Any) -> tuple[Any, Any]:
    """See `both_runners`."""
    return both_runners(checkpoint(), drive)


@pytest.mark.parametrize("chunk", [7, 1000])
@pytest.mark.parametrize(
    ("family", "num_layers"),
    [
        ("deepseek_v3", 4),
        ("gemma3", 7),
        ("gemma4", 7),
        ("gpt_oss", 4),
        ("llama4", 4),
        ("qwen3_next", 4),
    ],
)
def test_groups_of_every_kind(
    family: str, num_layers: int, chunk: int, checkpoint: Callable[..., Path], drive: Any
) -> None:
    folder = checkpoint(family=family, num_layers=num_layers, tied=family == "gemma3")
    plain, other = both_runners(folder, drive, num_blocks=1024)
    assert play(plain, chunk) == play(other, chunk)
    cache, (handle, *_) = other.executor.cache, other.tokens
    length = other.computed[handle]
    for g, table in enumerate([other.tables[handle], *other.others[handle]]):
        first = 0
        if cache.groups[g].state_rows:  # of which the last one is that of the last token
            table, first = table[-1:], length - 1
        kept = cache.fetch_kept_sums(g, table)
        (again,) = cache.fetch_digest([BlockRange(g, table, first, first, length)])
        assert torch.equal(kept, again), f"group {g}"


@pytest.mark.parametrize("chunk", [40, 1000])
def test_contexts_of_latents_are_expanded_some_heads_at_a_time(
    chunk: int, checkpoint: Callable[..., Path], drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which many tokens ask for; two heads of a prompt of 30 tokens, one of a longer one."""
    monkeypatch.setattr("kvbaton.engine.cuda.latent_attention.ABSORBED_TOKENS", 0)
    monkeypatch.setattr("kvbaton.engine.cuda.latent_attention.EXPANDED_ELEMENTS", 2 * 30 * 64)
    folder = checkpoint(family="deepseek_v2")
    plain, other = both_runners(folder, drive, num_blocks=1024)
    assert play(plain, chunk) == play(other, chunk)
    found = []
    for driver in (plain, other):
        handles = [driver.add(prompt) for prompt in PROMPTS[:3]]
        while any(driver.left(handle) > 1 for handle in handles):
            left = [(handle, driver.left(handle)) for handle in handles if driver.left(handle) > 1]
            driver.step(*((handle, min(count, 23), int(count <= 23)) for handle, count in left))
        found.append([driver.generate(handle, 4) for handle in handles])
    assert found[0] == found[1]


def play(driver: Any, chunk: int) -> list[list[int]]:
    """Prompts that start one after the other, in chunks, beside others that decode."""
    live: list[int] = []
    for n, prompt in enumerate(PROMPTS):
        live.append(driver.add(prompt, PARAMS[n % len(PARAMS)]))
        for _ in range(3):
            work = []
            for handle in live:
                count = min(chunk, driver.left(handle))
                work.append((handle, count, int(count == driver.left(handle))))
            driver.step(*sorted(work, key=lambda item: item[1] > 1))
    for _ in range(4):
        driver.step(*((handle, 1, 1) for handle in live if driver.left(handle) == 1))
    return [driver.tokens[handle] for handle in live]


@pytest.mark.parametrize("chunk", [1, 16, 50, 1000])
def test_mixed_steps_give_what_the_plain_runner_gives(chunk: int, drivers: tuple[Any, Any]) -> None:
    plain, other = drivers
    assert play(other, chunk) == play(plain, chunk)


def test_each_kind_of_request_alone(drivers: tuple[Any, Any]) -> None:
    """No other beside it, for which all of a step would take the slower sampler."""
    for params in PARAMS:
        plain, other = ([d.generate(d.add(PROMPTS[0], params), 8)] for d in drivers)
        assert plain == other


def test_logits_that_are_nan_cost_their_sequence_alone(
    checkpoint: Callable[..., Path], drive: Any, tmp_path: Path
) -> None:
    """Whoever reads a broken embedding has no token, beside others that have theirs."""
    folder = without_embedding(checkpoint(tied=False), 2, tmp_path / "broken")
    for whole, broken in zip(
        both_runners(checkpoint(tied=False), drive), both_runners(folder, drive), strict=True
    ):
        for params in PARAMS:
            healthy = whole.generate(whole.add(PROMPTS[0], params), 4)
            good, bad = broken.add(PROMPTS[0], params), broken.add([*PROMPTS[0], 2, 5], params)
            told = broken.step((good, 37, 1), (bad, 39, 1))
            assert (told[good].error, told[bad].error) == (None, NO_TOKEN)
            told = broken.step((good, 1, 1), (bad, 1, 1))  # launched before that was seen
            assert told[bad].error == NO_TOKEN
            broken.generate(good, 2)
            assert broken.tokens[good] == PROMPTS[0] + healthy


def test_penalties_are_part_of_the_step(
    checkpoint: Callable[..., Path], drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt's end, beside others, with drafts that are more rows than sequences, anew."""
    plain, other = both_runners(checkpoint(), drive)
    how = [PARAMS[0], PARAMS[2], PARAMS[-1]]
    texts = []
    for prompt, params in zip(PROMPTS, how, strict=False):
        texts.append(prompt + plain.generate(plain.add(prompt, params), 20))
    monkeypatch.setattr("kvbaton.engine.runner.sample", None)  # is for what this file's step can't
    handles = [other.add(prompt, params) for prompt, params in zip(PROMPTS, how, strict=False)]
    other.step(*((handle, other.left(handle), 1) for handle in handles))
    for turn in range(4):
        drafts = {}
        for handle, text in zip(handles, texts, strict=True):
            known = len(other.tokens[handle])
            drafts[handle] = tuple(text[known : known + turn])
        other.step(*((handle, 1, 1) for handle in handles), drafts=drafts)
    known = other.tokens[handles[1]]
    assert len(known) == len(PROMPTS[1]) + 1 + 1 + 2 + 3 + 4
    again = other.add(known, how[1], num_prompt=len(PROMPTS[1]))  # as after a preemption
    other.generate(again, 5, chunk=7)
    for handle, text in zip([*handles, again], [*texts, texts[1]], strict=True):
        assert other.tokens[handle] == text[: len(other.tokens[handle])]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gpt_oss", "gemma3"])
def test_two_known_tokens_are_computed_like_decoding_ones(
    family: str, checkpoint: Callable[..., Path], drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a target does whose source has sampled two, beside others, at any place in a block."""
    drivers = both_runners(checkpoint(family=family), drive, num_blocks=1024)
    for which, params in enumerate(PARAMS):
        for length in (2, 17, 18, 33):
            found = []
            for driver in drivers:
                beside = driver.add(PROMPTS[0], PARAMS[which - 1])
                driver.step((beside, driver.left(beside), 1))
                handle = driver.add(PROMPTS[2][:length], params)
                if length > 2:
                    driver.step((handle, length - 2, 0))
                if driver is drivers[1]:
                    with monkeypatch.context() as patch:
                        patch.setattr(driver.executor.runner, "_mixed", None)
                        driver.step((beside, 1, 1), (handle, 2, 1))
                else:
                    driver.step((beside, 1, 1), (handle, 2, 1))
                for _ in range(3):
                    driver.step((beside, 1, 1), (handle, 1, 1))
                found.append((driver.tokens[beside], driver.tokens[handle]))
            assert found[0] == found[1]
            cache, runner = drivers[1].executor.cache, drivers[1].executor.runner
            (row,) = [runner.sequences._row[handle]]
            known = drivers[1].tokens[handle]
            assert runner.sequences.tokens[row, : len(known)].tolist() == known
            if all(group.window is None for group in cache.groups):
                table, end = drivers[1].tables[handle], drivers[1].computed[handle]
                (again,) = cache.fetch_digest([BlockRange(0, table, 0, 0, end)])
                assert torch.equal(cache.fetch_kept_sums(0, table), again)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gpt_oss"])
def test_tokens_that_pad_a_step_change_nothing(
    family: str, checkpoint: Callable[..., Path], drive: Any
) -> None:
    folder = checkpoint(family=family)
    plain, other = both_runners(folder, drive, num_blocks=1024)
    runner, padded = other.executor.runner, list[int]()

    def forward(token_ids: Tensor, positions: Tensor, attention: Any, encoded: None) -> Tensor:
        padded.append(len(token_ids))
        return padded_forward(runner.model, token_ids, positions, attention)

    runner.prompt_graphs = forward
    assert play(other, 50) == play(plain, 50)
    assert any(count % PADDED_TOKENS for count in padded)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_what_whole_graphs_read_is_the_step(
    family: str, checkpoint: Callable[..., Path], drive: Any
) -> None:
    """Not replayed, but computed: with padding behind those that decode, and behind all tokens."""
    folder = checkpoint(family=family)
    plain, other = both_runners(folder, drive, num_blocks=1024)
    runner, seen = other.executor.runner, set[StepKind]()
    inputs = GraphInputs(runner.cache, 256, 8, runner.sequences.tables.shape[-1])

    def forward(token_ids: Tensor, positions: Tensor, attention: Any, encoded: None) -> Tensor:
        n, kind = len(token_ids), MIXED if attention.num_decodes else WHOLE
        if not 0 < attention.num_prompts <= WHOLE_PROMPTS:
            return runner.model(token_ids, positions, attention)  # type: ignore[no-any-return]
        if kind == WHOLE and attention.prefill[0].prefix_lens == (0,):
            kind = LONE
        seen.add(kind)
        size = 32 * (n // 32 + 1)
        inputs.fill(token_ids, positions, attention)
        of = inputs.attention(size, kind)
        assert not of.prefill[0].context_lens[attention.num_prompts :].any()
        assert of.decode is None or not of.decode.context_lens[attention.num_decodes :].any()
        hidden: Tensor = runner.model(*inputs.of(size), Recorder(None, of))
        return hidden[:n]

    runner.prompt_graphs = forward
    for _ in range(2):  # the second begins with fewer sequences than the first ended with
        assert play(other, 5) == play(plain, 5)
    assert seen == {LONE, WHOLE, MIXED}


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gpt_oss"])
def test_drafts_are_verified(family: str, checkpoint: Callable[..., Path], drive: Any) -> None:
    """Good ones, bad ones and ones that are good in part, among others and beside prompts."""
    folder = checkpoint(family=family)
    plain, other = both_runners(folder, drive, num_blocks=1024)
    texts, good = [], 0
    for n, prompt in enumerate(PROMPTS):
        handle = plain.add(prompt, PARAMS[n % len(PARAMS)])
        texts.append(prompt + plain.generate(handle, 40))
    live: list[int] = []
    for n, prompt in enumerate(PROMPTS):
        new = other.add(prompt, PARAMS[n % len(PARAMS)])
        for turn in range(3):
            drafts = {}
            for handle in live:
                text, known = texts[handle - 1], len(other.tokens[handle])
                draft = text[known : known + (handle + turn) % 4]
                if draft and turn == 1:
                    draft[len(draft) // 2] ^= 1
                drafts[handle] = tuple(draft)
            before = sum(map(len, other.tokens.values()))
            work = [(handle, 1, 1) for handle in live]
            other.step(*work, *([(new, len(prompt), 1)] if not turn else []), drafts=drafts)
            good += sum(map(len, other.tokens.values())) - before - len(live) - (not turn)
        live.append(new)
    assert good > 10
    for handle, text in zip(live, texts, strict=True):
        assert other.tokens[handle] == text[: len(other.tokens[handle])]
    for handle in live:  # rejected tokens are out of the sums once others stand there
        other.generate(handle, 4)
        whole = other.computed[handle] // 16
        cache = other.executor.cache
        for g, table in enumerate([other.tables[handle], *other.others[handle]]):
            kept = cache.fetch_kept_sums(g, table[:whole])
            (again,) = cache.fetch_digest([BlockRange(g, table[:whole], 0, 0, 16 * whole)])
            assert torch.equal(kept, again)


def test_sums_of_written_copied_and_rewritten_blocks(drivers: tuple[Any, Any]) -> None:
    driver = drivers[1]
    cache = driver.executor.cache
    handle = driver.add(PROMPTS[2])
    driver.generate(handle, 10, chunk=20)
    blocks = driver.tables[handle]

    def check(length: int) -> None:
        ids = torch.tensor(blocks)
        expected = block_sums(cache.data, ids, 0, 0, length)
        assert torch.equal(cache.fetch_kept_sums(0, blocks), expected)

    check(driver.computed[handle])
    cache.copy([blocks[0]], [250])
    assert torch.equal(cache.fetch_kept_sums(0, [250]), cache.fetch_kept_sums(0, blocks[:1]))
    driver.computed[handle] = 60  # the last 14 tokens are computed again, from inside a block on
    driver.executor.runner.sequences.lengths[:] = 61
    driver.tokens[handle] = driver.tokens[handle][:61]
    driver.step((handle, 1, 1))
    assert cache.counted[blocks[3]] == 61 - 48
    ids = torch.tensor(blocks[:4])
    assert torch.equal(cache.fetch_kept_sums(0, blocks[:4]), block_sums(cache.data, ids, 0, 0, 61))


def test_copies_come_before_the_step(drivers: tuple[Any, Any]) -> None:
    plain, other = drivers
    for driver in (plain, other):
        first = driver.add(PROMPTS[0])
        driver.step((first, 37, 1))
        second = driver.add(PROMPTS[0], cached=(), num_prompt=37)
        tables = driver.tables[first]
        tail = driver.free.pop()
        driver._new[second] = (driver._new[second][0], (*tables[:2], tail))
        driver.computed[second] = 36
        driver.step((second, 1, 1), copies=(BlockCopy(0, tables[2], tail),))
        assert driver.tokens[second] == driver.tokens[first][:38]


def test_more_sequences_than_expected(drivers: tuple[Any, Any]) -> None:
    plain, other = drivers
    for driver in (plain, other):
        for n in range(9):
            handle = driver.add(PROMPTS[1][: n % 5 + 1], PARAMS[1])
            driver.generate(handle, 2)
    assert other.tokens == plain.tokens


def test_padding_leaves_sums_alone() -> None:
    sums = torch.ones(3, 2, 2, 1, dtype=torch.int64)
    cache = torch.randn(3, 1, 2, 2, 4, 8)
    slots = torch.tensor([-1, -1])
    start_sums(sums, slots, 4)
    add_sums(sums, cache, slots, torch.tensor([0, 4]))
    assert (sums == 1).all()


def test_graph_sizes_end_with_the_largest_batch() -> None:
    for most in (1, 3, 8, 100, 256):
        sizes = graph_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most

"""Models with states on one node: chunks, snapshots, preemption, and what a wrong border does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbaton.connectors.layout import GroupKind
from kvbaton.engine import state_blocks
from kvbaton.engine.build import enough_tokens
from kvbaton.engine.kv_cache_manager import GroupSpec, KVCacheManager
from kvbaton.engine.model_config import load_model_config
from kvbaton.engine.request import Sequence
from kvbaton.kernels.delta_rule import chunk_delta_rule, delta_rule_step
from tests.engine.test_models import greedy_along
from tests.support.engine_node import Call, Node
from tests.support.making import making
from tests.support.prompts import prompt_of

QWEN3_NEXT: dict[str, Any] = {"family": "qwen3_next", "num_layers": 4, "head_dim": 32}


@pytest.fixture
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(**QWEN3_NEXT)


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Node]]:
    def end(node: Node) -> None:
        node.mailbox.kill()
        node.bury()

    with making(partial(Node, "alone", folder), end) as start:
        yield start


def cached(call: Call) -> int:
    return call.outputs[-1].cached_tokens


# --- the rule ---


@pytest.mark.parametrize("tokens", [1, 5, 64, 150])
def test_chunks_give_what_token_by_token_does(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    query, key = (torch.nn.functional.normalize(draw(3, tokens, 5), dim=-1) for _ in "qk")
    value, decay = draw(3, tokens, 4), -draw(3, tokens).exp() / 10
    beta, state = draw(3, tokens).sigmoid(), draw(3, 5, 4)
    found, after = chunk_delta_rule(query, key, value, decay, beta, state)
    for i in range(tokens):
        q, k, v, g, b = (x[None, :, i] for x in (query, key, value, decay, beta))
        read, one = delta_rule_step(q, k, v, g, b, state[None])
        torch.testing.assert_close(found[:, i], read[0], atol=1e-5, rtol=1e-5)
        state = one[0]
    torch.testing.assert_close(after, state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_logits_are_close_in_other_dtypes(
    dtype: str,
    checkpoint: Callable[..., Path],
    reference: Any,
    drive: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dense = {"mlp_only_layers": [0, 1, 2, 3]}  # experts that rate almost alike change places
    folder = checkpoint(**QWEN3_NEXT, config=dense)
    driver = drive(folder, dtype=dtype, block_size=16)
    seen = driver.record_logits(monkeypatch)
    prompt = list(prompt_of(30))
    driver.generate(driver.add(prompt), 4, chunk=13)
    with torch.inference_mode():
        full = torch.tensor([driver.tokens[1][:-1]])
        expected = reference(folder, dtype)(full).logits[0, len(prompt) - 1 :].float()
    within = {"float16": 0.03, "bfloat16": 0.2}[dtype]
    torch.testing.assert_close(torch.cat(seen), expected, atol=within, rtol=within)


def test_a_state_lies_in_blocks_of_fp8_too(folder: Path, start: Callable[..., Node]) -> None:
    node = start(kv_cache_dtype="fp8", block_size=16)
    prompt = prompt_of(50)
    whole = node.generate(prompt, max_tokens=8).result()
    again = node.generate(prompt, max_tokens=8)
    assert again.result() == whole
    assert cached(again) == 48


# --- prefixes ---


def serve_prefixes(start: Callable[..., Node], folder: Path, reference: Any) -> list[int]:
    """Prompts that share more or less, one after the other; cached tokens of each."""
    node, hits = start(max_num_batched_tokens=14), []
    whole = prompt_of(60)
    for length, own in ((50, 0), (50, 7), (60, 0), (18, 3), (39, 3), (48, 0), (48, 1)):
        prompt = [*whole[:length], *range(20, 20 + own)]
        call = node.generate(prompt)
        got = call.result()
        assert got == greedy_along(reference(folder), prompt, got, 12), (length, own)
        hits.append(cached(call))
    assert not node.leftovers()
    return hits


def test_prefixes_are_reused_where_a_snapshot_was_kept(
    start: Callable[..., Node], folder: Path, reference: Any
) -> None:
    # Steps of 14 tokens, blocks of 4: of 50 tokens snapshots at 12, 28, 40 and 48. The last token
    # is always computed.
    assert serve_prefixes(start, folder, reference) == [0, 48, 48, 12, 28, 40, 48]


def one_border_early(states: Any, places: Any, size: int, starts: Any, *rest: Any) -> Any:
    """Mutant: a step that begins behind a border reads the snapshot before that."""
    batch = state_blocks.step_states(states, places, size, starts, *rest)
    batch.reads[:, np.flatnonzero(starts % size == 0)] = 0
    return batch


def commit_all(self: KVCacheManager, sequence: Sequence) -> list[tuple[int, int, int]]:
    """Mutant: a state that a step went on from inside a block becomes a snapshot of its border."""
    for g, group in enumerate(self.groups):
        first, end = sequence.committed[g], sequence.num_computed // group.block_size
        for i in range(first, end):
            self.pool.commit(sequence.tables[g][i], sequence.chain(group.block_size)[i])
        sequence.committed[g] = max(first, end)
    return []


MUTANTS: dict[str, tuple[str, Any]] = {
    "reads-before-the-border": ("kvbaton.engine.runner.step_states", one_border_early),
    "commits-unfinished-states": (
        "kvbaton.engine.kv_cache_manager.KVCacheManager.commit",
        commit_all,
    ),
    "a-whole-prompt-is-a-prefix": (
        "kvbaton.engine.kv_cache_manager.KVCacheManager.has_states",
        property(lambda self: False, lambda self, value: None),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_state_of_the_wrong_border_is_noticed(
    name: str,
    start: Callable[..., Node],
    folder: Path,
    reference: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, mutant = MUTANTS[name]
    monkeypatch.setattr(target, mutant, raising=False)
    with pytest.raises(AssertionError):
        serve_prefixes(start, folder, reference)


# --- room ---


def test_preempted_sequences_go_on_with_the_right_tokens(
    start: Callable[..., Node], folder: Path, reference: Any
) -> None:
    node = start(num_blocks=44, max_model_len=96)
    prompts = [prompt_of(length) for length in (6, 9, 12)]
    calls = [node.generate(prompt, max_tokens=60) for prompt in prompts]
    for prompt, call in zip(prompts, calls, strict=True):
        got = call.result()
        assert got == greedy_along(reference(folder), list(prompt), got, 60)
    assert node.counters()["kvbaton_preemptions_total"] > 0
    assert not node.leftovers()


def test_a_long_prompt_holds_few_states() -> None:
    group = GroupSpec(16, 100, GroupKind.STATE)
    assert group.most_blocks(10_000, 512) == 3
    assert group.first_needed(64) == 3, "the state after token 63"
    assert group.first_needed(65) == 4


def test_blocks_have_room_for_a_state(checkpoint: Callable[..., Path]) -> None:
    model = load_model_config(checkpoint(**QWEN3_NEXT))
    assert enough_tokens(4, model) == 4
    assert enough_tokens(2, model) == 16
    assert enough_tokens(2, load_model_config(checkpoint(family="qwen3"))) == 2

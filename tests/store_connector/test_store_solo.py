"""One engine and its store: a prompt that was computed once is loaded ever after."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbaton.messages.engine import AddRequest
from tests.support.engine_node import greedy
from tests.support.engine_pair import Expected
from tests.support.held_store import Box
from tests.support.prompts import prompt_of
from tests.support.store_nodes import Nodes, count, rest, save
from tests.support.waiting import until


@pytest.mark.parametrize(
    ("kind", "length"), [*(("filesystem", length) for length in (3, 4, 5, 48, 50)), ("nixl", 50)]
)
def test_a_second_life_loads_what_the_first_saved(
    nodes: Nodes, expected: Expected, tmp_path: Path, kind: str, length: int
) -> None:
    store = f'{kind}:{{"path": "{tmp_path}"}}'
    prompt = prompt_of(length)
    first = nodes.start(store)
    assert first.generate(prompt).result() == expected(prompt)
    rest(first)
    saved = count(first, "store_save_blocks", outcome="stored")
    assert saved == (length + 12 - 1) // 4  # the last token's KV is never computed
    nodes.end(first)
    second = nodes.start(store)
    call = second.generate(prompt)
    assert call.result() == expected(prompt)
    loaded = length // 4
    assert count(second, "store_load_blocks", outcome="ok") == loaded
    usable = min(4 * loaded, length - 1)
    assert count(second, "prompt_tokens", source="store") == usable
    assert count(second, "prompt_tokens", source="computed") == length - usable
    assert call.outputs[-1].cached_tokens == usable
    rest(second)
    # What came from the store is not saved again, nor what is generated, which is there, too.
    assert count(second, "store_save_blocks", outcome="stored") == 0
    assert count(second, "store_save_blocks", outcome="left") == saved - loaded


def test_any_tensor_parallelism_loads_what_another_saved(
    nodes: Nodes, expected: Expected, tmp_path: Path
) -> None:
    store = f'filesystem:{{"path": "{tmp_path}"}}'
    for number, size in enumerate((2, 1, 2)):
        prompt = prompt_of(48, number)
        node = nodes.start(store, tensor_parallel_size=size)
        for known in range(number):
            assert node.generate(prompt_of(48, known)).result() == expected(prompt_of(48, known))
        assert count(node, "prompt_tokens", source="store") == number * 47
        assert count(node, "store_load_blocks", outcome="corrupt") == 0
        assert node.generate(prompt).result() == expected(prompt)
        nodes.end(node)


def test_the_local_cache_is_asked_first_and_the_store_for_the_rest(
    nodes: Nodes, expected: Expected, box: Box
) -> None:
    prompt = prompt_of(60)
    node = nodes.start(box.spec)
    save(node, prompt)
    node.generate(prompt[:24], max_tokens=1).result()
    rest(node)
    asked = box.calls["load"]
    assert node.generate(prompt).result() == expected(prompt)
    assert asked == 6
    assert box.calls["load"] - asked == 15 - 6
    rest(node)


def test_a_reset_of_the_cache_is_local(nodes: Nodes, expected: Expected, box: Box) -> None:
    prompt = prompt_of(40)
    node = nodes.start(box.spec)
    save(node, prompt)
    assert node.generate(prompt).result() == expected(prompt)
    assert count(node, "prompt_tokens", source="store") == 39
    rest(node)


def test_salts_do_not_share(nodes: Nodes, box: Box) -> None:
    node = nodes.start(box.spec)
    for number, salt in enumerate(("", "a", "b", "a")):
        node.ask("reset_prefix_cache")
        request = AddRequest(
            request_id=f"s{number}",
            token_ids=array("I", prompt_of(40)),
            params=greedy({}),
            cache_salt=salt,
        )
        node.add(request).result()
        rest(node)
    assert count(node, "prompt_tokens", source="store") == 39
    assert count(node, "prompt_tokens", source="computed") == 3 * 40 + 1


def test_prompt_logprobs_need_the_prompt_computed(nodes: Nodes, box: Box) -> None:
    node = nodes.start(box.spec)
    for _ in range(2):
        call = node.generate(prompt_of(40), prompt_logprobs=1)
        call.result()
        assert any(output.prompt_logprobs is not None for output in call.outputs)
        rest(node)
    assert count(node, "store_lookups") == 0


def test_what_was_saved_is_not_saved_again(nodes: Nodes, box: Box) -> None:
    node = nodes.start(box.spec)
    for _ in range(2):
        node.ask("reset_prefix_cache")
        node.generate(prompt_of(40), prompt_logprobs=1).result()  # computed, without a lookup
        rest(node)
    assert len(box.objects) == 12
    assert box.calls["store"] == 12


def test_choices_share_what_was_loaded(nodes: Nodes, expected: Expected, box: Box) -> None:
    prompt = prompt_of(40)
    node = nodes.start(box.spec)
    save(node, prompt)
    call = node.generate(prompt, n=3)
    assert call.result() == expected(prompt)
    assert count(node, "prompt_tokens", source="store") == 39
    rest(node)


def test_many_with_one_prefix_load_it_once(nodes: Nodes, expected: Expected, box: Box) -> None:
    prefix = prompt_of(40)
    prompts = [(*prefix, *prompt_of(9, seed)) for seed in range(8)]
    node = nodes.start(box.spec)
    node.generate(prefix).result()
    rest(node)
    node.ask("reset_prefix_cache")
    with box.held("load"):
        calls = [node.generate(prompt) for prompt in prompts]
        until(lambda: box.is_waiting("load"), "a load")
        until(lambda: node.gauges()["kvbaton_sequences_waiting"] == 7, "followers")
    assert [call.result() for call in calls] == [expected(prompt) for prompt in prompts]
    assert box.calls["load"] == 10
    rest(node)


def test_a_small_pool_evicts_and_loads_again(nodes: Nodes, expected: Expected, box: Box) -> None:
    prompts = [prompt_of(60, seed) for seed in range(6)]
    node = nodes.start(box.spec, num_blocks=41, max_model_len=80)
    for _ in range(2):
        calls = [node.generate(prompt) for prompt in prompts]
        assert [call.result() for call in calls] == [expected(prompt) for prompt in prompts]
        rest(node)
    assert count(node, "preemptions") + count(node, "store_load_blocks", outcome="ok") > 0


def test_metrics_tell_what_moved(nodes: Nodes, box: Box) -> None:
    node = nodes.start(box.spec)
    node.generate(prompt_of(40)).result()
    rest(node)
    node.ask("reset_prefix_cache")
    node.generate(prompt_of(40)).result()
    rest(node)
    size = len(next(iter(box.objects.values())))
    assert count(node, "store_lookups", outcome="miss") == 1
    assert count(node, "store_lookups", outcome="hit") == 1
    assert count(node, "store_loads", outcome="ok") == 1
    assert count(node, "store_bytes", direction="load") == 10 * size
    assert count(node, "store_bytes", direction="save") == len(box.objects) * size
    assert count(node, "store_seconds") > 0
    gauges = node.gauges()
    (objects,) = [v for k, v in gauges.items() if k.startswith("kvbaton_store_objects")]
    assert objects == len(box.objects)
    assert math.isclose(sum(v for k, v in gauges.items() if "store_saves_queued" in k), 0)
    assert node.ask("state")["store"]["loads"] == []


@pytest.mark.parametrize("family", ["deepseek_v3", "mistral", "gemma3"])
@pytest.mark.parametrize("length", [48, 50])
def test_of_each_group_what_the_next_token_sees_is_loaded(
    checkpoint: Callable[..., Path], tmp_path: Path, family: str, length: int
) -> None:
    layers = 7 if family == "gemma3" else 2
    folder = checkpoint(family=family, num_layers=layers, config={"sliding_window": 11}, tied=True)
    nodes, store = Nodes(folder), f'filesystem:{{"path": "{tmp_path}"}}'
    prompt = prompt_of(length)
    try:
        first = nodes.start(store, num_blocks=512)
        answer = first.generate(prompt).result()
        rest(first)
        second = nodes.start(store, num_blocks=512)
        assert second.generate(prompt).result() == answer
        assert count(second, "prompt_tokens", source="store") == min(48, length - 1)
        # All of the full layers; of a window what the next token sees, from token 37 or 38 on.
        groups = second.scheduler.blocks.groups
        wanted = sum(12 - 37 // 4 if group.window else 12 for group in groups)
        assert count(second, "store_load_blocks", outcome="ok") == wanted
        rest(second)
    finally:
        nodes.end_all()

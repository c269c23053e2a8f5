"""Rules of KV groups, scales, shards and drafts broken one at a time, in the real code.

Each is told by a check that passes as long as no rule is broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvbaton.connectors.layout import HEAD, GroupKind
from kvbaton.connectors.pairing import GroupPairing
from kvbaton.engine import cache, runner
from kvbaton.engine.attention import PagedAttention
from kvbaton.engine.cache import KVCache
from kvbaton.engine.kv_cache_manager import GroupSpec, KVCacheManager
from kvbaton.engine.models.layers import Heads
from kvbaton.engine.models.moe import Experts
from kvbaton.engine.runner import accepted
from kvbaton.engine.scheduler import Scheduler
from kvbaton.engine.sequences import Sequences
from tests.connectors.test_plan import Model, Side, check_plan
from tests.engine.test_speculative import REPEATED, SPECULATIVE
from tests.support.engine_node import Node
from tests.support.engine_pair import Pair
from tests.support.prompts import prompt_of
from tests.support.toy_engine import CHUNK, FULL, WINDOW, Loop, ask, prompt, target

Models = Callable[..., Path]
GEMMA4: dict[str, Any] = {
    "family": "gemma4",
    "num_layers": 7,
    "num_kv_heads": 4,
    "config": {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "global_head_dim": 24,
    },
}
"""Three layers with a window and 128 elements of K and V a token, one with 48 and none, and three
that read the last ones of either kind."""


class Mutant(NamedTuple):
    """A rule broken: owner, attribute, what stands there instead, and the check that tells."""

    owner: Any
    attribute: str
    instead: Any
    check: Callable[[Models], None]


MUTANTS: dict[str, Mutant] = {}


def breaks(
    owner: Any, attribute: str, check: Callable[[Models], None]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a mutant that has a function in the place of another."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        MUTANTS[function.__name__] = Mutant(owner, attribute, function, check)
        return function

    return add


# --- checks ---


def windows_hold(models: Models) -> None:
    """Long texts, one after the other, cached and handed over, with drafts and without."""
    for drafts in (0, 3):
        for budget in (3, 64):
            loop = Loop((FULL, WINDOW), drafts=drafts, max_num_batched_tokens=budget)
            for name, length in (("a", 14), ("b", 21), ("c", 14)):
                loop.add(ask(name, prompt(length), max_tokens=12, ignore_eos=True))
                loop.run()
                loop.check_stream(name)
            loop.check_empty()


def windows_load(models: Models) -> None:
    """A prompt comes from another node: its window, and no more."""
    loop = Loop((FULL, WINDOW))
    loop.add(ask("a", prompt(30), max_tokens=4, ignore_eos=True, transfer=target(1)))
    loop.step()
    (admitted,) = loop.admitted
    kept = admitted.spans[1][0]
    assert kept.first == (30 - WINDOW.window + 1) // WINDOW.block_size, "what is wanted of it"


def chunks_hold(models: Models) -> None:
    """Long texts through several chunks, cached and handed over."""
    for groups in ((FULL, CHUNK), (FULL, replace(CHUNK, window=7))):
        for budget in (3, 64):
            loop = Loop(groups, drafts=3, max_num_batched_tokens=budget)
            for name, length in (("a", 14), ("b", 21), ("c", 16)):
                loop.add(ask(name, prompt(length), max_tokens=12, ignore_eos=True))
                loop.run()
                loop.check_stream(name)
            loop.check_empty()


def chunks_load(models: Models) -> None:
    """A prompt comes from another node: its last chunk, and of one that is over nothing."""
    for length, wanted in ((30, [6, 7]), (32, [])):
        loop = Loop((FULL, CHUNK))
        loop.add(ask("a", prompt(length), max_tokens=4, ignore_eos=True, transfer=target(1)))
        loop.step()
        (admitted,) = loop.admitted
        spans = admitted.spans[1]
        found = [i for span in spans for i, _ in enumerate(span.blocks, start=span.first)]
        assert found == wanted, "what is wanted of it"


def sharing_holds(models: Models) -> None:
    """Where layers read others' K and V, it does not matter how a prompt is cut."""
    folder, tokens = models(**GEMMA4), prompt_of(30)
    with alone(Node("one", folder, max_num_batched_tokens=64)) as one:
        whole = one.generate(tokens).result()
    with alone(Node("two", folder, max_num_batched_tokens=7)) as two:
        assert two.generate(tokens).result() == whole


def shapes_cross(models: Models) -> None:
    """Groups whose heads differ in number and size, of which some fill no block."""
    last = {"kv_load_failure_policy": "fail", "block_size": 8}
    with ends(Pair(models(**GEMMA4), d=last)) as pair:
        tokens = prompt_of(30)
        _, at_d = pair.hand_over(tokens)
        assert at_d.result() == pair.p.generate(tokens).result()


def scales_cross(models: Models) -> None:
    """Two nodes of a model with scales give one node's tokens."""
    folder = models(num_layers=2)
    scaled = folder.parent / "scaled"
    if not scaled.exists():
        scaled.mkdir()
        for file in folder.iterdir():
            (scaled / file.name).write_bytes(file.read_bytes())
        weights = load_file(scaled / "model.safetensors")
        for layer in range(2):
            for kind, scale in (("k", 0.02), ("v", 8.0)):
                name = f"model.layers.{layer}.self_attn.{kind}_scale"
                weights[name] = torch.tensor(scale)
        save_file(weights, scaled / "model.safetensors")
    fp8 = {"kv_cache_dtype": "fp8"}
    with ends(Pair(scaled, p=fp8, d=fp8)) as pair:
        tokens = prompt_of(30)
        _, at_d = pair.hand_over(tokens)
        assert at_d.result() == pair.p.generate(tokens).result()


def planes_cross(models: Models) -> None:
    """All planes of a block move."""
    model = Model(heads=2, layers=(0, 1), kv=2, dim=4, scales=True)
    side = Side(
        tp=1, stages=1, block_size=4, blocks=(2, 1), num_blocks=4, listed=(True, True),
        order=("block", "head", "layer", "kv", "token", "feature"), padding=0,
    )  # fmt: skip
    check_plan(model, side, side, 0, 7)


def experts_are_in_place(models: Models) -> None:
    """Two ranks, each with half of the experts, give one rank's tokens."""
    folder, tokens = models(family="qwen3_moe"), prompt_of(20)
    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with alone(Node("one", folder)) as one, alone(Node("two", folder, **ranks)) as two:
        assert two.generate(tokens).result() == one.generate(tokens).result()


def drafts_are_verified(models: Models) -> None:
    """With drafts a node gives the tokens of one without."""
    folder = models()
    with alone(Node("one", folder)) as one, alone(Node("two", folder, **SPECULATIVE)) as two:
        for params in ({}, {"temperature": 0.3, "seed": 5}, {"frequency_penalty": 0.1}):
            found = two.generate(REPEATED, max_tokens=60, **params).result(20.0)
            assert found == one.generate(REPEATED, max_tokens=60, **params).result()
        assert two.counters()["kvbaton_spec_decode_num_accepted_tokens_total"] > 0


@contextmanager
def ends(pair: Pair) -> Iterator[Pair]:
    try:
        yield pair
    finally:
        pair.close()


@contextmanager
def alone(node: Node) -> Iterator[Node]:
    try:
        yield node
    finally:
        node.mailbox.kill()
        node.bury()


# --- windows ---

real_trim = KVCacheManager.trim
real_first_needed = GroupSpec.first_needed


@breaks(KVCacheManager, "trim", windows_hold)
def frees_a_block_one_step_early(self: Any, sequence: Any, position: int) -> None:
    real_trim(self, sequence, position + 1)


@breaks(KVCacheManager, "trim", windows_hold)
def keeps_what_the_window_has_passed(self: Any, sequence: Any, position: int) -> None:
    """Nothing is given back."""


@breaks(GroupSpec, "first_needed", windows_load)
def reserves_a_whole_prompt(self: Any, position: int) -> int:
    return 0


@breaks(GroupSpec, "first_needed", windows_load)
def leaves_a_token_of_the_window(self: Any, position: int) -> int:
    if self.kind is GroupKind.FULL:
        return 0
    return int(max(0, position - self.window + 2) + 2) // int(self.block_size)


# --- chunks ---

real_first_attended = GroupKind.first_attended


@breaks(KVCacheManager, "trim", chunks_hold)
def frees_a_chunk_one_step_early(self: Any, sequence: Any, position: int) -> None:
    real_trim(self, sequence, position + 1)


@breaks(GroupKind, "first_attended", chunks_hold)
def frees_the_block_in_which_a_chunk_begins(self: Any, position: int, window: int) -> int:
    first = real_first_attended(self, position, window)
    return first + 3 if self is GroupKind.CHUNK and position % window else first


@breaks(GroupKind, "first_attended", chunks_load)
def takes_a_chunk_for_a_window(self: Any, position: int, window: int) -> int:
    return real_first_attended(GroupKind.WINDOW if window else self, position, window)


# --- layers that share K and V, and groups of other head sizes ---

real_attend = PagedAttention._attend
real_layout_of = cache._layout_of


@breaks(PagedAttention, "_attend", sharing_holds)
def writes_a_shared_layer_twice(self: Any, layer: int, heads: Heads) -> Any:
    if heads.key is None:
        group, _ = self._cache.places[layer]
        key = heads.query[:, : self._cache.token_views[group].shape[0]]
        heads = heads._replace(key=key, value=key)
    return real_attend(self, layer, heads)


@breaks(cache, "_layout_of", shapes_cross)
def plans_with_blocks_of_a_groups_own_size(whole: Any, number: int, group: Any) -> Any:
    layout = real_layout_of(whole, number, group)
    (plane,) = layout.planes
    step = plane.shape[HEAD] * plane.strides[HEAD]
    plane = msgspec.structs.replace(plane, strides=(step, *plane.strides[HEAD:]))
    return msgspec.structs.replace(layout, planes=(plane,))


# --- scales ---

real_scales = KVCache.scales
real_pairing = GroupPairing.__init__


@breaks(KVCache, "scales", scales_cross)
def leaves_scales_behind(self: Any, layer: int) -> tuple[float, float]:
    return real_scales(self, layer) if self.sums is not None else (1.0, 1.0)


@breaks(GroupPairing, "__init__", planes_cross)
def leaves_the_plane_of_scales_behind(self: Any, sources: Any, targets: Any) -> None:
    real_pairing(self, sources, targets)
    self.shares = {pair: shares[:1] for pair, shares in self.shares.items()}


# --- shards ---

real_pieces = Experts.pieces


@breaks(Experts, "pieces", experts_are_in_place)
def swaps_the_shards_of_experts(self: Any) -> Iterator[Any]:
    first = self.first
    self.first = self.moe.num_experts - len(self.down_proj) - first
    pieces = list(real_pieces(self))
    self.first = first
    yield from pieces


# --- drafts ---

real_accept = Scheduler._accept
real_cut = Sequences.cut
real_put_drafts = Sequences.put_drafts


@breaks(runner, "accepted", drafts_are_verified)
def accepts_every_draft(draft: Any, sampled: Any) -> int:
    return len(draft)


@breaks(runner, "accepted", drafts_are_verified)
def accepts_one_token_too_many(draft: Any, sampled: Any) -> int:
    return min(accepted(draft, sampled) + 1, len(draft))


@breaks(Sequences, "put_drafts", drafts_are_verified)
def computes_another_draft(self: Any, steps: Any) -> None:
    """What was sampled for an earlier one lies there."""
    for step in steps:
        if step.draft:
            row = self._row[step.handle]
            self.lengths[row] = step.start + step.count


@breaks(Scheduler, "_accept", windows_hold)
def caches_rejected_tokens(self: Any, scheduled: Any, accepted: int) -> None:
    real_accept(self, scheduled, accepted)
    sequence = scheduled.sequence
    if sequence.handle == scheduled.handle and sequence.finish_reason is None:
        sequence.num_computed = sequence.num_scheduled = len(sequence.tokens)


# --- and they are told ---


@pytest.mark.parametrize("check", dict.fromkeys(mutant.check for mutant in MUTANTS.values()))
def test_a_check_passes_where_no_rule_is_broken(
    check: Callable[[Models], None], checkpoint: Models
) -> None:
    check(checkpoint)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_check_tells(name: str, checkpoint: Models) -> None:
    mutant = MUTANTS[name]
    with (
        mock.patch.object(mutant.owner, mutant.attribute, mutant.instead),
        pytest.raises((AssertionError, LookupError)),
    ):
        mutant.check(checkpoint)

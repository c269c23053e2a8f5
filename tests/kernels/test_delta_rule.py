"""The gated delta rule and its inputs by their kernels, against plain torch in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvbaton.engine.collectives import Shard
from kvbaton.engine.kv_groups import KVGroup
from kvbaton.engine.state_blocks import StateBlocks, step_states
from kvbaton.kernels.delta_rule import LayerStates, PromptRows, delta_rule, delta_rule_reference
from kvbaton.kernels.delta_rule_inputs import delta_rule_inputs, delta_rule_inputs_reference

Shape = tuple[int, int, int, int]
SHAPES: list[Shape] = [(1, 1, 4, 4), (2, 2, 5, 12), (3, 1, 64, 40), (1, 2, 128, 128)]
"""Key heads, value heads of each, keys, values."""
TAPS, BLOCK_SIZE = 4, 100
STEPS: dict[str, list[tuple[int, int]]] = {
    "decodes": [(0, 1), (60, 1), (100, 1), (250, 1)],
    "one": [(0, 150)],
    "prompts": [(10, 64), (0, 3), (35, 67)],
    "both": [(250, 1), (0, 1), (7, 1), (99, 2), (0, 130), (98, 72), (200, 1)],
}
"""Of each sequence, the tokens that a step finds, and how many it computes."""


def batch(place: Any, shape: Shape, step: list[tuple[int, int]]) -> LayerStates:
    """Random states of such a step; borders of blocks within it are kept."""
    key_heads, per_key, keys, values = shape
    starts, counts = np.array(step).T
    kept = -(-(2 * keys + per_key * values) * (TAPS - 1) // values)
    group = KVGroup(
        layers=(0, 1, 2), heads=key_heads, head_dim=values, state_rows=kept + per_key * keys
    )
    numbers = torch.randn(3 * len(step) + 1, 3 * key_heads * group.state_rows * values)
    numbers[0] = 0
    blocks = numbers.to(place.device).view(torch.uint8)
    pool = StateBlocks(blocks, [group], Shard(), track_sums=False)
    tables = 1 + np.random.default_rng(0).permutation(3 * len(step)).reshape(-1, 1, 3)
    places = {layer: (0, layer) for layer in range(3)}
    states = step_states(pool, places, BLOCK_SIZE, starts, counts, tables).of(1)
    if states.prompts is None:  # two go on from one snapshot, and one is padding
        states.reads[3], states.writes[2] = states.reads[2], 0
    return states


def wide(states: LayerStates) -> LayerStates:
    """The same in float64 on the CPU, for a reference."""
    prompts = states.prompts
    if prompts is not None:
        tables = (prompts.bounds, prompts.sequences, prompts.chunks, prompts.pieces)
        prompts = PromptRows(*(x.cpu() for x in tables))
    return LayerStates(
        states.data.cpu().double(),
        states.reads.cpu(),
        states.writes.cpu(),
        states.num_decodes,
        prompts,
    )


def close_states(place: Any, found: LayerStates, wanted: LayerStates, before: torch.Tensor) -> None:
    """Those that are written are as wanted, the others as they were."""
    written = torch.tensor(sorted(set(wanted.writes.tolist())))
    written = written[written != 0]
    place.close(found.data[written], wanted.data[written])
    others = torch.ones(len(before), dtype=torch.bool)
    others[written] = False
    assert torch.equal(found.data[others], before[others]), "only what is told is written"
    assert not torch.equal(wanted.data[written].float(), before[written].cpu())


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_states_move_on_where_they_lie(place: Any, shape: Shape, step: str) -> None:
    states = batch(place, shape, STEPS[step])
    (key_heads, per_key, keys, values), tokens = shape, sum(count for _, count in STEPS[step])
    query, key = (place.randn(tokens, key_heads, keys) for _ in "qk")
    query, key = (torch.nn.functional.normalize(x, dim=-1) for x in (query, key))
    value = place.randn(tokens, key_heads, per_key * values)
    mixed = torch.cat((query, key, value), dim=-1)
    decay = -place.randn(tokens, key_heads * per_key).float().exp() / 10
    beta = place.randn(tokens, key_heads * per_key).float().sigmoid()
    before, exact = states.data.clone(), wide(states)
    numbers: list[Any] = [*(x.cpu().double() for x in (mixed, decay, beta)), exact]
    wanted = delta_rule_reference(*numbers)
    found = delta_rule(mixed, decay, beta, states)
    assert found.dtype == place.dtype
    place.close(found, wanted)
    close_states(place, states, exact, before)


def test_keys_that_are_all_alike(place: Any) -> None:
    """Powers of their system would be enormous; half precision alone leaves 0.02."""
    states = batch(place, (1, 1, 16, 16), [(0, 128)])
    key = torch.nn.functional.normalize(place.randn(16), dim=-1).expand(128, 1, 16)
    mixed = torch.cat((key, key, place.randn(128, 1, 16)), dim=-1)
    decay, beta = torch.zeros(128, 1), torch.ones(128, 1)
    decay, beta = decay.to(place.device), beta.to(place.device)
    numbers: list[Any] = [*(x.cpu().double() for x in (mixed, decay, beta)), wide(states)]
    wanted = delta_rule_reference(*numbers)
    error = (delta_rule(mixed, decay, beta, states).double().cpu() - wanted).norm()
    assert error <= wanted.norm() * (1e-5 if place.dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_inputs_are_mixed_with_those_before(place: Any, shape: Shape, step: str) -> None:
    states = batch(place, shape, STEPS[step])
    (key_heads, per_key, keys, values), tokens = shape, sum(count for _, count in STEPS[step])
    channels = 2 * keys + per_key * values
    projected = place.randn(tokens, key_heads, channels + 3)[..., :channels]
    rates = 4 * place.randn(tokens, key_heads, 2, per_key)
    weight = place.randn(key_heads, channels, TAPS)
    decays = place.randn(2, key_heads * per_key).float()
    inputs = (projected, rates, weight, decays)
    before, exact = states.data.clone(), wide(states)
    numbers: list[Any] = [*(x.cpu().double() for x in inputs), exact]
    wanted = delta_rule_inputs_reference(*numbers)
    found = delta_rule_inputs(*inputs, states)
    for ours, theirs in zip(found, wanted, strict=True):
        place.close(ours, theirs)
    close_states(place, states, exact, before)


def test_small_steps_of_decays_are_exact(place: Any) -> None:
    states = batch(place, (1, 1, 4, 4), [(0, 8)])
    rates = torch.linspace(-30, 30, 8).to(place.device, place.dtype).view(8, 1, 1, 1)
    rates = rates.repeat(1, 1, 2, 1)
    numbers = (place.randn(8, 1, 12), rates, place.randn(1, 12, TAPS))
    decays = torch.zeros(2, 1, device=place.device)
    _, decay, _ = delta_rule_inputs(*numbers, decays, replace(states, data=states.data.clone()))
    wanted = -torch.nn.functional.softplus(rates[:, 0, 1].double(), threshold=50)
    torch.testing.assert_close(decay.double(), wanted, rtol=1e-5, atol=0)

"""The gated delta rule and its inputs by their kernels, against plain torch in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvbaton.kernels.delta_rule import (
    LayerStates,
    PromptRows,
    cut,
    delta_rule,
    delta_rule_reference,
)
from kvbaton.kernels.delta_rule_inputs import delta_rule_inputs, delta_rule_inputs_reference

Shape = tuple[int, int, int, int]
SHAPES: list[Shape] = [(1, 1, 4, 4), (2, 2, 5, 12), (3, 1, 64, 40), (1, 2, 128, 128)]
"""Key heads, value heads of each, keys, values."""
TAPS = 4
STEPS: dict[str, tuple[int, list[list[int]]]] = {
    "decodes": (4, []),
    "one": (0, [[150]]),
    "prompts": (0, [[64], [3], [65, 2]]),
    "both": (3, [[1, 1], [130], [2, 70]]),
}
"""Tokens that decode, and of each prompt its stretches."""


def batch(place: Any, shape: Shape, decodes: int, prompts: list[list[int]]) -> LayerStates:
    """Random states; one that decodes and the first prompt go on in place."""
    key_heads, per_key, keys, values = shape
    kept = -(-(2 * keys + per_key * values) * (TAPS - 1) // values)
    lengths = [1] * decodes + [length for prompt in prompts for length in prompt]
    rows = len(lengths)
    # Part of a larger tensor, as a layer's states are of a block.
    pool = torch.randn(2 * rows + 2, key_heads, 3, kept + per_key * keys, values)
    pool[0] = 0
    order = torch.randperm(2 * rows + 1) + 1
    reads, writes = order[:rows].clone(), order[rows : 2 * rows].clone()
    for row in (decodes // 2, min(decodes, rows - 1)):
        writes[row] = reads[row]
    if decodes > 2:  # one goes on from nothing, and one is padding
        reads[0], writes[decodes - 1] = 0, 0
    tables = None
    if prompts:
        ends = np.cumsum([decodes, *map(len, prompts)])
        bounds = np.cumsum([0, *lengths])
        reads[ends[0] + 1 :] = torch.where(
            torch.isin(torch.arange(ends[0] + 1, rows), torch.from_numpy(ends)),
            reads[ends[0] + 1 :], writes[ends[0] : -1],
        )  # fmt: skip
        arrays = (bounds, ends, cut(bounds[decodes:]), cut(bounds[ends]))
        tables = PromptRows(*(torch.from_numpy(x).to(place.device) for x in arrays))
    data = pool.to(place.device)[:, :, 1]
    return LayerStates(data, reads.to(place.device), writes.to(place.device), decodes, tables)


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
    decodes, prompts = STEPS[step]
    states = batch(place, shape, decodes, prompts)
    (key_heads, per_key, keys, values), tokens = shape, decodes + sum(map(sum, prompts))
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
    states = batch(place, (1, 1, 16, 16), 0, [[128]])
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
    decodes, prompts = STEPS[step]
    states = batch(place, shape, decodes, prompts)
    (key_heads, per_key, keys, values), tokens = shape, decodes + sum(map(sum, prompts))
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
    states = batch(place, (1, 1, 4, 4), 0, [[8]])
    rates = torch.linspace(-30, 30, 8).to(place.device, place.dtype).view(8, 1, 1, 1)
    rates = rates.repeat(1, 1, 2, 1)
    numbers = (place.randn(8, 1, 12), rates, place.randn(1, 12, TAPS))
    decays = torch.zeros(2, 1, device=place.device)
    _, decay, _ = delta_rule_inputs(*numbers, decays, replace(states, data=states.data.clone()))
    wanted = -torch.nn.functional.softplus(rates[:, 0, 1].double(), threshold=50)
    torch.testing.assert_close(decay.double(), wanted, rtol=1e-5, atol=0)

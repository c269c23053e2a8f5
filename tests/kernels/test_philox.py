"""The noise: known answers of the paper's authors, and the shape of the distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbaton.kernels.sample_tokens import MASK, gumbel_noise, philox4x32

KNOWN = [  # Random123's kat_vectors, philox4x32 10: counter, key, output
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([MASK] * 4, [MASK] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def words(values: list[int]) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


def by_hand(counter: list[int], key: list[int]) -> list[int]:
    """The same in Python's unbounded integers."""
    for _ in range(10):
        p0, p1 = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (p1 >> 32) ^ counter[1] ^ key[0],
            p1 & MASK,
            (p0 >> 32) ^ counter[3] ^ key[1],
            p0 & MASK,
        ]
        key = [(key[0] + 0x9E3779B9) & MASK, (key[1] + 0xBB67AE85) & MASK]
    return counter


def noise(
    seed: int = 0, position: int = 0, choice: int = 0, vocab: int = 64, purpose: int = 0
) -> Tensor:
    seeds, positions, choices = (torch.tensor([x]) for x in (seed, position, choice))
    return gumbel_noise(seeds, positions, choices, vocab, purpose)[0]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    found = philox4x32(words(counter), words(key))  # type: ignore[arg-type]
    assert [int(word) for word in found] == expected
    assert by_hand(counter, key) == expected


def test_every_vocabulary_id_has_its_own_word() -> None:
    seed, position, choice = 0x123456789ABCDEF0, 77, 3
    found = noise(seed, position, choice, vocab=11)
    for token in range(11):
        counter = [token // 4, position, 0, choice]
        word = by_hand(counter, [seed & MASK, seed >> 32])[token % 4]
        assert found[token] == np.float32(-math.log(-math.log((word + 0.5) / 2**32)))


def test_a_row_does_not_depend_on_its_batch() -> None:
    seeds, positions = torch.tensor([5, -7, 5]), torch.tensor([1, 2, 3])
    choices = torch.tensor([0, 1, 0])
    together = gumbel_noise(seeds, positions, choices, 50, 0)
    for row in range(3):
        alone = noise(int(seeds[row]), int(positions[row]), int(choices[row]), 50)
        assert torch.equal(together[row], alone)


@pytest.mark.parametrize(
    "other", [{"seed": 1}, {"seed": 1 << 40}, {"position": 1}, {"choice": 1}, {"purpose": 1}]
)
def test_every_argument_changes_the_noise(other: dict[str, int]) -> None:
    assert (noise() != noise(**other)).all()


def test_noise_is_gumbel_and_finite() -> None:
    found = noise(vocab=1 << 18).double()
    assert found.isfinite().all()
    euler = 0.5772156649
    assert abs(float(found.mean()) - euler) < 0.01
    assert abs(float(found.var()) - math.pi**2 / 6) < 0.03
    uniform = torch.exp(-torch.exp(-found))
    counts = torch.histc(uniform, 64, 0, 1)
    expected = found.numel() / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 63 + 5 * math.sqrt(2 * 63)


@pytest.mark.parametrize("word", [0, MASK])
def test_the_ends_of_the_uniform_are_finite(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def constant(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.full((1, len(counter[0])), word) for _ in range(4))

    monkeypatch.setattr("kvbaton.kernels.sample_tokens.philox4x32", constant)
    assert noise().isfinite().all()

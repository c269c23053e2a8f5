from typing import Any

import pytest
import torch

from kvbaton.engine.attention import rotate
from kvbaton.engine.models.layers import RotaryEmbedding
from kvbaton.engine.rope_config import RopeConfig
from kvbaton.kernels.rope_write import HeadNorms, rope_write, rope_write_reference


def table(rotary_dim: int, length: int = 64) -> torch.Tensor:
    inverse = 1e4 ** -(torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    angle = torch.arange(length)[:, None] * inverse
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


def run(
    place: Any,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int = 16,
    base: int = 0,
    norm_offset: float | None = None,
) -> None:
    width = (heads + 2 * kv_heads) * head_dim
    fused = place.randn(tokens, width)
    wide = fused.cpu().double()
    blocks = tokens // block_size + 3
    slots = torch.randperm(blocks * block_size)[:tokens]
    slots[::7] = -1
    positions = torch.randint(0, 64, (tokens,))
    cos_sin = table(rotary_dim) if rotary_dim else None
    shape = (blocks, kv_heads, 3, 2, block_size, head_dim)
    cache = torch.full(shape, torch.nan, device=place.device, dtype=place.dtype)
    expected = torch.full(shape, torch.nan, dtype=torch.float64)

    def split(x: torch.Tensor) -> Any:
        return torch.split(
            x.view(tokens, heads + 2 * kv_heads, head_dim), [heads, kv_heads, kv_heads], dim=1
        )

    norms = None
    if norm_offset is not None:
        weights = place.randn(2, head_dim)
        norms = HeadNorms(weights[0], weights[1], 1e-6, norm_offset)
    query, key, value = split(fused)
    rope_write(
        query, key, value, positions.to(place.device),
        cos_sin.float().to(place.device) if cos_sin is not None else None,
        cache[:, :, 1, 0], cache[:, :, 1, 1], slots.to(place.device), norms=norms,
    )  # fmt: skip
    query, key, value = split(wide)
    if norms is not None:
        for x, weight in ((query, norms.query), (key, norms.key)):
            factor = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            x *= factor * (weight.cpu().double() + norms.offset)
    rope_write_reference(
        query, key, value, positions, cos_sin, expected[:, :, 1, 0], expected[:, :, 1, 1], slots
    )
    place.close(fused, wide)
    written = ~expected.isnan()
    assert torch.equal(~cache.isnan().cpu(), written)
    place.close(cache.cpu()[written], expected[written])


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim", "rotary_dim"),
    [
        (1, 4, 2, 64, 64),
        (37, 7, 1, 80, 80),
        (20, 4, 4, 96, 32),
        (9, 6, 2, 128, 128),
        (5, 2, 1, 16, 0),
    ],
)
def test_matches_fp64(
    place: Any, tokens: int, heads: int, kv_heads: int, head_dim: int, rotary_dim: int
) -> None:
    run(place, tokens, heads, kv_heads, head_dim, rotary_dim)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(
    ("tokens", "head_dim", "rotary_dim"), [(5, 64, 64), (30, 80, 80), (1025, 16, 16), (3, 64, 32)]
)
def test_norms_come_first(
    place: Any, tokens: int, head_dim: int, rotary_dim: int, offset: float
) -> None:
    if tokens > 1024 and place.device.type == "cpu":
        pytest.skip("takes minutes there")
    run(place, tokens, 6, 2, head_dim, rotary_dim, norm_offset=offset)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "rope", "rank"), [(16, 64, 512), (5, 16, 48)])
def test_rows_of_latent_and_key(
    place: Any, heads: int, rope: int, rank: int, interleaved: bool
) -> None:
    tokens, size = 19, 16
    query = place.randn(tokens, heads, rope + 32)
    fused = place.randn(tokens, rank + rope)
    slots, positions = torch.randperm(3 * size)[:tokens], torch.randint(0, 64, (tokens,))
    slots[::7] = -1
    cache = torch.full((3, 2, size, rank + rope), torch.nan, device=place.device, dtype=place.dtype)
    wide = [x.cpu().double() for x in (query, fused, cache)]
    angles = table(rope)
    both: list[Any] = [
        (rope_write, query, fused, cache, angles.float()),
        (rope_write_reference, *wide, angles),
    ]
    for run, q, x, rows, cos_sin in both:
        row = rows[:, 1][:, None]
        run(
            q[..., 32:], x[:, None, rank:], x[:, None, :rank], positions.to(q.device),
            cos_sin.to(q.device), row[..., rank:], row[..., :rank], slots.to(q.device),
            interleaved=interleaved,
        )  # fmt: skip
    place.close(query, wide[0])
    written = ~wide[2].isnan()
    assert torch.equal(~cache.isnan().cpu(), written)
    assert written.sum() == (slots >= 0).sum() * (rank + rope)
    place.close(cache.cpu()[written], wide[2][written])


def test_many_tokens_take_several_per_program(place: Any) -> None:
    run(place, 1027, 2, 1, 16, 16)


@pytest.mark.parametrize("interleaved", [False, True])
def test_tokens_with_three_rotary_positions(place: Any, interleaved: bool) -> None:
    rope = RopeConfig(mrope_section=(2, 3, 3), mrope_interleaved=interleaved)
    positions = torch.randint(0, 64, (3, 21))
    rotary = RotaryEmbedding(rope, 16)(positions, torch.float32)
    table = torch.cat([x[:, 0, :8] for x in rotary], dim=-1).to(place.device)
    query, key, value = (place.randn(21, heads, 16) for heads in (4, 2, 2))
    expected = [rotate(x.cpu().float(), rotary) for x in (query, key)]
    cache = torch.zeros(2, 2, 2, 16, 16, device=place.device, dtype=place.dtype)
    rows = torch.arange(21, device=place.device)
    rope_write(query, key, value, rows, table, cache[:, :, 0], cache[:, :, 1], rows)
    place.close(query, expected[0])
    place.close(cache[:, :, 0].transpose(1, 2).flatten(0, 1)[:21], expected[1])


def test_nothing_to_do(place: Any) -> None:
    run(place, 0, 2, 1, 16, 16)


@pytest.mark.gpu
def test_pool_past_31_bits(place: Any) -> None:
    if place.device.type != "cuda" or place.dtype != torch.bfloat16:
        pytest.skip("needs a GPU")
    cache = torch.zeros(2300, 8, 32, 2, 16, 128, device="cuda", dtype=torch.bfloat16)
    key, value = place.randn(1, 8, 128), place.randn(1, 8, 128)
    slot = torch.tensor([2299 * 16 + 5], device="cuda")
    rope_write(
        place.randn(1, 32, 128),
        key,
        value,
        slot,
        None,
        cache[:, :, 31, 0],
        cache[:, :, 31, 1],
        slot,
    )
    assert torch.equal(cache[2299, :, 31, 0, 5], key[0])
    assert torch.equal(cache[2299, :, 31, 1, 5], value[0])
    assert int(cache.count_nonzero()) == int(key.count_nonzero() + value.count_nonzero())


def test_an_fp8_cache_saturates(place: Any) -> None:
    """Numbers that e4m3 has: Triton's interpreter loses carries when it rounds."""
    x = torch.tensor([1.0, -0.875, 448.0, 1e4, -3e3, 0.0, 2**-9, 26.0]).repeat(2).view(1, 1, 16)
    x = x.to(place.device, place.dtype)
    cache = torch.zeros(2, 1, 4, 16, device=place.device, dtype=torch.float8_e4m3fn)
    at = torch.tensor([6], device=place.device)
    rope_write(x, x, -x, at, None, cache, values := cache.clone(), at)
    written = x[0, 0].float().clamp(-448, 448)
    assert torch.equal(cache[1, 0, 2].float(), written)
    assert torch.equal(values[1, 0, 2].float(), -written)
    assert (cache[0].float() == 0).all()

"""Digest sums: the formula, in plain Python; the reference; the kernels; what changes a sum."""

from __future__ import annotations

import gc
import mmap
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbaton.kernels.digest import TableSums, block_sums, empty_sums, range_table, token_sums
from tests.support.digests import block_sums_reference

MASK = (1 << 64) - 1
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8]


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def row_sum(row: Tensor, position: int, kv: int) -> int:
    """The formula of the module, word by word."""
    data = row.contiguous().view(torch.uint8).numpy().tobytes()
    size = next(size for size in (4, 2, 1) if len(data) % size == 0)
    total = 0
    for j in range(len(data) // size):
        word = int.from_bytes(data[j * size : (j + 1) * size], "little")
        total += (word + 1) * (mix(~((kv << 32) + j) & MASK) | 1) * (mix(position) | 1)
    return total & MASK


def plane_sums(x: Tensor, positions: Tensor, kv: int) -> Tensor:
    """Sums [T, H] of rows [T, H, D] that are K, or with `kv` 1 V."""
    planes = x[:, :, None, None].expand(-1, -1, 1, kv + 1, -1)
    return token_sums(planes, positions)[:, 0, kv]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    if not dtype.is_floating_point:
        return torch.randint(-100, 100, shape, dtype=dtype)
    return torch.randn(shape).to(dtype)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def unsigned(sums: Tensor) -> list[int]:
    return [value & MASK for value in sums.flatten().tolist()]


def test_golden_values() -> None:
    """Neighbouring releases compare these."""
    x = torch.arange(24, dtype=torch.int8).view(2, 1, 12)
    sums = plane_sums(x, torch.tensor([5, 1 << 40]), 1)
    assert unsigned(sums) == [8448360214844922369, 1004017536942914847]
    negative = -torch.arange(1, 9, dtype=torch.float32).view(1, 1, 8)
    assert unsigned(plane_sums(negative, torch.tensor([5]), 0)) == [10128262042100877814]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 12, 6, 5, 1])
def test_reference_is_the_formula(dtype: torch.dtype, head_dim: int) -> None:
    x = random(3, 2, head_dim, dtype=dtype)
    positions = torch.tensor([0, 7, 1 << 33])
    for kv in range(2):
        expected = [row_sum(x[t, h], int(positions[t]), kv) for t in range(3) for h in range(2)]
        assert unsigned(plane_sums(x, positions, kv)) == expected


def test_reference_reads_any_strides() -> None:
    x = random(6, 4, 16)
    positions = torch.arange(6)
    expected = plane_sums(x, positions, 0)
    for view in (
        x.transpose(0, 2).contiguous().transpose(0, 2),
        torch.stack([x, x], 2)[:, :, 1],
        torch.cat([x, x], 2)[:, :, 16:],
        torch.cat([x[..., :1], x], 2)[:, :, 1:],
    ):
        assert torch.equal(view, x)
        assert torch.equal(plane_sums(view, positions, 0), expected)


def paged(x: Tensor, block_size: int, first: int) -> tuple[Tensor, Tensor]:
    """Scatter tokens x[T, H, L, KV, D] into blocks, the first in slot `first`; the rest is NaN."""
    count = -(-(first + len(x)) // block_size)
    heads, layers, kv, dim = x.shape[1:]
    flat = torch.full((count * block_size, heads, layers, kv, dim), torch.nan)
    flat[first : first + len(x)] = x
    blocks = torch.randperm(count + 3)[:count]
    cache = torch.full((count + 3, heads, layers, kv, block_size, dim), torch.nan)
    cache[blocks] = flat.view(count, block_size, heads, layers, kv, dim).permute(0, 2, 3, 4, 1, 5)
    return cache, blocks


@pytest.mark.parametrize("block_size", [1, 3, 8, 16])
@pytest.mark.parametrize(("start", "count"), [(0, 20), (37, 29), (5, 1)])
def test_block_sums_add_token_sums(block_size: int, start: int, count: int) -> None:
    x = random(count, 2, 3, 2, 8)
    cache, blocks = paged(x, block_size, start % block_size)
    positions = start + torch.arange(count)
    base = start - start % block_size
    sums = block_sums_reference(cache, blocks, base, start, start + count)
    assert sums.shape == (len(blocks), 3, 2, 2)
    expected = torch.zeros_like(sums)
    expected.index_add_(0, (positions - base) // block_size, token_sums(x, positions))
    assert torch.equal(sums, expected)


def test_block_sums_of_any_order_of_memory() -> None:
    cache, blocks = random(5, 2, 3, 2, 8, 4, dtype=torch.bfloat16), torch.tensor([3, 0])
    odd = cache.permute(0, 1, 3, 4, 5, 2).contiguous().permute(0, 1, 5, 2, 3, 4)
    expected = block_sums_reference(cache, blocks, 16, 16, 30)
    assert torch.equal(block_sums_reference(odd, blocks, 16, 16, 30), expected)


def test_block_sums_where_an_axis_of_length_1_has_a_stride_that_no_word_fits_into() -> None:
    cache, blocks = random(5, 2, 1, 2, 8, 4, dtype=torch.bfloat16), torch.tensor([3, 0])
    odd = cache.as_strided(cache.shape, (*cache.stride()[:2], 1, *cache.stride()[3:]))
    expected = block_sums_reference(cache, blocks, 16, 16, 30)
    assert torch.equal(block_sums_reference(odd, blocks, 16, 16, 30), expected)


def test_block_sums_of_parts_add_up() -> None:
    cache = random(5, 2, 1, 2, 8, 4)
    blocks = torch.tensor([3, 1, 4])
    whole = block_sums_reference(cache, blocks, 16, 16, 40)
    parts = [
        block_sums_reference(cache, blocks, 16, a, b) for a, b in [(16, 21), (21, 34), (34, 99)]
    ]
    assert torch.equal(torch.stack(parts).sum(0), whole)
    assert not block_sums_reference(cache, blocks, 16, 40, 90).any()


def test_sums_leave_no_tensor_behind() -> None:
    cache, blocks = random(5, 2, 1, 2, 8, 4), torch.tensor([3, 1])
    block_sums_reference(cache, blocks, 0, 0, 16)  # constants are made once
    before = sum(isinstance(one, Tensor) for one in gc.get_objects())
    for start in range(8):
        block_sums_reference(cache, blocks, 16, start, 16)
    assert sum(isinstance(one, Tensor) for one in gc.get_objects()) == before


def test_every_bit_counts() -> None:
    x = random(2, 1, 4, dtype=torch.bfloat16)
    positions = torch.tensor([3, 4])
    seen = {tuple(unsigned(plane_sums(x, positions, 0)))}
    for bit in range(128):
        changed = x.clone()
        changed.view(torch.uint8).view(-1)[bit // 8] ^= 1 << bit % 8
        seen.add(tuple(unsigned(plane_sums(changed, positions, 0))))
    assert len(seen) == 129


def test_place_counts() -> None:
    """Other position, K for V, swapped tokens, shifted words, missing token: all differ."""
    x = random(2, 1, 16)
    x[1] = x[0]
    here = torch.tensor([3, 4])

    def total(x: Tensor, positions: Tensor, kv: int = 0) -> int:
        return int(plane_sums(x, positions, kv).sum())

    other = x.clone()
    other[1] += 1
    sums = [
        total(x, here),
        total(x, here + 1),
        total(x, here, 1),
        total(other, here),
        total(other.flip(0), here),
        total(other.roll(2, -1), here),
        total(other[:1], here[:1]),
        total(torch.zeros_like(x), here),
        total(torch.zeros_like(x[:1]), here[:1]),
    ]
    assert len(set(sums)) == len(sums)


# --- the kernels ---


@pytest.mark.parametrize("block_size", [1, 5, 16, 24])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (2, 3, 0, 4, 1, 5)])
def test_block_kernel(place: Any, block_size: int, order: tuple[int, ...]) -> None:
    cache = place.randn(7, 2, 3, 2, block_size, 12).permute(order).contiguous()
    cache = cache.permute([order.index(axis) for axis in range(6)])
    blocks = torch.tensor([4, 2, 6])
    base = block_size << 33
    start, end = base + block_size // 2, base + 3 * block_size - block_size // 3
    sums = block_sums(cache, blocks.to(place.device, torch.int32), base, start, end)
    expected = block_sums_reference(cache.cpu(), blocks, base, start, end)
    assert torch.equal(sums.cpu(), expected)


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_table_sums_of_apart_blocks_and_which_of_them_are_kept(place: Any, heads: int) -> None:
    cache = place.randn(9, heads, 5, 2, 4, 6)
    kept = torch.full((9, 5, 2, heads), 7, dtype=torch.int64, device=place.device)
    lines = [[4, 8, 8, 12, 4], [2, 40, 41, 43, -1], [6, 0, 0, 3, 1]]  # block ... kept with
    table = torch.tensor([[*line, 0, 0, 0] for line in lines], device=place.device)
    sum_blocks = TableSums(cache, kept)
    first = sum_blocks(table, empty_sums(cache, 3, place.device)).cpu()
    for (block, position, start, end, at), sums in zip(lines, first, strict=True):
        ids = torch.tensor([block])
        assert torch.equal(sums, block_sums_reference(cache.cpu(), ids, position, start, end)[0])
        assert at < 0 or torch.equal(kept[at].cpu(), sums)
    assert (kept[[0, 2, 3, 5, 6, 7, 8]] == 7).all()
    assert torch.equal(sum_blocks(table, empty_sums(cache, 3, place.device)).cpu(), first)


@pytest.mark.gpu
def test_table_sums_by_memory_of_the_host_and_on_another_stream() -> None:
    device = torch.device("cuda:0")
    cache = torch.randn(40, 8, 32, 2, 16, 128, device=device).bfloat16()
    kept = torch.zeros((40, 32, 2, 8), dtype=torch.int64, device=device)
    sum_blocks, stream = TableSums(cache, kept), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for blocks in ([3, 1, 39], [7, 5], [2]):  # the second launch reuses the first one's kernel
        table = range_table(torch.tensor(blocks), 16, 16, 16 * len(blocks) + 9, 16)
        table[:, 4] = table[:, 0]
        sums = sum_blocks(
            table.pin_memory(), empty_sums(cache, len(blocks), torch.device("cpu")), stream
        )
        stream.synchronize()
        ids = torch.tensor(blocks)
        assert torch.equal(
            sums, block_sums_reference(cache.cpu(), ids, 16, 16, 16 * len(blocks) + 9)
        )
        assert torch.equal(kept[blocks].cpu(), sums)


def test_block_kernel_names_strides_it_cannot_read(place: Any) -> None:
    cache = place.randn(2, 1, 1, 2, 4, 8).transpose(4, 5)
    with pytest.raises(ValueError, match="strides"):
        block_sums(cache, torch.tensor([1], device=place.device), 0, 0, 4)


def big_pool(device: torch.device, blocks: int, shape: tuple[int, ...]) -> Tensor:
    """Zeros; on the CPU only touched pages take memory."""
    size = blocks * torch.Size(shape).numel()
    if device.type == "cuda":
        return torch.zeros(blocks, *shape, dtype=torch.int8, device=device)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.int8).view(blocks, *shape)


def test_block_kernel_past_32_bits(place: Any) -> None:
    """Rows of an odd number of bytes have words of one byte: the offsets pass 2**31 words."""
    shape = (1, 1, 2, 32, 65)
    blocks = (1 << 31) // torch.Size(shape).numel() + 8
    cache = big_pool(place.device, blocks, shape)
    cache[blocks - 2] = torch.randint(-100, 100, shape, dtype=torch.int8)
    ids = torch.tensor([1, blocks - 2], dtype=torch.int32)
    expected = block_sums_reference(cache[ids.long()].cpu(), torch.tensor([0, 1]), 0, 0, 64)
    assert torch.equal(block_sums(cache, ids.to(place.device), 0, 0, 64).cpu(), expected)

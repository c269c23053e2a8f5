"""Small arrays on their way to a GPU, which is behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvbaton.engine import upload as module
from kvbaton.engine.loader import STAGED_BYTES, STAGED_FROM, Uploader
from kvbaton.engine.upload import SEGMENT_WORDS, SEGMENTS, PinnedRing, upload, upload_into

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


def be_behind() -> None:
    """Give the GPU other things to do for tens of milliseconds."""
    torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]


@pytest.fixture(params=["read in place", "copied"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    module._rings.__dict__.clear()
    if request.param == "copied":

        def none(_: torch.cuda.Stream) -> PinnedRing:
            raise RuntimeError("there is none")

        monkeypatch.setattr(module, "PinnedRing", none)
    return torch.device("cuda", 0)


def test_what_was_sent_arrives_however_far_the_gpu_is_behind(device: torch.device) -> None:
    rng = np.random.default_rng(1)
    sent: list[np.ndarray[Any, Any]] = []
    there: list[torch.Tensor] = []
    be_behind()
    for size in [0, 1, SEGMENT_WORDS, SEGMENT_WORDS + 1, *rng.integers(1, 24_000, 200).tolist()]:
        arrays = [rng.integers(-(1 << 62), 1 << 62, part) for part in (size // 3, size - size // 3)]
        sent += arrays
        there += upload(arrays, device)
    assert sum(array.size for array in sent) > 8 * SEGMENTS * SEGMENT_WORDS
    for array, tensor in zip(sent, there, strict=True):
        assert np.array_equal(tensor.cpu().numpy(), array)


def test_streams_have_memory_of_their_own(device: torch.device) -> None:
    other = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    target = torch.zeros((6, 40), dtype=torch.int64, device=device)
    torch.cuda.synchronize()
    be_behind()
    first = np.arange(240).reshape(6, 40)
    upload_into(first, target)
    with torch.cuda.stream(other):
        arrays = [np.full(100, n) for n in range(4 * SEGMENTS * SEGMENT_WORDS // 100)]
        there = [upload([array], device)[0] for array in arrays]
    for array, tensor in zip(arrays, there, strict=True):
        assert np.array_equal(tensor.cpu().numpy(), array)
    assert np.array_equal(target.cpu().numpy(), first)


@pytest.mark.alone
def test_the_copy_engine_is_not_asked(device: torch.device) -> None:
    """Behind a gigabyte on its way, what is read in place is there at once."""
    upload([np.arange(10)], device)
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    other = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        there.copy_(host, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
    (sent,) = upload([np.arange(10)], device)
    torch.cuda.current_stream(device).synchronize()
    in_place = any(module._rings.__dict__.values())
    assert not (in_place and copied.query())  # type: ignore[no-untyped-call]
    assert sent.tolist() == list(range(10))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32], ids=str)
def test_weights_arrive_whole(dtype: torch.dtype) -> None:
    """Whatever their size, and though what they came from is gone when the GPU comes to them."""
    upload, rng = Uploader(torch.device("cuda", 0)), np.random.default_rng(2)
    sent, there = [], []
    be_behind()
    for size in (
        0,
        12,
        STAGED_FROM,
        STAGED_BYTES,
        STAGED_BYTES + 4,
        9 * STAGED_BYTES // 2,
        3 * STAGED_BYTES,
    ):
        weights = torch.empty(4, size // 4 // dtype.itemsize, dtype=dtype)
        words = weights.view(torch.uint8)
        words.numpy()[:] = rng.integers(0, 256, words.shape, np.uint8)
        sent.append(words.clone())
        there.append(upload(weights))
        words.zero_()
    for expected, found in zip(sent, there, strict=True):
        assert found.dtype is dtype
        assert torch.equal(found.cpu().view(torch.uint8), expected)

"""Images of noise, their items, and requests to encode them."""

from __future__ import annotations

import hashlib
from array import array
from pathlib import Path

import torch
from torch import Tensor

from kvbaton.engine.encoder.images import ImageReader
from kvbaton.engine.encoder.worker import EncoderWorker, pixel_values
from kvbaton.engine.executor import Executor
from kvbaton.engine.loader import load_vision
from kvbaton.engine.model_config import load_model_config
from kvbaton.messages.engine import AddRequest, Item, SamplingParams, TransferSpec
from kvbaton.types import ENCODER_BLOCK_ROWS

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, seed=0)


def item_of(folder: Path, data: bytes, *, merge_size: int = 2) -> Item:
    """The item of an image for a folder's model."""
    frames, rows, columns = ImageReader(folder).read(data).grid
    return Item(
        start=0,
        length=frames * rows * columns // merge_size**2,
        digest=hashlib.blake2b(data, digest_size=32).digest(),
        grid=(frames, rows, columns),
        data=data,
    )


def padded(item: Item) -> int:
    """Number of tokens of an item's prompt."""
    return -(-item.length // ENCODER_BLOCK_ROWS) * ENCODER_BLOCK_ROWS


def request_for(item: Item, name: str, *, transfer: TransferSpec | None = None) -> AddRequest:
    """A request to encode."""
    return AddRequest(
        request_id=name,
        token_ids=array("I", (0,) * padded(item)),
        params=ONE_TOKEN,
        items=(item,),
        transfer=transfer,
    )


def values_of(folder: Path, data: bytes) -> tuple[Tensor, tuple[int, int, int]]:
    """A tower's input for an image, [patches, dim] float32, and its grid."""
    reader = ImageReader(folder)
    patches, levels = reader.read(data), torch.from_numpy(reader.levels)
    return pixel_values(patches.pixels, levels, reader.frames), patches.grid


def expected_rows(folder: Path, item: Item, dtype: str = "auto") -> Tensor:
    """The tower's output for one image alone: [rows, levels, hidden]."""
    model = load_model_config(folder, dtype)
    values, grid = values_of(folder, item.data)
    values = values.to(getattr(torch, model.dtype))
    with torch.inference_mode():
        rows: Tensor = load_vision(model, device=torch.device("cpu"))(values, [grid])
    return rows


def worker_of(executor: Executor) -> EncoderWorker:
    """The only rank of an encoder."""
    (worker,) = executor.workers
    assert isinstance(worker, EncoderWorker)
    return worker

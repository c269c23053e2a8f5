"""A worker that encodes items: it reads images, runs the vision tower, and fills blocks.

A step is a batch of whole prompts, each of which is an item. Steps run in a thread of their own (on
a GPU also on a stream of their own) and wake the core when they are over, so beside a language
model they may take as long as they need. A step is over when its rows are in memory.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from kvbaton.connectors.digest import BlockRange, Sums
from kvbaton.connectors.layout import ITEM_SIZE
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.encoder.pool import EncoderPool
from kvbaton.engine.executor import Executor, Worker, WorkerGroup
from kvbaton.engine.loader import load_vision
from kvbaton.engine.model_config import ModelConfig, resolve_max_model_len
from kvbaton.engine.models.vision_layers import Grid
from kvbaton.engine.pending import Pending
from kvbaton.engine.step import Sampled, StepPlan, StepResult
from kvbaton.engine.vision_config import VisionConfig
from kvbaton.engine.worker import DEFAULT_CPU_BYTES, choose_device
from kvbaton.errors import ConfigError, RequestError
from kvbaton.image_file import Resizing, processor_settings
from kvbaton.messages.engine import AddRequest, Item
from kvbaton.types import ENCODER_BLOCK_ROWS

if TYPE_CHECKING:
    from kvbaton.engine.encoder.images import Readings

T = TypeVar("T")

ITEMS = 16
"""Default size of an encoder node's cache, as a number of largest items."""

Kind = tuple[bytes, Grid, int]
"""All that a client states of an item. Items that differ in it don't share results."""

NO_TOWER = "the encoder's output did not arrive, and this node has no encoder of its own"
NO_ITEM = "a prompt for an encoder must be one item that starts at 0"
NO_DATA = "the encoder's output did not arrive, and this node was not given the image"


class Encoder:
    """Encodes images.

    Args:
        tower: The vision tower; called as `VisionTower.forward`.
        readings: Reads images.
        vision: Configuration of the tower.
        device: Device of the tower.
        dtype: dtype of the tower.
        most: Number of rows to warm up with.

    Attributes:
        items: Number of items encoded so far.
        rows: Number of rows of these items.
        seconds: Total time of encoding.
    """

    def __init__(
        self,
        tower: Callable[[Tensor, Sequence[Grid]], Tensor],
        readings: Readings,
        vision: VisionConfig,
        device: torch.device,
        dtype: torch.dtype,
        *,
        most: int = 1,
    ) -> None:
        self.readings = readings
        self.items = self.rows = 0
        self.seconds = 0.0
        self._tower, self._vision, self._device = tower, vision, device
        self._merged, self._most = vision.merge_size**2, most
        self._levels = readings.levels.to(device, dtype)

    def warm_up(self) -> None:
        """Encode a blank square image of at least `most` rows."""
        side = math.isqrt(self._most - 1) + 1
        grid = (1, side * self._vision.merge_size, side * self._vision.merge_size)
        shape = (math.prod(grid), self._vision.in_channels, self._vision.patch_size**2)
        self._run(torch.zeros(shape, dtype=torch.uint8, device=self._device), [grid])

    def encode(self, items: Sequence[Item]) -> list[Tensor | RequestError]:
        """Encode items; of each, its rows, [length, levels, hidden], or its error."""
        taken = [self.readings.take(item) for item in items]
        reads = [future.result() for future in taken]
        start = time.monotonic()
        outputs: list[Tensor | RequestError] = []
        good = []
        for item, read in zip(items, reads, strict=True):
            error, rows = read.error, math.prod(read.grid) // self._merged
            if error is None and (rows, read.grid) != (item.length, item.grid):
                said = f"{item.length} rows in a grid of {item.grid}"
                why = f"the image has {rows} rows in a grid of {read.grid}, and the prompt {said}"
                error = RequestError(why, code="invalid_image")
            if error is None:
                good.append((len(outputs), read))
            outputs.append(error or read.pixels)
        if good:
            parts = [read.pixels.to(self._device, non_blocking=True) for _, read in good]
            rows_of_all = self._run(torch.cat(parts), [read.grid for _, read in good])
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            self.items += len(good)
            self.rows += len(rows_of_all)
            split = torch.split(rows_of_all, [len(part) // self._merged for part in parts])
            for (place, _), output in zip(good, split, strict=True):
                outputs[place] = output
        self.seconds += time.monotonic() - start
        return outputs

    def _run(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        return self._tower(pixel_values(pixels, self._levels, self.readings.frames), grids)


def pixel_values(pixels: Tensor, levels: Tensor, frames: int) -> Tensor:
    """Convert bytes to the tower's input.

    Args:
        pixels: [patches, channels, n] uint8, see `images.Read`.
        levels: [channels, 256], see `images.ImageReader`; the result has its dtype.
        frames: See `images.ImageReader`.

    Returns:
        [patches, channels * frames * n].
    """
    first = 256 * torch.arange(len(levels), device=pixels.device, dtype=torch.int32)
    places = pixels.int() + first[:, None]
    values = levels.flatten().index_select(0, places.flatten()).view(pixels.shape)
    return values[:, :, None].expand(-1, -1, frames, -1).flatten(1)


class EncoderWorker(Worker):
    """`Worker` whose sequences are items.

    Args:
        pool: Pool for encoder outputs.
        encoder: Encodes items; None if outputs only come from elsewhere.
    """

    cache: EncoderPool
    wake_fd: int

    def __init__(self, pool: EncoderPool, encoder: Encoder | None) -> None:
        self.cache, self.encoder = pool, encoder
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        self.digests = ThreadPoolExecutor(1, thread_name_prefix="encoder-digest")
        self._device = pool.data.device
        self._streams = [torch.cuda.Stream(self._device) for _ in range(2 * pool.data.is_cuda)]  # type: ignore[no-untyped-call]

    def fit(self) -> int:
        """See `Worker.fit`; the pool exists already."""
        return self.cache.num_blocks

    @torch.inference_mode()
    def start(self, num_blocks: int) -> None:
        """See `Worker.start`: do all that steps do, in their thread, with an unused block."""
        with self._on_stream(0):
            if self.encoder is not None:
                self.encoder.warm_up()
            self.cache.write([1], self.cache.data[:0, 0, :, 0, 0])
            # A kernel is loaded at its first use, which waits for all work on the device.
            self.cache.copy([1], [1])
            self.cache.digest([BlockRange(0, [1], 0, 0, self.cache.block_size)])
            self.cache.kept_sums(0, [1])

    def expect(self, request: AddRequest) -> None:
        """See `Worker.expect`: start to read images."""
        comes = request.transfer is not None and request.transfer.role == "target"
        if self.encoder is not None and not comes:
            for item in request.items:
                if item.data:
                    self.encoder.readings.expect(item)

    def run(self, plan: StepPlan) -> Pending[StepResult]:
        """See `Worker.run`."""
        try:
            with torch.inference_mode(), self._on_stream(0):
                result = StepResult(plan.number, self._run(plan))
                if self._streams:
                    self._streams[0].synchronize()
            return Pending.of(result)
        finally:
            os.eventfd_write(self.wake_fd, 1)

    def _run(self, plan: StepPlan) -> tuple[Sampled, ...]:
        if plan.copies:
            self.cache.copy([c.source for c in plan.copies], [c.target for c in plan.copies])
        new = {sequence.handle: sequence for sequence in plan.new}
        # A step of one token is for the end of a cached item, in a block that was just copied.
        items: dict[int, Item] = {}
        for step in [step for step in plan.steps if step.count > 1]:
            match new[step.handle].items:
                case (item,) if item.start == 0 and item.length <= len(new[step.handle].token_ids):
                    items[step.handle] = item
        known = {_kind(item): item for item in items.values() if item.data}
        rows: dict[Kind, Tensor | RequestError] = {}
        if self.encoder is not None:
            rows = dict(zip(known, self.encoder.encode(list(known.values())), strict=True))
        missing, size = NO_TOWER if self.encoder is None else NO_DATA, self.cache.block_size
        sampled = []
        for step in plan.steps:
            why = code = None
            if step.count > 1:
                output: Tensor | RequestError = RequestError(NO_ITEM)
                if step.handle in items:
                    output = rows.get(_kind(items[step.handle]), RequestError(missing))
                if isinstance(output, RequestError):
                    why, code = output.message, output.code
                else:  # fill the blocks, from the first that lacks rows
                    first = step.start // size
                    blocks = step.new_blocks[0][first:]
                    self.cache.write(blocks, output[first * size :], first=first)
            tokens = (0,) * step.num_samples
            sampled.append(Sampled(step.handle, tokens, error=why, error_code=code))
        return tuple(sampled)

    def sums(self, group: int, blocks: Sequence[int], *, in_flight: bool = False) -> Pending[Sums]:
        """See `Worker.sums`; `in_flight` is impossible, since steps are not in order."""
        assert not in_flight, "steps of an encoder end in any order"
        return self._beside(lambda: self.cache.kept_sums(group, blocks))

    def digest(self, ranges: Sequence[BlockRange], *, keep: bool = False) -> Pending[list[Sums]]:
        """See `Worker.digest`."""
        return self._beside(lambda: self.cache.digest(ranges, keep=keep))

    def _beside(self, work: Callable[[], T]) -> Pending[T]:
        """Work on the pool beside the steps, after the work on the default stream."""

        def read() -> T:
            with self._on_stream(1):
                if self._streams:
                    self._streams[1].wait_stream(torch.cuda.default_stream(self._device))
                return work()

        summed = self.digests.submit(read)
        return Pending(summed.done, summed.result)

    def _on_stream(self, number: int) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._streams[number]) if self._streams else nullcontext()

    def counters(self) -> dict[str, float]:
        """See `Worker.counters`."""
        encoder = self.encoder
        if encoder is None:
            return {}
        return {
            'kvbaton_encoder_items_total{source="encoded"}': float(encoder.items),
            "kvbaton_encoder_rows_total": float(encoder.rows),
            "kvbaton_encoder_read_seconds_total": encoder.readings.seconds,
            "kvbaton_encoder_encode_seconds_total": encoder.seconds,
        }

    def close(self) -> None:
        """See `Worker.close`."""
        self.digests.shutdown(cancel_futures=True)
        if self.encoder is not None:
            self.encoder.readings.close()
        os.close(self.wake_fd)


def _kind(item: Item) -> Kind:
    return item.digest, item.grid, item.length


def encoder_executor(config: EngineConfig, model: ModelConfig) -> Executor:
    """The executor of a model's encoder; without a tower if `language_model_only`.

    It has one rank, whose pool the language model's runner on the same device may read.

    Raises:
        ConfigError: The model has no encoder, or a setting, a file or the pool's size is wrong.
    """
    vision, device = model.require_vision(), choose_device(config)
    pool = EncoderPool(
        pool_blocks(config, model, device), vision.levels, model.hidden_size, model.dtype, device
    )
    encoder = None
    if not config.language_model_only:
        # Pillow is imported only on nodes that encode.
        from kvbaton.engine.encoder.images import ImageReader, Readings

        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        reader = ImageReader(model.folder)
        reader.check_tower(vision)
        tower = load_vision(model, device=device, load_format=config.load_format, seed=config.seed)
        most = 1
        if device.type == "cuda":
            most = max(largest_item(model), config.max_num_encoder_tokens)
        readings = Readings(reader, pin=device.type == "cuda")
        encoder = Encoder(tower, readings, vision, device, pool.data.dtype, most=most)
    thread = ThreadPoolExecutor(1, thread_name_prefix="encoder")
    return Executor(WorkerGroup([thread]), lambda _: EncoderWorker(pool, encoder))


def largest_item(model: ModelConfig) -> int:
    """Rows of the largest image that the model's processor produces.

    Raises:
        ConfigError: The processor's settings can't be read.
    """
    return Resizing.of(processor_settings(model.folder)).most_rows


def pool_blocks(config: EngineConfig, model: ModelConfig, device: torch.device) -> int:
    """Number of blocks of the pool, null block included.

    By default, an encoder node has room for `ITEMS` of the largest items, and a node with a
    language model for the items of the longest prompt; at most half of the free GPU memory, or
    `DEFAULT_CPU_BYTES` on a CPU.

    Raises:
        ConfigError: There is no room for a block.
    """
    rows = config.encoder_cache_tokens
    if rows is None:
        wanted = ITEMS * largest_item(model)
        if not config.encoder_only:
            # Items end within their last block: an item of 33 rows takes two.
            wanted = 2 * resolve_max_model_len(config.max_model_len, model)
        row_bytes = model.require_vision().levels * model.hidden_size * ITEM_SIZE[model.dtype]
        cuda = device.type == "cuda"
        most = torch.cuda.mem_get_info(device)[0] // 2 if cuda else DEFAULT_CPU_BYTES
        rows = min(wanted, most // row_bytes)
    if rows < 1:
        raise ConfigError("--encoder-cache-tokens", f"{rows} is too small; at least 1")
    return -(-rows // ENCODER_BLOCK_ROWS) + 1

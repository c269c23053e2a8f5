"""From the bytes of an image to the patches that a vision tower takes.

All that needs the CPU is done with bytes: decode, resize, cut. What becomes of a byte is looked up
where the tower is, in a table that the model's own processor has filled; so an eighth of the bytes
is kept and moved, and the result is the same. Images are read side by side, and ahead of the steps
that want them.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps
from torch import Tensor

from kvbaton import image_file
from kvbaton.errors import ConfigError, RequestError
from kvbaton.messages.engine import Item

log = logging.getLogger(__name__)

THREADS = 8
AHEAD_ROWS = 1 << 17
"""Rows of images that are read before a step wants them; one of Qwen2.5-VL takes 2.4 kB then."""
AHEAD_S = 60.0
"""An image that no step has wanted for so long is not waited for any more."""


@dataclass(frozen=True)
class Patches:
    """An image, cut up.

    Attributes:
        pixels: [patches, channels, patch_size**2] uint8, of the only frame.
        grid: frames (1), rows and columns of patches.
    """

    pixels: npt.NDArray[np.uint8]
    grid: tuple[int, int, int]


class ImageReader:
    """Decodes images and prepares them as the model's own image processor does.

    Args:
        folder: a Hugging Face folder.

    Attributes:
        levels: [channels, 256] float32, what the processor makes of each value of a pixel.
        frames: how often a patch holds the only frame of an image.

    Raises:
        ConfigError: it has no image processor, or one that ``transformers``
            does not have for Pillow, or that does not resize.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        name = str(image_file.processor_settings(folder).get("image_processor_type", ""))
        kind = _processor_class(name)
        process = kind.from_pretrained(folder)
        if not process.do_resize:
            raise ConfigError("--model", "an image processor with do_resize false is unsupported")
        self._fit = sys.modules[kind.__module__].smart_resize
        self._size, self._resample = process.size, process.resample
        self._patch, self._merge = process.patch_size, process.merge_size
        self.frames: int = process.temporal_patch_size
        self.levels = _levels(process)

    def read(self, data: bytes) -> Patches:
        """Decode, turn upright, resize and cut.

        Raises:
            RequestError: this is no image, a broken one, or one that the model does not take.
        """
        image, side = decode(data), self._patch * self._merge
        limits = {
            "min_pixels": self._size["shortest_edge"], "max_pixels": self._size["longest_edge"]
        }  # fmt: skip
        try:
            height, width = self._fit(image.height, image.width, factor=side, **limits)
        except ValueError as error:
            raise RequestError(f"the model does not take this image: {error}") from error
        if (width, height) != image.size:
            image = image.resize((width, height), resample=self._resample)
        return self._cut(np.asarray(image))

    def _cut(self, image: npt.NDArray[np.uint8]) -> Patches:
        """Patches in the order of the rows that they will be merged into."""
        height, width, channels = image.shape
        patch, merge = self._patch, self._merge
        rows, columns = height // patch, width // patch
        shape = (rows // merge, merge, patch, columns // merge, merge, patch, channels)
        pixels = image.reshape(shape).transpose(0, 3, 1, 4, 6, 2, 5)
        return Patches(pixels.reshape(rows * columns, channels, patch**2), (1, rows, columns))


def _levels(process: Any) -> npt.NDArray[np.float32]:
    """Let a processor show what it makes of each value, by an image that has them all."""
    side = process.patch_size * process.merge_size
    tiles = -(-256 // side**2)
    ramp = np.resize(np.arange(256, dtype=np.uint8), (side, tiles * side))
    image = Image.fromarray(ramp).convert("RGB")
    options = {"images": image, "return_tensors": "np", "do_resize": False}
    raw = process(**options, do_rescale=False, do_normalize=False)["pixel_values"]
    done = process(**options)["pixel_values"]
    by_channel = (len(raw), 3, -1)
    levels = np.zeros((3, 256), np.float32)
    for channel in range(3):
        values = raw.reshape(by_channel)[:, channel].astype(np.int64)
        levels[channel, values] = done.reshape(by_channel)[:, channel]
    return levels


def decode(data: bytes) -> Image.Image:
    """An upright RGB image; of an animated one the first frame.

    Raises:
        RequestError: see `image_file.opened`.
    """
    with image_file.opened(data) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def _processor_class(name: str) -> Any:
    """The class of ``transformers`` that does with Pillow what the named one does."""
    import transformers  # takes a second; only nodes that encode need it

    wanted = name.removesuffix("Fast") + "Pil"
    if not wanted.endswith("ImageProcessorPil") or not hasattr(transformers, wanted):
        raise ConfigError("--model", f"image_processor_type {name!r} is unsupported")
    return getattr(transformers, wanted)


@dataclass(frozen=True)
class Read:
    """An image that was read, or why it could not be.

    Attributes:
        pixels: [patches, channels, n] uint8, ready to be copied to the tower's device.
        grid: patches in time, height and width.
        error: for the client.
    """

    pixels: Tensor
    grid: tuple[int, int, int]
    error: str | None = None


@dataclass(frozen=True)
class _Ahead:
    future: Future[Read]
    rows: int
    since: float


class Readings:
    """Reads images in threads.

    Args:
        reader: how.
        pin: put what was read where a GPU can fetch it.
        clock: monotonic seconds.

    Attributes:
        seconds: that threads have spent reading.
        levels: see `ImageReader`.
        frames: likewise.
    """

    def __init__(
        self,
        reader: ImageReader,
        *,
        pin: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds = 0.0
        self.levels, self.frames = torch.from_numpy(reader.levels), reader.frames
        self._reader, self._pin, self._clock = reader, pin, clock
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="image")
        self._ahead: dict[bytes, _Ahead] = {}
        self._lock = threading.Lock()

    def expect(self, item: Item) -> None:
        """Begin to read an image that a step will want, if there is room for it."""
        now = self._clock()
        with self._lock:
            for digest, old in list(self._ahead.items()):
                if now - old.since > AHEAD_S:
                    del self._ahead[digest]
            rows = sum(ahead.rows for ahead in self._ahead.values())
            if item.digest not in self._ahead and rows + item.length <= AHEAD_ROWS:
                future = self._threads.submit(self._read, item.data)
                self._ahead[item.digest] = _Ahead(future, item.length, now)

    def take(self, item: Item) -> Future[Read]:
        """An image, read already or from now on."""
        with self._lock:
            ahead = self._ahead.pop(item.digest, None)
        return self._threads.submit(self._read, item.data) if ahead is None else ahead.future

    def _read(self, data: bytes) -> Read:
        start = time.monotonic()
        try:
            patches = self._reader.read(data)
            pixels = torch.from_numpy(patches.pixels)
            return Read(pixels.pin_memory() if self._pin else pixels, patches.grid)
        except RequestError as error:
            return Read(torch.empty(0), (0, 0, 0), error.message)
        except Exception as error:
            # Whatever a decoder makes of a client's bytes is that client's affair alone.
            log.exception("an image can't be read")
            return Read(torch.empty(0), (0, 0, 0), f"the image can't be read: {error!r}")
        finally:
            with self._lock:
                self.seconds += time.monotonic() - start

    def close(self) -> None:
        """Give the threads back."""
        self._threads.shutdown(cancel_futures=True)

"""Images on their way to the encoder: read side by side, and ahead of the steps that want them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbaton.errors import RequestError
from kvbaton.messages.engine import Item

if TYPE_CHECKING:
    from kvbaton.engine.encoder.images import ImageReader

log = logging.getLogger(__name__)

THREADS = 8
AHEAD_ROWS = 1 << 17
"""Rows of images that are read before a step wants them; one of Qwen2.5-VL takes 2.4 kB then."""
AHEAD_S = 60.0
"""An image that no step has wanted for so long is not waited for any more."""


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


def pixel_values(pixels: Tensor, levels: Tensor, frames: int) -> Tensor:
    """What the tower takes.

    Args:
        pixels: [patches, channels, n] uint8, see `images.Patches`.
        levels: [channels, 256], see `images.ImageReader`; the result has its dtype.
        frames: see `images.ImageReader`.

    Returns:
        [patches, channels * frames * n].
    """
    first = 256 * torch.arange(len(levels), device=pixels.device, dtype=torch.int32)
    places = pixels.int() + first[:, None]
    values = levels.flatten().index_select(0, places.flatten()).view(pixels.shape)
    return values[:, :, None].expand(-1, -1, frames, -1).flatten(1)

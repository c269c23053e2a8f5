"""From the bytes of an image to the patches that a vision tower takes.

Everything that needs the CPU works on bytes: decode, resize, cut. The tower's device maps each byte
to its value with a table, so that an eighth of the bytes is kept and moved. The result equals, bit
for bit, that of the model's processor in ``transformers``, whose import alone takes two seconds of
CPU (except for grey of 16 bits, which becomes white there). Images are read in parallel, ahead of
the steps that need them.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor

from kvbaton import image_file
from kvbaton.engine.vision_config import VisionConfig
from kvbaton.errors import ModelError, RequestError
from kvbaton.messages.engine import Item

log = logging.getLogger(__name__)

THREADS = 8
AHEAD_ROWS = 1 << 17
"""Maximum rows of images read ahead of their step; a row of Qwen2.5-VL takes 2.4 kB."""
AHEAD_S = 60.0
"""Seconds after which an image read ahead is dropped if no step has taken it."""
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Transposition that makes an image upright, by EXIF orientation. Pillow's `exif_transpose` also
rewrites the other tags, and fails at odd ones, of which cameras have many."""
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Defaults of processors without ``image_mean`` and ``image_std``."""


@dataclass(frozen=True)
class Read:
    """An image that was read and cut into patches, or why it could not be.

    Attributes:
        pixels: [patches, channels, patch_size**2] uint8, of the only frame.
        grid: Frames (1), rows and columns of patches.
        error: Error for the client, with status 500 if this process is to blame; None if read.
    """

    pixels: Tensor
    grid: tuple[int, int, int]
    error: RequestError | None = None


class ImageReader:
    """Decodes images and prepares them as the model's image processor does.

    Args:
        folder: A Hugging Face folder.

    Attributes:
        levels: [channels, 256] float32, the processor's output for each value of a pixel.
        frames: Number of times that a patch repeats an image's only frame.

    Raises:
        ConfigError: There is no image processor, or an unknown one, or one that does not resize.
    """

    def __init__(self, folder: str | Path) -> None:
        settings = image_file.processor_settings(Path(folder))
        self._resizing = image_file.Resizing.of(settings)
        if not settings.get("do_resize", True):
            raise ModelError("an image processor with do_resize false is unsupported")
        self._resample = settings.get("resample", Image.Resampling.BICUBIC)
        self._patch, self._merge = self._resizing.patch_size, self._resizing.merge_size
        self.frames: int = settings.get("temporal_patch_size", 2)
        # Results of ``rescale`` and ``normalize`` of ``transformers`` for each value, per channel.
        levels = np.arange(256.0)
        if settings.get("do_rescale", True):
            levels = levels * settings.get("rescale_factor", 1 / 255)
        self.levels = np.tile(levels.astype(np.float32), (3, 1))
        if settings.get("do_normalize", True):
            mean, std = (
                np.broadcast_to(np.array(settings.get(name, clip), np.float32), 3)[:, None]
                for name, clip in (("image_mean", CLIP_MEAN), ("image_std", CLIP_STD))
            )
            self.levels = (self.levels - mean) / std

    def check_tower(self, vision: VisionConfig) -> None:
        """Raise `ConfigError` unless the tower takes this processor's patches."""
        for name, own, wanted in (
            ("patch_size", self._patch, vision.patch_size),
            ("merge_size", self._merge, vision.merge_size),
            ("temporal_patch_size", self.frames, vision.temporal_patch_size),
        ):
            if own != wanted:
                raise ModelError(
                    f"{name} of the image processor is {own}, and {wanted} of the vision tower; "
                    "they must agree"
                )

    def read(self, data: bytes) -> Read:
        """Decode an image, turn it upright, resize it and cut it into patches.

        Raises:
            RequestError: The bytes are no image or a broken one, or the model does not take it.
        """
        image = decode(data)
        rows, columns = self._resizing.grid(image.width, image.height)
        width, height = columns * self._patch, rows * self._patch
        if (width, height) != image.size:
            image = image.resize((width, height), resample=self._resample)
        # Patches in the order of the rows that they are merged into.
        patch, merge, channels = self._patch, self._merge, 3
        shape = (rows // merge, merge, patch, columns // merge, merge, patch, channels)
        pixels = np.asarray(image).reshape(shape).transpose(0, 3, 1, 4, 6, 2, 5)
        patches = pixels.reshape(rows * columns, channels, patch**2)
        return Read(torch.from_numpy(patches), (1, rows, columns))


def decode(data: bytes) -> Image.Image:
    """Decode an upright RGB image; of an animated one, the first frame.

    Raises:
        RequestError: See `image_file.opened`.
    """
    with image_file.opened(data) as image:
        image.load()  # a PNG's EXIF may follow its pixels
        turn = TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
        upright = image if turn is None else image.transpose(turn)
        if upright.mode.startswith("I;16"):  # Pillow's conversion makes all above 255 white
            upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
        return upright.convert("RGB")


@dataclass(frozen=True)
class _Ahead:
    future: Future[Read]
    rows: int
    since: float


class Readings:
    """Reads images in threads.

    Args:
        reader: Reads one image.
        pin: Whether to put pixels into pinned memory, for a GPU.

    Attributes:
        seconds: Total time that threads have spent reading.
        levels: See `ImageReader`.
        frames: See `ImageReader`.
    """

    def __init__(self, reader: ImageReader, *, pin: bool) -> None:
        self.seconds = 0.0
        self.levels, self.frames = torch.from_numpy(reader.levels), reader.frames
        self._reader, self._pin = reader, pin
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="image")
        self._ahead: dict[bytes, _Ahead] = {}
        self._lock = threading.Lock()

    def expect(self, item: Item) -> None:
        """Start to read an image that a step will need, if there is room for it."""
        now = time.monotonic()
        with self._lock:
            for digest, old in list(self._ahead.items()):
                if now - old.since > AHEAD_S:
                    del self._ahead[digest]
            rows = sum(ahead.rows for ahead in self._ahead.values())
            if item.digest not in self._ahead and rows + item.length <= AHEAD_ROWS:
                future = self._threads.submit(self._read, item.data)
                self._ahead[item.digest] = _Ahead(future, item.length, now)

    def take(self, item: Item) -> Future[Read]:
        """Future of an image, which is read from now on if it was not read ahead."""
        with self._lock:
            ahead = self._ahead.pop(item.digest, None)
        return self._threads.submit(self._read, item.data) if ahead is None else ahead.future

    def _read(self, data: bytes) -> Read:
        start = time.monotonic()
        try:
            read = self._reader.read(data)
            return replace(read, pixels=read.pixels.pin_memory()) if self._pin else read
        except RequestError as error:
            invalid = RequestError(error.message, code="invalid_image")
            return Read(torch.empty(0), (0, 0, 0), invalid)
        except Exception as error:  # must not fail the step's other images
            log.exception("an image can't be read")
            why = f"the image can't be read: {error!r}"
            failed = RequestError(why, status=500, code="internal_error")
            return Read(torch.empty(0), (0, 0, 0), failed)
        finally:
            with self._lock:
                self.seconds += time.monotonic() - start

    def close(self) -> None:
        """Shut the threads down."""
        self._threads.shutdown(cancel_futures=True)

"""From the bytes of an image to the patches that a vision tower takes.

All that needs the CPU is done with bytes: decode, resize, cut. What becomes of a byte is looked up
where the tower is, in a table that the model's own processor has filled; so an eighth of the bytes
is kept and moved, and the result is the same.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from kvbaton import image_file
from kvbaton.engine.vision_config import processor_settings
from kvbaton.errors import ConfigError, RequestError


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
        name = str(processor_settings(folder).get("image_processor_type", ""))
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

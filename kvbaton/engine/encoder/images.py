"""From the bytes of an image to the patches that a vision tower takes."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from kvbaton.engine.vision_config import processor_settings
from kvbaton.errors import ConfigError, RequestError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""What is decoded: formats whose decoders start no other program."""

MAX_PIXELS = 1 << 26
"""Largest image that is decoded: 192 MiB of RGB."""


@dataclass(frozen=True)
class Patches:
    """An image, cut up.

    Attributes:
        values: [patches, patch_dim] float32.
        grid: frames (1), rows and columns of patches.
    """

    values: npt.NDArray[np.float32]
    grid: tuple[int, int, int]


class ImageReader:
    """Decodes images and prepares them as the model's own image processor does.

    Args:
        folder: a Hugging Face folder.

    Raises:
        ConfigError: it has no image processor, or one that ``transformers``
            does not have for Pillow.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        name = str(processor_settings(folder).get("image_processor_type", ""))
        self._process = _processor_class(name).from_pretrained(folder)

    def read(self, data: bytes) -> Patches:
        """Decode, turn upright, resize and cut.

        Raises:
            RequestError: this is no image, a broken one, or one that the model does not take.
        """
        image = decode(data)
        try:
            result = self._process(images=image, return_tensors="np")
        except ValueError as error:
            raise RequestError(f"the model does not take this image: {error}") from error
        frames, rows, columns = map(int, result["image_grid_thw"][0])
        values = np.ascontiguousarray(result["pixel_values"], dtype=np.float32)
        return Patches(values, (frames, rows, columns))


def decode(data: bytes) -> Image.Image:
    """An upright RGB image; of an animated one the first frame.

    Raises:
        RequestError: it can't be decoded, or has more than `MAX_PIXELS`.
    """
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height <= MAX_PIXELS:
                return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # decoders meet hostile bytes with exceptions of every kind
        kinds = ", ".join(FORMATS)
        raise RequestError(f"can't decode the image (one of {kinds}): {error}") from error
    raise RequestError(f"the image has {width} x {height} pixels; at most {MAX_PIXELS} are taken")


def _processor_class(name: str) -> Any:
    """The class of ``transformers`` that does with Pillow what the named one does."""
    import transformers  # takes a second; only nodes that encode need it

    wanted = name.removesuffix("Fast") + "Pil"
    if not wanted.endswith("ImageProcessorPil") or not hasattr(transformers, wanted):
        raise ConfigError("--model", f"image_processor_type {name!r} is unsupported")
    return getattr(transformers, wanted)

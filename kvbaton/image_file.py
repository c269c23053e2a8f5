"""Image files from outside: which are read, and how large; and the settings of image processors.

The endpoint looks whether a file can be decoded and how many rows it will have, a node with an
encoder decodes and resizes it: by one rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvbaton.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""What is decoded: formats whose decoders start no other program."""
MAX_PIXELS = 1 << 26
"""Larger images are refused unread; 192 MiB of RGB."""
MAX_ASPECT = 200
ARCHITECTURES = ("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration")
"""Models whose images are cut into patches by the rule of `Resizing`; of others text is served."""


@dataclass(frozen=True)
class Resizing:
    """How large an image is made, as by ``smart_resize`` of Qwen2-VL in ``transformers``.

    Attributes:
        patch_size: pixels of a patch's side.
        merge_size: patches of the side of the square that becomes one row.
        least: pixels of the result, if its sides allow that.
        most: likewise.
    """

    patch_size: int
    merge_size: int
    least: int
    most: int

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Resizing:
        """Read settings as in ``preprocessor_config.json``.

        Raises:
            ConfigError: they are of a processor whose rule is not known.
        """
        kind = str(settings.get("image_processor_type", ""))
        if not kind.startswith("Qwen2VLImageProcessor"):
            raise ConfigError("--model", f"image_processor_type {kind!r} is unsupported")
        size = settings.get("size") or {}
        return cls(
            settings.get("patch_size", 14),
            settings.get("merge_size", 2),
            settings.get("min_pixels") or size.get("shortest_edge", 56 * 56),
            settings.get("max_pixels") or size.get("longest_edge", 28 * 28 * 1280),
        )

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Patches in height and in width of an upright image.

        Raises:
            RequestError: it is empty, or too narrow for the model.
        """
        if min(width, height) < 1:
            raise RequestError(f"the image has {width} x {height} pixels; it needs at least one")
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise RequestError(
                f"the image has {width} x {height} pixels; its sides may differ {MAX_ASPECT}-fold"
            )
        factor = self.patch_size * self.merge_size
        rows, columns = (max(round(side / factor), 0) for side in (height, width))
        pixels = rows * columns * factor**2
        if pixels > self.most:
            scale = math.sqrt(height * width / self.most)
            rows, columns = (max(1, math.floor(s / scale / factor)) for s in (height, width))
        elif pixels < self.least:
            scale = math.sqrt(self.least / (height * width))
            rows, columns = (math.ceil(side * scale / factor) for side in (height, width))
        return rows * self.merge_size, columns * self.merge_size


@contextmanager
def opened(data: bytes) -> Iterator[ImageFile]:
    """An image whose pixels have not been read yet.

    Raises:
        RequestError: it is no image, or too large; or it can't be decoded, where the caller did so.
    """
    from PIL import Image

    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise RequestError(
                    f"the image has {width} x {height} pixels; at most {MAX_PIXELS} are taken"
                )
            yield image
    except RequestError:
        raise
    except Exception as error:  # decoders meet hostile bytes with exceptions of every kind
        kinds = ", ".join(FORMATS)
        raise RequestError(f"can't decode the image (one of {kinds}): {error}") from error


def processor_settings(folder: Path) -> dict[str, Any]:
    """Settings of the image processor of a Hugging Face folder.

    They lie in ``preprocessor_config.json``; folders that a whole processor of transformers 5 was
    saved to have them in ``processor_config.json``.

    Raises:
        ConfigError: they are missing or broken.
    """
    path, joint = folder / "preprocessor_config.json", folder / "processor_config.json"
    try:
        if path.exists() or not joint.exists():
            return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        content = msgspec.json.decode(joint.read_bytes(), type=dict[str, Any])
        return msgspec.convert(content.get("image_processor"), dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError("--model", f"can't read the settings of {path}: {error}") from error

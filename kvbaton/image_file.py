"""Which image files are accepted, up to which size, and the settings of image processors.

The endpoint checks whether a file can be decoded and computes its number of rows; a node with an
encoder decodes and resizes it. Both use the rules of this file.
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

from kvbaton.errors import ModelError, RequestError

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""Formats that are decoded: those whose decoders start no other program."""
MAX_PIXELS = 1 << 26
"""Maximum number of pixels (192 MiB of RGB); larger images are refused unread."""
MAX_ASPECT = 200
GEMMA3_PROCESSOR = "Gemma3ImageProcessor"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
ARCHITECTURES = (
    "Gemma3ForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)
"""Models that images are accepted for; others are served as text models."""


@dataclass(frozen=True)
class Resizing:
    """Size to which an image is scaled, as by ``smart_resize`` of Qwen2-VL in ``transformers``.

    Attributes:
        patch_size: Side of a patch, in pixels.
        merge_size: Side of the square of patches that becomes one row, in patches.
        least: Minimum number of pixels of the result, if its sides allow that.
        most: Maximum number of pixels of the result, if its sides allow that.
        square: Whether every result is a square of `most` pixels (Gemma 3).
    """

    patch_size: int
    merge_size: int
    least: int
    most: int
    square: bool = False

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Resizing:
        """Read settings as `processor_settings` returns them.

        Raises:
            ConfigError: They belong to an unsupported image processor.
        """
        kind = str(settings.get("image_processor_type", ""))
        size = settings.get("size") or {}
        if kind.startswith(GEMMA3_PROCESSOR):
            pixels = size["height"] * size["width"]
            return cls(settings["patch_size"], settings["merge_size"], pixels, pixels, square=True)
        if not kind.startswith("Qwen2VLImageProcessor"):
            raise ModelError(f"image_processor_type {kind!r} is unsupported")
        return cls(
            settings.get("patch_size", 14),
            settings.get("merge_size", 2),
            settings.get("min_pixels") or size.get("shortest_edge", 56 * 56),
            settings.get("max_pixels") or size.get("longest_edge", 28 * 28 * 1280),
        )

    @property
    def most_rows(self) -> int:
        """Number of rows of the largest image."""
        return max(1, int(self.most) // (self.patch_size * self.merge_size) ** 2)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Number of patches of an upright image, as (rows, columns).

        Args:
            width: Width in pixels.
            height: Height in pixels.

        Raises:
            RequestError: The image is empty, or too narrow for the model.
        """
        if min(width, height) < 1:
            raise RequestError(f"the image has {width} x {height} pixels; it needs at least one")
        if self.square:
            side = math.isqrt(self.most) // self.patch_size
            return side, side
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
    """Open an image without reading its pixels.

    Raises:
        RequestError: The data is not an image, or it is too large, or the caller can't decode it.
    """
    from PIL import Image, UnidentifiedImageError

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
    except Exception as error:  # decoders raise exceptions of every type for hostile bytes
        kinds = ", ".join(FORMATS)
        # Pillow's text of this error has the address of the bytes in our memory.
        what = "it is none of these" if isinstance(error, UnidentifiedImageError) else str(error)
        raise RequestError(f"can't decode the image (one of {kinds}): {what}") from error


def has_processor(folder: Path) -> bool:
    """Whether a Hugging Face folder has settings of an image processor."""
    return any((folder / name).exists() for name in PROCESSOR_FILES)


def processor_settings(folder: Path) -> dict[str, Any]:
    """Settings of the image processor of a Hugging Face folder.

    They are in ``preprocessor_config.json``, or in ``processor_config.json`` if a whole processor
    of transformers 5 was saved to the folder. For Gemma 3 this adds the defaults of its processor's
    class, and ``patch_size`` and ``merge_size``, which follow from ``config.json``.

    Raises:
        ConfigError: They are missing, broken or unsupported.
    """
    path, joint = (folder / name for name in PROCESSOR_FILES)
    try:
        if path.exists() or not joint.exists():
            settings = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        else:
            content = msgspec.json.decode(joint.read_bytes(), type=dict[str, Any])
            settings = msgspec.convert(content.get("image_processor"), dict[str, Any])
        if not str(settings.get("image_processor_type", "")).startswith(GEMMA3_PROCESSOR):
            return settings
        model = msgspec.json.decode((folder / "config.json").read_bytes(), type=_Gemma3Sizes)
    except (OSError, ValueError, RecursionError) as error:  # also what is not UTF-8, or too deep
        raise ModelError(f"can't read the settings of {path}: {error}") from error
    return _gemma3_settings(settings, model)


class _Tower(msgspec.Struct):
    image_size: int = 224
    patch_size: int = 16


class _Gemma3Sizes(msgspec.Struct):
    vision_config: _Tower
    mm_tokens_per_image: int = 256


def _gemma3_settings(settings: dict[str, Any], model: _Gemma3Sizes) -> dict[str, Any]:
    own = {name: value for name, value in settings.items() if value is not None}
    if own.get("do_pan_and_scan"):
        raise ModelError(
            "do_pan_and_scan of the image processor is unsupported; set it to false: images are "
            "seen whole"
        )
    tower = model.vision_config
    size = {"height": 224, "width": 224} | dict(own.get("size") or {})
    if {size["height"], size["width"]} != {tower.image_size}:
        raise ModelError(
            f"size of the image processor is {size}, and image_size of the tower "
            f"{tower.image_size}; they must agree"
        )
    half = [0.5] * 3
    defaults = {"resample": 2, "image_mean": half, "image_std": half, "temporal_patch_size": 1}
    merge = pooled_side(tower.image_size, tower.patch_size, model.mm_tokens_per_image)
    sizes = {"size": size, "patch_size": tower.patch_size, "merge_size": merge}
    return defaults | own | sizes


def pooled_side(image_size: int, patch_size: int, tokens: int) -> int:
    """Side of the square of patches that becomes one row in Gemma 3, in patches.

    Args:
        image_size: Side of an image, in pixels.
        patch_size: Side of a patch, in pixels.
        tokens: Number of rows of an image.

    Raises:
        ConfigError: Patches and squares don't fill the image.
    """
    side = math.isqrt(max(tokens, 0))
    patches = image_size // patch_size if patch_size > 0 else 0
    if side < 1 or side**2 != tokens or patches < 1 or patches * patch_size != image_size:
        problem = f"image_size {image_size} must be a multiple of patch_size {patch_size}, and"
        raise ModelError(f"{problem} mm_tokens_per_image {tokens} a square")
    if patches % side:
        raise ModelError(
            f"{patches} patches a side are no multiple of {side} (mm_tokens_per_image)"
        )
    return patches // side

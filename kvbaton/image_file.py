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

from kvbaton.errors import ModelError, RequestError

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""What is decoded: formats whose decoders start no other program."""
MAX_PIXELS = 1 << 26
"""Larger images are refused unread; 192 MiB of RGB."""
MAX_ASPECT = 200
GEMMA3_PROCESSOR = "Gemma3ImageProcessor"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
ARCHITECTURES = (
    "Gemma3ForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)
"""Models whose images are taken; of others text is served."""


@dataclass(frozen=True)
class Resizing:
    """How large an image is made, as by ``smart_resize`` of Qwen2-VL in ``transformers``.

    Attributes:
        patch_size: pixels of a patch's side.
        merge_size: patches of the side of the square that becomes one row.
        least: pixels of the result, if its sides allow that.
        most: likewise.
        square: the result is a square of `most` pixels in any case, as Gemma 3's.
    """

    patch_size: int
    merge_size: int
    least: int
    most: int
    square: bool = False

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Resizing:
        """Read settings as `processor_settings` gives them.

        Raises:
            ConfigError: they are of a processor whose rule is not known.
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
        """Rows of the largest image."""
        return max(1, int(self.most) // (self.patch_size * self.merge_size) ** 2)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Patches in height and in width of an upright image.

        Raises:
            RequestError: it is empty, or too narrow for the model.
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
    """An image whose pixels have not been read yet.

    Raises:
        RequestError: it is no image, or too large; or it can't be decoded, where the caller did so.
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
    except Exception as error:  # decoders meet hostile bytes with exceptions of every kind
        kinds = ", ".join(FORMATS)
        # Pillow's text of this one is where in our memory the bytes lie.
        what = "it is none of these" if isinstance(error, UnidentifiedImageError) else str(error)
        raise RequestError(f"can't decode the image (one of {kinds}): {what}") from error


def has_processor(folder: Path) -> bool:
    """Whether a Hugging Face folder says how images are prepared."""
    return any((folder / name).exists() for name in PROCESSOR_FILES)


def processor_settings(folder: Path) -> dict[str, Any]:
    """Settings of the image processor of a Hugging Face folder.

    They lie in ``preprocessor_config.json``; folders that a whole processor of transformers 5 was
    saved to have them in ``processor_config.json``. To those of Gemma 3 come what its processor's
    class has where they are silent, and the sizes of patches and of what becomes one row, which
    only ``config.json`` tells.

    Raises:
        ConfigError: they are missing or broken, or ask for what is not supported.
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
    """Side of the square of patches that becomes one row of Gemma 3's.

    Args:
        image_size: pixels of an image's side.
        patch_size: of a patch's.
        tokens: rows of an image.

    Raises:
        ConfigError: patches and squares don't fill the image.
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

"""Image files from outside: which are read, and how large; and the settings of image processors.

The endpoint looks whether a file can be decoded, a node with an encoder decodes it: by one rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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

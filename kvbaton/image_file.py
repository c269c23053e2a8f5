"""Image files from outside: which are read, and how large they may be.

The endpoint looks whether a file can be decoded, a node with an encoder decodes it: by one rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING

from kvbaton.errors import RequestError

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

"""Settings of what images clients may bring; light, since commands read them, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbaton.config import Count, flag


@dataclass(frozen=True, kw_only=True)
class MediaConfig:
    """What images clients may bring.

    Attributes:
        allowed_media_domains: hosts that images may be fetched from; a name also stands for those
            below it, and ``*`` for all. None are visited by default.
        allow_private_media: also visit addresses in private networks, and this machine.
        max_images: of one request.
        max_image_bytes: of all images of one request.
        image_timeout_s: in which each must have been fetched.
    """

    GROUP: ClassVar[str | None] = "endpoint"

    allowed_media_domains: tuple[str, ...] = flag(
        (),
        "hosts that images are fetched from, those below them too; * for all (none)",
        nargs="+",
        metavar="HOST",
    )
    allow_private_media: bool = flag(
        False, "fetch images from private networks and this machine, too", action="store_true"
    )
    max_images: Count = flag(64, "of one request", name="--limit-images", metavar="N")
    max_image_bytes: int = 16 << 20
    image_timeout_s: float = 10.0

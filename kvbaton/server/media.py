"""Settings of what images clients may bring; light, since commands read them, too."""

from __future__ import annotations

from dataclasses import dataclass


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

    allowed_media_domains: tuple[str, ...] = ()
    allow_private_media: bool = False
    max_images: int = 64
    max_image_bytes: int = 16 << 20
    image_timeout_s: float = 10.0

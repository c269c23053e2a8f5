"""Images that clients bring: addresses that are never dialled, and bytes that are never decoded."""

from __future__ import annotations

import base64
import binascii
import errno
import io
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kvbaton.errors import ConfigError, RequestError
from kvbaton.messages.engine import Item
from kvbaton.server.config import MediaConfig
from kvbaton.server.images import load_images
from kvbaton.text.chat import ImageUrl
from kvbaton.text.vision import VisionText
from tests.support.chats import data_url

ANYWHERE = MediaConfig(allowed_media_domains=("*",))


def picture(width: int = 40, height: int = 32, kind: str = "PNG", **options: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, kind, **options)
    return data.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and ends there."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + header
        + struct.pack(">I", zlib.crc32(header))
        + struct.pack(">I", 0)
        + b"IDAT"
        + struct.pack(">I", binascii.crc32(b"IDAT"))
    )


@pytest.fixture(scope="module")
def vision(checkpoint: Callable[..., Path]) -> VisionText:
    found = VisionText.load(checkpoint(family="qwen2_5_vl"))
    assert found is not None
    return found


async def refused(url: str, vision: VisionText, config: MediaConfig) -> str:
    """What is said of an image that is not taken."""
    with pytest.raises(RequestError) as caught:
        await load_images([ImageUrl(url, "here")], vision, config)
    assert (caught.value.status, caught.value.param) == (400, "here")
    assert len(caught.value.message) < 400
    return caught.value.message


# --- where requests may not lead ---

PRIVATE = [
    "127.0.0.1",
    "127.1",
    "2130706433",
    "0x7f.0.0.1",
    "0177.0.0.1",
    "①②⑦.⓪.⓪.①",
    "0.0.0.0",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "100.64.0.1",
    "169.254.169.254",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "[::]",
    "[::1]",
    "[::127.0.0.1]",
    "[::ffff:127.0.0.1]",
    "[::ffff:a9fe:a9fe]",
    "[64:ff9b::10.0.0.1]",
    "[64:ff9b::7f00:1]",
    "[64:ff9b:1::1]",
    "[2002:7f00:1::]",
    "[fe80::1]",
    "[fe80::1%25lo]",
    "[fec0::1]",
    "[fc00::1]",
    "[fd00::1]",
    "[ff02::1]",
]


@pytest.fixture
def no_dialling(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Ends attempts to connect, and keeps what was to be dialled."""
    dialled: list[Any] = []

    async def connect(addr_infos: Any, **options: Any) -> Any:
        dialled.extend(info[4] for info in addr_infos)
        raise OSError(errno.EPERM, "not in this test")

    monkeypatch.setattr("aiohttp.connector.aiohappyeyeballs.start_connection", connect)
    return dialled


@pytest.mark.parametrize("host", PRIVATE)
async def test_private_addresses_are_not_dialled(
    vision: VisionText, no_dialling: list[Any], host: str
) -> None:
    why = await refused(f"http://{host}/x.png", vision, ANYWHERE)
    assert "not a public address" in why
    assert no_dialling == []


@pytest.mark.parametrize("host", ["8.8.8.8", "[2001:4860:4860::8888]", "[64:ff9b::8.8.8.8]"])
async def test_public_addresses_are(vision: VisionText, no_dialling: list[Any], host: str) -> None:
    assert "not in this test" in await refused(f"http://{host}/x.png", vision, ANYWHERE)
    assert len(no_dialling) == 1


async def test_what_is_checked_is_what_is_dialled(
    vision: VisionText, no_dialling: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is public when first asked for and private after (rebinding)."""
    asked = []

    async def resolve(self: Any, host: str, port: int, family: Any) -> list[dict[str, Any]]:
        asked.append(host)
        hosts = ["10.0.0.1", "8.8.8.8"] if len(asked) == 1 else ["127.0.0.1"]
        return [
            {"hostname": host, "host": h, "port": port, "family": 2, "proto": 0, "flags": 0}
            for h in hosts
        ]

    monkeypatch.setattr("kvbaton.server.images.ThreadedResolver.resolve", resolve)
    await refused("http://turncoat.example/x.png", vision, ANYWHERE)
    assert [address[0] for address in no_dialling] == ["8.8.8.8"]
    assert "no public address" in await refused("http://turncoat.example/", vision, ANYWHERE)


# --- inline ---


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
async def test_inline_images(vision: VisionText, kind: str) -> None:
    data = picture(48, 24, kind)
    url = data_url(data, f"image/{kind.lower()}")
    (item,) = await load_images([ImageUrl(url, "here")], vision, MediaConfig())
    assert item == Item(start=0, length=18, digest=vision.digest(data), grid=(1, 6, 12), data=data)


@pytest.mark.parametrize("head", ["data:image/png;BASE64,", "DATA:image/png; base64,"])
async def test_base64_as_it_is_written_elsewhere(vision: VisionText, head: str) -> None:
    """Lines of 76 characters, and any letters."""
    data = picture(48, 24)
    url = head + base64.encodebytes(data).decode().replace("\n", "\r\n")
    (item,) = await load_images([ImageUrl(url, "here")], vision, MediaConfig())
    assert item.data == data


async def test_what_is_no_image_tells_nothing_of_our_memory(vision: VisionText) -> None:
    why = await refused(data_url(b"hello"), vision, MediaConfig())
    assert why.endswith(": it is none of these")
    assert " at 0x" not in why


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("data:text/plain;base64,AAAA", "image type"),
        ("data:;base64,AAAA", "image type"),
        ("data:image/png;base64", "image type"),
        ("data:image/png;base64,A", "base64"),
        ("data:image/png;base64,A A A A", "base64"),
        ("data:image/png;base64,Größe", "base64"),
        ("data:image/png;base64,\ud800", "base64"),
        ("data:image/png;base64,", "can't decode"),
        ("data:image/png,plain", "can't decode"),
        (data_url(b"\x89PNG\r\n\x1a\n"), "can't decode"),
        (data_url(picture()[:-900]), "can't decode"),
        (data_url(picture(kind="JPEG")[:-300]), "can't decode"),
        (data_url(picture(kind="WEBP")[:-300]), "can't decode"),
        (data_url(picture(kind="TIFF"), "image/tiff"), "can't decode"),
        (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "can't decode"),
        (data_url(png_header(0, 7)), ""),
        (data_url(picture(2010, 10)), "200"),
    ],
)
async def test_bad_inline_images(vision: VisionText, url: str, why: str) -> None:
    assert why in await refused(url, vision, MediaConfig())


@pytest.mark.parametrize(
    "host", ["https://a.b", "a.b:443", "*.a.b", ".a.b", "a.b/c", "[::1]", "bücher.de", "", "a b"]
)
def test_hosts_that_would_let_nothing_in_are_refused(host: str) -> None:
    MediaConfig(allowed_media_domains=("*", "a.b", "A.b.", "xn--bcher-kva.de", "::1", "10.0.0.1"))
    with pytest.raises(ConfigError, match=r"--allowed-media-domains: .* is no host, like"):
        MediaConfig(allowed_media_domains=("a.b", host))


@pytest.mark.parametrize("size", [(10_000, 10_000), (60_000, 60_000), (1 << 30, 1)])
async def test_100_megapixels_are_refused_by_their_header(
    vision: VisionText, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    def load_pixels(self: Any) -> Any:
        raise AssertionError("pixels were decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load_pixels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        why = await refused(data_url(png_header(*size)), vision, MediaConfig())
    assert "pixels" in why
    assert "decoded" not in why

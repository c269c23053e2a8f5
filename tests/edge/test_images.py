"""Images that clients bring: inline and over a real network; what is wrong is a clear 400."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import struct
import time
import warnings
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from PIL import Image

from kvbaton.edge import images as module
from kvbaton.edge.app import listen, make_app
from kvbaton.edge.config import EdgeConfig, Frontend
from kvbaton.edge.images import load_images
from kvbaton.edge.media import MediaConfig
from kvbaton.edge.source import ModelFacts
from kvbaton.errors import RequestError
from kvbaton.text.chat import ImageUrl
from kvbaton.text.tokenizer import Tokenizer
from kvbaton.text.vision import VisionText
from kvbaton.wire import Item
from tests.edge.conftest import Endpoint
from tests.serving_support import ScriptedSource

CHAT = "/v1/chat/completions"
HERE = MediaConfig(allowed_media_domains=("127.0.0.1", "localhost"), allow_private_media=True)
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


def inline(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def folder(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(family=request.param)


@pytest.fixture(scope="module")
def vision(checkpoint: Callable[..., Path]) -> VisionText:
    found = VisionText.load(checkpoint(family="qwen2_5_vl"))
    assert found is not None
    return found


# --- over the network ---


class Web:
    """A server of good and bad images, and what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.sent = 0
        self.port = 0
        self.target = ""
        self.stalled = asyncio.Event()

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}/{path}"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        what = request.match_info["what"]
        self.asked.append(what)
        handler: Callable[[web.Request], Any] = getattr(self, f"_{what}")
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _good(self, request: web.Request) -> web.Response:
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(body=picture(), content_type="image/png")

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(text="<html>", content_type="text/html")

    async def _gone(self, request: web.Request) -> web.Response:
        return web.Response(status=410, body=picture(), content_type="image/png")

    async def _empty(self, request: web.Request) -> web.Response:
        return web.Response(body=b"", content_type="image/png")

    async def _half(self, request: web.Request) -> web.Response:
        return web.Response(body=picture()[:-900], content_type="image/png")

    async def _zipped(self, request: web.Request) -> web.Response:
        headers = {"Content-Encoding": "gzip", "Content-Type": "image/png"}
        return web.Response(body=zlib.compress(picture()), headers=headers)

    async def _endless(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "image/png"})
        await response.prepare(request)
        await response.write(picture())
        while True:
            self.sent += 1 << 16
            await response.write(bytes(1 << 16))

    async def _slow(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "image/png"})
        await response.prepare(request)
        try:
            while True:
                await response.write(b"\x89")
                await asyncio.sleep(0.01)
        finally:
            self.stalled.set()

    async def _away(self, request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": self.target})

    async def _nowhere(self, request: web.Request) -> web.Response:
        return web.Response(status=302)

    async def _near(self, request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": "good"})


@pytest.fixture
async def site() -> AsyncIterator[Web]:
    site, app = Web(), web.Application()
    app.router.add_get("/{what}", site.answer)
    runner, site.port = await listen(app, "127.0.0.1", 0, grace_s=0.1)
    yield site
    await runner.cleanup()


async def load(url: str, vision: VisionText, config: MediaConfig = HERE) -> Item:
    (item,) = await load_images([ImageUrl(url, "here")], vision, config)
    return item


async def refused(url: str, vision: VisionText, config: MediaConfig = HERE) -> str:
    """What is said of an image that is not taken."""
    with pytest.raises(RequestError) as caught:
        await load(url, vision, config)
    assert (caught.value.status, caught.value.param) == (400, "here")
    assert len(caught.value.message) < 400
    return caught.value.message


@pytest.mark.parametrize("path", ["good", "near"])
async def test_an_image_is_fetched(site: Web, vision: VisionText, path: str) -> None:
    item = await load(site.url(path), vision)
    assert (item.data, item.digest) == (picture(), vision.digest(picture()))
    assert (item.grid, item.length) == vision.measure(40, 32)
    assert (await load(site.url(path, "LOCALHOST"), vision)).data == picture()


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("page", "text/html"),
        ("gone", "410"),
        ("empty", "can't decode"),
        ("half", "can't decode"),
        ("zipped", "compressed"),
        ("nowhere", "redirects too often"),
    ],
)
async def test_what_is_no_image_is_told(site: Web, vision: VisionText, path: str, why: str) -> None:
    assert why in await refused(site.url(path), vision)


async def test_redirects_are_few(site: Web, vision: VisionText) -> None:
    site.target = site.url("away")
    assert "redirects too often" in await refused(site.url("away"), vision)
    assert site.asked == ["away"] * (1 + module.MAX_REDIRECTS)


async def test_an_image_that_never_ends_is_cut_off(site: Web, vision: VisionText) -> None:
    config = MediaConfig(
        allowed_media_domains=("127.0.0.1",), allow_private_media=True, max_image_bytes=1 << 20
    )
    assert "too large" in await refused(site.url("endless"), vision, config)
    assert site.sent < 32 << 20, "what is beyond the limit is not taken off the wire"


async def test_an_image_that_never_comes_is_given_up(site: Web, vision: VisionText) -> None:
    config = MediaConfig(
        allowed_media_domains=("127.0.0.1",), allow_private_media=True, image_timeout_s=0.2
    )
    start = time.monotonic()
    assert "within 0.2 s" in await refused(site.url("slow"), vision, config)
    assert time.monotonic() - start < 5
    await asyncio.wait_for(site.stalled.wait(), 5)  # the connection is closed, too


async def test_nothing_listens(vision: VisionText, unused_tcp_port: int) -> None:
    assert "can't fetch" in await refused(f"http://127.0.0.1:{unused_tcp_port}/", vision)


async def test_one_bad_image_ends_the_others(site: Web, vision: VisionText) -> None:
    images = [ImageUrl(site.url("slow"), "a"), ImageUrl(site.url("page"), "b")]
    with pytest.raises(RequestError) as caught:
        await asyncio.wait_for(load_images(images, vision, HERE), 5)
    assert caught.value.param == "b"
    if "slow" in site.asked:
        await asyncio.wait_for(site.stalled.wait(), 5)


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
    "[64:ff9b:1::1]",
    "[2002:7f00:1::]",
    "[fe80::1]",
    "[fe80::1%25lo]",
    "[fec0::1]",
    "[fd00::1]",
    "[ff02::1]",
]


@pytest.fixture
def no_dialling(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Ends attempts to connect, and keeps what was to be dialled."""
    dialled: list[Any] = []

    async def connect(addr_infos: Any, **options: Any) -> Any:
        dialled.extend(info[4] for info in addr_infos)
        raise OSError("not in this test")

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


async def test_names_of_private_addresses_are_not_dialled(
    vision: VisionText, no_dialling: list[Any]
) -> None:
    assert "no public address" in await refused("http://localhost/x.png", vision, ANYWHERE)
    assert no_dialling == []


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

    monkeypatch.setattr("kvbaton.edge.images.ThreadedResolver.resolve", resolve)
    await refused("http://turncoat.example/x.png", vision, ANYWHERE)
    assert [address[0] for address in no_dialling] == ["8.8.8.8"]
    assert "no public address" in await refused("http://turncoat.example/", vision, ANYWHERE)


@pytest.mark.parametrize("host", ["127.0.0.2", "169.254.169.254", "[::1]", "[::ffff:127.0.0.1]"])
async def test_redirects_are_checked_again(
    site: Web, vision: VisionText, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    private = module._is_private
    monkeypatch.setattr(module, "_is_private", lambda h: h != "127.0.0.1" and private(h))
    site.target = f"http://{host}:{site.port}/good"
    assert "not a public address" in await refused(site.url("away"), vision, ANYWHERE)
    assert site.asked == ["away"]


@pytest.mark.parametrize(
    "target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "data:image/png;base64,AAAA", "http://"]
)
async def test_redirects_lead_to_http_only(site: Web, vision: VisionText, target: str) -> None:
    site.target = target
    await refused(site.url("away"), vision)
    assert site.asked == ["away"]


@pytest.mark.parametrize(
    ("domains", "host", "ok"),
    [
        ((), "a.example", False),
        (("a.example",), "a.example", True),
        (("A.Example.",), "a.example", True),
        (("a.example",), "A.EXAMPLE.", True),
        (("a.example",), "b.a.example", True),
        (("a.example",), "ba.example", False),
        (("a.example",), "a.example.evil.example", False),
        (("a.example",), "a.example@evil.example", False),
        (("a.example",), "evil.example/a.example", False),
        (("*",), "evil.example", True),
    ],
)
async def test_only_allowed_hosts_are_visited(
    vision: VisionText, monkeypatch: pytest.MonkeyPatch, domains: Any, host: str, ok: bool
) -> None:
    async def resolve(*_: Any) -> Any:
        raise OSError("would be visited")

    monkeypatch.setattr("kvbaton.edge.images.ThreadedResolver.resolve", resolve)
    config = MediaConfig(allowed_media_domains=domains)
    why = await refused(f"http://{host}/x.png", vision, config)
    assert ("would be visited" in why) == ok
    assert ("--allowed-media-domains" in why) != ok


@pytest.mark.parametrize(
    "url",
    ["", "x", "file:///etc/passwd", "http:", "http://[::1", "http://a:99999999/", "http://\0"],
)
async def test_urls_that_are_none(vision: VisionText, url: str) -> None:
    await refused(url, vision)


# --- inline ---


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
async def test_inline_images(vision: VisionText, kind: str) -> None:
    data = picture(48, 24, kind)
    item = await load(inline(data, f"image/{kind.lower()}"), vision, MediaConfig())
    assert item == Item(start=0, length=18, digest=vision.digest(data), grid=(1, 6, 12), data=data)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("data:text/plain;base64,AAAA", "image type"),
        ("data:;base64,AAAA", "image type"),
        ("data:image/png;base64", "image type"),
        ("data:image/png;base64,A", "base64"),
        ("data:image/png;base64,A A A A", "base64"),
        ("data:image/png;base64,Größe", "base64"),
        ("data:image/png;base64,", "can't decode"),
        ("data:image/png,plain", "can't decode"),
        (inline(b"\x89PNG\r\n\x1a\n"), "can't decode"),
        (inline(picture()[:-900]), "can't decode"),
        (inline(picture(kind="JPEG")[:-300]), "can't decode"),
        (inline(picture(kind="WEBP")[:-300]), "can't decode"),
        (inline(picture(kind="TIFF"), "image/tiff"), "can't decode"),
        (inline(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "can't decode"),
        (inline(png_header(0, 7)), ""),
        (inline(picture(2010, 10)), "200"),
    ],
)
async def test_bad_inline_images(vision: VisionText, url: str, why: str) -> None:
    assert why in await refused(url, vision, MediaConfig())


@pytest.mark.parametrize("size", [(10_000, 10_000), (60_000, 60_000), (1 << 30, 1)])
async def test_100_megapixels_are_refused_by_their_header(
    vision: VisionText, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    def load_pixels(self: Any) -> Any:
        raise AssertionError("pixels were decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load_pixels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        why = await refused(inline(png_header(*size)), vision, MediaConfig())
    assert "pixels" in why
    assert "decoded" not in why


async def test_limits_of_a_request(vision: VisionText) -> None:
    url = inline(picture())
    several = [ImageUrl(url, str(i)) for i in range(3)]
    assert len(await load_images(several, vision, MediaConfig(max_images=3))) == 3
    with pytest.raises(RequestError, match="at most 2 images"):
        await load_images(several, vision, MediaConfig(max_images=2))
    room = 3 * len(picture())
    assert len(await load_images(several, vision, MediaConfig(max_image_bytes=room))) == 3
    with pytest.raises(RequestError, match="too large"):
        await load_images(several, vision, MediaConfig(max_image_bytes=room - 1))


# --- in conversations ---


@pytest.fixture
async def endpoint(folder: Path) -> AsyncIterator[Endpoint]:
    """Over a model that takes images."""
    tokenizer = Tokenizer.load(folder)
    source = ScriptedSource(tokenizer, "seen")
    frontend = Frontend(
        source=source,
        tokenizer=tokenizer,
        config=EdgeConfig(model_name="tiny"),
        facts=lambda: ModelFacts(max_model_len=512, vocab_size=384),
    )
    runner, port = await listen(make_app(frontend), "127.0.0.1", 0, grace_s=1.0)
    endpoint = Endpoint(source, frontend, runner, port)
    yield endpoint
    await endpoint.session.close()
    await runner.cleanup()


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


async def test_images_stand_where_they_were_put(endpoint: Endpoint) -> None:
    first, second = picture(40, 32), picture(17, 90, "JPEG")
    messages = [
        {"role": "user", "content": [text("a"), part(inline(first)), part(inline(second))]},
        {"role": "assistant", "content": "yes"},
        {"role": "tool", "content": [part(inline(first)), "and"], "tool_call_id": "1"},
        {"role": "user", "content": "so?"},
    ]
    body = {"messages": messages, "temperature": 0}
    status, answer = await endpoint.post(CHAT, body)
    assert status == 200, answer
    (request,) = endpoint.source.requests
    tokenizer, vision = endpoint.frontend.tokenizer, endpoint.frontend.tokenizer.vision
    assert vision is not None
    assert [item.data for item in request.items] == [first, second, first]
    assert request.items[0].digest == request.items[2].digest != request.items[1].digest
    assert request.items[1].grid == vision.measure(17, 90)[0]
    shown = tokenizer.decode(list(request.token_ids), skip_special_tokens=False)
    pads = ["<|image_pad|>" * item.length for item in request.items]
    seen = [f"<|vision_start|>{pad}<|vision_end|>" for pad in pads]
    assert shown == (
        f"<|begin|><|turn|>user\na{seen[0]}{seen[1]}<|turn|>\n<|turn|>assistant\nyes<|turn|>\n"
        f"<|turn|>tool\n{seen[2]}and<|turn|>\n<|turn|>user\nso?<|turn|>\n<|turn|>assistant\n"
    )
    for item in request.items:
        covered = request.token_ids[item.start : item.start + item.length]
        assert set(covered) == {vision.image_token_id}
        assert request.token_ids[item.start - 1] != vision.image_token_id
    assert answer["usage"]["prompt_tokens"] == len(request.token_ids)
    status, answer = await endpoint.post("/tokenize", {"messages": messages})
    assert (status, answer["tokens"]) == (200, list(request.token_ids))


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([text("a"), {"type": "image_url"}], "messages[0].content[1].image_url"),
        ([{"type": "image_url", "image_url": {"url": 7}}], "messages[0].content[0].image_url"),
        ([{"type": "image_url", "image_url": {"url": ""}}], "messages[0].content[0].image_url"),
        ([{"type": "video_url", "video_url": {"url": "x"}}], "messages[0].content[0]"),
        ([text("a"), part("ftp://x/y")], "messages[0].content[1].image_url"),
        ([part("http://127.0.0.1/x.png")], "messages[0].content[0].image_url"),
        ([part(inline(picture())), part(inline(b"x"))], "messages[0].content[1].image_url"),
        ([part(inline(picture()))] * 65, "messages"),
        ("<|image_pad|>", "messages"),
        ([text("<|image_pad|>"), part(inline(picture()))], "messages"),
        ([part(inline(picture(160, 160)))] * 8, "messages"),
    ],
)
async def test_what_is_wrong_is_named(endpoint: Endpoint, content: Any, param: str) -> None:
    status, answer = await endpoint.post(CHAT, {"messages": [{"role": "user", "content": content}]})
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert endpoint.source.requests == []


async def test_a_model_that_reads_only_says_so(serve: Any) -> None:
    endpoint = await serve()
    body = {"messages": [{"role": "user", "content": [text("a"), part(inline(picture()))]}]}
    for path in (CHAT, "/tokenize"):
        status, answer = await endpoint.post(path, body)
        assert (status, answer["error"]["param"]) == (400, "messages[0].content[1]"), answer
        assert "text only" in answer["error"]["message"]

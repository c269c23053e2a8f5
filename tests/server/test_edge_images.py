"""Images in chats: what the source is asked, what is fetched, and what is refused with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvbaton.errors import RequestError
from kvbaton.server import images
from kvbaton.server.config import MediaConfig
from kvbaton.server.images import load_images
from kvbaton.text.chat import ImageUrl
from kvbaton.text.tokenizer import Tokenizer
from kvbaton.text.vision import VisionText
from tests.support.chats import data_url, picture
from tests.support.waiting import PATIENCE_S

CHAT = "/v1/chat/completions"
OPEN = MediaConfig(
    allowed_media_domains=("127.0.0.1", "localhost"), allow_private_media=True, image_timeout_s=1.0
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


def say(*content: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": c} if isinstance(c, str) else c for c in content]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 4}


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(family="qwen2_5_vl")


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture
def vision(seeing: Tokenizer) -> VisionText:
    assert seeing.vision is not None
    return seeing.vision


@pytest.fixture
async def endpoint(serve: Any, seeing: Tokenizer) -> Any:
    """One of a model that sees; it fetches nothing."""
    made = await serve(None, tokenizer=seeing)
    return made


Start = Callable[[Handler], Awaitable[str]]


@pytest.fixture
async def site() -> AsyncIterator[Start]:
    """Starts HTTP servers of one handler; returns their addresses."""
    runners: list[web.AppRunner] = []

    async def start(handler: Handler) -> str:
        app = web.Application()
        app.router.add_get("/{path:.*}", handler)
        runners.append(web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runners[-1].addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


def answer(data: bytes, kind: str = "image/png", **headers: str) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=data, content_type=kind, headers=headers)

    return handler


async def load(url: str, vision: VisionText, config: MediaConfig = OPEN) -> bytes:
    (item,) = await load_images([ImageUrl(url, "here")], vision, config)
    return item.data


async def refused(url: str, vision: VisionText, config: MediaConfig = OPEN) -> str:
    with pytest.raises(RequestError) as caught:
        await load(url, vision, config)
    assert (caught.value.status, caught.value.param) == (400, "here")
    return caught.value.message


# --- the endpoint ---


async def test_the_source_gets_tokens_and_items(endpoint: Any, vision: VisionText) -> None:
    first, second = picture(1), picture(2, 17, 90)
    body = say("a ", part(data_url(first)), " b ", part(data_url(second)), part(data_url(first)))
    status, whole = await endpoint.post(CHAT, body)
    assert status == 200, whole
    (request,) = endpoint.source.requests
    assert [item.data for item in request.items] == [first, second, first]
    vision.check(request.token_ids, request.items)
    pads = sum(token == vision.image_token_id for token in request.token_ids)
    assert pads == sum(item.length for item in request.items)
    assert whole["usage"]["prompt_tokens"] == len(request.token_ids)
    assert request.items[0].digest == request.items[2].digest != request.items[1].digest


async def test_images_across_turns(endpoint: Any) -> None:
    turns = [
        {"role": "user", "content": [part(data_url(picture(1)))]},
        {"role": "assistant", "content": "Noise."},
        {
            "role": "user",
            "content": [part(data_url(picture(2))), {"type": "text", "text": "And this?"}],
        },
    ]
    status, _ = await endpoint.post(CHAT, {"messages": turns, "max_tokens": 2})
    assert status == 200
    (request,) = endpoint.source.requests
    assert [item.data for item in request.items] == [picture(1), picture(2)]


async def test_prompts_are_those_of_transformers(endpoint: Any, folder: Path) -> None:
    from transformers import AutoTokenizer

    content = [{"type": "text", "text": "a "}, {"type": "image"}, {"type": "text", "text": "b"}]
    reference: Any = AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
    )
    body = say("a ", part(data_url(picture(0))), "b")
    await endpoint.post(CHAT, body)
    (request,) = endpoint.source.requests
    (item,) = request.items
    ids = list(request.token_ids)
    ids[item.start : item.start + item.length] = [ids[item.start]]
    assert ids == expected
    status, tokens = await endpoint.post("/tokenize", {"messages": body["messages"]})
    assert (status, tokens["tokens"]) == (200, list(request.token_ids))


async def test_a_text_model_says_that_it_cant_see(serve: Any) -> None:
    endpoint = await serve()
    status, body = await endpoint.post(CHAT, say("what? ", part(data_url(picture(0)))))
    assert status == 400
    assert "text only" in body["error"]["message"]
    assert body["error"]["param"] == "messages[0].content[1]"
    assert not endpoint.source.requests


BAD: list[tuple[Any, str, str]] = [
    (part(data_url(picture(0)[:200])), "can't decode", ".image_url"),
    (part(data_url(b"hello", "image/png")), "can't decode", ".image_url"),
    (part(data_url(picture(0), "text/plain")), "image type", ".image_url"),
    (part("data:image/png;base64,!!!"), "base64", ".image_url"),
    (part("data:image/png"), "data:image", ".image_url"),
    (part("file:///etc/passwd"), "must begin with", ".image_url"),
    (part("/etc/passwd"), "must begin with", ".image_url"),
    (part("http://example.com/a.png"), "--allowed-media-domains", ".image_url"),
    (part(""), "needs a url", ".image_url"),
    (part(7), "needs a url", ".image_url"),
    ({"type": "image_url"}, "needs a url", ".image_url"),
    ({"type": "video_url", "video_url": {"url": "data:"}}, "only parts of type", ""),
    ({"type": "input_audio"}, "only parts of type", ""),
]


@pytest.mark.parametrize(("bad", "message", "field"), BAD)
async def test_what_is_wrong_is_named(endpoint: Any, bad: Any, message: str, field: str) -> None:
    status, body = await endpoint.post(CHAT, say("x", part(data_url(picture(0))), bad))
    assert status == 400, body
    assert message in body["error"]["message"]
    assert body["error"]["param"] == f"messages[0].content[2]{field}"
    assert not endpoint.source.requests
    assert (await endpoint.post(CHAT, say("x", part(data_url(picture(0))))))[0] == 200, "it lives"


async def test_a_placeholder_in_a_text_is_refused(endpoint: Any) -> None:
    body = say("<|image_pad|>", part(data_url(picture(0))))
    status, answer = await endpoint.post(CHAT, body)
    assert status == 400
    assert "placeholder" in answer["error"]["message"]


async def test_too_many_images_and_too_many_bytes(vision: VisionText) -> None:
    urls = [ImageUrl(data_url(picture(seed)), "here") for seed in range(3)]
    assert len(await load_images(urls, vision, OPEN)) == 3
    with pytest.raises(RequestError, match="at most 2 images"):
        await load_images(urls, vision, replace(OPEN, max_images=2))
    most = sum(len(picture(seed)) for seed in range(3))
    await load_images(urls, vision, replace(OPEN, max_image_bytes=most))
    assert all(vision.recent.get(url.url) for url in urls), "known ones count, too"
    with pytest.raises(RequestError, match=f"too large: they may have {most - 1} bytes together"):
        await load_images(urls, vision, replace(OPEN, max_image_bytes=most - 1))


async def test_a_known_inline_image_is_neither_decoded_nor_hashed_again(
    endpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, seen = picture(7, 56, 84), list[bytes]()
    digest = VisionText.digest

    def hashed(self: VisionText, data: bytes) -> bytes:
        seen.append(data)
        return digest(self, data)

    monkeypatch.setattr(VisionText, "digest", hashed)
    for text in ("one", "another", "a third"):
        status, _ = await endpoint.post(CHAT, say(text, part(data_url(data))))
        assert status == 200
    assert seen == [data]
    first, *others = (request.items[0] for request in endpoint.source.requests)
    assert all(item.digest == first.digest and item.grid == first.grid for item in others)
    assert all(item.data is first.data for item in others), "it lies in memory once"
    # One letter more or less, and it is another text, whatever it has in common with this one.
    for url in (data_url(data, "image/jpeg"), data_url(data + b"\0")):
        await endpoint.post(CHAT, say("one", part(url)))
    assert seen == [data, data, data + b"\0"]


async def test_an_image_that_is_refused_is_not_known(vision: VisionText) -> None:
    url = data_url(picture(11)[:-40])
    for _ in range(2):
        assert "can't decode" in await refused(url, vision)
    assert vision.recent.get(url) is None


async def test_a_prompt_that_is_too_long_with_its_images(endpoint: Any) -> None:
    body = say(*(part(data_url(picture(seed, 80, 80))) for seed in range(8)))
    status, answer = await endpoint.post(CHAT, body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


# --- fetching ---


async def test_a_prompt_with_images_is_not_truncated(endpoint: Any) -> None:
    body = say(part(data_url(picture(40, 40)))) | {"truncate_prompt_tokens": -1}
    status, answer = await endpoint.post(CHAT, body)
    assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")


async def test_an_image_is_fetched(site: Start, vision: VisionText) -> None:
    url = await site(answer(picture(0)))
    assert await load(f"{url}/a.png", vision) == picture(0)
    named = url.replace("127.0.0.1", "localhost")
    assert await load(named, vision) == picture(0)


async def test_redirects_are_followed_a_little(site: Start, vision: VisionText) -> None:
    async def redirect(request: web.Request) -> web.Response:
        left = int(request.match_info["path"])
        if not left:
            return web.Response(body=picture(0), content_type="image/png")
        raise web.HTTPFound(f"/{left - 1}")

    url = await site(redirect)
    assert await load(f"{url}/3", vision) == picture(0)
    assert "redirects too often" in await refused(f"{url}/4", vision)


@pytest.mark.parametrize(
    "target", ["http://evil.test/", "file:///etc/passwd", "http://10.0.0.1/", "gopher://localhost/"]
)
async def test_redirects_lead_nowhere_else(site: Start, vision: VisionText, target: str) -> None:
    async def redirect(request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": target})

    message = await refused(await site(redirect), vision)
    assert "may not be fetched" in message or "no http" in message


@pytest.mark.parametrize(
    ("domain", "host", "allowed"),
    [
        ("example.com", "example.com", True),
        ("example.com", "img.example.com", True),
        ("Example.com.", "example.com", True),
        ("example.com", "badexample.com", False),
        ("example.com", "example.com.evil.test", False),
        ("img.example.com", "example.com", False),
        ("*", "anything.test", True),
    ],
)
def test_domains(domain: str, host: str, allowed: bool) -> None:
    assert images._covers(domain, host) is allowed


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (answer(picture(0), "text/html"), "instead of an image"),
        (answer(picture(0)[:300]), "can't decode"),
        (answer(picture(0), **{"Content-Encoding": "gzip"}), "compressed"),
    ],
)
async def test_wrong_answers(
    site: Start, vision: VisionText, handler: Handler, message: str
) -> None:
    assert message in await refused(await site(handler), vision)


async def test_no_answer_and_error_answers(site: Start, vision: VisionText) -> None:
    async def missing(request: web.Request) -> web.Response:
        raise web.HTTPNotFound

    assert "answers 404" in await refused(await site(missing), vision)
    assert "can't fetch" in await refused("http://127.0.0.1:1/x.png", vision)


def endless(pause_s: float) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "image/png"})
        await response.prepare(request)
        while True:
            await response.write(picture(0)[:1000])
            await asyncio.sleep(pause_s)

    return handler


async def test_an_image_that_never_ends(site: Start, vision: VisionText) -> None:
    assert "within 1 s" in await refused(await site(endless(0.05)), vision)
    small = replace(OPEN, max_image_bytes=100_000, image_timeout_s=20.0)
    assert "too large" in await refused(await site(endless(0.0)), vision, small)


async def test_one_that_fails_ends_the_others(site: Start, vision: VisionText) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def silent(request: web.Request) -> web.Response:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return web.Response()

    async def missing(request: web.Request) -> web.Response:
        await began.wait()
        raise web.HTTPNotFound

    urls = [ImageUrl(await site(silent), "a"), ImageUrl(await site(missing), "b")]
    with pytest.raises(RequestError) as caught:
        await load_images(urls, vision, replace(OPEN, image_timeout_s=60.0))
    assert caught.value.param == "b"
    await asyncio.wait_for(ended.wait(), PATIENCE_S)

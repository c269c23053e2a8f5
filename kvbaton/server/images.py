"""Loads the images of requests: inline ones, and those at URLs that this process may fetch.

A URL is fetched only from hosts that the operator allows, never from private networks unless that
is allowed too, within a time limit and a size limit. The addresses to which a name resolves are
checked as part of connecting, so the name can't resolve to another address in between.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import errno
import ipaddress
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from kvbaton.errors import RequestError
from kvbaton.messages.engine import Item
from kvbaton.server.config import MediaConfig
from kvbaton.text.chat import ImageUrl
from kvbaton.text.vision import DECODERS, VisionText

MAX_REDIRECTS = 3
CHUNK = 1 << 16
NAT64 = ipaddress.ip_network("64:ff9b::/96")
SHOWN = 100
"""Maximum number of characters of a URL in an error."""
_decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="image")
"""Threads for decoding only, so that waiting images do not block other work."""


async def load_images(
    images: Sequence[ImageUrl], vision: VisionText, config: MediaConfig
) -> list[Item]:
    """Load and check images; the returned items all start at 0.

    Raises:
        RequestError: An image is wrong, may not be fetched, or does not arrive; the error names it.
    """
    if len(images) > config.max_images:
        raise RequestError(
            f"a request may have at most {config.max_images} images", param="messages"
        )
    room = _Room(config.max_image_bytes)

    async def load(image: ImageUrl) -> Item:
        try:
            if (item := vision.recent.get(image.url)) is not None:
                room.take(len(item.data))
                return item
            data = await _data(image.url, config, room)
            item = await asyncio.get_running_loop().run_in_executor(_decoders, vision.item, data)
        except RequestError as error:
            raise RequestError(error.message, param=image.where, code="invalid_image") from error
        if _is_inline(image.url):  # a URL may have another image next time
            vision.recent.put(image.url, item)
        return item

    if len(images) < 2:  # a task costs as much as a remembered image
        return [await load(image) for image in images]
    tasks = [asyncio.ensure_future(load(image)) for image in images]
    try:
        return list(await asyncio.gather(*tasks))
    finally:  # if one fails, the others end
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class _Room:
    """Room for the images of a request.

    Attributes:
        size: Bytes that all of them may have together.
        used: Bytes that they have so far.
    """

    size: int
    used: int = 0

    def take(self, count: int) -> None:
        """Use up bytes; raise `RequestError` if there are not enough left."""
        self.used += count
        if self.used > self.size:
            raise RequestError(
                "the images of this request are too large: they may have "
                f"{self.size} bytes together, before base64"
            )


async def _data(url: str, config: MediaConfig, room: _Room) -> bytes:
    if _is_inline(url):
        return _inline(url, room)
    if not url.lower().startswith(("http:", "https:")):
        raise RequestError("an image's url must begin with data:, http: or https:")
    try:
        async with asyncio.timeout(config.image_timeout_s):
            return await _fetch(URL(url), config, room)
    except TimeoutError:
        raise RequestError(
            f"{url[:SHOWN]} did not send the image within {config.image_timeout_s:g} s"
        ) from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise RequestError(f"can't fetch {url[:SHOWN]}: {error}") from error


def _is_inline(url: str) -> bool:
    return url[: len("data:")].lower() == "data:"


def _inline(url: str, room: _Room) -> bytes:
    """The bytes of a ``data:`` URL (RFC 2397)."""
    head, comma, body = url[len("data:") :].partition(",")
    kind, *parameters = head.split(";")
    if not comma or not _is_image(kind):
        raise RequestError("a data: url must be data:image/...;base64,... with an image type")
    try:
        if any(parameter.strip().lower() == "base64" for parameter in parameters):
            try:
                data = binascii.a2b_base64(body, strict_mode=True)
            except ValueError:  # broken into lines, as many encoders do, or percent-encoded
                written = unquote_to_bytes(body).translate(None, b"\r\n")
                data = base64.b64decode(written, validate=True)
        else:
            data = unquote_to_bytes(body)
    except ValueError as error:  # the text may also not be valid Unicode
        raise RequestError(f"a data: url must hold base64: {error}") from error
    room.take(len(data))
    return data


def _is_image(content_type: str) -> bool:
    return content_type.strip().lower().startswith("image/")


# --- over the network ---


async def _fetch(url: URL, config: MediaConfig, room: _Room) -> bytes:
    """Fetch an image, following redirects to allowed hosts."""
    connector = aiohttp.TCPConnector(resolver=_Resolver(config.allow_private_media))
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        for _ in range(1 + MAX_REDIRECTS):
            host = (url.raw_host or "").rstrip(".")  # normalised, as for the connection
            if url.scheme not in ("http", "https") or not host:
                raise RequestError(f"{str(url)[:SHOWN]} is no http: or https: address")
            if not any(_covers(domain, host) for domain in config.allowed_media_domains):
                raise RequestError(
                    f"images may not be fetched from {host[:SHOWN]}; --allowed-media-domains names "
                    "the hosts that they may be fetched from, and data: urls are always taken"
                )
            if not config.allow_private_media and _is_private(host):  # names: see `_Resolver`
                raise RequestError(f"{host[:SHOWN]} is not a public address")
            async with session.get(
                url, allow_redirects=False, headers={"Accept-Encoding": "identity"}
            ) as response:
                if response.status not in (301, 302, 303, 307, 308):
                    return await _read(response, room)
                url = url.join(URL(response.headers.get("Location", "")))
    raise RequestError(f"{str(url)[:SHOWN]} redirects too often")


def _covers(domain: str, host: str) -> bool:
    domain = domain.lower().rstrip(".")
    return domain == "*" or host == domain or host.endswith(f".{domain}")


def _is_private(host: str) -> bool:
    """Whether a host is an IP address outside the public internet; False for names."""
    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    try:
        if ":" in host:
            address = ipaddress.IPv6Address(host.partition("%")[0])
        else:  # also accepts the old short forms (127.1)
            address = ipaddress.IPv4Address(socket.inet_aton(host))
    except (OSError, ValueError):
        return False
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if inner is None and address in NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return _is_private(str(inner))
        if address.is_site_local:
            return True
    return not address.is_global or address.is_multicast or address.is_reserved


class _Resolver(AbstractResolver):
    """Resolves names to addresses, leaving out those to which connections are not allowed."""

    def __init__(self, allow_private: bool) -> None:
        self._allow_private = allow_private
        self._system = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Resolve a name; raise `OSError` if no address is allowed."""
        found = await self._system.resolve(host, port, family)
        allowed = [a for a in found if self._allow_private or not _is_private(a["host"])]
        if not allowed:
            raise OSError(errno.EACCES, f"{host} has no public address")
        return allowed

    async def close(self) -> None:
        """Do nothing: there is no state."""


async def _read(response: aiohttp.ClientResponse, room: _Room) -> bytes:
    if response.status != 200:
        raise RequestError(f"{response.host} answers {response.status} instead of an image")
    kind = response.headers.get("Content-Type", "")
    if not _is_image(kind):
        raise RequestError(f"{response.host} sends {kind[:SHOWN]!r} instead of an image")
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise RequestError(f"{response.host} sends the image compressed once more")
    chunks = []
    async for chunk in response.content.iter_chunked(CHUNK):
        room.take(len(chunk))
        chunks.append(chunk)
    return b"".join(chunks)

"""A client of an endpoint: streams answers, and tells who gave them and what crossed for it.

`ask` asks one prompt and gives an account of how it was served; `kvbaton chat` asks many.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from kvbaton.cluster.config import ClusterConfig
from kvbaton.messages.openai import ErrorBody
from kvbaton.server.sse import DONE, read_events

SENT_BYTES = re.compile(r"^kvbaton_transfer_sent_bytes_total (\S+)", re.MULTILINE)
RECEIVED_TOKENS = re.compile(
    r'^kvbaton_prompt_tokens_total\{source="transferred"\} (\S+)', re.MULTILINE
)
SERVED = re.compile(
    r'^kvbaton_router_node_requests_total\{node="([^"]*)",part="([^"]*)"\} (\S+)', re.MULTILINE
)
PARTS = {"source": "prefill", "target": "decode", "encoder": "encode"}
PUBLISH_S = 2.0
"""Nodes publish what they count a few times a second."""
LOOK = aiohttp.ClientTimeout(total=5.0)
FAILURES = (aiohttp.ClientError, OSError, TimeoutError, ValueError)
"""What goes wrong with an answer; the text is for the user."""


@dataclass
class Answer:
    """What came, and when.

    Attributes:
        text: of the first choice, without its reasoning.
        usage: as the endpoint counts it.
        first_s: seconds to the first text or reasoning; None if there was neither.
        seconds: to the end.
    """

    text: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    first_s: float | None = None
    seconds: float = 0.0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found in a cache."""
        details = self.usage.get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)

    @property
    def tokens_per_s(self) -> float:
        """Of what followed the first text."""
        rest = self.seconds - (self.first_s or 0.0)
        return (self.usage.get("completion_tokens", 1) - 1) / rest if rest > 0 else 0.0


async def stream_answer(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], show: Callable[[str], None]
) -> Answer:
    """Ask for a completion, or a chat if the body has messages; shows what comes as it comes.

    An empty line stands between reasoning and the answer.

    Raises:
        ValueError: the endpoint refuses, or fails before the end.
        aiohttp.ClientError: it can't be reached.
    """
    began, answer, reasons = time.monotonic(), Answer(), False
    path = "chat/completions" if "messages" in body else "completions"
    more = {"stream": True, "stream_options": {"include_usage": True}}
    async with session.post(f"{url}/v1/{path}", json={**body, **more}) as response:
        if response.status != 200:
            told = msgspec.json.decode(await response.read(), type=ErrorBody)
            raise ValueError(told.error.message)
        async for data in read_events(response.content):
            if data == DONE:
                break
            chunk: dict[str, Any] = msgspec.json.decode(data)
            if "error" in chunk:
                raise ValueError(chunk["error"]["message"])
            answer.usage = chunk.get("usage") or answer.usage
            for choice in chunk.get("choices") or ():
                delta = choice.get("delta") or {}
                thought = delta.get("reasoning_content") or ""
                text = choice.get("text") or delta.get("content") or ""
                if (thought or text) and answer.first_s is None:
                    answer.first_s = time.monotonic() - began
                reasons |= bool(thought)
                if text and reasons and not answer.text:
                    thought += "\n\n"
                answer.text += text
                show(thought + text)
    answer.seconds = time.monotonic() - began
    return answer


@dataclass(frozen=True)
class Served:
    """What a cluster has counted.

    Attributes:
        parts: requests by (part, node).
        sent_bytes: that prefill nodes have handed over.
        received_tokens: prompt tokens that decode nodes did not compute.
    """

    parts: Counter[tuple[str, str]]
    sent_bytes: float
    received_tokens: float

    def since(self, before: Served) -> Served:
        """What was added."""
        return Served(
            self.parts - before.parts,
            self.sent_bytes - before.sent_bytes,
            self.received_tokens - before.received_tokens,
        )

    def nodes(self) -> str:
        """Who did what."""
        return ", ".join(f"{node} ({PARTS.get(part, part)})" for part, node in self.parts)

    @property
    def is_whole(self) -> bool:
        """Whether the nodes have published what was handed over, if anything was."""
        handed_over = any(part == "source" for part, _ in self.parts)
        return not handed_over or bool(self.sent_bytes and self.received_tokens)


class Watcher:
    """Reads what the router and its nodes count, as far as they can be reached.

    Args:
        session: opens their endpoints.
        url: of the router.
        member_headers: open the router's list of nodes.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, member_headers: Mapping[str, str]
    ) -> None:
        self._session, self._url, self._headers = session, url, member_headers

    async def now(self) -> Served:
        """All counters now."""
        mine = await self._text(f"{self._url}/metrics")
        parts = Counter({(part, node): round(float(n)) for node, part, n in SERVED.findall(mine)})
        texts = await asyncio.gather(
            *(self._text(f"{node['url']}/metrics") for node in await self.nodes())
        )
        sent, received = (
            sum(float(value) for text in texts for value in counter.findall(text))
            for counter in (SENT_BYTES, RECEIVED_TOKENS)
        )
        return Served(parts, sent, received)

    async def since(self, before: Served) -> Served:
        """What was added; gives the nodes time to publish it."""
        give_up = time.monotonic() + PUBLISH_S
        while True:
            found = (await self.now()).since(before)
            if found.is_whole or time.monotonic() >= give_up:
                return found
            await asyncio.sleep(0.1)

    async def nodes(self) -> list[dict[str, Any]]:
        """The nodes that the router tells us of; none if it does not."""
        text = await self._text(f"{self._url}/nodes", self._headers)
        return list(msgspec.json.decode(text).get("nodes", ())) if text else []

    async def timelines(self) -> list[dict[str, Any]]:
        """When chunks were computed and writes landed."""
        states = [await self._text(f"{node['url']}/state") for node in await self.nodes()]
        return [
            mark
            for state in states
            if state
            for side in ("source", "target")
            for timeline in msgspec.json.decode(state).get(side, {}).get("timelines", {}).values()
            for mark in timeline
        ]

    async def _text(self, url: str, headers: Mapping[str, str] | None = None) -> str:
        """A page; empty if it can't be had, since what it says is only for show."""
        try:
            async with self._session.get(url, headers=headers, timeout=LOOK) as response:
                return await response.text() if response.status == 200 else ""
        except FAILURES:
            return ""


async def ask(
    url: str, config: ClusterConfig, headers: Mapping[str, str], member_headers: Mapping[str, str]
) -> int:
    """Print the answer to one prompt or chat as it comes, then a summary; returns the exit status.

    Args:
        url: of the router.
        config: with the prompt.
        headers: that open its endpoint.
        member_headers: that open its list of nodes.
    """
    body = {"model": config.model_name, "max_tokens": config.max_tokens, "temperature": 0}
    if config.chat is None:
        body["prompt"] = config.prompt
    else:
        body["messages"] = [{"role": "user", "content": config.chat}]
    timeout = aiohttp.ClientTimeout(total=600.0)
    connector = aiohttp.TCPConnector(ssl=config.tls.client(url))
    async with aiohttp.ClientSession(
        headers=headers, timeout=timeout, connector=connector
    ) as session:
        watcher = Watcher(session, url, member_headers)
        before = await watcher.now()
        print()
        try:
            answer = await stream_answer(
                session, url, body, lambda text: print(text, end="", flush=True)
            )
        except FAILURES as error:
            print(f"\nkvbaton: the prompt was not answered: {error}", file=sys.stderr)
            return 1
        served, marks = await watcher.since(before), await watcher.timelines()
    # How many writes had landed on D before P's last chunk was computed (one machine's clock).
    computed = [mark["time"] for mark in marks if mark["what"] == "computed"]
    landed = [mark["time"] for mark in marks if mark["what"] == "landed"]
    early = sum(time < max(computed, default=0.0) for time in landed)
    usage = answer.usage
    print(
        f"\n\nserved by      {served.nodes()}\n"
        f"tokens         {usage.get('prompt_tokens')} in, {usage.get('completion_tokens')} out\n"
        f"first token    {(answer.first_s or answer.seconds) * 1000:.0f} ms\n"
        f"KV handed over {served.sent_bytes:.0f} bytes, "
        f"{served.received_tokens:.0f} prompt tokens\n"
        f"overlap        {early} of {len(landed)} writes landed while the prefill still ran",
        flush=True,
    )
    return 0

"""One prompt to a running cluster, and an account of how it was served."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import msgspec

from kvbaton.cluster.config import ClusterConfig
from kvbaton.messages.openai import ErrorBody
from kvbaton.server.sse import DONE, read_events

SENT_BYTES = "kvbaton_transfer_sent_bytes_total"
RECEIVED_TOKENS = r'kvbaton_prompt_tokens_total\{source="transferred"\}'
LEGS = re.compile(
    r'^kvbaton_router_node_requests_total\{node="([^"]*)",part="([^"]*)"\}', re.MULTILINE
)
PARTS = {"source": "prefill", "target": "decode"}
PUBLISH_S = 2.0


async def ask(
    url: str, headers: Mapping[str, str], config: ClusterConfig, nodes: dict[str, Any]
) -> int:
    """Print the answer as it comes, then a summary; returns the exit status.

    Args:
        url: of the router.
        headers: that open its endpoint.
        config: with the prompt.
        nodes: the router's answer to ``GET /nodes``.
    """
    timeout = aiohttp.ClientTimeout(total=600.0)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        began = time.monotonic()
        first_at, usage = None, None
        print()
        try:
            async for chunk in _stream(session, url, config):
                text = "".join(choice.get("text", "") for choice in chunk.get("choices", ()))
                if text and first_at is None:
                    first_at = time.monotonic()
                usage = chunk.get("usage") or usage
                print(text, end="", flush=True)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            print(f"\nkvbaton: the prompt was not answered: {error}", file=sys.stderr)
            return 1
        print("\n")
        took = (first_at or time.monotonic()) - began
        print(await _summary(session, url, nodes, usage or {}, took), flush=True)
    return 0


async def _stream(
    session: aiohttp.ClientSession, url: str, config: ClusterConfig
) -> AsyncIterator[dict[str, Any]]:
    body = {
        "model": config.model_name,
        "prompt": config.prompt,
        "max_tokens": config.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with session.post(
        f"{url}/v1/completions",
        data=msgspec.json.encode(body),
        headers={"Content-Type": "application/json"},
    ) as response:
        if response.status != 200:
            answer = msgspec.json.decode(await response.read(), type=ErrorBody)
            raise ValueError(answer.error.message)
        async for data in read_events(response.content):
            if data == DONE:
                return
            chunk: dict[str, Any] = msgspec.json.decode(data)
            if "error" in chunk:
                raise ValueError(chunk["error"]["message"])
            yield chunk


async def _summary(
    session: aiohttp.ClientSession,
    url: str,
    nodes: dict[str, Any],
    usage: dict[str, Any],
    first_token_s: float,
) -> str:
    legs = LEGS.findall(await _text(session, f"{url}/metrics"))
    served = ", ".join(f"{node} ({PARTS.get(part, part)})" for node, part in legs)
    handed_over = any(part == "source" for _, part in legs)
    sent, received = await _moved(session, nodes, patient=handed_over)
    return "\n".join(
        (
            f"served by      {served}",
            f"tokens         {usage.get('prompt_tokens')} in, {usage.get('completion_tokens')} out",
            f"first token    {first_token_s * 1000:.0f} ms",
            f"KV handed over {sent:.0f} bytes, {received:.0f} prompt tokens",
            f"overlap        {await _overlap(session, nodes)}",
        )
    )


async def _overlap(session: aiohttp.ClientSession, nodes: dict[str, Any]) -> str:
    """How many writes had landed on D before P's last chunk was computed (one machine's clock)."""
    marks = [
        mark
        for node in nodes.get("nodes", ())
        for timeline in (await _timelines(session, node["url"])).values()
        for mark in timeline
    ]
    computed = [mark["time"] for mark in marks if mark["what"] == "computed"]
    landed = [mark["time"] for mark in marks if mark["what"] == "landed"]
    early = sum(time < max(computed, default=0.0) for time in landed)
    return f"{early} of {len(landed)} writes landed while the prefill still ran"


async def _timelines(session: aiohttp.ClientSession, url: str) -> dict[str, list[dict[str, Any]]]:
    state = msgspec.json.decode(await _text(session, url + "/state"))
    timelines: dict[str, list[dict[str, Any]]] = state["role"]["timelines"]
    return timelines


async def _moved(
    session: aiohttp.ClientSession, nodes: dict[str, Any], *, patient: bool
) -> tuple[float, float]:
    """Bytes sent and prompt tokens received by all nodes.

    Nodes publish a few times a second; a patient caller gives them the time to.
    """
    give_up = time.monotonic() + (PUBLISH_S if patient else 0.0)
    while True:
        texts = [await _text(session, node["url"] + "/metrics") for node in nodes.get("nodes", ())]
        sent = sum(_total(text, SENT_BYTES) for text in texts)
        received = sum(_total(text, RECEIVED_TOKENS) for text in texts)
        if (sent and received) or time.monotonic() >= give_up:
            return sent, received
        await asyncio.sleep(0.1)


async def _text(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url) as response:
        response.raise_for_status()
        return await response.text()


def _total(exposition: str, metric: str) -> float:
    """Sum of a counter (a pattern: name and labels) in Prometheus' text format."""
    return sum(float(value) for value in re.findall(rf"^{metric} (\S+)", exposition, re.MULTILINE))

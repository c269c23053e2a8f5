"""One prompt or chat to a running cluster, and an account of how it was served."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import aiohttp

from kvbaton.cluster.config import ClusterConfig
from kvbaton.cluster.conversation import FAILURES, Answer, Watcher, stream_answer


async def ask(
    url: str, headers: Mapping[str, str], config: ClusterConfig, member_headers: Mapping[str, str]
) -> int:
    """Print the answer as it comes, then a summary; returns the exit status.

    Args:
        url: of the router.
        headers: that open its endpoint.
        config: with the prompt.
        member_headers: that open its list of nodes.
    """
    body = {"model": config.model_name, "max_tokens": config.max_tokens, "temperature": 0}
    if config.chat is None:
        body["prompt"] = config.prompt
    else:
        body["messages"] = [{"role": "user", "content": config.chat}]
    timeout = aiohttp.ClientTimeout(total=600.0)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
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
        served = await watcher.since(before)
        print("\n")
        print(f"served by      {served.nodes()}")
        print(f"tokens         {_tokens(answer)}")
        print(f"first token    {(answer.first_s or answer.seconds) * 1000:.0f} ms")
        print(
            f"KV handed over {served.sent_bytes:.0f} bytes, "
            f"{served.received_tokens:.0f} prompt tokens"
        )
        print(f"overlap        {await _overlap(watcher)}", flush=True)
    return 0


def _tokens(answer: Answer) -> str:
    usage = answer.usage
    return f"{usage.get('prompt_tokens')} in, {usage.get('completion_tokens')} out"


async def _overlap(watcher: Watcher) -> str:
    """How many writes had landed on D before P's last chunk was computed (one machine's clock)."""
    marks = await watcher.timelines()
    computed = [mark["time"] for mark in marks if mark["what"] == "computed"]
    landed = [mark["time"] for mark in marks if mark["what"] == "landed"]
    early = sum(time < max(computed, default=0.0) for time in landed)
    return f"{early} of {len(landed)} writes landed while the prefill still ran"

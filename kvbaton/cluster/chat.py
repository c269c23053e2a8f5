"""A client in the terminal: streams answers, and shows which nodes served them and the KV sent.

``kvbaton chat`` holds a conversation with any endpoint; `ask` answers the prompt of ``kvbaton up``
and prints how it was served.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from kvbaton.cluster.config import ClusterConfig
from kvbaton.config import flag, human_bytes, secret_flag
from kvbaton.messages import OTHER_TYPES, UNREADABLE
from kvbaton.messages.nodes import NodesView, NodeView
from kvbaton.messages.openai import ErrorBody
from kvbaton.server.config import check_url
from kvbaton.server.network import TrustConfig, bearer, first_key, registration_token
from kvbaton.server.sse import DONE, read_events

SENT_BYTES = re.compile(r"^kvbaton_transfer_sent_bytes_total (\S+)", re.MULTILINE)
RECEIVED_TOKENS = re.compile(
    r'^kvbaton_prompt_tokens_total\{source="transferred"\} (\S+)', re.MULTILINE
)
PARTS = {"source": "prefill", "target": "decode", "encoder": "encode"}
PUBLISH_S = 2.0
"""Seconds to wait for nodes' metrics, which they publish a few times a second."""
FIRST_LOOK, LOOK = aiohttp.ClientTimeout(total=30.0), aiohttp.ClientTimeout(total=5.0)
"""Timeouts: of the first request for the model's name, for which an endpoint may have to start; and
of all others."""
FAILURES = (aiohttp.ClientError, OSError, TimeoutError, ValueError, *OTHER_TYPES)
"""Exceptions of a failed answer; their text is for the user."""


@dataclass
class Answer:
    """An answer and its times.

    Attributes:
        text: Text of the first choice, without its reasoning.
        usage: Usage, as the endpoint counts it.
        nodes: Node ids by their part, if the endpoint was asked for timings.
        first_s: Seconds to the first text or reasoning; None if there was neither.
        seconds: Seconds to the end.
    """

    text: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    nodes: Mapping[str, str] = field(default_factory=dict)
    first_s: float | None = None
    seconds: float = 0.0

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that were found in a cache."""
        details = self.usage.get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)

    @property
    def served_by(self) -> str:
        """Nodes and their parts, for people."""
        parts = ((part.partition("-")[0], node) for part, node in self.nodes.items())
        return ", ".join(f"{node} ({PARTS.get(part, part)})" for part, node in parts)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first text."""
        rest = self.seconds - (self.first_s or 0.0)
        return (self.usage.get("completion_tokens", 1) - 1) / rest if rest > 0 else 0.0


async def stream_answer(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], show: Callable[[str], None]
) -> Answer:
    """Request a completion, or a chat if the body has messages, and show its text as it arrives.

    Reasoning and answer are separated by an empty line.

    Raises:
        ValueError: The endpoint refuses the request, or fails before the end.
        aiohttp.ClientError: The endpoint can't be reached.
    """
    began, answer, reasons = time.monotonic(), Answer(), False
    path = "chat/completions" if "messages" in body else "completions"
    more = {"stream": True, "stream_options": {"include_usage": True}}
    async with session.post(f"{url}/v1/{path}", json={**body, **more}) as response:
        if response.status != 200:
            why = f"the endpoint answers {response.status} {response.reason}"
            with suppress(*UNREADABLE):  # a proxy may answer with a web page
                why = msgspec.json.decode(await response.read(), type=ErrorBody).error.message
            raise ValueError(why)
        async for data in read_events(response.content):
            if data == DONE:
                break
            chunk = msgspec.json.decode(data, type=dict[str, Any])
            if "error" in chunk:
                error = chunk["error"]
                raise ValueError(error["message"] if isinstance(error, dict) else str(error))
            answer.usage = chunk.get("usage") or answer.usage
            if body.get("return_timings") and "timings" in chunk:
                answer.nodes = chunk["timings"]["nodes"]
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


class Crossed(NamedTuple):
    """Totals of hand-overs.

    Attributes:
        sent_bytes: Bytes that nodes have sent.
        received_tokens: Number of prompt tokens that nodes have received.
    """

    sent_bytes: float
    received_tokens: float


class Watcher:
    """Reads metrics of a router's nodes, as far as they can be reached.

    Args:
        session: HTTP session.
        url: URL of the router.
        member_headers: Headers that give access to the router's list of nodes.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, member_headers: Mapping[str, str]
    ) -> None:
        self._session, self._url, self._headers = session, url, member_headers

    async def now(self) -> Crossed:
        """Current totals."""
        texts = await asyncio.gather(
            *(self._text(f"{node.url}/metrics") for node in await self.nodes())
        )
        sent, received = (
            sum(float(value) for text in texts for value in counter.findall(text))
            for counter in (SENT_BYTES, RECEIVED_TOKENS)
        )
        return Crossed(sent, received)

    async def since(self, before: Crossed, answer: Answer) -> Crossed:
        """Increase since `before`; waits until the nodes have published that of the answer."""
        give_up = time.monotonic() + PUBLISH_S
        while True:
            now = await self.now()
            sent = now.sent_bytes - before.sent_bytes
            received = now.received_tokens - before.received_tokens
            published = "source" not in answer.nodes or (sent and received)
            if published or time.monotonic() >= give_up:
                return Crossed(sent, received)
            await asyncio.sleep(0.1)

    async def nodes(self) -> list[NodeView]:
        """The router's nodes; empty if it does not list them, or the URL is not of a router."""
        text = await self._text(f"{self._url}/nodes", self._headers)
        with suppress(*UNREADABLE):
            return msgspec.json.decode(text, type=NodesView).nodes
        return []

    async def timelines(self) -> list[dict[str, Any]]:
        """Events of transfers, such as chunks computed and writes landed."""
        states = [await self._text(f"{node.url}/state") for node in await self.nodes()]
        return [
            mark
            for state in states
            if state
            for side in ("source", "target")
            for timeline in msgspec.json.decode(state).get(side, {}).get("timelines", {}).values()
            for mark in timeline
        ]

    async def _text(self, url: str, headers: Mapping[str, str] | None = None) -> str:
        """Text of a page; empty if it can't be read, because it is only shown."""
        try:
            async with self._session.get(url, headers=headers, timeout=LOOK) as response:
                return await response.text() if response.status == 200 else ""
        except FAILURES:
            return ""


async def ask(
    url: str, config: ClusterConfig, headers: Mapping[str, str], member_headers: Mapping[str, str]
) -> int:
    """Print the answer to one prompt or chat as it arrives, then a summary; return the exit status.

    Args:
        url: URL of the router.
        config: Settings with the prompt.
        headers: Headers that give access to the endpoint.
        member_headers: Headers that give access to the list of nodes.
    """
    body: dict[str, Any] = {"model": config.model_name, "max_tokens": config.max_tokens}
    body |= {"temperature": 0, "return_timings": True}
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
        crossed, marks = await watcher.since(before, answer), await watcher.timelines()
    # Count writes that landed on D before P's last chunk was computed (on one machine's clock).
    computed = [mark["time"] for mark in marks if mark["what"] == "computed"]
    landed = [mark["time"] for mark in marks if mark["what"] == "landed"]
    early = sum(time < max(computed, default=0.0) for time in landed)
    usage = answer.usage
    print(
        f"\n\nserved by      {answer.served_by}\n"
        f"tokens         {usage.get('prompt_tokens')} in, {usage.get('completion_tokens')} out\n"
        f"first token    {(answer.first_s or answer.seconds) * 1000:.0f} ms\n"
        f"KV handed over {crossed.sent_bytes:.0f} bytes, "
        f"{crossed.received_tokens:.0f} prompt tokens\n"
        f"overlap        {early} of {len(landed)} writes landed while the prefill still ran",
        flush=True,
    )
    return 0


# --- a conversation ---

HELP = "/reset begins anew, /help says this, /exit or Ctrl-D leaves; Ctrl-C stops an answer"
PROMPT = "> "
MAX_HISTORY = 1000


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Settings of ``kvbaton chat``.

    Attributes:
        url: URL of the endpoint, with or without ``/v1``.
        model: Name of the model at the endpoint; None asks the endpoint.
        api_key: API key for the endpoint.
        cluster_key: Gives access to the router's list of nodes, which is needed to show the KV
            handed over.
        system: System message.
        max_tokens: Maximum number of tokens of an answer; None for as many as fit.
        temperature: Sampling temperature; None takes the model's.
        trust: Which certificates are trusted.
    """

    url: str = "http://127.0.0.1:8000"
    model: str | None = flag(
        None, "name of the model at the endpoint (asks the endpoint)", metavar="NAME"
    )
    api_key: str | None = secret_flag("API key for the endpoint", "KVBATON_API_KEY", metavar="KEY")
    cluster_key: str | None = secret_flag(
        "needed to show the KV handed over between nodes", "KVBATON_CLUSTER_KEY", metavar="SECRET"
    )
    system: str | None = flag(None, "system message", metavar="TEXT")
    max_tokens: int | None = flag(None, "most tokens of an answer (as many as fit)", metavar="N")
    temperature: float | None = flag(None, "sampling temperature (the model's own)", metavar="T")
    trust: TrustConfig = field(default_factory=TrustConfig)

    def __post_init__(self) -> None:
        check_url("URL", self.url)

    @property
    def base_url(self) -> str:
        """URL without ``/v1``."""
        return self.url.rstrip("/").removesuffix("/v1")


def run(config: ChatConfig, console: Console | None = None) -> int:
    """Talk until the user leaves; return the exit status, 1 if the endpoint does not answer."""
    console = console or Console(highlight=False)
    if sys.stdin is None:  # standard input was closed
        sys.stdin = open(os.devnull, encoding="utf-8")
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    with asyncio.Runner() as runner, _History():
        chat = runner.run(Chat.open(config, console))
        if chat is None:
            return 1
        try:
            while (line := _read(console)) is not None:
                if line == "/exit":
                    break
                try:
                    runner.run(chat.take(line))
                except KeyboardInterrupt:
                    console.print("\n(stopped)", style="dim")
        finally:
            runner.run(chat.close())
    return 0


class Chat:
    """A conversation; the whole history goes with every message."""

    def __init__(
        self,
        config: ChatConfig,
        console: Console,
        session: aiohttp.ClientSession,
        model: str,
        *,
        tells_nodes: bool,
    ) -> None:
        members = bearer(registration_token(config.cluster_key))
        self._config, self._console, self._session, self._model = config, console, session, model
        self._watcher = Watcher(session, config.base_url, members)
        self._tells_nodes = tells_nodes
        self._messages = self._beginning()

    @classmethod
    async def open(cls, config: ChatConfig, console: Console) -> Chat | None:
        """Ask for the endpoint's model and show it; None if the endpoint does not answer."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        session = aiohttp.ClientSession(
            headers=bearer(first_key(config.api_key)),
            timeout=timeout,
            connector=aiohttp.TCPConnector(ssl=config.trust.client(config.base_url)),
        )
        try:
            async with session.get(f"{config.base_url}/v1/models", timeout=FIRST_LOOK) as response:
                response.raise_for_status()
                card = msgspec.json.decode(await response.read())["data"][0]
                served, ours = str(card["id"]), card.get("owned_by") == "kvbaton"
        except FAILURES as error:
            await session.close()
            reason = str(error) or "no answer in time"
            told = f"nobody answers at {config.base_url}: {reason}"
            if isinstance(error, aiohttp.ClientResponseError):
                told = f"{config.base_url} answers {error.status} {error.message}"
                told += "; give a right --api-key" if error.status == 401 else " to GET /v1/models"
            print(f"kvbaton: {told}", file=sys.stderr)
            return None
        chat = cls(config, console, session, config.model or served, tells_nodes=ours)
        nodes = ", ".join(node.node_id for node in await chat._watcher.nodes())
        said = Text.assemble(
            (chat._model, "bold"), f"\n{config.base_url}", f"\n{nodes}" * bool(nodes)
        )
        console.print(Panel(said, title="kvbaton", subtitle=HELP, border_style="cyan"))
        return chat

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    def _beginning(self) -> list[dict[str, str]]:
        system = self._config.system
        return [] if system is None else [{"role": "system", "content": system}]

    async def take(self, line: str) -> None:
        """Run a command, or send a message and show the answer."""
        if line in ("/reset", "/help"):
            if line == "/reset":
                self._messages = self._beginning()
            self._console.print("(a new conversation)" if line == "/reset" else HELP, style="dim")
            return
        if line.startswith("/"):
            self._console.print(f"{line} is no command: {HELP}", style="red", markup=False)
            return
        if not line:
            return
        messages = [*self._messages, {"role": "user", "content": line}]
        body: dict[str, Any] = {"model": self._model, "messages": messages}
        for name in ("max_tokens", "temperature"):
            if (value := getattr(self._config, name)) is not None:
                body[name] = value
        if self._tells_nodes:
            body["return_timings"] = True

        def show(text: str) -> None:
            self._console.print(text, end="", markup=False, soft_wrap=True)
            self._console.file.flush()

        before = await self._watcher.now()
        try:
            answer = await stream_answer(self._session, self._config.base_url, body, show)
        except FAILURES as error:
            self._console.print(f"\n{error}", style="red", markup=False)
            return
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        self._console.print()
        told = figures(answer, await self._watcher.since(before, answer))
        self._console.print(told, style="dim", markup=False)


def figures(answer: Answer, crossed: Crossed) -> str:
    """Figures of an answer, in one line."""
    usage = answer.usage
    told = [f"first token {1000 * (answer.first_s or answer.seconds):.0f} ms"]
    told.append(f"{answer.tokens_per_s:.1f} tokens/s")
    if answer.nodes:
        told.append(answer.served_by)
    if crossed.sent_bytes:
        told.append(f"{human_bytes(crossed.sent_bytes)} handed over")
    told.append(f"{answer.cached_tokens} of {usage.get('prompt_tokens', 0)} prompt tokens cached")
    return " · ".join(told)


# --- the keyboard ---


def _read(console: Console) -> str | None:
    """The next line; None at the end of the input."""
    # Colour codes are between \001 and \002, so that readline counts no columns for them.
    shown = f"\001\x1b[1;36m\002{PROMPT}\001\x1b[0m\002" if console.is_terminal else ""
    while True:
        try:
            return input(shown).strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            console.print("\n(Ctrl-D leaves)", style="dim")


class _History:
    """Lines of former conversations, for the arrow keys; kept in the user's cache folder."""

    def __init__(self) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._path = cache / "kvbaton" / "chat_history"

    def __enter__(self) -> None:
        if sys.stdin.isatty():
            import readline

            with suppress(OSError):  # there is no history yet
                readline.read_history_file(self._path)

    def __exit__(self, *exception: object) -> None:
        if sys.stdin.isatty():
            import readline

            readline.set_history_length(MAX_HISTORY)
            with suppress(OSError):  # the history is not essential
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.touch(mode=0o600)
                readline.write_history_file(self._path)

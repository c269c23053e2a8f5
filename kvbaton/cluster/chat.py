"""``kvbaton chat``: a conversation in the terminal with any endpoint, and what each answer took."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from kvbaton.cluster.conversation import FAILURES, Answer, Served, Watcher, stream_answer
from kvbaton.config import flag, human_bytes, secret_flag
from kvbaton.server.config import check_url
from kvbaton.server.network import TrustConfig, bearer, registration_token

HELP = "/reset begins anew, /help says this, /exit or Ctrl-D leaves; Ctrl-C stops an answer"
PROMPT = "> "
MAX_HISTORY = 1000


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Whom to talk to, and how.

    Attributes:
        url: of the endpoint, with or without ``/v1``.
        model: as it names the model; None asks it.
        api_key: presented to it.
        cluster_key: opens the router's list of nodes, which tells what crossed.
        system: what the model is told first.
        max_tokens: of an answer; None for as many as fit.
        temperature: of sampling; None takes the model's.
        trust: whose certificates are believed.
    """

    url: str = "http://127.0.0.1:8000"
    model: str | None = flag(None, "as the endpoint names it (asks it)", metavar="NAME")
    api_key: str | None = secret_flag("presented to it", "KVBATON_API_KEY", metavar="KEY")
    cluster_key: str | None = secret_flag(
        "lets it tell what crossed between nodes", "KVBATON_CLUSTER_KEY", metavar="SECRET"
    )
    system: str | None = flag(None, "what the model is told first", metavar="TEXT")
    max_tokens: int | None = flag(None, "of an answer (as many as fit)", metavar="N")
    temperature: float | None = flag(None, "of sampling (the model's own)", metavar="T")
    trust: TrustConfig = field(default_factory=TrustConfig)

    def __post_init__(self) -> None:
        check_url("URL", self.url)

    @property
    def base_url(self) -> str:
        """Without ``/v1``."""
        return self.url.rstrip("/").removesuffix("/v1")


def run(config: ChatConfig, console: Console | None = None) -> int:
    """Talk until the user leaves; returns the exit status: 1 if nobody answers at the address."""
    console = console or Console(highlight=False)
    if sys.stdin is None:  # it was closed
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
    """A conversation; what is said so far goes with every message."""

    def __init__(
        self, config: ChatConfig, console: Console, session: aiohttp.ClientSession, model: str
    ) -> None:
        members = bearer(registration_token(config.cluster_key))
        self._config, self._console, self._session, self._model = config, console, session, model
        self._watcher = Watcher(session, config.base_url, members)
        self._messages = self._beginning()

    @classmethod
    async def open(cls, config: ChatConfig, console: Console) -> Chat | None:
        """Find out what the endpoint serves, and say so; None if it does not answer."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        session = aiohttp.ClientSession(
            headers=bearer(config.api_key),
            timeout=timeout,
            connector=aiohttp.TCPConnector(ssl=config.trust.client(config.base_url)),
        )
        try:
            async with session.get(f"{config.base_url}/v1/models") as response:
                response.raise_for_status()
                served = msgspec.json.decode(await response.read())["data"][0]["id"]
        except (*FAILURES, KeyError, IndexError) as error:
            await session.close()
            told = f"nobody answers at {config.base_url}: {error}"
            if isinstance(error, aiohttp.ClientResponseError):
                told = f"{config.base_url} answers {error.status} {error.message}"
                told += "; give a right --api-key" if error.status == 401 else " to GET /v1/models"
            print(f"kvbaton: {told}", file=sys.stderr)
            return None
        chat = cls(config, console, session, config.model or served)
        nodes = ", ".join(node["node_id"] for node in await chat._watcher.nodes())
        said = Text.assemble(
            (chat._model, "bold"), f"\n{config.base_url}", f"\n{nodes}" * bool(nodes)
        )
        console.print(Panel(said, title="kvbaton", subtitle=HELP, border_style="cyan"))
        return chat

    async def close(self) -> None:
        """Give the connections back."""
        await self._session.close()

    def _beginning(self) -> list[dict[str, str]]:
        system = self._config.system
        return [] if system is None else [{"role": "system", "content": system}]

    async def take(self, line: str) -> None:
        """Obey a command, or ask the model and show what it says."""
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
        told = figures(answer, await self._watcher.since(before))
        self._console.print(told, style="dim", markup=False)


def figures(answer: Answer, served: Served) -> str:
    """What an answer took, in one line."""
    usage = answer.usage
    told = [f"first token {1000 * (answer.first_s or answer.seconds):.0f} ms"]
    told.append(f"{answer.tokens_per_s:.1f} tokens/s")
    if served.parts:
        told.append(served.nodes())
    if served.sent_bytes:
        told.append(f"{human_bytes(served.sent_bytes)} handed over")
    told.append(f"{answer.cached_tokens} of {usage.get('prompt_tokens', 0)} prompt tokens cached")
    return " · ".join(told)


# --- the keyboard ---


def _read(console: Console) -> str | None:
    """The next line; None at the end of the input."""
    # Between \001 and \002, so that readline knows that it takes no place.
    shown = f"\001\x1b[1;36m\002{PROMPT}\001\x1b[0m\002" if console.is_terminal else ""
    while True:
        try:
            return input(shown).strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            console.print("\n(Ctrl-D leaves)", style="dim")


class _History:
    """Lines of former conversations, for the arrow keys; kept where the user keeps caches."""

    def __init__(self) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._path = cache / "kvbaton" / "chat_history"

    def __enter__(self) -> None:
        if sys.stdin.isatty():
            import readline

            with suppress(OSError):  # there is none yet
                readline.read_history_file(self._path)

    def __exit__(self, *exception: object) -> None:
        if sys.stdin.isatty():
            import readline

            readline.set_history_length(MAX_HISTORY)
            with suppress(OSError):  # a conversation need not be remembered
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.touch(mode=0o600)
                readline.write_history_file(self._path)

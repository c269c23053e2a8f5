"""Commands as real processes, and HTTP requests of tests to them.

All calls are synchronous and have deadlines. Processes can't outlive the test process, however it
ends; their output is shown when they fail.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kvbaton.messages.engine import SamplingParams
from kvbaton.messages.nodes import GenerateRequest, GenerateResponse
from kvbaton.server.metric_texts import UNKNOWN
from kvbaton.server.network import TrustConfig
from tests.support.forked_command import ForkedCommand

START_S = 120.0
ANSWER_S = 60.0
STOP_S = 60.0
POLL_S, MAX_POLL_S = 0.02, 0.1


def poll(
    what: str,
    check: Callable[[], Any],
    deadline_s: float,
    why: Callable[[], str],
    *,
    every_s: float = POLL_S,
) -> Any:
    """Wait until `check` returns a true value, and return it.

    Polls become rarer with time: each costs a server milliseconds.
    """
    began = time.monotonic()
    while not (found := check()):
        waited = time.monotonic() - began
        assert waited < deadline_s, f"not within {deadline_s:g} s: {what}\n{why()}"
        time.sleep(max(every_s, min(waited / 20, MAX_POLL_S)))
    return found


class HttpFailure(AssertionError):
    """A server answered with another status than 200."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}: {body[:2000].decode(errors='replace')}")
        self.status = status
        self.body = body


@cache
def _sample_key(text: str) -> tuple[str, frozenset[tuple[str, str]]]:
    """Name and labels of a sample, cached: tests scrape the same samples very often."""
    ((sample,),) = (family.samples for family in text_string_to_metric_families(f"{text} 0"))
    return sample.name, frozenset(sample.labels.items())


class Metrics:
    """One scrape, or the difference of two. A call with a name and some labels gives the sum."""

    def __init__(self, samples: dict[tuple[str, frozenset[tuple[str, str]]], float]) -> None:
        self.samples = samples

    def __call__(self, name: str, **labels: str) -> float:
        wanted = labels.items()
        return sum(v for (n, has), v in self.samples.items() if n == name and wanted <= has)

    def __sub__(self, earlier: Metrics) -> Metrics:
        return Metrics({key: v - earlier.samples.get(key, 0) for key, v in self.samples.items()})


class Server:
    """A ``kvbaton`` process that logs to a file.

    Args:
        name: Name of its log.
        words: Arguments of the command line.
        folder: Folder for its log.
        env: Variables added to the test's environment.
        names: Host names that it resolves; see `ForkedCommand`.
        network: As for `ForkedCommand`.
    """

    says_url = r"listening on (https?://\S+)"
    _process: subprocess.Popen[bytes] | ForkedCommand

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        folder: Path,
        *,
        env: Mapping[str, str] | None = None,
        names: Path | None = None,
        network: str = "",
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._url: str | None = None
        with self.log.open("ab") as log:
            words = [*words, "--log-level=info"]
            self._process = ForkedCommand(words, log.fileno(), names, env, network)

    # --- life ---

    @property
    def pid(self) -> int:
        return self._process.pid

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-30:]
        return "\n".join([f"--- {self.name} (exit {self._process.poll()}):", *lines])

    def check_alive(self) -> None:
        assert self._process.poll() is None, f"{self.name} has ended\n{self.tail()}"

    @property
    def url(self) -> str:
        """URL of the server; waits until it has printed it."""
        if self._url is None:
            self._url = poll(f"{self.name} serves", self._find_url, START_S, self.tail)
        return self._url

    def _find_url(self) -> str | None:
        self.check_alive()
        found = re.search(self.says_url, self.log.read_text(errors="replace"))
        return found[1] if found else None

    def ask_to_stop(self) -> None:
        """Send SIGTERM."""
        if self._process.poll() is None:
            self._process.terminate()

    def stop(self) -> None:
        """Wait for its end after `ask_to_stop`; at the deadline, kill it and its children."""
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            print(f"{self.name} did not stop\n{self.tail()}", file=sys.stderr)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill it and all its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(STOP_S)

    # --- HTTP ---

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        where = urlsplit(self.url)
        assert where.hostname is not None
        if where.scheme == "https":
            return http.client.HTTPSConnection(
                where.hostname,
                where.port,
                timeout=timeout,
                context=TrustConfig().client(self.url),
            )
        return http.client.HTTPConnection(where.hostname, where.port, timeout=timeout)

    def call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Send a request, and return the body of the answer.

        Raises:
            HttpFailure: The status is not 200.
        """
        with closing(self._connect(ANSWER_S)) as connection:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
        if response.status != 200:
            raise HttpFailure(response.status, answer)
        return answer

    def get(self, path: str) -> Any:
        return json.loads(self.call("GET", path))

    def post(self, path: str, body: Any) -> Any:
        return json.loads(self.call("POST", path, msgspec.json.encode(body)))

    def stream(self, path: str, body: Any) -> Iterator[Any]:
        """Events of an answer as they arrive; they must end with ``[DONE]``."""
        with closing(self._connect(ANSWER_S)) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, msgspec.json.encode(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise HttpFailure(response.status, response.read())
            for line in response:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))
        raise AssertionError(f"{self.name}: the stream was cut off")

    def metrics(self) -> Metrics:
        """Scrape all counters and gauges."""
        lines = self.call("GET", "/metrics").decode().splitlines()
        unknown = [line for line in lines if line.endswith(UNKNOWN)]
        assert not unknown, f"metrics without a text of their own: {unknown}"
        samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return Metrics({_sample_key(name): float(value) for name, _, value in samples})


class Router(Server):
    """A router."""

    def complete(self, prompt: str | Sequence[int], **fields: Any) -> Any:
        """Answer of ``/v1/completions``, with token ids."""
        return self.post("/v1/completions", completion(prompt, **fields))

    def num_pairs(self) -> int:
        """Number of pairs that can hand over now."""
        return len(self.get("/nodes")["pairs"])


class Node(Server):
    """A prefill or decode node."""

    says_url = r"serves at (https?://\S+)"

    def generate(
        self, token_ids: Sequence[int], transfer: dict[str, Any] | None = None, **params: Any
    ) -> GenerateResponse:
        """Tokens in, tokens out; without `transfer` the node serves the request alone."""
        body = generation(token_ids, transfer, **params)
        answer = self.call("POST", "/inference/v1/generate", msgspec.json.encode(body))
        return msgspec.json.decode(answer, type=GenerateResponse)

    def info(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.get("/node")
        return answer

    def state(self) -> dict[str, Any]:
        """State of the node's hand-over connector."""
        whole: dict[str, Any] = self.get("/state")
        answer: dict[str, Any] = whole["source"] if "source" in whole else whole["target"]
        return answer

    def forget(self) -> None:
        """Empty the prefix cache."""
        self.post("/reset_prefix_cache", {})


def completion(prompt: str | Sequence[int], **fields: Any) -> dict[str, Any]:
    """Body of a completion; by default greedy, of a fixed length, with token ids."""
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return body | fields


def generation(
    token_ids: Sequence[int],
    transfer: dict[str, Any] | None,
    *,
    stream: bool = False,
    **params: Any,
) -> GenerateRequest:
    """Body of a token-level request; by default greedy and of a fixed length."""
    chosen: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "seed": 0} | params
    return GenerateRequest(
        token_ids=tuple(token_ids),
        sampling_params=SamplingParams(**chosen),
        stream=stream,
        kv_transfer_params=transfer,
    )

"""``examples/vllm_style_proxy.py`` in front of our nodes, and what goes wrong with pasted params.

The decode node here may compute prompts, so that a hand-over that fails costs time and nothing
else: the tokens must be right, or the request refused by name.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e2e.conftest import MakePair
from tests.support.oracle import Oracle
from tests.support.served_pair import POOL, Pair
from tests.support.servers import HttpFailure, Node, Router, Server, completion, generation

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e")]

Prompt = Callable[[int], list[int]]
SCRIPT = Path(__file__).parents[2] / "examples" / "vllm_style_proxy.py"
EOS = 1
UNKNOWN_S = 1.0
"""Of one that waits for a transfer which nobody knows."""
HANG_S = 20.0


class Proxy(Server):
    """The example as a process."""

    says_url = r"Running on (http://\S+[0-9])"

    def __init__(self, p: Node, d: Node, folder: Path) -> None:
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.name = "proxy"
        self.log = folder / "proxy.log"
        self._url = None
        words = [f"--prefill={p.url}", f"--decode={d.url}", f"--port={port}"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-u", str(SCRIPT), *words],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def tokens(self, ids: list[int], **fields: Any) -> list[int]:
        (choice,) = self.post("/v1/completions", completion(ids, **fields))["choices"]
        tokens: list[int] = choice["token_ids"]
        return tokens


@pytest.fixture(scope="module")
def proxy(
    main_nodes: tuple[Node, Node, Router], small: Node, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    proxy = Proxy(main_nodes[0], small, tmp_path_factory.mktemp("proxy"))
    yield proxy
    proxy.ask_to_stop()
    proxy.stop()


@pytest.fixture
def lenient(main_nodes: tuple[Node, Node, Router], small: Node, make_pair: MakePair) -> Pair:
    """P, and a D that may compute what does not come."""
    pair = make_pair(main_nodes[0], small)
    pair.forget()
    return pair


def test_the_proxy(proxy: Proxy, lenient: Pair, oracle: Oracle, prompt: Prompt) -> None:
    ids = prompt(50)
    assert proxy.tokens(ids, max_tokens=8) == oracle.greedy(ids, 8)
    assert lenient.at_d()("kvbaton_prompt_tokens_total", source="transferred") == 50
    assert lenient.at_d()("kvbaton_prompt_tokens_total", source="computed") == 0


def test_it_streams(proxy: Proxy, lenient: Pair, oracle: Oracle, prompt: Prompt) -> None:
    ids = prompt(20)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = list(proxy.stream("/v1/completions", completion(ids, max_tokens=8, **options)))
    choices = [choice for event in events for choice in event["choices"]]
    streamed = [token for choice in choices for token in choice.get("token_ids") or ()]
    assert streamed == oracle.greedy(ids, 8)
    assert events[-1]["usage"]["completion_tokens"] == 8


def test_min_tokens_that_it_does_not_tell_the_prefill_node(
    proxy: Proxy, lenient: Pair, prompt: Prompt
) -> None:
    """Token 0, which P samples without knowing of it, must not end the text either."""
    ids = prompt(20)
    how = {"max_tokens": 6, "ignore_eos": False, "logit_bias": {str(EOS): 100.0}, "min_tokens": 4}
    alone = lenient.p.post("/v1/completions", completion(ids, **how))
    tokens = proxy.tokens(ids, **how)
    assert tokens == alone["choices"][0]["token_ids"]
    assert tokens.index(EOS) == 4
    lenient.moves = "some"


def test_16_at_once(proxy: Proxy, lenient: Pair, oracle: Oracle, prompt: Prompt) -> None:
    prompts = [prompt(5 + 11 * i % 60) for i in range(16)]
    sent = [POOL.submit(proxy.tokens, ids, max_tokens=6) for ids in prompts]
    for ids, future in zip(prompts, sent, strict=True):
        assert (said := future.result()) == oracle.greedy(ids, 6, said)
    assert lenient.at_d()("kvbaton_prompt_tokens_total", source="transferred") > 0
    lenient.moves = "some"


@pytest.mark.parametrize(
    "body", [b"{", b"\xff", b"[]", b"null", b'{"model": "tiny"}', b'{"prompt": 1, "model": []}']
)
def test_it_says_what_is_wrong_with_a_body(proxy: Proxy, body: bytes) -> None:
    with pytest.raises(HttpFailure) as refused:
        proxy.post("/v1/completions", msgspec.Raw(body))
    assert refused.value.status == 400
    assert json.loads(refused.value.body)["error"]["message"]


# --- params that are not what they should be ---


@pytest.mark.parametrize(
    "forged",
    [
        {"transfer_id": None},
        {"remote_engine_id": "p-nobody"},
        {"remote_port": 1},
        {"remote_host": "192.0.2.1"},
        {"attempt": 7},
    ],
    ids=lambda forged: next(iter(forged)),
)
def test_forged_params(
    lenient: Pair, oracle: Oracle, prompt: Prompt, forged: dict[str, Any]
) -> None:
    """The right tokens, or a refusal that says why; and soon."""
    ids = prompt(40)
    params = lenient.target_params(os.urandom(16)) | forged
    start = time.monotonic()
    try:
        body = generation(ids, params, max_tokens=5)
        body = msgspec.structs.replace(body, deadline_s=UNKNOWN_S)
        (choice,) = lenient.d.post("/inference/v1/generate", body)["choices"]
        status, answer = 200, choice["token_ids"]
    except HttpFailure as failure:
        status, answer = failure.status, json.loads(failure.body)["error"]["message"]
    assert time.monotonic() - start < HANG_S, "it hung"
    assert answer == oracle.greedy(ids, 5) if status == 200 else answer and 400 <= status != 500
    lenient.moves = "nothing"

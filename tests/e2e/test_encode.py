"""Encoder nodes as real processes: their outputs serve prompts elsewhere.

The oracle of every answer is one node that encodes, prefills and decodes by itself.
"""

from __future__ import annotations

import http.client
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from kvbaton.messages.nodes import GenerateRequest
from kvbaton.text.vision import VisionText
from kvbaton.types import ENCODER_BLOCK_ROWS
from tests.support.chats import picture, streamed_tokens, talk, tokens_of
from tests.support.cluster import Cluster
from tests.support.fork_server import fork_server
from tests.support.forked_command import ForkedCommand
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served_pair import settle
from tests.support.servers import HttpFailure, Metrics, Node, Router, poll
from tests.support.waiting import promised

pytestmark = pytest.mark.e2e

CHAT = "/v1/chat/completions"
ROOT = Path(__file__).parents[2]
GONE_S = 4.0
"""A dead encoder node costs a request less, and so less than any timer of the protocol."""


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(family="qwen3_vl", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("encode"), model)
    yield cluster
    cluster.stop()


class House:
    """E, P and D behind a router; and a node that serves alone, behind one of its own with E."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        every = ("--min-encode-rows=0",)
        self.router: Router = cluster.start_router("epd", *every)
        self.e = cluster.start_node("encode", "e", {"transport": "tcp"}, router=self.router)
        tcp = {"transport": "tcp", "max-model-len": "1024"}
        self.p = cluster.start_node("prefill", "p", tcp, router=self.router)
        self.d = cluster.start_node("decode", "d", tcp, router=self.router)
        self.one = cluster.start_node("decode", "one", tcp)
        cluster.until_up(self.e, self.p, self.d, self.one, router=self.router, pairs=1)
        nodes = (f"--decode={self.one.url}", f"--encode={self.e.url}")
        self.lone: Router = cluster.start_router("e-one", *every, *nodes)
        self.until_paired(self.router, 2)
        self.until_paired(self.lone, 1)

    def until_paired(self, router: Router, count: int) -> None:
        """Wait until so many pairs of an encoder node and another can hand over."""
        poll(
            "pairs",
            lambda: len(router.get("/nodes")["encoder_pairs"]) == count,
            20,
            self.cluster.tails,
        )

    def behind(
        self, name: str, encoder: Node, rows: int = 0, *more: str, env: dict[str, str] | None = None
    ) -> Router:
        """Another router in front of P and D, with this encoder node for items of so many rows."""
        nodes = {"prefill": self.p, "decode": self.d, "encode": encoder}
        flags = [*more, *(f"--{role}={node.url}" for role, node in nodes.items())]
        router = self.cluster.start_router(name, f"--min-encode-rows={rows}", *flags, env=env)
        self.until_paired(router, 2)
        return router

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.e, self.p, self.d, self.one

    def expected(self, body: dict[str, Any]) -> list[int]:
        """What one node answers, without a trace in any cache."""
        tokens = tokens_of(self.one.post(CHAT, body))
        settle(self.one)
        self.one.forget()
        return tokens

    def forget(self) -> None:
        settle(*self.nodes)
        for node in self.nodes:
            node.forget()


def encoded(node: Node) -> float:
    """Items that a node has encoded."""
    return node.metrics()("kvbaton_encoder_items_total", source="encoded")


class Count:
    """Items encoded at each node since this began."""

    def __init__(self, *nodes: Node) -> None:
        self._before = {node: encoded(node) for node in nodes}

    def __call__(self) -> list[float]:
        return [encoded(node) - before for node, before in self._before.items()]


@pytest.fixture(scope="module")
def shared_house(cluster: Cluster) -> House:
    return House(cluster)


@pytest.fixture
def house(shared_house: House) -> Iterator[House]:
    """All caches empty before the test, all books balanced after it."""
    shared_house.forget()
    yield shared_house
    settle(*shared_house.nodes)


ODD = [(40, 32), (17, 90), (64, 64), (100, 9), (8, 8), (33, 55), (71, 23), (48, 80)]
"""Sizes of images."""


@pytest.mark.parametrize("count", [1, 3, 8])
def test_outputs_equal_one_nodes(house: House, count: int) -> None:
    images = [picture(i, *size) for i, size in enumerate(ODD[:count])]
    mixed = [part for i, image in enumerate(images) for part in (f"{i}: ", image)]
    body = talk("Look at ", *mixed, " and say which is best.")
    expected = house.expected(body)
    count_all = Count(*house.nodes)
    assert tokens_of(house.router.post(CHAT, body)) == expected
    assert count_all() == [count, 0, 0, 0], "each was encoded once, by the encoder node"
    house.forget()
    assert streamed_tokens(list(house.router.stream(CHAT, body | {"stream": True}))) == expected
    assert tokens_of(house.lone.post(CHAT, body)) == expected
    assert count_all()[1:] == [0, 0, 0]


def test_text_needs_no_encoder(house: House) -> None:
    body = talk("Nothing to see.")
    count_all = Count(*house.nodes)
    assert tokens_of(house.router.post(CHAT, body)) == house.expected(body)
    assert count_all() == [0, 0, 0, 0]


def test_another_image_gives_another_answer(house: House) -> None:
    one, other = (talk("What? ", picture(n), max_tokens=16) for n in (1, 2))
    assert house.expected(one) != house.expected(other)


def test_the_same_image_twice_in_a_prompt_is_encoded_once(house: House) -> None:
    body = talk("a ", picture(1), " b ", picture(1), " c ", picture(2))
    expected = house.expected(body)
    count_all = Count(*house.nodes)
    assert tokens_of(house.router.post(CHAT, body)) == expected
    assert count_all() == [2, 0, 0, 0]


@pytest.mark.parametrize("at_once", [1, 4])
def test_the_same_image_in_several_requests_is_encoded_once(house: House, at_once: int) -> None:
    bodies = [talk(f"Number {i}: ", picture(6), " and?") for i in range(4)]
    expected = [house.expected(body) for body in bodies]
    count_all = Count(*house.nodes)
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda body: house.router.post(CHAT, body), bodies))
    assert [tokens_of(answer) for answer in answers] == expected
    assert count_all() == [1, 0, 0, 0]


def test_encoder_nodes_are_in_the_trace(house: House) -> None:
    with OtlpReceiver() as receiver:
        endpoint = f"--otlp-traces-endpoint={receiver.endpoint}"
        router = house.behind("traced", house.e, 0, endpoint, env={"OTEL_BSP_SCHEDULE_DELAY": "20"})
        images = [picture(21), picture(22)]
        answer = router.post(CHAT, talk("One ", *images, " two", return_timings=True))
        poll("its spans", receiver.traced, 20, house.cluster.tails)
        (trace,) = receiver.traced()
        spans = receiver.trace(trace)
        house.cluster.stop([router])
    nodes = {span.attributes["kvbaton.part"]: span for span in spans if span.name == "llm_request"}
    services = {part: (span.service, span.instance) for part, span in nodes.items()}
    assert services == {
        "encoder": ("kvbaton-encoder", "e"),
        "encoder-1": ("kvbaton-encoder", "e"),
        "source": ("kvbaton-prefill", "p"),
        "target": ("kvbaton-decode", "d"),
    }
    assert answer["timings"]["nodes"] == {
        part: instance for part, (_, instance) in services.items()
    }
    encodes = [span for span in spans if span.name == "encode"]
    assert {s.parent_id for s in encodes} == {
        nodes[part].span_id for part in ("encoder", "encoder-1")
    }
    (prefill,) = (span for span in spans if span.name == "prefill")
    assert all(span.end < prefill.end for span in encodes), "the prompt waits for its images"


def test_a_client_that_leaves_leaves_nothing(house: House) -> None:
    body = talk("x", *(picture(i, 80, 80) for i in range(4)), max_tokens=200, stream=True)
    events = house.router.stream(CHAT, body)
    next(events)
    events.close()  # type: ignore[attr-defined]
    settle(*house.nodes)
    body = talk("y", picture(9))
    assert tokens_of(house.router.post(CHAT, body)) == house.expected(body)


def test_clients_that_leave_at_any_stage_leave_nothing(house: House) -> None:
    """From before the images are encoded until tokens come; the times differ, that is all."""
    where = urlsplit(house.router.url)
    for i in range(12):
        images = [picture(100 * i + n, 80, 80) for n in range(4)]
        body = msgspec.json.encode(talk(*images, max_tokens=100, stream=True))
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=10)
        with closing(connection):
            connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
            time.sleep(0.02 * i)
    settle(*house.nodes)
    again = talk("y", picture(1101, 80, 80))
    assert tokens_of(house.router.post(CHAT, again)) == house.expected(again)


def test_small_images_stay_where_the_prompt_is_prefilled(cluster: Cluster, house: House) -> None:
    router = house.behind("choosy", house.e, rows=10)
    small, large = picture(1, 16, 16), picture(2, 80, 80)
    body = talk("s ", small, " l ", large)
    expected = house.expected(body)
    count_all = Count(*house.nodes)
    assert tokens_of(router.post(CHAT, body)) == expected
    assert count_all() == [1, 1, 0, 0]
    told = router.metrics()
    assert told("kvbaton_router_items_total", where="prefill") == 1
    assert told("kvbaton_router_items_total", where="encoder") == 1
    cluster.stop([router])


def test_an_encoder_node_answers_for_an_item_of_its_own(house: House, model: Path) -> None:
    vision = VisionText.load(model)
    assert vision is not None
    item = vision.item(picture(3))
    body = GenerateRequest(token_ids=(0,) * ENCODER_BLOCK_ROWS, items=(item,))
    for _ in range(2):
        count = Count(house.e)
        answer = house.e.post("/inference/v1/generate", body)
        assert answer["choices"][0]["finish_reason"] == "length"
    assert count() == [0], "the second time it is in the cache"
    broken = msgspec.structs.replace(item, data=picture(4))
    with pytest.raises(HttpFailure, match="digest"):
        house.e.post("/inference/v1/generate", msgspec.structs.replace(body, items=(broken,)))
    with pytest.raises(HttpFailure, match="encoder node"):
        house.e.post(CHAT, talk("x"))


def test_an_encoder_node_that_stands_still_or_dies_stops_nobody(
    cluster: Cluster, house: House
) -> None:
    """A node that stands still costs what the timers say, a dead one next to nothing."""
    encoder = cluster.start_node("encode", "doomed", {"transport": "tcp"})
    cluster.until_up(encoder)
    router = house.behind("bereft", encoder)
    bodies = [talk(f"{i} ", picture(50 + i)) for i in range(4)]
    expected = [house.expected(body) for body in bodies]
    assert tokens_of(router.post(CHAT, bodies[0])) == expected[0]
    count = Count(house.p)
    os.killpg(encoder.pid, signal.SIGSTOP)
    try:
        assert tokens_of(router.post(CHAT, bodies[1])) == expected[1]
    finally:
        os.killpg(encoder.pid, signal.SIGCONT)
    assert count() == [1]
    house.until_paired(router, 2)
    encoder.kill()
    for body, tokens in zip(bodies[2:], expected[2:], strict=True):
        began = time.monotonic()
        assert tokens_of(router.post(CHAT, body)) == tokens
        assert time.monotonic() - began < promised(GONE_S)
    assert count() == [3], "P encodes what nobody else does"
    cluster.stop([router, encoder])


def test_a_store_keeps_outputs(cluster: Cluster, house: House, tmp_path: Path) -> None:
    """What one life of a node encoded, the next one loads; what is damaged is encoded again."""

    def count(of: Metrics, source: str) -> float:
        return of("kvbaton_encoder_items_total", source=source)

    folder, image = tmp_path / "objects", picture(40, 64, 64)
    flags = {"transport": "tcp", "store": "filesystem:" + json.dumps({"path": str(folder)})}
    flags |= {"store-lookup-timeout": "20", "store-load-timeout": "20"}
    bodies = [talk(text, image, " then?") for text in ("Once ", "Another text: ", "Third: ")]
    expected = [house.expected(body) for body in bodies]
    first = cluster.start_node("encode", "e-first-life", flags)
    urls = (f"--encode={first.url}", f"--decode={house.one.url}")
    router = cluster.start_router("before", "--min-encode-rows=0", *urls)
    house.until_paired(router, 1)
    assert tokens_of(router.post(CHAT, bodies[0])) == expected[0]
    settle(first, house.one)
    assert count(first.metrics(), "encoded") == 1
    cluster.stop([router, first])
    outputs = sorted(folder.rglob("*.safetensors"))
    assert outputs

    node = cluster.start_node("prefill", "p-heir", {**flags, "max-model-len": "1024"})
    cluster.until_up(node)
    assert tokens_of(node.post(CHAT, bodies[1])) == expected[1]
    settle(node)
    assert [count(node.metrics(), source) for source in ("store", "encoded")] == [1, 0]

    data = bytearray(outputs[0].read_bytes())
    data[-9] ^= 0x40
    outputs[0].write_bytes(data)
    node.forget()
    before = node.metrics()
    assert tokens_of(node.post(CHAT, bodies[2])) == expected[2]
    settle(node)
    found = node.metrics() - before
    assert count(found, "encoded") == 1
    assert found("kvbaton_encoder_store_loads_total", outcome="failed") == 1
    assert found("kvbaton_encoder_store_load_blocks_total") == len(outputs)
    assert found("kvbaton_encoder_store_load_blocks_total", outcome="ok") == len(outputs) - 1
    cluster.stop([node])


class ForkedUp(ForkedCommand):
    """``kvbaton up`` as the example starts it, as `subprocess.Popen`; it need not import anew."""

    def __init__(self, command: list[str], **streams: Any) -> None:
        assert command[:3] == [sys.executable, "-m", "kvbaton"]
        assert streams == {"stdout": subprocess.PIPE, "text": True}
        read, write = os.pipe()
        self._read = open(read)
        self.stdout = self._lines()
        super().__init__(command[3:], write)
        os.close(write)

    def _lines(self) -> Iterator[str]:
        """What it says, shown if the test fails."""
        for line in self._read:
            print(line, end="", file=sys.stderr)
            yield line

    def __enter__(self) -> ForkedUp:
        return self

    def __exit__(self, *raised: object) -> None:
        with self._read:
            self.kill()
            self.wait(60.0)

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def communicate(self) -> None:
        list(self.stdout)
        assert self.wait(60.0) == 0, "it ends in good order"


def test_the_example_runs(
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = checkpoint(family="qwen2_5_vl", max_position_embeddings=2048)
    words = [str(ROOT / "examples" / "image.py"), str(model), "--transport=tcp"]
    monkeypatch.setattr(sys, "argv", [*words, "--num-blocks=64", "--max-model-len=512"])
    fork_server()  # started as others are
    monkeypatch.setattr(subprocess, "Popen", ForkedUp)
    runpy.run_path(words[0], run_name="__main__")
    first, second, told = capsys.readouterr().out.splitlines()
    assert first == second
    assert told == "given to the encoder node: 2 times"

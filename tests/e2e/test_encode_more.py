"""Images over nodes whose answers are those of transformers, whatever happens to their outputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kvbaton.text.vision import VisionText
from tests.support.chats import picture, streamed_tokens, talk, tokens_of
from tests.support.cluster import Cluster
from tests.support.encoder_items import values_of
from tests.support.pictures import Pictures, Prompt
from tests.support.served_pair import settle
from tests.support.servers import HttpFailure, Metrics, Node, Router, poll

pytestmark = pytest.mark.e2e

CHAT = "/v1/chat/completions"
EVERY = "--min-encode-rows=0"
SIZES = [(40, 32), (17, 90), (100, 9)]
MakeCluster = Callable[[str], "tuple[Cluster, Oracle]"]


class Oracle:
    """transformers' own answers."""

    def __init__(self, folder: Path) -> None:
        vision = VisionText.load(folder)
        assert vision is not None
        self.vision, self._folder, self._pictures = vision, folder, Pictures(folder)

    def check(self, answer: dict[str, Any], *images: bytes) -> None:
        """Each choice of an answer has the tokens that follow its prompt with these images."""
        ids, start, items = answer["prompt_token_ids"], 0, []
        for image in images:
            start = ids.index(self.vision.image_token_id, start)
            items.append(msgspec.structs.replace(self.vision.item(image), start=start))
            start += items[-1].length
        assert self.vision.image_token_id not in ids[start:]
        patches = torch.cat([values_of(self._folder, image)[0] for image in images])
        count = len(answer["choices"][0]["token_ids"])
        expected = self._pictures.generate(Prompt(ids, tuple(items), patches), count)
        assert [choice["token_ids"] for choice in answer["choices"]] == [expected] * len(
            answer["choices"]
        )


@pytest.fixture(scope="module")
def make_cluster(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeCluster]:
    """Makes clusters of a family."""
    made: list[Cluster] = []

    def make(family: str) -> tuple[Cluster, Oracle]:
        model = checkpoint(family=family, max_position_embeddings=2048)
        made.append(Cluster(tmp_path_factory.mktemp(family), model))
        return made[-1], Oracle(model)

    yield make
    for cluster in made:
        cluster.stop()


def items(metrics: Metrics, source: str) -> float:
    return metrics("kvbaton_encoder_items_total", source=source)


def front(cluster: Cluster, name: str, pairs: int, **nodes: Node) -> Router:
    """A router in front of these nodes, when all pairs of an encoder node and another are known."""
    flags = [f"--{role}={node.url}" for role, node in nodes.items()]
    router = cluster.start_router(name, EVERY, *flags)
    poll(
        f"{len(nodes)} nodes and {pairs} pairs",
        lambda: (
            [node["state"] for node in router.get("/nodes")["nodes"]] == ["ready"] * len(nodes)
            and len(router.get("/nodes")["encoder_pairs"]) == pairs
            and router.num_pairs() == 1
        ),
        20,
        router.tail,
    )
    return router


class Counted:
    """Some nodes with empty caches, and what they count from then on."""

    def __init__(self, *nodes: Node) -> None:
        settle(*nodes)
        for node in nodes:
            node.forget()
        self._before = {node: node.metrics() for node in nodes}

    def __call__(self, node: Node) -> Metrics:
        settle(node)
        return node.metrics() - self._before[node]


# --- P encodes, or an encoder node over nixl ---


class House:
    """Over nixl: P, a prefill node without an encoder of its own, D, and an encoder node."""

    def __init__(self, make_cluster: MakeCluster) -> None:
        self.cluster, self.oracle = make_cluster("qwen2_5_vl")
        start = self.cluster.start_node
        self.e, self.doomed = start("encode", "e"), start("encode", "doomed")
        self.p = start("prefill", "p")
        self.blind = start("prefill", "blind", {"language-model-only": None})
        self.d = start("decode", "d", {"debug-poison": None})
        self.cluster.until_up(self.e, self.doomed, self.p, self.blind, self.d)
        self.ep = front(self.cluster, "ep-d", 0, prefill=self.p, decode=self.d)
        self.epd = front(self.cluster, "e-p-d", 2, encode=self.e, prefill=self.p, decode=self.d)

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.e, self.p, self.blind, self.d


@pytest.fixture(scope="module")
def house(make_cluster: MakeCluster) -> House:
    return House(make_cluster)


@pytest.mark.parametrize("router", ["ep", "epd"])
def test_tokens_are_those_of_transformers(house: House, router: str) -> None:
    front: Router = getattr(house, router)
    images = [picture(i, *size) for i, size in enumerate(SIZES)]
    body = talk("One ", images[0], " two ", images[1], " three ", images[2], " which?")
    count = Counted(*house.nodes)
    answer = front.post(CHAT, body)
    house.oracle.check(answer, *images)
    p, d, e = count(house.p), count(house.d), count(house.e)
    made = [items(node, "encoded") for node in (e, p, d)]
    assert made == ([0, 3, 0] if router == "ep" else [3, 0, 0])
    assert items(p, "transferred") == made[0]
    assert (e("kvbaton_transfer_posted_bytes_total") > 0) == (router == "epd")
    assert p("kvbaton_encoder_transfer_notices_total") == e("kvbaton_transfer_writes_total")
    length = len(answer["prompt_token_ids"])
    assert d("kvbaton_prompt_tokens_total", source="transferred") == length
    assert p("kvbaton_transfer_posted_bytes_total") == p("kvbaton_transfer_sent_bytes_total") > 0
    Counted(*house.nodes)
    assert streamed_tokens(list(front.stream(CHAT, body | {"stream": True}))) == tokens_of(answer)
    assert items(count(house.p), "encoded") == 2 * made[1]


def test_choices_share_the_images(house: House) -> None:
    image = picture(21, 64, 64)
    count = Counted(*house.nodes)
    answer = house.epd.post(CHAT, talk("Two of ", image, " please", n=2))
    assert len(answer["choices"]) == 2
    house.oracle.check(answer, image)
    assert [items(count(node), "encoded") for node in house.nodes] == [1, 0, 0, 0]


def test_prompts_with_images_have_logprobs(house: House) -> None:
    image = picture(22)
    Counted(*house.nodes)
    answer = house.epd.post(CHAT, talk("Score ", image, " now", prompt_logprobs=1))
    house.oracle.check(answer, image)
    first, *scores = answer["prompt_logprobs"]
    assert first is None
    assert len(scores) == len(answer["prompt_token_ids"]) - 1
    for token, score in zip(answer["prompt_token_ids"][1:], scores, strict=True):
        assert score[str(token)]["logprob"] <= 0
    settle(*house.nodes)


def test_a_second_turn_finds_the_first(house: House) -> None:
    image = picture(23, 64, 64)
    body = talk("Here is ", image, " and now tell")
    count = Counted(*house.nodes)
    first = house.epd.post(CHAT, body)
    said = {"role": "assistant", "content": first["choices"][0]["message"]["content"] or "well"}
    messages = [*body["messages"], said, {"role": "user", "content": "More."}]
    at_p = count(house.p)
    second = house.epd.post(CHAT, body | {"messages": messages})
    house.oracle.check(second, image)
    more = count(house.p) - at_p
    assert more("kvbaton_prompt_tokens_total", source="local_cache") >= (
        len(first["prompt_token_ids"]) // 16 * 16 - 16
    )
    assert items(count(house.e), "encoded") == 1
    assert items(more, "encoded") == items(more, "transferred") == 0


def test_a_node_without_an_encoder_needs_one(house: House) -> None:
    """When its encoder node is gone, the image is refused, or D serves it alone; text goes on."""
    image, blind = picture(24), house.blind
    router = front(house.cluster, "blind", 2, encode=house.doomed, prefill=blind, decode=house.d)
    count, at_doomed = Counted(*house.nodes), Counted(house.doomed)
    house.oracle.check(router.post(CHAT, talk("a ", image, " z")), image)
    assert items(at_doomed(house.doomed), "encoded") == 1
    assert items(count(blind), "transferred") == 1
    house.doomed.kill()
    with pytest.raises(HttpFailure) as failure:
        blind.post(CHAT, talk("b ", picture(25), " z"))
    assert b"no encoder of its own" in failure.value.body
    image = picture(26)
    house.oracle.check(router.post(CHAT, talk("c ", image, " z")), image)
    assert items(count(house.d), "encoded") >= 1
    assert len(tokens_of(router.post(CHAT, talk("Text only.")))) == 8
    assert items(count(blind), "encoded") == 0
    house.cluster.stop([router, house.doomed])
    settle(*house.nodes)


# --- images that are seen whole ---


def test_gemmas_tokens_are_those_of_transformers(make_cluster: MakeCluster) -> None:
    """P encodes, and an encoder node does; steps of P are barely longer than an image."""
    cluster, oracle = make_cluster("gemma3_vl")
    small = {"max-num-seqs": "8", "num-blocks": "800"}
    e = cluster.start_node("encode", "ge")
    p = cluster.start_node("prefill", "gp", small | {"max-num-batched-tokens": "16"})
    d = cluster.start_node("decode", "gd", small | {"debug-poison": None})
    cluster.until_up(e, p, d)
    ep = front(cluster, "g-ep-d", 0, prefill=p, decode=d)
    epd = front(cluster, "g-e-p-d", 2, encode=e, prefill=p, decode=d)
    images = [picture(30 + i, *size) for i, size in enumerate(SIZES[:2])]
    for router in (ep, epd):
        count = Counted(e, p, d)
        answer = router.post(CHAT, talk("One ", images[0], "\n", images[1], "\nwhich?"))
        oracle.check(answer, *images)
        made = [items(count(node), "encoded") for node in (e, p, d)]
        assert made == ([0, 2, 0] if router is ep else [2, 0, 0])
        length = len(answer["prompt_token_ids"])
        assert count(d)("kvbaton_prompt_tokens_total", source="transferred") == length
    cluster.stop([ep, epd, e, p, d])


# --- outputs that arrive wrong, late or never ---

FAULTS = {"corrupt": [0], "partial": [1], "delay": [2], "lose_notice": [3]}
"""What happens to which of the encoder node's writes; the fifth is fine."""


@pytest.mark.slow
def test_what_arrives_wrong_is_encoded_again(make_cluster: MakeCluster) -> None:
    cluster, oracle = make_cluster("qwen3_vl")
    faulty, fine = (
        {"transport": "faulty:" + json.dumps({"inner": "tcp", "seed": 7, **faults})}
        for faults in (FAULTS, {})
    )
    e = cluster.start_node("encode", "e", faulty)
    p = cluster.start_node("prefill", "p", fine)
    d = cluster.start_node("decode", "d", fine)
    cluster.until_up(e, p, d)
    router = front(cluster, "router", 2, encode=e, prefill=p, decode=d)
    count = Counted(e, p, d)
    for number in range(5):
        image = picture(30 + number)
        oracle.check(router.post(CHAT, talk(f"{number} ", image, " end")), image)
        settle(e, p, d)
    at_p = count(p)
    assert at_p("kvbaton_encoder_transfer_digests_failed_total") == 1
    assert items(at_p, "encoded") + items(at_p, "transferred") == 5
    assert items(at_p, "encoded") >= 1
    assert items(at_p, "transferred") >= 1
    cluster.stop()

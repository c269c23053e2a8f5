"""A node with encoder and language model: prompts with images give the tokens of transformers.

The core's loop is turned by hand; all else is real.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbaton.engine.build import build_engine
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.core import EngineCore
from kvbaton.engine.encoder.cache_manager import EncoderCacheManager
from kvbaton.engine.encoder.images import ImageReader, Read
from kvbaton.messages.engine import (
    AbortRequest,
    AddRequest,
    FromCore,
    Output,
    Outputs,
    Rejected,
    SamplingParams,
)
from kvbaton.types import NodeId
from tests.support.chats import picture
from tests.support.encoder_items import item_of
from tests.support.engine_node import QueueMailbox
from tests.support.making import making
from tests.support.pictures import FAMILIES, Pictures, Prompt

LIMIT_S = 60.0
ENCODED = 'kvbaton_encoder_items_total{source="encoded"}'
CACHED = 'kvbaton_encoder_items_total{source="cache"}'


class Node:
    """A core that works whenever it is asked to."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.sent: list[FromCore] = []
        mailbox = QueueMailbox(self.sent.append, lambda: None)
        options: dict[str, Any] = {"device": "cpu", "block_size": 4, "num_blocks": 257}
        options |= {"max_num_seqs": 8} | settings
        config = EngineConfig(model=str(folder), **options)
        self.core: EngineCore = build_engine(config, NodeId("n", os.urandom(16)), (), mailbox).core
        self.outputs: dict[str, list[Output]] = {}
        self._mailbox = mailbox

    def turn(self) -> None:
        """One turn of the core's loop, and what it says."""
        self.core.receive()
        self.core.poll()
        self.core.launch()
        self.core.update()
        for message in self.sent:
            match message:
                case Outputs(outputs=outputs):
                    for output in outputs:
                        self.outputs.setdefault(output.request_id, []).append(output)
                case Rejected():
                    raise AssertionError(message.message)
        self.sent.clear()

    def until(self, done: Callable[[], bool]) -> None:
        """Turn until something has happened."""
        limit = time.monotonic() + LIMIT_S
        while not done():
            assert time.monotonic() < limit, f"not within {LIMIT_S} s: {self.core.state()}"
            self.turn()

    def add(self, name: str, prompt: Prompt, count: int = 6, **more: Any) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, seed=0)
        request = AddRequest(
            request_id=name,
            token_ids=array("I", prompt.ids),
            params=params,
            items=prompt.items,
            **more,
        )
        self.core.add(request)

    def is_over(self, name: str) -> bool:
        return any(output.finish_reason for output in self.outputs.get(name, ()))

    def finish(self, *names: str) -> list[list[int]]:
        """Tokens of some requests, once they are over."""
        self.until(lambda: all(self.is_over(name) for name in names))
        return [[t for o in self.outputs[name] for t in o.token_ids] for name in names]

    def check_all(self, pictures: Pictures, prompts: Sequence[Prompt], count: int = 6) -> None:
        """All prompts at once give the tokens of transformers."""
        names = [f"r{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self.add(name, prompt, count)
        for prompt, got in zip(prompts, self.finish(*names), strict=True):
            assert got == pictures.greedy_along(prompt, got, count)

    @property
    def items(self) -> EncoderCacheManager:
        items = self.core.scheduler.items
        assert isinstance(items, EncoderCacheManager)
        return items

    def count(self, name: str) -> float:
        return self.core.counters()[name]

    def check_rest(self) -> None:
        """Nothing is held, and the books balance."""
        self.until(self.core.is_idle)
        assert self.core.imbalance() == 0
        assert list(self.items.pins()) == []

    def close(self) -> None:
        self.core.close()
        self._mailbox.close()


Start = Callable[..., Node]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(family=request.param)


@pytest.fixture(scope="module")
def pictures(folder: Path) -> Pictures:
    return Pictures(folder)


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    with making(partial(Node, folder), Node.close) as start:
        yield start


SMALL, WIDE, TALL, LARGE = (
    picture(1, 40, 32),
    picture(2, 100, 9),
    picture(3, 17, 90),
    picture(4, 80, 72),
)


@pytest.mark.parametrize("chunk", [7, 33, 2048])
def test_tokens_are_those_of_transformers(pictures: Pictures, start: Start, chunk: int) -> None:
    node = start(max_num_batched_tokens=chunk)
    one = pictures.prompt_of(5, SMALL, 9)
    many = pictures.prompt_of(1, LARGE, 1, WIDE, 3, TALL, 2, seed=1)
    twice = pictures.prompt_of(3, SMALL, 4, SMALL, 2, seed=2)
    node.check_all(pictures, (one, many, twice))
    assert node.count(ENCODED) == 4, "each of the four images once"
    assert node.count(CACHED) == 2, "the small one stands in three places"
    node.check_rest()


def test_a_known_image_is_not_encoded_again(pictures: Pictures, start: Start) -> None:
    node = start()
    first = pictures.prompt_of(5, LARGE, 2)
    again = pictures.prompt_of(8, LARGE, 5, seed=1)
    node.add("first", first)
    node.finish("first")
    node.add("again", again)
    assert node.finish("again") == [pictures.generate(again, 6)]
    assert (node.count(ENCODED), node.count(CACHED)) == (1, 1)
    node.add("salted", again, cache_salt="other")
    assert node.finish("salted") == [pictures.generate(again, 6)]
    assert node.count(ENCODED) == 2, "another salt may not share"
    node.check_rest()


def test_a_cached_prefix_asks_for_no_image(pictures: Pictures, start: Start) -> None:
    node = start()
    prompt = pictures.prompt_of(3, SMALL, 21)
    node.add("first", prompt)
    (expected,) = node.finish("first")
    node.items.core.reset_prefix_cache()
    node.add("second", prompt)
    assert node.finish("second") == [expected]
    assert node.count(ENCODED) == 1
    other = pictures.prompt_of(3, picture(9, 40, 32), 21)
    node.add("other image", other)
    assert node.finish("other image") == [pictures.generate(other, 6)]
    assert node.count(ENCODED) == 2, "equal tokens, another image: nothing may be shared"
    node.check_rest()


def test_a_cache_of_one_image_serves_them_all(
    folder: Path, pictures: Pictures, start: Start
) -> None:
    """Six prompts with three images each, and room for the largest image only."""
    rows = item_of(pictures.folder, LARGE).length
    node = start(encoder_cache_tokens=rows, max_num_batched_tokens=24)
    names = [f"r{number}" for number in range(6)]
    prompts = [
        pictures.prompt_of(1 + i % 3, LARGE, 2, picture(50 + i, 40, 32), 1, TALL, 2, seed=i)
        for i in range(len(names))
    ]
    for number, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
        node.add(name, prompt, priority=-number)
    for prompt, got in zip(prompts, node.finish(*names), strict=True):
        assert got == pictures.greedy_along(prompt, got, 6)
    node.check_rest()


def test_preempted_prompts_ask_again(pictures: Pictures, start: Start) -> None:
    node = start(num_blocks=30, max_model_len=110, max_num_batched_tokens=16)
    prompts = [pictures.prompt_of(2, picture(i, 40, 32), 4, seed=i) for i in range(4)]
    node.check_all(pictures, prompts, 20)
    assert node.count("kvbaton_preemptions_total") > 0
    node.check_rest()


@pytest.mark.parametrize("turns", [0, 1, 2, 4, 8])
def test_an_abort_at_any_time_leaves_nothing(pictures: Pictures, start: Start, turns: int) -> None:
    node = start(max_num_batched_tokens=8)
    shared = pictures.prompt_of(3, SMALL, 6, TALL, 2)
    node.add("gone", pictures.prompt_of(3, LARGE, 6, SMALL, 2, seed=1))
    node.add("stays", shared)
    for _ in range(turns):
        node.turn()
    node.core.abort(AbortRequest(request_id="gone"))
    assert node.finish("stays") == [pictures.generate(shared, 6)]
    node.check_rest()


def test_a_bad_image_ends_its_own_request_only(pictures: Pictures, start: Start) -> None:
    node = start()
    good = pictures.prompt_of(3, SMALL, 6)
    broken = msgspec.structs.replace(good.items[0], data=SMALL[:60], digest=bytes(32))
    node.add("bad", Prompt(good.ids, (broken,), good.patches))
    node.add("good", good)
    assert node.finish("good") == [pictures.generate(good, 6)]
    node.finish("bad")
    (output,) = node.outputs["bad"]
    assert output.finish_reason == "error"
    assert "image" in (output.error or "")
    assert output.error_code == "invalid_image"
    node.check_rest()


def test_a_false_grid_finds_nothing_of_others(pictures: Pictures, start: Start) -> None:
    node = start()
    good = pictures.prompt_of(3, WIDE, 6)
    node.add("good", good)
    node.finish("good")
    (item,) = good.items
    turned = msgspec.structs.replace(item, grid=(item.grid[0], item.grid[2], item.grid[1]))
    node.add("bad", Prompt(good.ids, (turned,), good.patches))
    node.finish("bad")
    assert "grid" in (node.outputs["bad"][0].error or "")
    node.check_rest()


def test_an_image_that_this_process_can_not_read_is_nobody_elses_fault(
    pictures: Pictures, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(reader: ImageReader, data: bytes) -> Read:
        raise MemoryError

    node, prompt = start(), pictures.prompt_of(3, SMALL, 6)
    monkeypatch.setattr(ImageReader, "read", full)
    node.add("r", prompt)
    node.finish("r")
    (output,) = node.outputs["r"]
    assert (output.finish_reason, output.error_code) == ("error", "internal_error")
    node.check_rest()


def test_without_an_encoder_the_error_says_so(pictures: Pictures, start: Start) -> None:
    node = start(language_model_only=True)
    node.add("r", pictures.prompt_of(3, SMALL, 6))
    node.finish("r")
    (output,) = node.outputs["r"]
    assert "no encoder of its own" in (output.error or "")
    assert output.error_code is None, "another time it may arrive"
    node.check_rest()


def test_a_store_keeps_outputs_for_later(pictures: Pictures, start: Start, tmp_path: Path) -> None:
    stored = {"store": f'filesystem:{{"path": "{tmp_path}"}}', "store_lookup_timeout": 60.0}
    prompt = pictures.prompt_of(3, LARGE, 6)
    first = start(**stored)
    first.add("r", prompt)
    (expected,) = first.finish("r")
    first.check_rest()
    second = start(**stored)
    again = pictures.prompt_of(7, LARGE, 2, seed=1)
    second.add("r", prompt)
    second.add("again", again)
    assert second.finish("r", "again") == [expected, pictures.generate(again, 6)]
    assert second.count(ENCODED) == 0
    second.check_rest()


def test_the_loop_does_not_sleep_over_what_the_encoder_shall_do(
    pictures: Pictures, start: Start
) -> None:
    node = start()
    prompt = pictures.prompt_of(SMALL, 6)
    node.add("r", prompt)
    node.core.launch()
    assert node.core.scheduler.parked, "it waits for the image at its very start"
    assert node.core.patience() == 0.0
    node.core.poll()
    assert node.core.patience() > 0.0, "the encoder works, and wakes the loop when it is done"
    assert node.finish("r") == [pictures.generate(prompt, 6)]
    node.check_rest()

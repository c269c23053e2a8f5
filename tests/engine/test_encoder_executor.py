"""The encoder executor: rows in the right blocks, each image once, and errors where they belong."""

from __future__ import annotations

import os
import select
import threading
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from kvbaton.engine.build import build_engine
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.core import EngineCore
from kvbaton.engine.encoder.pool import EncoderPool
from kvbaton.engine.encoder.worker import NO_DATA, NO_TOWER, encoder_executor
from kvbaton.engine.executor import Executor
from kvbaton.engine.model_config import load_model_config
from kvbaton.engine.step import BlockCopy, NewSequence, SequenceStep, StepPlan, StepResult
from kvbaton.errors import ConfigError
from kvbaton.messages.engine import FromCore, Item, Output, Outputs, Rejected
from kvbaton.types import NodeId
from tests.support.chats import picture
from tests.support.digests import digest_of
from tests.support.encoder_items import (
    ONE_TOKEN,
    expected_rows,
    item_of,
    padded,
    request_for,
    worker_of,
)
from tests.support.engine_node import QueueMailbox
from tests.support.making import making
from tests.support.waiting import until

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
SIZES = ((80, 50), (64, 64), (33, 17), (31, 160))


@pytest.fixture(params=FAMILIES)
def any_folder(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(family=request.param)


@pytest.fixture
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(family="qwen3_vl")


@pytest.fixture
def items(folder: Path) -> list[Item]:
    return [item_of(folder, picture(seed, *size)) for seed, size in enumerate(SIZES)]


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., Executor]]:
    def start(of: Path = folder, **settings: object) -> Executor:
        config = settings_of(of, **settings)
        return encoder_executor(config, load_model_config(of, config.dtype))

    with making(start, Executor.close) as make:
        yield make


def settings_of(folder: Path, **settings: object) -> EngineConfig:
    given = {"device": "cpu", "encoder_only": True} | settings
    return EngineConfig(model=str(folder), **given)  # type: ignore[arg-type]


def blocks_of(item: Item, first: int) -> tuple[int, ...]:
    """Blocks for an item, in an order that is not theirs in memory."""
    return tuple(reversed(range(first, first + padded(item) // 32)))


def sequence(handle: int, item: Item) -> NewSequence:
    return NewSequence(handle, array("I", (0,) * padded(item)), padded(item), 0, ONE_TOKEN, (item,))


def whole(handle: int, item: Item, blocks: tuple[int, ...]) -> SequenceStep:
    return SequenceStep(handle, 0, padded(item), (blocks,), 1)


def plan_for(items: list[Item], first: int = 1) -> tuple[StepPlan, list[tuple[int, ...]]]:
    """Encode items in one step, into blocks one after the other."""
    tables = []
    for item in items:
        tables.append(blocks_of(item, first))
        first += len(tables[-1])
    steps = tuple(
        whole(n, item, table) for n, (item, table) in enumerate(zip(items, tables, strict=True))
    )
    return StepPlan(1, new=tuple(map(sequence, range(len(items)), items)), steps=steps), tables


def stored(pool: EncoderPool, blocks: tuple[int, ...]) -> Tensor:
    """All rows of blocks: [rows, levels, hidden]."""
    ids = torch.tensor(blocks)
    return pool.gather(ids.repeat_interleave(32), torch.arange(32).repeat(len(ids)))


def errors(result: StepResult) -> dict[int, str | None]:
    return {sampled.handle: sampled.error for sampled in result.sampled}


# --- rows ---


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_a_batch_are_the_towers_own_then_zeros_and_are_summed(
    make: Callable[..., Executor], any_folder: Path, dtype: str
) -> None:
    executor = make(any_folder, dtype=dtype)
    items = [item_of(any_folder, picture(seed, *size)) for seed, size in enumerate(SIZES)]
    plan, tables = plan_for(items)
    result = executor.launch(plan).result()
    assert [(s.token_ids, s.error) for s in result.sampled] == [((0,), None)] * len(items)
    tolerance = 1e-5 if dtype == "float32" else 0.05
    for item, table in zip(items, tables, strict=True):
        rows, expected = (
            stored(worker_of(executor).cache, table),
            expected_rows(any_folder, item, dtype),
        )
        assert rows.dtype is getattr(torch, dtype)
        torch.testing.assert_close(rows[: item.length], expected, atol=tolerance, rtol=tolerance)
        assert not rows[item.length :].any()
        kept, now = executor.sums(0, table), digest_of(executor, 0, table, 0, 0, padded(item))
        until(lambda: kept.poll() is not None and now.poll() is not None, "sums")  # noqa: B023
        assert (kept.result()[0] == now.result()[0]).all()
        assert kept.result()[0].all(), "zero rows count too"


def test_an_image_in_a_batch_twice_is_encoded_once(
    make: Callable[..., Executor], items: list[Item]
) -> None:
    executor = make()
    plan, tables = plan_for([items[0], items[1], items[0]])
    executor.launch(plan).result()
    assert executor.counters()['kvbaton_encoder_items_total{source="encoded"}'] == 2
    total = items[0].length + items[1].length
    assert executor.counters()["kvbaton_encoder_rows_total"] == total
    assert torch.equal(
        stored(worker_of(executor).cache, tables[0]), stored(worker_of(executor).cache, tables[2])
    )
    assert stored(worker_of(executor).cache, tables[2])[: items[0].length].any()


def test_one_that_lacks_its_image_takes_the_rows_of_its_twin(
    make: Callable[..., Executor], items: list[Item]
) -> None:
    executor = make()
    plan, tables = plan_for([msgspec.structs.replace(items[0], data=b""), items[0]])
    assert errors(executor.launch(plan).result()) == {0: None, 1: None}
    assert torch.equal(
        stored(worker_of(executor).cache, tables[0]), stored(worker_of(executor).cache, tables[1])
    )


def test_only_what_lacks_is_written(
    make: Callable[..., Executor], folder: Path, items: list[Item]
) -> None:
    executor, item = make(), items[0]
    assert padded(item) == 64
    (new,), table = (sequence(1, item),), (5, 3)
    executor.launch(StepPlan(1, new=(new,), steps=(SequenceStep(1, 32, 32, (table,), 1),))).result()
    rows = stored(worker_of(executor).cache, table)
    assert not rows[:32].any(), "a cached prefix is left alone"
    torch.testing.assert_close(rows[32 : item.length], expected_rows(folder, item)[32:])
    kept, now = executor.sums(0, (3,)), digest_of(executor, 0, (3,), 32, 32, 64)
    until(lambda: kept.poll() is not None and now.poll() is not None, "sums")
    assert (kept.result()[0] == now.result()[0]).all()


def test_the_last_token_of_a_cached_item_needs_a_copy_and_no_encoder(
    make: Callable[..., Executor], items: list[Item]
) -> None:
    executor, item = make(), items[0]
    plan, (table,) = plan_for([item])
    executor.launch(plan).result()
    again = StepPlan(
        2,
        copies=(BlockCopy(0, table[1], 9),),
        new=(sequence(7, item),),
        steps=(SequenceStep(7, padded(item) - 1, 1, ((table[0], 9),), 1),),
    )
    (sampled,) = executor.launch(again).result().sampled
    assert (sampled.token_ids, sampled.error) == ((0,), None)
    assert executor.counters()['kvbaton_encoder_items_total{source="encoded"}'] == 1
    assert torch.equal(
        stored(worker_of(executor).cache, (9,)), stored(worker_of(executor).cache, table[1:])
    )
    kept = [executor.sums(0, (block,)) for block in (table[1], 9)]
    until(lambda: all(sums.poll() is not None for sums in kept), "sums")
    assert (kept[0].result()[0] == kept[1].result()[0]).all()


# --- what can't be encoded ---


def test_bad_images_fail_alone(
    make: Callable[..., Executor], folder: Path, items: list[Item]
) -> None:
    executor = make()
    cut = msgspec.structs.replace(items[1], data=items[1].data[:100])
    short = msgspec.structs.replace(items[2], length=items[2].length - 1)
    bare = msgspec.structs.replace(items[3], data=b"")
    late = msgspec.structs.replace(items[0], start=1, digest=bytes(32))
    frames, high, wide = items[2].grid
    turned = msgspec.structs.replace(items[2], grid=(frames, wide, high), digest=bytes(31) + b"t")
    plan, tables = plan_for([items[0], cut, short, bare, late, turned])
    found = errors(executor.launch(plan).result())
    assert found[0] is None
    torch.testing.assert_close(
        stored(worker_of(executor).cache, tables[0])[: items[0].length],
        expected_rows(folder, items[0]),
    )
    assert "can't decode the image" in (found[1] or "")
    rows, grid = items[2].length, items[2].grid
    assert (
        found[2] == f"the image has {rows} rows in a grid of {grid}, "
        f"and the prompt {rows - 1} rows in a grid of {grid}"
    )
    assert found[3] == NO_DATA
    assert high != wide
    assert str(turned.grid) in (found[5] or "")
    assert found[4] == "a prompt for an encoder must be one item that starts at 0"
    for table in tables[1:]:
        assert not stored(worker_of(executor).cache, table).any(), (
            "nothing is written for who failed"
        )


def test_who_says_something_else_of_an_image_fails_alone(
    make: Callable[..., Executor], items: list[Item]
) -> None:
    executor, (frames, high, wide) = make(), items[2].grid
    turned = msgspec.structs.replace(items[2], grid=(frames, wide, high))
    plan, _ = plan_for([items[2], turned])
    found = errors(executor.launch(plan).result())
    assert found[0] is None
    assert "grid" in (found[1] or "")


def test_without_a_tower_nothing_is_encoded(
    make: Callable[..., Executor], items: list[Item]
) -> None:
    executor = make(language_model_only=True)
    plan, _ = plan_for(items[:1])
    assert errors(executor.launch(plan).result()) == {0: NO_TOWER}
    assert executor.counters() == {}


def test_a_model_of_text_has_no_encoder(checkpoint: Callable[..., Path]) -> None:
    mailbox = QueueMailbox(lambda message: None, lambda: None)
    with pytest.raises(ConfigError, match="no vision tower"):
        build_engine(settings_of(checkpoint()), NodeId("n", bytes(16)), (), mailbox)
    mailbox.close()


# --- beside the core's loop ---


def is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def test_a_step_says_honestly_whether_it_is_over(
    make: Callable[..., Executor], items: list[Item]
) -> None:
    executor = make()
    gate = threading.Event()
    executor.group.threads[0].submit(gate.wait)
    plans = [plan_for([item])[0] for item in items[:2]]
    steps = [executor.launch(plan) for plan in plans]
    assert not steps[0].ready()
    assert not is_readable(*executor.wake_fds)
    gate.set()
    until(lambda: all(step.ready() for step in steps), "two steps")
    for step in steps:
        assert is_readable(*executor.wake_fds)
        step.result()
    assert not is_readable(*executor.wake_fds)


def test_images_are_read_ahead_of_their_step(
    make: Callable[..., Executor], items: list[Item], folder: Path
) -> None:
    executor = make()
    encoder = worker_of(executor).encoder
    assert encoder is not None
    readings, gate = encoder.readings, threading.Event()
    executor.group.threads[0].submit(gate.wait)
    executor.expect(request_for(items[0], "r"))
    until(lambda: readings.seconds > 0, "the image is read before its step")
    before = readings.seconds
    step = executor.launch(plan_for([items[0]])[0])
    gate.set()
    assert errors(step.result()) == {0: None}
    assert readings.seconds == before, "and not again in it"
    assert errors(executor.launch(plan_for([items[0]])[0]).result()) == {0: None}
    assert readings.seconds > before


# --- in a core ---


class Core:
    """An encoder's core that stands alone, turned by hand."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.outputs: dict[str, list[Output]] = {}
        self.mailbox = QueueMailbox(self._deliver, lambda: None)
        self.engine = build_engine(
            settings_of(folder, **settings),
            NodeId("e", os.urandom(16)),
            (),
            self.mailbox,
        )

    @property
    def core(self) -> EngineCore:
        return self.engine.core

    def _deliver(self, message: FromCore) -> None:
        assert not isinstance(message, Rejected), message
        if isinstance(message, Outputs):
            for output in message.outputs:
                self.outputs.setdefault(output.request_id, []).append(output)

    def run(self) -> None:
        """Turn the loop until nothing is left to do."""

        def turn() -> bool:
            self.core.receive()
            self.core.poll()
            self.core.launch()
            self.core.update()
            assert self.core.imbalance() == 0
            return self.core.is_idle()

        until(turn, "an idle core")

    def counter(self, name: str) -> float:
        return self.core.metrics().counters.get(name, 0.0)

    @property
    def encoded(self) -> float:
        return self.counter('kvbaton_encoder_items_total{source="encoded"}')

    def close(self) -> None:
        self.core.close()
        self.mailbox.close()


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Core]]:
    with making(partial(Core, folder), Core.close) as start:
        yield start


def test_a_node_says_what_it_takes(start: Callable[..., Core]) -> None:
    engine = start(encoder_cache_tokens=320).engine.ready
    assert (engine.num_blocks, engine.block_size, engine.max_model_len) == (10, 32, 321)
    assert engine.identity == engine.encoder_identity != b""
    assert engine.vocab_size == 1


def test_equal_images_of_any_requests_are_encoded_once(
    start: Callable[..., Core], items: list[Item]
) -> None:
    node = start()
    for name in ("a", "b"):
        node.core.add(request_for(items[0], name))
    node.core.add(request_for(items[1], "c"))
    node.run()
    node.core.add(request_for(items[0], "d"))
    node.run()
    assert node.encoded == 2
    for name in "abcd":
        (output,) = node.outputs[name]
        assert (output.token_ids, output.finish_reason) == ((0,), "length")
    assert node.outputs["d"][0].cached_tokens == padded(items[0]) - 1


def test_who_fails_is_told_why_and_leaves_nothing(
    start: Callable[..., Core], items: list[Item]
) -> None:
    node = start()
    cut = msgspec.structs.replace(items[1], data=items[1].data[:100])
    for number, item in enumerate((items[0], cut, items[2])):
        node.core.add(request_for(item, f"r{number}"))
    node.run()
    (output,) = node.outputs["r1"]
    assert output.finish_reason == "error"
    assert "can't decode the image" in (output.error or "")
    assert [node.outputs[name][0].finish_reason for name in ("r0", "r2")] == ["length"] * 2
    blocks = node.core.scheduler.blocks
    (owners,) = blocks.owners()
    cached = (padded(items[0]) + padded(items[2])) // 32
    assert owners["cached"] == cached, "what failed is not cached"
    assert blocks.pool.num_uncached == node.engine.ready.num_blocks - cached
    node.core.add(request_for(items[1], "again"))
    node.run()
    assert node.outputs["again"][0].finish_reason == "length"


def test_an_abort_while_a_step_runs(start: Callable[..., Core], items: list[Item]) -> None:
    node, gate = start(), threading.Event()
    executor = node.core.executor
    executor.group.threads[0].submit(gate.wait)
    node.core.add(request_for(msgspec.structs.replace(items[0], data=b"no image"), "r"))
    node.core.launch()
    node.core.update()
    assert len(node.core.in_flight) == 1, "the loop does not wait for the step"
    node.core.send(node.core.scheduler.abort("r"))
    gate.set()
    node.run()
    assert [output.finish_reason for output in node.outputs["r"]] == ["abort"]


def test_steps_take_whole_items_as_far_as_they_go(
    start: Callable[..., Core], items: list[Item]
) -> None:
    budget = padded(items[1]) + padded(items[2]) + 16
    node = start(max_num_encoder_tokens=budget)
    assert [padded(item) for item in items] == [64, 64, 32, 96]
    for number, item in enumerate((items[1], items[2], items[0])):
        node.core.add(request_for(item, f"r{number}"))
    plans = []
    while (plan := node.core.scheduler.plan()) is not None:
        plans.append([step.count for step in plan.steps])
        node.core.send(node.core.scheduler.update(node.core.executor.launch(plan).result()))
    assert plans == [[64, 32], [64]]


def test_an_item_larger_than_a_step_is_encoded_alone(
    start: Callable[..., Core], items: list[Item]
) -> None:
    node = start(max_num_encoder_tokens=33)
    for number, item in enumerate((items[3], items[2])):
        node.core.add(request_for(item, f"r{number}"))
    node.run()
    assert node.core.steps == 2
    assert [node.outputs[name][0].finish_reason for name in ("r0", "r1")] == ["length"] * 2


def test_a_small_pool_evicts_what_nobody_needs(
    start: Callable[..., Core], items: list[Item]
) -> None:
    node = start(encoder_cache_tokens=96)
    for number in range(8):
        node.core.add(request_for(items[number % 4], f"r{number}"))
    node.run()
    assert all(node.outputs[f"r{n}"][0].finish_reason == "length" for n in range(8))
    assert node.encoded > 4

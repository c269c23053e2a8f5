"""The core's loop, turned by hand: what comes before what, and what its metrics would show."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvbaton.engine.build import ConnectorContext, MakeConnectors, build_engine
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.core import EngineCore
from kvbaton.engine.kv_connector import KVConnector
from kvbaton.engine.pending import Pending
from kvbaton.engine.scheduler import Scheduler
from kvbaton.engine.stats import PARTS
from kvbaton.engine.step import SequenceStep, StepPlan, StepResult
from kvbaton.engine.step_costs import MIN_STEPS, step_costs, terms_of
from kvbaton.messages.engine import AddRequest, FromCore, Output, Shutdown
from kvbaton.server.metrics import families
from kvbaton.types import NodeId
from tests.support.engine_node import ENGINE, Hold, QueueMailbox, greedy
from tests.support.waiting import until

PROMPT = tuple(range(4, 14))


class Listener(KVConnector):
    """Notes how much of the only request is computed whenever it may speak."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.heard: list[int] = []
        self.expects = False

    def awaits(self) -> bool:
        return self.expects

    def poll(self, now: float) -> list[Output]:
        if request := self.scheduler.requests.get("r"):
            self.heard.append(request.sequences[0].num_computed)
        return []


@dataclass(frozen=True)
class ListenerFactory:
    sends_blocks = False

    @property
    def items(self) -> ListenerFactory:
        return self

    def __call__(self, surroundings: ConnectorContext) -> MakeConnectors:
        return lambda executor, scheduler: [Listener(scheduler)]


@pytest.fixture
def sent() -> list[FromCore]:
    return []


@pytest.fixture
def core(checkpoint: Callable[..., Path], sent: list[FromCore]) -> Iterator[EngineCore]:
    """A core with a request whose prompt takes one step, and room for more."""
    config = EngineConfig(model=str(checkpoint()), **ENGINE)
    mailbox = QueueMailbox(sent.append, lambda: None)
    core = build_engine(config, NodeId("n", os.urandom(16)), (ListenerFactory(),), mailbox).core
    core.add(
        AddRequest(request_id="r", token_ids=array("I", PROMPT), params=greedy({"max_tokens": 2}))
    )
    yield core
    core.close()
    mailbox.close()


def test_peers_are_heard_before_a_step_counts(core: EngineCore) -> None:
    """What arrives during a step may want what the step has computed, before it is given back."""
    (listener,) = (each for each in core.connectors if isinstance(each, Listener))
    core.launch()
    core.update()
    assert listener.heard == [0], "asked once while the step's result was there, but not applied"
    assert core.scheduler.requests["r"].sequences[0].num_computed == len(PROMPT)
    core.launch()
    core.update()
    assert listener.heard == [0, len(PROMPT)]
    assert "r" not in core.scheduler.requests, "it has ended"


def test_connectors_are_heard_while_a_step_runs(core: EngineCore) -> None:
    """One that awaits something is, during a prompt, until the next step is due."""
    (listener,) = (each for each in core.connectors if isinstance(each, Listener))
    terms = terms_of((SequenceStep(1, 0, len(PROMPT), ((),), 1),))
    core.step_costs = step_costs()  # what was tried says that such a step is a matter of ms
    for _ in range(MIN_STEPS):
        core.step_costs.observe(terms, 100.0)
    listener.expects = True
    with Hold(core.executor.group.threads[0]):
        core.turn()
        assert len(core.in_flight) == 1, "it went on without the step's result"
        assert 0 < core.patience() < 1
        core.turn()
        assert listener.heard == [0, 0]
    until(core.in_flight[0].ready, "the step's end")
    core.turn()
    assert not core.in_flight, "it is over before it was expected"
    core.turn()
    assert "r" not in core.scheduler.requests, "a step in which all decode is waited for"


def test_peers_are_heard_between_two_launches(core: EngineCore) -> None:
    """To launch a chunk behind a long prefix takes as long as the driver's queue is full."""
    (listener,) = (each for each in core.connectors if isinstance(each, Listener))
    core.depth = 2
    core.launch()
    assert len(core.in_flight) == 2
    assert listener.heard == [0]


@pytest.mark.parametrize(("prompt", "waits"), [(12, True), (6, False)], ids=["long", "short"])
def test_tokens_do_not_wait_for_a_long_launch(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, prompt: int, waits: bool
) -> None:
    """A large step is launched when the one before has told its tokens, if all decode there."""
    monkeypatch.setattr("kvbaton.engine.core.WHOLE_TOKENS", 8)
    core.depth = 2
    launch, beside = core.executor.launch, []

    def noted(plan: StepPlan) -> Pending[StepResult]:
        beside.append((plan.num_tokens, [step.number for step in core.scheduler.in_flight]))
        return launch(plan)

    monkeypatch.setattr(core.executor, "launch", noted)

    def add(name: str, prompt: int, max_tokens: int) -> None:
        params = greedy({"max_tokens": max_tokens})
        core.add(
            AddRequest(request_id=name, token_ids=array("I", range(40 - prompt, 40)), params=params)
        )

    add("decodes", 20, 20)
    while core.steps < 4 or len(core.in_flight) == 2:
        core.turn()
    assert len(core.in_flight) == 1
    first = len(beside)
    add("comes", prompt, 2)
    core.launch()
    assert beside[:2] == [(16, [1]), (15, [1, 2])], "a prompt's step is not waited for"
    numbers = [first + 1] if waits else [first, first + 1]
    assert beside[first] == (prompt + 1, numbers)
    while core.scheduler.requests:
        core.turn()


def test_a_steps_parts_add_up(core: EngineCore) -> None:
    core.turn()
    core.turn()
    told = core.times.dump()
    first, second = (dict(zip(told["columns"], row, strict=True)) for row in told["rows"])
    names = ("number", "tokens", "sequences", "new", "ended")
    assert [first[name] for name in names] == [1, len(PROMPT), 1, 1, 0]
    assert [second[name] for name in names] == [2, 1, 1, 0, 1]
    spent = sum(second[part] for part in PARTS)
    assert spent == pytest.approx(second["at"] - first["at"])
    assert 0 < second["device"] <= second["step"] <= spent


def imbalance(core: EngineCore) -> float:
    """As a scrape of the node shows it."""
    (family,) = (
        family
        for family in families(core.metrics().gauges, "gauge")
        if family.name == "kvbaton_ledger_imbalance"
    )
    (sample,) = family.samples
    return sample.value


def lose_reference(core: EngineCore) -> Callable[[], None]:
    """As a request that ends and forgets to give a block back."""
    pool = core.scheduler.blocks.pool
    blocks = pool.allocate(1)
    return lambda: pool.deref(blocks)


def lose_outgoing_hold(core: EngineCore) -> Callable[[], None]:
    """As a transfer that ends and forgets what it read."""
    pool = core.scheduler.blocks.pool
    (block, *_) = core.scheduler.requests["r"].sequences[0].tables[0]
    pool.hold_outgoing([block])
    return lambda: pool.release_outgoing([block])


def lose_incoming_mark(core: EngineCore) -> Callable[[], None]:
    """As a reservation that nobody remembers."""
    pool = core.scheduler.blocks.pool
    (*_, block) = core.scheduler.requests["r"].sequences[0].tables[0]
    pool.hold_incoming([block])
    return lambda: pool.release_incoming([block])


def lose_key(core: EngineCore) -> Callable[[], None]:
    """As a cached block that no prompt finds."""
    (by_key,) = core.scheduler.blocks.pool.by_key
    key, block = next(iter(by_key.items()))
    del by_key[key]
    return lambda: by_key.update({key: block})


def test_a_shutdown_leaves_no_more_time_than_an_earlier_one(core: EngineCore) -> None:
    for grace_s, over in ((60.0, False), (0.0, True), (60.0, True)):
        core.shut_down(Shutdown(grace_s=grace_s))
        assert core.finished() is over, "its request has not ended"


def test_work_waits_for_the_audit_now_and_then_only(core: EngineCore) -> None:
    assert imbalance(core) == 0
    undo = lose_reference(core)
    assert imbalance(core) == 0, "it was audited just now"
    core.scheduler.abort("r")
    while not core.is_idle():
        core.launch()
        core.update()
    assert imbalance(core) > 0
    undo()
    assert imbalance(core) == 0


@pytest.mark.parametrize("leak", [lose_reference, lose_outgoing_hold, lose_incoming_mark, lose_key])
def test_a_leak_shows(
    core: EngineCore,
    leak: Callable[[EngineCore], Callable[[], None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvbaton.engine.core.AUDIT_PERIOD_S", 0.0)
    core.launch()
    core.update()
    assert imbalance(core) == 0
    undo = leak(core)
    assert imbalance(core) > 0
    undo()
    core.launch()
    core.update()
    assert imbalance(core) == 0


def test_a_rank_that_has_ended_ends_the_core(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended() -> None:
        raise RuntimeError("rank 1 ended with code -9")

    monkeypatch.setattr(core.executor.workers[0], "check", ended)
    with pytest.raises(RuntimeError, match="rank 1 ended"):
        core.run()

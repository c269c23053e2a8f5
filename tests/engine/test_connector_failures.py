"""A connector that raises ends neither the core nor what it has no part in."""

from __future__ import annotations

import os
import select
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from kvbaton.engine.build import ConnectorContext, MakeConnectors, build_engine
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.kv_connector import HeldBlocks, KVConnector, Load
from kvbaton.engine.request import Request, Sequence
from kvbaton.errors import ConfigError
from kvbaton.messages.engine import AddRequest, Metrics, Output, Outputs, Rejected, TransferSpec
from kvbaton.types import NodeId
from tests.support.engine_node import ENGINE, QueueMailbox, greedy
from tests.support.making import making
from tests.support.waiting import until

PROMPT = tuple(range(4, 14))
LOADABLE = 8


class Raising(KVConnector):
    """Raises in one hook. If it `offers`, it begins to load every prompt once, and never ends.

    Attributes:
        broken: the hook, as long as it raises.
        polled: how often.
        loads: what it has begun.
    """

    name = "raising"
    transfer_role = "source"

    def __init__(self, hook: str, *, offers: bool) -> None:
        self.broken = hook
        self.offers = offers
        self.polled = 0
        self.loads: list[Load] = []
        self.wake_fds = (os.eventfd(1),)  # always readable: nobody takes what it has

    def _raise(self, hook: str) -> None:
        if hook == self.broken:
            raise ZeroDivisionError(f"in {hook}")

    def match(self, sequence: Sequence, num_cached: int) -> int:
        self._raise("match")
        return LOADABLE if self.offers and not num_cached and not self.loads else 0

    def start_load(self, load: Load) -> None:
        self.loads.append(load)
        self._raise("start_load")

    def started(self, sequence: Sequence) -> None:
        self._raise("started")

    def progressed(self, request: Request) -> None:
        self._raise("progressed")

    def committed(self, sequence: Sequence, g: int, first: int, end: int) -> None:
        self._raise("committed")

    def emitted(self, outputs: list[Output]) -> list[Output]:
        self._raise("emitted")
        return outputs

    def finished(self, request: Request) -> None:
        self._raise("finished")

    def poll(self, now: float) -> list[Output]:
        self.polled += 1
        self._raise("poll")
        return []

    def flush(self) -> None:
        self._raise("flush")

    def next_deadline(self) -> float | None:
        self._raise("next_deadline")
        return None

    def busy(self) -> bool:
        self._raise("busy")
        return False

    def close(self) -> None:
        os.close(self.wake_fds[0])
        self._raise("close")

    def held_blocks(self) -> HeldBlocks:
        self._raise("held_blocks")
        return HeldBlocks([load.spans for load in self.loads])

    def imbalance(self) -> int:
        self._raise("imbalance")
        return 0

    def counters(self) -> dict[str, float]:
        self._raise("counters")
        return {}

    def gauges(self) -> dict[str, float]:
        self._raise("gauges")
        return {}


HOOKS = sorted(hook for hook in vars(Raising) if callable(getattr(KVConnector, hook, None)))
HOOKS.remove("__init__")
HOOKS.remove("progressed")  # of hand-overs only; it has a test of its own


@dataclass(frozen=True)
class Factory:
    """Hands out a connector that was made before."""

    connector: KVConnector
    sends_blocks = True

    @property
    def items(self) -> Factory:
        return self

    def __call__(self, surroundings: ConnectorContext) -> MakeConnectors:
        return lambda executor, scheduler: [self.connector]


class Rig:
    """A core with a connector that raises, turned by hand."""

    def __init__(
        self, folder: Path, hook: str, *, offers: bool = False, **settings: object
    ) -> None:
        self.outputs: list[Output] = []
        self.rejected: list[Rejected] = []
        self.metrics: list[Metrics] = []
        self.mailbox = QueueMailbox(self._take, lambda: None)
        self.sent: set[str] = set()
        self.connector = Raising(hook, offers=offers)
        config = EngineConfig(model=str(folder), **{**ENGINE, **settings})
        node = NodeId("n", os.urandom(16))
        self.core = build_engine(config, node, (Factory(self.connector),), self.mailbox).core

    def _take(self, message: object) -> None:
        match message:
            case Outputs(outputs=outputs):
                self.outputs += outputs
            case Rejected():
                self.rejected.append(message)
            case Metrics():
                self.metrics.append(message)

    def run(self, *requests: AddRequest) -> dict[str, str | None]:
        """Turn until all that were ever sent are over; how each ended."""
        self.mailbox.post(*requests)
        self.sent |= {request.request_id for request in requests}
        for _ in range(300):
            self.core.turn()
            ends: dict[str, str | None] = {
                o.request_id: o.finish_reason for o in self.outputs if o.finish_reason
            }
            ends |= {r.request_id: f"rejected {r.status}" for r in self.rejected}
            if ends.keys() == self.sent:
                return ends
        raise AssertionError(f"not over: {self.core.scheduler.state()}")

    def close(self) -> None:
        self.core.close()
        self.mailbox.close()

    def gauge(self, name: str) -> float:
        return self.core.metrics().gauges.get(name, 0.0)

    def failures(self) -> float:
        return self.core.metrics().counters['kvbaton_connector_failures_total{connector="raising"}']


@pytest.fixture
def rig(checkpoint: Callable[..., Path]) -> Iterator[Callable[..., Rig]]:
    with making(partial(Rig, checkpoint()), Rig.close) as make:
        yield make


def request(name: str, role: str | None = None) -> AddRequest:
    transfer = None if role is None else TransferSpec(role=role, transfer_id=bytes(16))
    return AddRequest(
        request_id=name,
        token_ids=array("I", PROMPT),
        params=greedy({"max_tokens": 3}),
        transfer=transfer,
    )


@pytest.mark.parametrize("hook", HOOKS)
def test_no_hook_ends_the_core(rig: Callable[..., Rig], hook: str) -> None:
    """Requests that it loads nothing of and hands nothing over for end as without it."""
    broken = rig(hook, offers=hook == "start_load")
    assert broken.run(request("a"), request("b")) == {"a": "length", "b": "length"}
    broken.core.is_idle()
    broken.core.metrics()
    if hook == "close":
        broken.core.close()
    assert broken.failures() > 0
    broken.connector.broken = ""
    assert broken.core.imbalance() == 0
    if hook != "close":
        assert broken.run(request("c"))["c"] == "length"


def test_the_node_is_unhealthy_while_it_fails(rig: Callable[..., Rig]) -> None:
    broken = rig("poll")
    broken.run(request("a"))
    assert broken.gauge("kvbaton_unhealthy") == 1
    polled = broken.connector.polled
    for _ in range(20):
        broken.core.poll()
        broken.core.launch()
    assert broken.connector.polled == polled, "it is left alone for a while"
    assert broken.core.patience() > 0, "nor does what it does not take keep the loop awake"
    poller = select.poll()
    poller.register(broken.core.wake_fd, select.POLLIN)
    assert not poller.poll(0)
    broken.mailbox.post(request("b", "source"))
    broken.sent.add("b")
    broken.core.receive()
    assert [r.status for r in broken.rejected] == [503], "it takes no part in new hand-overs"
    broken.connector.broken = ""

    def polled_again() -> bool:
        broken.core.poll()
        return broken.connector.polled > polled

    until(polled_again, "polled again")
    assert broken.gauge("kvbaton_unhealthy") == 0
    assert poller.poll(0)
    assert broken.run(request("c", "source"))["c"] == "length"


@pytest.mark.parametrize(("policy", "end"), [("recompute", "length"), ("fail", "error")])
@pytest.mark.parametrize("hook", ["start_load", "poll", "flush"])
def test_its_loads_fail_by_the_policy(
    rig: Callable[..., Rig], hook: str, policy: str, end: str
) -> None:
    broken = rig("", offers=True, kv_load_failure_policy=policy)
    if hook == "start_load":
        broken.connector.broken = hook
    broken.mailbox.post(request("a"))
    broken.sent.add("a")
    broken.core.turn()
    assert broken.connector.loads
    broken.connector.broken = hook
    assert broken.run() == {"a": end}
    assert broken.failures() > 0
    assert broken.core.imbalance() == 0, "what it may still write stays marked"


def test_of_a_hook_about_one_request_only_that_hand_over_fails(rig: Callable[..., Rig]) -> None:
    broken = rig("progressed")
    broken.mailbox.post(request("source", "source"), request("plain"))
    broken.sent |= {"source", "plain"}
    assert broken.run() == {"source": "error", "plain": "length"}
    (error,) = [o.error for o in broken.outputs if o.finish_reason == "error"]
    assert error is not None
    assert "ZeroDivisionError" in error
    assert broken.gauge("kvbaton_unhealthy") == 0


def test_a_part_of_the_engine_ends_the_core(rig: Callable[..., Rig]) -> None:
    """An encoder's rank that fails is no better than one of the language model."""
    broken = rig("poll")
    broken.connector.contained = False
    with pytest.raises(ZeroDivisionError):
        broken.core.turn()


def test_an_engine_whose_store_does_not_open_leaves_no_thread(
    checkpoint: Callable[..., Path],
) -> None:
    store = 'filesystem:{"path": "/dev/null/store"}'
    config = EngineConfig(model=str(checkpoint()), **(dict(ENGINE) | {"store": store}))
    mailbox = QueueMailbox(lambda message: None, lambda: None)
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="store"):
        build_engine(config, NodeId("lone", os.urandom(16)), (), mailbox)
    mailbox.close()
    assert set(threading.enumerate()) <= before

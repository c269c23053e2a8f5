"""Nodes between which nothing gets through are kept apart, and tried again ever more rarely."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from kvbaton.messages.nodes import NodeInfo
from kvbaton.router.config import MembershipTimers
from kvbaton.router.failing_pairs import (
    FIRST_PERIOD_S,
    FIRST_TRIAL_S,
    LEAST_FAILURES,
    MAX_PERIOD_S,
)
from kvbaton.router.membership import Member, Membership, NodeState
from kvbaton.router.route import Route

ROLES = {"p": "prefill", "d": "decode", "e": "decode", "q": "prefill"}


def info(node_id: str, failures: dict[str, int] | None = None, life: str = "1") -> NodeInfo:
    return NodeInfo(
        node_id=node_id,
        generation=life,
        role=ROLES[node_id],
        url=f"http://127.0.0.1:1/{node_id}",
        model="m",
        control_address=address(node_id),
        identity="aa",
        wire_failures={address(peer): n for peer, n in (failures or {}).items()},
    )


def address(node_id: str) -> str:
    return f"tcp://127.0.0.1:{ord(node_id)}"


class Table:
    """Four nodes that are ready, and a clock."""

    def __init__(self) -> None:
        self.membership, self.now = Membership(MembershipTimers(heartbeat_s=1e3, forget_s=1e4)), 0.0
        for _ in range(2):
            for node_id in ROLES:
                self.tell(node_id)
                self.membership.probed(node_id, "1", None, 0.0)

    def tell(self, node_id: str, failures: dict[str, int] | None = None, **more: Any) -> None:
        self.membership.register(info(node_id, failures, **more), self.now)

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.membership.tick(self.now)

    def apart(self) -> set[tuple[str, str]]:
        """Pairs that are not to be chosen."""
        pairs = {(p.node_id, d.node_id) for p, d in self.membership.ready().pairs}
        return {(p, d) for p in "pq" for d in "de"} - pairs

    def try_it(self) -> None:
        """The pair P, D is chosen."""
        assert ("p", "d") not in self.apart()
        nodes = self.membership.members
        self.membership.sent(Route(nodes["d"].info, nodes["p"].info))


@pytest.fixture
def table() -> Table:
    return Table()


def test_one_failure_is_no_pattern(table: Table) -> None:
    table.tell("d", {"p": LEAST_FAILURES - 1})
    assert not table.apart()


def test_only_the_pair_is_out_and_both_nodes_serve(table: Table) -> None:
    table.tell("d", {"p": LEAST_FAILURES})
    assert table.apart() == {("p", "d")}
    assert {node.node_id for node in table.membership.ready().serving} == set(ROLES)


def test_prefixes_do_not_go_that_way_either(table: Table) -> None:
    table.tell("d", {"p": LEAST_FAILURES})
    able = {node.node_id: ids for node, ids in table.membership.ready().senders}
    assert able == {"p": {"e"}, "q": {"d", "e"}}


def test_a_trial_is_one_request_and_what_fails_doubles_the_wait(table: Table) -> None:
    table.tell("d", {"p": LEAST_FAILURES})
    waits = [FIRST_TRIAL_S, 2 * FIRST_PERIOD_S, 4 * FIRST_PERIOD_S, MAX_PERIOD_S, MAX_PERIOD_S]
    for failed, wait_s in enumerate(waits):
        table.passes(0.99 * wait_s)
        assert table.apart()
        table.passes(0.02 * wait_s)
        table.try_it()
        assert table.apart(), "one request is enough to see"
        table.tell("d", {"p": LEAST_FAILURES + failed + 1})


def test_requests_that_were_on_their_way_are_no_trials(table: Table) -> None:
    for failures in range(LEAST_FAILURES, 50):
        table.tell("d", {"p": failures})
    table.passes(1.01 * FIRST_TRIAL_S)
    table.try_it()


def test_a_trial_of_which_nothing_is_heard_is_made_again(table: Table) -> None:
    table.tell("d", {"p": LEAST_FAILURES})
    table.passes(1.01 * FIRST_TRIAL_S)
    table.try_it()
    table.passes(1.01 * FIRST_PERIOD_S)
    table.try_it()


def test_what_arrives_ends_it(table: Table) -> None:
    table.tell("d", {"p": LEAST_FAILURES})
    table.passes(1.01 * FIRST_TRIAL_S)
    table.try_it()
    table.tell("d")
    assert not table.apart()


@pytest.mark.parametrize("who", ["p", "d"])
def test_another_life_is_tried_at_once(table: Table, who: str) -> None:
    table.tell("d", {"p": LEAST_FAILURES})
    table.tell(who, life="2")
    table.membership.probed(who, "2", None, table.now)
    if who == "p":
        table.tell("d", {"p": LEAST_FAILURES})
    else:
        table.tell("d", life="2")
    table.try_it()


def test_workers_try_once_each_whatever_is_published_meanwhile(table: Table) -> None:
    worker = Membership()

    def publish() -> None:
        coded = msgspec.msgpack.encode(list(table.membership.members.values()))
        worker.show(msgspec.msgpack.decode(coded, type=list[Member]))

    def paired() -> bool:
        return ("p", "d") in {(p.node_id, d.node_id) for p, d in worker.ready().pairs}

    table.tell("d", {"p": LEAST_FAILURES})
    publish()
    assert not paired()
    table.passes(1.01 * FIRST_TRIAL_S)
    publish()
    assert paired()
    worker.sent(Route(worker.members["d"].info, worker.members["p"].info))
    assert not paired()
    publish()
    assert not paired()
    table.passes(1.01 * FIRST_PERIOD_S)
    publish()
    assert paired()
    starting = dataclasses.replace(worker.members["q"], state=NodeState.STARTING)
    worker.show([*(m for m in worker.members.values() if m.info.node_id != "q"), starting])
    assert paired()

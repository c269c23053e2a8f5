"""A request with a high priority overtakes those that wait, on one node and through P and D."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvbaton.messages.engine import AddRequest, FromCore, Outputs
from tests.support.engine_node import Call, Node, greedy
from tests.support.engine_pair import Expected, Pair
from tests.support.prompts import prompt_of
from tests.support.waiting import until

ONE_BY_ONE = {"max_num_seqs": 1, "max_num_batched_tokens": 64}
PRIORITIES = [0, 5, 5, -1, 3]
"""In order of arrival. The first one runs when the others come."""
ORDER = [0, 3, 4, 1, 2]
"""In which they shall end: by priority, then by arrival."""


def ended_at(node: Node) -> list[str]:
    """Requests in the order in which the node ends them from now on."""
    ended: list[str] = []
    deliver = node.mailbox._deliver

    def listen(message: FromCore) -> None:
        if isinstance(message, Outputs):
            ended.extend(o.request_id for o in message.outputs if o.finish_reason is not None)
        deliver(message)

    node.mailbox._deliver = listen
    return ended


def with_priority(request: AddRequest, number: int) -> AddRequest:
    return msgspec.structs.replace(request, priority=PRIORITIES[number])


def known(node: Node, count: int) -> None:
    until(lambda: len(node.scheduler.requests) == count, f"{count} requests at {node.id}")


def check(ended: list[str], calls: list[Call], expected: Expected) -> None:
    for number, call in enumerate(calls):
        assert call.result() == expected(prompt_of(20, seed=number))
    assert ended == [calls[number].request.request_id for number in ORDER]


@pytest.fixture
def alone(checkpoint: Callable[..., Path]) -> Iterator[Node]:
    node = Node("node", checkpoint(), **ONE_BY_ONE)
    yield node
    node.mailbox.kill()
    node.bury()


def test_on_one_node(alone: Node, expected: Expected) -> None:
    ended, calls = ended_at(alone), []
    with alone.held_step() as hold:
        for number in range(len(PRIORITIES)):
            prompt = tuple(prompt_of(20, seed=number))
            request = AddRequest(
                request_id=str(number), token_ids=array("I", prompt), params=greedy({})
            )
            calls.append(alone.add(with_priority(request, number)))
            if number == 0:
                until(hold.waited_for, "the first step")
    check(ended, calls, expected)


def test_through_p_and_d(make_pair: Callable[..., Pair], expected: Expected) -> None:
    pair = make_pair(p=ONE_BY_ONE, d=ONE_BY_ONE)
    at_p, at_d, calls = ended_at(pair.p), ended_at(pair.d), []
    with pair.p.held_step() as hold:
        for number in range(len(PRIORITIES)):
            of_p, of_d = pair.requests(prompt_of(20, seed=number))
            pair.p.add(with_priority(of_p, number))
            calls.append(pair.d.add(with_priority(of_d, number)))
            known(pair.d, number + 1)
            if number == 0:
                until(hold.waited_for, "P's first step")
    check(at_d, calls, expected)
    assert at_p == at_d
    assert pair.d.counters()['kvbaton_prompt_tokens_total{source="transferred"}'] >= 20
    pair.settle()

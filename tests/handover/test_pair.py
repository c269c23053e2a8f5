"""The harness itself: a hand-over works in it, and its checks can fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from kvbaton.engine.block_pool import BlockPool
from tests.support.engine_pair import Expected, Pair
from tests.support.prompts import prompt_of


@pytest.mark.parametrize("length", [1, 3, 4, 5, 50])
def test_tokens_are_those_of_one_node(pair: Pair, expected: Expected, length: int) -> None:
    prompt = prompt_of(length)
    _, at_d = pair.hand_over(prompt)
    assert at_d.result() == expected(prompt)
    assert pair.d.counters()['kvbaton_prompt_tokens_total{source="transferred"}'] == length
    pair.settle()


def test_the_target_tells_how_many_tokens_the_source_had_cached(
    make_pair: Callable[..., Pair],
) -> None:
    """As one node does: a router may hear of a short answer's end before it hears of the source."""
    pair = make_pair(d={"enable_prefix_caching": False})
    for cached in (0, 48):
        _, at_d = pair.hand_over(prompt_of(50), max_tokens=1)
        at_d.result()
        assert at_d.outputs[-1].cached_tokens == cached
    pair.settle()


def test_log_probabilities_of_a_prompt_that_the_target_has_cached_come_all_the_same(
    pair: Pair, expected: Expected
) -> None:
    """The source alone computes them: it must not be called off."""
    prompt = prompt_of(48)
    for _ in range(2):
        at_p, at_d = pair.hand_over(prompt, prompt_logprobs=0)
        assert at_d.result() == expected(prompt)
        at_p.result()
        told = [o.prompt_logprobs for o in at_p.outputs if o.prompt_logprobs is not None]
        assert [len(scores) for scores in told] == [len(prompt)]
    pair.settle()


def test_a_first_token_that_comes_without_its_log_probability_is_sampled_anew(
    pair: Pair, expected: Expected
) -> None:
    """A proxy may leave `logprobs` out of what it asks the source for."""
    prompt = prompt_of(30)
    of_p, of_d = pair.requests(prompt, logprobs=2)
    unscored = msgspec.structs.replace(of_p.params, logprobs=None)
    pair.p.add(msgspec.structs.replace(of_p, params=unscored))
    at_d = pair.d.add(of_d)
    assert at_d.result() == expected(prompt)
    assert [len(o.logprobs or ()) for o in at_d.outputs] == [len(o.token_ids) for o in at_d.outputs]
    assert pair.d.counters()['kvbaton_prompt_tokens_total{source="transferred"}'] == len(prompt)
    pair.settle()


def test_a_leak_is_seen(pair: Pair) -> None:
    pool: BlockPool = pair.d.scheduler.blocks.pool
    pool.refs[5] += 1
    pair.d.ask("metrics")
    with pytest.raises(AssertionError, match="ledger was off"):
        pair.check()
    pool.refs[5] -= 1
    pair.d.imbalance = 0


class Owned(dict[Any, Any]):
    """One that only the thread that made it looks through; it may change at any time."""

    def __init__(self, content: dict[Any, Any]) -> None:
        super().__init__(content)
        self.owner = threading.current_thread()

    def _check(self) -> None:
        assert threading.current_thread() is self.owner, "another thread looks through it"

    def __iter__(self) -> Iterator[Any]:
        self._check()
        return super().__iter__()

    def items(self) -> Any:
        self._check()
        return super().items()

    def values(self) -> Any:
        self._check()
        return super().values()


def own(*parts: Any) -> None:
    for part in parts:
        for name, value in vars(part).items():
            if type(value) is dict and name != "published":  # that one is never changed
                setattr(part, name, Owned(value))


def test_no_other_thread_looks_through_what_the_transfer_threads_change(
    pair: Pair, expected: Expected
) -> None:
    sender, receiver = pair.p.transfers.sender, pair.d.transfers.receiver
    assert sender is not None
    assert receiver is not None
    pair.p.transfers.inspect(lambda: own(sender, sender.source, sender.source.counters))
    pair.d.transfers.inspect(lambda: own(receiver, receiver.target, receiver.target.counters))
    calls = [pair.hand_over(prompt_of(40, seed)) for seed in range(4)]
    while not all(at_d.over() for _, at_d in calls):
        for node in (pair.p, pair.d):
            assert node.gauges()["kvbaton_unhealthy"] == 0
            node.ask("state")
    assert [at_d.result() for _, at_d in calls] == [expected(prompt_of(40, s)) for s in range(4)]
    pair.settle()

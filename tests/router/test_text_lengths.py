"""How long texts are believed to be, and what prompts beside them cost by that."""

from __future__ import annotations

import pytest

from kvbaton.router.costs import FIRST_OUTPUT, CostModel
from kvbaton.router.loads import NodeLoad, NodeLoads
from kvbaton.router.objectives import PercentileItl
from kvbaton.router.predictions import Decode, Prediction
from tests.router.test_pairing import member
from tests.support.toy_engine import Clock

TOKEN_S = 0.01


def model() -> tuple[CostModel, Clock]:
    """Of one node whose steps take `TOKEN_S`."""
    clock = Clock()
    costs = CostModel(clock)
    node = member("a0", "any", load={"step_s": TOKEN_S, "prefill_token_s": 3e-5})
    costs.learn([node.info], NodeLoads())
    return costs, clock


def test_texts_that_have_not_ended_count_as_long_as_they_have_become() -> None:
    """The first to end are the short ones: three of fifty, while the others go on."""
    costs, clock = model()
    assert costs.output_tokens == FIRST_OUTPUT
    for number in range(50):
        costs.begun(f"r{number}")
    clock.now += 30 * TOKEN_S
    for number in range(3):
        costs.finished(f"r{number}", 32, TOKEN_S)
    clock.now += 270 * TOKEN_S
    costs.learn([], NodeLoads())  # as with each decision
    assert costs.output_tokens == pytest.approx((8 * 128 + 3 * 32 + 47 * 300) / 11, rel=0.02)


def test_of_texts_that_come_and_go_it_is_the_mean() -> None:
    """Those that live add nothing then, however many: each adds its tokens once."""
    costs, clock = model()
    for number in range(2000):
        costs.begun(f"r{number}")
        if number >= 20:
            costs.finished(f"r{number - 20}", 202, TOKEN_S)
        clock.now += 10 * TOKEN_S
    assert costs.output_tokens == pytest.approx(202, rel=0.02)
    for number in range(1980, 2000):
        costs.finished(f"r{number}", 0)  # lost, or given up: nothing was learned of its length
    before = costs.output_tokens
    clock.now += 1000.0
    costs.learn([], NodeLoads())
    assert costs.output_tokens == before


def test_tokens_take_as_long_as_they_did_of_late() -> None:
    costs, clock = model()
    for number in range(400):
        costs.begun(f"r{number}")
        clock.now += 100 * 2 * TOKEN_S
        costs.finished(f"r{number}", 102, 2 * TOKEN_S)
    assert costs.output_tokens == pytest.approx(102, rel=0.05)


def test_one_more_prompt_harms_texts_the_more_the_more_come_until_all_that_may_do() -> None:
    """Else prompts would gather at one of two nodes though each could have half of them."""
    costs, _ = model()
    for number in range(300):
        costs.finished(f"r{number}", 1000)
    itl = PercentileItl(0.012, 95.0, costs)

    def harm(expected: float) -> float:
        """Of one more prompt of 50 ms for a text that meets so many, of 1,000 gaps."""
        share = expected / (1000 * 0.01 / 0.05 + expected)
        decode = Decode(0.01, 0.01, 0.01 / (1 - share), 0.0, 0.0, share, 0.05, 0.05, 1e-4, 20, True)
        return itl.there(decode, work_s=0.05) - itl.there(decode)

    assert harm(20) < harm(30) < harm(38) < harm(46), "50 may be slow"
    assert harm(46) > 20 * harm(90), "it is lost: prompts go there"


def test_prompts_that_wait_share_the_next_step() -> None:
    """Behind one under way and one that waits, eight of an eighth of a step's tokens make one."""
    clock = Clock()
    costs, node = CostModel(clock), member("a0", "any", load={"step_s": 0, "prefill_token_s": 1e-5})
    costs.learn([node.info], NodeLoads())
    full_s = costs.speed(node.info).full_s
    predicted = Prediction(0.1, 0.006, 0.006, 0.0, 0.1, 0.0, work_s=full_s / 8)

    def took(number: int) -> float:
        """Seconds of a step with prompts, by those of late."""
        costs.assigned(node.info, node.info, predicted)
        costs.queued(f"r{number}", node.info, predicted)
        return costs.decode(node.info, NodeLoad(), None, 100).prompt_s

    assert took(0) == pytest.approx(full_s / 8)
    assert took(1) == pytest.approx(full_s / 8), "it begins when the first is over"
    for number in range(2, 10):
        later = took(number)
    assert later == pytest.approx(10 / 8 / 3 * full_s), "three steps"

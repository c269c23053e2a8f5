"""How long texts are believed to be, and what prompts beside them cost by that."""

from __future__ import annotations

import pytest

from kvbaton.router.costs import FIRST_OUTPUT, CostModel
from kvbaton.router.loads import NodeLoad, NodeLoads
from kvbaton.router.policies import MISSED_S, miss_cost
from kvbaton.router.predictions import Prediction
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


def generated(costs: CostModel, tokens: int, texts: int = 1) -> None:
    """A request has come and gone."""
    costs.begun(texts)
    costs.relayed += tokens
    costs.finished(tokens, texts)


@pytest.mark.parametrize(("objective_s", "share"), [(1e-300, 1.0), (0.2, 0.5), (1e40, 0.0)])
def test_an_objective_may_be_any_time(objective_s: float, share: float) -> None:
    """Also one beyond all times, as who wants none may give it."""
    assert miss_cost(0.2, objective_s) == pytest.approx(share * MISSED_S)


def test_texts_that_have_not_ended_count_as_long_as_they_have_become() -> None:
    """The first to end are the short ones: three of fifty, while the others go on."""
    costs, _ = model()
    assert costs.output_tokens == FIRST_OUTPUT
    costs.begun(50)
    costs.relayed += 50 * 32
    for _ in range(3):
        costs.finished(32)
    costs.relayed += 47 * 268
    costs.learn([], NodeLoads())  # as with each decision
    twice = 47 * 2 * 300  # each is believed to go on for as long as it has
    assert costs.output_tokens == pytest.approx((8 * 128 + 3 * 32 + twice) / 58)


def test_texts_none_of_which_could_have_ended_are_not_believed_to_be_endless() -> None:
    costs, _ = model()
    costs.begun(400)
    costs.relayed += 400 * 50
    costs.learn([], NodeLoads())
    assert costs.output_tokens < 50 + FIRST_OUTPUT, "not 20,000 tokens over 8 texts"


def test_what_texts_have_generated_is_context_of_their_steps() -> None:
    """A node's sequences had 256 tokens each, however long they had gone on."""
    costs, speed = CostModel(Clock()), {"decode_context_s": 2e-5, "prefill_token_s": 3e-5}
    node = member("a0", "any", load=speed).info
    costs.learn([node], NodeLoads())
    load = NodeLoad(sequences=150, tokens=150 * 256, pending=50)
    before = costs.decode(node, load, None, 256)
    costs.begun(100)
    costs.relayed += 100 * 300
    costs.learn([node], NodeLoads())
    after = costs.decode(node, load, None, 256)
    assert after.step_s - before.step_s == pytest.approx(2e-5 * 100 * 300 / 1000)
    assert after.others_s - before.others_s == pytest.approx(after.step_s - before.step_s)
    costs.finished(100 * 300, 100)
    assert costs.decode(node, load, None, 256).step_s == pytest.approx(before.step_s)


def test_who_has_computed_prompts_since_the_first_request_is_believed_to_go_on() -> None:
    """A mean over 4 s that began as if nothing had been there before said 0.22 after 1 s."""
    clock = Clock()
    costs, node = CostModel(clock), member("a0", "any", load={"step_s": TOKEN_S})
    costs.learn([node.info], NodeLoads())
    predicted = Prediction(0.1, 0.006, 0.006, 0.0, 0.1, 0.0, work_s=0.05)
    for _ in range(20):
        costs.learn([node.info], NodeLoads())
        costs.assigned(node.info, node.info, predicted)
        clock.now += 0.1
    assert costs.prefill_share(node.info) == pytest.approx(0.5, abs=0.1)


def test_of_texts_that_come_and_go_it_is_the_mean() -> None:
    """Those that live add nothing then, however many, nor that a request asks for several."""
    costs, _ = model()
    for number in range(2000):
        costs.begun(2)
        costs.relayed += 404
        if number >= 20:
            costs.finished(404, 2)
    assert costs.output_tokens == pytest.approx(202, rel=0.02)


def test_requests_that_fail_before_they_have_two_tokens_say_nothing() -> None:
    costs, _ = model()
    generated(costs, 400)
    before = costs.output_tokens
    for _ in range(100):
        costs.finished(0)
    assert costs.output_tokens == before
    costs.relayed += 1
    costs.finished(1)
    assert costs.output_tokens < before, "a text of one token"

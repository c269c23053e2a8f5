"""A prompt of 100,000 tokens of gpt-oss's shape: what window groups hold, by the pool's figures.

Scheduler, pool, tables and loads are the real ones; no layer is computed, a sample is token 0.
"""

from __future__ import annotations

import pytest

from kvbaton.engine.kv_cache_manager import GroupSpec
from kvbaton.engine.kv_groups import LayerKV, kv_groups
from kvbaton.engine.step import Sampled, StepPlan, StepResult
from kvbaton.types import ChoiceStart
from tests.support.toy_engine import Loop, ask, source, target

LENGTH, OUTPUT = 100_000, 40
WINDOW, BLOCK_SIZE, STEP = 128, 16, 2048
LAYERS = kv_groups([LayerKV(window=w, heads=8, head_dim=64) for w in (WINDOW, 0) * 12])
"""Every other layer with a window of 128: 12 layers a group."""
GROUPS = tuple(GroupSpec(BLOCK_SIZE, 7000, group.kind, group.window) for group in LAYERS)


class NoRanks:
    """Samples token 0 where there is something to sample."""

    def run(self, plan: StepPlan) -> StepResult:
        steps = [step for step in plan.steps if step.num_samples]
        return StepResult(plan.number, tuple(Sampled(step.handle, (0,)) for step in steps))


class LongLoop(Loop):
    """Remembers the most blocks that each group has held, by whoever."""

    def __init__(self) -> None:
        self.most = [0] * len(GROUPS)
        long = {"max_model_len": LENGTH + OUTPUT, "max_num_batched_tokens": STEP}
        super().__init__(GROUPS, **long)
        self.ranks = NoRanks()  # type: ignore[assignment]

    def touched_by(self, plan: StepPlan) -> set[int]:
        return set()

    def check(self) -> None:
        super().check()
        for g, owners in enumerate(self.scheduler.blocks.owners()):
            held = owners["request"] + owners["incoming"] + owners["outgoing"]
            self.most[g] = max(self.most[g], held)

    def ask_for(self, **fields: object) -> None:
        tokens = [i * i % 23 for i in range(LENGTH)]
        self.add(ask("a", tokens, max_tokens=OUTPUT, ignore_eos=True, **fields))


@pytest.fixture
def loop() -> LongLoop:
    return LongLoop()


def test_groups_are_those_of_gpt_oss() -> None:
    assert [(group.window, len(group.layers)) for group in LAYERS] == [(0, 12), (128, 12)]


def test_a_target_holds_its_window(loop: LongLoop) -> None:
    loop.ask_for(transfer=target(1))
    loop.step()
    (admitted,) = loop.admitted
    full, window = ([len(span.blocks) for span in spans] for spans in admitted.spans)
    assert full == [LENGTH // BLOCK_SIZE]
    assert window == [WINDOW // BLOCK_SIZE]
    loop.emit(loop.loaded("a", [ChoiceStart(token=0)], 0))
    loop.unquarantine(loop.attempt("a"))
    loop.run()
    assert len(loop.streams["a", 0].tokens) == OUTPUT
    # Its window, of which a block border cuts one block more.
    assert loop.most == [-(-(LENGTH + OUTPUT) // BLOCK_SIZE), WINDOW // BLOCK_SIZE + 1]


def test_a_source_holds_its_window_and_a_step(loop: LongLoop) -> None:
    loop.ask_for(transfer=source(1))
    loop.run()
    assert len(loop.plans) == -(-LENGTH // STEP)
    assert loop.most[0] == LENGTH // BLOCK_SIZE
    assert loop.most[1] <= (WINDOW + STEP) // BLOCK_SIZE + 1

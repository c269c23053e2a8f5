"""What the warm-up leaves behind: nothing that a sequence could see."""

from array import array
from pathlib import Path

import pytest

from kvbaton.engine.config import EngineConfig
from kvbaton.engine.executor import Executor
from kvbaton.engine.model_config import load_model_config
from kvbaton.engine.step import NewSequence, SequenceStep, StepPlan
from kvbaton.engine.worker import BLOCK, cpu_executor
from kvbaton.messages.engine import SamplingParams
from tests.support.checkpoints import CheckpointSpec, make_checkpoint


@pytest.mark.parametrize(("block_size", "max_model_len"), [(16, 64), (16, 8), (4, 2), (2, 2)])
def test_a_warm_block_is_as_good_as_a_fresh_one(
    tmp_path: Path, block_size: int, max_model_len: int
) -> None:
    model = make_checkpoint(tmp_path / "model", CheckpointSpec())
    config = EngineConfig(
        model=str(model),
        device="cpu",
        block_size=block_size,
        max_model_len=max_model_len,
        num_blocks=max_model_len // block_size + 3,
        num_threads=1,
    )
    executor = cpu_executor(config, load_model_config(config.model, config.dtype))
    try:
        answers = [_run(executor, handle, block) for handle, block in ((1, BLOCK), (2, BLOCK + 1))]
        assert answers[0] == answers[1]
    finally:
        executor.close()


def _run(executor: Executor, handle: int, block: int) -> tuple[tuple[int, ...], list[int]]:
    new = NewSequence(handle, array("I", (7,)), 1, 0, SamplingParams(temperature=0.0))
    step = SequenceStep(handle, 0, 1, ((block,),), 1)
    result = executor.launch(StepPlan(handle, new=(new,), steps=(step,))).result()
    sums = executor.sums(0, [block])
    executor.launch(StepPlan(handle, ended=(handle,))).result()
    ready = sums.poll()
    assert ready is not None
    return result.sampled[0].token_ids, ready[0].flatten().tolist()

"""The encoder executor on a real GPU: the rows of a CPU, beside the language model's stream."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbaton.engine.config import EngineConfig
from kvbaton.engine.encoder.pool import EncoderPool
from kvbaton.engine.encoder.worker import encoder_executor
from kvbaton.engine.executor import Executor
from kvbaton.engine.model_config import load_model_config
from kvbaton.engine.step import BlockCopy, NewSequence, SequenceStep, StepPlan
from kvbaton.kernels.digest import block_sums
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
from tests.support.engine_node import Node
from tests.support.waiting import until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SIZES = ((80, 50), (64, 64), (33, 17), (31, 160))
SLEEP_CYCLES = 4_000_000_000
"""About two seconds."""


@pytest.fixture
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(family="qwen3_vl")


@pytest.fixture
def executor(folder: Path) -> Iterator[Executor]:
    torch.backends.cuda.matmul.allow_tf32 = False
    config = EngineConfig(model=str(folder), device="cuda", encoder_only=True)
    made = encoder_executor(config, load_model_config(folder))
    yield made
    made.close()


@pytest.mark.alone
def test_rows_and_sums_are_those_of_a_cpu_whatever_runs_beside(
    executor: Executor, folder: Path
) -> None:
    items = [item_of(folder, picture(seed, *size)) for seed, size in enumerate(SIZES)]
    new, steps, first = [], [], 1
    for handle, item in enumerate(items):
        table = tuple(range(first, first + padded(item) // 32))
        first += len(table)
        new.append(
            NewSequence(
                handle, array("I", (0,) * padded(item)), padded(item), 0, ONE_TOKEN, (item,)
            )
        )
        steps.append(SequenceStep(handle, 0, padded(item), (table,), 1))
    plan = StepPlan(1, new=tuple(new), steps=tuple(steps))
    executor.launch(plan).result()  # the first use of a kernel waits for all streams
    worker_of(executor).cache.data.zero_()
    torch.cuda.synchronize()
    over = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]  # a model's long step
    over.record()
    executor.launch(plan).result()
    copies = (BlockCopy(0, 1, first),)
    executor.launch(StepPlan(2, copies=copies)).result()
    assert not over.query(), "the encoder waited for another stream"  # type: ignore[no-untyped-call]
    kept = executor.sums(0, range(1, first + 1))
    for item, step in zip(items, steps, strict=True):
        (table,) = step.new_blocks
        rows = (
            worker_of(executor).cache.data[list(table), 0, :, 0].transpose(1, 2).flatten(0, 1).cpu()
        )
        torch.testing.assert_close(
            rows[: item.length], expected_rows(folder, item), atol=1e-3, rtol=1e-3
        )
        assert not rows[item.length :].any()
        now = digest_of(executor, 0, table, 0, 0, padded(item))
        until(lambda: kept.poll() is not None and now.poll() is not None, "sums")  # noqa: B023
        (of_kept,), (of_now,) = kept.poll() or [], now.poll() or []
        assert (of_kept[[block - 1 for block in table]] == of_now).all()
        ids = torch.tensor(table)
        expected = block_sums(worker_of(executor).cache.data.cpu(), ids, 0, 0, padded(item))
        assert (of_now.view("int64") == expected.numpy()).all()
    (of_kept,) = kept.poll() or []
    assert (of_kept[-1] == of_kept[0]).all(), "a copy has the sums of its source"


@pytest.mark.parametrize(("hidden", "dtype"), [(3584, "bfloat16"), (8192, "float32")])
def test_long_rows_are_summed_as_on_a_cpu(hidden: int, dtype: str) -> None:
    pool = EncoderPool(6, 2, hidden, dtype, torch.device("cuda"))
    rows = torch.randn(70, 2, hidden, device="cuda").to(pool.data.dtype)
    pool.write([4, 2, 5], rows)
    expected = block_sums(pool.data.cpu(), torch.tensor([4, 2, 5]), 0, 0, 96)
    assert (pool.kept_sums(0, [4, 2, 5]).view("int64") == expected.numpy()).all()
    assert torch.equal(pool.data[2, 0, :, 0].transpose(0, 1), rows[32:64])


def test_a_second_life_loads_what_the_first_encoded(folder: Path, tmp_path: Path) -> None:
    items = [item_of(folder, picture(seed, *size)) for seed, size in enumerate(SIZES)]
    settings: dict[str, Any] = {
        "device": "cuda",
        "encoder_only": True,
        "store": f'filesystem:{{"path": "{tmp_path}"}}',
        "store_lookup_timeout": 20.0,
    }
    for life in range(2):
        node = Node("e", folder, **settings)
        for number, item in enumerate(items):
            assert node.add(request_for(item, f"r{number}")).result() == [0]
        until(lambda: node.ask("drain"), "everything is saved")  # noqa: B023
        counted = node.counters()['kvbaton_encoder_items_total{source="encoded"}']
        assert counted == (0 if life else len(items))
        assert node.imbalance == 0
        node.mailbox.kill()
        node.bury()

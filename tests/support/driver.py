"""Drives an executor in the place of the scheduler."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbaton.engine.build import make_executor
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.model_config import load_model_config
from kvbaton.engine.step import NewSequence, SequenceStep, StepPlan
from kvbaton.messages.engine import SamplingParams
from kvbaton.types import first_attended
from tests.support.waiting import PATIENCE_S

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


class Driver:
    """Acts as scheduler: allocates blocks in shuffled order, builds plans, keeps all tokens.

    `tables` are the block tables of the first KV group, `others` those of the other groups. With
    `poisons`, blocks behind a window are filled with NaN, so that a read of them shows.
    """

    poisons = False

    def __init__(self, folder: Path, *, track_sums: bool = True, **settings: Any) -> None:

        defaults: dict[str, Any] = {"num_blocks": 256, "device": "cpu", "max_model_len": 128}
        settings = defaults | settings
        config = EngineConfig(model=str(folder), **settings)
        model = load_model_config(folder, config.dtype, config.quantization, config.kv_cache_dtype)
        self.groups = model.kv_groups()
        self.executor = make_executor(config, model, track_sums=track_sums)
        self.block_size = config.block_size
        order = np.random.default_rng(0).permutation(np.arange(1, settings["num_blocks"]))
        self.free: list[int] = order.tolist()
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.others: dict[int, list[list[int]]] = {}
        self.computed: dict[int, int] = {}
        self.item_rows: dict[int, tuple[Any, ...]] = {}
        self._new: dict[int, Any] = {}
        self._number = 0

    def add(
        self,
        token_ids: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        choice: int = 0,
        num_prompt: int | None = None,
        cached: Sequence[int] = (),
        items: Sequence[Any] = (),
        item_rows: Sequence[Any] = (),
    ) -> int:
        """Add a sequence; the blocks in `cached` already hold its first tokens."""

        handle = len(self.tokens) + 1
        self.tokens[handle] = list(token_ids)
        self.tables[handle] = []
        self.others[handle] = [[] for _ in self.groups[1:]]
        assert not cached or len(self.groups) == 1
        self.computed[handle] = len(cached) * self.block_size
        prompt = len(token_ids) if num_prompt is None else num_prompt
        new = NewSequence(handle, array("I", token_ids), prompt, choice, params, tuple(items))
        self._new[handle] = (new, tuple(cached))
        self.item_rows[handle] = tuple(item_rows)
        return handle

    def step(
        self,
        *work: tuple[int, int, int],
        drafts: Mapping[int, tuple[int, ...]] | None = None,
        **more: Any,
    ) -> dict[int, Any]:
        """Run a step of (handle, tokens, samples) items; returns sampled tokens by handle.

        Drafts, by handle, follow the one token of a decoding sequence.
        """

        self._number += 1
        new = tuple(self._new[handle][0] for handle, _, _ in work if handle in self._new)
        steps = []
        for handle, count, samples in work:
            draft = (drafts or {}).get(handle, ())
            count += len(draft)
            table, end = self.tables[handle], self.computed[handle] + count
            blocks = list(self._new.pop(handle)[1]) if handle in self._new else []
            while (len(table) + len(blocks)) * self.block_size < end:
                blocks.append(self.free.pop())
            table += blocks
            start = self.computed[handle]
            rows = (
                r
                for r in self.item_rows.get(handle, ())
                if r.start < end and start < r.start + r.length
            )
            new_blocks: Any = [tuple(blocks)]
            for other in self.others.get(handle, ()):
                more_blocks = [self.free.pop() for _ in range(len(table) - len(other))]
                other += more_blocks
                new_blocks.append(tuple(more_blocks))
            new_blocks = tuple(new_blocks)
            step = SequenceStep(handle, start, count, new_blocks, samples, tuple(rows), draft)
            steps.append(step)
            self.computed[handle] = end
        plan = StepPlan(self._number, new=new, steps=tuple(steps), **more)
        result = self.executor.launch(plan).result()
        assert result.number == self._number
        for sampled in result.sampled:
            if drafts and drafts.get(sampled.handle):
                self.tokens[sampled.handle] += sampled.token_ids
                self.computed[sampled.handle] = len(self.tokens[sampled.handle]) - 1
            elif sampled.token_ids:
                self.tokens[sampled.handle].append(sampled.token_ids[0])
        for handle, _, _ in work if self.poisons else ():
            tables = [self.tables[handle], *self.others[handle]]
            for group, table in zip(self.groups, tables, strict=True):
                behind = (
                    first_attended(self.computed[handle], group.window, group.chunked)
                    // self.block_size
                )
                if group.window:
                    self.executor.poison(table[:behind])
        return {sampled.handle: sampled for sampled in result.sampled}

    def left(self, handle: int) -> int:
        """Number of known tokens that are not computed yet."""
        return len(self.tokens[handle]) - self.computed[handle]

    def generate(self, handle: int, count: int, *, chunk: int = 1000) -> list[int]:
        """Prefill in chunks, then decode; returns the generated tokens."""
        known = len(self.tokens[handle])
        while len(self.tokens[handle]) < known + count:
            tokens = min(chunk, self.left(handle))
            self.step((handle, tokens, int(tokens == self.left(handle))))
        return self.tokens[handle][known:]

    def generate_mixed(
        self,
        handles: Sequence[int],
        count: int,
        rng: np.random.Generator,
        *,
        most_tokens: int = 24,
        cut: Callable[[int, int], int] = lambda handle, tokens: tokens,
    ) -> list[list[int]]:
        """Run random batches, decoding sequences first, until each has `count` tokens; those.

        A step computes fewer than `most_tokens` tokens of a sequence, reduced by `cut`.
        """
        known = {handle: len(self.tokens[handle]) for handle in handles}
        while min(len(self.tokens[handle]) - before for handle, before in known.items()) < count:
            work = []
            for handle in rng.permutation(handles)[: rng.integers(1, len(handles) + 1)].tolist():
                tokens = cut(handle, min(self.left(handle), int(rng.integers(1, most_tokens))))
                work.append((handle, tokens, int(tokens == self.left(handle))))
            self.step(*sorted(work, key=lambda item: item[1] > 1))
        return [self.tokens[handle][before:] for handle, before in known.items()]

    def record_logits(self, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
        """Record the first rank's logits of every step from now on, in the list returned."""
        worker: Any = self.executor.workers[0]
        model, logits, seen = worker.model, worker.model.logits, list[torch.Tensor]()

        def record(hidden: torch.Tensor) -> torch.Tensor:
            seen.append(logits(hidden))
            return seen[-1].clone()

        monkeypatch.setattr(model, "logits", record)
        return seen

    def wait(self, pending: Any) -> Any:
        """Wait for the digest sums of the only rank."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := pending.poll()) is None:
            assert time.monotonic() < deadline, "sums did not come"
            time.sleep(0.001)
        return found[0]

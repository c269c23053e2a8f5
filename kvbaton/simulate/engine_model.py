"""How long an engine's steps and hand-overs take, fitted to what was measured.

A file of measurements is JSON: settings of the engine as `EngineModel` has them, ``steps`` and
``handovers``. Entries of ``steps`` have ``seconds`` and ``prompt_tokens`` (computed after
``context`` tokens, in as many steps as needed, in all so long), ``sequences`` that decode, each
with ``sequence_tokens``, or, of one step, both. Those of ``handovers`` say how much later the
second token of a prompt comes for having been handed over, ``last_step`` tokens of it being
computed in its last step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from kvbaton.engine.config import MIXED_TOKENS
from kvbaton.engine.cost_fit import solve_nonnegative
from kvbaton.engine.step_costs import Terms
from kvbaton.errors import ConfigError
from kvbaton.types import Positive, Size

H200_8B = Path(__file__).with_name("h200-8b.json")
Finite = Annotated[float, Meta(ge=0, le=1e9)]
"""Neither negative nor endless."""

SAVED_TOKENS, SAVED_SEQUENCES = 350, 130
"""Products of few tokens wait for weights: what is saved of that by computing a chunk beside
sequences that decode grows with its tokens, and is less the more these are. With these constants
all of 34 steps of 8B that were measured on an H200 are fitted within 6 %."""


@dataclass(frozen=True)
class EngineModel:
    """An engine's size and speed.

    Attributes:
        name: what was measured.
        costs: seconds per count of `engine.step_costs.terms_of`.
        saved_s: that a step with a long chunk takes less beside few sequences than both alone.
        handover: seconds of a hand-over for itself, per token, and per token of the last step.
        leaving: seconds that KV which leaves makes steps of a source longer: each time, per token.
        coming: that a target's step takes longer when a prompt has come: likewise.
        block_size: tokens per KV block.
        kv_tokens: tokens that the pool holds.
        step_tokens: most tokens of one step.
        mixed_tokens: most of one with sequences that decode.
        max_num_seqs: most sequences of one step.
        max_model_len: longest prompt plus output.
        jitter: standard deviation of a step's seconds, as a share.
        message_s: from router to engine, or back.
    """

    name: str
    costs: tuple[float, ...]
    handover: tuple[float, ...]
    saved_s: float = 0.0
    leaving: tuple[float, float] = (0.0, 0.0)
    coming: tuple[float, float] = (0.0, 0.0)
    block_size: Size = 16
    kv_tokens: Size = 840_000
    step_tokens: Size = 4096
    mixed_tokens: Size = MIXED_TOKENS
    max_num_seqs: Size = 256
    max_model_len: Size = 200_000
    jitter: Finite = 0.03
    message_s: Finite = 0.0005

    def step_s(self, terms: Terms) -> float:
        """Seconds of a step with these counts, jitter aside."""
        costs = *self.costs, self.saved_s
        return sum(cost * count for cost, count in zip(costs, _with_shared(terms), strict=True))

    def handover_s(self, tokens: int, last_step: int) -> float:
        """From a prompt's last step to the target's having its KV, beyond what crossed before."""
        fixed, each, last = self.handover
        return fixed + each * tokens + last * last_step


class Measurement(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One entry of a file's ``steps`` or ``handovers``; see the module."""

    seconds: Positive
    prompt_tokens: float = 0.0
    context: float = 0.0
    sequences: float = 0.0
    sequence_tokens: float = 0.0
    last_step: float = 0.0

    def terms(self, budget: int) -> Terms:
        """The counts that all of its steps, of at most `budget` tokens each, have together."""
        new = self.prompt_tokens
        steps = max(1.0, np.ceil(new / budget))
        attended = new * (self.context + new / 2) / 1000
        return steps, new, attended, self.sequences, self.sequences * self.sequence_tokens / 1000


def load_engine(path: Path = H200_8B) -> EngineModel:
    """Fit a model to a file of measurements.

    Raises:
        ConfigError: the file can't be read, or lacks something; names it.
    """
    try:
        told = json.loads(path.read_text())
        steps = msgspec.convert(told.pop("steps"), list[Measurement])
        handovers = msgspec.convert(told.pop("handovers", []), list[Measurement])
        unfitted = EngineModel(costs=(), handover=(0.0, 0.0, 0.0), **told)
        msgspec.convert(asdict(unfitted), EngineModel)  # names what is of a wrong type
        budget = unfitted.step_tokens
        *costs, saved_s = _fit([(_with_shared(m.terms(budget)), m.seconds) for m in steps])
        model = replace(unfitted, costs=tuple(costs), saved_s=min(saved_s, costs[0]))
        if handovers:
            rows = [((1.0, m.prompt_tokens, m.last_step), m.seconds) for m in handovers]
            model = replace(model, handover=_fit(rows))
    except (
        *(OSError, ValueError, LookupError, TypeError, AttributeError),
        *(RecursionError, msgspec.ValidationError),
    ) as error:
        text = f"{path} holds no measurements: {type(error).__name__}: {error}"
        raise ConfigError("--engine", text) from error
    if model.step_s((1.0, 1.0, 0.0, 1.0, 0.0)) <= 0:
        raise ConfigError("--engine", f"{path}: its steps take no time")
    return model


def _with_shared(terms: Terms) -> tuple[float, ...]:
    """And how much less of waiting for weights a chunk and sequences have together, of -1."""
    _, tokens, _, sequences, _ = terms
    if not (tokens and sequences):
        return *terms, 0.0
    few = max(0.0, 1 - sequences / SAVED_SEQUENCES)
    return *terms, -few * (1 - math.exp(-tokens / SAVED_TOKENS))


def _fit(rows: Sequence[tuple[tuple[float, ...], float]]) -> tuple[float, ...]:
    """Least squares over relative errors; no cost is negative."""
    terms, seconds = np.array([row for row, _ in rows]), np.array([took for _, took in rows])
    weighed = terms / seconds[:, None]
    found = solve_nonnegative(weighed.T @ weighed, weighed.T @ np.ones(len(rows)))
    return tuple(float(cost) for cost in found)

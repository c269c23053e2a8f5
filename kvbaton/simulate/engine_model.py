"""How long an engine's steps and hand-overs take, fitted to measurements.

A file of measurements is JSON: settings of the engine, named as in `EngineModel`, ``steps`` and
``handovers``. Each entry has ``seconds``. Entries of ``steps`` have ``prompt_tokens`` (computed
after ``context`` tokens, in as many steps as needed; the seconds are for all of them), or
``sequences`` that decode, with ``sequence_tokens`` each, or both in one step. Entries of
``handovers`` give how much later the second token of a prompt comes because of its hand-over, if
its last step computes ``last_step`` tokens.
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
"""Not negative, and not infinite."""

SAVED_TOKENS, SAVED_SEQUENCES = 350, 130
"""Scales, in tokens and sequences, of the time that a step saves by computing a chunk beside
decoding sequences: products of few tokens wait for weights, so it grows with the chunk and shrinks
with the number of sequences. With these constants, all of 34 steps of 8B measured on an H200 are
fitted within 6 %."""


@dataclass(frozen=True)
class EngineModel:
    """An engine's size and speed.

    Attributes:
        name: What was measured.
        costs: Seconds per term of `engine.step_costs.terms_of`.
        saved_s: Seconds that a step with a long chunk and few sequences saves compared to both
            alone.
        handover: Seconds per hand-over, per token, and per token of the last step.
        leaving: Seconds that sending KV adds to steps of a source: per transfer, and per token.
        coming: Seconds that received KV adds to a step of a target: per prompt, and per token.
        block_size: Tokens per KV block.
        kv_tokens: Tokens that the block pool holds.
        step_tokens: Maximum tokens of one step.
        mixed_tokens: Maximum tokens of one step with decoding sequences.
        max_num_seqs: Maximum sequences of one step.
        max_model_len: Longest prompt plus output.
        jitter: Standard deviation of a step's seconds, as a share.
        message_s: Seconds of a message between router and engine.
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
        """Seconds of a step with these terms, without jitter."""
        costs = *self.costs, self.saved_s
        return sum(cost * count for cost, count in zip(costs, _with_shared(terms), strict=True))

    def handover_s(self, tokens: int, last_step: int) -> float:
        """Seconds from a prompt's last step until the target has the last `tokens` of its KV."""
        fixed, each, last = self.handover
        return fixed + each * tokens + last * last_step


class Measurement(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An entry of a file's ``steps`` or ``handovers``; see the module."""

    seconds: Positive
    prompt_tokens: float = 0.0
    context: float = 0.0
    sequences: float = 0.0
    sequence_tokens: float = 0.0
    last_step: float = 0.0

    def terms(self, budget: int) -> Terms:
        """The sum of the terms of all its steps, of at most `budget` tokens each."""
        new = self.prompt_tokens
        steps = max(1.0, np.ceil(new / budget))
        attended = new * (self.context + new / 2) / 1000
        return steps, new, attended, self.sequences, self.sequences * self.sequence_tokens / 1000


def load_engine(path: Path = H200_8B) -> EngineModel:
    """Fit a model to a file of measurements.

    Raises:
        ConfigError: The file can't be read or is incomplete; names it.
    """
    try:
        told = json.loads(path.read_text())
        steps = msgspec.convert(told.pop("steps"), list[Measurement])
        handovers = msgspec.convert(told.pop("handovers", []), list[Measurement])
        unfitted = EngineModel(costs=(), handover=(0.0, 0.0, 0.0), **told)
        msgspec.convert(asdict(unfitted), EngineModel)  # names fields of a wrong type
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
    """The terms, and minus the share of `EngineModel.saved_s` that a chunk and sequences save."""
    _, tokens, _, sequences, _ = terms
    if not (tokens and sequences):
        return *terms, 0.0
    few = max(0.0, 1 - sequences / SAVED_SEQUENCES)
    return *terms, -few * (1 - math.exp(-tokens / SAVED_TOKENS))


def _fit(rows: Sequence[tuple[tuple[float, ...], float]]) -> tuple[float, ...]:
    """Least squares of relative errors, without negative costs."""
    terms, seconds = np.array([row for row, _ in rows]), np.array([took for _, took in rows])
    weighed = terms / seconds[:, None]
    found = solve_nonnegative(weighed.T @ weighed, weighed.T @ np.ones(len(rows)))
    return tuple(float(cost) for cost in found)

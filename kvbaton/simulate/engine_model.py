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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvbaton.engine.config import MIXED_TOKENS
from kvbaton.engine.cost_fit import solve_nonnegative
from kvbaton.engine.step_costs import Terms
from kvbaton.errors import ConfigError

H200_8B = Path(__file__).with_name("h200-8b.json")
TERMS = ("prompt_tokens", "context", "sequences", "sequence_tokens", "seconds", "last_step")
LEAST = {
    **dict.fromkeys(
        ("block_size", "kv_tokens", "step_tokens", "mixed_tokens", "max_num_seqs", "max_model_len"),
        1,
    ),
    **{"jitter": 0, "message_s": 0},
}
"""Of settings."""

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
    block_size: int = 16
    kv_tokens: int = 840_000
    step_tokens: int = 4096
    mixed_tokens: int = MIXED_TOKENS
    max_num_seqs: int = 256
    max_model_len: int = 200_000
    jitter: float = 0.03
    message_s: float = 0.0005

    def step_s(self, terms: Terms) -> float:
        """Seconds of a step with these counts, jitter aside."""
        costs = *self.costs, self.saved_s
        return sum(cost * count for cost, count in zip(costs, _with_shared(terms), strict=True))

    def handover_s(self, tokens: int, last_step: int) -> float:
        """From a prompt's last step to the target's having its KV, beyond what crossed before."""
        fixed, each, last = self.handover
        return fixed + each * tokens + last * last_step


def load_engine(path: Path = H200_8B, **settings: Any) -> EngineModel:
    """Fit a model to a file of measurements; `settings` replace those of the file.

    Raises:
        ConfigError: the file can't be read, or lacks something; names it.
    """
    try:
        told = json.loads(path.read_text())
        budget = int(told.get("step_tokens", EngineModel.step_tokens))
        steps = [_row(entry) for entry in told.pop("steps")]
        handovers = [_row(entry) for entry in told.pop("handovers", ())]
        fitted = [(_with_shared(_terms(row, budget)), row["seconds"]) for row in steps]
        *costs, saved_s = _fit(fitted)
        saved_s = min(saved_s, costs[0])
        crossings = [((1.0, r["prompt_tokens"], r["last_step"]), r["seconds"]) for r in handovers]
        handover = _fit(crossings) if crossings else (0.0, 0.0, 0.0)
        speed: dict[str, Any] = {"costs": tuple(costs), "saved_s": saved_s, "handover": handover}
        model = EngineModel(**speed, **{**told, **settings})
        msgspec.convert(asdict(model), EngineModel)  # names what is of a wrong type
        for name, least in LEAST.items():
            if not least <= getattr(model, name) < math.inf:
                raise ValueError(f"{name} must be at least {least}, not {getattr(model, name)}")
    except (
        *(OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError),
        *(RecursionError, msgspec.ValidationError),
    ) as error:
        text = f"{path} holds no measurements: {type(error).__name__}: {error}"
        raise ConfigError("--engine", text) from error
    if model.step_s((1.0, 1.0, 0.0, 1.0, 0.0)) <= 0:
        raise ConfigError("--engine", f"{path}: its steps take no time")
    return model


def _row(entry: Mapping[str, float]) -> dict[str, float]:
    if unknown := entry.keys() - TERMS:
        raise ValueError(f"unknown {sorted(unknown)}; known: {list(TERMS)}")
    if not entry["seconds"] > 0:
        raise ValueError(f"seconds of {dict(entry)} must be positive")
    return {name: float(entry.get(name, 0.0)) for name in TERMS}


def _terms(row: Mapping[str, float], budget: int) -> Terms:
    """The counts that all steps of one measurement have together."""
    new, sequences = row["prompt_tokens"], row["sequences"]
    steps = max(1.0, np.ceil(new / budget))
    attended = new * (row["context"] + new / 2) / 1000
    return steps, new, attended, sequences, sequences * row["sequence_tokens"] / 1000


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

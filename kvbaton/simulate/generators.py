"""Seeded traces that resemble recorded ones, for use where those are not available.

They are fitted to the sample hours of Azure 2023 (code, conversation), to Mooncake's synthetic
trace, and to published figures of coding agents' sessions: lengths are lognormal with the recorded
quantiles, arrivals a Gamma process with the recorded burstiness.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from kvbaton.simulate.traces import FIRST_CONTENT, Generator, TraceRequest


@dataclass(frozen=True)
class Lengths:
    """A lognormal distribution of lengths, with bounds.

    Attributes:
        median: Median in tokens.
        sigma: Standard deviation of the logarithm.
        low: Minimum.
        high: Maximum.
    """

    median: float
    sigma: float
    low: int = 1
    high: int = 1 << 17

    def draw(self, rng: np.random.Generator) -> int:
        """Draw a length."""
        drawn = self.median * float(np.exp(self.sigma * rng.standard_normal()))
        return int(min(max(drawn, self.low), self.high))


def _arrivals(
    rng: np.random.Generator, seconds: float, rate: float, variation: float = 1.0
) -> list[float]:
    """Times of a Gamma process; `variation` is the gaps' coefficient of variation (1: Poisson)."""
    shape, times, now = 1 / variation**2, list[float](), 0.0
    while (now := now + rng.gamma(shape, 1 / (rate * shape))) < seconds:
        times.append(now)
    return times


def _single(prompts: Lengths, outputs: Lengths, variation: float) -> Generator:
    def generate(seed: int, seconds: float, rate: float) -> list[TraceRequest]:
        rng, contents = np.random.default_rng(seed), itertools.count(FIRST_CONTENT)
        return [
            TraceRequest(
                at, ((next(contents), prompts.draw(rng)),), outputs.draw(rng), next(contents)
            )
            for at in _arrivals(rng, seconds, rate, variation)
        ]

    return generate


@dataclass(frozen=True)
class Shifting:
    """Two kinds of requests in turn, so that no fixed number of prefill nodes suits for long.

    Attributes:
        period: Seconds of each kind.
        kinds: For each kind, its prompt lengths, output tokens, and share of `rate`.
    """

    period: float
    kinds: tuple[tuple[Lengths, int, float], ...]

    def __call__(self, seed: int, seconds: float, rate: float) -> list[TraceRequest]:
        """Requests, the first kind first; see `Generator`."""
        rng, contents = np.random.default_rng(seed), itertools.count(FIRST_CONTENT)
        requests: list[TraceRequest] = []
        for begin, kind in zip(
            np.arange(0.0, seconds, self.period), itertools.cycle(self.kinds), strict=False
        ):
            prompts, output_tokens, share = kind
            for at in _arrivals(rng, min(self.period, seconds - begin), rate * share):
                pieces = ((next(contents), prompts.draw(rng)),)
                requests.append(
                    TraceRequest(float(begin) + at, pieces, output_tokens, next(contents))
                )
        return requests


@dataclass(frozen=True)
class Conversations:
    """Conversations whose turns each repeat all that was said before.

    Attributes:
        shared: Tokens of the beginning that sessions share.
        kinds: Number of different beginnings.
        first: Tokens of the first turn after those.
        new: Tokens that each later turn adds, beside the previous answer.
        outputs: Tokens generated per turn.
        turns: Mean number of turns (geometric).
        think: Median seconds between an answer and the next turn, and sigma of the logarithm.
        limit: Maximum prompt tokens, beyond which a session ends.
    """

    shared: int
    kinds: int
    first: Lengths
    new: Lengths
    outputs: Lengths
    turns: float
    think: tuple[float, float]
    limit: int = 180_000

    def __call__(self, seed: int, seconds: float, rate: float) -> list[TraceRequest]:
        """Sessions that begin at `rate` per second; see `Generator`."""
        rng, contents = np.random.default_rng(seed), itertools.count(FIRST_CONTENT + self.kinds)
        requests: list[TraceRequest] = []
        for begin in _arrivals(rng, seconds, rate):
            pieces = [(FIRST_CONTENT + int(rng.integers(self.kinds)), self.shared)]
            pieces.append((next(contents), self.first.draw(rng)))
            before: int | None = None
            at = begin
            for _ in range(int(rng.geometric(1 / self.turns))):
                request = TraceRequest(
                    at, tuple(pieces), self.outputs.draw(rng), next(contents), before
                )
                if request.prompt_tokens > self.limit:
                    break
                before = len(requests)
                requests.append(request)
                pieces += [*request.answer(), (next(contents), self.new.draw(rng))]
                at = self.think[0] * float(np.exp(self.think[1] * rng.standard_normal()))
        return requests


GENERATORS: dict[str, Generator] = {
    "code": _single(Lengths(1469, 1.15, 3, 7437), Lengths(13, 0.95, 1, 1900), 1.6),
    "conversation": _single(Lengths(1020, 0.83, 2, 14050), Lengths(150, 0.95, 1, 1000), 1.1),
    "shifting": Shifting(10.0, ((Lengths(8000, 0.2), 16, 0.29), (Lengths(256, 0.3), 600, 1.71))),
    "chat": Conversations(
        shared=500,
        kinds=4,
        first=Lengths(400, 0.8, 10, 8000),
        new=Lengths(120, 0.9, 5, 8000),
        outputs=Lengths(220, 0.8, 1, 2000),
        turns=6,
        think=(12.0, 0.9),
    ),
    "documents": Conversations(
        shared=3000,
        kinds=24,
        first=Lengths(8500, 0.9, 64, 100_000),
        new=Lengths(1200, 1.2, 16, 30_000),
        outputs=Lengths(100, 0.9, 1, 1500),
        turns=3,
        think=(8.0, 1.0),
    ),
    "agentic": Conversations(
        shared=12_000,
        kinds=2,
        first=Lengths(85_000, 0.25, 20_000, 150_000),
        new=Lengths(9_500, 0.6, 200, 40_000),
        outputs=Lengths(300, 0.5, 20, 2000),
        turns=8,
        think=(2.1, 1.96),
    ),
}
"""Generators by name, for ``--trace``. ``agentic``: 110 k tokens in, 300 out, 90 % of each seen
before."""

"""Prices a predicted miss of an objective by its probability.

The ITL objective is either for a sequence's mean time between tokens (`MeanItl`) or for a
percentile of its times between tokens (`PercentileItl`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

from msgspec.structs import replace
from typing_extensions import override

from kvbaton.router.costs import CostModel
from kvbaton.router.predictions import Decode

MISSED_S = 30.0
"""Cost of a request that misses an objective, in seconds."""
CERTAINTY = 8.0
"""Exponent of the miss probability: a prediction of half the objective misses it about once in 2 to
this power."""
SEPARATE_CERTAINTY = 16.0
"""`CERTAINTY` of steps while some nodes only decode: no further prompts join the sequences
there."""
MISJUDGED = 0.1
"""Probability that the number of prompts a sequence meets is not predictable at all."""


def miss_cost(seconds: float, objective_s: float | None) -> float:
    """Cost of something predicted to take `seconds`: probability of a miss times `MISSED_S`."""
    return 0.0 if objective_s is None else MISSED_S * exceed_probability(seconds, objective_s)


def exceed_probability(seconds: float, objective_s: float, certainty: float = CERTAINTY) -> float:
    """Probability that what is predicted to be `seconds` exceeds an objective."""
    if seconds < 1e-6:
        return 0.0
    return 1.0 / (1.0 + math.pow(min(objective_s / seconds, 1e9), certainty))


class ItlObjective(ABC):
    """An ITL objective; its methods return the cost of misses in seconds.

    Each cost is a mean over sequences of mean length and of short ones. Half of all sequences count
    as short: they have too few tokens to make up for a stall. They are fewer among the sequences at
    a node, since they end sooner.

    Args:
        slo_s: The objective in seconds.
        costs: Model that knows how long sequences are.

    Attributes:
        spared: Probability that a decoding sequence meets only prompts that are at its node
            already.
        forgiven: Share of a sequence's ITLs that may exceed the objective; None if it is for the
            mean.
    """

    spared: ClassVar[float]
    forgiven: float | None = None

    def __init__(self, slo_s: float, costs: CostModel) -> None:
        self._slo_s, self._costs = slo_s, costs

    def _step_miss(self, seconds: float) -> float:
        """Probability that a step predicted to take `seconds` exceeds the objective."""
        roles = self._costs.roles
        separate = roles is not None and roles.generating
        certainty = SEPARATE_CERTAINTY if separate else CERTAINTY
        return exceed_probability(seconds, self._slo_s, certainty)

    def _mixed_step_miss(self, seconds: float) -> float:
        """The same for a step with prefill; 0 while its chunks fit."""
        return 0.0 if self._costs.chunks_fit else self._step_miss(seconds)

    @abstractmethod
    def new_cost(self, decode: Decode) -> float:
        """Cost for a new sequence that decodes on a node."""

    @abstractmethod
    def certain_prompt_cost(self, decode: Decode) -> float:
        """Cost of one prompt that a sequence surely meets, beyond what `new_cost` expects."""

    @abstractmethod
    def wait_cost(self, seconds: float, tokens: float) -> float:
        """Cost for a sequence of `tokens` tokens that stalls once, for `seconds`."""

    @abstractmethod
    def _cost(self, tokens: float, decode: Decode, slower_s: float, wait_s: float) -> float:
        """Cost for a sequence of `tokens` tokens: longer steps and a wait for prefill."""

    def present_cost(self, decode: Decode, slower_s: float = 0.0, work_s: float = 0.0) -> float:
        """Cost for a sequence at a node if steps take longer and one more prompt is computed there.

        The sequence also waits for all prompts that are queued there. Prompts to come count in part
        only, since the router may give them to other nodes: otherwise a node whose sequences seem
        lost by its recent prompts would be given all others, too.

        Args:
            decode: Prediction for the node.
            slower_s: Seconds that are added to each step.
            work_s: Seconds of prefill of the further prompt.
        """
        wait_s = decode.queued_s + work_s
        missed = self._typical_cost(decode, slower_s, wait_s)
        if not decode.prefill_share:
            return missed
        others_s = decode.others_s * (1 - decode.prefill_share)
        spared = replace(decode, prefill_share=0.0, others_s=others_s)
        return missed + self.spared * (self._typical_cost(spared, slower_s, wait_s) - missed)

    def arriving_cost(self, decode: Decode, slower_s: float, wait_s: float) -> float:
        """Additional cost for a sequence that comes to the node during the slowdown and wait."""
        return self._typical_cost(decode, slower_s, wait_s) - self._typical_cost(decode, 0.0, 0.0)

    def _typical_cost(self, decode: Decode, slower_s: float, wait_s: float) -> float:
        mean = self._costs.output_tokens
        short = min(mean, self._costs.short_output)
        missed = self._cost(mean, decode, slower_s, wait_s)
        return missed + short / (2 * mean) * (self._cost(short, decode, slower_s, wait_s) - missed)


class MeanItl(ItlObjective):
    """A sequence's mean time between tokens is to be within the objective."""

    spared = 0.25

    @override
    def new_cost(self, decode: Decode) -> float:
        # All tokens of a short sequence come beside prefill, or none of them.
        between = self._miss_cost(decode.step_s + decode.backlog_s / self._costs.short_output)
        if share := decode.prefill_share:
            between += share * (self._miss_cost(decode.step_s + decode.full_s) - between)
        return (self._miss_cost(decode.itl_s) + between) / 2

    @override
    def certain_prompt_cost(self, decode: Decode) -> float:
        # Share of sequences too short to make up for a full chunk, with exponential lengths.
        spare_s = (self._slo_s - decode.step_s) * self._costs.output_tokens
        too_short = decode.full_s / spare_s if spare_s > decode.full_s else 1.0
        return MISSED_S * too_short * (1 - decode.prefill_share)

    @override
    def wait_cost(self, seconds: float, tokens: float) -> float:
        return self._miss_cost(seconds / tokens)

    @override
    def _cost(self, tokens: float, decode: Decode, slower_s: float, wait_s: float) -> float:
        return self._miss_cost(decode.others_s + slower_s + wait_s / tokens)

    def _miss_cost(self, seconds: float) -> float:
        return MISSED_S * self._step_miss(seconds)


class PercentileItl(ItlObjective):
    """A percentile of a sequence's times between tokens is to be within the objective.

    So a sequence may meet some prompts, however long, but no more. The number it meets is Poisson
    distributed (approximated by a normal distribution) or, with probability `MISJUDGED`, unknown:
    then the cost is proportional to the expected number, up to the number forgiven. Each further
    prompt costs more than the one before, until as many come as are forgiven. So nodes share
    prompts evenly, and where these are too many they gather at few nodes.

    Args:
        slo_s: The objective in seconds.
        percentile: The percentile, between 0 and 100.
        costs: Model that knows how long sequences are.
    """

    spared = 0.75
    forgiven: float

    def __init__(self, slo_s: float, percentile: float, costs: CostModel) -> None:
        super().__init__(slo_s, costs)
        self.forgiven = 1.0 - percentile / 100

    @override
    def new_cost(self, decode: Decode) -> float:
        lengths = self._costs.output_tokens, self._costs.short_output
        return sum(self._miss_cost(n, decode.step_s, decode, decode.backlog_s) for n in lengths) / 2

    @override
    def certain_prompt_cost(self, decode: Decode) -> float:
        return self.arriving_cost(decode, 0.0, decode.full_s)

    @override
    def wait_cost(self, seconds: float, tokens: float) -> float:
        return MISSED_S * self._excess_probability(tokens, exceed_probability(seconds, self._slo_s))

    @override
    def _cost(self, tokens: float, decode: Decode, slower_s: float, wait_s: float) -> float:
        step_s = decode.others_s * (1 - decode.prefill_share) + slower_s
        return self._miss_cost(tokens, step_s, decode, wait_s)

    def _miss_cost(self, tokens: float, step_s: float, decode: Decode, wait_s: float) -> float:
        """Cost for a sequence that meets prompts as of late, and certain ones of `wait_s`."""
        share, full_s, prompt_s = decode.prefill_share, decode.full_s, decode.prompt_s
        slow, always = 0.0, self._step_miss(step_s)
        if share:
            prompts = tokens * step_s / prompt_s * share / (1 - share)
            slow = prompts * max(0.0, self._mixed_step_miss(step_s + prompt_s) - always)
        if wait_s:  # prompts that are queued share full steps
            steps = max(1.0, wait_s / full_s)
            slow += steps * max(0.0, self._mixed_step_miss(step_s + wait_s / steps) - always)
        stalled = self._excess_probability(tokens, slow)
        return MISSED_S * (stalled + (1 - stalled) * always)

    def _excess_probability(self, tokens: float, slow: float) -> float:
        """Probability that more ITLs are slow than are forgiven, if `slow` of them are expected."""
        if not slow:
            return 0.0
        forgiven = self.forgiven * tokens
        known = math.erfc((forgiven - slow) / math.sqrt(2 * slow)) / 2
        return known + MISJUDGED * (min(1.0, slow / forgiven) - known)

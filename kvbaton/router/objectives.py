"""What it costs that requests are expected to miss their objectives: by how likely that is.

Of the tokens after the first either a text's mean time per token is to be within the objective
(`MeanItl`), or a percentile of its times between tokens (`PercentileItl`).
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
"""A request that misses an objective counts as so many seconds."""
CERTAINTY = 8.0
"""What is expected to take half its objective misses it once in 2 to this power."""
APART = 16.0
"""The same of steps while some nodes only generate: no prompts come beside what is there."""
MISJUDGED = 0.1
"""So often how many prompts will come beside a text is not known at all."""


def missed_s(seconds: float, objective_s: float | None) -> float:
    """What it costs that something is expected to take so long: likelihood of a miss times cost."""
    return 0.0 if objective_s is None else MISSED_S * likely(seconds, objective_s)


def likely(seconds: float, objective_s: float, certainty: float = CERTAINTY) -> float:
    """That what is expected to be so much is more than an objective."""
    if seconds < 1e-6:
        return 0.0
    return 1.0 / (1.0 + math.pow(min(objective_s / seconds, 1e9), certainty))


class ItlObjective(ABC):
    """How fast the tokens after the first are to come; methods give what misses cost, in seconds.

    Texts of few tokens, half of all, are judged apart, as they can't make up for a wait. They are
    so much fewer among those that are there as they are sooner over.

    Args:
        slo_s: the objective.
        costs: with the lengths of texts.

    Attributes:
        spared: so likely a text that generates will meet no prompts but those that are there.
        forgiven: share of a text's times that may be longer; None if it is their mean that counts.
    """

    spared: ClassVar[float]
    forgiven: float | None = None

    def __init__(self, slo_s: float, costs: CostModel) -> None:
        self._slo_s, self._costs = slo_s, costs

    def _likely(self, seconds: float) -> float:
        """That a step which is expected to take so long misses the objective."""
        roles = self._costs.roles
        apart = roles is not None and roles.generating
        return likely(seconds, self._slo_s, APART if apart else CERTAINTY)

    def _stalled(self, seconds: float) -> float:
        """That one with a prompt in it does so; none where these come in chunks that fit."""
        return 0.0 if self._costs.chunks_fit else self._likely(seconds)

    @abstractmethod
    def own(self, decode: Decode) -> float:
        """Of a request that is generated on a node."""

    @abstractmethod
    def met(self, decode: Decode) -> float:
        """Of a text that one prompt surely comes beside, beside those that `own` expects."""

    @abstractmethod
    def waiting(self, seconds: float, tokens: float) -> float:
        """Of a text of so many tokens that waits once for so long."""

    @abstractmethod
    def _of(self, tokens: float, decode: Decode, slower_s: float, wait_s: float) -> float:
        """Of a text of so many tokens on a node: steps take longer, and it waits for prompts."""

    def there(self, decode: Decode, slower_s: float = 0.0, work_s: float = 0.0) -> float:
        """Of a sequence that is on a node, if steps take longer and one more prompt is computed.

        It waits for that after all prompts which are there already. Those to come are the router's
        to give, or to spare it: else who seems lost by those of late would get them all.
        """
        wait_s = decode.queued_s + work_s
        missed = self._of_any(decode, slower_s, wait_s)
        if not decode.prefill_share:
            return missed
        others_s = decode.others_s * (1 - decode.prefill_share)
        spared = replace(decode, prefill_share=0.0, others_s=others_s)
        return missed + self.spared * (self._of_any(spared, slower_s, wait_s) - missed)

    def coming(self, decode: Decode, slower_s: float, wait_s: float) -> float:
        """Of a sequence that comes to the node meanwhile, what it misses more than otherwise."""
        return self._of_any(decode, slower_s, wait_s) - self._of_any(decode, 0.0, 0.0)

    def _of_any(self, decode: Decode, slower_s: float, wait_s: float) -> float:
        mean = self._costs.output_tokens
        short = min(mean, self._costs.short_output)
        missed = self._of(mean, decode, slower_s, wait_s)
        return missed + short / (2 * mean) * (self._of(short, decode, slower_s, wait_s) - missed)


class MeanItl(ItlObjective):
    """A text's mean time per token is to be within the objective."""

    spared = 0.25

    @override
    def own(self, decode: Decode) -> float:
        # Short texts come all beside prompts, or none of them.
        between = self._missed(decode.step_s + decode.backlog_s / self._costs.short_output)
        if share := decode.prefill_share:
            between += share * (self._missed(decode.step_s + decode.full_s) - between)
        return (self._missed(decode.itl_s) + between) / 2

    @override
    def met(self, decode: Decode) -> float:
        # As many texts are too short to make up for it as if lengths were exponential.
        spare_s = (self._slo_s - decode.step_s) * self._costs.output_tokens
        too_short = decode.full_s / spare_s if spare_s > decode.full_s else 1.0
        return MISSED_S * too_short * (1 - decode.prefill_share)

    @override
    def waiting(self, seconds: float, tokens: float) -> float:
        return self._missed(seconds / tokens)

    @override
    def _of(self, tokens: float, decode: Decode, slower_s: float, wait_s: float) -> float:
        return self._missed(decode.others_s + slower_s + wait_s / tokens)

    def _missed(self, seconds: float) -> float:
        return MISSED_S * self._likely(seconds)


class PercentileItl(ItlObjective):
    """A percentile of a text's times between tokens is to be within the objective.

    So a text may meet some prompts, however long, but not more. How many come is a Poisson
    variable, taken for a normal one, or is misjudged: then each that is expected counts for its
    part of those that are forgiven. One more harms the more the more come, until as many come as
    are forgiven: so nodes share them evenly, and where that is too many they come together at few.

    Args:
        slo_s: the objective.
        percentile: which; 0 to 100.
        costs: with the lengths of texts.
    """

    spared = 0.75
    forgiven: float

    def __init__(self, slo_s: float, percentile: float, costs: CostModel) -> None:
        super().__init__(slo_s, costs)
        self.forgiven = 1.0 - percentile / 100

    @override
    def own(self, decode: Decode) -> float:
        lengths = self._costs.output_tokens, self._costs.short_output
        return sum(self._missed(n, decode.step_s, decode, decode.backlog_s) for n in lengths) / 2

    @override
    def met(self, decode: Decode) -> float:
        return self.coming(decode, 0.0, decode.full_s)

    @override
    def waiting(self, seconds: float, tokens: float) -> float:
        return MISSED_S * self._too_many(tokens, likely(seconds, self._slo_s))

    @override
    def _of(self, tokens: float, decode: Decode, slower_s: float, wait_s: float) -> float:
        step_s = decode.others_s * (1 - decode.prefill_share) + slower_s
        return self._missed(tokens, step_s, decode, wait_s)

    def _missed(self, tokens: float, step_s: float, decode: Decode, wait_s: float) -> float:
        """Of a text with steps of such a time, prompts as of late, and some that surely come."""
        share, full_s, prompt_s = decode.prefill_share, decode.full_s, decode.prompt_s
        slow, always = 0.0, self._likely(step_s)
        if share:
            prompts = tokens * step_s / prompt_s * share / (1 - share)
            slow = prompts * max(0.0, self._stalled(step_s + prompt_s) - always)
        if wait_s:  # of several prompts in full steps
            steps = max(1.0, wait_s / full_s)
            slow += steps * max(0.0, self._stalled(step_s + wait_s / steps) - always)
        stalled = self._too_many(tokens, slow)
        return MISSED_S * (stalled + (1 - stalled) * always)

    def _too_many(self, tokens: float, slow: float) -> float:
        """How likely more of a text's gaps are slow than may be, of which so many are expected."""
        if not slow:
            return 0.0
        forgiven = self.forgiven * tokens
        known = math.erfc((forgiven - slow) / math.sqrt(2 * slow)) / 2
        return known + MISJUDGED * (min(1.0, slow / forgiven) - known)

"""Finds pairs of live nodes between which no transfer succeeds.

Receivers report how many hand-overs and prefixes of each sender failed in a row
(`NodeInfo.wire_failures`). From `LEAST_FAILURES` on, such a pair gets only *trials*: one request
per period and router worker. The period doubles with each failed trial; a success ends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LEAST_FAILURES = 2
"""Failures in a row before a pair counts as failing: one may have other causes, such as a client
that disconnected."""
FIRST_TRIAL_S = 1.0
"""Seconds until the first trial, in case the trouble was short."""
FIRST_PERIOD_S = 8.0
"""Seconds between the first trials; longer than a transfer takes to be reported as failed."""
MAX_PERIOD_S = 60.0


@dataclass
class FailingPair:
    """A failing pair, as its receiver reports it.

    Attributes:
        sender_life: Generation of the sender; a restarted one gets a trial at once.
        failures: Failures in a row, as reported.
        trial_at: When the next trial is due, on the clock of the process that decides it.
        period_s: Seconds between trials.
        trials: Number of trials that were due until now.
        failed_trials: Number of these up to the last one that is known to have failed.
        made_trials: Number of these up to the last one that this process made.
    """

    sender_life: str
    failures: int
    trial_at: float
    period_s: float = FIRST_PERIOD_S
    trials: int = 0
    failed_trials: int = 0
    made_trials: int = 0

    @property
    def is_due(self) -> bool:
        """Whether a request may use the pair."""
        return self.made_trials != self.trials

    def tick(self, now: float) -> bool:
        """Update for the time; return True if a trial is due from now on."""
        if now < self.trial_at:
            return False
        self.trials += 1
        self.trial_at = now + self.period_s
        return True

    def failed(self, failures: int, now: float) -> None:
        """Record reported failures; transfers begun before the last trial are no trials."""
        if failures > self.failures and self.trials > self.failed_trials:
            self.failed_trials = self.trials
            self.period_s = min(2 * self.period_s, MAX_PERIOD_S)
            self.trial_at = now + self.period_s
        self.failures = failures


def failing_pairs(
    known: Mapping[str, FailingPair],
    told: Mapping[str, int],
    lives: Mapping[str, str],
    now: float,
) -> dict[str, FailingPair]:
    """Failing pairs of one receiver, by the sender's control address.

    Args:
        known: Its failing pairs until now.
        told: Failures by the same address, as reported (`NodeInfo.wire_failures`).
        lives: Generations of all nodes, by control address.
        now: Seconds on a monotonic clock.
    """
    found: dict[str, FailingPair] = {}
    for address, failures in told.items():
        life = lives.get(address)
        if failures < LEAST_FAILURES or life is None:
            continue
        pair = known.get(address)
        if pair is None:
            pair = FailingPair(life, failures, now + FIRST_TRIAL_S)
        elif pair.sender_life != life:
            pair = FailingPair(life, failures, now + FIRST_PERIOD_S, trials=1)
        pair.failed(failures, now)
        found[address] = pair
    return found

"""Pairs of nodes between which nothing gets through, though both live: who sends to whom.

Receivers tell how many hand-overs and prefixes of each sender failed in a row
(`NodeInfo.wire_failures`). From `LEAST_FAILURES` on nothing goes that way but *trials*: one request
(of each worker of a router) a period, which doubles with each trial that fails. One that arrives
ends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LEAST_FAILURES = 2
"""In a row: a single one may be one request's misfortune, as where its client went away."""
FIRST_TRIAL_S = 1.0
"""After which it is seen whether the trouble was a short one."""
FIRST_PERIOD_S = 8.0
"""Longer than it takes until what does not arrive is told as failed."""
MAX_PERIOD_S = 60.0


@dataclass
class FailingPair:
    """What is known of one, by the receiver of KV.

    Attributes:
        sender_life: generation of who sends; another one is tried at once.
        failures: in a row, as the receiver told.
        trial_at: when the next one may be made; on the clock of who decides that.
        period_s: between two.
        trials: that might be made until now.
        failed_trials: of those, up to the last that is known to have failed.
        made_trials: of those, up to the last that was made from here.
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
        """Whether a request may go this way."""
        return self.made_trials != self.trials

    def tick(self, now: float) -> bool:
        """Time has passed; True if a trial is due from now on."""
        if now < self.trial_at:
            return False
        self.trials += 1
        self.trial_at = now + self.period_s
        return True

    def failed(self, failures: int, now: float) -> None:
        """The receiver tells of so many now; what was sent before the last trial is no trial."""
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
    """Those of one receiver, by the control address of who sends.

    Args:
        known: of them, until now.
        told: failures by the same address, as the receiver tells (`NodeInfo.wire_failures`).
        lives: generations of all nodes, by control address.
        now: the clock.
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

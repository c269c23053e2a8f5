"""Fair shares of an engine among tenants: start-time fair queueing.

Goyal, Vin and Cheng, "Start-time Fair Queueing", SIGCOMM 1996. Service is counted in tokens, those
of a prompt once and generated ones twice, as Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024, weigh them; what is generated is charged when it is known, so that tags of one
tenant never go back and its requests keep their order.
"""

from __future__ import annotations

GENERATED_WEIGHT = 2

MAX_TENANTS = 4096
"""Beyond them, what all have had is forgotten: they are equal again, and none goes back."""


class FairShares:
    """Start tags of requests; who has the least goes first."""

    def __init__(self) -> None:
        self._now = 0
        self._finish: dict[str, int] = {}

    def enter(self, tenant: str, prompt_tokens: int) -> int:
        """A request joins the queue.

        Returns:
            Its start tag: among requests of equal priority the smallest goes first.
        """
        if len(self._finish) >= MAX_TENANTS:
            self._now = max(self._now, *self._finish.values())
            self._finish.clear()
        start = max(self._now, self._finish.get(tenant, 0))
        self._finish[tenant] = start + prompt_tokens
        return start

    def serve(self, start: int) -> None:
        """A request with this tag runs: nobody who comes now is to go before it."""
        self._now = max(self._now, start)

    def charge(self, tenant: str, generated_tokens: int) -> None:
        """A request has ended."""
        before = max(self._now, self._finish.get(tenant, 0))
        self._finish[tenant] = before + GENERATED_WEIGHT * generated_tokens

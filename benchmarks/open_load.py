"""An open load made by several processes, and which of its requests met their objectives."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import aiohttp
import numpy as np

from benchmarks.workload import random_prompts
from kvbaton.bench.report import percentile
from kvbaton.bench.serve import Shot, served_model, shoot

SHARE = 0.9
"""Of the requests must meet the objectives."""


def between(shot: Shot) -> list[float]:
    """Seconds between arrivals of tokens; those that come at once are one arrival.

    Else tokens in clumps of 25 would have no ITL at the 95th percentile.
    """
    return [b - a for a, b in pairwise(sorted(set(shot.times)))]


@dataclass(frozen=True)
class Ask:
    """A request to come: when (monotonic), its prompt's seed, its tokens, and whether it counts."""

    at: float
    seed: int
    max_tokens: int
    counts: bool


@dataclass(frozen=True)
class Load:
    """What is asked, of what, and what is wanted of it; times in seconds, on the monotonic clock.

    Attributes:
        asks: of all processes.
        length: of prompts.
        ttft: objective.
        itls: objectives, ascending.
        until: of an end in any case.
        tally: a file of int64 [processes, 2]: requests that count and have ended, and of them those
            that miss the loosest objective.
    """

    url: str
    asks: list[Ask]
    length: int
    ttft: float = math.inf
    itls: tuple[float, ...] = (math.inf,)
    until: float = math.inf
    tally: str = ""

    def met(self, shot: Shot, itl: float) -> bool:
        """Whether a request met an objective."""
        if shot.error is not None or shot.after(0) >= self.ttft:
            return False
        gaps = between(shot)
        return not gaps or percentile(gaps, 95) < itl

    async def shoot(self, number: int, processes: int) -> list[Shot]:
        """Make one process's share of the load until all is known; what counts and has ended."""
        tally = np.memmap(self.tally, np.int64, "r+", shape=(processes, 2))
        total, shots = sum(ask.counts for ask in self.asks), list[Shot]()
        connector, forever = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=forever) as session:
            model = await served_model(session, self.url)

            async def ask(one: Ask) -> None:
                await asyncio.sleep(one.at - time.monotonic())
                (prompt,) = random_prompts(1, self.length, one.seed)
                shot = Shot(one.at, (), error="late")  # it misses every objective
                late = one.at + self.ttft + one.max_tokens * self.itls[-1]
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(1e-3, min(late - time.monotonic(), 1e6))):
                        shot = await shoot(session, self.url, model, prompt, one.max_tokens)
                if one.counts:
                    shots.append(shot)
                    tally[number] += (1, not self.met(shot, self.itls[-1]))

            tasks = [asyncio.create_task(ask(one)) for one in self.asks[number::processes]]
            while time.monotonic() < self.until:
                ended, missed = tally.sum(axis=0)
                if ended >= total or missed > (1 - SHARE) * total:
                    break
                await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            for raised in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(raised, Exception):
                    raise raised
        return shots


def run(load: Load, number: int, processes: int) -> list[Shot]:
    """`Load.shoot` in a process of its own."""
    return asyncio.run(load.shoot(number, processes))

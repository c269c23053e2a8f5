"""Jobs of one thread: generators that yield what they wait for, and go on when that is over."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
Wait = Future[Any] | Callable[[], bool]
"""What a job waits for: a future, or something to be asked again and again."""
Job = Generator[Wait, None, T]

LOOK_S = 0.0005
"""From a first look at what can't wake the thread, sums and copies of a device, to the second."""
LOOK_GROWTH = 1.25
"""Each pause is so much longer than the one before: every look disturbs the steps."""
MOST_LOOK_S = 0.02


class JobLoop:
    """Runs jobs, and what other threads post, in the thread that calls `run`."""

    def __init__(self) -> None:
        self._inbox: deque[Callable[[], object]] = deque()
        self._jobs: dict[Job[None], Wait] = {}
        self._wake = threading.Event()
        self._pause_s = LOOK_S
        self._stopping = False

    @property
    def num_jobs(self) -> int:
        """How many wait for something."""
        return len(self._jobs)

    def post(self, call: Callable[[], object]) -> None:
        """Have something called in the loop's thread; any thread may."""
        self._inbox.append(call)
        self._wake.set()

    def stop(self) -> None:
        """Have `run` return soon; any thread may. Jobs that wait then are left as they are."""
        self._stopping = True
        self._wake.set()

    def run(self) -> None:
        """Make calls and go on with jobs until `stop`; what they raise comes through."""
        while not self._stopping:
            asked = any(not isinstance(wait, Future) for wait in self._jobs.values())
            woken = self._wake.wait(self._pause_s if asked else None)
            self._pause_s = LOOK_S if woken else min(self._pause_s * LOOK_GROWTH, MOST_LOOK_S)
            self._wake.clear()
            while self._inbox:
                self._inbox.popleft()()
            for job in list(self._jobs):
                self.go_on(job)

    def go_on(self, job: Job[None]) -> None:
        """Begin a job or go on with it, up to the next thing that it really has to wait for."""
        parked = wait = self._jobs.pop(job, None)
        error: Exception | None = None
        try:
            while True:
                if wait is None:
                    wait = next(job) if error is None else job.throw(error)
                    error = None
                try:
                    over = wait.done() if isinstance(wait, Future) else wait()
                except Exception as raised:
                    over, error = True, raised
                if not over:
                    break
                wait = None
        except StopIteration:
            return
        self._jobs[job] = wait
        if isinstance(wait, Future) and wait is not parked:
            wait.add_done_callback(lambda _: self._wake.set())

    def side_by_side(self, jobs: Iterator[Job[None]], most: int) -> Job[None]:
        """Run jobs, so many at a time, each as far as it gets before the next begins."""
        lanes, over = [True] * most, Future[None]()

        def lane() -> Job[None]:
            for job in jobs:
                yield from job
            lanes.pop()
            if not lanes:
                over.set_result(None)

        for _ in range(most):
            self.go_on(lane())
        yield over

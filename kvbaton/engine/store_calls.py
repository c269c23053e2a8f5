"""Calls of a store: whatever a plug-in does, the result is valid or a `StoreError`.

A plug-in may raise anything, in a call or from its future, return something that is not a future,
or answer for fewer keys than it was asked for. Each such failure is logged with the first key and
the store's name and counted by call. It costs cache hits, not the node. `health` and `usage` run in
a thread of their own, which may hang.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar, cast

from kvbaton.connectors.registry import as_written
from kvbaton.connectors.store import (
    AnyPieces,
    Found,
    Hints,
    Pieces,
    Registering,
    Store,
    Usage,
)
from kvbaton.engine.stats import LatencyHistogram
from kvbaton.errors import ConfigError, StoreError, error_text
from kvbaton.messages.engine import HistogramCounts

T = TypeVar("T")
Wait = Future[Any] | Callable[[], bool]
"""What a job waits for: a future, or a function to be polled."""
Job = Generator[Wait, None, T]

LOOK_S = 0.0005
"""Seconds from the first to the second poll of what can't wake the thread (sums, device copies)."""
LOOK_GROWTH = 1.25
"""Factor by which pauses between polls grow, since every poll disturbs the steps."""
MOST_LOOK_S = 0.02


class JobLoop:
    """Runs jobs, and calls that other threads post, in the thread that calls `run`.

    A job is a generator that yields what it waits for, and is resumed when that is over.
    """

    def __init__(self) -> None:
        self._inbox: deque[Callable[[], object]] = deque()
        self._jobs: dict[Job[None], Wait] = {}
        self._wake = threading.Event()
        self._pause_s = LOOK_S
        self._stopping = False

    @property
    def num_jobs(self) -> int:
        """Number of jobs that wait for something."""
        return len(self._jobs)

    def post(self, call: Callable[[], object]) -> None:
        """Have a function called in the loop's thread; from any thread."""
        self._inbox.append(call)
        self._wake.set()

    def stop(self) -> None:
        """Make `run` return soon; from any thread. Waiting jobs are abandoned."""
        self._stopping = True
        self._wake.set()

    def run(self) -> None:
        """Make posted calls and resume jobs until `stop`; raises what they raise."""
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
        """Start or resume a job, until it has to wait for something."""
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
        """Run jobs, at most `most` at a time; each goes as far as it can before the next starts."""
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


logger = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Seconds to leave a store alone after a first failure; doubled with each further one in a row."""
MOST_PAUSE_S = 60.0


class CircuitBreaker:
    """Leaves a failing store alone, for longer each time (M. Nygard, "Release It!", 2007).

    Closed while calls work; open from a failure until a trial after the pause has worked.

    Args:
        what: What the calls are, for the log.

    Attributes:
        is_open: Whether the store must not be called.
        opened: How often the breaker has opened.
    """

    def __init__(self, what: str) -> None:
        self.is_open = False
        self.opened = 0
        self._what = what
        self._pause = PAUSE_S
        self._until = 0.0

    def due(self, now: float) -> bool:
        """Whether it is open and a trial is due."""
        return self.is_open and now >= self._until

    def failed(self, now: float, reason: str) -> None:
        """Note a failed call; calls made before the breaker opened do not prolong the pause."""
        if self.is_open and now < self._until:
            return
        self.opened += not self.is_open
        self.is_open, self._until = True, now + self._pause
        logger.warning("%s: left alone for %g s, since %s", self._what, self._pause, reason)
        self._pause = min(2 * self._pause, MOST_PAUSE_S)

    def close(self) -> None:
        """Close after a successful trial; if the next call fails, the pause is longer still."""
        if self.is_open:
            logger.info("%s: asked again, since one has worked", self._what)
        self.is_open = False

    def worked(self) -> None:
        """Close after a successful call, and forget earlier failures."""
        self.close()
        self._pause = PAUSE_S


N = TypeVar("N", int, float)

TIMED = ("lookup", "load", "store", "delete", "claim", "clear")
CALLS = ("register", *TIMED, "release", "health", "usage", "close")
CALL_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
MOST_METRICS = 64
"""Maximum number of a store's own metrics of each kind, and of its tenants."""
WARN_S = 10.0
"""Seconds between log lines about failures of one call, or about wrong bytes."""
SLOW_S = 0.1
"""Longest time in seconds for `health` and `usage`, which must not block; slower stores are asked
less often."""
OVERDUE_S = 5.0
"""Seconds without an answer to `health` or `usage` after which a store counts as unhealthy."""


class StoreCalls:
    """Calls of one store, as jobs of the thread that makes them.

    Args:
        store: The store, as built.

    Attributes:
        name: Name of the store.
        capabilities: Capabilities as declared when it was built.
        errors: Number of failed calls, by call.

    Raises:
        ConfigError: The store's name is invalid.
    """

    def __init__(self, store: Store) -> None:
        self.plugin = store
        self.name = store.name
        if not isinstance(self.name, str) or _NAME.fullmatch(self.name) is None:
            told = f"the name {self.name!r} of a store can't be a metric's label"
            raise ConfigError("--store", f"{told}: letters, digits and . : @ / - are, 128 at most")
        self.capabilities = store.capabilities
        self.errors = dict.fromkeys(CALLS, 0)
        self._seconds = {call: LatencyHistogram(CALL_BUCKETS) for call in TIMED}
        self._warn_at: dict[str, float] = {}

    def register(self, regions: AnyPieces) -> bool:
        """Call `Registering.register` if the store has it; a store that fails works without.

        Returns:
            Whether it did not fail.
        """
        plugin = self.plugin
        if not isinstance(plugin, Registering):
            return True
        return self.attempt("register", lambda: plugin.register(regions)) is None

    def histograms(self) -> dict[str, HistogramCounts]:
        """Time from calls to the completion of their futures, by Prometheus name."""
        head = f'kvbaton_store_call_seconds{{store="{self.name}",call='
        return {f'{head}"{call}"}}': seen.counts() for call, seen in self._seconds.items()}

    def lookup(
        self, keys: Sequence[bytes], *, prefix: bool = False, pin: bool = False
    ) -> Job[Found]:
        """Call `Store.lookup`; with `pin`, pins what it finds if the store can.

        With `prefix`, a store that can stop at the first gap answers False for what follows.
        """
        options: dict[str, Any] = {"pin": pin and self.capabilities.pins}
        if prefix and self.capabilities.prefix:
            options["prefix"] = True

        def check(found: Found) -> Found:
            _require(found, Found)
            return Found(tuple(_answers(keys, found.present)), found.ticket)

        return self._ask("lookup", keys, lambda: self.plugin.lookup(keys, **options), check)

    def load(
        self,
        keys: Sequence[bytes],
        targets: Sequence[AnyPieces],
        begun: Callable[[Future[list[bool]]], object] = lambda _: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Job[list[bool]]:
        """Call `Store.load`.

        Args:
            keys: Keys of the objects.
            targets: Their memory; `Memory` only for a store that declares it.
            begun: Called with the store's future.
            cancelled: Whether the future was cancelled by us, so that its error does not count.
        """

        def begin() -> Future[list[bool]]:
            future = self.plugin.load(keys, cast("Sequence[Pieces]", targets))
            begun(future)
            return future

        return self._ask("load", keys, begin, partial(_answers, keys), cancelled)

    def store(
        self, keys: Sequence[bytes], sources: Sequence[AnyPieces], hints: Sequence[Hints]
    ) -> Job[list[bool]]:
        """Call `Store.store`, with hints if the store takes them."""
        options: Any = {"hints": hints} if self.capabilities.hints else {}
        pieces = cast("Sequence[Pieces]", sources)
        begin = partial(self.plugin.store, keys, pieces, **options)
        return self._ask("store", keys, begin, partial(_answers, keys))

    def claim(self, keys: Sequence[bytes]) -> Job[list[bool]]:
        """Call `Claiming.claim` of a store that declares it."""
        plugin: Any = self.plugin
        return self._ask("claim", keys, lambda: plugin.claim(keys), partial(_answers, keys))

    def clear(self, namespace: str) -> Job[int]:
        """Call `Namespaced.clear` of a store that declares it."""
        plugin: Any = self.plugin
        return self._ask("clear", (), lambda: plugin.clear(namespace), int)

    def delete(self, keys: Sequence[bytes]) -> Job[int]:
        """Call `Store.delete`."""
        return self._ask("delete", keys, lambda: self.plugin.delete(keys), int)

    def release(self, ticket: int) -> None:
        """Call `Store.release`."""
        self.attempt("release", lambda: self.plugin.release(ticket))

    def close(self) -> None:
        """Call `Store.close`."""
        self.attempt("close", self.plugin.close)

    def attempt(self, call: str, action: Callable[[], object]) -> str | None:
        """Make a call without answer; returns the text of `note` if it failed, else None."""
        try:
            action()
        except BaseException as error:
            return self.note(call, error)
        return None

    def note(self, call: str, error: BaseException, keys: Sequence[bytes] = ()) -> str:
        """Count and log an error; returns its text."""
        about = f" of {len(keys)} keys, first {keys[0].hex()}" if keys else ""
        text = as_written(f"{call}{about} at {self.name} failed: {error_text(error)}")
        self.errors[call] += 1
        self._warn(call, text, error)
        return text

    def note_corrupt(self, keys: Sequence[bytes]) -> None:
        """Log that the store returned other bytes than were saved under these keys."""
        told = f"{len(keys)} blocks of a load, first {keys[0].hex()}, are not what was saved"
        self._warn("corrupt", f"{self.name} gave wrong bytes: {told}; they are computed anew")

    def _warn(self, subject: str, text: str, error: BaseException | None = None) -> None:
        if (now := time.monotonic()) >= self._warn_at.get(subject, 0.0):
            self._warn_at[subject] = now + WARN_S
            # An error that is no StoreError is a bug of the plug-in: log where it was raised.
            bug = error if not isinstance(error, StoreError) else None
            trace = ["\n", *traceback.format_exception(bug)] if bug else []
            logger.warning("%s", as_written("".join([text, *trace])))

    def _ask(
        self,
        call: str,
        keys: Sequence[bytes],
        begin: Callable[[], Future[Any]],
        check: Callable[[Any], T],
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Job[T]:
        began = time.monotonic()
        done = Future[None]()  # our own, since even queries of a plug-in's future could raise
        # Catch all: a plug-in's sys.exit() must not end our thread, nor GeneratorExit this job.
        try:
            future = begin()
            if not isinstance(future, Future):
                given = type(future).__name__
                raise TypeError(f"it returned {given}, not a concurrent.futures.Future")
            future.add_done_callback(lambda _: done.set_result(None))
        except BaseException as error:
            raise StoreError(self.note(call, error, keys)) from error
        yield done
        if not _is_over(future):  # called back too early: buffers are in use, `result` would wait
            yield partial(_is_over, future)
        self._seconds[call].observe(time.monotonic() - began)
        try:
            return check(future.result())
        except BaseException as error:
            if isinstance(error, CancelledError) and cancelled():
                raise StoreError("cancelled") from error
            raise StoreError(self.note(call, error, keys)) from error


def _is_over(future: Future[Any]) -> bool:
    try:
        return future.done()
    except BaseException:  # `result` is to raise, and to be counted
        return True


def _require(answer: object, wanted: type) -> None:
    if not isinstance(answer, wanted):
        told = f"it answered with a {type(answer).__name__}, not a {wanted.__name__}"
        raise TypeError(told)


def _answers(keys: Sequence[bytes], answers: Sequence[object]) -> list[bool]:
    _require(answers, Sequence)
    if len(answers) != len(keys):
        raise ValueError(f"it answered for {len(answers)} of {len(keys)} keys")
    if set(map(type, answers)) - {bool}:  # None is no refusal for want of room
        _require(next(answer for answer in answers if not isinstance(answer, bool)), bool)
    return list(cast("Sequence[bool]", answers))


class StoreStatus:
    """Health and usage of a store, asked for in a thread of their own.

    Args:
        calls: Calls of the store.

    Attributes:
        trouble: Why the store can't serve, by its last answer; None if it can.
        usage: What the store holds, by its last answer.
    """

    def __init__(self, calls: StoreCalls) -> None:
        self.trouble: str | None = None
        self.usage = Usage()
        self._calls = calls
        self._breaker = CircuitBreaker(f"health and usage of {calls.name}")
        self._wake = threading.Event()
        self._stopping = False
        self._asked_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="kvbaton-store-status", daemon=True)

    def start(self) -> None:
        """Start the thread, with a first question."""
        self._wake.set()
        self._thread.start()

    def refresh(self) -> None:
        """Have the store asked again, unless it has to be left alone; never blocks."""
        now, asked_at = time.monotonic(), self._asked_at
        if asked_at is not None and now - asked_at > OVERDUE_S:
            self.trouble = "it owes an answer to health or usage"
        if not self._breaker.is_open or self._breaker.due(now):
            self._wake.set()

    def gauges(self) -> dict[str, float]:
        """Current values by Prometheus name; without those that the store can't tell."""
        usage, label = self.usage, f'store="{self._calls.name}"'
        values = {
            "objects": usage.objects,
            "used_bytes": usage.num_bytes,
            "capacity_bytes": usage.capacity,
        }
        told: dict[str, float] = {
            f"kvbaton_store_{n}{{{label}}}": v for n, v in values.items() if v is not None
        }
        told |= {f"kvbaton_store_plugin_{n}{{{label}}}": v for n, v in usage.gauges.items()}
        for tenant, held in usage.tenants.items():
            told[f'kvbaton_store_tenant_bytes{{{label},tenant="{tenant}"}}'] = held
        return {name: float(value) for name, value in told.items()}

    def counters(self) -> dict[str, float]:
        """Totals of the store's own counters, by Prometheus name."""
        tail = f'_total{{store="{self._calls.name}"}}'
        counters = self.usage.counters.items()
        return {f"kvbaton_store_plugin_{name}{tail}": float(value) for name, value in counters}

    def close(self) -> None:
        """End the thread, unless it hangs in the plug-in."""
        self._stopping = True
        self._wake.set()
        if self._asked_at is None and self._thread.is_alive():
            self._thread.join(1.0)

    def _run(self) -> None:
        while self._wake.wait() and not self._stopping:
            self._wake.clear()
            self._asked_at = began = time.monotonic()
            wrong = self._calls.attempt("health", self._health)
            self.trouble = wrong or self.trouble
            wrong = self._calls.attempt("usage", self._usage) or wrong
            self.trouble = wrong or self.trouble
            self._asked_at, now = None, time.monotonic()
            if now - began > SLOW_S:
                self._breaker.failed(now, f"they took {now - began:.2g} s")
            elif wrong:
                self._breaker.failed(now, "they failed")
            else:
                self._breaker.worked()

    def _health(self) -> None:
        trouble = self._calls.plugin.health()
        self.trouble = None if trouble is None else as_written(str(trouble))

    def _usage(self) -> None:
        usage = self._calls.plugin.usage()
        _require(usage, Usage)
        for count in (usage.objects, usage.num_bytes, usage.capacity):
            if count is not None:
                float(count)
        self.usage = replace(
            usage,
            tenants=_bounded(usage.tenants, _LABEL),
            counters=_bounded(usage.counters, _METRIC),
            gauges=_bounded(usage.gauges, _METRIC),
        )


_NAME = re.compile(r"[\w.:@/ -]{1,128}")
_METRIC, _LABEL = re.compile("[a-z][a-z0-9_]{0,63}"), re.compile(r"[\w.-]{1,64}", re.ASCII)


def _bounded(values: Mapping[str, N], names: re.Pattern[str]) -> dict[str, N]:
    """The first `MOST_METRICS` values, checked for a metrics page.

    Raises:
        ValueError: A metrics page can't show a name or a value.
    """
    for name, value in values.items():
        if names.fullmatch(name) is None or not math.isfinite(value):
            raise ValueError(f"a metrics page can't show {name!r}: {value!r}")
    return dict(islice(values.items(), MOST_METRICS))

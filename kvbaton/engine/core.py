"""The engine core: one loop that receives, schedules, launches, updates and sends.

The core runs in its own process (`engine/process.py`). Only its thread touches the scheduler, the
pool and the executor. It polls connectors between steps (`engine/kv_connector.py`).
"""

from __future__ import annotations

import logging
import math
import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from kvbaton.engine.audit import audit
from kvbaton.engine.executor import Executor
from kvbaton.engine.kv_connector import Connectors, KVConnector
from kvbaton.engine.pending import Pending
from kvbaton.engine.profiler import TorchProfiler
from kvbaton.engine.scheduler import Scheduler
from kvbaton.engine.stats import StepTimes
from kvbaton.engine.step import WHOLE_TOKENS, StepResult
from kvbaton.engine.step_costs import Terms, step_costs, terms_of
from kvbaton.errors import RequestError, StoreError
from kvbaton.messages import engine as messages
from kvbaton.types import clip_text

logger = logging.getLogger(__name__)

AWAIT_SHARE, AWAIT_MARGIN_S = 0.75, 0.0015
"""How long connectors are polled while a step runs: for at most this share of the step's expected
time, and until this many seconds, plus twice the time of a launch, before its expected end, so that
the next step is launched in time behind it."""
AWAIT_LOOK_S = 0.002
"""Longest wait in seconds during that polling, after which the core looks if the step is over."""

METRICS_PERIOD_S = 2.0
AUDIT_PERIOD_S = 10.0
"""Seconds between ledger audits while there is work; one of 170,000 blocks takes 40 ms."""
IDLE_WAIT_S = 0.5


class Mailbox(Protocol):
    """Messages between frontends and the core."""

    def receive(self, timeout: float, wake_fd: int) -> Iterable[messages.ToCore]:
        """Messages that have arrived; waits up to `timeout` seconds for one, or for `wake_fd`."""

    def send(self, message: messages.FromCore) -> None:
        """Send a message to the frontends that it concerns."""


class EngineCore:
    """Runs requests until told to shut down.

    Args:
        executor: The ranks.
        scheduler: Decides what they compute.
        mailbox: Source of messages and destination of outputs.
        connectors: KV connectors, in the order in which they are asked.
        depth: Maximum number of steps in flight; 2 overlaps scheduling with the device's work.
        profiler: Records profiles on request; None refuses to.

    Attributes:
        wake_fd: Readable when `poll` or `update` has something to do.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        mailbox: Mailbox,
        *,
        connectors: Sequence[KVConnector] = (),
        depth: int = 1,
        profiler: TorchProfiler | None = None,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.mailbox = mailbox
        self.connectors = scheduler.connectors = Connectors(connectors)
        self.depth = depth
        self.profiler = profiler or TorchProfiler(None, "")
        self._waker = select.epoll()
        self.wake_fd = self._waker.fileno()
        self._must_wait = not executor.wake_fds  # the end of a step makes no descriptor readable
        for fds in (executor.wake_fds, *(connector.wake_fds for connector in connectors)):
            for fd in fds:
                self._waker.register(fd, select.EPOLLIN)
        self.in_flight: deque[Pending[StepResult]] = deque()
        self.draining = False
        self.steps = 0
        self.step_tokens = 0
        self.step_seconds = 0.0
        self.step_costs = step_costs()
        self._terms: deque[Terms] = deque()
        self._launch_s = 0.0
        self._await_until = 0.0
        self.times = StepTimes()
        self._busy_since = 0.0
        self._unsent: list[messages.Output] = []
        self._applied = False  # whether a result came since the last plan: plan again at once
        self._stop_at = math.inf
        self._metrics_at = self._audit_at = 0.0
        self._imbalance = 0.0  # result of the last audit
        self._replies: list[tuple[int, Future[int]]] = []
        self.refused = 0
        self._handlers = {
            messages.AddRequest: self.add,
            messages.AbortRequest: self.abort,
            messages.Command: self.command,
            messages.Shutdown: self.shut_down,
        }

    @property
    def control_address(self) -> str | None:
        """Control address at which peers reach this node; None if no connector has one."""
        addresses = (connector.control_address for connector in self.connectors)
        return next(filter(None, addresses), None)

    # --- the loop ---

    def run(self) -> None:
        """Serve until a `Shutdown` has been carried out."""
        while not self.finished():
            self.turn()
        self.report(force=True)

    def turn(self) -> None:
        """Run the loop once."""
        self.executor.check()
        self.receive()
        self._hear()
        self.launch()  # before `send`: compute what connectors have brought, then report it
        self.send(())
        self.times.lap("send")
        self.update()
        self.connectors.call(KVConnector.flush)
        self.times.lap("poll")
        self.report()
        self.times.lap("report")

    def finished(self) -> bool:
        """Whether a shutdown was asked for, and all work is done or the grace is over."""
        if self._stop_at == math.inf:
            return False
        return self.is_idle() or time.monotonic() >= self._stop_at

    def is_idle(self) -> bool:
        """Whether neither the engine nor a connector has work left."""
        works = self.in_flight or self.scheduler.has_work()
        return not works and not any(self.connectors.call(KVConnector.busy))

    def receive(self) -> None:
        """Handle messages of frontends; wait for one if there is nothing else to do."""
        for message in self.mailbox.receive(self.patience(), self.wake_fd):
            self.times.lap("wait")
            self.times.received += 1
            try:
                self._handlers[type(message)](message)  # type: ignore[operator]
            except Exception as error:  # a message comes from outside: it must not end the loop
                self.refused += 1
                logger.exception("a message of a frontend could not be carried out")
                try:
                    self.fail_message(message, f"internal error: {type(error).__name__}: {error}")
                except Exception:
                    logger.exception("the request of the failed message could not be ended")
            self.times.lap("receive")
        self.times.lap("wait")

    def poll(self) -> None:
        """Poll the connectors, expire requests, and send the outputs."""
        self._hear()
        self.send(())

    def _hear(self) -> None:
        """Do as `poll`, but leave the outputs to the next `send`."""
        now, failing = time.monotonic(), self.connectors.failing
        heard = self.connectors.all if failing else self.connectors.having[KVConnector.poll]
        for connector in heard:
            if connector in failing:
                rests = now < failing[connector]
                for fd in connector.wake_fds:  # while it rests, its events must not wake us
                    self._waker.modify(fd, 0 if rests else select.EPOLLIN)
                if rests:
                    continue
            try:
                outputs = connector.poll(now)
            except Exception as error:
                failing.pop(connector, None)
                self.connectors.contain(connector, error)
            else:
                failing.pop(connector, None)
                self._unsent += outputs
        for number, future in tuple(self._replies):
            if not future.done():
                continue
            self._replies.remove((number, future))
            try:
                self.mailbox.send(messages.Reply(command_id=number, result=future.result()))
            except StoreError as error:
                self.mailbox.send(messages.Reply(command_id=number, error=clip_text(str(error))))
        raised, self.connectors.raised = self.connectors.raised, []
        for failure in raised:
            self._unsent += self.scheduler.fail_connector(*failure)
        self._unsent += self.scheduler.expire(now)
        self.times.lap("poll")

    def launch(self) -> None:
        """Launch the next step or steps, as far as `depth` allows and work is there."""
        self._applied, launched = False, False
        while len(self.in_flight) < self.depth and not self._awaits():
            if launched:  # the launch may have been long: hear peers' requests first
                self._hear()
            began = time.monotonic()
            plan = self.scheduler.plan()
            self.times.lap("schedule")
            if plan is None:
                return
            self.steps += 1
            num_tokens = plan.num_tokens
            self.step_tokens += num_tokens
            if self.in_flight and num_tokens > WHOLE_TOKENS:
                before = self.scheduler.in_flight[0].scheduled
                if all(each.end - each.start == 1 for each in before):
                    self._apply(*self._take())  # sampled tokens must not wait for a long launch
                    began = time.monotonic()
            if not self.in_flight:
                self._busy_since = time.monotonic()
            self._terms.append(terms_of(plan.steps))
            self.times.launched(plan, num_tokens)
            self.in_flight.append(self.executor.launch(plan))
            self._launch_s, launched = time.monotonic() - began, True
            self.times.lap("launch")
            self.connectors.call(KVConnector.launched, self.scheduler.in_flight[-1])
            if len(self.in_flight) == 1:
                self._expect()
            self.times.lap("poll")

    def _expect(self) -> None:
        """Set the time until which connectors are polled while the oldest step runs."""
        terms, expected = self._terms[0], 0.0
        # Not during steps that only decode: polling would delay their tokens.
        if terms[1] and self._must_wait and any(self.connectors.call(KVConnector.awaits)):
            expected = self.step_costs.predict(terms)
        margin = AWAIT_MARGIN_S + 2 * self._launch_s
        self._await_until = self._busy_since + min(AWAIT_SHARE * expected, expected - margin)

    def _awaits(self) -> bool:
        """Whether to poll connectors further before the next launch or the wait for a step.

        Always False if steps wake the core, since then it hears connectors at any time.
        """
        return bool(
            self._must_wait
            and self.in_flight
            and time.monotonic() < self._await_until
            and any(self.connectors.call(KVConnector.awaits))
            and not self.in_flight[0].ready()
        )

    def update(self) -> None:
        """Apply the oldest step's result; wait for it unless steps wake us or we still poll."""
        waits = self._must_wait and not self._awaits()
        if self.in_flight and (waits or self.in_flight[0].ready()):
            result, step_s = self._take()
            # First the requests of peers during the step: they may want blocks that it computed.
            self._hear()
            self._apply(result, step_s)
            if self.in_flight:
                self._expect()

    def _take(self) -> tuple[StepResult, float]:
        """Wait for the oldest step; returns its result and the seconds that it took."""
        result = self.in_flight.popleft().result()
        self.times.lap("wait")
        began, self._busy_since = self._busy_since, time.monotonic()
        self.scheduler.result_at, step_s = self._busy_since, self._busy_since - began
        self.step_seconds += step_s
        terms = self._terms.popleft()
        self.step_costs.observe(terms, step_s)
        self.scheduler.chunk_limit.observe(terms, step_s)
        return result, step_s

    def _apply(self, result: StepResult, step_s: float) -> None:
        """Apply a step's result, and send the outputs."""
        outputs = self.scheduler.update(result)
        self.times.lap("update")
        self.send(outputs)
        self.times.lap("send")
        self.times.over(result, outputs, step_s)
        self._applied = True

    def patience(self) -> float:
        """Seconds that the core may sleep if no descriptor wakes it."""
        if self._applied or self.connectors.raised:
            return 0.0
        if self.in_flight and self._must_wait:
            return AWAIT_LOOK_S if self._awaits() else 0.0
        heard = self.connectors.call(KVConnector.next_deadline)
        heard += [self.scheduler.next_deadline(), *self.connectors.failing.values()]
        deadlines = [deadline for deadline in heard if deadline is not None]
        wait = min(deadlines, default=math.inf) - time.monotonic()
        return min(max(wait, 0.0), 0.02 if self._stop_at < math.inf else IDLE_WAIT_S)

    def close(self) -> None:
        """Close the connectors, then the ranks."""
        self.connectors.call(KVConnector.close)
        self.executor.close()

    # --- messages ---

    def add(self, request: messages.AddRequest) -> None:
        """Add a request, or answer why it is rejected."""
        try:
            if self.draining:
                raise RequestError(
                    "This node is draining; retry elsewhere.", status=503, code="draining"
                )
            self.scheduler.add(request)
        except RequestError as error:
            self.mailbox.send(messages.Rejected.of(request.request_id, error))
        else:
            if request.items and not self.scheduler.is_cached(request.request_id):
                self.executor.expect(request)

    def fail_message(self, message: messages.ToCore, reason: str) -> None:
        """End and answer what a failed message has begun."""
        if isinstance(message, messages.Command):
            self.mailbox.send(
                messages.Reply(command_id=message.command_id, error=clip_text(reason))
            )
        elif isinstance(message, messages.AddRequest | messages.AbortRequest):
            outputs = self.scheduler.abort(message.request_id, reason)
            self.send(outputs)
            if isinstance(message, messages.AddRequest) and not outputs:
                error = RequestError(reason, status=500, code="internal_error")
                self.mailbox.send(messages.Rejected.of(message.request_id, error))

    def abort(self, message: messages.AbortRequest) -> None:
        """Abort a request."""
        self.send(self.scheduler.abort(message.request_id))

    def command(self, command: messages.Command) -> None:
        """Carry out a command and reply."""
        actions: dict[str, Callable[[], Any]] = {
            "state": self.state,
            "steps": self.times.dump,
            "metrics": lambda: self.report(force=True),
            "reset_prefix_cache": self.reset_prefix_cache,
            "reset_store": self.reset_store,
            "drain": self.drain,
            "members": lambda: self.set_members(command.argument or ()),
            "start_profile": self.profiler.start,
            "stop_profile": self.profiler.stop,
        }
        number = command.command_id
        try:
            if command.name not in actions:
                known = sorted(actions)
                raise RequestError(f"unknown command {command.name!r}; known: {known}")
            result = actions[command.name]()
        except (TimeoutError, RequestError) as error:  # a stuck thread, or a refusal
            self.mailbox.send(messages.Reply(command_id=number, error=clip_text(str(error))))
        else:
            if isinstance(result, Future):  # `poll` replies
                self._replies.append((number, result))
            else:
                self.mailbox.send(messages.Reply(command_id=number, result=result))

    def set_members(self, addresses: Sequence[str]) -> None:
        """Pass on the control addresses that the router vouches for."""
        self.connectors.call(KVConnector.set_members, addresses)

    def reset_prefix_cache(self) -> int:
        """Clear the prefix cache and encoder cache; returns how many blocks were cached."""
        count = self.scheduler.blocks.pool.reset_cache()
        return count + sum(self.connectors.call(KVConnector.reset_prefix_cache))

    def reset_store(self) -> int | Future[int]:
        """Delete the engine's objects in its store; returns how many, or a future of it."""
        asked = self.connectors.call(KVConnector.reset_store)
        return next((future for future in asked if future is not None), 0)

    def drain(self) -> bool:
        """Refuse new requests from now on; True once nothing is left to do."""
        self.draining = True
        return self.is_idle()

    def shut_down(self, message: messages.Shutdown) -> None:
        """Finish running requests within the grace period, then leave the loop."""
        self.draining = True
        self._stop_at = min(self._stop_at, time.monotonic() + message.grace_s)

    # --- what goes out ---

    def send(self, outputs: Iterable[messages.Output]) -> None:
        """Send outputs to their clients, after those that connectors produced earlier."""
        outgoing, self._unsent = [*self._unsent, *outputs], []
        if not outgoing:
            return
        for connector in self.connectors.having[KVConnector.emitted]:
            try:
                outgoing = connector.emitted(outgoing)
            except Exception as error:
                self.connectors.contain(connector, error)
        if outgoing:
            self.mailbox.send(messages.Outputs(outputs=tuple(outgoing)))

    def report(self, force: bool = False) -> None:
        """Send the metrics if they are due, or if `force`."""
        now = time.monotonic()
        if force or now >= self._metrics_at:
            self._metrics_at = now + METRICS_PERIOD_S
            self.mailbox.send(self.metrics())

    def metrics(self) -> messages.Metrics:
        """All counters, gauges and histograms now."""
        timed = self.connectors.call(KVConnector.histograms)
        return messages.Metrics(
            counters=self.counters(),
            gauges=self.gauges(),
            histograms={name: found for part in timed for name, found in part.items()},
        )

    def counters(self) -> dict[str, float]:
        """Monotonic totals by Prometheus name."""
        own = {
            "kvbaton_steps_total": float(self.steps),
            "kvbaton_step_tokens_total": float(self.step_tokens),
            "kvbaton_step_seconds_total": self.step_seconds,
            "kvbaton_messages_failed_total": float(self.refused),
        }
        for name, count in self.connectors.failures.items():
            own[f'kvbaton_connector_failures_total{{connector="{name}"}}'] = float(count)
        parts = [own, self.scheduler.counters(), self.executor.counters()]
        return _add_up(parts + self.connectors.call(KVConnector.counters))

    def gauges(self) -> dict[str, float]:
        """Current values by Prometheus name."""
        now = time.monotonic()
        if now >= self._audit_at or self.is_idle():
            self._audit_at, self._imbalance = now + AUDIT_PERIOD_S, float(self.imbalance())
        own = {"kvbaton_ledger_imbalance": self._imbalance}
        for term, cost in self.step_costs.costs().items():
            own[f'kvbaton_step_cost_seconds{{term="{term}"}}'] = cost
        parts = [own, self.scheduler.gauges(), *self.connectors.call(KVConnector.gauges)]
        return _add_up([*parts, {"kvbaton_unhealthy": float(len(self.connectors.failing))}])

    def imbalance(self) -> int:
        """Discrepancies between the pools' marks and the holders of blocks; always 0."""
        held = self.connectors.call(KVConnector.held_blocks)
        incoming = [spans for blocks in held for spans in blocks.incoming]
        outgoing = [spans for blocks in held for spans in blocks.outgoing]
        own = sum(audit(self.scheduler, incoming=incoming, outgoing=outgoing).values())
        return own + sum(self.connectors.call(KVConnector.imbalance))

    def state(self) -> dict[str, Any]:
        """Contents of the debugging dump."""
        return {
            "steps": self.steps,
            "in_flight": len(self.in_flight),
            "draining": self.draining,
            "scheduler": self.scheduler.state(),
            **{connector.name: connector.state() for connector in self.connectors},
        }


def _add_up(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Sum of the values of each name."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total

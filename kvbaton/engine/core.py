"""The engine core: one loop that receives, schedules, launches, updates and sends.

It runs in its own process (`engine/process.py`) and is the only one that touches scheduler, pool
and executor. Roles speak between steps (`engine/role.py`).
"""

from __future__ import annotations

import logging
import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvbaton.engine.audit import audit
from kvbaton.engine.executor import Executor
from kvbaton.engine.kv_event_publisher import KVEventPublisher
from kvbaton.engine.pending import Pending
from kvbaton.engine.role import Role
from kvbaton.engine.scheduler import Scheduler
from kvbaton.engine.step import StepResult
from kvbaton.engine.store_worker import StoreWorker
from kvbaton.errors import RequestError
from kvbaton.messages.engine import (
    AbortRequest,
    AddRequest,
    Command,
    FromCore,
    Metrics,
    Output,
    Outputs,
    Rejected,
    Reply,
    Shutdown,
    ToCore,
)
from kvbaton.types import clip_text

if TYPE_CHECKING:
    from kvbaton.engine.encoder.side import EncoderSide

logger = logging.getLogger(__name__)

METRICS_PERIOD_S = 2.0
"""The ledger's audit in it takes ten milliseconds on a large pool; a scrape asks for its own."""
IDLE_WAIT_S = 0.5


class Mailbox(Protocol):
    """What frontends say to the core, and the core to them."""

    def receive(self, timeout: float, wake_fd: int) -> Iterable[ToCore]:
        """Messages that have arrived; waits up to `timeout` seconds for one or for `wake_fd`."""
        ...

    def send(self, message: FromCore) -> None:
        """Send to whom it concerns."""
        ...


class EngineCore:
    """Runs requests until told to shut down.

    Args:
        executor: the ranks.
        scheduler: decides what they compute.
        role: what the node does with KV beyond computing it.
        mailbox: where requests come from and outputs go to.
        depth: steps in flight; 2 overlaps scheduling with a device's work.
        store: carries out what the scheduler's stash decides.
        kv_events: tells indexers what the prefix cache holds.
        encoder: computes and receives the encoder outputs of prompts with items.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        role: Role,
        mailbox: Mailbox,
        *,
        depth: int = 1,
        store: StoreWorker | None = None,
        kv_events: KVEventPublisher | None = None,
        encoder: EncoderSide | None = None,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.role = role
        self.mailbox = mailbox
        self.depth = depth
        self.store = store
        self.kv_events = kv_events
        self.encoder = encoder
        self._waker = select.epoll()
        for part in (role, executor, store, encoder):
            if part is not None and part.wake_fd is not None:
                self._waker.register(part.wake_fd, select.EPOLLIN)
        self.in_flight: deque[Pending[StepResult]] = deque()
        self.draining = False
        self.steps = 0
        self.step_tokens = 0
        self.step_seconds = 0.0
        self._busy_since = 0.0
        self._applied = False  # a result since the last plan, so that there may be another one
        self._stop_at: float | None = None
        self._metrics_at = 0.0
        self.refused = 0
        self._handlers = {
            AddRequest: self.add,
            AbortRequest: self.abort,
            Command: self.command,
            Shutdown: self.shut_down,
        }

    @property
    def wake_fd(self) -> int:
        """Readable when `listen` or `update` has something to do."""
        return self._waker.fileno()

    # --- the loop ---

    def run(self) -> None:
        """Serve until a `Shutdown` has been carried out."""
        while not self.finished():
            self.turn()
        self.report(force=True)

    def turn(self) -> None:
        """Go round the loop once."""
        self.receive()
        self.listen()
        self.launch()
        self.update()
        if self.kv_events is not None:
            self.kv_events.publish()
        self.report()

    def finished(self) -> bool:
        """Whether a shutdown was asked for and nothing keeps us."""
        if self._stop_at is None:
            return False
        return self.is_idle() or time.monotonic() >= self._stop_at

    def is_idle(self) -> bool:
        """Whether nothing is left to do, for clients, peers or the store."""
        stash = self.scheduler.stash
        works = self.in_flight or self.scheduler.has_work() or self.role.busy()
        works = works or (self.encoder is not None and not self.encoder.core.is_idle())
        return not works and not (stash is not None and stash.busy())

    def receive(self) -> None:
        """Take in what frontends sent; wait for it if there is nothing else to do."""
        for message in self.mailbox.receive(self.patience(), self.wake_fd):
            try:
                self._handlers[type(message)](message)  # type: ignore[operator]
            except Exception as error:  # whatever it was, it came from outside: the loop goes on
                self.refused += 1
                logger.exception("a message of a frontend could not be carried out")
                self.fail_message(message, f"internal error: {type(error).__name__}: {error}")

    def listen(self) -> None:
        """Let the role speak, and end what has waited too long."""
        self.send(self.role.poll())
        ended = self.ask_store() + self.turn_encoder()
        ended += self.scheduler.expire(time.monotonic())
        for output in ended:
            self.role.ended(output.request_id)
        self.send(ended)

    def ask_store(self) -> list[Output]:
        """Take the store's answers, and give it what the scheduler wants of it."""
        stash, outputs = self.scheduler.stash, list[Output]()
        if stash is not None and self.store is not None:
            for answer in self.store.take():
                outputs += stash.answer(answer)
            self.store.submit(stash.take_orders())
        return outputs

    def turn_encoder(self) -> list[Output]:
        """Let the encoder work; returns what ended because an item can't be had."""
        if self.encoder is None or self.scheduler.items is None:
            return []
        self.encoder.turn(self.scheduler.items)
        return self.scheduler.end_failed()

    def launch(self) -> None:
        """Start the next step, if there is one and room for it."""
        self._applied = False
        while len(self.in_flight) < self.depth:
            plan = self.scheduler.plan()
            self.role.begin()
            if self.store is not None and self.scheduler.stash is not None:
                self.store.submit(self.scheduler.stash.take_orders())
            if plan is None:
                return
            self.steps += 1
            self.step_tokens += plan.num_tokens
            if not self.in_flight:
                self._busy_since = time.monotonic()
            self.in_flight.append(self.executor.launch(plan))

    def update(self) -> None:
        """Apply what the oldest step sampled; wait for it unless it wakes us."""
        if self.in_flight and (self.executor.wake_fd is None or self.in_flight[0].ready()):
            result = self.in_flight.popleft().result()
            since, self._busy_since = self._busy_since, time.monotonic()
            self.step_seconds += self._busy_since - since
            # What peers asked for during the step comes first: it may want what the step computed.
            self.listen()
            self.send(self.scheduler.update(result))
            self._applied = True

    def patience(self) -> float:
        """Seconds until there is something to do that nothing wakes us for."""
        if self._applied or (self.in_flight and self.executor.wake_fd is None):
            return 0.0
        deadline = self.scheduler.next_deadline()
        wait = IDLE_WAIT_S if deadline is None else deadline - time.monotonic()
        if self.encoder is not None and self.scheduler.items is not None:
            wait = min(wait, self.encoder.patience(self.scheduler.items))
        return min(max(wait, 0.0), 0.02 if self._stop_at is not None else IDLE_WAIT_S)

    def close(self) -> None:
        """Stop all that moves blocks, then the ranks."""
        self.role.close()
        if self.store is not None:
            self.store.close()
        if self.kv_events is not None:
            self.kv_events.close()
        self.executor.close()
        if self.encoder is not None:
            self.encoder.core.close()

    # --- messages ---

    def add(self, request: AddRequest) -> None:
        """Take a request, or say why not."""
        try:
            if self.draining:
                raise RequestError(
                    "This node is draining; retry elsewhere.", status=503, code="draining"
                )
            accepted = self.role.accept(request)
            self.scheduler.add(accepted)
        except RequestError as error:
            self.mailbox.send(Rejected.of(request.request_id, error))
        else:
            self.role.added(accepted)
            if accepted.items and not self.scheduler.is_cached(accepted.request_id):
                self.executor.expect(accepted)

    def fail_message(self, message: ToCore, reason: str) -> None:
        """End what a message that could not be carried out has begun, and say so."""
        if isinstance(message, Command):
            self.mailbox.send(Reply(command_id=message.command_id, error=clip_text(reason)))
        elif isinstance(message, AddRequest | AbortRequest):
            self.role.ended(message.request_id)
            outputs = self.scheduler.abort(message.request_id, reason)
            self.send(outputs)
            if isinstance(message, AddRequest) and not outputs:
                error = RequestError(reason, status=500, code="internal_error")
                self.mailbox.send(Rejected.of(message.request_id, error))

    def abort(self, message: AbortRequest) -> None:
        """Stop a request."""
        outputs = self.scheduler.abort(message.request_id)
        if outputs:
            self.role.ended(message.request_id)
        self.send(outputs)

    def command(self, command: Command) -> None:
        """Answer a question."""
        actions: dict[str, Callable[[], Any]] = {
            "state": self.state,
            "metrics": lambda: self.report(force=True),
            "reset_prefix_cache": self.reset_prefix_cache,
            "drain": self.drain,
            "members": lambda: self.set_members(command.argument or ()),
        }
        if command.name in actions:
            reply = self._answer(command.command_id, actions[command.name])
        else:
            text = f"unknown command {command.name!r}; known: {sorted(actions)}"
            reply = Reply(command_id=command.command_id, error=clip_text(text))
        self.mailbox.send(reply)

    @staticmethod
    def _answer(command_id: int, action: Callable[[], Any]) -> Reply:
        try:
            return Reply(command_id=command_id, result=action())
        except TimeoutError as error:  # who asks about a thread that is stuck must not end us
            return Reply(command_id=command_id, error=clip_text(str(error)))

    def set_members(self, addresses: Sequence[str]) -> None:
        """Control addresses that the router vouches for."""
        self.role.set_members(addresses)
        if self.encoder is not None:
            self.encoder.core.set_members(addresses)

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes and encoder outputs; returns how many blocks held any."""
        count = self.scheduler.reset_prefix_cache()
        if self.encoder is not None:
            count += self.encoder.core.reset_prefix_cache()
        if self.kv_events is not None:
            self.kv_events.log.cleared()
        return count

    def drain(self) -> bool:
        """Refuse new requests from now on; True once nothing is left to do."""
        self.draining = True
        return self.is_idle()

    def shut_down(self, message: Shutdown) -> None:
        """Finish what runs within the grace given, then leave the loop."""
        self.draining = True
        self._stop_at = time.monotonic() + message.grace_s

    # --- what goes out ---

    def send(self, outputs: Iterable[Output]) -> None:
        """Send outputs to their clients."""
        outgoing = self.role.emitted(list(outputs))
        if outgoing:
            self.mailbox.send(Outputs(outputs=tuple(outgoing)))

    def report(self, force: bool = False) -> None:
        """Send the metrics, now and then."""
        now = time.monotonic()
        if force or now >= self._metrics_at:
            self._metrics_at = now + METRICS_PERIOD_S
            self.mailbox.send(self.metrics())

    def metrics(self) -> Metrics:
        """All counters and gauges now."""
        return Metrics(counters=self.counters(), gauges=self.gauges())

    def counters(self) -> dict[str, float]:
        """Monotonic totals by Prometheus name."""
        counters = {
            "kvbaton_steps_total": float(self.steps),
            "kvbaton_step_tokens_total": float(self.step_tokens),
            "kvbaton_step_seconds_total": self.step_seconds,
            "kvbaton_messages_failed_total": float(self.refused),
            **self.scheduler.counters(),
            **self.executor.counters(),
            **self.role.counters(),
        }
        if self.kv_events is not None:
            counters |= self.kv_events.counters()
        if self.encoder is not None:
            for name, value in self.encoder.counters().items():
                counters[name] = counters.get(name, 0.0) + value
        return counters

    def gauges(self) -> dict[str, float]:
        """Values now by Prometheus name."""
        gauges = {**self.scheduler.gauges(), **self.role.gauges()}
        if self.store is not None:
            gauges |= self.store.gauges()
        gauges["kvbaton_ledger_imbalance"] = float(self.imbalance())
        if self.encoder is not None:
            gauges |= self.encoder.gauges()
        return gauges

    def imbalance(self) -> int:
        """Discrepancies between the pools' marks and who says to hold blocks; always 0."""
        incoming, outgoing = self.role.claims()
        if self.scheduler.stash is not None:
            written, read = self.scheduler.stash.claims()
            incoming, outgoing = incoming + written, outgoing + read
        own = sum(audit(self.scheduler, incoming=incoming, outgoing=outgoing).values())
        return own + (0 if self.encoder is None else self.encoder.core.imbalance())

    def state(self) -> dict[str, Any]:
        """The debugging dump."""
        return {
            "steps": self.steps,
            "in_flight": len(self.in_flight),
            "draining": self.draining,
            "scheduler": self.scheduler.state(),
            "role": self.role.state(),
            "store": None if self.store is None else self.store.state(),
            "kv_events": None if self.kv_events is None else self.kv_events.state(),
            "encoder": None if self.encoder is None else self.encoder.state(),
        }

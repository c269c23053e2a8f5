"""The transfer thread, which drives the control channel, the transports and the state machines.

It does not depend on engine steps: it wakes for control messages, events from the engine and
timers, and several times a millisecond while bytes are in flight. All decisions are made by the
machines in `connectors.protocol`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec
import zmq

from kvbaton.connectors.channel import ControlChannel
from kvbaton.connectors.protocol import events
from kvbaton.connectors.thread_stack import stack_of
from kvbaton.connectors.transfer.source_worker import SourceWorker
from kvbaton.connectors.transfer.target_worker import TargetWorker
from kvbaton.connectors.transfer.worker import MAX_LOGGED_ERRORS
from kvbaton.errors import error_text
from kvbaton.messages import UNREADABLE, control
from kvbaton.types import MAX_MESSAGE_BYTES, clip_text

logger = logging.getLogger(__name__)

BUSY_PAUSE_S = 0.00002
"""Seconds between polls of the transports while bytes are in flight; Linux adds 0.05 ms."""

QUICK_POLLS = 80
"""Polls without an event after which the pause grows to `QUIET_PAUSE_MS`."""

QUIET_PAUSE_MS = 2
"""Longer pause in ms. Control messages and the engine end it; only transports have to wait."""

STOP_S = 0.5
"""Seconds that `close` waits for writes in flight."""

ANSWER_S = 5.0
"""Default time-out of `TransferThread.inspect` in seconds."""

JOIN_S = 3.0
"""Seconds that `close` waits for the thread to end."""

MAX_FAILED_TURNS = 100
"""Failed turns in a row after which the thread ends and the node becomes unhealthy."""

ASK_S = 2.0
"""Minimum seconds between two checks that count for `MAX_MISSED`."""
MAX_MISSED = 15
"""Checks in a row without a new turn after which the thread counts as hanging."""

FOR_SOURCE = (control.Hello, control.Reserve, control.Ack, control.NotNeeded, control.Cancel)
"""Messages for a source; all others are for a target."""


class TransferThread:
    """Runs the machines of one side or both in a thread of its own.

    Args:
        channel: Control channel; owned by this object from now on.
        sender: Carries out the source's actions, if this node prefills for others.
        receiver: Carries out the target's actions, if this node receives KV.
    """

    def __init__(
        self,
        channel: ControlChannel,
        *,
        sender: SourceWorker | None = None,
        receiver: TargetWorker | None = None,
    ) -> None:
        self.channel = channel
        self.sender = sender
        self.receiver = receiver
        self.junk = 0
        self._own_errors = 0
        self.failure: str | None = None
        self.workers = [worker for worker in (sender, receiver) if worker is not None]
        self._busy = False
        self._idle_polls = 0
        self._turn = self._turn_met = self._missed = 0
        self._asked_at = 0.0
        self._inbox: deque[events.Event | Callable[[], None]] = deque()
        self._inbox_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = threading.Event()
        self._ended = False
        channel.poller.register(self._inbox_fd, zmq.POLLIN)
        for worker in self.workers:
            worker.channel = channel
        self._thread = threading.Thread(target=self._run, name="kvbaton-transfers", daemon=True)

    @property
    def errors(self) -> int:
        """Number of exceptions that ended an event, an action or a turn."""
        return self._own_errors + sum(int(worker.counters["errors"]) for worker in self.workers)

    # --- called by the engine's thread ---

    def is_unhealthy(self) -> bool:
        """Whether the thread has ended by an exception, or hangs; to be called every few seconds.

        The thread hangs if `MAX_MISSED` calls in a row, at least `ASK_S` apart, see the same turn.
        Calls are counted, not seconds, so that a process that was stopped as a whole does not count
        as hanging.
        """
        now, turn = time.monotonic(), self._turn
        if turn != self._turn_met:
            self._turn_met, self._missed = turn, 0
        elif self._thread.is_alive() and now >= self._asked_at + ASK_S:
            self._asked_at = now
            self._missed += 1
            if self._missed == MAX_MISSED:
                where = "".join(stack_of(self._thread))
                logger.error("the transfer thread hangs in\n%s", where)
        return self._missed >= MAX_MISSED or self.failure is not None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, *submitted: events.Event) -> None:
        """Queue events for the machines; returns at once."""
        self._inbox.extend(submitted)
        os.eventfd_write(self._inbox_fd, 1)

    def inspect(self, question: Callable[[], Any], timeout: float | None = None) -> Any:
        """Run a function in the transfer thread, or here if that does not run; its result.

        Args:
            question: The function.
            timeout: Seconds to wait; None means `ANSWER_S`.

        Raises:
            TimeoutError: The thread did not answer in time.
            Exception: Whatever the function raised.
        """
        if not self._thread.is_alive():
            return question()
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                answer.set_result(question())
            except BaseException as error:
                answer.set_exception(error)
                if not isinstance(error, Exception):
                    raise

        self._inbox.append(ask)
        os.eventfd_write(self._inbox_fd, 1)
        if self._ended:
            self._answer_left_over()
        try:
            return answer.result(timeout or ANSWER_S)
        except TimeoutError:
            raise TimeoutError("the transfer thread did not answer") from None

    def close(self) -> None:
        """Stop the thread and close transports and channel. Idempotent.

        If the thread hangs, in a plug-in for example, they stay open, as it may still use them.
        """
        if self._stopping.is_set():
            return
        if (sender := self.sender) is not None:
            # Fail live attempts, and report what has drained within `STOP_S`.
            limit = time.monotonic() + STOP_S
            try:
                self.inspect(lambda: sender.handle(events.Stop(), time.monotonic()))
                while self._thread.is_alive() and time.monotonic() < limit:
                    if not self.inspect(lambda: bool(sender.source.live)):
                        break
                    time.sleep(BUSY_PAUSE_S)
            except Exception:
                logger.exception("what is left over could not be ended in order")
        self._stopping.set()
        os.eventfd_write(self._inbox_fd, 1)
        if self._thread.is_alive():
            self._thread.join(JOIN_S)
            if self._thread.is_alive():
                logger.error("the transfer thread hangs: what it uses is left behind")
                return
        for worker in self.workers:
            worker.close()
        self.channel.poller.unregister(self._inbox_fd)
        self.channel.close()
        os.close(self._inbox_fd)

    # --- the thread ---

    def _run(self) -> None:
        try:
            self._turns()
        finally:
            self._ended = True
            self._answer_left_over()

    def _answer_left_over(self) -> None:
        """Answer the questions that the ended thread has left; else their callers would wait."""
        while self._inbox:
            with suppress(IndexError):  # the other thread was faster
                item = self._inbox.popleft()
                if callable(item):
                    item()

    def _turns(self) -> None:
        failed_in_a_row = 0
        while not self._stopping.is_set():
            self._turn += 1
            try:
                if not self._busy:
                    pause_until = (now := time.monotonic()) + 1.0
                    for worker in self.workers:
                        if (deadline := worker.settle()) is not None:
                            pause_until = min(pause_until, deadline)
                    pause_ms = max(0, int((pause_until - now) * 1000) + 1)
                elif self._idle_polls < QUICK_POLLS:
                    self._idle_polls += 1
                    time.sleep(BUSY_PAUSE_S)
                    pause_ms = 0
                else:
                    pause_ms = QUIET_PAUSE_MS
                readable = dict(self.channel.poller.poll(pause_ms))
                told = readable.pop(self._inbox_fd, 0) != 0
                self.turn(told, bool(readable))
                failed_in_a_row = 0
            except BaseException as error:
                # Workers catch exceptions of events and actions: this one has another cause.
                logger.exception("a turn of the transfer thread failed")
                self._own_errors += 1
                failed_in_a_row += 1
                if failed_in_a_row >= MAX_FAILED_TURNS or not isinstance(error, Exception):
                    # A node without its transfer thread is not healthy: wake the engine.
                    self.failure = error_text(error)
                    for worker in self.workers:
                        os.eventfd_write(worker.outbox_fd, 1)
                    return
                time.sleep(BUSY_PAUSE_S * failed_in_a_row)

    def turn(self, told: bool = True, heard: bool = True) -> None:
        """Handle submitted events and received messages, and poll the workers; never waits.

        Args:
            told: The engine may have submitted events.
            heard: Peers may have sent messages.
        """
        now = time.monotonic()
        if told:
            with suppress(BlockingIOError):  # taken in already
                os.eventfd_read(self._inbox_fd)
                self._idle_polls = 0
            while self._inbox:
                item = self._inbox.popleft()
                if callable(item):
                    item()
                elif isinstance(item, events.TargetEvent):
                    assert self.receiver is not None, "only a target's connector submits this"
                    self.receiver.handle(item, now)
                else:
                    assert self.sender is not None, "only a source's connector submits this"
                    self.sender.submit(item, now)
        if heard:
            self._take_messages(now)
        self._busy = False
        for worker in self.workers:
            self._busy |= worker.poll(now)

    def _take_messages(self, now: float) -> None:
        for link, data in self.channel.receive():
            self._idle_polls = 0
            try:
                if len(data) > MAX_MESSAGE_BYTES:
                    raise msgspec.ValidationError("message too long")
                message = control.decode_control(data)
            except UNREADABLE as error:
                self.junk += 1
                if self.junk <= MAX_LOGGED_ERRORS:
                    why = clip_text(str(error))  # the error may quote the whole message
                    logger.warning("dropped a control message that can't be read: %s", why)
                refusal = control.refuse_unreadable(data, error)
                if refusal is not None and self.sender is not None:
                    self.channel.send(link, control.encode_control(refusal))
                continue
            worker = self.sender if isinstance(message, FOR_SOURCE) else self.receiver
            if worker is None:
                self.junk += 1
            else:
                worker.handle(events.Received(link, message), now)

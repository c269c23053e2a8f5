"""The transfer thread: the shell that drives channel, transports and state machines.

Nothing here is clocked by engine steps: the thread wakes for control messages, for what the engine
submits, for timers, and, while bytes are on their way, several times a millisecond. It decides
nothing; the machines in `connectors.protocol` do.
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
"""Pause between two looks at the transport while bytes are on their way; Linux adds 0.05 ms."""

QUICK_LOOKS = 80
"""After so many without news the pause is longer; for a prompt of seconds that is most of them."""

QUIET_PAUSE_MS = 2
"""Of a pause that control messages and the engine end; only a transport's news may wait for it."""

STOP_S = 0.5
"""Time for the writes that are in flight when the thread is closed."""

ANSWER_S = 5.0
"""Time for the thread to answer a question."""

JOIN_S = 3.0
"""Time for it to end."""

MAX_FAILED_TURNS = 100
"""After so many in a row the thread gives up, and the node turns unhealthy."""

ASK_S = 2.0
MAX_MISSED = 15
"""See `TransferThread.is_unhealthy`."""

FOR_SOURCE = (control.Hello, control.Reserve, control.Ack, control.NotNeeded, control.Cancel)


class TransferThread:
    """Runs one side's machine, or both, in a thread of its own.

    Args:
        channel: control channel; the transfer thread owns it from now on.
        sender: carries out the source's actions, if this node prefills for others.
        receiver: carries out the target's actions, if this node receives.
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
        self._looks = 0
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
        """Exceptions that cost an event, an action or a turn."""
        return self._own_errors + sum(int(worker.counters["errors"]) for worker in self.workers)

    # --- called by the engine's thread ---

    def is_unhealthy(self) -> bool:
        """Whether the thread ended by an exception, or hangs; to be asked every few seconds.

        It hangs if `MAX_MISSED` who asked this, `ASK_S` apart, met the same turn; so a process that
        was stopped as a whole is not taken for one that hangs.
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
        """Hand something to the machines; returns at once."""
        self._inbox.extend(submitted)
        os.eventfd_write(self._inbox_fd, 1)

    def inspect(self, question: Callable[[], Any], timeout: float | None = None) -> Any:
        """Run a function in the transfer thread, or here if that does not run; its result.

        Args:
            question: the function.
            timeout: seconds; None is `ANSWER_S`.

        Raises:
            TimeoutError: the thread did not answer in time.
            Exception: what the function raised.
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
        """Stop the thread and give transports and channel back. Idempotent.

        What a thread that hangs in a plug-in may go on to use stays open.
        """
        if self._stopping.is_set():
            return
        if (sender := self.sender) is not None:
            # Fail what is left over, and say what has drained, as far as that takes little time.
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
        """Answer who asked a thread that ends, or has ended; else they would wait in vain."""
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
                elif self._looks < QUICK_LOOKS:
                    self._looks += 1
                    time.sleep(BUSY_PAUSE_S)
                    pause_ms = 0
                else:
                    pause_ms = QUIET_PAUSE_MS
                readable = dict(self.channel.poller.poll(pause_ms))
                told = readable.pop(self._inbox_fd, 0) != 0
                self.turn(told, bool(readable))
                failed_in_a_row = 0
            except BaseException as error:
                # A worker has its own boundary around each event: what comes here is no event's.
                logger.exception("a turn of the transfer thread failed")
                self._own_errors += 1
                failed_in_a_row += 1
                if failed_in_a_row >= MAX_FAILED_TURNS or not isinstance(error, Exception):
                    # Without its transfer thread a node must not pretend to be healthy.
                    self.failure = error_text(error)
                    for worker in self.workers:
                        os.eventfd_write(worker.outbox_fd, 1)
                    return
                time.sleep(BUSY_PAUSE_S * failed_in_a_row)

    def turn(self, told: bool = True, heard: bool = True) -> None:
        """Take in what has come, and look at all that moves; never waits.

        Args:
            told: the engine may have submitted something.
            heard: peers may have sent something.
        """
        now = time.monotonic()
        if told:
            with suppress(BlockingIOError):  # taken in already
                os.eventfd_read(self._inbox_fd)
                self._looks = 0
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
            self._looks = 0
            try:
                if len(data) > MAX_MESSAGE_BYTES:
                    raise msgspec.ValidationError("message too long")
                message = control.decode_control(data)
            except UNREADABLE as error:
                self.junk += 1
                if self.junk <= MAX_LOGGED_ERRORS:
                    why = clip_text(str(error))  # which may quote all of it
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

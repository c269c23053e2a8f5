"""One engine core in a thread of the test's process, under the test's control.

Scheduler, executor, transfer threads, control channels and protocol are real. Only the sockets to
the HTTP process are replaced, by queues.
"""

from __future__ import annotations

import itertools
import os
import select
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvbaton.connectors.transfer.thread import TransferThread
from kvbaton.connectors.transports.memory import PROCESS_HUB
from kvbaton.decode.target_connector import TargetConnector
from kvbaton.engine import executor
from kvbaton.engine.build import ConnectorFactory, build_engine
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.worker import CpuWorker
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
    SamplingParams,
    ToCore,
)
from kvbaton.prefill.source_connector import SourceConnector
from kvbaton.types import NodeId
from tests.support.waiting import PATIENCE_S, until

HUB = PROCESS_HUB

ENGINE: Mapping[str, Any] = {
    "device": "cpu",
    "block_size": 4,
    "num_blocks": 129,
    "max_model_len": 256,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 64,
}


def greedy(params: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters: greedy by default, ignoring end tokens."""
    defaults = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "seed": 0}
    return SamplingParams(**(defaults | dict(params)))


class Killed(BaseException):
    """Unwinds the loop of a core that is being killed."""


class QueueMailbox:
    """`engine.core.Mailbox` without sockets.

    Args:
        deliver: Receives the core's messages, in the core's thread.
        each_loop: Called by the core's thread once per turn of its loop.
    """

    def __init__(self, deliver: Callable[[FromCore], None], each_loop: Callable[[], None]) -> None:
        self._deliver = deliver
        self._each_loop = each_loop
        self._inbox: deque[tuple[ToCore, ...]] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.killed = False

    def post(self, *messages: ToCore) -> None:
        """Post messages; the core receives them in one turn of its loop."""
        self._inbox.append(messages)
        os.eventfd_write(self._fd, 1)

    def kill(self) -> None:
        """Kill the core at its next `receive`."""
        self.killed = True
        os.eventfd_write(self._fd, 1)

    def receive(self, timeout: float, wake_fd: int) -> list[ToCore]:
        """As `engine.core.Mailbox.receive`."""
        poller = select.poll()
        for fd in (self._fd, wake_fd):
            poller.register(fd, select.POLLIN)
        poller.poll(int(timeout * 1000))
        if self.killed:
            raise Killed
        self._each_loop()
        messages: list[ToCore] = []
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        while self._inbox:
            messages += self._inbox.popleft()
        return messages

    def send(self, message: FromCore) -> None:
        """As `engine.core.Mailbox.send`."""
        self._deliver(message)

    def close(self) -> None:
        """Close the file descriptor."""
        os.close(self._fd)


@dataclass
class Call:
    """One request at one node, and its outputs."""

    node: Node
    request: AddRequest
    outputs: list[Output] = field(default_factory=list)
    rejected: Rejected | None = None

    @property
    def tokens(self) -> list[int]:
        """Tokens of choice 0 so far; checks that there are no gaps."""
        found: list[int] = []
        for output in [o for o in self.outputs if o.choice == 0 and o.token_ids]:
            assert output.index == len(found), f"token {len(found)} came as {output.index}"
            found += output.token_ids
        return found

    @property
    def finish_reason(self) -> str | None:
        """Reason of its end; None while it is running."""
        return next((o.finish_reason for o in list(self.outputs) if o.finish_reason), None)

    @property
    def error(self) -> str | None:
        """Error of the last output."""
        return next((o.error for o in list(self.outputs) if o.error), None)

    def over(self) -> bool:
        """Whether the request has ended."""
        ended = sum(o.finish_reason is not None for o in list(self.outputs))
        assert ended <= self.request.params.n, f"ended {ended} times: {self.outputs}"
        return self.rejected is not None or ended == self.request.params.n

    def wait_tokens(self, count: int) -> None:
        """Wait until `count` tokens have arrived."""
        until(lambda: len(self.tokens) >= count or self.over(), f"{count} tokens")
        assert len(self.tokens) >= count, f"ended early: {self.outputs[-1:]} {self.rejected}"

    def result(self, seconds: float = PATIENCE_S) -> list[int]:
        """Wait for the end and return the tokens."""
        until(self.over, f"the end of {self.request.request_id}", seconds)
        assert self.rejected is None, self.rejected
        return self.tokens

    def abort(self) -> None:
        """Abort, as the HTTP process does when its client disconnects."""
        self.node.mailbox.post(AbortRequest(request_id=self.request.request_id))


class Hold:
    """Keeps one of the executor's threads busy, so that later work waits in its queue."""

    def __init__(self, pool: Executor) -> None:
        assert isinstance(pool, ThreadPoolExecutor)
        self._pool = pool
        self._gate = threading.Event()

    def __enter__(self) -> Hold:
        self._submit(self._gate).wait(PATIENCE_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self._gate.set()

    def _submit(self, gate: threading.Event) -> threading.Event:
        began = threading.Event()

        def hold() -> None:
            began.set()
            gate.wait(2 * PATIENCE_S)

        self._pool.submit(hold)
        return began

    def waited_for(self) -> bool:
        """Whether work is queued behind the hold: a core that waits for its step stands still."""
        return self._pool._work_queue.qsize() > 0

    def let_one_pass(self) -> None:
        """Wait for queued work, let one item run, and hold the next."""
        until(self.waited_for, "something to let pass")
        gate, self._gate = self._gate, threading.Event()
        began = self._submit(self._gate)
        gate.set()
        assert began.wait(PATIENCE_S), "what was let pass does not end"


class Node:
    """One engine core in its own thread.

    Attributes:
        imbalance: Largest imbalance of the ledger in any turn of the core's loop.
        failure: Exception that ended the core's thread, other than by `kill`.
    """

    def __init__(
        self, name: str, folder: Path, *factories: ConnectorFactory, **settings: Any
    ) -> None:
        config = EngineConfig(model=str(folder), **(dict(ENGINE) | settings))
        self.mailbox = QueueMailbox(self._deliver, self._each_loop)
        self.id = NodeId(name, os.urandom(16))
        self.imbalance = 0
        self.failure: BaseException | None = None
        self.calls: dict[str, Call] = {}
        self.metrics: Metrics | None = None
        self._replies: dict[int, Reply] = {}
        self._numbers = itertools.count()
        self._buried = False
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(executor.Executor, "try_steps", lambda self, limits: [])  # they take time
            self.core = build_engine(config, self.id, factories, self.mailbox).core
        self.scheduler = self.core.scheduler
        self._thread = threading.Thread(target=self._run, name=f"core-{name}")
        self._thread.start()

    @property
    def worker(self) -> CpuWorker:
        """The first rank."""
        worker = self.core.executor.workers[0]
        assert isinstance(worker, CpuWorker)
        return worker

    @property
    def transfers(self) -> TransferThread:
        """The transfer thread."""
        (found,) = (
            connector.transfers
            for connector in self.core.connectors
            if isinstance(connector, SourceConnector | TargetConnector)
        )
        return found

    # --- the core's thread ---

    def _run(self) -> None:
        try:
            self.core.run()
        except Killed:
            pass
        except BaseException as error:
            self.failure = error

    def _each_loop(self) -> None:
        self.imbalance = max(self.imbalance, self.core.imbalance())

    def _deliver(self, message: FromCore) -> None:
        match message:
            case Outputs():
                for output in message.outputs:
                    self.calls[output.request_id].outputs.append(output)
            case Rejected():
                self.calls[message.request_id].rejected = message
            case Metrics():
                self.metrics = message
            case Reply():
                self._replies[message.command_id] = message

    # --- requests and questions ---

    def add(self, request: AddRequest, *then: ToCore) -> Call:
        """Send a request, and messages that reach the core together with it."""
        call = self.calls[request.request_id] = Call(self, request)
        self.mailbox.post(request, *then)
        return call

    def add_together(self, requests: Sequence[AddRequest]) -> list[Call]:
        """Send requests that reach the core together, before it launches a step."""
        calls = [Call(self, request) for request in requests]
        self.calls |= {call.request.request_id: call for call in calls}
        self.mailbox.post(*requests)
        return calls

    def generate(self, prompt: Sequence[int], **params: Any) -> Call:
        """Send a request that this node serves alone."""
        name = f"alone-{next(self._numbers)}"
        return self.add(
            AddRequest(request_id=name, token_ids=array("I", prompt), params=greedy(params))
        )

    def ask(self, name: str, argument: Any = None) -> Any:
        """Send the core a command; its answer."""
        number = next(self._numbers)
        self.mailbox.post(Command(command_id=number, name=name, argument=argument))
        until(lambda: number in self._replies or self.failure is not None, f"answer to {name}")
        assert self.failure is None, self.failure
        reply = self._replies.pop(number)
        assert reply.error is None, reply.error
        return reply.result

    def leases(self) -> int:
        """Number of reservations of this source, from its transfer thread."""
        found: int = self._transfer_state()["leases"]
        return found

    def sessions(self) -> list[dict[str, Any]]:
        """Sessions with other nodes, from its transfer thread."""
        found: list[dict[str, Any]] = self._transfer_state()["sessions"]
        return found

    def _transfer_state(self) -> Any:
        (worker,) = self.transfers.workers
        return self.transfers.inspect(worker.state)["ledger"]

    def gauges(self) -> dict[str, float]:
        """Current gauges."""
        self.ask("metrics")
        assert self.metrics is not None
        return self.metrics.gauges

    def counters(self) -> dict[str, float]:
        """Current counters."""
        self.ask("metrics")
        assert self.metrics is not None
        return self.metrics.counters

    def leftovers(self) -> dict[str, float]:
        """Non-zero gauges that are 0 at rest: sequences, owned blocks, quarantines, leases."""
        idle = tuple(f'owner="{owner}"}}' for owner in ("free", "cached", "null"))
        watched = ("kvbaton_sequences", "kvbaton_blocks{", "kvbaton_transfers_q", "kvbaton_leases")
        return {
            name: value
            for name, value in self.gauges().items()
            if value and name.startswith(watched) and not name.endswith(idle)
        }

    # --- force ---

    @contextmanager
    def held_step(self) -> Iterator[Hold]:
        """Hold the step that the core launches next until the end of the block."""
        with Hold(self.core.executor.group.threads[0]) as hold:
            yield hold

    @contextmanager
    def held_digests(self) -> Iterator[Hold]:
        """Hold digests of received blocks until the end of the block."""
        with Hold(self.worker.digests) as hold:
            yield hold

    @contextmanager
    def frozen_transfers(self) -> Iterator[None]:
        """Stop the transfer thread until the end of the block, as SIGSTOP would."""
        began, gate = threading.Event(), threading.Event()

        def freeze() -> None:
            began.set()
            gate.wait(2 * PATIENCE_S)

        thread = threading.Thread(target=self.transfers.inspect, args=(freeze, 61.0))
        thread.start()
        assert began.wait(PATIENCE_S), "the transfer thread is busy"
        try:
            yield
        finally:
            gate.set()
            thread.join()

    def strike(self) -> None:
        """End all its messages and writes, as SIGKILL would; `bury` it afterwards."""

        def die() -> None:
            raise Killed

        with suppress(TimeoutError, Killed):
            self.transfers.inspect(die)
        for worker in self.transfers.workers:
            for transport in worker.transports:
                HUB.leave(transport.name)
        self.mailbox.kill()

    def bury(self) -> None:
        """Release its resources in this process, once; waits for a held step."""
        if self._buried:
            return
        self._buried = True
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the core's thread does not end"
        self.core.close()
        self.mailbox.close()

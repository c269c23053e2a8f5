"""An engine core without a model behind the real sockets: every request gets a token per step."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvbaton.engine.frontends import EngineEndpoints, FrontendServer
from kvbaton.messages.engine import (
    AbortRequest,
    AddRequest,
    Command,
    Metrics,
    Output,
    Outputs,
    Ready,
    Rejected,
    Reply,
    Shutdown,
    ToCore,
)
from kvbaton.types import NodeId

READY = Ready(
    node=NodeId("scripted", bytes(16)),
    control_address=None,
    num_blocks=8,
    block_size=16,
    max_model_len=4096,
    eos_token_ids=(1,),
    vocab_size=256,
)


class ScriptedCore:
    """Core loop in a thread. Token i of a request is i; requests end after `max_tokens`.

    Args:
        endpoints: Endpoints to listen on.
        step_s: Initial pause between two steps in seconds.

    Attributes:
        live: Requests and their numbers of tokens so far, by the core's id.
        seen: All messages received.
        refuse: Called with a request; returns a reason to refuse it, or None.
        answer: Called with a request; returns its only outputs, sent in one message, or None.
        step_s: Pause between two steps in seconds.
        paused: While set, no step is made; messages are still read.
    """

    def __init__(self, endpoints: EngineEndpoints, *, step_s: float = 0.001) -> None:
        self.frontends = FrontendServer(endpoints)
        self.frontends.send(
            Ready(
                **{name: getattr(READY, name) for name in READY.__struct_fields__}
                | {"engine_address": self.frontends.address}
            )
        )
        self.live: dict[str, tuple[AddRequest, int]] = {}
        self.seen: list[ToCore] = []
        self.refuse: Callable[[AddRequest], str | None] = lambda request: None
        self.answer: Callable[[AddRequest], tuple[Output, ...]] = lambda request: ()
        self.paused = threading.Event()
        self.step_s = step_s
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="scripted core")
        self._thread.start()

    @property
    def address(self) -> str:
        """Address for remote frontends."""
        return self.frontends.address

    def counters(self) -> dict[str, float]:
        """Counters of the core."""
        return self.frontends.completed(Metrics(counters={}, gauges={})).counters

    def stop(self) -> None:
        """End the thread and close the sockets. Idempotent."""
        if not self._thread.is_alive():
            return
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(10.0)
        os.close(self._wake)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping:
            works = bool(self.live) and not self.paused.is_set()
            for message in self.frontends.receive(self.step_s if works else 0.2, self._wake):
                self.seen.append(message)
                self._handle(message)
            if not self.paused.is_set():
                self.step()
        self.frontends.close()

    def _handle(self, message: ToCore) -> None:
        match message:
            case AddRequest(request_id=request_id):
                reason = self.refuse(message)
                if reason is not None:
                    self.frontends.send(Rejected(request_id=request_id, message=reason))
                elif outputs := self.answer(message):
                    self.frontends.send(Outputs(outputs=outputs))
                else:
                    self.live[request_id] = message, 0
            case AbortRequest(request_id=request_id):
                if request_id in self.live:
                    request, done = self.live.pop(request_id)
                    self.frontends.send(
                        Outputs(
                            outputs=tuple(
                                Output(
                                    request_id=request_id,
                                    choice=choice,
                                    index=done,
                                    finish_reason="abort",
                                )
                                for choice in range(request.params.n)
                            )
                        )
                    )
            case Command(command_id=number, name="metrics"):
                self.frontends.send(Metrics(counters={}, gauges={}))
                self.frontends.send(Reply(command_id=number))
            case Command(command_id=number, name=name):
                self.frontends.send(Reply(command_id=number, result={"asked": name}))
            case Shutdown():
                self._stopping = True

    def step(self) -> None:
        """Make a token for every live request."""
        outputs = []
        for request_id, (request, done) in tuple(self.live.items()):
            last = done + 1 >= request.params.max_tokens
            for choice in range(request.params.n):
                outputs.append(
                    Output(
                        request_id=request_id,
                        choice=choice,
                        index=done,
                        token_ids=(done,),
                        finish_reason="length" if last else None,
                    )
                )
            self.live[request_id] = request, done + 1
            if last:
                del self.live[request_id]
        if outputs:
            self.frontends.send(Outputs(outputs=tuple(outputs)))


@contextmanager
def scripted_core(endpoints: EngineEndpoints, *, step_s: float = 0.001) -> Iterator[ScriptedCore]:
    """Run a core; it is stopped at the end."""
    core = ScriptedCore(endpoints, step_s=step_s)
    try:
        yield core
    finally:
        core.stop()

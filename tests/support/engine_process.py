"""One node of a matrix cell: a process with a whole engine, controlled by the test.

The process is forked from one that has already imported its modules. It runs all that a prefill or
decode node has behind HTTP: core, ranks, transfer thread, control channel, and a real transport.
Requests and answers are lines of JSON.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from kvbaton.connectors.transfer.config import HandoverConfig
from kvbaton.engine.build import ConnectorFactory
from kvbaton.messages.engine import AddRequest, Shutdown, decode_to_core, encode_to_core
from kvbaton.types import TransferTimers
from tests.support.engine_node import Node
from tests.support.fork_server import fork_server
from tests.support.forked_command import IMPORTS, quicken_ucx
from tests.support.waiting import promised, until

Role = Literal["prefill", "decode", "encode", "alone"]
ENGINE: dict[str, Any] = {
    "device": "cpu",
    "num_threads": 1,
    "num_blocks": 400,
    "max_model_len": 256,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 8,
}
"""Engine settings of every node: prompts above 32 tokens take several chunks."""


PATIENT = TransferTimers(progress_deadline=40.0, lease=60.0)
"""Timers of hand-overs. Sixteen rank pairs connect in turn: seconds on a busy machine."""


class NodeSpec(msgspec.Struct, frozen=True):
    """Specification of a node.

    Attributes:
        role: Role; ``alone`` takes no part in hand-overs.
        model: Folder of the model.
        transport: Transport for hand-overs.
        settings: Engine settings beyond `ENGINE`, as items, so that a spec is hashable.
    """

    role: Role
    model: str
    transport: str
    settings: tuple[tuple[str, Any], ...] = ()


class _Ask(msgspec.Struct):
    add: bytes | None = None
    result: str | None = None
    books: bool = False


class Books(msgspec.Struct):
    """Counters of a node, and the story of its latest hand-over.

    Attributes:
        counters: Monotonic totals.
        leftovers: Gauges that are 0 at rest.
        imbalance: Largest imbalance of the ledger so far.
        story: Events of the latest hand-over.
    """

    counters: dict[str, float]
    leftovers: dict[str, float]
    imbalance: int
    story: str


class _Answer(msgspec.Struct):
    tokens: list[int] = []
    error: str | None = None
    books: Books | None = None


class NodeProcess:
    """Handle of a node, for the test.

    Attributes:
        address: Control address for peers.
    """

    def __init__(self, spec: NodeSpec, log: Path) -> None:
        self.spec, self.log = spec, log
        ours, self._ask = os.pipe()
        answers, theirs = os.pipe()
        words = [msgspec.json.encode(spec).decode()]
        with log.open("ab") as file:
            streams = (ours, theirs, file.fileno())
            self._process = fork_server().start(__spec__.name, words, streams, IMPORTS)
        os.close(ours)
        os.close(theirs)
        self._answers: IO[bytes] = os.fdopen(answers, "rb")
        self._address: str | None = None

    @property
    def address(self) -> str:
        """P's control address; waits until it is up."""
        if self._address is None:
            self._address = self._read().decode().strip()
        return self._address

    def add(self, request: AddRequest) -> None:
        """Send a request."""
        self._send(_Ask(add=encode_to_core(request)))

    def result(self, request_id: str) -> list[int]:
        """Wait for a request's end; its tokens.

        Raises:
            AssertionError: The request failed.
        """
        answer = self._send(_Ask(result=request_id))
        assert answer.error is None, f"{self.spec}: {answer.error}"
        return answer.tokens

    def books(self) -> Books:
        """Wait until the node is at rest; its books."""
        books = self._send(_Ask(books=True)).books
        assert books is not None
        return books

    def close(self) -> None:
        """End the process."""
        os.close(self._ask)
        self._answers.close()
        self._process.wait()

    def _send(self, ask: _Ask) -> _Answer:
        assert self.address is not None
        os.write(self._ask, msgspec.json.encode(ask) + b"\n")
        return msgspec.json.decode(self._read(), type=_Answer)

    def _read(self) -> bytes:
        line = self._answers.readline()
        assert line, f"{self.spec} has ended:\n{self.log.read_text()[-4000:]}"
        return line


# --- in the process ---


def main(words: list[str]) -> None:
    """``python -m tests.support.engine_process SPEC``: serve until standard input ends."""
    spec = msgspec.json.decode(words[0], type=NodeSpec)
    quicken_ucx()
    # UCX warns on standard output when a peer is lost: answers have their own descriptor.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    settings = ENGINE | {"encoder_only": spec.role == "encode"} | dict(spec.settings)
    node = Node(spec.role, Path(spec.model), *_connectors(spec), **settings)
    answers.write((node.core.control_address or "none").encode() + b"\n")

    def books() -> Books:
        left: dict[str, float] = {}

        def at_rest() -> bool:
            nonlocal left
            left = node.leftovers()
            return not left

        try:
            until(at_rest, "rest", promised(5.0))
        except AssertionError:
            assert left
        return Books(node.counters(), left, node.imbalance, _story(node))

    for line in sys.stdin.buffer:
        ask, answer = msgspec.json.decode(line, type=_Ask), _Answer()
        try:
            if ask.add is not None:
                request = decode_to_core(ask.add)
                assert isinstance(request, AddRequest)
                node.add(request)
            elif ask.result is not None:
                call = node.calls[ask.result]
                answer.tokens = call.result()
                answer.error = call.error
            else:
                answer.books = books()
        except AssertionError as error:
            answer.error = str(error)
        answers.write(msgspec.json.encode(answer) + b"\n")
    node.mailbox.post(Shutdown(grace_s=0.0))
    node.bury()
    answers.close()


def _connectors(spec: NodeSpec) -> list[ConnectorFactory]:
    from kvbaton.roles import HandoverFactory

    if spec.role == "alone":
        return []
    config = HandoverConfig(transport=spec.transport, timers=PATIENT)
    return [HandoverFactory(config, spec.role)]


def _story(node: Node) -> str:
    if not node.core.connectors.all:
        return ""
    (worker,) = node.transfers.workers
    stories = node.transfers.inspect(worker.state)["stories"]
    return "\n".join(list(stories.values())[-1]) if stories else ""


if __name__ == "__main__":
    main(sys.argv[1:])

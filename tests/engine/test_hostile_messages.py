"""Nothing that a frontend sends ends a core: it is refused, told and counted."""

from __future__ import annotations

import asyncio
import math
import os
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from typing_extensions import override

from kvbaton.engine.build import build_engine
from kvbaton.engine.client import EngineClient
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.core import EngineCore
from kvbaton.engine.frontends import EngineEndpoints, FrontendServer
from kvbaton.engine.kv_connector import Connectors, KVConnector
from kvbaton.engine.request import Sequence
from kvbaton.errors import EngineDeadError
from kvbaton.messages.engine import (
    AbortRequest,
    AddRequest,
    Command,
    Connect,
    FromCore,
    Item,
    Output,
    Outputs,
    Rejected,
    Reply,
    SamplingParams,
    TransferSpec,
    encode_to_core,
)
from kvbaton.types import NodeId
from tests.support.checkpoints import TOKENIZER_SIZE
from tests.support.engine_node import ENGINE, QueueMailbox, greedy
from tests.support.scripted_core import READY
from tests.support.waiting import PATIENCE_S

PROMPT = tuple(range(4, 14))
VOCAB = TOKENIZER_SIZE
FROM_CORE: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)


class Listener(KVConnector):
    """Hears of requests, and does nothing."""

    @override
    def accept(self, request: AddRequest) -> AddRequest:
        return request

    @override
    def added(self, sequence: Sequence) -> bool:
        return False


class Rig:
    """A core, turned by hand."""

    def __init__(self, folder: Path) -> None:
        self.sent: list[FromCore] = []
        self.mailbox = QueueMailbox(self.sent.append, lambda: None)
        config = EngineConfig(model=str(folder), **ENGINE)
        node = NodeId("n", os.urandom(16))
        self.core: EngineCore = build_engine(config, node, (), self.mailbox).core
        self.connector = Listener()
        self.core.connectors = self.core.scheduler.connectors = Connectors((self.connector,))

    def tell(self, *messages: Any) -> list[FromCore]:
        """What the core says to messages at once; all of it can be read at the other end."""
        before = len(self.sent)
        self.mailbox.post(*messages)
        self.core.receive()
        said = self.sent[before:]
        for message in said:
            assert FROM_CORE.decode(msgspec.msgpack.encode(message)) == message
        return said

    def check_alive(self) -> None:
        """It takes a request and ends it."""
        name = os.urandom(8).hex()
        assert self.tell(request(name)) == []
        for _ in range(20):
            self.core.launch()
            self.core.update()
        outputs = [o for m in self.sent if isinstance(m, Outputs) for o in m.outputs]
        assert [o.finish_reason for o in outputs if o.request_id == name][-1] == "length"
        assert self.core.imbalance() == 0
        assert not self.core.scheduler.has_work()


def request(name: str = "r", **fields: Any) -> AddRequest:
    ids = array("I", fields.pop("token_ids", PROMPT))
    whole = {"params": greedy({"max_tokens": 2}), **fields}
    return AddRequest(request_id=name, token_ids=ids, **whole)


@pytest.fixture
def rig(checkpoint: Callable[..., Path]) -> Iterator[Rig]:
    rig = Rig(checkpoint())
    yield rig
    rig.core.close()
    rig.mailbox.close()


def params(**fields: Any) -> dict[str, Any]:
    return {"params": SamplingParams(**{"max_tokens": 2, "seed": 1, **fields})}


def spec(**fields: Any) -> TransferSpec:
    return TransferSpec(**{"role": "target", "transfer_id": bytes(16), **fields})


ITEM = Item(start=0, length=4, digest=bytes(32), grid=(1, 4, 4), data=b"x")

WRONG: list[dict[str, Any]] = [
    {"token_ids": ()},
    {"token_ids": (VOCAB,)},
    {"token_ids": (5, 2**31 - 1)},
    {"token_ids": (5,) * 300},
    {"resume_ids": (VOCAB,)},
    {"resume_ids": (5, 5)},
    {"deadline_s": math.nan},
    {"deadline_s": math.inf},
    {"deadline_s": -1.0},
    {"priority": 2**62},
    params(temperature=math.nan),
    params(temperature=-1.0),
    params(top_p=0.0),
    params(top_p=math.nan),
    params(top_k=-5),
    params(min_p=2.0),
    params(repetition_penalty=0.0),
    params(presence_penalty=math.inf),
    params(frequency_penalty=-3.0),
    params(logit_bias={5: math.nan}),
    params(logit_bias={-1: 1.0}),
    params(logit_bias={VOCAB: 1.0}),
    params(stop_token_ids=(-1,)),
    params(stop_token_ids=tuple(range(100)) * 11),
    params(n=0),
    params(n=1000),
    params(max_tokens=0),
    params(max_tokens=-(2**40)),
    params(min_tokens=3),
    params(min_tokens=-1),
    params(logprobs=-1),
    params(logprobs=10**6),
    params(prompt_logprobs=-1),
    {"transfer": spec(role="both")},
    {"transfer": spec(role="x" * 5000)},
    {"transfer": spec(peer="tcp://[::1%?]:1")},
    {"transfer": spec(peer="tcp://[::1")},
    {"transfer": spec(peer="tcp://host:99999")},
    {"transfer": spec(peer="http://host:1")},
    {"transfer": spec(peer="")},
    {"items": (ITEM,)},
    {"items": (msgspec.structs.replace(ITEM, grid=(1, 0, 4)),)},
    {"items": (msgspec.structs.replace(ITEM, transfer=spec(peer="tcp://[::1%?]:1")),)},
]


@pytest.mark.parametrize("wrong", WRONG, ids=range(len(WRONG)))
def test_what_can_never_be_served_is_refused_by_the_core(rig: Rig, wrong: dict[str, Any]) -> None:
    (answer,) = rig.tell(request("bad", **wrong))
    assert isinstance(answer, Rejected)
    assert (answer.request_id, answer.status) == ("bad", 400)
    rig.check_alive()


def test_all_ids_of_the_model_are_taken(rig: Rig) -> None:
    assert rig.tell(request(token_ids=(0, VOCAB - 1))) == []


ASKED = msgspec.msgpack.decode(encode_to_core(request("q")))
UNREADABLE = [
    (b"", None),
    (b"\xc1\xff" * 9, None),
    (b"\x81" * 5000, None),
    (msgspec.msgpack.encode([1, 2]), None),
    (msgspec.msgpack.encode({"type": "nonsense"}), None),
    (msgspec.msgpack.encode({"type": "add", "request_id": 5}), None),
    (msgspec.msgpack.encode({"type": "add", "request_id": "q"}), "q"),
    (msgspec.msgpack.encode({"type": "abort", "request_id": "q" * 300}), None),
    (msgspec.msgpack.encode({**ASKED, "token_ids": b"123"}), "q"),
    (msgspec.msgpack.encode({**ASKED, "token_ids": [1, 2]}), "q"),
    (msgspec.msgpack.encode({**ASKED, "token_ids": None}), "q"),
    (encode_to_core(request("q", transfer=spec(peer="x" * 300))), "q"),
    (encode_to_core(request("q", cache_salt="x" * 5000)), "q"),
    (encode_to_core(request("q", **params(max_tokens="many"))), "q"),
]


@pytest.mark.parametrize(("data", "named"), UNREADABLE, ids=range(len(UNREADABLE)))
def test_a_message_that_cannot_be_read_is_counted_and_who_asked_is_told(
    rig: Rig, tmp_path: Path, data: bytes, named: str | None
) -> None:
    address = f"ipc://{tmp_path}/engine"
    server = FrontendServer(EngineEndpoints(local=address))
    server.send(READY)
    rig.core.mailbox = server
    with zmq.Context() as context, context.socket(zmq.DEALER) as frontend:
        frontend.linger = 0
        frontend.connect(address)
        frontend.send(encode_to_core(Connect()))
        frontend.send(data)
        frontend.send(encode_to_core(Command(command_id=7, name="drain")))
        answers: list[FromCore] = []
        while not any(isinstance(answer, Reply) for answer in answers):
            rig.core.receive()
            while frontend.poll(100):
                answers.append(FROM_CORE.decode(frontend.recv()))
    told = [a.request_id for a in answers if isinstance(a, Rejected)]
    assert told == ([] if named is None else [named])
    counters = server.completed(rig.core.metrics()).counters
    assert counters["kvbaton_frontend_messages_dropped_total"] == 1
    server.close()


@pytest.mark.parametrize("place", ["accept", "added"])
def test_an_exception_fails_the_request_and_no_more(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("x" * 10_000)

    with monkeypatch.context() as patch:
        patch.setattr(rig.connector, place, broken)
        (answer,) = rig.tell(request("bad"))
    if isinstance(answer, Rejected):
        assert (answer.request_id, answer.status, answer.code) == ("bad", 500, "internal_error")
    else:
        assert isinstance(answer, Outputs)
        assert [o.finish_reason for o in answer.outputs] == ["error"]
    assert rig.core.counters()["kvbaton_messages_failed_total"] == 1
    rig.check_alive()


def test_an_exception_in_an_abort_or_a_question_ends_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.tell(request("r"))
    with monkeypatch.context() as patch:
        patch.setattr(rig.core, "state", lambda: 1 / 0)
        patch.setattr(rig.core.scheduler, "abort", lambda _, *why: [] if why else 1 / 0)
        rig.tell(AbortRequest(request_id="r"))
        patch.setattr(rig.core.scheduler, "abort", lambda *_: 1 / 0)  # nor can it be failed
        rig.tell(AbortRequest(request_id="r"))
        (answer,) = rig.tell(Command(command_id=1, name="state"))
        assert isinstance(answer, Reply)
        assert answer.error is not None
    rig.tell(AbortRequest(request_id="r"))
    rig.check_alive()


def test_a_long_text_can_be_told(rig: Rig) -> None:
    rig.tell(request("r"))
    rig.core.send(rig.core.scheduler.abort("r", "why " * 5000))
    (message,) = [m for m in rig.sent if isinstance(m, Outputs)]
    assert FROM_CORE.decode(msgspec.msgpack.encode(message)) == message
    (answer,) = rig.tell(Command(command_id=1, name="x" * 9000))
    assert isinstance(answer, Reply)


class Told:
    """A receiver that keeps how its request ended."""

    def __init__(self) -> None:
        self.ended: list[Exception | None] = []

    def put(self, output: Output) -> None:
        """It is asked nothing that is answered."""

    def end(self, error: Exception | None) -> None:
        self.ended.append(error)

    def flush(self) -> None:
        """There is nothing to act on."""


@asynccontextmanager
async def connected(tmp_path: Path) -> AsyncIterator[tuple[zmq.Socket[bytes], EngineClient]]:
    """A client, and the socket of a core that does nothing by itself."""
    address = f"ipc://{tmp_path}/engine"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as core:
        core.linger = 0
        core.setsockopt(zmq.RCVHWM, 1)
        core.bind(address)
        connecting = asyncio.create_task(EngineClient.connect(address))
        await asyncio.sleep(0)
        identity, _ = await asyncio.to_thread(core.recv_multipart)
        core.send_multipart([identity, msgspec.msgpack.encode(READY)])
        client = await connecting
        try:
            yield core, client
        finally:
            await client.close()


async def test_a_client_that_cannot_read_its_core_says_so(tmp_path: Path) -> None:
    async with connected(tmp_path) as (core, client):
        waiting = asyncio.ensure_future(anext(client.generate(request("r"))))
        identity, _ = await asyncio.to_thread(core.recv_multipart)
        output = Output(request_id="r", error="x" * 5000)  # longer than a `Text` may be
        core.send_multipart([identity, msgspec.msgpack.encode(Outputs(outputs=(output,)))])
        await asyncio.wait_for(client.died.wait(), PATIENCE_S)
        with pytest.raises(EngineDeadError, match="can't be read"):
            await asyncio.wait_for(waiting, PATIENCE_S)


async def test_every_request_hears_of_a_core_that_reads_nothing(tmp_path: Path) -> None:
    async with connected(tmp_path) as (_, client):
        receivers = [Told() for _ in range(40_000)]
        asked = []
        for number, receiver in enumerate(receivers):
            try:
                client.submit(request(f"r{number}"), receiver)
            except EngineDeadError:
                break
            asked.append(receiver)
            if not number % 1000:
                await asyncio.sleep(0)
        await asyncio.wait_for(client.died.wait(), PATIENCE_S)
        assert len(asked) < len(receivers), "they don't all fit into sockets"
        assert all(len(receiver.ended) == 1 for receiver in asked)

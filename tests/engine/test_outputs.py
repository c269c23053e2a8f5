import asyncio
from array import array
from collections.abc import Callable

import pytest
from typing_extensions import override

from kvbaton.engine import outputs
from kvbaton.engine.outputs import OutputCollector, OutputReceiver, TokenSource
from kvbaton.messages.engine import AddRequest, Output, SamplingParams

REQUEST = AddRequest(request_id="r", token_ids=array("I", (1,)), params=SamplingParams(n=2))


class Source(TokenSource):
    def __init__(self) -> None:
        self.cancelled: list[str] = []

    @override
    def submit(self, request: AddRequest, receiver: OutputReceiver) -> None:
        self.receiver = receiver

    @override
    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def say(self, *tokens: int, choice: int = 0) -> None:
        for token in tokens:
            output = Output(request_id="r", choice=choice, index=token, token_ids=(token,))
            self.receiver.put(output)
        self.receiver.flush()

    def end(self, error: Exception | None = None) -> None:
        self.receiver.end(error)
        self.receiver.flush()


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


class Reading:
    """A reader of `REQUEST`; while `free` is clear it is busy with what it has read."""

    def __init__(self, source: Source, sink: Callable[[Output], bool]) -> None:
        self.read: list[tuple[int, ...]] = []
        self.free = asyncio.Event()
        self.free.set()
        self.collector = OutputCollector(source, REQUEST, sink)
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        with self.collector as outputs:
            async for output in outputs:
                self.read.append(output.token_ids)
                await self.free.wait()


async def test_a_sink_has_tokens_before_the_callback_ends_and_the_reader_what_it_refuses() -> None:
    source, taken, room = Source(), list[tuple[int, ...]](), True

    def sink(output: Output) -> bool:
        if room:
            taken.append(output.token_ids)
        return room

    reading = Reading(source, sink)
    await turns()
    source.say(0)
    assert taken == [(0,)], "nobody had to wake"
    source.say(1, 2)
    assert taken[1:] == [(1, 2)], "what comes at once is one"
    room = False
    reading.free.clear()
    source.say(3)
    await turns()
    room = True
    source.say(4)
    source.say(5)
    source.say(7, choice=1)
    assert taken[2:] == [], "the reader is busy with an earlier one"
    reading.free.set()
    await turns()
    assert reading.read == [(3,), (4, 5), (7,)]
    source.say(6)
    assert taken[2:] == [(6,)]
    source.end()
    await reading.task
    assert source.cancelled == ["r"]


async def test_a_reader_that_is_always_a_little_behind_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It never catches up with all choices at once, but what waits does not grow."""
    monkeypatch.setattr(outputs, "MAX_BEHIND", 8)
    source, read = Source(), list[int]()
    with OutputCollector(source, REQUEST) as collector:
        for token in range(0, 60, 2):
            for choice in range(2):
                source.say(token, token + 1, choice=choice)
            read += (await anext(collector)).token_ids  # of one choice
        source.end()
        async for output in collector:
            read += output.token_ids
    assert sorted(read) == sorted([*range(60)] * 2)


async def test_what_a_sink_raises_is_the_readers() -> None:
    source = Source()

    def sink(output: Output) -> bool:
        raise ZeroDivisionError

    reading = Reading(source, sink)
    await turns()
    source.say(0)
    with pytest.raises(ZeroDivisionError):
        await reading.task
    assert source.cancelled == ["r"]
    source.say(1)
    source.end()


async def test_a_sink_that_has_enough_ends_the_iteration() -> None:
    source = Source()

    def sink(output: Output) -> bool:
        reading.collector.end()
        return True

    reading = Reading(source, sink)
    await turns()
    source.say(0)
    await reading.task
    assert (reading.read, source.cancelled) == ([], ["r"])


async def test_a_failure_comes_after_what_came_before_it() -> None:
    source = Source()
    reading = Reading(source, lambda output: False)
    await turns()
    source.receiver.put(Output(request_id="r", token_ids=(0,)))
    source.end(ValueError("late"))
    with pytest.raises(ValueError, match="late"):
        await reading.task
    assert reading.read == [(0,)]

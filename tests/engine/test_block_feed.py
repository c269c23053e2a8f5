"""What frontends are told of prefix caches is what is in them, over the real sockets."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from kvbaton.engine import frontends
from kvbaton.engine.client import EngineClient
from kvbaton.engine.frontends import EngineEndpoints
from kvbaton.messages.engine import (
    BlockChange,
    CachedBlocks,
    CachedGroup,
    Connect,
    FromCore,
    WatchBlocks,
    encode_to_core,
)
from tests.support.scripted_core import ScriptedCore
from tests.support.waiting import eventually

PATIENCE_S = 60.0


class FeedingCore(ScriptedCore):
    """Tells of blocks that a test stores.

    Attributes:
        held: hashes of the blocks that it holds.
        fresh: changes that nobody was told of.
    """

    def __init__(self, endpoints: EngineEndpoints) -> None:
        self.groups: tuple[CachedGroup, ...] = (CachedGroup(16),)
        self.held: set[bytes] = set()
        self.fresh: deque[BlockChange] = deque()
        super().__init__(endpoints)

    def step(self) -> None:
        super().step()
        self.frontends.tell_watchers((), self)  # who has just come wants to know what there is
        while self.fresh:  # a test adds to it meanwhile
            self.frontends.tell_watchers((self.fresh.popleft(),), self)

    def store(self, block: bytes) -> None:
        self.held.add(block)
        self.fresh.append(BlockChange(0, True, block))

    def snapshot(self) -> Iterator[tuple[BlockChange, ...]]:
        yield tuple(BlockChange(0, True, block) for block in sorted(self.held))


@pytest.fixture
def core(tmp_path: Path) -> Iterator[FeedingCore]:
    core = FeedingCore(EngineEndpoints(local=f"ipc://{tmp_path}/e", host="127.0.0.1"))
    yield core
    core.stop()


class Watcher:
    """What a frontend knows."""

    def __init__(self) -> None:
        self.blocks: set[bytes] = set()
        self.numbers: list[int] = []

    def take(self, message: CachedBlocks) -> None:
        self.numbers.append(message.number)
        if message.number == 0:
            self.blocks.clear()
        for change in message.changes:
            self.blocks.add(change.hashes)


def block(number: int) -> bytes:
    return number.to_bytes(8, "little")


async def test_a_watcher_gets_a_snapshot_and_then_what_changes(core: FeedingCore) -> None:
    core.held = {block(1), block(2)}
    client, watcher = await EngineClient.connect(core.address), Watcher()
    client.watch_blocks(watcher.take)
    await eventually(lambda: watcher.blocks == core.held)
    core.store(block(3))
    await eventually(lambda: watcher.blocks == core.held)
    assert watcher.numbers == list(range(len(watcher.numbers)))
    await client.close()


async def test_a_missing_message_is_repaired_by_a_new_snapshot(core: FeedingCore) -> None:
    client, watcher = await EngineClient.connect(core.address), Watcher()
    client.watch_blocks(watcher.take)
    await eventually(lambda: len(watcher.numbers) == 2)
    (peer,) = core.frontends.block_watchers
    peer.next_blocks += 7  # as if some had been lost
    core.store(block(1))
    await eventually(lambda: watcher.numbers.count(0) == 2)
    await eventually(lambda: watcher.blocks == core.held)
    await client.close()


def test_a_watcher_that_does_not_read_begins_anew(
    core: FeedingCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local one: of a remote one whose buffers are full no heartbeat is read, for a second."""
    # Not 0: whoever can't read a beginning at once would be told of nothing but beginnings.
    monkeypatch.setattr(frontends, "MAX_WATCHER_BACKLOG_BYTES", 1 << 16)
    watcher, give_up = Watcher(), time.monotonic() + PATIENCE_S
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.RCVHWM, 1)
        socket.set(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        socket.set(zmq.LINGER, 0)
        socket.connect(f"ipc://{tmp_path}/e")
        for message in (Connect(), WatchBlocks()):
            socket.send(encode_to_core(message))

        def read() -> None:
            said = msgspec.msgpack.decode(socket.recv(), type=FromCore)
            if isinstance(said, CachedBlocks):
                watcher.take(said)

        while len(watcher.numbers) < 2:  # what there is follows the beginning: the core goes on
            read()
        (peer,) = core.frontends.block_watchers
        number = 0
        while peer.next_blocks:  # until what is not read is too much
            assert time.monotonic() < give_up
            core.store(number.to_bytes(8192, "little"))
            number += 1
            time.sleep(0.001)
        while watcher.blocks != core.held or watcher.numbers.count(0) < 2:
            assert time.monotonic() < give_up
            read()


async def test_a_frontend_that_leaves_is_told_no_more(core: FeedingCore) -> None:
    client = await EngineClient.connect(core.address)
    client.watch_blocks(Watcher().take)
    await eventually(lambda: core.frontends.block_watchers)
    await client.close()
    await eventually(lambda: not core.frontends.block_watchers)

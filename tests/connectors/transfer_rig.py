"""Real transfer threads of prefill and decode nodes in one process, over memory of a test."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from kvbaton.connectors.base import Memory, Transport
from kvbaton.connectors.channel import ControlChannel
from kvbaton.connectors.digest import BlockRange, Sums
from kvbaton.connectors.layout import GroupKind, KVLayout, contiguous_plane
from kvbaton.connectors.protocol.events import (
    Announce,
    BlocksReady,
    Deliver,
    Engage,
    Fail,
    FirstTokens,
    Identity,
    Start,
    Unquarantine,
)
from kvbaton.connectors.protocol.source import Source
from kvbaton.connectors.protocol.target import Target
from kvbaton.connectors.transfer.source_worker import SourceWorker
from kvbaton.connectors.transfer.target_worker import TargetWorker
from kvbaton.connectors.transfer.thread import TransferThread
from kvbaton.connectors.transports.memory import MemoryHub, MemoryTransport
from kvbaton.messages.control import RankCard
from kvbaton.types import Attempt, BlockSpan, ChoiceStart, NodeId, TransferTimers
from tests.support.waiting import PATIENCE_S

BLOCK_SIZE, NUM_BLOCKS, HEADS = 4, 64, 2
TIMERS = TransferTimers(resend=0.05, progress_deadline=1.0)
KEY = b"k" * 32
T = TypeVar("T")
_names = itertools.count()
_PLANE = contiguous_plane(
    num_blocks=NUM_BLOCKS,
    block_size=BLOCK_SIZE,
    num_heads=HEADS,
    head_dim=4,
    layers=(0, 1),
    dtype="float32",
)
LAYOUT = KVLayout(0, GroupKind.FULL, BLOCK_SIZE, NUM_BLOCKS, (_PLANE,))


@dataclass
class Known(Generic[T]):
    """Sums that are there at once."""

    value: T

    def poll(self) -> T:
        return self.value


class Pool:
    """The memory of one rank; element [block, head, layer, kv, token, feature]."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.data = rng.integers(0, 1 << 30, _PLANE.shape, np.int32)

    @property
    def memory(self) -> Memory:
        return Memory(self.data.ctypes.data, self.data.nbytes, owner=self.data)

    def digest(self, ranges: Sequence[BlockRange], *, keep: bool) -> Known[list[list[Sums]]]:
        return Known([[self.sums(*held[1:])] for held in ranges])

    def sums(self, blocks: Sequence[int], first_position: int, start: int, end: int) -> Sums:
        """A weighted sum over the valid tokens of each block."""
        rows = []
        for number, block in enumerate(blocks):
            positions = first_position + number * BLOCK_SIZE + np.arange(BLOCK_SIZE)
            weight = np.where((positions >= start) & (positions < end), 2 * positions + 1, 0)
            values = self.data[block].astype(np.uint64) * weight.astype(np.uint64)[:, None]
            rows.append(values.sum((-1, -2)).transpose(1, 2, 0))
        return np.stack(rows)


class Node:
    """What a prefill and a decode node share."""

    worker: SourceWorker | TargetWorker

    def __init__(
        self,
        name: str,
        transport: Transport | None,
        hub: MemoryHub,
        timers: TransferTimers = TIMERS,
        layout: KVLayout = LAYOUT,
    ) -> None:
        self.id = NodeId(name, os.urandom(16))
        self.pool = Pool(len(name))
        self.transport = transport or MemoryTransport(f"{name}-{next(_names)}", hub=hub)
        self.transport.register(self.pool.memory)
        card = RankCard(0, self.transport.card(), msgspec.msgpack.encode([layout]))
        self.identity = Identity(self.id, bytes(32), {}, "memory", (card,))
        self.options: dict[str, Any] = {}
        self.timers = timers
        self.channel = ControlChannel("127.0.0.1", cluster_key=None)
        self.thread = self.make()
        self.actions: list[Any] = []
        self.thread.start()

    def make(self) -> TransferThread:
        raise NotImplementedError

    def take(self) -> None:
        self.actions += self.worker.take()

    def of(self, kind: type) -> list[Any]:
        self.take()
        return [action for action in self.actions if isinstance(action, kind)]

    def close(self) -> None:
        self.thread.close()


class Prefill(Node):
    """Has every prompt at once, as soon as it is reserved: token i lies in block 1 + i / 4.

    Attributes:
        spread: in block 1 + 2 * i / 4, so that no two blocks follow each other.
    """

    def make(self) -> TransferThread:
        room = self.transport.capabilities.max_notice_bytes
        self.machine = Source(self.identity, self.timers, max_notice_bytes=room, **self.options)
        self.worker = SourceWorker(self.machine, [self.transport])
        self._lengths: dict[Attempt, int] = {}
        self.spread = False
        return TransferThread(self.channel, sender=self.worker)

    def announce(self, attempt: Attempt, num_tokens: int) -> None:
        self._lengths[attempt] = num_tokens
        self.thread.submit(Announce(attempt, KEY, num_tokens))

    def take(self) -> None:
        for action in self.worker.take():
            self.actions.append(action)
            if isinstance(action, Engage):
                self.push(action.attempt, action.start)

    def push(self, attempt: Attempt, start: int) -> None:
        end = self._lengths[attempt]
        first, last = start // BLOCK_SIZE, -(-end // BLOCK_SIZE)
        blocks = tuple(1 + number * (1 + self.spread) for number in range(first, last))
        sums = Known([self.pool.sums(blocks, first * BLOCK_SIZE, start, end)])
        report = BlocksReady(attempt, start, end, ((BlockSpan(first, blocks),),), ((first, sums),))
        self.thread.submit(report, FirstTokens(attempt, (ChoiceStart(7),)))


class Decode(Node):
    """Wants every prompt whole, in the blocks that the test names."""

    def make(self) -> TransferThread:
        self.machine = Target(
            self.identity, self.timers, new_id=lambda: os.urandom(16), **self.options
        )
        self.worker = TargetWorker(self.machine, [self.transport], self.pool)
        return TransferThread(self.channel, receiver=self.worker)

    def begin(self, attempt: Attempt, address: str, num_tokens: int, first_block: int = 20) -> None:
        blocks = tuple(range(first_block, first_block + -(-num_tokens // BLOCK_SIZE)))
        spans = ((BlockSpan(0, blocks),),)
        self.thread.submit(Start(attempt, address, KEY, num_tokens, spans))

    def outcome(self, attempt: Attempt) -> Deliver | Fail | None:
        ended = [a for a in (*self.of(Deliver), *self.of(Fail)) if a.attempt == attempt]
        return ended[0] if ended else None

    def freed(self, attempt: Attempt) -> bool:
        return any(action.attempt == attempt for action in self.of(Unquarantine))


def begin(p: Prefill, d: Decode, number: int = 0, num_tokens: int = 18) -> Attempt:
    """Have a prompt announced by one, and asked for by the other."""
    attempt = Attempt(os.urandom(16), number)
    p.announce(attempt, num_tokens)
    d.begin(attempt, p.channel.address, num_tokens)
    return attempt


def hand_over(p: Prefill, d: Decode, number: int = 0, num_tokens: int = 18) -> Deliver | Fail:
    """One whole hand-over; what it ended with at D, once its blocks are free."""
    attempt = begin(p, d, number, num_tokens)
    wait(lambda: d.outcome(attempt) is not None and d.freed(attempt), p, d)
    ended = d.outcome(attempt)
    assert ended is not None
    return ended


def wait(until: Callable[[], bool], *nodes: Node, within: float = PATIENCE_S) -> None:
    """Let nodes work until something holds."""
    limit = time.monotonic() + within
    while not until():
        for node in nodes:
            node.take()
            assert node.thread.failure is None, node.thread.failure
        assert time.monotonic() < limit, [node.thread.inspect(node.worker.state) for node in nodes]
        time.sleep(0.001)

"""What must hold after every event, kept as accounts of their own beside those of the machines.

They hear every event that a machine takes and every action that it answers with, and every run of
bytes that is read or lands. Whatever they find is a `ViolationError`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvbaton.connectors.layout import KVLayout
from kvbaton.connectors.protocol.checks import first_token
from kvbaton.connectors.protocol.events import (
    AdmitPeer,
    Announce,
    BlocksReady,
    CancelTarget,
    ClosePeer,
    Deliver,
    Engage,
    EvictSource,
    Fail,
    Fence,
    Fenced,
    Landed,
    OpenPeer,
    PeerGone,
    Post,
    Received,
    RefuseAnnounce,
    Release,
    Send,
    Start,
    StopSource,
    Unquarantine,
    Verified,
)
from kvbaton.connectors.protocol.session import groups_of
from kvbaton.messages.control import (
    Accepted,
    Ack,
    Cancel,
    Complete,
    Drained,
    Refused,
    Reserve,
    SessionDrained,
    TransferMessage,
)
from kvbaton.testing.simulated_engine import kv_of
from kvbaton.types import Attempt, NodeId

if TYPE_CHECKING:
    from kvbaton.testing.simulated_node import SimulatedNode
    from kvbaton.testing.simulated_world import Copy, SimulatedWrite

Block = tuple[int, int]
"""Group and physical number."""


class Laws:
    """What holds on either side.

    Args:
        node: whose machine is watched.
    """

    def __init__(self, node: SimulatedNode) -> None:
        self.node, self.world = node, node.world
        self.stale = 0
        self._last: dict[bytes, int] = {}

    def fail(self, what: str) -> None:
        """ScheduleReport a violation."""
        self.world.fail(f"{self.node.name}: {what}")

    def saw(self, event: Any, actions: Sequence[Any]) -> None:
        """The machine has answered an event."""
        if not isinstance(event, Received):
            self.world.note(self.node.name, event)
        self.comes(event)
        if isinstance(event, Received) and self._is_fresh(event, actions):
            if self.world.garbled.get((event.message.session, event.message.seq)) == event.message:
                self.check_refusal(event.message, actions)
        for action in actions:
            if isinstance(action, Send):
                self.world.note(self.node.name, action.message)
                self.sent(action.message)
                self._check_answer(event, action.message)
        self.happened(event, actions)

    def _is_fresh(self, event: Received, actions: Sequence[Any]) -> bool:
        """Whether a message is newer than all of its session before; else it may move nothing."""
        message = event.message
        if isinstance(message, Refused) and message.transfer_id is None:
            return True
        last = self._last.get(message.session, -1)
        if not any(_says_unknown(action) for action in actions):  # such a session has no last
            self._last[message.session] = max(last, message.seq)
        if message.seq > last:
            return True
        self.stale += 1
        for action in actions:
            if not (isinstance(action, Send) and isinstance(action.message, Refused)):
                self.fail(f"{message} is stale, and was answered by {action}")
        return False

    def _check_answer(self, event: Any, answer: Any) -> None:
        """What is said of an attempt because of a message goes to who sent it."""
        if not isinstance(event, Received) or not isinstance(answer, TransferMessage):
            return
        asked = event.message
        if isinstance(asked, TransferMessage) and asked.session != answer.session:
            if (asked.transfer_id, asked.attempt) == (answer.transfer_id, answer.attempt):
                self.fail(f"{asked} of one session leads to {answer} in another")

    def check_refusal(self, message: Any, actions: Sequence[Any]) -> None:
        """Nonsense has come."""

    def comes(self, event: Any) -> None:
        """An event comes, and was not answered yet."""

    def sent(self, message: Any) -> None:
        """A message goes out."""

    def happened(self, event: Any, actions: Sequence[Any]) -> None:
        """An event was answered."""

    def blocks_of(self, spans: Any) -> list[Block]:
        """Physical blocks of spans."""
        return [(g, b) for g, group in enumerate(spans) for span in group for b in span.blocks]

    def block_at(self, region: int, offset: int) -> Block:
        """The block that an offset of a region lies in."""
        plane = self.node.executor.layouts[0][region].planes[0]
        return region, offset // plane.strides[0]

    def read(self, write: SimulatedWrite, copy: Copy) -> None:
        """A write reads our memory."""
        self.fail(f"{write.told} reads a target's memory")

    def landed(self, write: SimulatedWrite, rank: int, copy: Copy) -> None:
        """Bytes land in our memory."""
        self.fail(f"{write.told} lands in a source's memory")

    def check_pools(self) -> None:
        """Compare the accounts with the pools' marks."""


# --- P ---


@dataclass
class SourceAccount:
    """An attempt on P, from `Engage` to `Release`."""

    held: list[Block] = field(default_factory=list)
    spans: list[Any] = field(default_factory=list)
    posted: int | None = None
    stopped: bool = False
    evicted: bool = False


class SourceLaws(Laws):
    """What must hold on a source."""

    def __init__(self, node: SimulatedNode) -> None:
        super().__init__(node)
        self.live: dict[Attempt, SourceAccount] = {}
        self.over: dict[Attempt, float] = {}
        self.reserved: dict[tuple[bytes, Attempt], Reserve] = {}
        self.accepted: dict[Attempt, set[bytes]] = {}
        self.open: dict[bytes, NodeId] = {}
        self._units: dict[bytes, int] = {}
        self._asked: SourceAccount | None = None
        self.to_evict: list[tuple[list[Any], tuple[tuple[int, int], ...]]] = []

    def comes(self, event: Any) -> None:
        """See `Laws.comes`."""
        message = event.message if isinstance(event, Received) else None
        self._asked = None
        if isinstance(message, Ack | Reserve):
            name = Attempt(message.transfer_id, message.attempt)
            self._asked = self.live.get(name)
            if isinstance(message, Reserve) and message.session not in self.accepted.get(name, ()):
                self.reserved[message.session, name] = message  # perhaps

    def check_refusal(self, message: Any, actions: Sequence[Any]) -> None:
        """See `Laws.check_refusal`."""
        if isinstance(message, Ack) and self._asked is None:
            return
        if not any(isinstance(a, Send) and isinstance(a.message, Refused) for a in actions):
            self.fail(f"{message} is nonsense, and was not refused")

    def sent(self, message: Any) -> None:
        """See `Laws.sent`."""
        if isinstance(message, Drained):
            name = Attempt(message.transfer_id, message.attempt)
            for write in self.world.writes:
                if write.told.attempt == name and write.told.session == message.session:
                    if write.may_land and write.peer.near.node is self.node:
                        self.fail(f"Drained of {name}, and a write may still land")
        elif isinstance(message, SessionDrained):
            for write in self.world.writes:
                if write.told.session in message.over and write.may_land:
                    self.fail(f"{message}, and a write of {write.told.attempt} may still land")
        elif isinstance(message, Accepted):
            name = Attempt(message.transfer_id, message.attempt)
            self.accepted.setdefault(name, set()).add(message.session)
        elif isinstance(message, Complete):
            self.node.check_first_tokens(message)

    def happened(self, event: Any, actions: Sequence[Any]) -> None:
        """See `Laws.happened`."""
        for action in actions:
            match action:
                case Engage():
                    self._engage(action.attempt)
                case Post():
                    self._post(action)
                case StopSource():
                    if action.attempt in self.live:
                        self.live[action.attempt].stopped = True
                case Release():
                    self._release(action.attempt)
                case EvictSource():
                    if action.attempt in self.live:
                        self.to_evict.append((self.live[action.attempt].spans, action.bad))
                case OpenPeer():
                    if self.world.nodes[action.node.node].identity != self.node.identity:
                        self.fail(f"{action.node.node} serves another model")
                    self.open[action.session] = action.node
                    self._units[action.session] = self._common_unit(action)
                case ClosePeer():
                    self.open.pop(action.session, None)
        match event:
            case BlocksReady():
                self._ready(event)
            case Received():
                self._received(event, actions)
            case PeerGone():
                if event.node in self.open.values():
                    self.fail(f"{event.node.node} is gone, and a session with it stays open")
            case Announce():
                self._announced(event, actions)

    def _engage(self, name: Attempt) -> None:
        if name in self.live or self._is_remembered(name):
            self.fail(f"{name} lives twice")
        self.live[name] = SourceAccount()

    def _is_remembered(self, name: Attempt) -> bool:
        ended = self.over.get(name)
        return ended is not None and self.node.clock < ended + self.node.timers.tombstone

    def _post(self, action: Post) -> None:
        record = self.live.get(action.attempt)
        if record is None or record.stopped:
            self.fail(f"{action.attempt} is over, and posts")
        elif record.posted not in (None, action.start):
            self.fail(f"{action.attempt} posts from {action.start}, after {record.posted}")
        elif action.session not in self.open:
            self.fail(f"{action.attempt} posts into a session that is not open")
        else:
            record.posted = action.end
            reserve = self.reserved[action.session, action.attempt]
            if action.end % self._units[action.session] and action.end < reserve.num_tokens:
                self.fail(f"{action.attempt} posts up to {action.end}, inside a block")

    def _common_unit(self, action: OpenPeer) -> int:
        """Tokens between two borders at which blocks of both sides begin, in all groups."""
        theirs = msgspec.msgpack.decode(action.ranks[0].layouts, type=list[KVLayout])
        ours = self.node.executor.layouts[0]
        return math.lcm(*(layout.block_size for layout in (*ours, *theirs)))

    def _ready(self, event: BlocksReady) -> None:
        record = self.live.get(event.attempt)
        if record is None:
            return
        record.held += self.blocks_of(event.spans)
        record.spans.append(event.spans)

    def _release(self, name: Attempt) -> None:
        record = self.live.pop(name, None)
        if record is None:
            self.fail(f"{name} is released, and was not engaged")
        self.over[name] = self.node.clock
        for write in self.world.writes:
            if write.told.attempt == name and write.peer.near.node is self.node and write.reads:
                self.fail(f"{name} is released, and a write still reads it")

    def _received(self, event: Received, actions: Sequence[Any]) -> None:
        message = event.message
        if isinstance(message, Cancel):
            name = Attempt(message.transfer_id, message.attempt)
            if any(isinstance(a, Send) and isinstance(a.message, Drained) for a in actions):
                others = self.accepted.get(name, set()) - {message.session}
                if name not in self.live and not others:
                    self.over.setdefault(name, self.node.clock)
        elif isinstance(message, Ack) and message.verdict == "mismatch":
            refused = any(isinstance(a, Send) for a in actions)
            if self._asked is not None and not self._asked.evicted and not refused:
                self._must_evict(self._asked, message, actions)

    def _must_evict(self, record: SourceAccount, message: Ack, actions: Sequence[Any]) -> None:
        record.evicted = any(isinstance(a, EvictSource) for a in actions)
        if not record.evicted and actions:  # without any action it was dropped
            self.fail(f"{message} evicts nothing")

    def _announced(self, event: Announce, actions: Sequence[Any]) -> None:
        refused = any(isinstance(a, RefuseAnnounce) for a in actions)
        if self._is_remembered(event.attempt) and not refused:
            self.fail(f"{event.attempt} is over, and is taken again")

    def read(self, write: SimulatedWrite, copy: Copy) -> None:
        """See `Laws.read`."""
        g, block = self.block_at(copy.source_region, copy.source_offset)
        if self.node.alive and not self.node.pools[g].outgoing[block]:
            self.fail(f"{write.told} reads block {block} of group {g}, which nobody holds")

    def check_pools(self) -> None:
        """See `Laws.check_pools`."""
        for name, record in self.live.items():
            for g, block in record.held:
                if not self.node.pools[g].outgoing[block]:
                    self.fail(f"{name} may read block {block} of group {g}, which nobody holds")
        for all_spans, bad in self.to_evict:
            for spans in all_spans:
                self._check_evicted(spans, bad)
        self.to_evict.clear()

    def _check_evicted(self, spans: Any, bad: Sequence[tuple[int, int]]) -> None:
        for g, group in enumerate(spans):
            size = self.node.executor.layouts[0][g].block_size
            for span in group:
                for number, block in enumerate(span.blocks, span.first):
                    hit = any(low < (number + 1) * size and number * size < hi for low, hi in bad)
                    if hit and self.node.pools[g].keys[block] is not None:
                        self.fail(f"block {block} of group {g} is bad, and stays in the cache")


# --- D ---


@dataclass
class TargetAccount:
    """An attempt on D, from `Start` to `Unquarantine`."""

    order: Start
    serial: int
    outcome: str = ""
    session: bytes = b""
    told: Reserve | None = None
    blocks: list[Block] = field(default_factory=list)


class TargetLaws(Laws):
    """What must hold on a target."""

    def __init__(self, node: SimulatedNode) -> None:
        super().__init__(node)
        self.live: dict[Attempt, TargetAccount] = {}
        self.owner: dict[Block, Attempt] = {}
        self.sessions: dict[bytes, NodeId] = {}
        self.outcomes: dict[str, int] = {"delivered": 0, "failed": 0, "cancelled": 0}
        self.started = 0
        self.fences = 0
        self.fencing: dict[NodeId, set[bytes]] = {}
        self.mismatches = 0
        layouts = node.executor.layouts
        self._marks = [
            [np.zeros(words[g].size, np.int64) for g in range(len(layouts[0]))]
            for words in node.executor.words
        ]

    def check_refusal(self, message: Any, actions: Sequence[Any]) -> None:
        """See `Laws.check_refusal`."""
        record = self.live.get(Attempt(message.transfer_id, message.attempt))
        if record is None or record.outcome or record.session != message.session:
            return
        if not any(isinstance(action, Fail) for action in actions):
            self.fail(f"{message} is nonsense, and {record.order.attempt} goes on")

    def comes(self, event: Any) -> None:
        """See `Laws.comes`."""
        if isinstance(event, Start):
            self._start(event)
        elif isinstance(event, CancelTarget) and event.attempt in self.live:
            self._cancelled(self.live[event.attempt])
        elif isinstance(event, Verified) and event.bad:
            self._mismatch(event)

    def sent(self, message: Any) -> None:
        """See `Laws.sent`."""
        if not isinstance(message, Reserve):
            return
        record = self.live.get(Attempt(message.transfer_id, message.attempt))
        if record is None or record.outcome:
            self.fail(f"{message} reserves what is not wanted")
            return
        if message.spans != record.order.spans:
            self.fail(f"{message} names other blocks than were reserved")
        record.session, record.told = message.session, message

    def happened(self, event: Any, actions: Sequence[Any]) -> None:
        """See `Laws.happened`."""
        for action in actions:
            match action:
                case Deliver():
                    record = self._settle(action.attempt, "delivered")
                    self._check_bytes(record, record.order.num_tokens, "is delivered")
                case Fail():
                    record = self._settle(action.attempt, "failed")
                    self._check_bytes(record, action.valid_through, "has failed")
                    if self.world.weather.calm:
                        self.fail(f"{action} in calm weather")
                case Unquarantine():
                    self._unquarantine(action.attempt)
                case AdmitPeer():
                    self.sessions[action.session] = action.node
                case Fence():
                    self.fences += 1
                    known = {s for s, node in self.sessions.items() if node == action.node}
                    self.fencing.setdefault(action.node, known)
                    if self.world.weather.calm:
                        self.fail(f"{action.node} is fenced in calm weather")
        for action in actions:
            if isinstance(action, AdmitPeer):
                self._check_superseded(action.node)
        if isinstance(event, Landed):
            self._check_notice(event, actions)
        if isinstance(event, PeerGone):
            self._check_gone(event.node)
        elif isinstance(event, Fenced):
            self._check_fenced(event.node, self.fencing.pop(event.node))

    def _check_notice(self, event: Landed, actions: Sequence[Any]) -> None:
        record = self.live.get(event.attempt)
        if record is None or record.outcome == "cancelled" or record.session != event.session:
            return
        name = (event.attempt, event.write, event.start, event.end)
        if name in self.world.garbled_notices and record.outcome != "failed":
            self.fail(f"{event} is nonsense, and its attempt goes on")

    def _start(self, event: Start) -> None:
        if event.attempt in self.live:
            self.fail(f"{event.attempt} is started twice")
        self.started += 1
        record = TargetAccount(event, self.started, blocks=self.blocks_of(event.spans))
        self.live[event.attempt] = record
        for block in record.blocks:
            if block in self.owner:
                self.fail(f"block {block} is reserved for two")
            self.owner[block] = event.attempt

    def _cancelled(self, record: TargetAccount) -> None:
        if not record.outcome:
            record.outcome = "cancelled"
            self.outcomes["cancelled"] += 1

    def _settle(self, name: Attempt, outcome: str) -> TargetAccount:
        record = self.live.get(name)
        if record is None or record.outcome:
            known = "unknown" if record is None else record.outcome
            self.fail(f"{name} has {outcome}, but it was {known} before")
        assert record is not None
        record.outcome = outcome
        self.outcomes[outcome] += 1
        return record

    def _check_bytes(self, record: TargetAccount, end: int, what: str) -> None:
        order = record.order
        executor, tokens = self.node.executor, self.world.prompts[order.prompt_key]
        kv = kv_of(tokens, self.node.shape.model)[:end]
        first = first_token(order.spans, groups_of(executor.layouts))
        for g, spans in enumerate(order.spans):
            needed = max(first, executor.first_needed(g, order.num_tokens))
            for span in spans:
                wrong = executor.differs(g, list(enumerate(span.blocks, span.first)), kv, needed)
                if wrong is not None:
                    self.fail(f"{order.attempt} {what}, but group {g} holds wrong bytes: {wrong}")

    def _mismatch(self, event: Verified) -> None:
        self.mismatches += 1
        weather = self.world.weather
        record = self.live.get(event.attempt)
        if not weather.rot and not weather.nonsense and record is not None and not record.outcome:
            self.fail(f"digests of {event.attempt} differ, and nothing rots")

    def _unquarantine(self, name: Attempt) -> None:
        record = self.live.pop(name, None)
        if record is None:
            self.fail(f"{name} leaves quarantine, and was not in it")
            return
        if not record.outcome:
            self.fail(f"{name} leaves quarantine without an outcome")
        for write in self.world.writes:
            if write.told.attempt == name and write.peer.far.node is self.node and write.may_land:
                self.fail(f"{name} leaves quarantine while a write may still land")
        for block in record.blocks:
            del self.owner[block]

    def _check_gone(self, node: NodeId) -> None:
        for name, record in self.live.items():
            if not record.outcome and self.sessions.get(record.session) == node:
                self.fail(f"{node.node} is gone, and {name} waits for it")

    def _check_superseded(self, node: NodeId) -> None:
        """Who answers at an address ends the former life of the node there."""
        present = self.world.nodes[node.node]
        for name, record in self.live.items():
            peer = self.sessions.get(record.session, node)
            if peer == node or peer.node != node.node or peer in self.fencing:
                continue
            if present.id == node and present.address == record.order.address:
                self.fail(f"{node.node} lives anew, and {name} waits for its former life")

    def _check_fenced(self, node: NodeId, sessions: set[bytes]) -> None:
        """What was known of a peer when its fence began is free once that has held."""
        for name, record in self.live.items():
            if record.session in sessions:
                self.fail(f"{node.node} is fenced, and {name} stays in quarantine")

    def landed(self, write: SimulatedWrite, rank: int, copy: Copy) -> None:
        """See `Laws.landed`."""
        told = write.told
        block = self.block_at(copy.target_region, copy.target_offset)
        record = self.live.get(told.attempt)
        if record is None or self.owner.get(block) != told.attempt:
            self.fail(f"a byte of {told.attempt} lands in block {block}, which is not its own")
            return
        if record.session != told.session:
            self.fail(f"a byte of another session lands in block {block} of {told.attempt}")
        if not self.node.pools[block[0]].incoming[block[1]]:
            self.fail(f"a byte of {told.attempt} lands in block {block}, which awaits none")
        marks = self._marks[rank][copy.target_region]
        words = slice(copy.target_offset // 8, (copy.target_offset + copy.length) // 8)
        if (marks[words] == record.serial).any():
            self.fail(f"block {block} is written twice for {told.attempt}")
        marks[words] = record.serial

    def check_pools(self) -> None:
        """See `Laws.check_pools`."""
        for (g, block), name in self.owner.items():
            if not self.node.pools[g].incoming[block]:
                self.fail(f"{name} may be written to block {block} of group {g}, which is free")


def _says_unknown(action: Any) -> bool:
    message = action.message if isinstance(action, Send) else None
    return isinstance(message, Refused) and message.code == "unknown_session"

"""What must hold after every event, kept as accounts of their own beside those of the machines.

They hear every event that a machine takes and every action that it answers with, and every run of
bytes that is read or lands. Whatever they find is a `ViolationError`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from kvbaton.connectors.layout import KVLayout
from kvbaton.connectors.protocol import events
from kvbaton.connectors.protocol.checks import first_token
from kvbaton.messages import control
from kvbaton.types import Attempt, NodeId
from tests.simulator.executor import kv_of
from tests.simulator.node import SimulatedNode
from tests.simulator.world import ByteRun, NodeWatcher, SimulatedWrite

Block = tuple[int, int]
"""Group and physical number."""


def attempt_of(message: control.TransferMessage) -> Attempt:
    """What a message is about."""
    return Attempt(message.transfer_id, message.attempt)


class Laws:
    """What holds on either side.

    Args:
        node: whose machine is watched.
    """

    def __init__(self, node: SimulatedNode) -> None:
        self.node, self.world, self.fail = node, node.world, node.fail
        self.stale = 0
        self._last: dict[bytes, int] = {}

    def saw(self, event: Any, actions: Sequence[Any]) -> None:
        """Its machine has answered an event."""
        message = event.message if isinstance(event, events.Received) else None
        if message is None:
            self.world.note(self.node.name, event)
        self.comes(event)
        if message is not None and self._is_fresh(message, actions):
            if self.world.garbled.get((message.session, message.seq)) == message:
                self.check_refusal(message, actions)
        for action in actions:
            if isinstance(action, events.SendMessage):
                answer = action.message
                self.world.note(self.node.name, answer)
                self.sent(answer)
                # What is said of an attempt because of a message goes to who sent it.
                if isinstance(message, control.TransferMessage) and isinstance(
                    answer, control.TransferMessage | control.Refused
                ):
                    same = attempt_of(message) == (answer.transfer_id, answer.attempt)
                    if same and message.session != answer.session:
                        self.fail(f"{message} of one session leads to {answer} in another")
        self.happened(event, actions)

    def _is_fresh(self, message: Any, actions: Sequence[Any]) -> bool:
        """Whether a message is newer than all of its session before; else it may move nothing."""
        answers = [a.message for a in actions if isinstance(a, events.SendMessage)]
        refusals = [answer for answer in answers if isinstance(answer, control.Refused)]
        if isinstance(message, control.Refused) and message.transfer_id is None:
            return True
        last = self._last.get(message.session, -1)
        if not any(refusal.code == "unknown_session" for refusal in refusals):
            self._last[message.session] = max(last, message.seq)  # an unknown one has no last
        if message.seq > last:
            return True
        self.stale += 1
        if isinstance(message, control.Hello):
            lives = self.world.processes.get(message.sender.node)
            dead = lives is None or lives.id != message.sender or not lives.alive
            # Held up for longer than P remembers a dead generation's sessions, it opens one that
            # nobody uses; idle, it ends by itself. A living generation's is refused: it has begun
            # a later session.
            if dead:
                return False
        if len(refusals) < len(actions):
            self.fail(f"{message} is stale, and was answered by {actions}")
        return False

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

    def check_pools(self) -> None:
        """Compare the accounts with the pools' marks."""


# --- P ---


@dataclass
class SourceAccount:
    """An attempt on P, from `Engage` to `Release`; `pinned_for` whom, if by block keys."""

    pinned_for: NodeId | None = None
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
        self.reserved: dict[tuple[bytes, Attempt], control.Reserve] = {}
        self.accepted: dict[Attempt, set[bytes]] = {}
        self.open: dict[bytes, NodeId] = {}
        self._units: dict[bytes, int] = {}
        self._asked: SourceAccount | None = None
        self.to_evict: list[tuple[list[Any], tuple[tuple[int, int], ...]]] = []

    def comes(self, event: Any) -> None:
        """See `Laws.comes`."""
        message = event.message if isinstance(event, events.Received) else None
        self._asked = None
        if isinstance(message, control.Ack | control.Reserve):
            name = attempt_of(message)
            self._asked = self.live.get(name)
            if isinstance(message, control.Reserve) and message.session not in self.accepted.get(
                name, ()
            ):
                self.reserved[message.session, name] = message  # perhaps

    def check_refusal(self, message: Any, actions: Sequence[Any]) -> None:
        """See `Laws.check_refusal`."""
        if isinstance(message, control.Ack) and self._asked is None:
            return
        if not any(
            isinstance(a, events.SendMessage) and isinstance(a.message, control.Refused)
            for a in actions
        ):
            self.fail(f"{message} is nonsense, and was not refused")

    def sent(self, message: Any) -> None:
        """See `Laws.sent`."""
        if isinstance(message, control.Drained):
            name = attempt_of(message)
            for write in self.world.writes:
                if write.told.attempt == name and write.told.session == message.session:
                    if write.may_land and write.peer.near.node is self.node:
                        self.fail(f"Drained of {name}, and a write may still land")
        elif isinstance(message, control.SessionDrained):
            for write in self.world.writes:
                ours = write.peer.near.node is self.node
                if write.told.session in message.over and write.may_land and ours:
                    self.fail(f"{message}, and a write of {write.told.attempt} may still land")
        elif isinstance(message, control.Accepted):
            name = attempt_of(message)
            self.accepted.setdefault(name, set()).add(message.session)
            self.world.heard.add((message.session, name))
        elif isinstance(message, control.Complete):
            self.node.check_first_tokens(message)

    def happened(self, event: Any, actions: Sequence[Any]) -> None:
        """See `Laws.happened`."""
        refused = [a.attempt for a in actions if isinstance(a, events.RefuseAnnounce)]
        for action in actions:
            match action:
                case events.Engage(attempt=attempt):
                    if attempt in self.live or self._is_remembered(attempt):
                        self.fail(f"{attempt} lives twice")
                    asking = self.open[event.message.session] if action.keys else None
                    self.live[attempt] = SourceAccount(asking)
                case events.Post():
                    self._post(action)
                case events.StopSource():
                    if action.attempt in self.live:
                        self.live[action.attempt].stopped = True
                case events.Release():
                    name = action.attempt
                    if self.live.pop(name, None) is None:
                        self.fail(f"{name} is released, and was not engaged")
                    self.over[name] = self.node.clock
                    own = (w for w in self.world.writes if w.peer.near.node is self.node)
                    if any(write.told.attempt == name and write.reads for write in own):
                        self.fail(f"{name} is released, and a write still reads it")
                case events.SendMessage(message=control.Drained() as drained):
                    # One that was never engaged is over as soon as that is said, asked for or not.
                    name = attempt_of(drained)
                    elsewhere = self.accepted.get(name, set()) - {drained.session}
                    if name not in self.live and not elsewhere:
                        self.over.setdefault(name, self.node.clock)
                case events.EvictSource():
                    if action.attempt in self.live:
                        self.to_evict.append((self.live[action.attempt].spans, action.bad))
                case events.OpenPeer():
                    if self.world.processes[action.node.node].identity != self.node.identity:
                        self.fail(f"{action.node.node} serves another model")
                    self.open[action.session] = action.node
                    # Tokens between two borders at which blocks of both sides begin.
                    theirs = msgspec.msgpack.decode(action.ranks[0].layouts, type=list[KVLayout])
                    both = (*self.node.executor.layouts[0], *theirs)
                    self._units[action.session] = math.lcm(*(one.block_size for one in both))
                case events.ClosePeer():
                    self.open.pop(action.session, None)
        match event:
            case events.BlocksReady():
                if (record := self.live.get(event.attempt)) is not None:
                    record.held += self.blocks_of(event.spans)
                    record.spans.append(event.spans)
            case events.Received():
                self._received(event.message, actions)
            case events.PeerGone():
                if event.node in self.open.values():
                    self.fail(f"{event.node.node} is gone, and a session with it stays open")
            case events.Announce():
                if self._is_remembered(event.attempt) and not refused:
                    self.fail(f"{event.attempt} is over, and is taken again")

    def _is_remembered(self, name: Attempt) -> bool:
        ended = self.over.get(name)
        return ended is not None and self.node.clock < ended + self.node.timers.tombstone

    def _post(self, action: events.Post) -> None:
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

    def _received(self, message: Any, actions: Sequence[Any]) -> None:
        if isinstance(message, control.Ack) and message.verdict == "mismatch":
            answers = [a.message for a in actions if isinstance(a, events.SendMessage)]
            refused = any(isinstance(answer, control.Refused) for answer in answers)
            record = self._asked
            if record is not None and not record.evicted and not refused:
                record.evicted = any(isinstance(a, events.EvictSource) for a in actions)
                if not record.evicted and actions:  # without any action it was dropped
                    self.fail(f"{message} evicts nothing")

    def read(self, write: SimulatedWrite, run: ByteRun) -> None:
        """A write reads our memory."""
        g, block = self.block_at(run.source_region, run.source_offset)
        if self.node.alive and not self.node.pool.outgoing[block]:
            self.fail(f"{write.told} reads block {block} of group {g}, which nobody holds")

    def check_pools(self) -> None:
        """See `Laws.check_pools`."""
        pinned = Counter[NodeId]()
        for name, record in self.live.items():
            for g, block in record.held:
                if not self.node.pool.outgoing[block]:
                    self.fail(f"{name} may read block {block} of group {g}, which nobody holds")
            if record.pinned_for is not None:
                pinned[record.pinned_for] += len(record.held)
        for target, count in pinned.items():
            if 4 * count > self.node.pool.num_blocks:
                self.fail(f"{count} blocks are pinned by key for {target.node} alone")
        if 2 * pinned.total() > self.node.pool.num_blocks:
            self.fail(f"{pinned.total()} blocks are pinned by key")
        for all_spans, bad in self.to_evict:
            for g, group in ((g, group) for spans in all_spans for g, group in enumerate(spans)):
                size = self.node.executor.layouts[0][g].block_size
                for span in group:
                    for n, block in enumerate(span.blocks, span.first):
                        hit = any(low < (n + 1) * size and n * size < high for low, high in bad)
                        if hit and self.node.pool.keys[block] is not None:
                            self.fail(f"block {block} of group {g} is bad, and stays in the cache")
        self.to_evict.clear()


# --- D ---


@dataclass
class TargetAccount:
    """An attempt on D, from `Start` to `Unquarantine`."""

    order: events.Start
    serial: int
    outcome: str = ""
    session: bytes = b""
    told: control.Reserve | None = None
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
        self.fetched = 0
        self.fencing: dict[NodeId, set[bytes]] = {}
        self.mismatches = 0
        self._marks = [
            [np.zeros(words[rank].size, np.int64) for words in node.executor.words]
            for rank in range(node.shape.ranks)
        ]

    def check_refusal(self, message: Any, actions: Sequence[Any]) -> None:
        """See `Laws.check_refusal`."""
        record = self.live.get(attempt_of(message))
        if record is None or record.outcome or record.session != message.session:
            return
        if not any(isinstance(action, events.Fail) for action in actions):
            self.fail(f"{message} is nonsense, and {record.order.attempt} goes on")

    def comes(self, event: Any) -> None:
        """See `Laws.comes`."""
        record = self.live.get(event.attempt) if hasattr(event, "attempt") else None
        match event:
            case events.Start():
                if record is not None:
                    self.fail(f"{event.attempt} is started twice")
                self.started += 1
                record = TargetAccount(event, self.started, blocks=self.blocks_of(event.spans))
                self.live[event.attempt] = record
                for block in record.blocks:
                    if block in self.owner:
                        self.fail(f"block {block} is reserved for two")
                    self.owner[block] = event.attempt
            case events.CancelTarget():
                if record is not None and not record.outcome:
                    record.outcome = "cancelled"
                    self.outcomes["cancelled"] += 1
            case events.Verified() if event.bad:
                self.mismatches += 1
                expected = self.world.weather.rot or self.world.weather.nonsense
                if not expected and record is not None and not record.outcome:
                    self.fail(f"digests of {event.attempt} differ, and nothing rots")

    def sent(self, message: Any) -> None:
        """See `Laws.sent`."""
        if not isinstance(message, control.Reserve):
            return
        record = self.live.get(attempt_of(message))
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
                case events.Deliver():
                    record = self._settle(action.attempt, "delivered")
                    self._check_bytes(record, action.num_tokens, "is delivered")
                    self.fetched += bool(record.order.keys)
                case events.Fail():
                    record = self._settle(action.attempt, "failed")
                    self._check_bytes(record, action.valid_through, "has failed")
                    left = self.world.clients_left and "request was aborted" in action.reason
                    if self.world.weather.calm and not record.order.keys and not left:
                        self.fail(f"{action} in calm weather")
                case events.Unquarantine():
                    self._unquarantine(action.attempt)
                case events.OpenPeer():
                    self.sessions[action.session] = action.node
                case events.Fence():
                    self.fences += 1
                    sessions = {s for s, node in self.sessions.items() if node == action.node}
                    self.fencing.setdefault(action.node, sessions)
                    if self.world.weather.calm:
                        self.fail(f"{action.node} is fenced in calm weather")
        for action in actions:
            if isinstance(action, events.OpenPeer):
                self._check_superseded(action.node)
        match event:
            case events.Landed():
                known = self.live.get(event.attempt)
                name = (event.attempt, event.write, event.start, event.end)
                if known is not None and name in self.world.garbled_notices:
                    over = known.outcome in ("cancelled", "failed")
                    if known.session == event.session and not over:
                        self.fail(f"{event} is nonsense, and its attempt goes on")
            case events.PeerGone():
                for attempt, record in self.live.items():
                    if not record.outcome and self.sessions.get(record.session) == event.node:
                        self.fail(f"{event.node.node} is gone, and {attempt} waits for it")
            case events.Fenced():
                # What was known of a peer when its fence began is free once that has held.
                sessions = self.fencing.pop(event.node)
                for attempt, record in self.live.items():
                    if record.session in sessions:
                        self.fail(f"{event.node.node} is fenced, and {attempt} stays")

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
        first = first_token(order.spans, executor.layouts[0])
        for g, spans in enumerate(order.spans):
            needed = max(first, executor.first_needed(g, order.num_tokens))
            for span in spans:
                wrong = executor.differs(g, span.first, span.blocks, kv, needed)
                if wrong is not None:
                    self.fail(f"{order.attempt} {what}, but group {g} holds wrong bytes: {wrong}")

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

    def _check_superseded(self, node: NodeId) -> None:
        """Who answers at an address ends the former life of the node there."""
        present = self.world.processes[node.node]
        for name, record in self.live.items():
            peer = self.sessions.get(record.session, node)
            if peer == node or peer.node != node.node or peer in self.fencing:
                continue
            if present.id == node and present.address == record.order.address:
                self.fail(f"{node.node} lives anew, and {name} waits for its former life")

    def landed(self, write: SimulatedWrite, rank: int, run: ByteRun) -> None:
        """Bytes land in our memory."""
        told = write.told
        block = self.block_at(run.target_region, run.target_offset)
        record = self.live.get(told.attempt)
        if record is None or self.owner.get(block) != told.attempt:
            self.fail(f"a byte of {told.attempt} lands in block {block}, which is not its own")
            return
        if record.session != told.session:
            self.fail(f"a byte of another session lands in block {block} of {told.attempt}")
        if not self.node.pool.incoming[block[1]]:
            self.fail(f"a byte of {told.attempt} lands in block {block}, which awaits none")
        marks = self._marks[rank][run.target_region]
        words = slice(run.target_offset // 8, (run.target_offset + run.length) // 8)
        if (marks[words] == record.serial).any():
            self.fail(f"block {block} is written twice for {told.attempt}")
        marks[words] = record.serial

    def check_pools(self) -> None:
        """See `Laws.check_pools`."""
        for (g, block), name in self.owner.items():
            if not self.node.pool.incoming[block]:
                self.fail(f"{name} may be written to block {block} of group {g}, which is free")


class NodeLaws(NodeWatcher):
    """What must hold on a node.

    Attributes:
        source: its laws as one, if it is.
        target: likewise.
        sides: those of its two, by name.
    """

    def __init__(self, node: SimulatedNode) -> None:
        self._fail = node.fail
        self.source = SourceLaws(node) if node.shape.is_source else None
        self.target = TargetLaws(node) if node.shape.is_target else None
        both = {"source": self.source, "target": self.target}
        self.sides = {name: laws for name, laws in both.items() if laws is not None}

    def saw(self, side: str, event: Any, actions: Sequence[Any]) -> None:
        """See `NodeWatcher.saw`."""
        self.sides[side].saw(event, actions)

    def read(self, write: SimulatedWrite, run: ByteRun) -> None:
        """See `NodeWatcher.read`."""
        if self.source is None:
            self._fail(f"{write.told} reads the memory of no source")
        else:
            self.source.read(write, run)

    def landed(self, write: SimulatedWrite, rank: int, run: ByteRun) -> None:
        """See `NodeWatcher.landed`."""
        if self.target is None:
            self._fail(f"{write.told} lands in the memory of no target")
        else:
            self.target.landed(write, rank, run)

    def check_pools(self) -> None:
        """See `NodeWatcher.check_pools`."""
        for laws in self.sides.values():
            laws.check_pools()

"""Saves blocks to a store: decides which blocks of the prefix cache are saved.

Blocks to save are held *outgoing*, a few batches at a time. A store that is too slow loses saves;
it never delays a step.

If several nodes share a store, the node that computed a block saves it. Before a save, nodes look
up whether the block is there, or claim it if the store supports claims. Blocks that the target of a
hand-over received are saved by their source; the target saves them only if they are still missing
when the request ends.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

from kvbaton.connectors.objects import HEADER_BYTES, ObjectForm
from kvbaton.connectors.store import Hints
from kvbaton.engine.block_pool import NULL_BLOCK
from kvbaton.engine.kv_connector import KVConnector
from kvbaton.engine.live_requests import LiveRequests
from kvbaton.engine.request import Request, Sequence, SequenceState
from kvbaton.engine.store_calls import CircuitBreaker
from kvbaton.engine.store_worker import BlockSave, SaveBlocks, StoreWorker
from kvbaton.messages.engine import AddRequest, Output
from kvbaton.types import BlockSpan, Spans

BATCH_BLOCKS = 64
"""Maximum number of blocks saved with one call. Blocks of saves in flight are at most a quarter of
the pool, since a store that hangs never gives them back."""
SAVES_IN_FLIGHT = 2
QUEUE_SHARE = 4
"""Blocks waiting to be saved are at most the pool divided by this."""
SCARCE_SHARE = 16
"""Saves not begun are given up when fewer blocks than the pool divided by this are free."""
KNOWN_KEYS = 1 << 17
"""Maximum number of objects remembered to be in the store."""
SAVE_S = 30.0
"""Seconds for a save, after which nothing is saved to the store for a while."""
WARN_S = 60.0
"""Seconds between log lines about a store without room."""

logger = logging.getLogger(__name__)


class _Received(NamedTuple):
    """A block that another node computed: its group, its number there, and its key."""

    group: int
    number: int
    block_key: bytes


class _Announced(NamedTuple):
    """An object that other connectors were told to be in the store."""

    group: int
    block_key: bytes


def tenant_of(request: AddRequest) -> str:
    """The tenant of a request's objects: its own, or one shared by all requests with its salt.

    Stores and metrics show it, so it is hashed if it is the salt or has unusual characters.
    """
    if request.tenant and re.fullmatch(r"[\w.-]{1,64}", request.tenant, re.ASCII):
        return request.tenant
    secret = request.tenant or request.cache_salt
    return secret and hashlib.sha256(secret.encode()).hexdigest()[:16]


def num_bytes(forms: SequenceOf[ObjectForm], groups: Iterable[int]) -> int:
    """Total size in bytes of objects of one block each, in these KV groups."""
    return sum(HEADER_BYTES + forms[group].num_bytes for group in groups)


class StoreSaves:
    """Decides what is saved, and remembers what the store has.

    Args:
        scheduler: Scheduler of the live requests.
        worker: Carries orders out.
        ttl_s: Seconds after which saved objects expire; None for never.

    Attributes:
        breaker: Open while nothing is saved.
        counts: ``save blocks OUTCOME`` and ``bytes save``, since the start.
        seconds: Total time of saves.
    """

    def __init__(self, scheduler: LiveRequests, worker: StoreWorker, ttl_s: float | None) -> None:
        self.breaker = CircuitBreaker(f"saves of {worker.name}")
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0
        self._scheduler = scheduler
        self._blocks = scheduler.blocks
        self._clock = scheduler.clock
        self._worker = worker
        self._ttl_s = ttl_s
        self._shared = worker.calls.capabilities.shared
        self._received: dict[Request, list[_Received]] = {}  # saved if their source does not
        self._queue: deque[BlockSave] = deque()
        self._saving: set[SaveBlocks] = set()
        self._unsaved: set[bytes] = set()
        self._known: OrderedDict[bytes, _Announced | None] = OrderedDict()
        self._warn_at = 0.0

    # --- what may be saved ---

    def committed(self, sequence: Sequence, g: int, first: int, end: int) -> None:
        """Save blocks [first, end) of a sequence, which were added to the prefix cache."""
        if self.breaker.is_open and not self.breaker.due(self._clock()):
            self.counts["save blocks dropped"] += end - first
            return
        size, pool = self._blocks.groups[g].block_size, self._blocks.pool
        chain, table, by_key = sequence.chain(size), sequence.tables[g], pool.by_key[g]
        request = sequence.request
        for i in range(first, end):
            if by_key.get(chain[i]) != table[i]:
                continue
            summed = i * size >= request.received
            if self._shared and not summed:
                self._received.setdefault(request, []).append(_Received(g, i, chain[i]))
                continue
            self._enqueue(request, g, i, table[i], chain[i], summed=summed)

    def finished(self, request: Request) -> None:
        """Save what an ended request had received, if it is still cached."""
        by_key = self._blocks.pool.by_key
        for g, number, block_key in self._received.pop(request, ()):
            if (block := by_key[g].get(block_key)) is not None:
                self._enqueue(request, g, number, block, block_key, summed=False)

    def _enqueue(
        self, request: Request, g: int, number: int, block: int, block_key: bytes, *, summed: bool
    ) -> None:
        """Queue a block for saving, unless it is known to be stored or the queue is full."""
        key = self._worker.forms[g].key(block_key)
        if key in self._known or key in self._unsaved:
            return
        pool, group = self._blocks.pool, self._blocks.groups[g]
        if len(self._queue) >= max(8, pool.usable // QUEUE_SHARE):
            self.counts["save blocks dropped"] += 1
            return
        hints = Hints(
            namespace=self._worker.namespace,
            tenant=tenant_of(request.spec),
            depth=number,
            uses=pool.refs[block],
            priority=request.spec.priority,
            ttl_s=self._ttl_s,
        )
        pool.hold_outgoing([block])
        self._unsaved.add(key)
        self._queue.append(BlockSave(g, group.span_number(number), block, key, summed, hints))

    # --- saves in flight ---

    def submit(self, now: float) -> None:
        """Submit the next saves; drop them if the store is left alone or blocks are scarce."""
        if any(save.deadline <= now for save in self._saving):
            self.breaker.failed(now, "a save was late")
        left_alone = self.breaker.is_open and not self.breaker.due(now)
        if left_alone or self._is_scarce():
            self.drop()
        most = min(BATCH_BLOCKS, max(1, self._blocks.pool.usable // 4 // SAVES_IN_FLIGHT))
        while self._queue and len(self._saving) < SAVES_IN_FLIGHT:
            count = min(most, len(self._queue))
            taken = tuple(self._queue.popleft() for _ in range(count))
            saves = SaveBlocks(saves=taken, deadline=now + SAVE_S)
            self._saving.add(saves)
            self._worker.submit(saves)

    def fail_crowded_out(self, now: float) -> list[Output]:
        """End the next requests that lack blocks which overdue saves hold."""
        outputs, scheduler, usable = list[Output](), self._scheduler, self._blocks.pool.usable
        late = [order for order in self._saving if order.deadline <= now]
        kept = {save.block for order in late for save in order.saves}
        while kept:
            running = scheduler.running if len(scheduler.running) == 1 else []
            for sequence in (*scheduler.waiting[:1], *running):
                tables, total = sequence.tables, len(sequence.tokens)
                if sequence.state is SequenceState.RUNNING:
                    total += 1
                elif sequence.request.reads_cache:
                    tables = self._blocks.match_sequence(sequence).tables
                held = kept.union(*tables) - {NULL_BLOCK}
                need = self._blocks.need(tables, total, start=sequence.num_scheduled)
                if need + len(held) > usable:
                    error = (
                        f"{total} tokens lack {need + len(held) - usable} KV blocks: the store "
                        f"{self._worker.name} has been saving {len(kept)} of {usable} for more "
                        f"than {SAVE_S:g} s"
                    )
                    outputs += scheduler.end(sequence.request, "error", error)
                    break
            else:
                break
        return outputs

    def next_deadline(self) -> float | None:
        """Time when the next save in flight is overdue."""
        now = self._clock()
        return min((o.deadline for o in self._saving if o.deadline > now), default=None)

    def _is_scarce(self) -> bool:
        """Whether few blocks are free, or the next request lacks blocks that wait to be saved."""
        pool, waiting = self._blocks.pool, self._scheduler.waiting
        if pool.num_free < max(1, pool.usable // SCARCE_SHARE):
            return True
        if not self._queue or not waiting:
            return False
        need = self._blocks.need(self._blocks.empty(), len(waiting[0].tokens) + 1)
        return 0 < need - pool.num_free <= len(self._queue)

    def drop(self) -> None:
        """Give up all saves that have not begun."""
        self.counts["save blocks dropped"] += len(self._queue)
        self._release(self._queue)
        self._queue.clear()

    def saved(self, order: SaveBlocks) -> list[bytes]:
        """Handle a finished batch; returns the keys of objects that the store has."""
        self._saving.remove(order)
        if order.error is not None:
            self.breaker.failed(self._clock(), "a save failed")
        else:
            self.breaker.worked()
        stored = [save for save, ok in zip(order.saves, order.stored, strict=True) if ok]
        for g in range(len(self._blocks.groups)):
            # Announce the blocks that were stored and are still in the prefix cache.
            held = {s.key: self._blocks.pool.keys[s.block] for s in stored if s.group == g}
            keys = {key: block_key for key, block_key in held.items() if block_key is not None}
            self._scheduler.connectors.call(
                KVConnector.saved, self._worker.name, g, list(keys.values())
            )
            for key, block_key in keys.items():
                self._known[key] = _Announced(g, block_key)
        self._release(order.saves)
        self.note_known((save.key, True) for save in stored)
        outcome = "refused" if order.error is None else "failed"
        written = [save.group for save in stored if save.key not in order.left]
        self.counts["save blocks stored"] += len(written)
        self.counts["save blocks left"] += len(order.left)
        lost = len(order.saves) - len(order.left) - len(written)
        self.counts[f"save blocks {outcome}"] += lost
        if lost and order.error is None and (now := self._clock()) >= self._warn_at:
            self._warn_at = now + WARN_S
            told = "%s has no room: it refused %d of %d blocks"
            logger.warning(told, self._worker.name, lost, len(order.saves))
        self.counts["bytes save"] += num_bytes(self._worker.forms, written)
        self.seconds += order.seconds
        return [save.key for save in stored]

    def _release(self, saves: Iterable[BlockSave]) -> None:
        for save in saves:
            self._blocks.pool.release_outgoing([save.block])
            self._unsaved.discard(save.key)

    # --- what the store has ---

    def note_known(self, found: Iterable[tuple[bytes, bool]]) -> None:
        """Note for each object whether the store has it."""
        for key, present in found:
            if present:
                self._known.setdefault(key, None)
                self._known.move_to_end(key)
            else:
                self._known.pop(key, None)
        while len(self._known) > KNOWN_KEYS:
            self._known.popitem(last=False)

    def forget(self, keys: Iterable[bytes] | None = None) -> None:
        """Note that objects, or all, are gone, and tell connectors that were told of them."""
        gone: list[list[bytes]] = [[] for _ in self._blocks.groups]
        for key in list(self._known) if keys is None else keys:
            announced = self._known.pop(key, None)
            if announced is not None:
                gone[announced.group].append(announced.block_key)
        for g, block_keys in enumerate(gone):
            if block_keys:
                self._scheduler.connectors.call(
                    KVConnector.removed, self._worker.name, g, block_keys
                )

    # --- accounts ---

    @property
    def num_blocks(self) -> int:
        """Number of blocks that wait to be saved or are being saved."""
        return len(self._queue) + sum(len(order.saves) for order in self._saving)

    def busy(self) -> bool:
        """Whether saves wait or are in flight; overdue ones do not count."""
        return bool(self._queue) or self.next_deadline() is not None

    def held_blocks(self) -> list[Spans]:
        """Blocks that wait to be saved or are being saved, each by itself."""
        saves = [*self._queue, *(save for order in self._saving for save in order.saves)]
        groups = range(len(self._blocks.groups))
        return [
            tuple((BlockSpan(s.number, (s.block,)),) if g == s.group else () for g in groups)
            for s in saves
        ]

    def state(self) -> dict[str, Any]:
        """Its part of the debugging dump."""
        return {
            "saves_queued": len(self._queue),
            "saves_in_flight": [len(order.saves) for order in self._saving],
            "known": len(self._known),
        }

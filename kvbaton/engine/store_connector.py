"""Keeps blocks in a store and takes them from there: what is looked up, loaded and saved.

A request that the local cache does not cover is looked up when it arrives. It is out of the queue
until the answer or a deadline, so nobody waits behind it. What the store holds beyond the local
prefix is loaded into blocks that are marked *incoming*, as those of a hand-over are; once it is
verified it goes to the prefix cache, and the request goes back to the queue and finds it there.
Who wants the same blocks meanwhile waits for that load. After a load's deadline the request goes on
without it, but the blocks stay incoming until the store is done with them.

Blocks that enter the prefix cache are saved: held *outgoing*, a few batches at a time. A store that
is too slow loses saves, never a step.

This decides and does no I/O; `store_worker.py` carries the orders out (`store_requests.py`).
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kvbaton.connectors.layout import GroupKind
from kvbaton.connectors.objects import HEADER_BYTES, ObjectForm
from kvbaton.engine.kv_connector import PENDING, HeldBlocks, KVConnector, Load, Pending
from kvbaton.engine.request import Request, Sequence, State
from kvbaton.engine.store_requests import (
    Answer,
    CancelLoad,
    LoadBlocks,
    Loaded,
    LookedUp,
    LookUp,
    Order,
    Part,
    ReleasePins,
    Save,
    SaveBlocks,
    Saved,
)
from kvbaton.errors import ConfigError
from kvbaton.messages.engine import Output
from kvbaton.types import BlockSpan, Spans

if TYPE_CHECKING:
    from kvbaton.engine.scheduler import Scheduler
    from kvbaton.engine.store_worker import StoreWorker

BATCH_BLOCKS = 64
"""Saved with one call."""
SAVES_IN_FLIGHT = 2
QUEUE_SHARE = 4
"""At most a quarter of a pool waits to be saved."""
SCARCE_SHARE = 16
"""Saves that have not begun are given up when less than this part of a pool is free."""
KNOWN_KEYS = 1 << 17
"""Objects that are remembered to be in the store."""
PAUSE_S = 1.0
"""For so long no store is asked anything after a lookup was late or failed."""
RETRY_S = 5.0
"""For so long nobody tries to load an object that was bad or late."""


@dataclass(frozen=True, kw_only=True)
class StoreConnectorConfig:
    """What it needs to know.

    Attributes:
        store: name of the store, for metrics.
        forms: of objects, one per KV group.
        lookup_timeout_s: how long a request waits for a lookup.
        load_timeout_s: how long it waits for a load.
    """

    store: str
    forms: tuple[ObjectForm, ...]
    lookup_timeout_s: float
    load_timeout_s: float


@dataclass(eq=False)
class _Lookup:
    """A lookup on its way: of tokens from `start` on, `counts` blocks per group."""

    sequence: Sequence
    start: int
    keys: tuple[bytes, ...]
    counts: list[int]
    deadline: float


@dataclass(eq=False)
class _StoreLoad:
    """A load on its way; `over` once the request goes on without it."""

    load: Load
    parts: tuple[Part, ...]
    deadline: float
    over: bool = False
    followers: list[Sequence] = field(default_factory=list)


class StoreConnector(KVConnector):
    """Decides what is looked up, loaded and saved.

    Args:
        config: its settings.
        scheduler: has the live requests.
        worker: carries orders out.

    Raises:
        ConfigError: a group's blocks can't be kept in a store.
    """

    name = "store"
    medium = "store"

    def __init__(
        self, config: StoreConnectorConfig, scheduler: Scheduler, worker: StoreWorker
    ) -> None:
        self.worker = worker
        self.wake_fds = (worker.wake_fd,)
        self._config = config
        self._scheduler = scheduler
        self._blocks = scheduler.blocks
        self._clock = scheduler.clock
        if any(group.kind is not GroupKind.FULL for group in self._blocks.groups):
            raise ConfigError("--store", "only models with full attention can use a store")
        self._tickets = itertools.count(1)
        self._lookups: dict[int, _Lookup] = {}
        self._stored: dict[Request, range] = {}  # tokens beyond the local cache, while unused
        self._loads: dict[int, _StoreLoad] = {}
        self._loading: dict[bytes, _StoreLoad] = {}
        self._pins: list[tuple[Request, tuple[int, ...]]] = []
        self._queue: deque[Save] = deque()
        self._saving: dict[int, tuple[Save, ...]] = {}
        self._unsaved: set[bytes] = set()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._bad: dict[bytes, float] = {}
        self._lookups_from = 0.0
        self._counts: Counter[str] = Counter()
        self._seconds = {"load": 0.0, "save": 0.0}

    # --- lookups ---

    @override
    def added(self, sequence: Sequence) -> bool:
        """Ask for what the local cache lacks of a new request; False if there is nothing to ask."""
        now = self._clock()
        if not (self._blocks.caching and sequence.request.reads_cache) or now < self._lookups_from:
            return False
        total = len(sequence.tokens)
        start = self._blocks.match(self._blocks.chains(sequence), total).num_tokens
        parts = self._parts(sequence, start, total - total % self._blocks.alignment)
        keys = tuple(key for part in parts for key in part.keys)
        if not keys:
            return False
        ticket = next(self._tickets)
        deadline = now + self._config.lookup_timeout_s
        counts = [len(part.keys) for part in parts]
        self._lookups[ticket] = _Lookup(sequence, start, keys, counts, deadline)
        self._submit(LookUp(ticket, keys))
        return True

    def _parts(self, sequence: Sequence, start: int, end: int) -> tuple[Part, ...]:
        """Blocks of tokens [start, end), per group; physical ones as far as there are any."""
        parts = []
        for g, (group, form) in enumerate(
            zip(self._blocks.groups, self._config.forms, strict=True)
        ):
            first, past = start // group.block_size, end // group.block_size
            chain = sequence.chain(group.block_size)[first:past]
            blocks = tuple(sequence.tables[g][first:past])
            parts.append(Part(g, first, blocks, tuple(form.key(key) for key in chain)))
        return tuple(parts)

    def _looked_up(self, answer: LookedUp) -> list[Output]:
        ask = self._lookups.pop(answer.ticket, None)
        if ask is None or ask.sequence.state is not State.PARKED:
            self._submit(ReleasePins(answer.pins))
            return []
        if answer.error is not None:
            self._give_up_asking(ask, "failed")
            return []
        self._note_known(zip(ask.keys, answer.present, strict=True))
        request, end = ask.sequence.request, self._end_of(ask, answer.present)
        self._counts["lookups hit" if end > ask.start else "lookups miss"] += 1
        self._stored[request] = range(ask.start, end)
        if answer.pins:
            self._pins.append((request, answer.pins))
        self._scheduler.unpark(ask.sequence)
        return []

    def _end_of(self, ask: _Lookup, present: tuple[bool, ...]) -> int:
        """Where the prefix ends that the store has in all groups."""
        ends, at = [], 0
        for group, count in zip(self._blocks.groups, ask.counts, strict=True):
            there = (*present[at : at + count], False).index(False)
            ends.append(ask.start + there * group.block_size)
            at += count
        return min(ends) - min(ends) % self._blocks.alignment

    def _give_up_asking(self, ask: _Lookup, outcome: str) -> None:
        """The request goes on without the store, and so do others for a while."""
        self._counts[f"lookups {outcome}"] += 1
        self._lookups_from = self._clock() + PAUSE_S
        self._scheduler.unpark(ask.sequence)

    def _note_known(self, found: Iterable[tuple[bytes, bool]]) -> None:
        for key, present in found:
            if present:
                self._known[key] = None
                self._known.move_to_end(key)
            else:
                self._known.pop(key, None)
        while len(self._known) > KNOWN_KEYS:
            self._known.popitem(last=False)

    # --- loads ---

    @override
    def match(self, sequence: Sequence, num_cached: int) -> int | Pending:
        """What the store holds beyond a prefix; pending while it is loaded for another one."""
        stored = self._stored.get(sequence.request, range(0))
        if not stored.start <= num_cached < stored.stop:
            return 0
        size = self._blocks.groups[0].block_size
        key = self._config.forms[0].key(sequence.chain(size)[num_cached // size])
        if self._bad.get(key, 0.0) > self._clock():
            return 0
        if key in self._loading:
            self._loading[key].followers.append(sequence)
            return PENDING
        return stored.stop - num_cached

    @override
    def start_load(self, load: Load) -> None:
        request = load.sequence.request
        del self._stored[request]
        parts = self._parts(load.sequence, load.start, load.end)
        deadline = min(request.deadline, self._clock() + self._config.load_timeout_s)
        begun = _StoreLoad(load, parts, deadline)
        ticket = next(self._tickets)
        self._loads[ticket] = begun
        self._loading |= dict.fromkeys(parts[0].keys, begun)
        self._submit(LoadBlocks(ticket, parts))

    @override
    def started(self, sequence: Sequence) -> None:
        self._stored.pop(sequence.request, None)

    @override
    def finished(self, request: Request) -> None:
        self._stored.pop(request, None)

    def _loaded(self, answer: Loaded) -> list[Output]:
        """The store touches the blocks no more: free them, and use what is right of them."""
        load = self._loads.pop(answer.ticket)
        self._blocks.release_incoming(load.load.spans)
        keys = [key for part in load.parts for key in part.keys]
        self._note_known(zip(keys, answer.good, strict=True))
        good = sum(answer.good)
        self._counts["load blocks ok"] += good
        self._counts["load blocks corrupt"] += answer.corrupt
        self._counts["load blocks missing"] += len(keys) - good - answer.corrupt
        self._counts["bytes load"] += sum(self._sizes(load.parts, answer.good))
        self._seconds["load"] += answer.seconds
        if load.over:
            return []
        valid = self._valid(load, answer.good)
        failed = valid < load.load.end
        self._counts["loads failed" if failed else "loads ok"] += 1
        return self._finish(load, valid, answer.error or "blocks are missing or corrupt", failed)

    def _sizes(self, parts: tuple[Part, ...], good: tuple[bool, ...]) -> Iterable[int]:
        forms = [self._config.forms[part.group] for part in parts for _ in part.keys]
        return (HEADER_BYTES + form.num_bytes for form, ok in zip(forms, good, strict=True) if ok)

    def _valid(self, load: _StoreLoad, good: tuple[bool, ...]) -> int:
        """Tokens of the prefix that is there, in whole blocks of all groups."""
        ends, at = [], 0
        for part, group in zip(load.parts, self._blocks.groups, strict=True):
            there = (*good[at : at + len(part.keys)], False).index(False)
            ends.append(load.load.start + there * group.block_size)
            at += len(part.keys)
        return min(ends) - min(ends) % self._blocks.alignment

    def _finish(self, load: _StoreLoad, valid: int, reason: str, failed: bool) -> list[Output]:
        """Let the request go on with `valid` tokens, and those who waited with it."""
        load.over = True
        for part in load.parts[:1]:
            for i, key in enumerate(part.keys):
                if self._loading.get(key) is load:
                    del self._loading[key]
                if failed and (part.first + i) * self._blocks.groups[0].block_size >= valid:
                    self._bad[key] = self._clock() + RETRY_S
        for follower in load.followers:
            self._scheduler.unpark(follower)
        if failed:
            return self._scheduler.fail_load(load.load, valid, reason)
        return self._scheduler.finish_load(load.load)

    # --- saves ---

    @override
    def committed(self, sequence: Sequence, g: int, first: int, end: int) -> None:
        size, pool = self._blocks.groups[g].block_size, self._blocks.pools[g]
        chain, table = sequence.chain(size), sequence.tables[g]
        most = max(8, pool.usable // QUEUE_SHARE)
        for i in range(first, end):
            key = self._config.forms[g].key(chain[i])
            if pool.by_key.get(chain[i]) != table[i] or key in self._known or key in self._unsaved:
                continue
            if len(self._queue) >= most:
                self._counts["save blocks dropped"] += end - i
                return
            pool.hold_outgoing([table[i]])
            self._unsaved.add(key)
            summed = i * size >= sequence.request.received
            self._queue.append(Save(g, i, table[i], key, summed))

    def _begin_saves(self) -> None:
        if any(pool.num_free < pool.usable // SCARCE_SHARE for pool in self._blocks.pools):
            self._counts["save blocks dropped"] += len(self._queue)
            self._release_saves(self._queue)
            self._queue.clear()
        while self._queue and len(self._saving) < SAVES_IN_FLIGHT:
            count = min(BATCH_BLOCKS, len(self._queue))
            saves = tuple(self._queue.popleft() for _ in range(count))
            ticket = next(self._tickets)
            self._saving[ticket] = saves
            self._submit(SaveBlocks(ticket, saves))

    def _saved(self, answer: Saved) -> list[Output]:
        saves = self._saving.pop(answer.ticket)
        stored = [save for save, ok in zip(saves, answer.stored, strict=True) if ok]
        self._log_saved(stored)
        self._release_saves(saves)
        self._note_known((save.key, True) for save in stored)
        outcome = "refused" if answer.error is None else "failed"
        self._counts["save blocks stored"] += len(stored)
        self._counts[f"save blocks {outcome}"] += len(saves) - len(stored)
        sizes = (HEADER_BYTES + self._config.forms[save.group].num_bytes for save in stored)
        self._counts["bytes save"] += sum(sizes)
        self._seconds["save"] += answer.seconds
        for save in stored:
            self._bad.pop(save.key, None)
        return []

    def _log_saved(self, stored: list[Save]) -> None:
        """Name the blocks that were kept, as far as they are still in the prefix cache."""
        for g, pool in enumerate(self._blocks.pools):
            held = (pool.keys[save.block] for save in stored if save.group == g)
            keys = [key for key in held if key is not None]
            for connector in self._scheduler.connectors:
                connector.saved(self._config.store, g, keys)

    def _release_saves(self, saves: Iterable[Save]) -> None:
        for save in saves:
            self._blocks.pools[save.group].release_outgoing([save.block])
            self._unsaved.discard(save.key)

    # --- the core's loop ---

    @override
    def poll(self, now: float) -> list[Output]:
        outputs = []
        for answer in self.worker.take():
            outputs += self._take(answer)
        outputs += self._expire(now)
        self._begin_saves()
        return outputs

    def _submit(self, order: Order) -> None:
        self.worker.submit((order,))

    def _take(self, answer: Answer) -> list[Output]:
        """Something was done."""
        if isinstance(answer, LookedUp):
            return self._looked_up(answer)
        return self._loaded(answer) if isinstance(answer, Loaded) else self._saved(answer)

    def _expire(self, now: float) -> list[Output]:
        """Go on without what is late; stop what nobody wants any more."""
        for ticket in [t for t, ask in self._lookups.items() if ask.deadline <= now]:
            self._give_up_asking(self._lookups.pop(ticket), "late")
        outputs: list[Output] = []
        for ticket, load in self._loads.items():
            wanted = self._scheduler.is_loading(load.load)
            if load.over or (wanted and load.deadline > now):
                continue
            self._counts["loads late" if wanted else "loads cancelled"] += 1
            self._submit(CancelLoad(ticket))
            reason = f"nothing came within {self._config.load_timeout_s:g} s"
            outputs += self._finish(load, load.load.start, reason, failed=wanted)
        self._bad = {key: until for key, until in self._bad.items() if until > now}
        self._release_pins()
        return outputs

    def _release_pins(self) -> None:
        """Pins last until their request is loaded, runs, or is over."""
        loading = {load.load.sequence.request for load in self._loads.values()}
        kept = []
        for request, pins in self._pins:
            if self._stored.get(request) or request in loading:
                kept.append((request, pins))
            else:
                self._submit(ReleasePins(pins))
        self._pins = kept

    @override
    def next_deadline(self) -> float | None:
        waits = [ask.deadline for ask in self._lookups.values()]
        waits += [load.deadline for load in self._loads.values() if not load.over]
        return min(waits, default=None)

    @override
    def busy(self) -> bool:
        return bool(self._queue or self._saving or self._loads)

    @override
    def close(self) -> None:
        self.worker.close()

    # --- accounts ---

    @override
    def held_blocks(self) -> HeldBlocks:
        saves = [*self._queue, *(save for batch in self._saving.values() for save in batch)]
        groups = range(len(self._blocks.groups))
        reads: list[Spans] = [
            tuple((BlockSpan(s.number, (s.block,)),) if g == s.group else () for g in groups)
            for s in saves
        ]
        return HeldBlocks([load.load.spans for load in self._loads.values()], reads)

    @override
    def counters(self) -> dict[str, float]:
        store, counts = self._config.store, self._counts
        totals = {}
        for kind, outcomes in (
            ("lookups", ("hit", "miss", "failed", "late")),
            ("loads", ("ok", "failed", "late", "cancelled")),
            ("load blocks", ("ok", "missing", "corrupt")),
            ("save blocks", ("stored", "dropped", "refused", "failed")),
        ):
            name = f"kvbaton_store_{kind.replace(' ', '_')}_total"
            for outcome in outcomes:
                count = float(counts[f"{kind} {outcome}"])
                totals[f'{name}{{store="{store}",outcome="{outcome}"}}'] = count
        for way in ("load", "save"):
            label = f'{{store="{store}",direction="{way}"}}'
            totals[f"kvbaton_store_bytes_total{label}"] = float(counts[f"bytes {way}"])
            totals[f"kvbaton_store_seconds_total{label}"] = self._seconds[way]
        return totals

    @override
    def gauges(self) -> dict[str, float]:
        label = f'{{store="{self._config.store}"}}'
        saving = len(self._queue) + sum(map(len, self._saving.values()))
        return {
            f"kvbaton_store_lookups_live{label}": float(len(self._lookups)),
            f"kvbaton_store_loads_live{label}": float(len(self._loads)),
            f"kvbaton_store_saves_queued{label}": float(saving),
            **self.worker.gauges(),
        }

    @override
    def state(self) -> dict[str, Any]:
        now = self._clock()
        return {
            **self.worker.state(),
            "lookups": [
                {"request_id": ask.sequence.request.request_id, "from": ask.start,
                 "blocks": len(ask.keys), "seconds_left": ask.deadline - now}
                for ask in self._lookups.values()
            ],
            "loads": [
                {"request_id": load.load.sequence.request.request_id,
                 "tokens": [load.load.start, load.load.end], "over": load.over,
                 "seconds_left": load.deadline - now, "followers": len(load.followers)}
                for load in self._loads.values()
            ],
            "saves_queued": len(self._queue),
            "saves_in_flight": [len(batch) for batch in self._saving.values()],
            "known": len(self._known),
            "pins": sum(len(pins) for _, pins in self._pins),
        }  # fmt: skip

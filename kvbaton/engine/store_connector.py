"""What the engine wants of its store, and what it makes of the answers: decisions, no I/O.

A request that the local cache does not cover asks the store when it arrives. It is out of the queue
until the answer or a deadline, so nobody waits behind it. What the store holds beyond the local
prefix is loaded into blocks that are marked *incoming*, as those of a hand-over are; once it is
verified it goes to the prefix cache, and the request goes back to the queue and finds it there.
Who wants the same blocks meanwhile waits for that load. After a load's deadline the request goes on
without it, but the blocks stay incoming until the store is done with them.

Blocks that enter the prefix cache are saved: held *outgoing*, a few batches at a time. A store that
is too slow loses saves, never a step.

`store_worker.py` carries the orders out (`store_requests.py`).
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvbaton.connectors.layout import GroupKind
from kvbaton.connectors.objects import HEADER_BYTES, ObjectForm
from kvbaton.engine.kv_cache_manager import Match
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
    """What the stash needs to know.

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
class _Ask:
    """A lookup on its way: of tokens from `start` on, `counts` blocks per group."""

    sequence: Sequence
    start: int
    keys: tuple[bytes, ...]
    counts: list[int]
    deadline: float


@dataclass(eq=False)
class _Load:
    """A load on its way, of tokens [start, end); `over` once the request goes on without it."""

    sequence: Sequence
    start: int
    end: int
    spans: Spans
    parts: tuple[Part, ...]
    deadline: float
    over: bool = False
    followers: list[Sequence] = field(default_factory=list)


class StoreConnector:
    """Decides what is looked up, loaded and saved.

    Args:
        config: its settings.
        scheduler: has the live requests.
        clock: monotonic seconds.

    Attributes:
        on_saved: None, or called with the store, a group and the keys of blocks that it now has.

    Raises:
        ConfigError: a group's blocks can't be kept in a store.
    """

    def __init__(
        self, config: StoreConnectorConfig, scheduler: Scheduler, clock: Callable[[], float]
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._blocks = scheduler.blocks
        self._clock = clock
        if any(group.kind is not GroupKind.FULL for group in self._blocks.groups):
            raise ConfigError("--store", "only models with full attention can use a store")
        self._orders: list[Order] = []
        self._tickets = itertools.count(1)
        self._asks: dict[int, _Ask] = {}
        self._loads: dict[int, _Load] = {}
        self._loading: dict[bytes, _Load] = {}
        self._pins: list[tuple[Request, tuple[int, ...]]] = []
        self._queue: deque[Save] = deque()
        self._saving: dict[int, tuple[Save, ...]] = {}
        self._unsaved: set[bytes] = set()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._bad: dict[bytes, float] = {}
        self._ask_from = 0.0
        self._counts: Counter[str] = Counter()
        self._seconds = {"load": 0.0, "save": 0.0}
        self._blocks.on_commit.append(self.committed)
        self.on_saved: Callable[[str, int, list[bytes]], None] | None = None

    # --- lookups ---

    def ask(self, sequence: Sequence) -> bool:
        """Ask for what the local cache lacks of a new request; False if there is nothing to ask."""
        now = self._clock()
        if not (self._blocks.caching and sequence.request.reads_cache) or now < self._ask_from:
            return False
        total = len(sequence.tokens)
        chains = [sequence.chain(group.block_size) for group in self._blocks.groups]
        start = self._blocks.match(chains, total).num_tokens
        parts = self._parts(sequence, start, total - total % self._blocks.alignment)
        keys = tuple(key for part in parts for key in part.keys)
        if not keys:
            return False
        ticket = next(self._tickets)
        deadline = now + self._config.lookup_timeout_s
        counts = [len(part.keys) for part in parts]
        self._asks[ticket] = _Ask(sequence, start, keys, counts, deadline)
        self._orders.append(LookUp(ticket, keys))
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
        ask = self._asks.pop(answer.ticket, None)
        if ask is None or ask.sequence.state is not State.PARKED:
            self._orders.append(ReleasePins(answer.pins))
            return []
        if answer.error is not None:
            self._give_up_asking(ask, "failed")
            return []
        self._note_known(zip(ask.keys, answer.present, strict=True))
        request, end = ask.sequence.request, self._end_of(ask, answer.present)
        self._counts["lookups hit" if end > ask.start else "lookups miss"] += 1
        request.stored = range(ask.start, end)
        if answer.pins:
            self._pins.append((request, answer.pins))
        self._scheduler.unpark(ask.sequence)
        return []

    def _end_of(self, ask: _Ask, present: tuple[bool, ...]) -> int:
        """Where the prefix ends that the store has in all groups."""
        ends, at = [], 0
        for group, count in zip(self._blocks.groups, ask.counts, strict=True):
            there = (*present[at : at + count], False).index(False)
            ends.append(ask.start + there * group.block_size)
            at += count
        return min(ends) - min(ends) % self._blocks.alignment

    def _give_up_asking(self, ask: _Ask, outcome: str) -> None:
        """The request goes on without the store, and so do others for a while."""
        self._counts[f"lookups {outcome}"] += 1
        self._ask_from = self._clock() + PAUSE_S
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

    # --- loads: what admission and planner use ---

    def offers(self, sequence: Sequence, match: Match) -> bool:
        """Whether the store holds more of a waiting sequence than the local cache."""
        stored = sequence.request.stored
        if not stored.start <= match.num_tokens < stored.stop:
            return False
        return self._bad.get(self._next_key(sequence, match), 0.0) <= self._clock()

    def is_coming(self, sequence: Sequence, match: Match) -> bool:
        """Whether the next block that a sequence lacks is being loaded for another one."""
        return self._next_key(sequence, match) in self._loading

    def _next_key(self, sequence: Sequence, match: Match) -> bytes:
        size = self._blocks.groups[0].block_size
        return self._config.forms[0].key(sequence.chain(size)[match.num_tokens // size])

    def follow(self, sequence: Sequence, match: Match) -> None:
        """Let a sequence wait, outside of the queue, for a load of another one."""
        self._scheduler.park(sequence)
        self._loading[self._next_key(sequence, match)].followers.append(sequence)

    def load(self, sequence: Sequence, match: Match) -> None:
        """Take blocks for what the store has beyond a local prefix, and have them filled."""
        request, start, end = sequence.request, match.num_tokens, sequence.request.stored.stop
        self._scheduler.adopt(sequence, match)
        spans = self._blocks.reserve(sequence.tables, end)
        self._scheduler.load(sequence)
        parts = self._parts(sequence, start, end)
        deadline = min(request.deadline, self._clock() + self._config.load_timeout_s)
        load = _Load(sequence, start, end, spans, parts, deadline)
        ticket = next(self._tickets)
        self._loads[ticket] = load
        self._loading |= dict.fromkeys(parts[0].keys, load)
        self._orders.append(LoadBlocks(ticket, parts))

    def _loaded(self, answer: Loaded) -> list[Output]:
        """The store touches the blocks no more: free them, and use what is right of them."""
        load = self._loads.pop(answer.ticket)
        self._blocks.release_incoming(load.spans)
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
        failed = valid < load.end
        self._counts["loads failed" if failed else "loads ok"] += 1
        return self._finish(load, valid, answer.error or "blocks are missing or corrupt", failed)

    def _sizes(self, parts: tuple[Part, ...], good: tuple[bool, ...]) -> Iterable[int]:
        forms = [self._config.forms[part.group] for part in parts for _ in part.keys]
        return (HEADER_BYTES + form.num_bytes for form, ok in zip(forms, good, strict=True) if ok)

    def _valid(self, load: _Load, good: tuple[bool, ...]) -> int:
        """Tokens of the prefix that is there, in whole blocks of all groups."""
        ends, at = [], 0
        for part, group in zip(load.parts, self._blocks.groups, strict=True):
            there = (*good[at : at + len(part.keys)], False).index(False)
            ends.append(load.start + there * group.block_size)
            at += len(part.keys)
        return min(ends) - min(ends) % self._blocks.alignment

    def _finish(self, load: _Load, valid: int, reason: str, failed: bool) -> list[Output]:
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
        if self._scheduler.loading.get(load.sequence.request.request_id) is not load.sequence:
            return []  # it was aborted
        if failed:
            self._scheduler.totals.load_failures += 1
            if self._scheduler.config.kv_load_failure_policy == "fail":
                error = f"the KV cache could not be loaded from the store: {reason}"
                return self._scheduler.end(load.sequence.request, "error", error)
        self._use(load, valid)
        return []

    def _use(self, load: _Load, valid: int) -> None:
        """Put what is valid into the prefix cache; the request finds it there."""
        sequence, request = load.sequence, load.sequence.request
        sequence.num_computed = valid
        sequence.commit(self._blocks)
        assert request.cached_tokens is not None
        usable = min(valid, len(request.prompt), len(sequence.tokens) - 1)
        gained = max(0, usable - request.cached_tokens)
        request.cached_tokens += gained
        self._scheduler.totals.prompt_tokens["store"] += gained
        self._scheduler.requeue(sequence)

    # --- saves ---

    def committed(self, sequence: Sequence, g: int, first: int, end: int) -> None:
        """Queue blocks [first, end) of a sequence that were offered to the prefix cache."""
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
            self._let_go(self._queue)
            self._queue.clear()
        while self._queue and len(self._saving) < SAVES_IN_FLIGHT:
            count = min(BATCH_BLOCKS, len(self._queue))
            saves = tuple(self._queue.popleft() for _ in range(count))
            ticket = next(self._tickets)
            self._saving[ticket] = saves
            self._orders.append(SaveBlocks(ticket, saves))

    def _saved(self, answer: Saved) -> list[Output]:
        saves = self._saving.pop(answer.ticket)
        stored = [save for save, ok in zip(saves, answer.stored, strict=True) if ok]
        self._tell(stored)
        self._let_go(saves)
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

    def _tell(self, stored: list[Save]) -> None:
        """Name the blocks that were kept, as far as they are still in the prefix cache."""
        if self.on_saved is None:
            return
        for g, pool in enumerate(self._blocks.pools):
            keys = (pool.keys[save.block] for save in stored if save.group == g)
            self.on_saved(self._config.store, g, [key for key in keys if key is not None])

    def _let_go(self, saves: Iterable[Save]) -> None:
        for save in saves:
            self._blocks.pools[save.group].release_outgoing([save.block])
            self._unsaved.discard(save.key)

    # --- what the shell calls ---

    def take_orders(self) -> list[Order]:
        """What shall be done since the last call."""
        self._begin_saves()
        orders, self._orders = self._orders, []
        return orders

    def answer(self, answer: Answer) -> list[Output]:
        """Something was done."""
        if isinstance(answer, LookedUp):
            return self._looked_up(answer)
        return self._loaded(answer) if isinstance(answer, Loaded) else self._saved(answer)

    def expire(self, now: float) -> list[Output]:
        """Go on without what is late; stop what nobody wants any more."""
        for ticket in [t for t, ask in self._asks.items() if ask.deadline <= now]:
            self._give_up_asking(self._asks.pop(ticket), "late")
        outputs = []
        for ticket, load in self._loads.items():
            wanted = self._scheduler.loading.get(load.sequence.request.request_id) is load.sequence
            if load.over or (wanted and load.deadline > now):
                continue
            self._counts["loads late" if wanted else "loads cancelled"] += 1
            self._orders.append(CancelLoad(ticket))
            reason = f"nothing came within {self._config.load_timeout_s:g} s"
            outputs += self._finish(load, load.start, reason, failed=wanted)
        self._bad = {key: until for key, until in self._bad.items() if until > now}
        self._release_pins()
        return outputs

    def _release_pins(self) -> None:
        """Pins last until their request is loaded, runs, or is over."""
        loading = {load.sequence.request.request_id for load in self._loads.values()}
        kept = []
        for request, pins in self._pins:
            is_live = self._scheduler.requests.get(request.request_id) is request
            if (is_live and request.stored) or request.request_id in loading:
                kept.append((request, pins))
            else:
                self._orders.append(ReleasePins(pins))
        self._pins = kept

    def next_deadline(self) -> float | None:
        """When `expire` has something to do."""
        waits = [ask.deadline for ask in self._asks.values()]
        waits += [load.deadline for load in self._loads.values() if not load.over]
        return min(waits, default=None)

    def busy(self) -> bool:
        """Whether the store still has work that this process must see through."""
        return bool(self._queue or self._saving or self._loads)

    # --- accounts ---

    def claims(self) -> tuple[list[Spans], list[Spans]]:
        """Blocks that the store may write, and those that it may read."""
        saves = [*self._queue, *(save for batch in self._saving.values() for save in batch)]
        groups = range(len(self._blocks.groups))
        reads: list[Spans] = [
            tuple((BlockSpan(s.number, (s.block,)),) if g == s.group else () for g in groups)
            for s in saves
        ]
        return [load.spans for load in self._loads.values()], reads

    def counters(self) -> dict[str, float]:
        """Totals by Prometheus name."""
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

    def gauges(self) -> dict[str, float]:
        """Values now by Prometheus name."""
        label = f'{{store="{self._config.store}"}}'
        saving = len(self._queue) + sum(map(len, self._saving.values()))
        return {
            f"kvbaton_store_lookups_live{label}": float(len(self._asks)),
            f"kvbaton_store_loads_live{label}": float(len(self._loads)),
            f"kvbaton_store_saves_queued{label}": float(saving),
        }

    def state(self) -> dict[str, Any]:
        """The debugging dump."""
        now = self._clock()
        return {
            "lookups": [
                {"request_id": ask.sequence.request.request_id, "from": ask.start,
                 "blocks": len(ask.keys), "seconds_left": ask.deadline - now}
                for ask in self._asks.values()
            ],
            "loads": [
                {"request_id": load.sequence.request.request_id, "tokens": [load.start, load.end],
                 "seconds_left": load.deadline - now, "over": load.over,
                 "followers": len(load.followers)}
                for load in self._loads.values()
            ],
            "saves_queued": len(self._queue),
            "saves_in_flight": [len(batch) for batch in self._saving.values()],
            "known": len(self._known),
            "pins": sum(len(pins) for _, pins in self._pins),
        }  # fmt: skip

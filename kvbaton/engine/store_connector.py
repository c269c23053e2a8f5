"""Loads blocks from a store and saves blocks to it: decides what is looked up and loaded.

A request that the local prefix cache does not cover is looked up when it arrives. It is parked
until the answer or a deadline, so that nothing in the queue waits behind it. What the store has
beyond the local prefix is loaded into blocks that are marked *incoming*, as in a hand-over. Once
verified, it is added to the prefix cache, and the request returns to the queue and finds it there.
Other requests that want the same blocks wait for that load. After the load's deadline the request
goes on without it, but the blocks stay incoming until the store is done with them.

If the store is shared, the target of a hand-over does not look its prompt up, since its source
does, unless the hand-over fails.

This module and `store_saves.py`, which decides what is saved, do no I/O; `store_worker.py` carries
their orders out.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from kvbaton.connectors.layout import GroupKind
from kvbaton.engine.kv_connector import HeldBlocks, KVConnector, Load
from kvbaton.engine.loading_requests import LoadingRequests, next_after
from kvbaton.engine.request import Request, Sequence, SequenceState
from kvbaton.engine.store_calls import CircuitBreaker
from kvbaton.engine.store_saves import StoreSaves, num_bytes
from kvbaton.engine.store_worker import (
    BlockRun,
    ClearStore,
    Forgotten,
    LoadBlocks,
    LookUp,
    ProbeStore,
    SaveBlocks,
    StoreWorker,
)
from kvbaton.errors import StoreError
from kvbaton.messages.engine import HistogramCounts, Output

logger = logging.getLogger(__name__)

LATE_S = 60.0
"""Seconds of delay after which a load counts as overdue. If a quarter of the pool is in overdue
loads, the node is unhealthy, as with that much in quarantine: only a restart can take the blocks
from a store that may still write them."""
UNHEALTHY_SHARE = 4
RETRY_S = 5.0
"""Seconds for which an object that was wrong or late is not loaded again."""


@dataclass(eq=False, kw_only=True)
class _Lookup(LookUp):
    """A lookup in progress, for tokens from `start` on."""

    sequence: Sequence
    start: int


@dataclass(eq=False, kw_only=True)
class _StoreLoad(LoadBlocks):
    """A load in progress; `over` once the request goes on without it.

    `marks` are the keys in group 0 of all tokens that the load covers, loaded or not.
    """

    load: Load
    marks: tuple[bytes, ...]
    over: bool = False
    followers: list[Sequence] = field(default_factory=list)


@dataclass(eq=False, kw_only=True)
class _Probe(ProbeStore):
    """A probe in progress; `late` once it counts as failed."""

    late: bool = False


class StoreConnector(KVConnector):
    """Decides what is looked up and loaded, and lets `StoreSaves` decide what is saved.

    Args:
        scheduler: Scheduler of the live requests.
        worker: Carries orders out.
        lookup_timeout_s: Seconds that a request waits for a lookup.
        load_timeout_s: Seconds that a request waits for a load.
        ttl_s: Seconds after which saved objects expire; None for never.
    """

    name = "store"
    medium = "store"

    def __init__(
        self,
        scheduler: LoadingRequests,
        worker: StoreWorker,
        *,
        lookup_timeout_s: float,
        load_timeout_s: float,
        ttl_s: float | None = None,
    ) -> None:
        self._shared = worker.calls.capabilities.shared
        self.worker = worker
        self.wake_fds = (worker.wake_fd,)
        self._lookup_timeout_s, self._load_timeout_s = lookup_timeout_s, load_timeout_s
        self._scheduler = scheduler
        self._blocks = scheduler.blocks
        self._clock = scheduler.clock
        self._lookups: set[_Lookup] = set()
        self._stored: dict[Request, range] = {}  # tokens to load beyond the local prefix
        self._loads: set[_StoreLoad] = set()
        self._loading: dict[bytes, _StoreLoad] = {}
        self._pins: list[tuple[Request, list[int]]] = []
        self._bad: dict[bytes, float] = {}
        self._reads = CircuitBreaker(f"lookups and loads of {worker.name}")
        self._failed_call = ""
        self._probe: _Probe | None = None
        self._counts: Counter[str] = Counter()
        self._load_seconds = 0.0
        self._starved = False
        self._saves = StoreSaves(scheduler, worker, ttl_s)
        self._breakers = {"read": self._reads, "write": self._saves.breaker}

    # --- lookups ---

    @override
    def added(self, sequence: Sequence) -> bool:
        """Look up what the local cache lacks of a new request; False if there is nothing."""
        transfer = sequence.request.spec.transfer
        given = self._shared and transfer is not None and transfer.role == "target"
        return not given and self.load_failed(sequence)

    @override
    def load_failed(self, sequence: Sequence) -> bool:
        """Look up what the local cache lacks of a request; False if there is nothing."""
        if not (self._blocks.caching and sequence.request.reads_cache):
            return False
        now = self._clock()
        if self._reads.is_open and (self._probe is not None or not self._reads.due(now)):
            self._counts["lookups skipped"] += 1
            return False
        total = len(sequence.tokens)
        start = self._blocks.match_sequence(sequence).num_tokens
        runs = self._runs(sequence, start, total - total % self._blocks.alignment)
        if not any(run.keys for run in runs):
            return False
        if self._reads.is_open:  # the request does not wait, but a probe uses its keys
            self._counts["lookups skipped"] += 1
            deadline = now + self._lookup_timeout_s + self._load_timeout_s
            self._probe = _Probe(runs=runs, deadline=deadline)
            self.worker.submit(self._probe)
            return False
        lookup = _Lookup(
            runs=runs, sequence=sequence, start=start, deadline=now + self._lookup_timeout_s
        )
        self._lookups.add(lookup)
        self.worker.submit(lookup)
        return True

    def _runs(
        self, sequence: Sequence, start: int, end: int, position: int = 0
    ) -> tuple[BlockRun, ...]:
        """Runs of tokens [start, end), per group; with physical blocks as far as there are any.

        Blocks that the token at `position` does not attend to are left out.
        """
        runs = []
        for g, group in enumerate(self._blocks.groups):
            past = end // group.block_size
            first = min(past, max(start // group.block_size, group.first_needed(position)))
            keys = map(self.worker.forms[g].key, sequence.chain(group.block_size)[first:past])
            blocks = tuple(sequence.tables[g][first:past])
            runs.append(BlockRun(g, group.span_number(first), blocks, tuple(keys)))
        return tuple(runs)

    def _looked_up(self, lookup: _Lookup) -> None:
        if lookup not in self._lookups or lookup.sequence.state is not SequenceState.PARKED:
            self._lookups.discard(lookup)
            self.worker.release(lookup.pins)
            return
        if lookup.error is not None:
            self._give_up_asking(lookup, "failed", "a lookup failed")
            return
        self._lookups.remove(lookup)
        self._note_read("lookup")
        keys = (key for run in lookup.runs for key in run.keys)
        self._saves.note_known(zip(keys, lookup.present, strict=True))
        request = lookup.sequence.request
        end = self._prefix_end(lookup.sequence, lookup.start, lookup.runs, lookup.present)
        self._counts["lookups hit" if end > lookup.start else "lookups miss"] += 1
        self._stored[request] = range(lookup.start, end)
        if lookup.pins:
            self._pins.append((request, lookup.pins))
        self._scheduler.unpark(lookup.sequence)

    def _prefix_end(
        self, sequence: Sequence, start: int, runs: SequenceOf[BlockRun], good: list[bool]
    ) -> int:
        """End of the usable tokens, given what the store has.

        Args:
            sequence: The sequence.
            start: Tokens before this position are in the local cache.
            runs: What the store was asked for, one run per group.
            good: Whether each of the runs' blocks is there, group after group.
        """
        hits, at = list[list[int]](), 0
        for group, run in zip(self._blocks.groups, runs, strict=True):
            there = [*map(int, good[at : at + len(run.keys)])]
            at += len(there)
            if group.kind is GroupKind.FULL:
                there = there[: [*there, 0].index(0)]
            here = start // group.block_size
            first = run.first * group.span_tokens // group.block_size
            hits.append([1] * here + [0] * (first - here) + there)
        return self._blocks.usable(hits, len(sequence.tokens))

    def _give_up_asking(self, lookup: _Lookup, outcome: str, reason: str) -> None:
        """Let the request go on without the store, and further ones too for a while."""
        self._lookups.remove(lookup)
        self._counts[f"lookups {outcome}"] += 1
        self._reads_fail("lookup", reason)
        self._scheduler.unpark(lookup.sequence)

    def _reads_fail(self, call: str, reason: str) -> None:
        self._failed_call = call
        self._reads.failed(self._clock(), reason)

    def _note_read(self, call: str) -> None:
        """Note a request's successful call. While loads fail, successful lookups do not count."""
        if call == self._failed_call and not self._reads.is_open:
            self._reads.worked()

    # --- loads ---

    @override
    def match(self, sequence: Sequence, num_cached: int) -> int | None:
        """Tokens that the store has beyond a prefix; None while another request loads them."""
        stored = self._stored.get(sequence.request, range(0))
        if not stored.start <= num_cached < stored.stop:
            return 0
        size = self._blocks.groups[0].block_size
        key = self.worker.forms[0].key(sequence.chain(size)[num_cached // size])
        if self._bad.get(key, 0.0) > self._clock():
            return 0
        if key in self._loading:
            self._loading[key].followers.append(sequence)
            return None
        return stored.stop - num_cached

    @override
    def start_load(self, load: Load) -> None:
        sequence, size = load.sequence, self._blocks.groups[0].block_size
        del self._stored[sequence.request]
        position = next_after(self, sequence, load.end)
        chain = sequence.chain(size)[load.start // size : load.end // size]
        begun = _StoreLoad(
            runs=self._runs(sequence, load.start, load.end, position),
            load=load,
            marks=tuple(map(self.worker.forms[0].key, chain)),
            deadline=min(sequence.request.deadline, self._clock() + self._load_timeout_s),
        )
        self._loads.add(begun)
        self._loading |= dict.fromkeys(begun.marks, begun)
        self.worker.submit(begun)

    @override
    def started(self, sequence: Sequence) -> None:
        self._stored.pop(sequence.request, None)

    @override
    def finished(self, request: Request) -> None:
        self._stored.pop(request, None)
        self._saves.finished(request)

    def _loaded(self, load: _StoreLoad) -> list[Output]:
        """Release the blocks, which the store does not write any more, and use the good ones."""
        self._loads.remove(load)
        self._blocks.release_incoming(load.load.spans)
        keys = [(run.group, key) for run in load.runs for key in run.keys]
        there = [group for (group, _), ok in zip(keys, load.good, strict=True) if ok]
        self._saves.note_known((key, ok) for (_, key), ok in zip(keys, load.good, strict=True))
        self._counts["load blocks ok"] += len(there)
        self._counts["load blocks corrupt"] += load.corrupt
        unknown = "cancelled" if load.cancelled else "failed"
        self._counts[f"load blocks {unknown}"] += load.unanswered
        missing = len(keys) - len(there) - load.corrupt - load.unanswered
        self._counts["load blocks missing"] += missing
        self._counts["bytes load"] += num_bytes(self.worker.forms, there)
        self._load_seconds += load.seconds
        if load.error is not None and not load.cancelled:
            self._reads_fail("load", "a load failed")
        elif there and not load.cancelled:
            self._note_read("load")
        if load.over:
            return []
        valid = self._prefix_end(load.load.sequence, load.load.start, load.runs, load.good)
        failed = valid < load.load.end
        self._counts["loads failed" if failed else "loads ok"] += 1
        return self._finish(load, valid, load.error or "blocks are missing or corrupt", failed)

    def _finish(self, load: _StoreLoad, valid: int, reason: str, failed: bool) -> list[Output]:
        """Let the request go on with `valid` tokens, and release those that waited for the load."""
        load.over = True
        size = self._blocks.groups[0].block_size
        for end, key in enumerate(load.marks, start=load.load.start // size + 1):
            if self._loading.get(key) is load:
                del self._loading[key]
            if failed and end * size > valid:
                self._bad[key] = self._clock() + RETRY_S
        for follower in load.followers:
            self._scheduler.unpark(follower)
        if failed:
            return self._scheduler.fail_load(load.load, valid, reason)
        return self._scheduler.finish_load(load.load)

    # --- saves ---

    @override
    def committed(self, sequence: Sequence, g: int, first: int, end: int) -> None:
        self._saves.committed(sequence, g, first, end)

    @override
    def reset_store(self) -> Future[int]:
        done: Future[int] = Future()
        if not self.worker.calls.capabilities.namespaces:
            done.set_exception(StoreError(f"the store {self.worker.name} can't clear a namespace"))
        else:
            self._saves.drop()
            self.worker.submit(ClearStore(done=done))
        return done

    # --- the core's loop ---

    @override
    def poll(self, now: float) -> list[Output]:
        outputs: list[Output] = []
        for order in self.worker.take():
            match order:
                case _Lookup():
                    self._looked_up(order)
                case _StoreLoad():
                    outputs += self._loaded(order)
                case SaveBlocks():
                    for key in self._saves.saved(order):
                        self._bad.pop(key, None)
                case _Probe():
                    self._probe = None
                    if order.error is not None:
                        self._reads.failed(self._clock(), "a probe failed")
                    elif (seconds := order.seconds) > self._lookup_timeout_s:
                        self._reads.failed(self._clock(), f"a lookup took {seconds:.2g} s")
                    elif not order.late:
                        self._reads.close()
                case Forgotten():
                    self._saves.forget(order.keys)
                case ClearStore():
                    self._saves.forget()
        outputs += self._expire(now)
        self._saves.submit(now)
        return outputs + self._saves.fail_crowded_out(now)

    def _expire(self, now: float) -> list[Output]:
        """Go on without overdue lookups and loads; cancel loads that are no longer wanted."""
        for lookup in [lookup for lookup in self._lookups if lookup.deadline <= now]:
            self._give_up_asking(lookup, "late", "a lookup was late")
        outputs: list[Output] = []
        for load in self._loads:
            wanted = self._scheduler.is_loading(load.load)
            if load.over or (wanted and load.deadline > now):
                continue
            self._counts["loads late" if wanted else "loads cancelled"] += 1
            if wanted:
                self._reads_fail("load", "a load was late")
            self.worker.cancel(load)
            reason = f"nothing came within {self._load_timeout_s:g} s"
            outputs += self._finish(load, load.load.start, reason, failed=wanted)
        if self._probe is not None and not self._probe.late and self._probe.deadline <= now:
            self._probe.late = True
            self._reads.failed(now, "a probe was late")
        self._bad = {key: until for key, until in self._bad.items() if until > now}
        # Keep pins until their request is loaded, runs or has ended.
        loading = {load.load.sequence.request for load in self._loads}
        kept = []
        for request, pins in self._pins:
            if self._stored.get(request) or request in loading:
                kept.append((request, pins))
            else:
                self.worker.release(pins)
        self._pins = kept
        return outputs

    @override
    def next_deadline(self) -> float | None:
        waits = [lookup.deadline for lookup in self._lookups]
        waits += [load.deadline for load in self._loads if not load.over]
        waits += filter(None, [self._saves.next_deadline()])
        return min(waits, default=None)

    @override
    def busy(self) -> bool:
        return self._saves.busy() or any(not load.over for load in self._loads)

    @override
    def close(self) -> None:
        self.worker.close()

    # --- accounts ---

    @override
    def held_blocks(self) -> HeldBlocks:
        return HeldBlocks([load.load.spans for load in self._loads], self._saves.held_blocks())

    @override
    def counters(self) -> dict[str, float]:
        store, counts = self.worker.name, self._counts + self._saves.counts
        totals = {}
        for kind, outcomes in (
            ("lookups", ("hit", "miss", "failed", "late", "skipped")),
            ("loads", ("ok", "failed", "late", "cancelled")),
            ("load blocks", ("ok", "missing", "corrupt", "failed", "cancelled")),
            ("save blocks", ("stored", "left", "dropped", "refused", "failed")),
        ):
            name = f"kvbaton_store_{kind.replace(' ', '_')}_total"
            for outcome in outcomes:
                count = float(counts[f"{kind} {outcome}"])
                totals[f'{name}{{store="{store}",outcome="{outcome}"}}'] = count
        seconds = {"load": self._load_seconds, "save": self._saves.seconds}
        for way in ("load", "save"):
            label = f'{{store="{store}",direction="{way}"}}'
            totals[f"kvbaton_store_bytes_total{label}"] = float(counts[f"bytes {way}"])
            totals[f"kvbaton_store_seconds_total{label}"] = seconds[way]
        for call, errors in self.worker.calls.errors.items():
            totals[f'kvbaton_store_errors_total{{store="{store}",call="{call}"}}'] = float(errors)
        for calls, breaker in self._breakers.items():
            label = f'{{store="{store}",calls="{calls}"}}'
            totals[f"kvbaton_store_circuit_opened_total{label}"] = float(breaker.opened)
        return totals | self.worker.status.counters()

    @override
    def histograms(self) -> dict[str, HistogramCounts]:
        return self.worker.calls.histograms()

    def _is_starved(self) -> bool:
        """Whether overdue loads hold so many blocks that the node is useless."""
        until, usable = self._clock() - LATE_S, self._blocks.pool.usable
        held = sum(
            len(span.blocks)
            for load in self._loads
            if load.over and load.deadline <= until
            for spans in load.load.spans
            for span in spans
        )
        starved = held * UNHEALTHY_SHARE >= usable
        if starved and not self._starved:
            told = "unhealthy: %d of %d blocks are in loads that %s owes for more than %g s"
            logger.error(told, held, usable, self.worker.name, LATE_S)
        self._starved = starved
        return starved

    @override
    def gauges(self) -> dict[str, float]:
        name = f'store="{self.worker.name}"'
        label = f"{{{name}}}"
        return {
            "kvbaton_unhealthy": float(self._is_starved()),
            **{
                f'kvbaton_store_circuit_open{{{name},calls="{calls}"}}': float(breaker.is_open)
                for calls, breaker in self._breakers.items()
            },
            f"kvbaton_store_lookups_live{label}": float(len(self._lookups)),
            f"kvbaton_store_loads_live{label}": float(len(self._loads)),
            f"kvbaton_store_saves_queued{label}": float(self._saves.num_blocks),
            **self.worker.gauges(),
        }

    @override
    def state(self) -> dict[str, Any]:
        now = self._clock()
        return {
            **self.worker.state(),
            "lookups": [
                {"request_id": ask.sequence.request.request_id, "from": ask.start,
                 "blocks": sum(len(run.keys) for run in ask.runs),
                 "seconds_left": ask.deadline - now}
                for ask in self._lookups
            ],
            "loads": [
                {"request_id": load.load.sequence.request.request_id,
                 "tokens": [load.load.start, load.load.end], "over": load.over,
                 "seconds_left": load.deadline - now, "followers": len(load.followers)}
                for load in self._loads
            ],
            **self._saves.state(),
            "pins": sum(len(pins) for _, pins in self._pins),
        }  # fmt: skip

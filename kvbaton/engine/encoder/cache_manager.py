"""Which encoder outputs the live prompts need, where they are, and who waits for them: no I/O.

A prompt's items are asked for when it arrives, so that they are encoded or received while it waits
and while what stands before them is computed. An output that the encoder cache holds is *pinned*:
referenced until the tokens that it stands for are computed. Else it is in *flight*: a request of
its own in the encoder's scheduler, which finds it in a store, receives it from an encoder node, or
encodes it. Who wants an output that is in flight waits for that flight, so it is made once.

A step stops before the first item that is not pinned. When nothing more fits into the encoder cache
for pins, those are given up that come last in order of service, but never the one that a running
sequence needs next. Who lost one asks for no more than the next it needs from then on, and flights
are served in order. So somebody always moves.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvbaton.connectors.keys import block_keys
from kvbaton.engine.request import Request, Sequence, State, extras_of
from kvbaton.engine.step import ItemRows
from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest, Item, Output, Rejected, SamplingParams, TransferSpec
from kvbaton.types import ENCODER_BLOCK_ROWS

if TYPE_CHECKING:
    from kvbaton.engine.kv_cache_manager import KVCacheManager, Tables
    from kvbaton.engine.scheduler import Scheduler

PARAMS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, seed=0)
FLIGHT_S = 3600.0
"""No flight is longer; those who wait for it have deadlines of their own."""

Key = tuple[str, bytes, tuple[int, int, int]]
"""Cache salt, digest and grid: what tells outputs apart."""


@dataclass(frozen=True)
class Submit:
    """Give this request to the encoder."""

    request: AddRequest


@dataclass(frozen=True)
class Abort:
    """Nobody waits for this request any more."""

    request_id: str


@dataclass(frozen=True)
class Decline:
    """Tell an encoder node that its output is not needed."""

    transfer: TransferSpec


Order = Submit | Abort | Decline


@dataclass(eq=False)
class _Need:
    """One item that one sequence waits for, or has: then `blocks` are pinned."""

    sequence: Sequence
    item: Item
    key: Key
    blocks: list[int] | None = None

    @property
    def end(self) -> int:
        return self.item.start + self.item.length


@dataclass
class _Flight:
    request_id: str
    transfer: TransferSpec | None
    has_data: bool
    needs: list[_Need]


class EncoderCacheManager:
    """Decides what is encoded, received, pinned and given up.

    Args:
        scheduler: has the language model's live requests.
        outputs: pool of encoder outputs.
        root_key: root of their keys for a cache salt.
    """

    def __init__(
        self, scheduler: Scheduler, outputs: KVCacheManager, root_key: Callable[[str], bytes]
    ) -> None:
        self._scheduler, self._outputs, self._root_key = scheduler, outputs, root_key
        self._needs: dict[Sequence, dict[int, _Need]] = {}
        self._flights: dict[Key, _Flight] = {}
        self._keys: dict[str, Key] = {}
        self._spent: dict[str, set[int]] = {}
        self._modest: set[Sequence] = set()
        self._beside: dict[Sequence, int] = {}
        self._failed: list[tuple[Request, str]] = []
        self._orders: list[Order] = []
        self._numbers = 0
        self._counts: Counter[str] = Counter()

    # --- the door ---

    def check(self, request: AddRequest) -> None:
        """Refuse items that can never be encoded.

        Raises:
            RequestError: they overlap, lie outside of the prompt, or one is too large.
        """
        if request.items and not self._outputs.pools:
            raise RequestError("this model takes text only", param="items")
        most, end = sum(pool.usable for pool in self._outputs.pools) * ENCODER_BLOCK_ROWS, 0
        for number, item in enumerate(request.items):
            if item.start < end or item.start + item.length > len(request.token_ids):
                raise RequestError(
                    "items must be in order, apart, and within the prompt", param=f"items[{number}]"
                )
            end = item.start + item.length
            if item.length > most:
                raise RequestError(
                    f"an item has {item.length} rows, and the encoder cache {most}: "
                    "see --encoder-cache-tokens",
                    param=f"items[{number}]",
                )

    # --- what scheduler and planner use ---

    def request(self, sequence: Sequence, start: int) -> None:
        """Ask for items with tokens from `start` on: for all, unless there was no room for them."""
        items = sequence.request.items
        needs = self._needs.setdefault(sequence, {})
        for item in items:
            if item.start + item.length <= start:
                self._decline(self._spend(sequence.request, item))
                continue
            if item.start not in needs:
                key = (sequence.request.spec.cache_salt, item.digest, item.grid)
                needs[item.start] = need = _Need(sequence, item, key)
                self._seek(need)
            if sequence in self._modest:
                return

    def ready_until(self, sequence: Sequence, start: int) -> int:
        """Where the first item begins that is not here, at least `start`; beyond all if all are."""
        needs = self._needs.get(sequence, {})
        for item in sequence.request.items:
            if item.start + item.length > start:
                need = needs.get(item.start)
                if need is None or need.blocks is None:
                    return max(item.start, start)
        return sys.maxsize

    def wait(self, sequence: Sequence, start: int) -> None:
        """Let a sequence that lacks the item at `start` wait beside the queue."""
        self.request(sequence, start)
        if self.ready_until(sequence, start) <= start:
            self._scheduler.park(sequence)
            self._beside[sequence] = start

    def rows(self, sequence: Sequence, start: int, end: int) -> tuple[ItemRows, ...]:
        """Where the outputs are that tokens [start, end) need."""
        found = []
        for need in self._needs.get(sequence, {}).values():
            if need.item.start < end and need.end > start:
                assert need.blocks is not None, "a step was planned beyond what is ready"
                found.append(ItemRows(need.item.start, need.item.length, tuple(need.blocks)))
        return tuple(sorted(found, key=lambda rows: rows.start))

    def computed(self, sequence: Sequence) -> None:
        """Let go of outputs whose tokens are computed."""
        needs = self._needs.get(sequence, {})
        for start, need in list(needs.items()):
            if need.end <= sequence.num_computed:
                del needs[start]
                self._drop(need)

    def retired(self, sequence: Sequence) -> None:
        """A sequence is over."""
        self._beside.pop(sequence, None)
        self._modest.discard(sequence)
        for need in self._needs.pop(sequence, {}).values():
            self._drop(need)
        if sequence.request.state is State.FINISHED:
            self._spent.pop(sequence.request.request_id, None)

    def _drop(self, need: _Need) -> None:
        """Neither hold an output nor wait for it."""
        self._unpin(need)
        flight = self._flights.get(need.key)
        if flight is not None and need in flight.needs:
            flight.needs.remove(need)
            if not flight.needs:
                self._orders.append(Abort(flight.request_id))
                self._land(flight.request_id)

    # --- flights ---

    def _seek(self, need: _Need) -> None:
        """Pin an output that is here, or wait for it."""
        if need.key in self._flights:
            self._flights[need.key].needs.append(need)
            return
        transfer = self._spend(need.sequence.request, need.item)
        blocks = self._find(need)
        if blocks is None:
            self._fly(need, transfer)
        else:
            self._counts["cache"] += 1
            self._decline(transfer)
            self._pin(need, blocks)

    def _spend(self, request: Request, item: Item) -> TransferSpec | None:
        """The hand-over of an item, if it was not used before."""
        spent = self._spent.setdefault(request.request_id, set())
        if item.start in spent:
            return None
        spent.add(item.start)
        return item.transfer

    def _find(self, need: _Need) -> list[int] | None:
        """Blocks of an output in the encoder cache."""
        salt, zeros = need.key[0], (0,) * need.item.padded_rows
        extras = extras_of((replace(need.item, start=0),))
        chain = block_keys(self._root_key(salt), zeros, ENCODER_BLOCK_ROWS, extras=extras)
        match = self._outputs.match([chain], len(zeros))
        return match.tables[0] if match.num_tokens == len(zeros) else None

    def _fly(self, need: _Need, transfer: TransferSpec | None) -> None:
        self._numbers += 1
        spec = need.sequence.request.spec
        request = AddRequest(
            request_id=f"item-{self._numbers}",
            token_ids=(0,) * need.item.padded_rows,
            params=PARAMS,
            cache_salt=spec.cache_salt,
            deadline_s=FLIGHT_S,
            transfer=transfer,
            items=(replace(need.item, start=0, transfer=None),),
        )
        self._flights[need.key] = _Flight(
            request.request_id, transfer, bool(need.item.data), [need]
        )
        self._keys[request.request_id] = need.key
        self._orders.append(Submit(request))

    def _land(self, request_id: str) -> _Flight | None:
        key = self._keys.pop(request_id, None)
        return None if key is None else self._flights.pop(key)

    def _decline(self, transfer: TransferSpec | None) -> None:
        if transfer is not None:
            self._orders.append(Decline(transfer))

    # --- what the encoder says ---

    @property
    def has_orders(self) -> bool:
        """Whether `take_orders` has any."""
        return bool(self._orders)

    def take_orders(self) -> list[Order]:
        """What the encoder shall do, in order."""
        orders, self._orders = self._orders, []
        return orders

    def ended(self, output: Output) -> None:
        """A request of the encoder is over. If all went well, its blocks are in the cache now."""
        flight = self._land(output.request_id)
        if flight is None:
            return
        if output.finish_reason != "length":
            self._fail(flight, output.error or f"it ended with {output.finish_reason}")
            return
        blocks = self._find(flight.needs[0])
        if blocks is None:  # the cache was reset meanwhile
            self._fly_again(flight)
            return
        if output.transferred_tokens or output.cached_tokens:
            self._counts["transferred" if output.transferred_tokens else "store"] += 1
        self._counts["cache"] += len(flight.needs) - 1
        for need in flight.needs:
            self._pin(need, blocks)
            self._decline(self._spend(need.sequence.request, need.item))

    def rejected(self, answer: Rejected) -> None:
        """The encoder did not take a request; without a hand-over it may."""
        flight = self._land(answer.request_id)
        if flight is None:
            return
        if flight.transfer is None:
            self._fail(flight, answer.message)
            return
        self._fly_again(flight)

    def _fly_again(self, flight: _Flight) -> None:
        first, *others = flight.needs
        self._fly(first, None)
        self._flights[first.key].needs += others

    def _fail(self, flight: _Flight, error: str) -> None:
        """End those who wait, but let who has the image try it, if nobody has."""
        for need in flight.needs:
            if need.item.data and not flight.has_data:
                self._seek(need)
            else:
                del self._needs[need.sequence][need.item.start]
                self._failed.append((need.sequence.request, f"an image can't be used: {error}"))

    def take_failed(self) -> list[tuple[Request, str]]:
        """Requests that want what can't be had, and why."""
        failed, self._failed = self._failed, []
        return failed

    # --- pins ---

    def _pin(self, need: _Need, blocks: list[int]) -> None:
        self._outputs.ref([blocks])
        need.blocks = blocks
        sequence = need.sequence
        start = self._beside.get(sequence)
        if start is not None and self.ready_until(sequence, start) > start:
            del self._beside[sequence]
            self._scheduler.unpark(sequence)

    def _unpin(self, need: _Need) -> None:
        if need.blocks is not None:
            self._outputs.deref([need.blocks])
            need.blocks = None

    def give_up_one(self) -> bool:
        """Unpin what comes last in order of service; False if nothing can be spared."""
        late = {
            item.sequence
            for step in self._scheduler.in_flight
            for item in step.scheduled
            if item.sequence.handle != item.handle
        }
        spare: list[_Need] = []
        for sequence in self._needs.keys() - late:  # steps may still read what preempted ones hold
            kept = self._next_item(sequence)
            needs = self._needs[sequence].values()
            spare += [n for n in needs if n.blocks is not None and n.item.start > kept]
        if not spare:
            return False
        last = max(spare, key=lambda need: (need.sequence.rank, need.item.start))
        del self._needs[last.sequence][last.item.start]
        self._modest.add(last.sequence)
        self._unpin(last)
        return True

    @staticmethod
    def _next_item(sequence: Sequence) -> int:
        """Start of the item that a running sequence computes next; those before it, it may now."""
        if sequence.state is not State.RUNNING:
            return -1
        items = sequence.request.items
        ahead = (i.start for i in items if i.start + i.length > sequence.num_scheduled)
        return next(ahead, sys.maxsize)

    def pins(self) -> Iterator[Tables]:
        """What is pinned, for the ledger."""
        for needs in self._needs.values():
            for need in needs.values():
                if need.blocks is not None:
                    yield [need.blocks]

    def counters(self) -> dict[str, float]:
        """Totals by Prometheus name; what is encoded here is counted where that is done."""
        if not self._outputs.pools:
            return {}
        name = "kvbaton_encoder_items_total"
        return {
            f'{name}{{source="{source}"}}': float(self._counts[source])
            for source in ("cache", "transferred", "store")
        }

"""Encoder outputs of live prompts: which are needed, where they are, and which sequences wait.

A prompt's items are requested when it arrives, so that they are encoded or received while it waits
in the queue and while the tokens before them are computed. An output in the encoder cache is
*pinned*: referenced until its tokens are computed. Otherwise it is *pending*: a request of its own
in the encoder's core, which finds the output in a store, receives it from an encoder node, or
encodes it. All sequences that need a pending output wait for that one request.

The encoder's core is an engine whose prompts are items: its executor computes encoder outputs, its
prefix cache is the encoder cache, and it has connectors like any engine. It takes part in the loop
of the language model's core and never blocks it: its steps run in a thread of their own, and wake
the loop when they are over.

A step of the language model stops before the first item that is not pinned. If the encoder cache
has no room for more pins, pins that come last in order of service are given up, except the one that
a running sequence needs next. A sequence that lost a pin requests only its next item from then on,
and pending outputs are made in order, so some sequence always makes progress.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from msgspec.structs import replace
from typing_extensions import override

from kvbaton.connectors.keys import block_keys
from kvbaton.engine.core import EngineCore
from kvbaton.engine.kv_connector import KVConnector
from kvbaton.engine.request import ItemOutputs, Request, Sequence, SequenceState, Tables, extras_of
from kvbaton.engine.scheduler import Scheduler
from kvbaton.engine.step import ItemRows
from kvbaton.errors import RequestError
from kvbaton.messages import engine as messages
from kvbaton.types import ENCODER_BLOCK_ROWS

PARAMS = messages.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, seed=0)
DEADLINE_S = 3600.0
"""Longest time in seconds that an output is pending; requests have deadlines of their own."""

KEPT_CHAINS = 256
"""Number of outputs whose keys are cached: those of 1,369 rows take 0.1 ms to compute."""

Key = tuple[str, bytes, tuple[int, int, int]]
"""Cache salt, digest and grid, which identify an output."""


class Answers:
    """The `Mailbox` of the encoder's core.

    Attributes:
        unread: Messages from the core, not read yet.
    """

    def __init__(self) -> None:
        self.unread: list[messages.FromCore] = []

    def receive(self, timeout: float, wake_fd: int) -> list[messages.ToCore]:
        """Return nothing: `EncoderCacheManager` calls the core directly."""
        return []

    def send(self, message: messages.FromCore) -> None:
        """Keep a message until it is read."""
        self.unread.append(message)


@dataclass(eq=False)
class _Need:
    """An item that a sequence waits for, or has; in the latter case, `blocks` are pinned."""

    sequence: Sequence
    item: messages.Item
    key: Key
    blocks: list[int] | None = None

    @property
    def end(self) -> int:
        return self.item.start + self.item.length


@dataclass
class PendingEncode:
    """A request to the encoder's core for one output.

    Attributes:
        request_id: Its id in the encoder's core.
        key: Key of the output.
        transfer: Hand-over that may bring the output.
        has_data: Whether it can be encoded here.
        needs: What waits for it; empty if all left while a step computed it.
    """

    request_id: str
    key: Key
    transfer: messages.TransferSpec | None
    has_data: bool
    needs: list[_Need]


class EncoderCacheManager(ItemOutputs, KVConnector):
    """Decides what is encoded, received, pinned and given up; runs the encoder's core.

    Args:
        core: Engine over items; its executor must not block.
        answers: Mailbox of `core`.
        scheduler: Scheduler of the language model.
    """

    name = "encoder"
    contained = False  # errors of its ranks end the core, as those of the language model's ranks do

    def __init__(self, core: EngineCore, answers: Answers, scheduler: Scheduler) -> None:
        self.core, self._answers, self._scheduler = core, answers, scheduler
        self.wake_fds = (core.wake_fd,)
        self._outputs = core.scheduler.blocks
        core.scheduler.pinned = self.pins
        self._needs: dict[Sequence, dict[int, _Need]] = {}
        self._pending: dict[Key, PendingEncode] = {}
        self._by_id: dict[str, PendingEncode] = {}
        self._used: dict[str, set[int]] = {}  # items whose hand-over was used, by request
        self._one_at_a_time: set[Sequence] = set()  # sequences that lost a pin
        self._parked: dict[Sequence, int] = {}  # position at which each lacks an item
        self._left: list[tuple[int, list[int]]] = []  # read by a step for an ended sequence
        self._failed: list[tuple[Request, str, str | None]] = []
        self._asked = False  # whether the core was given work since the last poll
        self._numbers = 0
        self._chain = lru_cache(KEPT_CHAINS)(self._block_keys)
        self._counts: Counter[str] = Counter()

    # --- called by the scheduler ---

    @override
    def check(self, request: messages.AddRequest) -> None:
        most, end = self._outputs.pool.usable * ENCODER_BLOCK_ROWS, 0
        whole = self._scheduler.config.whole_items
        for number, item in enumerate(request.items):
            if item.start < end or item.start + item.length > len(request.token_ids):
                raise RequestError(
                    "items must be in order, apart, and within the prompt", param=f"items[{number}]"
                )
            end = item.start + item.length
            if whole and item.length > whole:
                raise RequestError(
                    f"an item has {item.length} tokens; one of this model has at most {whole}",
                    param=f"items[{number}]",
                )
            if item.length > most:
                raise RequestError(
                    f"an item has {item.length} rows, and the encoder cache {most}: "
                    "see --encoder-cache-tokens",
                    param=f"items[{number}]",
                )

    @override
    def request(self, sequence: Sequence, start: int) -> None:
        needs = self._needs.setdefault(sequence, {})
        for item in sequence.request.items:
            if item.start + item.length <= start:
                self._decline(self._use_transfer(sequence.request, item))
                continue
            if item.start not in needs:
                key = (sequence.request.spec.cache_salt, item.digest, item.grid)
                needs[item.start] = need = _Need(sequence, item, key)
                self._seek(need)
            if sequence in self._one_at_a_time:
                return

    @override
    def ready_until(self, sequence: Sequence, start: int) -> int:
        needs = self._needs.get(sequence, {})
        for item in sequence.request.items:
            if item.start + item.length > start:
                need = needs.get(item.start)
                if need is None or need.blocks is None:
                    return max(item.start, start)
        return sys.maxsize

    @override
    def wait(self, sequence: Sequence, start: int) -> None:
        self.request(sequence, start)
        if self.ready_until(sequence, start) <= start:
            self._scheduler.park(sequence)
            self._parked[sequence] = start

    @override
    def rows(self, sequence: Sequence, start: int, end: int) -> tuple[ItemRows, ...]:
        found = []
        for need in self._needs.get(sequence, {}).values():
            if need.item.start < end and need.end > start:
                assert need.blocks is not None, "a step was planned beyond what is ready"
                found.append(ItemRows(need.item.start, need.item.length, tuple(need.blocks)))
        return tuple(sorted(found, key=lambda rows: rows.start))

    @override
    def computed(self, sequence: Sequence) -> None:
        needs = self._needs.get(sequence, {})
        for start, need in list(needs.items()):
            if need.end <= sequence.num_computed:
                del needs[start]
                self._drop(need)

    @override
    def retired(self, sequence: Sequence) -> None:
        self._parked.pop(sequence, None)
        self._one_at_a_time.discard(sequence)
        reading = [
            step.number
            for step in self._scheduler.in_flight
            if any(scheduled.sequence is sequence for scheduled in step.scheduled)
        ]
        for need in self._needs.pop(sequence, {}).values():
            if reading and need.blocks is not None:
                self._left.append((reading[-1], need.blocks))
                need.blocks = None
            self._drop(need)

    def _drop(self, need: _Need) -> None:
        """Unpin an output, or stop waiting for it."""
        self._unpin(need)
        pending = self._pending.get(need.key)
        if pending is not None and need in pending.needs:
            pending.needs.remove(need)
            # Let a step in flight finish, so that the output is cached: another request for it,
            # like a router's next attempt, must find it.
            computing = {
                scheduled.sequence.request.request_id
                for step in self.core.scheduler.in_flight
                for scheduled in step.scheduled
            }
            if not pending.needs and pending.request_id not in computing:
                self._finish(pending.request_id)
                self._asked = True
                self.core.abort(messages.AbortRequest(request_id=pending.request_id))

    # --- pending outputs ---

    def _seek(self, need: _Need) -> None:
        """Pin an output that is cached, or wait for it."""
        if need.key in self._pending:
            self._pending[need.key].needs.append(need)
            return
        transfer = self._use_transfer(need.sequence.request, need.item)
        blocks = self._find(need)
        if blocks is None:
            self._submit([need], transfer)
        else:
            self._counts["cache"] += 1
            self._decline(transfer)
            self._pin(need, blocks)

    def _use_transfer(self, request: Request, item: messages.Item) -> messages.TransferSpec | None:
        """The hand-over of an item, unless it was used before."""
        used = self._used.setdefault(request.request_id, set())
        if item.start in used:
            return None
        used.add(item.start)
        return item.transfer

    def _decline(self, transfer: messages.TransferSpec | None) -> None:
        """Tell an encoder node that its output is not needed."""
        if transfer is not None:
            self.core.connectors.call(KVConnector.decline, transfer)

    def _find(self, need: _Need) -> list[int] | None:
        """Blocks of an output in the encoder cache; None if it is not cached."""
        rows = need.item.padded_rows
        match = self._outputs.match([self._chain(need.key, need.item.length)], rows)
        return match.tables[0] if match.num_tokens == rows else None

    def _block_keys(self, key: Key, length: int) -> list[bytes]:
        """Keys of the blocks of an output with `length` rows, as the core computes them."""
        salt, digest, grid = key
        item = messages.Item(start=0, length=length, digest=digest, grid=grid)
        root, zeros = self.core.scheduler.root_key(salt), (0,) * item.padded_rows
        return block_keys(root, zeros, ENCODER_BLOCK_ROWS, extras=extras_of((item,)))

    def _submit(self, needs: list[_Need], transfer: messages.TransferSpec | None) -> None:
        """Request the output that these needs have in common from the core."""
        self._numbers += 1
        first = needs[0]
        pending = PendingEncode(
            f"item-{self._numbers}", first.key, transfer, bool(first.item.data), needs
        )
        self._pending[first.key] = self._by_id[pending.request_id] = pending
        self._asked = True
        self.core.add(
            messages.AddRequest(
                request_id=pending.request_id,
                token_ids=array("I", [0]) * first.item.padded_rows,
                params=PARAMS,
                cache_salt=first.sequence.request.spec.cache_salt,
                deadline_s=DEADLINE_S,
                transfer=transfer,
                items=(replace(first.item, start=0, transfer=None),),
            )
        )

    def _finish(self, request_id: str) -> PendingEncode | None:
        """Forget a request to the core; returns it, or None if it is unknown."""
        pending = self._by_id.pop(request_id, None)
        return None if pending is None else self._pending.pop(pending.key)

    def _ended(self, output: messages.Output) -> None:
        """Handle the end of a request of the core; if it succeeded, its blocks are cached now."""
        pending = self._finish(output.request_id)
        if pending is None or not pending.needs:
            return
        if output.finish_reason != "length":
            why = output.error or f"it ended with {output.finish_reason}"
            self._fail(pending, why, output.error_code)
            return
        blocks = self._find(pending.needs[0])
        if blocks is None:  # the cache was reset meanwhile
            self._submit(pending.needs, None)
            return
        if output.transferred_tokens or output.cached_tokens:
            self._counts["transferred" if output.transferred_tokens else "store"] += 1
        self._counts["cache"] += len(pending.needs) - 1
        for need in pending.needs:
            self._pin(need, blocks)
            self._decline(self._use_transfer(need.sequence.request, need.item))

    def _fail(self, pending: PendingEncode, error: str, code: str | None) -> None:
        """Fail what waits for an output; a need with image data is first tried once more."""
        for need in pending.needs:
            if need.item.data and not pending.has_data:
                self._seek(need)
            else:
                del self._needs[need.sequence][need.item.start]
                why = f"an image can't be used: {error}"
                self._failed.append((need.sequence.request, why, code))

    # --- pins ---

    def _pin(self, need: _Need, blocks: list[int]) -> None:
        self._outputs.ref([blocks])
        need.blocks = blocks
        sequence = need.sequence
        start = self._parked.get(sequence)
        if start is not None and self.ready_until(sequence, start) > start:
            del self._parked[sequence]
            self._scheduler.unpark(sequence)

    def _unpin(self, need: _Need) -> None:
        if need.blocks is not None:
            self._outputs.deref([need.blocks])
            need.blocks = None

    def _give_up_one(self) -> bool:
        """Give up the pin that is last in order of service; False if none can be spared."""
        spare: list[_Need] = []
        # Steps in flight may still read the pins of preempted sequences.
        for sequence in self._needs.keys() - self._scheduler.left_in_flight():
            kept = -1
            if sequence.state is SequenceState.RUNNING:
                # Keep the item that it computes next, and those before.
                items = sequence.request.items
                ahead = (i.start for i in items if i.start + i.length > sequence.num_scheduled)
                kept = next(ahead, sys.maxsize)
            needs = self._needs[sequence].values()
            spare += [n for n in needs if n.blocks is not None and n.item.start > kept]
        if not spare:
            return False
        last = max(spare, key=lambda need: (need.sequence.rank, need.item.start))
        del self._needs[last.sequence][last.item.start]
        self._one_at_a_time.add(last.sequence)
        self._unpin(last)
        return True

    def pins(self) -> Iterator[Tables]:
        """Pinned blocks, for the audit."""
        for needs in self._needs.values():
            for need in needs.values():
                if need.blocks is not None:
                    yield [need.blocks]
        yield from ([blocks] for _, blocks in self._left)

    # --- the loop of the language model's core ---

    @override
    def finished(self, request: Request) -> None:
        """Decline unused hand-overs, for which encoder nodes would hold outputs a long time."""
        for item in request.items:
            self._decline(self._use_transfer(request, item))
        self._used.pop(request.request_id, None)

    @override
    def poll(self, now: float) -> list[messages.Output]:
        self._asked = False
        oldest = min((step.number for step in self._scheduler.in_flight), default=sys.maxsize)
        for number, blocks in self._left:
            if number < oldest:
                self._outputs.deref([blocks])
        self._left = [left for left in self._left if left[0] >= oldest]
        self.core.poll()
        self._read_answers()
        self.core.launch()
        scheduler = self.core.scheduler
        while (
            # The first request in the queue has no room, and no running one will make room.
            scheduler.waiting
            and not (scheduler.running or scheduler.loading or self.core.in_flight)
            and self._give_up_one()
        ):
            self.core.launch()
        self.core.update()
        self._read_answers()
        failed, self._failed = self._failed, []
        return [o for one, *why in failed for o in self._scheduler.end(one, "error", *why)]

    def _read_answers(self) -> None:
        """Handle the core's messages; pins outputs before anything else evicts them."""
        unread, self._answers.unread = self._answers.unread, []
        for message in unread:
            match message:
                case messages.Outputs(outputs=outputs):
                    for output in outputs:
                        if output.finish_reason is not None:
                            self._ended(output)
                case messages.Rejected():
                    pending = self._finish(message.request_id)
                    if pending is not None and pending.transfer is None:
                        self._fail(pending, message.message, "invalid_image")
                    elif pending is not None:  # try again without the hand-over
                        self._submit(pending.needs, None)

    @override
    def next_deadline(self) -> float:
        return time.monotonic() + (0.0 if self._asked else self.core.patience())

    @override
    def busy(self) -> bool:
        return not self.core.is_idle()

    @override
    def set_members(self, addresses: SequenceOf[str]) -> None:
        self.core.set_members(addresses)

    @override
    def reset_prefix_cache(self) -> int:
        return self.core.reset_prefix_cache()

    @override
    def imbalance(self) -> int:
        return self.core.imbalance()

    @override
    def counters(self) -> dict[str, float]:
        """Counters of the core, and of outputs that were not encoded here, by source."""
        name = "kvbaton_encoder_items_total"
        return _renamed(self.core.counters()) | {
            f'{name}{{source="{source}"}}': float(self._counts[source])
            for source in ("cache", "transferred", "store")
        }

    @override
    def gauges(self) -> dict[str, float]:
        return _renamed(self.core.gauges())

    @override
    def state(self) -> dict[str, Any]:
        return self.core.state()

    @override
    def close(self) -> None:
        self.core.close()


def _renamed(values: dict[str, float]) -> dict[str, float]:
    """Rename metrics of the encoder's core, apart from the language model's."""
    own = "kvbaton_encoder_"
    return {
        name if name.startswith(own) else own + name.removeprefix("kvbaton_"): value
        for name, value in values.items()
    }

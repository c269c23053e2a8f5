"""Which encoder outputs the live prompts need, where they are, and who waits for them.

A prompt's items are asked for when it arrives, so that they are encoded or received while it waits
and while what stands before them is computed. An output that the encoder cache holds is *pinned*:
referenced until the tokens that it stands for are computed. Else it is *pending*: a request of its
own in the encoder's core, which finds it in a store, receives it from an encoder node, or encodes
it. Who wants an output that is pending waits for that request, so it is made once.

That core is an engine whose prompts are items: its executor computes encoder outputs, its prefix
cache is the encoder cache, and it has the connectors of any engine. It takes part in the loop of
the language model's core, and nothing of it blocks: its steps run in a thread of their own and wake
the loop when they are over.

A step of the language model stops before the first item that is not pinned. When nothing more fits
into the encoder cache for pins, those are given up that come last in order of service, but never
the one that a running sequence needs next. Who lost one asks for no more than the next it needs
from then on, and pending outputs are made in order. So somebody always moves.
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
"""No output is pending for longer; those who wait for it have deadlines of their own."""

KEPT_CHAINS = 256
"""Outputs whose keys are kept: those of 1,369 rows take 0.1 ms, for which a prompt waits."""

Key = tuple[str, bytes, tuple[int, int, int]]
"""Cache salt, digest and grid: what tells outputs apart."""


class Answers:
    """The `Mailbox` of the encoder's core.

    Attributes:
        unread: what the core said.
    """

    def __init__(self) -> None:
        self.unread: list[messages.FromCore] = []

    def receive(self, timeout: float, wake_fd: int) -> list[messages.ToCore]:
        """Nothing comes this way: `EncoderCacheManager` calls the core."""
        return []

    def send(self, message: messages.FromCore) -> None:
        """Leave a message to be read."""
        self.unread.append(message)


@dataclass(eq=False)
class _Need:
    """One item that one sequence waits for, or has: then `blocks` are pinned."""

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
        request_id: its id there.
        key: of the output.
        transfer: the hand-over that may bring it.
        has_data: whether it can be encoded there.
        needs: who wait for it; nobody, if they left while a step computed it.
    """

    request_id: str
    key: Key
    transfer: messages.TransferSpec | None
    has_data: bool
    needs: list[_Need]


class EncoderCacheManager(ItemOutputs, KVConnector):
    """Decides what is encoded, received, pinned and given up, and runs the core that does it.

    Args:
        core: over items; its executor must not block.
        answers: its mailbox.
        scheduler: has the language model's live requests.
    """

    name = "encoder"
    contained = False  # its ranks' errors end the core as those of the language model do

    def __init__(self, core: EngineCore, answers: Answers, scheduler: Scheduler) -> None:
        self.core, self._answers, self._scheduler = core, answers, scheduler
        self.wake_fds = (core.wake_fd,)
        self._outputs = core.scheduler.blocks
        core.scheduler.pinned = self.pins
        self._needs: dict[Sequence, dict[int, _Need]] = {}
        self._pending: dict[Key, PendingEncode] = {}
        self._by_id: dict[str, PendingEncode] = {}
        self._used: dict[str, set[int]] = {}  # items whose hand-over was used, by request
        self._one_at_a_time: set[Sequence] = set()  # they lost a pin
        self._parked: dict[Sequence, int] = {}  # at which token they lack an item
        self._left: list[tuple[int, list[int]]] = []  # what a step reads for one that is over
        self._failed: list[tuple[Request, str, str | None]] = []
        self._asked = False  # the core for something since the last poll
        self._numbers = 0
        self._chain = lru_cache(KEPT_CHAINS)(self._block_keys)
        self._counts: Counter[str] = Counter()

    # --- what the scheduler asks ---

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
        """Neither hold an output nor wait for it."""
        self._unpin(need)
        pending = self._pending.get(need.key)
        if pending is not None and need in pending.needs:
            pending.needs.remove(need)
            # What a step computes already becomes cache: who asks again (a router's next attempt
            # does) must find it.
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
        """Pin an output that is here, or wait for it."""
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
        """The hand-over of an item, if it was not used before."""
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
        """Blocks of an output in the encoder cache."""
        rows = need.item.padded_rows
        match = self._outputs.match([self._chain(need.key, need.item.length)], rows)
        return match.tables[0] if match.num_tokens == rows else None

    def _block_keys(self, key: Key, length: int) -> list[bytes]:
        """Keys of the blocks of an output of so many rows, as the core makes them."""
        salt, digest, grid = key
        item = messages.Item(start=0, length=length, digest=digest, grid=grid)
        root, zeros = self.core.scheduler.root_key(salt), (0,) * item.padded_rows
        return block_keys(root, zeros, ENCODER_BLOCK_ROWS, extras=extras_of((item,)))

    def _submit(self, needs: list[_Need], transfer: messages.TransferSpec | None) -> None:
        """Ask the core for the output that these need."""
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
        """Nobody waits for a request to the core any more; None if nobody did."""
        pending = self._by_id.pop(request_id, None)
        return None if pending is None else self._pending.pop(pending.key)

    def _ended(self, output: messages.Output) -> None:
        """A request of the core is over. If all went well, its blocks are in the cache now."""
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
        """End those who wait, but let who has the image try it, if nobody has."""
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
        """Unpin what comes last in order of service; False if nothing can be spared."""
        spare: list[_Need] = []
        # Steps may still read what preempted ones hold.
        for sequence in self._needs.keys() - self._scheduler.left_in_flight():
            kept = -1
            if sequence.state is SequenceState.RUNNING:
                # Not the item that it computes next, nor those before.
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
        """What is pinned, for the audit."""
        for needs in self._needs.values():
            for need in needs.values():
                if need.blocks is not None:
                    yield [need.blocks]
        yield from ([blocks] for _, blocks in self._left)

    # --- the loop of the language model's core ---

    @override
    def finished(self, request: Request) -> None:
        """Encoder nodes keep for long what nobody asks for."""
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
            # The first in the queue has no room, and nothing that runs will make any.
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
        """Pin what is done before anything else takes its place in the cache."""
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
                    elif pending is not None:  # without a hand-over it may be taken
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
        """What the core counts, and outputs that were not encoded here, by source."""
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
    """Metrics of the encoder's core among those of the language model's."""
    own = "kvbaton_encoder_"
    return {
        name if name.startswith(own) else own + name.removeprefix("kvbaton_"): value
        for name, value in values.items()
    }

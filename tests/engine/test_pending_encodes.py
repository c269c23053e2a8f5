"""Prompts with items over a toy encoder: all of them end, with rows that are theirs in every step.

Scheduler, items, and the encoder's core are the real ones. What is a toy is what computes, and the
role that receives outputs from elsewhere; both take as long as a test wants.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvbaton.connectors.keys import root_key
from kvbaton.connectors.protocol.events import Deliver, Fail, Start, Unneeded, Unquarantine
from kvbaton.decode.target_connector import TargetConnector
from kvbaton.engine.config import SchedulerConfig
from kvbaton.engine.core import EngineCore
from kvbaton.engine.encoder.cache_manager import Answers, EncoderCacheManager
from kvbaton.engine.kv_cache_manager import GroupSpec
from kvbaton.engine.kv_connector import Connectors
from kvbaton.engine.scheduler import Scheduler
from kvbaton.engine.step import ItemRows, Sampled, StepPlan, StepResult
from kvbaton.errors import RequestError
from kvbaton.messages.engine import AddRequest, Item
from kvbaton.types import ChoiceStart
from tests.support.toy_engine import Loop, ToyTransfers, ask, target

ROWS = 32
MAX_LEN = 200


def digest_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


@dataclass
class ToyStep:
    """An encoder's step that is over when its executor is asked for the time being up."""

    result_: StepResult
    delay: int

    def ready(self) -> bool:
        self.delay -= 1
        return self.delay < 0

    def result(self) -> StepResult:
        return self.result_


@dataclass
class ToyEncoder:
    """Writes which row of which item a block holds, at once when a step starts.

    Attributes:
        memory: by block, the item's digest and the number of the block in it.
        bad: digests that can't be encoded.
    needs_data: items without an image can't, either.
        delays: turns that steps take, over and over.
        encoded: times that each digest was.
    """

    bad: frozenset[bytes] = frozenset()
    needs_data: bool = False
    delays: tuple[int, ...] = (0,)
    wake_fds: tuple[int, ...] = field(default_factory=lambda: (os.eventfd(0),))
    memory: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    encoded: Counter[bytes] = field(default_factory=Counter)
    steps: int = 0

    def launch(self, plan: StepPlan) -> ToyStep:
        for copy in plan.copies:
            self.memory[copy.target] = self.memory[copy.source]
        items = {new.handle: new.items[0] for new in plan.new}
        sampled = []
        for step in plan.steps:
            error = None
            if step.count > 1:
                item = items[step.handle]
                self.encoded[item.digest] += 1
                bare = self.needs_data and not item.data
                error = "a bad image" if bare or item.digest in self.bad else None
                for i, block in enumerate(step.new_blocks[0]):
                    if i >= step.start // ROWS and error is None:
                        self.memory[block] = (item.digest, i)
            sampled.append(Sampled(step.handle, (0,) * step.num_samples, error=error))
        self.steps += 1
        delay = self.delays[self.steps % len(self.delays)]
        return ToyStep(StepResult(plan.number, tuple(sampled)), delay)

    def expect(self, request: AddRequest) -> None:
        """Nothing is read ahead."""

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        os.close(*self.wake_fds)


class ItemTransfers(ToyTransfers):
    """Encoder nodes, as the target of their outputs sees them: they send them, or lose them.

    Attributes:
        lost: transfers that fail.
        used: attempts that reserved blocks, or were told that nobody needs them.
    """

    def __init__(self, encoder: ToyEncoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.target: TargetConnector
        self.lost: set[bytes] = set()
        self.used: Counter[bytes] = Counter()
        self.pending: deque[Start] = deque()

    def submit(self, *items: Any) -> None:
        for item in items:
            if isinstance(item, Start | Unneeded):
                self.used[item.attempt.transfer_id] += 1
            if isinstance(item, Start):
                self.pending.append(item)

    def take(self) -> list[Any]:
        if not self.pending:
            return []
        start = self.pending.popleft()
        attempt, load = start.attempt, self.target._live.get(start.attempt)
        if attempt.transfer_id in self.lost:
            return [Fail(attempt, 0, "lost"), Unquarantine(attempt)]
        if load is not None:  # else it was cancelled
            (item,) = load.sequence.request.spec.items
            for span in start.spans[0]:
                for i, block in enumerate(span.blocks, start=span.first):
                    self.encoder.memory[block] = (item.digest, i)
        return [Deliver(attempt, (ChoiceStart(0),), 0, start.num_tokens), Unquarantine(attempt)]


class House(Loop):
    """A language model's loop with an encoder beside it.

    Args:
        rows: of the encoder cache, in blocks.
        encoder: what computes rows.
        policy: of the encoder for what does not arrive.
    """

    def __init__(
        self,
        rows: int,
        encoder: ToyEncoder | None = None,
        *,
        policy: Any = "recompute",
        **more: Any,
    ) -> None:
        options: dict[str, Any] = {"max_model_len": MAX_LEN, "max_num_batched_tokens": 24}
        super().__init__((GroupSpec(4, more.pop("num_blocks", 120)),), **(options | more))
        self.encoder = encoder or ToyEncoder()
        outputs = Scheduler(
            SchedulerConfig(
                groups=(GroupSpec(ROWS, rows + 1),),
                max_model_len=rows * ROWS + 1,
                vocab_size=1,
                max_num_batched_tokens=2 * ROWS,
                kv_load_failure_policy=policy,
                whole_prompts=True,
            ),
            root_key=lambda salt: root_key(bytes(31) + b"e", salt),
        )
        self.scheduler = Scheduler(
            self.config,
            root_key=lambda salt: root_key(bytes(32), salt),
            clock=self.clock,
        )
        self.target = self.make_target(self.scheduler, self.transfers)
        self.peers, answers = ItemTransfers(self.encoder), Answers()
        self.peers.target = self.make_target(outputs, self.peers)
        core = EngineCore(
            self.encoder,  # type: ignore[arg-type]
            outputs,
            answers,
            connectors=(self.peers.target,),
        )
        self.items = EncoderCacheManager(core, answers, self.scheduler)
        self.scheduler.items = self.items
        self.scheduler.connectors = Connectors((self.target, self.items))
        self.reading: deque[list[tuple[bytes, ItemRows]]] = deque()

    def close(self) -> None:
        self.items.core.close()

    def turn(self) -> None:
        """One turn of the encoder; what ended with it."""
        self.emit(self.items.poll(self.clock()))
        assert self.items.core.imbalance() == 0

    def launch(self) -> bool:
        done = super().launch()
        if done:
            self.reading.append(self.rows_of(self.plans[-1]))
            self.check_rows()
        return done

    def rows_of(self, plan: StepPlan) -> list[tuple[bytes, ItemRows]]:
        """What a step reads of the encoder cache; it is all that it must."""
        of_handle = {s.handle: s.request.spec.items for s in self.scheduler.sequences()}
        found = []
        for step in plan.steps:
            end = step.start + step.count
            wanted = [
                item
                for item in of_handle[step.handle]
                if item.start < end and step.start < item.start + item.length
            ]
            assert [(r.start, r.length) for r in step.items] == [
                (i.start, i.length) for i in wanted
            ]
            found += [(i.digest, rows) for i, rows in zip(wanted, step.items, strict=True)]
        return found

    def check_rows(self) -> None:
        """All that steps in flight read is what they want."""
        for reads in self.reading:
            for digest, rows in reads:
                assert len(rows.blocks) == -(-rows.length // ROWS)
                held = [self.encoder.memory[block] for block in rows.blocks]
                assert held == [(digest, i) for i in range(len(rows.blocks))]

    def update(self) -> None:
        if self.in_flight:
            self.check_rows()
            self.reading.popleft()
        super().update()

    def step(self) -> None:
        self.turn()
        super().step()

    def run(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work() and self.items.core.is_idle():
                break
            self.step()
        else:
            raise AssertionError(f"nothing moves: {self.scheduler.state()} {self.items.state()}")
        self.turn()  # gives back what the last step has read of those that failed meanwhile
        self.check_empty()
        assert list(self.items.pins()) == []
        (owners,) = self.items.core.scheduler.blocks.owners()
        assert not owners["request"] + owners["incoming"] + owners["fenced"], owners


def prompt(name: str, *parts: int | tuple[int, int], transfers: bool = False, **more: Any) -> Any:
    """Text of so many tokens for a number, item `number` of `rows` for a pair."""
    ids: list[int] = []
    items: list[Item] = []
    for part in parts:
        if isinstance(part, int):
            ids += [(len(ids) * 7 + part) % 19 for _ in range(part)]
            continue
        number, rows = part
        spec = target(1000 + 10 * int(name) + len(items)) if transfers else None
        items.append(
            Item(
                start=len(ids), length=rows, digest=digest_of(number), grid=(1, 2, 2 * rows),
                data=b"x", transfer=spec,
            )
        )  # fmt: skip
        ids += [20] * rows
    return ask(name, ids, items=tuple(items), ignore_eos=True, **{"max_tokens": 4, **more})


SIZES = {0: 5, 1: 32, 2: 33, 3: 40, 4: 64}
"""Rows of the items by number."""


@st.composite
def prompts(draw: st.DrawFn) -> list[Any]:
    made = []
    for name in range(draw(st.integers(1, 6))):
        parts: list[Any] = [draw(st.integers(0, 9))]
        for number in draw(st.lists(st.sampled_from(sorted(SIZES)), max_size=3)):
            room = MAX_LEN - 30 - sum(p if isinstance(p, int) else p[1] for p in parts)
            if SIZES[number] < room:
                parts += [(number, SIZES[number]), draw(st.integers(0, 9))]
        if not any(not isinstance(p, int) or p for p in parts):
            parts = [1]
        more = {"priority": draw(st.integers(0, 2)), "n": draw(st.integers(1, 2))}
        made.append(prompt(str(name), *parts, transfers=draw(st.booleans()), **more))
    return made


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_everybody_ends_with_the_right_rows(data: st.DataObject) -> None:
    requests = data.draw(prompts())
    bad = data.draw(st.sets(st.sampled_from(sorted(SIZES)), max_size=1))
    delays = tuple(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)))
    encoder = ToyEncoder(bad=frozenset(map(digest_of, bad)), delays=delays)
    house = House(
        data.draw(st.integers(2, 8)),
        encoder,
        depth=data.draw(st.integers(1, 2)),
        num_blocks=data.draw(st.integers(52, 90)),
        max_num_batched_tokens=data.draw(st.integers(1, 60)),
        max_num_seqs=data.draw(st.integers(2, 8)),
    )
    transfers = [i.transfer.transfer_id for r in requests for i in r.items if i.transfer]
    if transfers:
        house.peers.lost = data.draw(st.sets(st.sampled_from(transfers)))
    aborted = set()
    for request in requests:
        house.add(request)
        for _ in range(data.draw(st.integers(0, 3))):
            house.step()
        if data.draw(st.integers(0, 9)) == 0:
            house.emit(house.scheduler.abort(request.request_id))
            aborted.add(request.request_id)
    house.run()
    event(f"preemptions: {house.scheduler.totals.preemptions > 0}")
    for request in requests:
        for choice in range(request.params.n):
            house.check_stream(request.request_id, choice)
            stream = house.streams[request.request_id, choice]
            if stream.finish == "error":
                assert stream.error is not None
                assert "a bad image" in stream.error
                assert bad & {int.from_bytes(i.digest, "big") for i in request.items}
            elif request.request_id not in aborted:
                assert stream.finish == "length"
    assert house.peers.used == dict.fromkeys(transfers, 1), "each is used or declined, once"
    house.close()


@settings(deadline=None, max_examples=20)
@given(requests=prompts(), delay=st.integers(0, 5), pause=st.integers(0, 4))
def test_with_room_each_item_is_made_once(requests: list[Any], delay: int, pause: int) -> None:
    house = House(40, ToyEncoder(delays=(delay,)), num_blocks=400)
    for request in requests:
        house.add(request)
        for _ in range(pause):
            house.step()
    house.run()
    made = house.encoder.encoded
    assert max(made.values(), default=0) <= 1
    wanted = {item.digest for request in requests for item in request.items}
    received = {i.digest for r in requests for i in r.items if i.transfer}
    assert wanted - received <= set(made) <= wanted
    house.close()


@pytest.fixture
def house() -> Any:
    made = House(4, ToyEncoder(delays=(3,)))
    yield made
    made.close()


def test_text_before_an_item_is_computed_meanwhile(house: House) -> None:
    house.add(prompt("0", 10, (1, 32), 5))
    house.step()
    (plan,) = house.plans
    assert [(s.start, s.count, s.items) for s in plan.steps] == [(0, 10, ())]
    assert house.encoder.steps == 1, "the item is encoded at the same time"
    house.run()
    assert sum(plan.num_tokens for plan in house.plans) == 47 + 3


def test_who_waits_for_an_item_holds_up_nobody(house: House) -> None:
    house.add(prompt("0", (1, 32), 5))
    house.add(prompt("1", 8))
    house.step()
    (plan,) = house.plans
    assert [step.count for step in plan.steps] == [8]
    house.run()


def test_a_handed_over_prompt_asks_for_no_items_until_it_must(house: House) -> None:
    house.add(prompt("0", 4, (1, 32), 4, transfer=target(1)))
    house.step()
    house.step()
    assert not house.encoder.encoded
    (admitted,) = house.admitted
    house.emit(house.load_failed("0", 0, "lost"))
    house.unquarantine(admitted.attempt)
    house.run()
    assert house.encoder.encoded == {digest_of(1): 1}
    house.check_stream("0")


def test_who_is_told_that_an_output_is_not_needed(house: House) -> None:
    house.add(prompt("0", (1, 32), 3))
    house.run()
    house.add(prompt("1", 2, (1, 32), 3, transfers=True))
    house.run()
    assert house.peers.used == {target(1010).transfer_id: 1}
    assert house.encoder.encoded == {digest_of(1): 1}


def test_what_is_lost_is_an_error_where_it_must_be() -> None:
    house = House(4, policy="fail")
    house.peers.lost = {target(1000).transfer_id}
    house.add(prompt("0", (1, 32), 3, transfers=True))
    house.add(prompt("1", (2, 33), 3))
    house.run()
    assert house.streams["0", 0].finish == "error"
    assert "could not be loaded" in (house.streams["0", 0].error or "")
    assert house.streams["1", 0].finish == "length"
    house.close()


def test_an_item_larger_than_the_cache_is_refused(house: House) -> None:
    with pytest.raises(RequestError, match="--encoder-cache-tokens") as caught:
        house.add(prompt("0", 1, (1, 129), 1))
    assert caught.value.param == "items[0]"


def test_an_abort_stops_what_nobody_else_wants(house: House) -> None:
    for name in "01":
        house.add(prompt(name, (1, 32), 3))
    house.turn()
    house.emit(house.scheduler.abort("0"))
    house.turn()
    assert house.items.core.scheduler.has_work(), "the other one still waits for it"
    house.emit(house.scheduler.abort("1"))
    house.run()
    assert house.encoder.encoded == {digest_of(1): 1}


def test_what_is_being_encoded_when_its_request_is_aborted_is_kept(house: House) -> None:
    """Whoever asks for it next, be it while it is made or later, finds it."""
    house.add(prompt("0", (1, 32), 3, (2, 40)))
    house.turn()
    assert house.items.core.in_flight
    house.emit(house.scheduler.abort("0"))
    house.add(prompt("1", (1, 32), 5))
    house.run()
    assert house.encoder.encoded == {digest_of(1): 1}, "and what was not begun is not made"
    house.check_stream("1")
    house.add(prompt("2", (3, 33), 3))
    house.turn()
    house.emit(house.scheduler.abort("2"))
    house.run()
    house.add(prompt("3", (3, 33), 3))
    house.run()
    assert house.encoder.encoded[digest_of(3)] == 1


def test_both_choices_wait_for_what_both_lack() -> None:
    house = House(2, ToyEncoder(delays=(6,)), num_blocks=200)
    house.add(prompt("0", (1, 33), 3, n=2, max_tokens=30))
    house.run_until(lambda: len(house.scheduler.running) == 2)
    for sequence in list(house.scheduler.running):
        house.scheduler.preempt(sequence)
    house.items.core.reset_prefix_cache()
    house.scheduler.blocks.pool.reset_cache()
    house.run()
    assert house.encoder.encoded[digest_of(1)] == 2
    for choice in range(2):
        house.check_stream("0", choice)


def test_what_a_step_reads_stays_although_its_sequence_lost_its_blocks() -> None:
    house = House(2, max_num_batched_tokens=60, depth=2)
    house.add(prompt("0", 2, (4, 64), 3))
    house.turn()
    while not (house.reading and house.reading[-1]):
        house.turn()
        house.launch()
    house.scheduler.preempt(house.scheduler.running[-1])
    house.add(prompt("1", (3, 40), 3, priority=-1))
    for _ in range(4):
        house.turn()
        house.check_rows()
    house.run()
    house.check_stream("0")
    house.check_stream("1")


def test_a_reset_while_an_item_is_made_again_in_part() -> None:
    house = House(4, ToyEncoder(delays=(5,)))
    house.add(prompt("0", (1, 64), 3))
    house.run()
    house.scheduler.blocks.pool.reset_cache()
    pool = house.items.core.scheduler.blocks.pool
    pool.evict([max(pool.by_key[0].values())])
    house.add(prompt("1", (1, 64), 3))
    house.turn()
    assert house.items.core.in_flight
    house.items.core.reset_prefix_cache()
    house.run()
    house.check_stream("1")


def test_who_no_longer_needs_an_item_does_not_hold_it() -> None:
    house = House(4, ToyEncoder(delays=(60,)))
    house.add(prompt("0", 4, (1, 32), 4, transfer=target(1)))
    house.step()
    house.add(prompt("1", 4, (1, 32), 4))
    (admitted,) = house.admitted
    house.ranks.receive(admitted.spans, list(house.requests["0"].token_ids), 40)
    house.emit(house.loaded("0", (ChoiceStart(5),), 0))
    house.unquarantine(admitted.attempt)
    house.run()
    assert house.streams["1", 0].finish == "length"
    house.check_stream("1")


def test_a_prompt_whose_last_block_is_computed_again_waits_for_its_item() -> None:
    house = House(4, num_blocks=10)
    for name in "01":
        house.add(prompt(name, (1, 33), 3, max_tokens=1))
        house.run()
        house.check_stream(name)
    assert all(step.count for plan in house.plans for step in plan.steps)


def test_an_item_that_ends_a_cached_prompt_may_be_received(house: House) -> None:
    house.add(prompt("0", 4, (1, 32), max_tokens=1))
    house.run()
    house.items.core.reset_prefix_cache()
    house.add(prompt("1", 4, (1, 32), max_tokens=1, transfers=True))
    house.run()
    assert house.encoder.encoded == {digest_of(1): 1}
    house.check_stream("1")


def test_who_waits_with_a_transfer_of_its_own_declines_it(house: House) -> None:
    house.add(prompt("0", (1, 32), 3))
    house.add(prompt("1", (1, 32), 3, transfers=True))
    house.turn()
    house.emit(house.scheduler.abort("0"))
    house.run()
    assert house.encoder.encoded == {digest_of(1): 1}
    assert house.peers.used == {target(1010).transfer_id: 1}


def test_who_is_over_declines_what_it_has_not_used() -> None:
    """Be it that it waits for room in the encoder cache, or that it was never asked for."""
    house = House(2, ToyEncoder(delays=(3,)))
    house.add(prompt("0", (1, 64), 3))
    house.turn()
    house.add(prompt("1", (2, 32), 3, transfers=True))
    house.add(prompt("2", 4, (3, 32), 4, transfers=True, transfer=target(1)))
    house.turn()
    assert not house.peers.used
    for name in "12":
        house.emit(house.scheduler.abort(name))
    assert house.peers.used == {target(1010).transfer_id: 1, target(1020).transfer_id: 1}
    house.run()


def test_who_brought_no_image_fails_alone() -> None:
    house = House(4, ToyEncoder(needs_data=True))
    bare = prompt("0", (1, 32), 3, transfers=True)
    item = msgspec.structs.replace(bare.items[0], data=b"")
    house.peers.lost = {target(1000).transfer_id}
    house.add(msgspec.structs.replace(bare, items=(item,)))
    house.add(prompt("1", (1, 32), 3))
    house.run()
    assert house.streams["0", 0].finish == "error"
    house.check_stream("1")
    assert house.streams["1", 0].finish == "length"


def test_a_refused_transfer_is_not_the_end(house: House) -> None:
    request = prompt("0", (1, 32), 3, transfers=True)
    (item,) = request.items
    stranger = msgspec.structs.replace(target(1000), peer=None)
    item = msgspec.structs.replace(item, transfer=stranger)
    house.add(msgspec.structs.replace(request, items=(item,)))
    house.run()
    assert house.streams["0", 0].finish == "length"

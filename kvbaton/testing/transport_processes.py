"""L3 of transports: the peer is another process, which is stopped and killed."""

from __future__ import annotations

import itertools
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np

from kvbaton.connectors.base import FenceScope, Handle, Peer, Status
from kvbaton.connectors.registry import load_transport
from kvbaton.testing.kit import KitBroke, require, tasks_per_core
from kvbaton.testing.remote import start_worker
from kvbaton.testing.remote_worker import FILLED, NOTICE
from kvbaton.testing.transport_rig import (
    PAUSE_S,
    Pair,
    Polled,
    case,
    digest_of,
    fresh_name,
    memory_of,
    pack,
    pause_after,
)

NUM_BYTES = 48 << 20
FRACTIONS = (0.0, 0.1, 0.5, 0.9, 1.0)
"""When the peer is killed, as fractions of a write's bytes or time."""
KILLS = 3
"""Attempts: a write may complete by chance between the check and the kill of its target."""
FOUND_WITHIN_S = 5.0
"""Maximum seconds until a death is noticed."""
WRITE_S = 1.0
"""Maximum seconds of a `write`, which waits for no peer, on a busy machine."""
WATCH_S = 0.2
"""Seconds for which memory is watched for late bytes."""
WATCH_DRAINED_S = 1.0
"""Seconds for which a continued process is watched for late bytes, on an idle machine."""
UNTOUCHED = 99
KILLED = "a write to a killed process must end"


class _Sides(Polled):
    """A transport here and one in another process, connected from here."""

    def __init__(self, pair: Pair) -> None:
        spec = pair.spec or ""
        self.patience = pair.patience
        self.remote = start_worker("transport", spec, NUM_BYTES, "cpu", patience=pair.patience)
        self.transport = load_transport(spec, name=fresh_name())
        self.memory = np.tile(np.arange(256, dtype=np.uint8), NUM_BYTES // 256)
        self.transport.register(memory_of(self.memory))
        self.notices: list[bytes] = []
        self.lost: list[Peer] = []

    def __enter__(self) -> Self:
        _, card, pid, address = self.remote.started()
        self._far = Path(f"/proc/{pid}/mem"), int(address)
        self.peer = self.transport.connect(bytes.fromhex(card))
        return self

    def __exit__(self, *exception: object) -> None:
        self.remote.__exit__(*exception)
        self.transport.shutdown()

    def write(self, notice: bytes) -> Handle:
        """Start writing the whole local region over the peer's."""
        return self.transport.write(self.peer, pack([(0, 0, 0, 0, NUM_BYTES, 1, 0, 0)]), notice)

    def theirs(self) -> bytes:
        """The peer's memory, also if its process is stopped."""
        path, address = self._far
        try:
            with path.open("rb", 0) as memory:
                return os.pread(memory.fileno(), NUM_BYTES, address)
        except PermissionError as error:
            raise KitBroke(f"the memory of another process can't be read: {error}") from error

    def poll(self) -> None:
        """Make progress."""
        self.notices += [notice.payload for notice in self.transport.notices()]
        self.lost += self.transport.lost()

    def expect_lost(self) -> None:
        """The peer is dead: it must be reported as lost, and then a fence must succeed."""
        self.wait(lambda: self.lost == [self.peer], "a dead peer is lost", FOUND_WITHIN_S)
        self.wait(lambda: self.transport.fence(self.peer), "a fence of the dead", FOUND_WITHIN_S)

    def expect_untouched(self, seconds: float = 0.0) -> None:
        """No byte and no notice of the peer may land here any more."""
        before = len(self.notices)
        self.poll()
        self.notices = self.notices[:before]
        self.memory[:] = UNTOUCHED
        limit = time.monotonic() + seconds
        for polls in itertools.count():
            self.poll()
            require(len(self.notices) == before, "a notice after the fence")
            if time.monotonic() >= limit:
                break
            pause_after(polls)
        require(bool((self.memory == UNTOUCHED).all()), "bytes landed after the fence")


@case(3, "processes")
def bytes_are_there_when_their_notice_is(pair: Pair) -> None:
    """In another process, too, all bytes have landed when the notice arrives."""
    with _Sides(pair) as sides:
        for number in range(3):
            sides.memory += 1
            sides.complete(sides.write(bytes([number])))
            _, payload, digest = sides.remote.line("notice")
            require(bytes.fromhex(payload) == bytes([number]), "a notice was changed")
            right = digest == digest_of(sides.memory)
            require(right, "at the notice, the bytes in the other process are wrong")


@case(3, "processes")
def a_killed_target(pair: Pair) -> None:
    """Whenever the target is killed, writes end soon, it is reported lost, and a fence succeeds."""
    for fraction in FRACTIONS:
        # On a busy machine a write may really complete between the check and the kill.
        honest = any(_kill_amid_writes(pair, fraction) for _ in range(KILLS))
        require(honest, "a write to the killed can't be done")


def _kill_amid_writes(pair: Pair, fraction: float) -> bool:
    """Kill a target; returns False if a write that was in flight is reported as done."""
    with _Sides(pair) as sides:
        sides.complete(sides.write(b"first"))  # a warm-up, not timed
        start = time.monotonic()
        sides.complete(sides.write(b"second"))
        seconds = time.monotonic() - start
        handles = [sides.write(b"more") for _ in range(4)]
        time.sleep(seconds * fraction)
        last = handles[-1]
        in_flight = last.status() is Status.PENDING
        sides.remote.signal(signal.SIGKILL)
        for handle in handles:
            sides.finish(handle, KILLED, FOUND_WITHIN_S)
        done = last.status() is Status.DONE
        require(done or not in_flight or bool(last.error()), "a failed write must say why")
        sides.expect_lost()
        closes = partial(sides.transport.close, sides.peer)
        sides.wait(closes, "a dead peer is closed", FOUND_WITHIN_S)
        if in_flight and not done:
            drained = "drained once its peer is closed"
            sides.wait(lambda: last.status() is Status.DRAINED, drained, FOUND_WITHIN_S)
        late = sides.finish(sides.write(b"late"), KILLED, FOUND_WITHIN_S)
        require(late is not Status.DONE, "a write to the dead can't be done")
        return not (in_flight and done)


@case(3, "processes")
def a_killed_idle_target(pair: Pair) -> None:
    """An idle target that is killed is reported lost as well, and a fence succeeds."""
    with _Sides(pair) as sides:
        sides.complete(sides.write(b"first"))
        sides.remote.line("notice")
        sides.remote.signal(signal.SIGKILL)
        sides.expect_lost()


@case(3, "processes")
def a_killed_writer(pair: Pair) -> None:
    """Whenever a writer is killed, it is lost, a fence holds, and no partial write is notified."""
    for fraction in FRACTIONS:
        with _Sides(pair) as sides:
            sides.memory[:] = UNTOUCHED
            watched = max(0, int(fraction * NUM_BYTES) - 1)
            sides.remote.tell(f"write {sides.transport.card().hex()}")
            landed = lambda: sides.memory[watched] == FILLED  # noqa: E731, B023
            sides.wait(landed, f"the first {fraction:.0%} of a write")
            sides.remote.signal(signal.SIGKILL)
            sides.expect_lost()
            whole = bool((sides.memory == FILLED).all())
            require(whole or not sides.notices, "a notice came for a part of the bytes")
            require(set(sides.notices) <= {NOTICE}, "a notice was changed")
            sides.expect_untouched()


@case(3, "processes")
def a_stopped_writer(pair: Pair) -> None:
    """A fence of a stopped writer really holds, or it does not succeed until the writer is dead."""
    with _Sides(pair) as sides:
        sides.remote.tell(f"write {sides.transport.card().hex()}")
        sides.wait(lambda: len(sides.notices) >= 2, "notices of a writer")
        sides.remote.signal(signal.SIGSTOP)
        fences = partial(sides.transport.fence, sides.peer)
        if sides.transport.capabilities.fence is FenceScope.PEER:
            sides.wait(fences, "a fence of scope PEER of the stopped", FOUND_WITHIN_S)
        else:
            require(not fences(), "this fence claims what it can't know: the peer may go on")
            sides.remote.signal(signal.SIGKILL)
            sides.wait(fences, "a fence of the dead")
        sides.remote.signal(signal.SIGCONT)
        sides.expect_untouched(WATCH_S)


@case(3, "processes")
def a_stopped_target(pair: Pair) -> None:
    """A write to a stopped target is pending, or done and there; `write` and `close` return."""
    with _Sides(pair) as sides:
        sides.complete(sides.write(b"first"))
        sides.memory += 1
        sides.remote.signal(signal.SIGSTOP)
        start = time.monotonic()
        handle = sides.write(b"stuck")
        seconds = time.monotonic() - start
        require(seconds < WRITE_S, f"write took {seconds:.1f} s: it is to return at once")
        limit = time.monotonic() + WATCH_S
        while (status := handle.status()) is Status.PENDING and time.monotonic() < limit:
            sides.poll()
            time.sleep(PAUSE_S)
        told = handle.error()
        require(status in (Status.PENDING, Status.DONE), f"a write to the stopped failed: {told}")
        _require_truth(sides, handle)
        start = time.monotonic()
        sides.transport.close(sides.peer)
        seconds = time.monotonic() - start
        require(seconds < 3.0, f"close took {seconds:.1f} s")
        _require_truth(sides, handle)
        _require_drained_is_final(sides, handle)
        sides.remote.signal(signal.SIGKILL)
        final = handle.status() if handle.status() is Status.DONE else Status.DRAINED
        sides.wait(lambda: handle.status() is final, "drained", FOUND_WITHIN_S)


def _require_drained_is_final(sides: _Sides, handle: Handle) -> None:
    """If a write to a live target is soon DRAINED, none of its bytes may land there afterwards."""
    limit = time.monotonic() + 2 * WATCH_S
    while handle.status() is not Status.DRAINED:
        sides.poll()
        time.sleep(PAUSE_S)
        if handle.status() is Status.DONE or time.monotonic() >= limit:
            return  # most transports can't take back bytes on the wire
    drained = sides.theirs()
    sides.remote.signal(signal.SIGCONT)
    limit = time.monotonic() + WATCH_DRAINED_S * tasks_per_core()
    while time.monotonic() < limit:
        require(sides.theirs() == drained, "bytes of a write landed after it had DRAINED")
        sides.poll()


def _require_truth(sides: _Sides, handle: Handle) -> None:
    """If a write to a stopped target is DONE, its bytes must be in the target's memory."""
    there = handle.status() is not Status.DONE or sides.theirs() == sides.memory.tobytes()
    require(there, "a write to the stopped is DONE, but its bytes are not there")

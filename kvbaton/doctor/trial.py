"""One transport between two processes: loaded, registered, connected, moved, verified, timed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import numpy as np
from msgspec import Struct

from kvbaton.connectors.base import Device, Peer, Ranges, Transport
from kvbaton.connectors.registry import load_transport
from kvbaton.errors import KvbatonError, TransportError
from kvbaton.testing.buffers import Buffer
from kvbaton.testing.far_process import FarProcess
from kvbaton.testing.far_transport import QUIET
from kvbaton.testing.kit import CaseFailure
from kvbaton.testing.timing import timed_write

NUM_BYTES = 64 << 20
RUN_BYTES = 64 << 10
"""Of one block in the test pattern; every second block goes to another place."""
SMALL_BYTES = 4 << 10
REPEATS = 5
STEP_S = 30.0
STEPS = ("load", "register", "connect", "move", "verify", "time")


class Trial(Struct, kw_only=True):
    """How a transport did.

    Attributes:
        transport: its name.
        device: of the memory at both ends.
        failed_at: the step of `STEPS` that failed; None if all went well.
        error: why.
        gib_per_s: of 64 KiB runs, the best of a few writes of 64 MiB.
        small_us: of one write of 4 KiB until it is known to have landed, in microseconds.
        host_staged: whether these bytes passed through memory of the host on their way.
    """

    transport: str
    device: str
    failed_at: str | None = None
    error: str = ""
    gib_per_s: float = 0.0
    small_us: float = 0.0
    host_staged: bool = False

    @property
    def ok(self) -> bool:
        """Whether every step went well."""
        return self.failed_at is None


def try_transport(spec: str, device: Device) -> Trial:
    """Run all steps; never raises for what a transport does."""
    trial = Trial(transport=spec.partition(":")[0], device=device)
    steps = iter(STEPS)
    trial.failed_at = next(steps)
    try:
        for _ in _steps(spec, device, trial):
            trial.failed_at = next(steps, None)
    except CaseFailure as failure:  # of the far side; it is no error of ours by type
        trial.error = str(failure)
    except (KvbatonError, OSError, RuntimeError, ValueError, ImportError) as error:
        trial.error = f"{type(error).__name__}: {error}"
    return trial


def _steps(spec: str, device: Device, trial: Trial) -> Iterator[None]:
    """Does a step, then yields."""
    near = load_transport(spec, name=f"doctor-near-{spec}-{device}", host="127.0.0.1")
    try:
        yield
        near.register(Buffer(device, NUM_BYTES, None).memory)
        trial.host_staged = device in near.capabilities.host_staged
        yield
        with _far_side(spec, device, near) as far:
            peer = near.connect(far.card)
            yield
            timed_write(near, peer, _all(), b"check", poll=far.poll, patience=STEP_S)
            yield
            _verify(far)
            yield
            trial.gib_per_s, trial.small_us = _time(near, peer, far)
            yield
    finally:
        near.shutdown()


# --- the far side ---


class Far:
    """Whoever is written to.

    Attributes:
        card: of its transport.
        poll: lets it make progress where it lives in this process.
        landed: waits until a write has landed, and returns the digest of its memory.
    """

    def __init__(self, card: bytes, poll: Callable[[], object], landed: Callable[[], str]) -> None:
        self.card = card
        self.poll = poll
        self.landed = landed


@contextmanager
def _far_side(spec: str, device: Device, near: Transport) -> Iterator[Far]:
    """Another process; for the transport that never leaves its process, another transport."""
    if spec.partition(":")[0] == "memory":
        with _here(spec, device) as far:
            yield far
        return
    words = [sys.executable, "-m", "kvbaton.testing.far_transport", spec, str(NUM_BYTES), device]
    with FarProcess(words, STEP_S) as process:

        def said(word: str) -> str:
            return process.line(word, idle=near.notices)[-1]

        yield Far(bytes.fromhex(said("card")), lambda: None, lambda: said("notice"))


@contextmanager
def _here(spec: str, device: Device) -> Iterator[Far]:
    buffer = Buffer(device, NUM_BYTES, 0)
    transport = load_transport(spec, name=f"doctor-far-{spec}", host="127.0.0.1")
    transport.register(buffer.memory)
    try:
        yield Far(transport.card(), transport.notices, buffer.digest)
    finally:
        transport.shutdown()


# --- writes ---


def _all() -> Ranges:
    """Every run of `RUN_BYTES`, each second one swapped with its neighbour."""
    count = NUM_BYTES // RUN_BYTES
    rows = np.zeros((count, 8), np.int64)
    rows[:, 1] = np.arange(count) * RUN_BYTES
    rows[:, 3] = (np.arange(count) ^ 1) * RUN_BYTES
    rows[:, 4], rows[:, 5] = RUN_BYTES, 1
    return rows


def _verify(far: Far) -> None:
    """Compare digests.

    Raises:
        TransportError: the bytes at the far side are not those that were sent.
    """
    sent = _expected()
    if (found := far.landed()) != sent:
        raise TransportError(f"the far side holds {found}, but {sent} was sent")


def _expected() -> str:
    """Digest of what `_all` makes of the near side's bytes, computed without any transport."""
    expected = Buffer("cpu", NUM_BYTES, None)
    runs = expected.memory.owner
    assert isinstance(runs, np.ndarray)
    pairs = runs.reshape(-1, 2, RUN_BYTES)
    pairs[:] = pairs[:, ::-1].copy()
    return expected.digest()


def _time(near: Transport, peer: Peer, far: Far) -> tuple[float, float]:
    """GiB/s of large writes and microseconds of small ones."""
    small = np.array([[0, 0, 0, 0, SMALL_BYTES, 1, 0, 0]], np.int64)

    def seconds(ranges: Ranges) -> float:
        return timed_write(near, peer, ranges, QUIET, poll=far.poll, patience=STEP_S)

    large = min(seconds(_all()) for _ in range(REPEATS))
    little = median(seconds(small) for _ in range(10 * REPEATS))
    return NUM_BYTES / large / 2**30, little * 1e6


def copy_rate() -> float:
    """GiB/s of a plain copy in memory, to compare with."""
    source, target = np.ones(NUM_BYTES, np.uint8), np.zeros(NUM_BYTES, np.uint8)
    best = 1e9
    for _ in range(REPEATS):
        start = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - start)
    return NUM_BYTES / best / 2**30

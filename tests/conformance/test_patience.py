"""How long the kit waits: longer on a busy machine, and for much that is kept slowly."""

from __future__ import annotations

import os
import time

import pytest

from kvbaton.connectors.store import NO_HINTS, Hints, Pieces
from kvbaton.connectors.stores.memory import Arena
from kvbaton.connectors.stores.threaded import ThreadedStore
from kvbaton.testing.check import Subject
from kvbaton.testing.kit import CaseFailure
from kvbaton.testing.store_rig import MANY_BYTES, StoreRig
from tests.connectors_broken.stores import BrokenMemory

SECONDS_PER_MIB = 0.15
PATIENCE_S = 1.0


class KeepsSlowly(BrokenMemory):
    """Takes its time for each byte, as a slow disk does."""

    store = ThreadedStore.store

    class Broken(Arena):
        def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
            time.sleep(SECONDS_PER_MIB * sum(map(len, source)) / (1 << 20))
            return super().put(key, source, hints)


SPEC = f"{__name__}:KeepsSlowly"


def test_much_is_waited_for_at_the_pace_of_what_came_before() -> None:
    with StoreRig(SPEC, patience=PATIENCE_S) as rig:
        rig.put(rig.objects([MANY_BYTES]))
        start = time.monotonic()
        rig.put(rig.objects([8 * MANY_BYTES]))
        assert time.monotonic() - start > PATIENCE_S


def test_what_nothing_came_before_is_waited_for_as_any_answer() -> None:
    with StoreRig(SPEC, patience=PATIENCE_S) as rig:
        with pytest.raises(CaseFailure, match="a future is not done after 1 s"):
            rig.put(rig.objects([16 * MANY_BYTES]))


@pytest.mark.parametrize(("load", "times"), [(0.1, 1.0), (1.0, 1.0), (3.5, 3.5)])
@pytest.mark.parametrize("cores", [1, 4])
def test_a_busy_machine_gets_more_time(
    monkeypatch: pytest.MonkeyPatch, load: float, times: float, cores: int
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load * cores, 0.0, 0.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    with Subject("memory", "store", patience=2.0).rig() as rig:
        assert rig.patience == pytest.approx(2.0 * times)

"""The hub holds writes in flight, and a held write dies with its fence, its peer or its writer."""

from collections.abc import Callable

import pytest

from kvbaton.connectors.base import Handle, Status
from kvbaton.connectors.transports.memory import MemoryHub, MemoryTransport
from kvbaton.errors import TransportError
from kvbaton.testing.transport_rig import Pair, pack

ROW = (0, 0, 0, 0, 64, 1, 0, 0)


def held() -> tuple[MemoryHub, Pair, Handle]:
    """A pair with one write in flight."""
    hub = MemoryHub()
    pair = Pair(lambda: (MemoryTransport("left", hub=hub), MemoryTransport("right", hub=hub)))
    hub.hold()
    return hub, pair, pair.source.write(pair.peer, pack([ROW]), b"held")


def test_a_held_write_lands_when_it_is_released() -> None:
    hub, pair, handle = held()
    second = pair.write([(0, 64, 0, 64, 64, 1, 0, 0)], b"second")
    assert handle.status() is second.status() is Status.PENDING
    pair.poll()
    assert not pair.notices
    pair.expected[0][:64] = pair.source_memory[0][:64]
    hub.release()
    assert handle.status() is second.status() is Status.DONE
    pair.poll()
    assert pair.notices == [b"held", b"second"]
    pair.compare("after release")


ENDS: dict[str, Callable[[Pair], object]] = {
    "fence": lambda pair: pair.target.fence(pair.back),
    "close": lambda pair: pair.source.close(pair.peer),
    "target dies": lambda pair: pair.target.shutdown(),
    "writer dies": lambda pair: pair.source.shutdown(),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_held_write_never_lands_after(end: str) -> None:
    hub, pair, handle = held()
    ENDS[end](pair)
    assert handle.status() is Status.DRAINED
    hub.release()
    pair.poll()
    pair.compare(end)
    assert not pair.notices
    assert handle.status() is Status.DRAINED


def test_a_write_held_over_a_deregistered_target_does_not_land() -> None:
    hub, pair, handle = held()
    pair.target.deregister(pair.target_regions[0])
    hub.release()
    assert handle.status() is Status.DRAINED
    pair.compare("after deregister")


def test_names_are_unique_on_a_hub_and_hubs_are_apart() -> None:
    hub = MemoryHub()
    first = MemoryTransport("one", hub=hub)
    with pytest.raises(TransportError, match="'one' is taken"):
        MemoryTransport("one", hub=hub)
    elsewhere = MemoryTransport("one", hub=MemoryHub())
    with pytest.raises(TransportError, match="no transport 'two'"):
        elsewhere.connect(MemoryTransport("two", hub=hub).card())
    assert first.name == elsewhere.name


def test_bytes_that_are_no_card_are_refused() -> None:
    hub = MemoryHub()
    one, two = MemoryTransport("one", hub=hub), MemoryTransport("two", hub=hub)
    for card in (b"", b"\xc1", two.card().replace(b"two", b"\xfftw")):  # the last is not UTF-8
        with pytest.raises(TransportError, match="not a card of the memory transport"):
            one.connect(card)

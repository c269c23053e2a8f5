"""L1 of stores: every byte comes back, under its own key."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from kvbaton.connectors.base import Memory
from kvbaton.connectors.store import Piece, Pieces, Registering
from kvbaton.testing.kit import require
from kvbaton.testing.store_rig import StoreRig, case, targets_for, view_of, views

if TYPE_CHECKING:
    from hypothesis.strategies import DataObject

SIZES = (0, 1, 2, 3, 7, 127, 128, 129, 4095, 4096, 4097, 65_536, 65_537, 262_144, 1_000_003,
         1 << 20, 2 << 20)  # fmt: skip
LARGE = 24 << 20
GUARD = 64
PAGE = 4096
UNTOUCHED = b"\xa5"
MANY_KEYS = 150
"""Number of objects deleted in one call."""


@case(1)
def sizes(rig: StoreRig) -> None:
    """Objects of any length, 0 included, and of any content are loaded as they were stored."""
    objects = rig.objects(SIZES) | {rig.key(): data for data in _special(rig.noise(5000))}
    rig.put(objects)
    rig.expect(objects, "after store")
    require(all(rig.found(list(objects))), "lookup does not find what load finds")


def _special(noise: bytes) -> list[bytes]:
    """Contents that random bytes never have: nearly equal, of one repeated byte, padded ends."""
    ends = (b"\0" * 70, b"\r\n \t\n", b"\xff" * 70)
    near = [noise[:at] + bytes([noise[at] ^ 1]) + noise[at + 1 :] for at in (0, 2500, 4999)]
    return [
        noise,
        *near,
        *(bytes([n]) * 4096 for n in (0, 10, 255)),
        *(e + noise + e for e in ends),
    ]


@case(1)
def a_large_object(rig: StoreRig) -> None:
    """One object of tens of megabytes is loaded as it was stored."""
    capacity = rig.store.usage().capacity
    objects = rig.stored([min(LARGE, (capacity or 2 * LARGE) // 2) + 13])
    rig.expect(objects, "after store")


@case(1)
def pieces(rig: StoreRig) -> None:
    """An object is the same however sources and targets are cut into pieces, even empty ones."""
    for size in (10, 4096, 100_003):
        for cuts in (1, 2, 3, 17, 300):
            key, data, target = rig.key(), rig.noise(size), bytearray(size)
            rig.wait(rig.store.store([key], [rig.cut(data, cuts)]), "store")
            rig.expect_in(rig.cut(target, 301 - cuts), key, data, f"{cuts} pieces")


@case(1)
def only_the_target(rig: StoreRig) -> None:
    """A load writes its targets and no byte beside them."""
    objects = rig.stored([1, 63, 5000])
    for key, data in objects.items():
        memory = bytearray(b"\xa5" * (len(data) + 2 * GUARD))
        middle = memoryview(memory)[GUARD : GUARD + len(data)]
        half = len(data) // 2
        rig.wait(rig.store.load([key], [[middle[:half], middle[half:]]]), "load")
        rig.compare(bytes(middle), data, "between guards")
        beside = bytes(memory[:GUARD]) + bytes(memory[-GUARD:])
        require(beside == b"\xa5" * (2 * GUARD), "bytes beside the target were written")


@case(1)
def sources_stay(rig: StoreRig) -> None:
    """A store reads its sources, which may be read-only, and never writes them."""
    data = bytearray(rig.noise(70_000))
    before, key = bytes(data), rig.key()
    rig.wait(rig.store.store([key], [[memoryview(data).toreadonly()]]), "store")
    require(bytes(data) == before, "the source was changed")
    rig.expect({key: before}, "from a read-only source")


@case(1)
def sources_are_free_once_done(rig: StoreRig) -> None:
    """Once `store` is done its sources belong to the caller again: overwriting them is harmless."""
    for _ in range(4):
        objects = rig.objects([100, 200_000])
        buffers = [bytearray(data) for data in objects.values()]
        rig.wait(rig.store.store(list(objects), views(buffers)), "store")
        for buffer in buffers:
            buffer[:] = b"\xee" * len(buffer)
        rig.expect(objects, "after the source was overwritten")


@case(1, "registers")
def registered_memory(rig: StoreRig) -> None:
    """Pieces inside and outside of registered memory are stored and loaded alike."""
    assert isinstance(rig.store, Registering)
    pools = [memoryview(bytearray(300_000)) for _ in range(3)]
    rig.store.register(pools[:2])
    for key, data in rig.objects([10, 4096, 100_003]).items():
        half = len(data) // 2
        places = [[pool[7 : 7 + half], pool[1000:][half : len(data)]] for pool in pools]
        sources = [[places[n][0], places[n - 1][1]] for n in range(len(pools))]
        for source in sources:
            source[0][:], source[1][:] = data[:half], data[half:]
            rig.wait(rig.store.store([key], [source]), "store")
            for target in sources:
                target[0][:], target[1][:] = bytes(half), bytes(len(data) - half)
                rig.expect_in(target, key, data, "registered memory")
            rig.drop([key])


@case(1, "registers")
def registered_pages(rig: StoreRig) -> None:
    """Pieces aligned to pages of registered memory are filled to their end, and no further.

    With direct I/O the last page of an odd length is prone to errors.
    """
    assert isinstance(rig.store, Registering)
    regions = [_on_a_page(40 * PAGE) for _ in range(2)]
    rig.store.register(regions)
    for size in (PAGE, 3 * PAGE, PAGE - 1, PAGE + 1, 5 * PAGE + 77, 17 * PAGE - 512):
        ((key, data),) = rig.objects([size]).items()
        for source, target in (regions, regions[::-1]):
            source[PAGE : PAGE + size] = data
            rig.wait(rig.store.store([key], [[source[PAGE : PAGE + size]]]), "store")
            source[:] = target[:] = UNTOUCHED * len(target)
            place = target[2 * PAGE : 2 * PAGE + size]
            rig.expect_in([place], key, data, "whole pages of a region")
            place[:] = UNTOUCHED * size
            around = target == source == UNTOUCHED * len(target)
            require(around, f"a load of {size} bytes wrote outside of its target")
            rig.drop([key])


def _on_a_page(num_bytes: int) -> memoryview:
    """Memory that is aligned to a page."""
    memory = bytearray(num_bytes + PAGE)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % PAGE
    return memoryview(memory)[start : start + num_bytes]


@case(1, "devices")
def registered_by_address(rig: StoreRig) -> None:
    """Pieces that are `Memory`, mixed with views in any order, are stored and loaded alike."""
    assert isinstance(rig.store, Registering)
    kinds = rig.store.capabilities.devices
    require("cpu" in kinds, f"devices are {sorted(kinds)}, without the one that this kit drives")
    memory = ctypes.create_string_buffer(400_000)
    region = Memory(ctypes.addressof(memory), len(memory), owner=memory)
    rig.store.register([region])
    for key, data in rig.objects([12, 4096, 100_003]).items():
        size, third = len(data), len(data) // 3
        ends = [third, 2 * third, size]
        beside = bytearray(size)

        def places(start: int, ends: list[int] = ends, beside: bytearray = beside) -> list[Piece]:
            low, middle, high = ends
            last = region.part(start + middle, start + high)
            view = memoryview(beside)[low:middle]
            return [region.part(start, start + low), view, last, region.part(7, 7)]

        _fill(places(101), data)
        sources = cast("list[Pieces]", [places(101)])
        rig.wait(rig.store.store([key], sources), "store")
        _fill(places(101), bytes(size))
        _fill(places(200_000), bytes(size))
        rig.expect_in(places(200_000), key, data, "memory by its address")
        rig.expect({key: data}, "stored from memory by its address")
        require(memory.raw[:101] == bytes(101), "bytes beside the target were written")


def _fill(pieces: Sequence[Piece], data: bytes) -> None:
    at = 0
    for view in map(view_of, pieces):
        view[:] = data[at : at + len(view)]
        at += len(view)


@case(1)
def another_length_is_a_miss(rig: StoreRig) -> None:
    """A target of another length than the object is a miss, and the object stays."""
    (key,) = objects = rig.stored([1000])
    for other in (0, 1, 999, 1001, 2000):
        require(rig.get(key, other) is None, f"1000 bytes were loaded into a target of {other}")
    rig.expect(objects, "after loads of other lengths")


@case(1)
def every_byte_of_a_key_counts(rig: StoreRig) -> None:
    """Keys that differ in one byte, or in the order of their bytes, name different objects."""
    first = rig.key()[:16] + b"KVbatonMixedCase"
    near = [first[:i] + bytes([first[i] ^ 1]) + first[i + 1 :] for i in range(len(first))]
    near += [first[::-1], first[16:] + first[:16], first[:16] + first[16:].swapcase()]
    rig.put({first: b"first"})
    found = rig.found(near)
    wrong = [i for i, there in enumerate(found) if there]
    require(not wrong, f"lookup of one key finds those that differ at {wrong}")
    loaded = [rig.get(key, 5) for key in near]
    require(loaded == [None] * len(near), "load of one key gives the object of another")
    rig.put({key: bytes([number]) for number, key in enumerate(near)})
    rig.expect({first: b"first"}, "after objects under nearly equal keys")
    if rig.lacks("deletes") is None:
        gone = near[31::-8]
        rig.wait(rig.store.delete(gone), "delete")
        kept = {key: bytes([n]) for n, key in enumerate(near) if key not in gone}
        rig.expect({first: b"first"} | kept, "after objects under nearly equal keys were deleted")


@case(1)
def keys_of_any_bytes(rig: StoreRig) -> None:
    """A key is 32 bytes of any value: zeros, newlines, slashes, bytes above 127."""
    endings = (
        bytes(16),
        b"\xff" * 16,
        b"/../" * 4,
        b"\r\n\0 " * 4,
        b"*?[]{}'\"" * 2,
        b"%00:~%0a" * 2,
    )
    objects = {rig.key()[:16] + ending: rig.noise(50) for ending in endings}
    rig.put(objects)
    rig.expect(objects, "under unusual keys")


@case(1)
def storing_again_does_nothing(rig: StoreRig) -> None:
    """Storing an existing key again answers True, and keeps the first object."""
    (key,) = objects = rig.stored([3000])
    rig.put({key: bytes(3000)})
    rig.expect(objects, "after other bytes were stored under its key")


@case(1)
def answers_are_in_order(rig: StoreRig) -> None:
    """In one call, answers are in the order of the keys, and each target gets its own object."""
    objects = rig.objects(range(100, 100 + rig.at_once(40)))
    there = dict(list(objects.items())[::3])
    rig.put(there)
    wanted = [key in there for key in objects]
    require(list(rig.found(list(objects))) == wanted, "lookup mixes its answers up")
    loaded, targets = rig.load(objects)
    require(loaded == wanted, "load mixes its answers up")
    rig.compare_hits(loaded, targets, objects, "in a call with misses")


@case(1)
def one_key_twice(rig: StoreRig) -> None:
    """One call may have the same key twice."""
    key, data = rig.key(), rig.noise(9000)
    stored = rig.wait(rig.store.store([key, key], views([data, data])), "store")
    require(stored == [True, True], f"store of a key twice said {stored}")
    targets = [bytearray(9000), bytearray(9000)]
    loaded = rig.wait(rig.store.load([key, key], views(targets)), "load")
    require(loaded == [True, True], f"load of a key twice said {loaded}")
    found = rig.found([key, key])
    require(found == (True, True), f"lookup of a key twice said {found}")
    for target in targets:
        rig.compare(bytes(target), data, "loaded twice in one call")


@case(1)
def as_many_keys_as_declared(rig: StoreRig) -> None:
    """A call may have `max_keys` keys."""
    objects = rig.stored([33] * min(rig.store.capabilities.max_keys, 1024))
    loaded, targets = rig.load(objects)
    require(all(loaded) and all(rig.found(list(objects))), "not all objects are there")
    same = targets == list(objects.values())
    require(same, "a call with as many keys as declared has wrong bytes")


@case(1, "deletes")
def deleted_is_gone(rig: StoreRig) -> None:
    """`delete` removes and counts existing objects; their keys are free for other objects then."""
    objects = rig.stored([10, 20_000])
    rig.expect(objects, "after store")
    keys = list(objects)
    many = rig.stored([100] * min(MANY_KEYS, rig.store.capabilities.max_keys))
    count = rig.wait(rig.store.delete([*keys, rig.key()]), "delete")
    require(count == 2, f"two objects and an unknown key were deleted, the answer is {count}")
    require(rig.found(keys) == (False, False), "lookup finds deleted objects")
    count = rig.wait(rig.store.delete(list(many)), "delete")
    require(count == len(many), f"{len(many)} objects were deleted in one call, it said {count}")
    require(not any(rig.found(list(many))), f"of {len(many)} deleted objects some are found")
    require(rig.get(keys[0], 10) is None, "a deleted object was loaded")
    others = {key: rig.noise(len(data)) for key, data in objects.items()}
    rig.put(others)
    rig.expect(others, "stored under a deleted key")


@case(1, "small")
def a_full_store_says_no(rig: StoreRig) -> None:
    """An object that can't fit is refused with False, without an error, and without other harm."""
    small = rig.stored([1000])
    huge = rig.objects([(rig.store.usage().capacity or 0) + 1])
    answers = rig.ask_store(rig.objects([1000]) | huge)
    require(answers == [True, False], f"an object, and one larger than the store: {answers}")
    require(rig.found(list(huge)) == (False,), "lookup finds an object that was refused")
    rig.expect_whole(small, "beside a refused object")
    rig.put(rig.objects([1000]))


@case(1, "small")
def a_full_store_stays_right(rig: StoreRig) -> None:
    """However much is stored, objects that are found are right, and the capacity holds."""
    capacity = rig.store.usage().capacity or 0
    objects: dict[bytes, bytes] = {}
    for _ in range(14):
        more = rig.objects((rig.random.integers(1, capacity // 24, 4)).tolist())
        rig.ask_store(more)
        objects |= more
        held = rig.store.usage().num_bytes
        require(held is None or held <= capacity, f"{held} bytes are held, {capacity} are allowed")
    require(sum(map(len, objects.values())) > 0, "nothing was stored")
    there = rig.expect_whole(objects, "after more was stored than fits")
    held = sum(len(objects[key]) for key in there)
    require(held <= capacity, f"objects of {held} bytes are there, {capacity} are allowed")


@case(1, "persistent")
def outlives_close(rig: StoreRig) -> None:
    """Stored objects are there when the store is opened again."""
    objects = rig.stored([1, 5000, 300_000])
    rig.reopen()
    rig.expect(objects, "after the store was opened again")
    require(all(rig.found(list(objects))), "lookup does not find what an earlier life stored")


@case(1, "shared")
def others_see_it(rig: StoreRig) -> None:
    """Other instances of the store see at once which objects are stored, and which are deleted."""
    other, objects = rig.open("other"), rig.objects([1, 5000])
    absent = [*rig.found(list(objects), other), *(rig.get(k, 1, other) for k in objects)]
    require(not any(absent), "another opened store finds what nobody stored")
    rig.put(objects)
    rig.expect(objects, "seen through the store that took it")
    rig.expect(objects, "seen through another opened store", other)
    require(rig.found(list(objects), other) == (True, True), "another opened store finds nothing")
    if rig.lacks("deletes") is None:
        rig.wait(other.delete(list(objects)), "delete")
        gone = [rig.get(key, len(data)) is None for key, data in objects.items()]
        require(all(gone), "what another opened store deleted was loaded")


@case(1, "door.get")
def what_is_kept_is_what_was_stored(rig: StoreRig) -> None:
    """The back end, seen through the back door, holds the bytes that were stored."""
    objects = rig.stored([1, 5000])
    for key, data in objects.items():
        rig.compare(rig.door.get(key), data, "through the back door")


@case(1, "door.put")
def what_is_kept_is_what_is_loaded(rig: StoreRig) -> None:
    """An object written through the back door is found and loaded."""
    objects = rig.objects([1, 5000])
    for key, data in objects.items():
        rig.door.put(key, data)
    rig.expect(objects, "put in by the back door")


@case(1, "hypothesis")
def any_objects(rig: StoreRig) -> None:
    """Any number of objects of any lengths, cut in any way, are loaded as stored, in any order."""
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    shape = st.tuples(st.integers(0, 5000), st.integers(1, 9))

    @settings(
        max_examples=25 * rig.depth,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(shape, max_size=rig.at_once(9)), st.data())
    def check(shapes: list[tuple[int, int]], draw: DataObject) -> None:
        objects = rig.objects([size for size, _ in shapes])
        cuts = [pieces for _, pieces in shapes]
        sources = [rig.cut(data, n) for data, n in zip(objects.values(), cuts, strict=True)]
        targets = targets_for(objects)
        order = draw.draw(st.permutations(range(len(shapes))))
        keys = list(objects)
        stored = rig.wait(rig.store.store(keys, sources), "store")
        require(stored == [True] * len(keys), f"store said {stored}")
        wanted = [rig.cut(targets[i], cuts[-1 - i]) for i in order]
        loaded = rig.wait(rig.store.load([keys[i] for i in order], wanted), "load")
        for i, there in zip(order, loaded, strict=True):
            rig.compare(bytes(targets[i]) if there else None, objects[keys[i]], f"object {i}")

    check()

"""L1 of stores for contract 1.2: hints, expiry, prefixes, claims, namespaces, callbacks."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from kvbaton.connectors.store import (
    MAX_LABEL,
    Claiming,
    Evicting,
    Forgetting,
    Found,
    Hints,
    Namespaced,
    Pieces,
    Store,
    Usage,
)
from kvbaton.testing.kit import require
from kvbaton.testing.store_rig import StoreRig, case, views

SHORT_S = 0.2
LONG_S = 3600.0
MANY_KEYS = 40
"""Number of keys of one call, about as many as for a prompt."""
METRIC = re.compile("[a-z][a-z0-9_]*")


def put_with(rig: StoreRig, objects: Mapping[bytes, bytes], hints: Sequence[Hints]) -> None:
    """Store objects with hints; all must be stored."""
    store: Any = rig.store
    hint_of, stored = dict(zip(objects, hints, strict=True)), list[bool]()
    for keys in rig.calls(objects):
        data, given = views(objects[key] for key in keys), [hint_of[key] for key in keys]
        stored += rig.wait(store.store(keys, data, hints=given), "store")
    require(stored == [True] * len(objects), f"store with {hints} said {stored}")


@case(1, "hints")
def hints_change_no_answer(rig: StoreRig) -> None:
    """Hints of any value change neither lookups nor bytes, and may be left out."""
    label = "aZ0-_." * 10 + "abcd"
    require(len(label) == MAX_LABEL, "the kit's own label is too short")
    hints = [
        Hints(),
        Hints(namespace=label, tenant=label, depth=1 << 30, uses=1 << 30, priority=-(1 << 30)),
        Hints(tenant="kit", depth=1, priority=1 << 30, ttl_s=LONG_S),
        Hints(namespace="kit", ttl_s=1e-9 + LONG_S * 24 * 365),
    ]
    objects = rig.objects([100, 5000, 0, 70_000])
    put_with(rig, objects, hints)
    rig.expect(objects, "stored with hints")
    require(rig.found(list(objects)) == (True,) * len(objects), "stored with hints, but not found")
    put_with(rig, objects, [*hints[1:], hints[0]])
    rig.expect(objects, "stored again with other hints")
    others = rig.stored([300, 4000])
    rig.expect(others, "stored without hints")


@case(1, "hints", "expires")
def what_expires_is_gone(rig: StoreRig) -> None:
    """After `ttl_s` an object is neither found nor loaded, and can be stored again."""
    # In one call, which the store may split: each object has its own time to live.
    count = min(MANY_KEYS, rig.store.capabilities.max_keys)
    objects = rig.objects([500] * count)
    hints = [Hints(ttl_s=LONG_S), Hints()] * count
    brief = list(objects)[count // 2]
    hints[count // 2] = Hints(ttl_s=SHORT_S)
    short = {brief: objects[brief]}
    stay = {key: data for key, data in objects.items() if key != brief}
    stored_at = time.monotonic()
    put_with(rig, objects, hints[:count])
    gone = rig.eventually(lambda: rig.found([brief]) == (False,))
    require(gone, f"found {rig.patience:g} s after it was to live {SHORT_S:g} s")
    lived = time.monotonic() - stored_at
    require(lived >= SHORT_S, f"gone after {lived:.3g} s of {SHORT_S:g} s")
    require(rig.get(brief, 500) is None, "it has expired and is not found, but can be loaded")
    rig.expect(stay, "stored for longer")
    rig.put(short)
    rig.expect(short, "stored again after it had expired")


@case(1, "prefix")
def prefixes_end_at_the_first_gap(rig: StoreRig) -> None:
    """A lookup with `prefix` finds the objects before the first missing one, and no others."""
    objects = rig.objects([1000] * 40)
    keys, store = list(objects), cast(Any, rig.store)

    def ask(keys: list[bytes]) -> tuple[bool, ...]:
        found: Found = rig.wait(store.lookup(keys, prefix=True), "lookup of a prefix")
        return found.present

    rig.put({key: objects[key] for n, key in enumerate(keys) if n not in (0, 17)})
    for start, there in ((1, 16), (0, 0), (17, 0), (18, 22), (40, 0), (16, 1)):
        asked = keys[start:][: rig.at_once(40)]
        there = min(there, len(asked))
        found, due = ask(asked), (True,) * there + (False,) * (len(asked) - there)
        require(
            found == due, f"{there} of {len(asked)} objects come before the gap; it found {found}"
        )
    require(rig.found(keys[16:19]) == (True, False, True), "a lookup without prefix has to look on")
    if rig.lacks("pins") is None:
        asked = keys[1:][: rig.at_once(39)]
        pinned = rig.wait(store.lookup(asked, pin=True, prefix=True), "lookup of a prefix")
        require(sum(pinned.present) == rig.at_once(16), "with pins a prefix ends elsewhere")
        if pinned.ticket is not None:
            rig.store.release(pinned.ticket)


@case(1, "claims")
def one_of_several_claims(rig: StoreRig) -> None:
    """One of several claimants of an object gets the claim, and none once it is stored.

    A store call that finds no room ends the claim as well.
    """
    objects = rig.objects([3000] * 4)
    first, *rest = keys = list(objects)
    other = rig.open("other") if rig.lacks("shared") is None else rig.store

    def claim(store: Store, keys: list[bytes]) -> list[bool]:
        return rig.wait(cast(Claiming, store).claim(keys), "claim")

    rig.put({first: objects[first]})
    claimed = claim(rig.store, keys)
    require(claimed == [False, True, True, True], f"1 of 4 is there; the claim said {claimed}")
    claimed = claim(other, keys)
    require(not any(claimed), f"another one claims what is claimed, and is told {claimed}")
    rig.put({key: objects[key] for key in rest})
    claimed = claim(other, keys)
    require(not any(claimed), f"all are there; the claim said {claimed}")
    if rig.lacks("deletes") is None:
        rig.wait(rig.store.delete(keys), "delete")
        claimed = claim(other, keys)
        require(all(claimed), f"none is there or claimed; the claim said {claimed}")
    if rig.lacks("small") is None:
        huge = rig.objects([(rig.store.usage().capacity or 0) + 1])
        for store in (rig.store, other):
            claimed = claim(store, list(huge))
            require(
                claimed == [True], f"who claimed it before had no room; the claim said {claimed}"
            )
            require(
                rig.ask_store(huge, store) == [False], "an object larger than the store is kept"
            )


@case(1, "hints", "namespaces")
def namespaces_are_cleared_alone(rig: StoreRig) -> None:
    """Namespaces are listed with their usage, and one is cleared without the others."""
    # Names that differ in characters which are wildcards in SQL or regular expressions.
    name, beside = "kit_a.b", ("kit-a.b", "kit_a-b", "kit_a.b.c", "KIT_A.B", "kit_a.", "kit_a", "b")
    other = rig.open("other") if rig.lacks("shared") is None else rig.store
    listing = cast(Namespaced, other)
    rig.wait(listing.namespaces(), "namespaces")
    ours, theirs, bare = rig.objects([5000] * 20), rig.objects([5000] * 2), rig.objects([5000])
    like = rig.objects([5000] * len(beside))
    every = list((theirs | ours | bare | like).items())
    names = ["kit-b"] * 2 + [name] * 20 + [""] + list(beside)
    put_with(rig, dict(every), [Hints(namespace=each) for each in names])
    listed = rig.wait(listing.namespaces(), "namespaces")
    counts = {each: listed[each].objects for each in (name, "kit-b") if each in listed}
    require(
        counts == {name: 20, "kit-b": 2},
        f"20 and 2 objects were stored; namespaces, asked of another opened store, told {counts}",
    )
    cleared = rig.wait(listing.clear(name), "clear")
    require(cleared == 20, f"clear of a namespace of 20 objects said {cleared}")
    require(not any(rig.found(list(ours))), "objects are found in a namespace that was cleared")
    rig.expect(theirs | bare | like, "another namespace was cleared")
    require(rig.wait(listing.clear("kit-none"), "clear") == 0, "clear of what nobody has says 0")
    rig.put(ours)
    rig.expect(ours, "stored again after their namespace was cleared")


@case(1, "small", "forgets")
def evictions_are_told(rig: StoreRig) -> None:
    """`on_forget` reports each object that is gone without a `delete`, and no object that is there.

    A store with `on_evict` has passed all bytes of these objects to it.
    """
    told, handed, lock = list[bytes](), dict[bytes, bytes](), threading.Lock()

    def forget(keys: Sequence[bytes]) -> None:
        with lock:
            told.extend(keys)

    def evict(key: bytes, pieces: Pieces) -> None:
        with lock:
            handed[key] = _digest(pieces)

    store: object = rig.store
    cast(Forgetting, store).on_forget = forget
    hands_over = isinstance(store, Evicting)
    if isinstance(store, Evicting):
        store.on_evict = evict
    capacity = rig.store.usage().capacity or 0
    size, stored = 500_000, dict[bytes, bytes]()
    for _ in range(2 * capacity // size):
        ((key, data),) = objects = rig.objects([size]).items()
        if rig.ask_store(dict(objects)) == [True]:
            stored[key] = _digest([memoryview(data)])

    def lost() -> list[bytes]:
        present = rig.found(list(stored))
        with lock:
            return [k for k, there in zip(stored, present, strict=True) if there == (k in told)]

    rig.eventually(lambda: not lost())
    wrong = lost()
    require(not wrong, f"of {len(stored)} objects {len(wrong)} were lost untold, or told and kept")
    if hands_over:
        wrong = [key for key in told if handed.get(key) != stored.get(key)]
        text = f"{len(wrong)} of {len(told)} objects were not handed to on_evict as they were"
        require(not wrong, text)


def _digest(pieces: Pieces) -> bytes:
    return hashlib.blake2b(b"".join(pieces), digest_size=16).digest()


def _uncounted(before: Usage, after: Usage) -> str:
    """Values that are negative, or higher than before, as text."""
    pairs: dict[str, tuple[int | None, int | None]] = {
        "objects": (before.objects, after.objects),
        "num_bytes": (before.num_bytes, after.num_bytes),
    }
    for name in ("kit-a", "kit-b"):
        pairs[f"bytes of tenant {name}"] = before.tenants.get(name, 0), after.tenants.get(name, 0)
    known = {k: (a, b) for k, (a, b) in pairs.items() if a is not None and b is not None}
    return ", ".join(f"{b} {k} after {a}" for k, (a, b) in known.items() if not 0 <= b <= a)


@case(1)
def metrics_of_its_own(rig: StoreRig) -> None:
    """Names and values of `usage` are valid, counters never decrease, deletions are counted."""
    before = rig.store.usage()
    for kind, values in (("counters", before.counters), ("gauges", before.gauges)):
        for name, value in values.items():
            require(METRIC.fullmatch(name) is not None, f"{name!r} in {kind} is no metric's name")
            require(isinstance(value, int | float), f"{name} in {kind} is {value!r}")
    objects = rig.objects([5000] * 3)
    if rig.lacks("hints") is None:
        put_with(rig, objects, [Hints(tenant=t) for t in ("kit-a", "kit-a", "kit-b")])
        held = [rig.store.usage().tenants.get(name, 0) for name in ("kit-a", "kit-b")]
        right = held == [0, 0] or 0 < held[1] <= held[0] / 1.9
        require(right, f"tenants of two objects and of one are told to hold {held} bytes")
    else:
        rig.put(objects)
    rig.expect(objects, "stored")
    seen = rig.store.usage().counters
    if rig.lacks("deletes") is None:
        rig.wait(rig.store.delete(list(objects)), "delete")
        rig.eventually(lambda: not _uncounted(before, rig.store.usage()))
        wrong = _uncounted(before, rig.store.usage())
        require(not wrong, f"3 objects were stored and deleted since, but usage tells {wrong}")
    after = rig.store.usage().counters
    back = {
        name: (seen[name], after.get(name, 0)) for name in seen if after.get(name, 0) < seen[name]
    }
    require(not back, f"counters went back: {back}")

"""L0 of stores: the API."""

from __future__ import annotations

import inspect
from concurrent.futures import CancelledError, Future
from typing import Any

from kvbaton.connectors.store import Store, StoreCapabilities, Usage
from kvbaton.errors import StoreError
from kvbaton.testing.kit import Accounts, require, require_quick
from kvbaton.testing.store_rig import StoreRig, case, require_result, views

CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "open": ((), {}),
    "health": ((), {}),
    "lookup": (([],), {"pin": True}),
    "release": ((1,), {}),
    "load": (([], []), {}),
    "store": (([], []), {}),
    "delete": (([],), {}),
    "usage": ((), {}),
    "close": ((), {}),
}
"""Positional and keyword arguments with which each method is called."""


@case(0)
def has_every_method(rig: StoreRig) -> None:
    """A store has every member of `Store`, and its methods take the arguments of their callers."""
    require(isinstance(rig.store, Store), "it lacks a member of Store")
    for name, (words, options) in CALLS.items():
        method = getattr(rig.store, name)
        try:
            inspect.signature(method).bind(*words, **options)
        except TypeError as error:
            require(False, f"{name} must take {words} and {options}: {error}")


@case(0)
def says_who_it_is(rig: StoreRig) -> None:
    """`name` is the name that it was given; `capabilities` are of the declared types."""
    require(rig.store.name == "kit", f"it was named 'kit' but calls itself {rig.store.name!r}")
    able = rig.store.capabilities
    require(isinstance(able, StoreCapabilities), f"capabilities are {type(able).__name__}")
    require(able.max_keys >= 1, f"max_keys is {able.max_keys}")


@case(0)
def constructor_does_nothing(rig: StoreRig) -> None:
    """The constructor does no I/O: no file, socket, thread or folder before `open`."""
    rig.make()
    files, before = sorted(rig.folder.rglob("*")), Accounts.now()
    made = [rig.make() for _ in range(4)]
    grown = Accounts.now().above(before, rounds=len(made))
    require(not grown, f"{len(made)} stores that nobody opened have {grown}")
    require(sorted(rig.folder.rglob("*")) == files, "the constructor made a file or folder")


@case(0)
def answers_are_futures(rig: StoreRig) -> None:
    """Every call but `release` returns a `concurrent.futures.Future` with a result of its type."""
    for name, call in rig.every_call(rig.objects([100])).items():
        future = call()
        require(isinstance(future, Future), f"{name} returned {type(future).__name__}")
        require_result(name, rig.wait(future, name), 1)
    rig.store.release(0)


@case(0)
def a_miss_is_no_error(rig: StoreRig) -> None:
    """For keys that nobody stored, every call returns a result, and none is an error."""
    keys = [rig.key(), rig.key()]
    require(rig.found(keys) == (False, False), "lookup found keys that nobody stored")
    loaded = rig.wait(rig.store.load(keys, views([bytearray(10), bytearray(10)])), "load")
    require(loaded == [False, False], f"load of keys that nobody stored said {loaded}")
    if rig.lacks("deletes") is None:
        deleted = rig.wait(rig.store.delete(keys), "delete")
        require(deleted == 0, f"delete of keys that nobody stored counted {deleted}")


@case(0)
def empty_calls(rig: StoreRig) -> None:
    """Calls without keys return an empty result, or 0."""
    found = rig.wait(rig.store.lookup([]), "lookup")
    require(found.present == (), f"lookup of nothing found {found.present}")
    require(rig.wait(rig.store.load([], []), "load") == [], "load of nothing is []")
    require(rig.wait(rig.store.store([], []), "store") == [], "store of nothing is []")
    require(rig.wait(rig.store.delete([]), "delete") == 0, "delete of nothing is 0")


@case(0)
def lists_of_unequal_lengths(rig: StoreRig) -> None:
    """If the numbers of keys and objects differ, the call or its future raises `ValueError`."""
    buffers = views([bytearray(8)])
    for name, call in {"load": rig.store.load, "store": rig.store.store}.items():
        for keys in ([], [rig.key(), rig.key()]):
            try:
                rig.wait(call(keys, buffers), name)
            except ValueError:
                continue
            require(False, f"{name} took {len(keys)} keys and one object")


@case(0)
def unknown_tickets(rig: StoreRig) -> None:
    """`release` ignores unknown tickets and released ones."""
    (key,) = objects = rig.stored([10])
    ticket = rig.wait(rig.store.lookup([key], pin=True), "lookup").ticket
    for unknown in (-1, 0, 1 << 40):
        if unknown != ticket:
            rig.store.release(unknown)
    if ticket is not None:
        rig.store.release(ticket)
        rig.store.release(ticket)
    rig.expect(objects, "after tickets were released twice")


@case(0)
def tickets_for_pins_only(rig: StoreRig) -> None:
    """`lookup` returns a ticket only if it was asked to pin, can pin, and found something."""
    (key,) = rig.stored([10])
    pins = rig.store.capabilities.pins
    plain = rig.wait(rig.store.lookup([key]), "lookup").ticket
    nothing = rig.wait(rig.store.lookup([rig.key()], pin=True), "lookup").ticket
    pinned = rig.wait(rig.store.lookup([key], pin=True), "lookup").ticket
    require(plain is None, "a ticket although nothing was to be pinned")
    require(nothing is None, "a ticket although nothing was found")
    require((pinned is not None) == pins, f"pins is {pins}, the ticket of a hit {pinned}")
    if pinned is not None:
        rig.store.release(pinned)


@case(0)
def health_and_usage(rig: StoreRig) -> None:
    """An open store is healthy; its usage is in whole numbers, and within its capacity."""
    require(rig.store.health() is None, f"an open store says {rig.store.health()!r}")
    usage = rig.store.usage()
    require(isinstance(usage, Usage), f"usage is {type(usage).__name__}")
    counts = (usage.objects, usage.num_bytes, usage.capacity)
    good = all(count is None or (type(count) is int and count >= 0) for count in counts)
    require(good, f"usage is {usage}")
    full = usage.num_bytes is not None and usage.num_bytes > (usage.capacity or usage.num_bytes)
    require(not full, f"more bytes than fit: {usage}")


@case(0)
def health_and_usage_are_quick(rig: StoreRig) -> None:
    """`health` and `usage` report what is known: they do no I/O, and never block."""
    rig.put(rig.objects([1000]))
    for name, ask in (("health", rig.store.health), ("usage", rig.store.usage)):
        require_quick(name, ask, calls=5)


@case(0)
def close_twice(rig: StoreRig) -> None:
    """`close` may be repeated."""
    rig.put(rig.objects([1000]))
    rig.store.close()
    rig.store.close()


@case(0)
def not_open(rig: StoreRig) -> None:
    """Before `open` and after `close` a call is a miss or a `StoreError`, and never hangs."""
    rig.store.close()
    for when, store in (("before open", rig.make()), ("after close", rig.store)):
        target = bytearray(10)
        try:
            answer = rig.wait(store.load([rig.key()], views([target])), f"load {when}")
        except (StoreError, CancelledError):
            continue
        require(answer == [False], f"load {when} answered {answer}")

"""L4 of stores: who must not share objects does not, and who may share them does.

A store sees keys only, so these cases check names and store together: objects are named by the
identity of an engine, by a request's salt and adapter, and by the layout of their bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from msgspec import structs

from kvbaton.connectors.keys import Extra
from kvbaton.testing.kit import require
from kvbaton.testing.naming import Owner, make_layout, make_owner
from kvbaton.testing.store_rig import StoreRig, case

SIZE = 3000


def _owner(rig: StoreRig) -> Owner:
    return make_owner(weights=rig.key().hex())


@case(4)
def equals_share(rig: StoreRig) -> None:
    """Equal identity, salt, adapter and layout share objects, also when they shard differently."""
    owner = _owner(rig)
    objects = {key: rig.noise(SIZE) for key in rig.names(owner)}
    rig.put(objects)
    if rig.store.capabilities.persistent:
        rig.reopen()
    twin = make_owner(weights=owner.record.weights)
    halves = tuple(make_layout(heads=2, head_start=start) for start in (0, 2))
    for other in (twin, replace(twin, layouts=halves)):
        keys = rig.names(other)
        require(all(rig.found(keys)), "equals do not find each other's objects")
        rig.expect(dict(zip(keys, objects.values(), strict=True)), "stored by an equal")


def _must_be_apart(rig: StoreRig, change: Callable[[Owner], Owner]) -> None:
    """Whoever differs in one thing sees nothing, and both can keep objects of the same tokens."""
    owner = _owner(rig)
    ours = {key: rig.noise(SIZE) for key in rig.names(owner)}
    rig.put(ours)
    keys = rig.names(change(owner))
    require(not any(rig.found(keys)), "lookup finds the objects of another")
    loaded = [rig.get(key, SIZE) for key in keys]
    require(loaded == [None] * len(keys), "load gives the objects of another")
    theirs = {key: rig.noise(SIZE) for key in keys}
    rig.put(theirs)
    rig.expect(ours, "beside the objects of another")
    rig.expect(theirs, "beside the objects of another")


@case(4)
def another_salt(rig: StoreRig) -> None:
    """Requests with different cache salts never share."""
    for salt in ("a", " ", "\0"):
        _must_be_apart(rig, lambda owner, salt=salt: replace(owner, salt=salt))  # type: ignore[misc]


@case(4)
def another_adapter(rig: StoreRig) -> None:
    """Requests with different adapters never share, nor do engines with another one merged in."""
    _must_be_apart(rig, lambda owner: replace(owner, adapter=b"\1" * 32))
    _must_be_apart(rig, _record(adapter="merged"))


@case(4)
def another_model(rig: StoreRig) -> None:
    """Engines with other weights, or another revision of them, never share."""
    _must_be_apart(rig, lambda owner: make_owner(owner.record.weights + "0"))
    _must_be_apart(rig, _record(revision="v2"))


@case(4)
def another_item(rig: StoreRig) -> None:
    """Prompts of equal tokens share only if their images are equal too, and stand in one place.

    Nor do outputs of other encoders or processors.
    """
    image, other = Extra(0, 60, rig.key()), Extra(0, 60, rig.key())
    for items in ((image,), (other, Extra(60, 4, image.digest)), (image._replace(length=61),)):
        _must_be_apart(rig, lambda owner, items=items: replace(owner, items=items))  # type: ignore[misc]
    _must_be_apart(rig, _record(encoder="another"))


@case(4)
def another_dtype(rig: StoreRig) -> None:
    """Engines that compute or keep KV in another type never share."""
    _must_be_apart(rig, _record(dtype="float16"))
    _must_be_apart(rig, _record(kv_dtype="float8_e4m3fn"))


@case(4)
def another_layout(rig: StoreRig) -> None:
    """Objects of another layout (dtype, block size, layers, width) are other objects."""
    for layout in (
        make_layout(dtype="float16"),
        make_layout(block_size=32),
        make_layout(layers=(0, 1, 2)),
        make_layout(head_dim=16),
    ):
        _must_be_apart(rig, lambda owner, layout=layout: replace(owner, layouts=(layout,)))  # type: ignore[misc]


def _record(**changes: str) -> Callable[[Owner], Owner]:
    return lambda owner: replace(owner, record=structs.replace(owner.record, **changes))

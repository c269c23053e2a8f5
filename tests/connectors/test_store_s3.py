"""What is S3's own: objects behind the store's back, buckets, conditional writes, credentials."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, cast

import pytest

from kvbaton.connectors.registry import load_store
from kvbaton.connectors.store import Claiming, Hints, Namespaced, Store, Usage
from kvbaton.errors import ConfigError, StoreError
from tests.support.store_objects import find, make_objects, pieces, read, save, wait
from tests.support.store_servers import (
    HOST,
    S3_OPTIONS,
    Server,
    free_port,
    running,
    s3_server,
)

OBJECTS = make_objects(2, 70_000, 21)
KEYS = list(OBJECTS)
PATHS = [f"some/prefix/{key.hex()[:2]}/{key.hex()}" for key in KEYS]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(s3_server()) as server:
        yield server


@pytest.fixture
def store(server: Server) -> Iterator[Store]:
    with server.store() as store:
        assert save(store, OBJECTS) == [True, True]
        yield store


def bucket(server: Server) -> Any:
    """Its bucket, behind the store's back."""
    from obstore.store import S3Store

    return S3Store(
        "bucket",
        config={"endpoint": f"http://{HOST}:{server.port}", **S3_OPTIONS},  # type: ignore[arg-type]
        client_options={"allow_http": True},
    )


def damaged(server: Server, how: str) -> bytes:
    import obstore

    right, other = (bytes(obstore.get(bucket(server), path).bytes()) for path in PATHS)
    return {
        "changed": right[:40_000] + bytes([right[40_000] ^ 1]) + right[40_001:],
        "cut": right[:-1],
        "almost nothing": b"x",
        "of another key": other,
    }[how]


@pytest.mark.parametrize("how", ["changed", "cut", "almost nothing", "of another key"])
def test_a_corrupt_object_is_a_miss(store: Store, server: Server, how: str) -> None:
    import obstore

    obstore.put(bucket(server), PATHS[0], damaged(server, how))
    assert read(store, OBJECTS) == [None, OBJECTS[KEYS[1]]]
    assert find(store, KEYS).present == (False, True), "the corrupt object is gone"
    assert save(store, OBJECTS) == [True, True]
    assert read(store, OBJECTS) == list(OBJECTS.values())


@pytest.mark.parametrize("conditional", [True, False])
def test_many_who_store_the_same(server: Server, conditional: bool) -> None:
    objects = make_objects(1, 50_000, 22 + conditional)
    [(key, data)] = objects.items()
    with server.store(conditional=conditional) as one, server.store() as other:
        calls = [s.store([key] * 4, [pieces(data) for _ in range(4)]) for s in (one, other)]
        assert [wait(call) for call in calls] == [[True] * 4] * 2
        assert read(one, objects) == [data]


def test_lookups_of_many_keys(store: Store) -> None:
    absent = list(make_objects(150, 1, 29))
    keys = [*absent[:75], *KEYS, *absent[75:]]
    assert find(store, keys).present == (False,) * 75 + (True, True) + (False,) * 75


def test_prefixes_do_not_mix(store: Store, server: Server) -> None:
    with server.store(url="s3://bucket/some/other") as other:
        assert find(other, KEYS).present == (False, False)


def test_no_such_bucket(server: Server) -> None:
    with pytest.raises(StoreError, match="no bucket 'nowhere'"), server.store(url="s3://nowhere/x"):
        pass


def test_a_bucket_that_is_gone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken for one without objects."""
    monkeypatch.setattr("kvbaton.connectors.stores.s3._SEEN_S", 0.0)
    ask_bucket(server, "PUT")
    with server.store(url="s3://gone/x") as store:
        assert find(store, KEYS).present == (False, False)
        ask_bucket(server, "DELETE")
        for call in (lambda: find(store, KEYS), lambda: read(store, OBJECTS)):
            with pytest.raises(StoreError, match="s3://gone/x: there is no bucket 'gone'"):
                call()
        with pytest.raises(StoreError, match="there is no bucket 'gone'"):
            save(store, OBJECTS)
        assert "no bucket" in str(store.health())
        ask_bucket(server, "PUT")
        assert find(store, KEYS).present == (False, False)
        assert store.health() is None
        ask_bucket(server, "DELETE")


def ask_bucket(server: Server, method: str) -> None:
    url = f"http://{HOST}:{server.port}/gone"
    urllib.request.urlopen(urllib.request.Request(url, method=method)).close()


def test_labels_are_metadata_and_others_list_them(server: Server) -> None:
    hints = [Hints(namespace="n" * 64, tenant="alice"), Hints(namespace="m")]
    url = "s3://bucket/labels"
    with server.store(url=url) as one, server.store(url=url) as other:
        store, namespaced = cast(Any, one), cast(Namespaced, other)
        call = store.store(KEYS, [pieces(data) for data in OBJECTS.values()], hints=hints)
        assert wait(call) == [True, True]
        found = wait(namespaced.namespaces())
        assert found["n" * 64] == Usage(1, 70_000, tenants={"alice": 70_000})
        assert set(found) == {"n" * 64, "m"}
        assert wait(namespaced.clear("m")) == 1
        assert find(one, KEYS).present == (True, False)


def test_claims(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"url": "s3://bucket/claims", "claims": True}
    with server.store(**options) as one, server.store(**options) as other:
        mine, theirs = cast(Claiming, one), cast(Claiming, other)
        assert wait(mine.claim(KEYS)) == [True, True]
        assert wait(theirs.claim(KEYS)) == [False, False]
        assert save(one, {KEYS[0]: OBJECTS[KEYS[0]]}) == [True]
        assert wait(theirs.claim(KEYS)) == [False, False], "one is there, one is claimed"
        with monkeypatch.context() as patch:
            clock = type("Clock", (), {"now": lambda zone: datetime.now(zone) - timedelta(hours=1)})
            patch.setattr("kvbaton.connectors.stores.s3.datetime", clock)
            assert wait(theirs.claim(KEYS)) == [False, True], "the clock was set back since"
        monkeypatch.setattr("kvbaton.connectors.stores.s3.CLAIM_S", -1.0)
        assert wait(theirs.claim(KEYS)) == [False, True], "of one who died, it is void"
        (new,) = make_objects(1, 10, 22)
        assert wait(theirs.claim([new])) == [True]
        assert cast(Any, other).backend._claims.keys() == [new], "void ones are forgotten"
    with pytest.raises(ConfigError, match="claims"):
        load_store(server.spec(claims=True, conditional=False))


def test_a_store_that_fails_ends_its_claim(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore
    from obstore.exceptions import BaseError

    def refuse(*_: object, **__: object) -> None:
        raise BaseError("refused")

    objects, url = make_objects(1, 1000, 26), "s3://bucket/failed"
    with server.store(url=url, claims=True) as one, server.store(url=url, claims=True) as other:
        assert wait(cast(Claiming, one).claim(list(objects))) == [True]
        with monkeypatch.context() as broken:
            broken.setattr(obstore, "put", refuse)
            with pytest.raises(StoreError, match="refused"):
                save(one, objects)
        assert wait(cast(Claiming, other).claim(list(objects))) == [True]


def test_secrets_stay_secret(caplog: pytest.LogCaptureFixture) -> None:
    options = {"url": "s3://b/x", "endpoint": f"http://{HOST}:{free_port()}", "retry_s": 0.1}
    store = load_store(f"s3:{json.dumps(options | {'options': S3_OPTIONS})}")
    with pytest.raises(StoreError, match="can't list s3://b/x") as caught:
        store.open()
    assert "s3cr3t" not in f"{caught.value} {store.health()} {store!r} {caplog.text}"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"url": "ftp://b"}, "s3://bucket"),
        ({"url": "s3://b", "options": {"no_such": 1}}, "no_such"),
        ({"url": "s3://b", "timeout_s": -1}, "timeout_s: must be above 0, not -1"),
        ({"url": "s3://b", "lookups": 0}, "lookups: must be above 0, not 0"),
    ],
)
def test_wrong_options(options: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_store(f"s3:{json.dumps(options)}")

"""What is Redis's own: values behind the store's back, a full server, time to live, claims."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from kvbaton.connectors.registry import load_store
from kvbaton.connectors.store import Claiming, Hints, Namespaced, Store, Usage
from kvbaton.errors import ConfigError, StoreError
from tests.support.store_objects import find, make_objects, pieces, read, save, wait
from tests.support.store_servers import HOST, Server, free_port, redis_server, running
from tests.support.waiting import until

OBJECTS = make_objects(2, 70_000, 11)
KEYS = list(OBJECTS)
NAMES = [f"kvbaton:{key.hex()}" for key in KEYS]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(redis_server(tmp_path_factory.mktemp("redis"))) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    import redis

    with redis.Redis(HOST, server.port) as client:
        client.flushall()
        yield client


@pytest.fixture
def store(server: Server, client: Any) -> Iterator[Store]:
    with server.store() as store:
        assert save(store, OBJECTS) == [True, True]
        yield store


def test_a_replica_is_read_and_refuses_what_is_stored(
    server: Server, store: Store, tmp_path: Path
) -> None:
    with (
        running(redis_server(tmp_path, "--replicaof", f"{HOST} {server.port}")) as replica,
        replica.store() as there,
    ):
        until(lambda: find(there, KEYS).present == (True, True), "it has what the other one has")
        assert read(there, OBJECTS) == list(OBJECTS.values())
        with pytest.raises(StoreError, match="read only"):
            save(there, make_objects(1, 100, 12))


def save_with(store: Any, objects: dict[bytes, bytes], hints: list[Hints]) -> list[bool]:
    call = store.store(list(objects), [pieces(data) for data in objects.values()], hints=hints)
    return list(wait(call))


def as_namespaced(store: Store) -> Namespaced:
    return cast(Namespaced, store)


def as_claiming(store: Store) -> Claiming:
    return cast(Claiming, store)


def damage(client: Any, how: str) -> None:
    if how == "changed":
        client.setrange(NAMES[0], 40_000, b"\x00\xff\x00\xff")
    elif how == "cut":
        client.set(NAMES[0], client.get(NAMES[0])[:-1])
    elif how == "almost nothing":
        client.set(NAMES[0], b"x")
    else:
        client.copy(NAMES[1], NAMES[0], replace=True)


@pytest.mark.parametrize("how", ["changed", "cut", "almost nothing", "of another key"])
def test_a_corrupt_value_is_a_miss(store: Store, client: Any, how: str) -> None:
    damage(client, how)
    assert read(store, OBJECTS) == [None, OBJECTS[KEYS[1]]]
    assert find(store, KEYS).present == (False, True), "the corrupt value is gone"
    assert save(store, OBJECTS) == [True, True]
    assert read(store, OBJECTS) == list(OBJECTS.values())


def test_bytes_are_sent_once(store: Store, client: Any) -> None:
    before = client.info("stats")["total_net_input_bytes"]
    assert save(store, OBJECTS) == [True, True]
    assert client.info("stats")["total_net_input_bytes"] - before < 10_000


def test_one_round_trip_looks_up_all(store: Store, client: Any) -> None:
    find(store, KEYS)
    calls = client.info("stats")["total_reads_processed"]
    assert find(store, KEYS * 100).present == (True,) * 200
    # Most are read together; a socket's buffer may split them.
    assert client.info("stats")["total_reads_processed"] - calls < 20


def test_a_full_server(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("full")
    with running(redis_server(folder, "--maxmemory", "8mb")) as server, server.store() as store:
        objects = make_objects(12, 1 << 20, 12)
        kept = save(store, objects)
        assert 0 < sum(kept) < 12
        assert find(store, list(objects)).present == tuple(kept)
        expected = [data if yes else None for data, yes in zip(objects.values(), kept, strict=True)]
        assert read(store, objects) == expected
        assert store.health() is None, "full is not ill"
        assert store.usage().capacity == 8 << 20


def test_what_nobody_uses_expires(server: Server, client: Any) -> None:
    with server.store(ttl_s=100) as store:
        assert save(store, OBJECTS) == [True, True]
        for use in (read, save):
            client.pexpire(NAMES[0], 5_000)
            use(store, OBJECTS)
            assert client.pttl(NAMES[0]) > 90_000, use.__name__
    with server.store(ttl_s=0.2) as store:
        save(store, OBJECTS)
        until(lambda: find(store, KEYS).present == (False, False), "the values expire")


def test_time_to_live_is_the_nodes_unless_it_is_the_stores(server: Server, client: Any) -> None:
    hints = [Hints(ttl_s=100.0), Hints(ttl_s=1e300)]
    with server.store() as store:
        assert store.capabilities.expires
        assert save_with(store, OBJECTS, hints) == [True, True]
        assert read(store, OBJECTS) == list(OBJECTS.values())
        assert 90_000 < client.pttl(NAMES[0]) <= 100_000, "use does not prolong it"
    client.flushall()
    with server.store(ttl_s=500.0) as store:
        assert not store.capabilities.expires
        assert save_with(store, OBJECTS, hints) == [True, True]
        assert client.pttl(NAMES[0]) > 400_000


def test_namespaces_of_one_prefix(server: Server, client: Any) -> None:
    """What a glob would take for more, and what others keep, is left alone."""
    hints = [Hints(namespace="n" * 64, tenant="alice"), Hints(namespace="m")]
    client.set("a*b:" + "0" * 64, b"a value of an earlier release, which has no labels" * 10)
    with server.store(prefix="a*b:") as store, server.store(prefix="aXb:") as other:
        assert save_with(store, OBJECTS, hints) == [True, True]
        assert save_with(other, OBJECTS, hints) == [True, True]
        found = wait(as_namespaced(store).namespaces())
        assert found["n" * 64] == Usage(1, 70_000, tenants={"alice": 70_000})
        assert set(found) == {"n" * 64, "m"}
        assert wait(as_namespaced(store).clear("m")) == 1
        assert find(store, KEYS).present == (True, False)
        assert find(other, KEYS).present == (True, True)


def test_a_claim_of_others_stays(server: Server, client: Any) -> None:
    claims = [f"kvbaton:claim:{key.hex()}" for key in KEYS]
    with server.store() as one, server.store() as other:
        assert wait(as_claiming(one).claim(KEYS)) == [True, True]
        assert wait(as_claiming(other).claim(KEYS)) == [False, False]
        assert 29_000 < client.pttl(claims[0]) <= 30_000
        assert save(other, {KEYS[0]: OBJECTS[KEYS[0]]}) == [True], "nobody needs a claim to store"
        assert client.exists(*claims) == 2
        assert save(one, {KEYS[0]: OBJECTS[KEYS[0]]}) == [True]
        assert client.exists(*claims) == 1
    assert client.exists(*claims) == 0, "closing gives claims back"


def test_a_long_prefix_is_looked_up_up_to_its_gap(store: Store, client: Any) -> None:
    keys = [*KEYS * 100, bytes(32), *KEYS * 1000]
    client.exists(b"")  # the server counts what has been called at all
    before = client.info("commandstats")["cmdstat_exists"]["calls"]
    assert find(store, keys, prefix=True).present == (True,) * 200 + (False,) * 2001
    assert client.info("commandstats")["cmdstat_exists"]["calls"] - before <= 256


def test_figures_of_the_server(server: Server, client: Any) -> None:
    with server.store() as store:
        figures = store.usage()
        assert figures.gauges["used_memory_bytes"] > 0
        assert figures.counters.keys() == {"evicted_keys", "expired_keys"}


def test_a_server_that_tells_fewer_figures_will_do(
    server: Server, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some do that only speak its protocol."""
    monkeypatch.setattr("redis.Redis.info", lambda _: {"used_memory": 5})
    with server.store() as store:
        assert find(store, KEYS).present == (False, False)
        assert store.usage().capacity is None
        assert store.usage().gauges["used_memory_bytes"] == 5


def test_prefixes_do_not_mix(store: Store, server: Server) -> None:
    with server.store(prefix="other:") as other:
        assert find(other, KEYS).present == (False, False)


def test_secrets_stay_secret() -> None:
    url = f"redis://me:s3cr3t@{HOST}:{free_port()}/0"
    store = load_store(f'redis:{{"url": "{url}", "retries": 0}}')
    with pytest.raises(StoreError, match="can't reach redis") as caught:
        store.open()
    assert "s3cr3t" not in str(caught.value) + str(store.health())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ('{"url": "ftp://host"}', "url: "),
        ('{"url": "redis://h", "ttl_s": 0}', "ttl_s: "),
        ('{"url": "redis://h", "timeout_s": 0}', "timeout_s: must be above 0, not 0"),
    ],
)
def test_wrong_options(options: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_store(f"redis:{options}")

"""Stores that keep objects in a server, each with its real one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from kvbaton.connectors.registry import load_store
from kvbaton.connectors.store import Store
from kvbaton.errors import ConfigError, StoreError
from tests.support.store_objects import make_objects, pieces, read, save
from tests.support.store_servers import (
    Server,
    lmcache_server,
    redis_server,
    running,
    s3_server,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*LoggingHandler.*:DeprecationWarning")

HASTY: dict[str, dict[str, Any]] = {
    "redis": {"timeout_s": 0.5, "retries": 1},
    "s3": {"timeout_s": 0.5, "retry_s": 0.5},
    "lmcache_server": {"timeout_s": 0.5},
}
"""Options of clients that give up soon."""
SOON_S = 15.0


@pytest.fixture(scope="module", params=["redis", "s3", "lmcache_server"])
def server(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Server]:
    makers: dict[str, Callable[[], Server]] = {
        "redis": lambda: redis_server(tmp_path_factory.mktemp("redis")),
        "s3": s3_server,
        "lmcache_server": lmcache_server,
    }
    with running(makers[request.param]()) as server:
        yield server


def calls_of(store: Store, objects: dict[bytes, bytes]) -> dict[str, Future[Any]]:
    keys, buffers = list(objects), [pieces(data) for data in objects.values()]
    return {
        "lookup": store.lookup(keys),
        "load": store.load(keys, buffers),
        "store": store.store([bytes([7] * 32)], [pieces(bytes(100_000))]),
    }


def expect_errors(calls: dict[str, Future[Any]], before: float) -> None:
    for name, call in calls.items():
        error = call.exception(max(0.0, before + SOON_S - time.monotonic()))
        assert isinstance(error, StoreError), f"{name}: {error!r}"


def test_a_server_that_dies(server: Server) -> None:
    objects = make_objects(1, 100_000, 6)
    with server.store(**HASTY[server.name]) as store:
        assert all(save(store, objects))
        with server.paused():
            began, calls = time.monotonic(), calls_of(store, objects)
            server.kill()
        try:
            expect_errors(calls, began)
            assert store.health() is not None
            with pytest.raises(StoreError), server.store(**HASTY[server.name]):
                pass
        finally:
            server.start()
        again(store, objects)


def again(store: Store, objects: dict[bytes, bytes]) -> None:
    """The server is back, empty; the store finds that out by itself."""
    give_up = time.monotonic() + SOON_S
    while True:
        try:
            assert save(store, objects) == [True]
            break
        except StoreError:
            assert time.monotonic() < give_up
    assert read(store, objects) == list(objects.values())
    assert store.health() is None


def test_a_server_that_is_silent(server: Server) -> None:
    objects = make_objects(1, 100_000, 7)
    with server.store(**HASTY[server.name]) as store:
        assert all(save(store, objects))
        with server.paused():
            expect_errors(calls_of(store, objects), time.monotonic())
            assert store.health() is not None
        again(store, objects)


@pytest.mark.parametrize("name", ["redis", "s3", "lmcache"])
def test_without_the_client(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    library = {"redis": "redis", "s3": "obstore", "lmcache": "lmcache"}[name]
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"kvbaton.connectors.stores.{name}", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=rf"pip install 'kvbaton\[{name}\]'"):
        load_store(f'{name}:{{"url": "s3://a"}}' if name != "lmcache" else name)

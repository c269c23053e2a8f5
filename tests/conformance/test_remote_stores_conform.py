"""The stores that keep objects in a server pass the kit, each with its real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import pytest

from kvbaton.testing.suite import StoreTests
from tests.support.store_servers import (
    CHUNK_BYTES,
    lmcache_server,
    mooncake_server,
    need,
    redis_server,
    running,
    s3_server,
)


@contextmanager
def redis(folder: Path) -> Iterator[str]:
    with running(redis_server(folder)) as server:
        yield server.spec()


@contextmanager
def s3(folder: Path) -> Iterator[str]:
    with running(s3_server()) as server:
        yield server.spec()


@contextmanager
def lmcache(folder: Path) -> Iterator[str]:
    need("lmcache", find_spec("lmcache"), "pip install 'kvbaton[lmcache]'")
    yield f'lmcache:{{"max_bytes": {1 << 26}, "chunk_bytes": {CHUNK_BYTES}}}'


@contextmanager
def lmcache_with_server(folder: Path) -> Iterator[str]:
    with running(lmcache_server()) as server:
        yield server.spec()


@contextmanager
def mooncake(folder: Path) -> Iterator[str]:
    with running(mooncake_server()) as server:
        yield server.spec(buffer_bytes=64 << 20)


REMOTE: dict[str, Callable[[Path], AbstractContextManager[str]]] = {
    "redis": redis,
    "s3": s3,
    "mooncake": mooncake,
    "lmcache": lmcache,
    "lmcache_server": lmcache_with_server,
}
"""Makes the spec of each store, skipping without what it needs; its server runs meanwhile."""
LIMITS = {
    "mooncake": {
        "L3.what-a-killed-writer-leaves": "the master keeps a killed writer's claim, for 30 s"
    },
    "lmcache": {
        "L5.thousands-of-loads": "LMCache keeps figures of each load for up to 10 s, for its logs"
    },
    "lmcache_server": {
        "L3.what-a-killed-writer-leaves": "the server keeps a killed writer's lock for 600 s",
    },
}
"""Cases that are known not to pass, and why."""


class RemoteTests(StoreTests):
    store: ClassVar[str]

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        with REMOTE[cls.store](tmp_path_factory.mktemp(cls.store)) as spec:
            yield spec

    @pytest.fixture
    def spec(self, request: pytest.FixtureRequest, server: str) -> str:
        for case, reason in LIMITS.get(self.store, {}).items():
            if f"[{case}]" in request.node.name:
                pytest.skip(reason)
        return server


class TestRedis(RemoteTests):
    store = "redis"


class TestS3(RemoteTests):
    store = "s3"

    @pytest.fixture
    def spec(self, request: pytest.FixtureRequest, server: str) -> str:
        """A prefix for each case: to tell namespaces the store looks at each object below it."""
        return server.replace("prefix", request.node.callspec.id)


class TestMooncake(RemoteTests):
    store = "mooncake"


@pytest.mark.filterwarnings("ignore:.*LoggingHandler.*:DeprecationWarning")
class TestLMCache(RemoteTests):
    store = "lmcache"


@pytest.mark.filterwarnings("ignore:.*LoggingHandler.*:DeprecationWarning")
class TestLMCacheServer(RemoteTests):
    store = "lmcache_server"

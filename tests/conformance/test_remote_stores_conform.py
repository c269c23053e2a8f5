"""The stores that keep objects in a server pass the kit, each with its real one."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from kvbaton.testing.suite import StoreTests
from tests.connectors.store_servers import (
    CHUNK_BYTES,
    Server,
    lmcache_server,
    need,
    redis_server,
    running,
    s3_server,
)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(redis_server(tmp_path_factory.mktemp("redis"))) as server:
        yield server


@pytest.fixture(scope="module")
def s3() -> Iterator[Server]:
    with running(s3_server()) as server:
        yield server


@pytest.fixture(scope="module")
def lmcache() -> Iterator[Server]:
    with running(lmcache_server()) as server:
        yield server


class TestRedis(StoreTests):
    @pytest.fixture
    def spec(self, redis: Server) -> str:
        return redis.spec()


class TestS3(StoreTests):
    @pytest.fixture
    def spec(self, s3: Server) -> str:
        return s3.spec()


@pytest.mark.filterwarnings("ignore:.*LoggingHandler.*:DeprecationWarning")
class TestLMCache(StoreTests):
    @pytest.fixture
    def spec(self) -> str:
        need("lmcache", find_spec("lmcache"), "pip install 'kvbaton[lmcache]'")
        return f'lmcache:{{"max_bytes": {1 << 26}, "chunk_bytes": {CHUNK_BYTES}}}'


class TestLMCacheServer(StoreTests):
    @pytest.fixture(autouse=True)
    def known_limit(self, request: pytest.FixtureRequest) -> None:
        if "L3.what-a-killed-writer-leaves" in request.node.name:
            pytest.skip("LMCache's server keeps the lock of a killed writer for 600 s")

    @pytest.fixture
    def spec(self, lmcache: Server) -> str:
        return lmcache.spec()

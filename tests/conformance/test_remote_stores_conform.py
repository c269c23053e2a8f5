"""The stores that keep objects in a server pass the kit, each with its real one."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from kvbaton.testing.suite import StoreTests
from tests.connectors.store_servers import (
    CHUNK_BYTES,
    lmcache_server,
    need,
    redis_server,
    running,
    s3_server,
)


class TestRedis(StoreTests):
    @pytest.fixture(scope="module")
    def spec(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        with running(redis_server(tmp_path_factory.mktemp("redis"))) as server:
            yield server.spec()


class TestS3(StoreTests):
    @pytest.fixture(scope="module")
    def spec(self) -> Iterator[str]:
        with running(s3_server()) as server:
            yield server.spec()


class TestLMCache(StoreTests):
    @pytest.fixture
    def spec(self) -> str:
        need("lmcache", find_spec("lmcache"), "pip install 'kvbaton[lmcache]'")
        return f'lmcache:{{"max_bytes": {1 << 26}, "chunk_bytes": {CHUNK_BYTES}}}'


class TestLMCacheServer(StoreTests):
    @pytest.fixture(scope="module")
    def spec(self) -> Iterator[str]:
        with running(lmcache_server()) as server:
            yield server.spec()

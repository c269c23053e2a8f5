"""Stores that need a server pass the kit, where their server can be had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbaton.testing.suite import StoreTests
from tests.connectors.store_servers import lmcache_server, redis_server, running, s3_server


@pytest.fixture(scope="module")
def redis_spec(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(redis_server(Path(tmp_path_factory.mktemp("redis")))) as server:
        yield server.spec()


@pytest.fixture(scope="module")
def s3_spec() -> Iterator[str]:
    with running(s3_server()) as server:
        yield server.spec()


@pytest.fixture(scope="module")
def lmcache_spec() -> Iterator[str]:
    with running(lmcache_server()) as server:
        yield server.spec()


class TestRedis(StoreTests):
    @pytest.fixture
    def spec(self, redis_spec: str) -> str:
        return redis_spec


@pytest.mark.slow
class TestS3(StoreTests):
    @pytest.fixture
    def spec(self, s3_spec: str) -> str:
        return s3_spec


@pytest.mark.slow
class TestLMCacheServer(StoreTests):
    @pytest.fixture
    def spec(self, lmcache_spec: str) -> str:
        return lmcache_spec

"""Every built-in store that needs no server passes the kit."""

from typing import Any, ClassVar

import pytest

from kvbaton.testing.suite import StoreTests
from tests.conformance.back_doors import FilesystemBackDoor, VllmFilesBackDoor

MEMORY = 'memory:{"max_bytes": 67108864}'


class TestMemory(StoreTests):
    spec = MEMORY


class TestFilesystem(StoreTests):
    spec = 'filesystem:{"path": "{tmp}/objects", "max_bytes": 67108864}'
    back_door: ClassVar[Any] = FilesystemBackDoor


@pytest.mark.slow
class TestNixl(StoreTests):
    spec = 'nixl:{"backend": "POSIX", "path": "{tmp}/objects", "max_bytes": 67108864}'
    back_door: ClassVar[Any] = FilesystemBackDoor


class TestTiered(StoreTests):
    spec = (
        'tiered:{"tiers": ["memory:{\\"max_bytes\\": 16777216}",'
        ' "filesystem:{\\"path\\": \\"{tmp}/objects\\"}"]}'
    )


class TestFaulty(StoreTests):
    spec = 'faulty:{"inner": "memory:{\\"max_bytes\\": 67108864}", "delay": 0.1, "delay_s": 0.002}'


@pytest.mark.slow
class TestFilesystemAtDepth(TestFilesystem):
    spec = 'filesystem:{"path": "{tmp}/objects"}'
    depth = 10


@pytest.mark.slow
class TestMemoryAtDepth(TestMemory):
    depth = 10


@pytest.mark.slow
class TestVllm(StoreTests):
    spec = (
        'vllm:{"connector": "examples.vllm_connector.kv_files:KVFilesConnector",'
        ' "extra_config": {"path": "{tmp}/objects"}, "persistent": true, "shared": true,'
        ' "block_bytes": 65536}'
    )
    back_door: ClassVar[Any] = VllmFilesBackDoor


BUILT_IN = (TestMemory, TestFilesystem, TestNixl, TestTiered, TestFaulty, TestVllm)

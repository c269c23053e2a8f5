"""Certify the built-in connectors, with door and capacity: ``make test-certificates``.

``python -m tests.conformance.write_certificates DIR [NAME...]`` runs all of the kit over those of
these names, or over all that this environment has, and writes each one's page into a folder. The
exit status is 1 if one of them is not certified.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kvbaton.bench.store import speed
from kvbaton.testing.certificate import certify, write
from kvbaton.testing.check import Subject
from tests.conformance import test_stores_conform as stores
from tests.conformance import test_transports_conform as transports
from tests.conformance.back_doors import (
    FilesystemBackDoor,
    LMCacheBackDoor,
    LMCacheServerBackDoor,
    MemoryBackDoor,
    MooncakeBackDoor,
    RedisBackDoor,
    S3BackDoor,
    TieredBackDoor,
    VllmFilesBackDoor,
)
from tests.conformance.test_remote_stores_conform import LIMITS, REMOTE
from tests.support.store_servers import lmcache_server, mooncake_server, running, s3_server

NO_WAY_IN = {"L1.what-is-kept-is-what-is-loaded": "its memory has no way in but the store's own"}
NO_CHECKSUM = {
    "L3.spoiled-objects": "it keeps no checksum: the engine verifies a digest of each block"
}
SMALL = (
    *("L1.a-full-store-says-no", "L1.a-full-store-stays-right", "L1.evictions-are-told"),
    "L2.eviction-during-load",
)
NO_LIMIT = dict.fromkeys(
    SMALL, "the server's limit counts more than objects, and is not the store's own"
)
NEVER_REPLACED = dict.fromkeys(
    ("L3.cut-objects", "L3.spoiled-objects"),
    "the server neither replaces nor removes a chunk: a spoiled one is a miss until it is evicted",
)
FASTER_TIER = dict.fromkeys(
    ("L3.cut-objects", "L3.spoiled-objects", "L3.errors-are-told"),
    "the faster tier has the object still, and a tier that fails is passed over",
)
TIERED = (
    'tiered:{"tiers": ["memory:{\\"max_bytes\\": 16777216}",'
    ' "filesystem:{\\"path\\": \\"{tmp}/objects\\", \\"max_bytes\\": 67108864}"]}'
)
CONNECTORS = dict.fromkeys(SMALL, "connectors for vLLM do not tell how much they hold") | {
    "L3.spoiled-objects": "a spoiled block is a miss, but a connector can't be told to forget it"
}
SQLITE = 'kvbaton_sqlite:SqliteStore:{"path": "{tmp}/objects.db", "max_bytes": 67108864}'


def _sqlite_door(store: Any) -> Any:
    return import_module("kvbaton_sqlite_door").SqliteDoor(store)


Plan = tuple[AbstractContextManager[str], str, Any, Mapping[str, str]]
"""Makes the spec; its kind, back door and exclusions."""


@contextmanager
def _server(name: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder, REMOTE[name](Path(folder)) as spec:
        yield spec


@contextmanager
def _s3() -> Iterator[str]:
    with running(s3_server()) as S3BackDoor.server:
        yield S3BackDoor.server.spec(timeout_s=15.0, retry_s=1.0, claims=True)


@contextmanager
def _mooncake() -> Iterator[str]:
    with running(mooncake_server()) as MooncakeBackDoor.server:
        yield MooncakeBackDoor.server.spec(buffer_bytes=64 << 20)


@contextmanager
def _lmcache_server() -> Iterator[str]:
    with running(lmcache_server(1.0)) as LMCacheServerBackDoor.server:
        yield LMCacheServerBackDoor.server.spec()


PLANS: dict[str, Plan] = {
    "store-memory": (nullcontext(stores.MEMORY), "store", MemoryBackDoor, NO_WAY_IN),
    "store-filesystem": (
        nullcontext(stores.TestFilesystem.spec), "store", FilesystemBackDoor, NO_CHECKSUM,
    ),
    "store-nixl": (nullcontext(stores.TestNixl.spec), "store", FilesystemBackDoor, NO_CHECKSUM),
    "store-tiered": (nullcontext(TIERED), "store", TieredBackDoor, FASTER_TIER),
    "store-faulty": (nullcontext(stores.TestFaulty.spec), "store", MemoryBackDoor, NO_WAY_IN),
    "store-redis": (_server("redis"), "store", RedisBackDoor, NO_LIMIT),
    "store-s3": (_s3(), "store", S3BackDoor, NO_LIMIT),
    "store-mooncake": (_mooncake(), "store", MooncakeBackDoor, NO_LIMIT | LIMITS["mooncake"]),
    "store-lmcache": (_server("lmcache"), "store", LMCacheBackDoor, LIMITS["lmcache"]),
    "store-lmcache_server": (
        _lmcache_server(), "store", LMCacheServerBackDoor,
        NO_LIMIT | NEVER_REPLACED | LIMITS["lmcache_server"],
    ),
    "store-vllm": (nullcontext(stores.TestVllm.spec), "store", VllmFilesBackDoor, CONNECTORS),
    "store-sqlite": (nullcontext(SQLITE), "store", _sqlite_door, {}),
    "transport-vm": (nullcontext("kvbaton_vm:VmTransport"), "transport", None, {}),
    **{
        f"transport-{spec.partition(':')[0]}": (nullcontext(spec), "transport", None, {})
        for spec in (suite.spec for suite in transports.BUILT_IN)
    },
}  # fmt: skip
"""By the page's name."""


def main(words: list[str]) -> int:
    """See the module."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in ("vendor_store", "vendor_transport"):
            path = str(Path(__file__).parents[2] / "examples" / folder)
            patch.setenv("PYTHONPATH", path, prepend=":")  # of the processes that the kit starts
            patch.syspath_prepend(path)
        return _write(words)


def _write(words: list[str]) -> int:
    folder, names = Path(words[0]), words[1:]
    lacking = []
    for name, (spec, kind, door, exclusions) in PLANS.items():
        if names and name not in names:
            continue
        try:
            with spec as text, tempfile.TemporaryDirectory() as made:
                subject = Subject(text, kind, door, exclusions=exclusions)
                certificate, status = certify(subject, speed)
                (page,) = (
                    path for path in write(certificate, Path(made)) if path.suffix == ".html"
                )
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{name}.html").write_bytes(page.read_bytes())
        except pytest.skip.Exception as reason:
            print(f"{name} keeps its page: {reason}")
            continue
        if status:
            lacking.append(f"{name}: {certificate.verdict}")
    print("\n".join(lacking) or "all of them are certified")
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

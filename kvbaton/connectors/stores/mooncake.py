"""Objects in a Mooncake Store: memory that its clients lend, found through a master.

``PREFIX<key in hex>`` holds checksum (`threaded.seal`) and bytes as one value, which Mooncake shows
when all of it is there. Where it lies the master decides: in the memory of some client, this one if
it lends any, and it is gone with that client. The master evicts when little is free.

Spoken to by the client of its wheel (``mooncake-transfer-engine``, 0.3.13; without CUDA
``mooncake-transfer-engine-non-cuda``), which needs the system's libibverbs. Bytes pass through the
client's buffer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from kvbaton.connectors.store import Pieces, StoreCapabilities
from kvbaton.connectors.stores.threaded import (
    SEAL_BYTES,
    ClientBackend,
    ThreadedStore,
    seal,
    unseal,
)
from kvbaton.errors import ConfigError, StoreError

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # else it tells each call that misses
os.environ.setdefault("MC_RPC_TIMEOUT_MS", "5000")  # else it waits 30 s for a silent master

try:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig
except ImportError as error:
    text = "pip install 'kvbaton[mooncake]', and libibverbs1 of the system"
    raise ImportError(f"{error}: {text}") from error

_NO_ROOM = (-10, -200, -600)
"""Buffer overflow, no handle available, invalid parameters: larger than the client's buffer."""
_OTHERS_S = 2.0
"""How long a store waits for another one that is writing the same object, or was killed at it."""
_MISSING = (-704, -703)
"""Object not found; replica not ready: it is being written."""


class MooncakeStore(ThreadedStore):
    """Keeps objects in a Mooncake Store; see the module.

    Args:
        name: see `Store.name`.
        master: ``host:port`` of its master.
        address: under which the other clients reach this one.
        metadata: its metadata server, ``http://...`` or ``etcd://...``; ``P2PHANDSHAKE`` for none.
        protocol: ``tcp`` or ``rdma``.
        devices: for RDMA, with commas; empty for all.
        lend_bytes: of this process's memory, for objects of anybody; they are lost when it ends.
        buffer_bytes: of the client, and so the most of an object; all that move at a time share it.
        replicas: of each object, in the memories of different clients.
        prefix: of the names of its values; stores with one prefix share their objects.
        threads: see `ThreadedStore`.
    """

    def __init__(
        self,
        name: str,
        *,
        master: str,
        address: str = "127.0.0.1",
        metadata: str = "P2PHANDSHAKE",
        protocol: str = "tcp",
        devices: str = "",
        lend_bytes: int = 0,
        buffer_bytes: int = 256 << 20,
        replicas: int = 1,
        prefix: str = "kvbaton:",
        threads: int = 4,
    ) -> None:
        if protocol not in ("tcp", "rdma"):
            raise ConfigError("protocol", f"must be tcp or rdma, not {protocol!r}")
        if ":" not in master:
            raise ConfigError("master", f"must be host:port, not {master!r}")
        setup = (address, metadata, lend_bytes, buffer_bytes, protocol, devices, master)
        super().__init__(name, MooncakeValues(setup, replicas, prefix), threads=threads)


class MooncakeValues(ClientBackend):
    """The backend of `MooncakeStore`."""

    def __init__(self, setup: tuple[Any, ...], replicas: int, prefix: str) -> None:
        lends = setup[2] > 0
        self.capabilities = StoreCapabilities(persistent=not lends, shared=True, pins=False)
        self._setup = setup
        self._replicas = replicas
        self._prefix = prefix
        self._client: Any = None

    def open(self) -> None:
        """Connect to the master, and lend memory.

        Raises:
            StoreError: the master can't be reached, or refuses.
        """
        client = MooncakeDistributedStore()
        with self._asking("open"):
            self._check(client.setup(*self._setup))
        self._client = client
        self._config = ReplicateConfig()
        self._config.replica_num = self._replicas

    def close(self) -> None:
        """Leave the master; what was lent is gone."""
        super().close()
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Backend.contains`: one question to the master."""
        if not keys:
            return []
        with self._asking("look into"):
            return [
                self._check(code) == 1
                for code in self._client.batch_is_exist([self._name(key) for key in keys])
            ]

    def get(self, key: bytes, target: Pieces) -> bool:
        """See `Backend.get`; an object that is not what it should be is removed."""
        with self._asking("read"):
            size = self._size(key)
            # None where it is lost meanwhile, or where who has it does not answer.
            value = self._client.get_buffer(self._name(key)) if size is not None else None
            if value is None:
                return False
        return unseal(self, key, memoryview(value).cast("B"), target)

    def put(self, key: bytes, source: Pieces) -> bool:
        """See `Backend.put`; a value of another length is replaced."""
        name = self._name(key)
        num_bytes = SEAL_BYTES + sum(map(len, source))
        with self._asking("write to"):
            held = self._size(key)
            if held == num_bytes:
                return True
            if held is not None:
                self._client.remove(name, True)
            parts = [seal(key, source), *(piece for piece in source if len(piece))]
            deadline = time.monotonic() + _OTHERS_S
            while True:
                code = self._client.put_parts(name, *parts, config=self._config)
                if code in _NO_ROOM:
                    return False
                self._check(code)
                if (there := self._size(key) == num_bytes) or time.monotonic() > deadline:
                    return there
                time.sleep(0.005)

    def remove(self, keys: Sequence[bytes]) -> int:
        """See `Backend.remove`, also of what somebody reads: checksums find what that breaks."""
        with self._asking("delete from"):
            names = [self._name(key) for key in dict.fromkeys(keys)]
            return sum(self._check(self._client.remove(name, True)) == 0 for name in names)

    def _size(self, key: bytes) -> int | None:
        size = self._check(self._client.get_size(self._name(key)))
        return None if size in _MISSING else size

    def _check(self, code: int) -> int:
        """An answer of the client: not negative, or that something is missing.

        Raises:
            StoreError: anything else.
        """
        if code < 0 and code not in _MISSING:
            raise StoreError(f"Mooncake's error {code}")
        return code

    def _asking(self, what: str) -> AbstractContextManager[None]:
        return self._calling(f"can't {what} Mooncake's {self._setup[-1]}", StoreError, RuntimeError)

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

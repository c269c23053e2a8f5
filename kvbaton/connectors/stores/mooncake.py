"""Objects in a Mooncake Store: a pool of memory lent by its clients, managed by a master.

The value ``PREFIX<key in hex>`` holds checksum (`threaded.seal`) and bytes, and becomes visible
once all of it is there. The master places it in the memory of some client, maybe this one if it
lends any, and it is lost with that client. The master evicts when little memory is free.

This store uses the client of Mooncake's wheel (``mooncake-transfer-engine``, 0.3.13; without CUDA
``mooncake-transfer-engine-non-cuda``), which needs the system's libibverbs. All bytes pass through
the client's buffer.
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

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # by default it logs each miss
os.environ.setdefault("MC_RPC_TIMEOUT_MS", "5000")  # by default it waits 30 s for a silent master

try:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig
except ImportError as error:
    text = "pip install 'kvbaton[mooncake]', and libibverbs1 of the system"
    raise ImportError(f"{error}: {text}") from error

_NO_ROOM = (-10, -200, -600)
"""Buffer overflow; no handle available; invalid parameters (larger than the client's buffer)."""
_OTHERS_S = 2.0
"""Seconds to wait for another client that is writing the same object, or was killed doing so."""
_MISSING = (-704, -703)
"""Object not found; replica not ready (being written)."""


class MooncakeStore(ThreadedStore):
    """Keeps objects in a Mooncake Store; see the module.

    Args:
        name: See `Store.name`.
        master: ``host:port`` of the master.
        address: Address at which the other clients reach this one.
        metadata: Metadata server, ``http://...`` or ``etcd://...``; ``P2PHANDSHAKE`` for none.
        protocol: ``tcp`` or ``rdma``.
        devices: RDMA devices, separated by commas; empty for all.
        lend_bytes: Bytes of this process's memory lent to the pool; objects in it are lost when
            the process ends.
        buffer_bytes: Size of the client's buffer, shared by all running calls; also the maximum
            size of an object.
        replicas: Number of replicas of each object, in the memories of different clients.
        prefix: Prefix of the values' names; stores with the same prefix share their objects.
        threads: See `ThreadedStore`.
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
            StoreError: The master can't be reached, or refuses.
        """
        client = MooncakeDistributedStore()
        with self._asking("open"):
            self._check(client.setup(*self._setup))
        self._client = client
        self._config = ReplicateConfig()
        self._config.replica_num = self._replicas

    def close(self) -> None:
        """Disconnect from the master; objects in the lent memory are lost."""
        super().close()
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Backend.contains`: one request to the master."""
        if not keys:
            return []
        with self._asking("look into"):
            return [
                self._check(code) == 1
                for code in self._client.batch_is_exist([self._name(key) for key in keys])
            ]

    def get(self, key: bytes, target: Pieces) -> bool:
        """See `Backend.get`; a damaged object is removed."""
        with self._asking("read"):
            size = self._size(key)
            # None if it was lost meanwhile, or if the client that holds it does not answer.
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
        """See `Backend.remove`; also removes objects being read, as checksums detect the damage."""
        with self._asking("delete from"):
            names = [self._name(key) for key in dict.fromkeys(keys)]
            return sum(self._check(self._client.remove(name, True)) == 0 for name in names)

    def _size(self, key: bytes) -> int | None:
        size = self._check(self._client.get_size(self._name(key)))
        return None if size in _MISSING else size

    def _check(self, code: int) -> int:
        """Return an answer of the client that is not negative, or one of `_MISSING`.

        Raises:
            StoreError: The answer is another error.
        """
        if code < 0 and code not in _MISSING:
            raise StoreError(f"Mooncake's error {code}")
        return code

    def _asking(self, what: str) -> AbstractContextManager[None]:
        return self._calling(f"can't {what} Mooncake's {self._setup[-1]}", StoreError, RuntimeError)

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

"""A connector written to vLLM's `KVConnectorBase_V1`, as a store.

Such a connector keeps the KV of prompts, block by block, for later prompts with the same prefix. An
object is split into blocks, each a prompt of its own whose tokens are derived from the object's key
and the block's number (`driver.py`). The object's bytes follow their length and checksum
(`chunks.py`). The first block is saved last, so an object that is found was saved completely.

`open` saves, finds and loads one block, and refuses connectors that can't be used as a store.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from kvbaton.connectors.store import Pieces, StoreCapabilities
from kvbaton.connectors.stores import chunks
from kvbaton.connectors.stores.arena_copies import copy, cut
from kvbaton.connectors.stores.chunks import HEAD, KEY_TOKENS
from kvbaton.connectors.stores.threaded import ClientBackend, ThreadedStore, seal
from kvbaton.connectors.vllm_adapter.driver import ConnectorDriver
from kvbaton.errors import ConfigError

_TRIAL = bytes(range(32))
"""Key of the object that is saved and loaded when a store is opened."""


class VllmStore(ThreadedStore):
    """Keeps objects through a connector written for vLLM; see the module.

    Args:
        name: See `Store.name`.
        connector: ``package.module:Class`` of the connector.
        extra_config: Its ``kv_connector_extra_config``.
        persistent: Whether its objects outlive the process.
        shared: Whether other processes that open it see its objects.
        block_bytes: Bytes of a block of the connector. An object's last block is only partly
            filled, so best is the size of the engine's objects plus at least 24 bytes, or little
            more. All processes that share objects need the same value.
        block_tokens: Tokens of a block, for connectors that need a minimum.
        planes: Whether keys and values are two separate rows of blocks, or adjacent in each block.
        staging_bytes: Memory from which the connector saves, and into which it loads.
        timeout_s: Maximum seconds of a lookup, a load or a save.
    """

    def __init__(
        self,
        name: str,
        *,
        connector: str,
        extra_config: Mapping[str, Any] | None = None,
        persistent: bool = False,
        shared: bool = False,
        block_bytes: int = 256 << 10,
        block_tokens: int = KEY_TOKENS,
        planes: bool = False,
        staging_bytes: int = 64 << 20,
        timeout_s: float = 30.0,
    ) -> None:
        if block_tokens < KEY_TOKENS or block_tokens % KEY_TOKENS:
            text = f"must be a multiple of {KEY_TOKENS}, not {block_tokens}"
            raise ConfigError("block_tokens", text)
        if block_bytes < 4 * block_tokens or block_bytes % (4 * block_tokens):
            text = f"must be a multiple of {4 * block_tokens}, not {block_bytes}"
            raise ConfigError("block_bytes", text)
        if staging_bytes < block_bytes:
            raise ConfigError("staging_bytes", f"must hold a block, {block_bytes} bytes")
        driver = ConnectorDriver(
            path=connector,
            extra_config=extra_config or {},
            block_bytes=block_bytes,
            block_tokens=block_tokens,
            num_blocks=staging_bytes // block_bytes,
            planes=planes,
            timeout_s=timeout_s,
        )
        capabilities = StoreCapabilities(
            persistent=persistent, shared=shared, pins=False, deletes=False
        )
        super().__init__(name, ConnectorBlocks(driver, capabilities), threads=1)


class _Part(NamedTuple):
    """A block of an object: index of the object in the call, and number of the block in it."""

    item: int
    number: int


class ConnectorBlocks(ClientBackend):
    """The backend of `VllmStore`. A connector supports one caller, so calls are serialised."""

    def __init__(self, driver: ConnectorDriver, capabilities: StoreCapabilities) -> None:
        self.capabilities = capabilities
        self._driver = driver
        self._turn = threading.Lock()

    def open(self) -> None:
        """Build the connector, then save, find and load a block.

        Raises:
            ConfigError: It can't be used as a store; the message names the method or feature.
            StoreError: The connector raises.
        """
        try:
            self._try()
        except BaseException:
            with suppress(Exception):  # the first error matters more
                self._driver.close()
            raise

    def _try(self) -> None:
        with self._calling_connector():
            self._driver.open()
        data = memoryview(_TRIAL * 8)
        target = bytearray(len(data))
        if not self.put(_TRIAL, [data]):
            raise self._driver.refusal("get_num_new_matched_tokens does not find what was saved")
        self._driver.wipe()
        if not self.get(_TRIAL, [memoryview(target)]):
            raise self._driver.refusal("start_load_kv does not load what was saved")
        if self.contains([bytes(32)])[0]:
            raise self._driver.refusal("get_num_new_matched_tokens finds what nobody saved")

    def close(self) -> None:
        """Shut the connector down."""
        super().close()
        with self._turn:
            self._driver.close()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Backend.contains`; looks up only the first block of each object."""
        with self._calling_connector():
            return self._driver.found([self._name(key, 0) for key in keys])

    def get(self, key: bytes, target: Pieces) -> bool:
        """See `Backend.get`."""
        return self.get_many([key], [target])[0]

    def put(self, key: bytes, source: Pieces) -> bool:
        """See `Backend.put`."""
        return self.put_many([key], [source])[0]

    def get_many(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> list[bool]:
        """See `BatchBackend.get_many`."""
        heads = [bytearray(HEAD.size) for _ in keys]
        rows = [[memoryview(head), *target] for head, target in zip(heads, targets, strict=True)]
        parts = self._parts(targets)

        def read(at: int, block: list[memoryview]) -> None:
            target = self._cut(rows, parts[at])
            copy(target, cut(block, 0, sum(map(len, target))))

        with self._calling_connector():
            loaded = self._driver.load([self._name(keys[i], n) for i, n in parts], read)
        whole = [True] * len(keys)
        for part, there in zip(parts, loaded, strict=True):
            whole[part.item] &= there
        return [
            there and head == HEAD.pack(sum(map(len, target)), seal(key, target))
            for there, head, key, target in zip(whole, heads, keys, targets, strict=True)
        ]

    def put_many(self, keys: Sequence[bytes], sources: Sequence[Pieces]) -> list[bool]:
        """See `BatchBackend.put_many`; blocks that are there are not saved again."""
        parts = self._parts(sources)
        names = [self._name(keys[i], n) for i, n in parts]
        with self._calling_connector():
            there = self._driver.found(names)
            lacking = [at for at, found in enumerate(there) if not found]
            rows = [
                [memoryview(HEAD.pack(sum(map(len, source)), seal(key, source))), *source]
                for key, source in zip(keys, sources, strict=True)
            ]

            for first in (False, True):  # the first block of an object is saved last
                some = [at for at in lacking if (parts[at].number == 0) is first]

                def write(at: int, block: list[memoryview], some: list[int] = some) -> None:
                    source = self._cut(rows, parts[some[at]])
                    copy(cut(block, 0, sum(map(len, source))), source)

                self._driver.store([names[at] for at in some], write)
            kept = self._driver.found(names) if lacking else there
        whole = [True] * len(keys)
        for part, found in zip(parts, kept, strict=True):
            whole[part.item] &= found
        return whole

    def _parts(self, many: Sequence[Pieces]) -> list[_Part]:
        size = self._driver.block_bytes
        return [
            _Part(i, n) for i, pieces in enumerate(many) for n in range(chunks.count(pieces, size))
        ]

    def _cut(self, rows: Sequence[Pieces], part: _Part) -> list[memoryview]:
        size = self._driver.block_bytes
        return cut(rows[part.item], part.number * size, size)

    def _name(self, key: bytes, number: int) -> bytes:
        """Name of a block, which depends on the block size."""
        data = key + number.to_bytes(8, "little") + self._driver.block_bytes.to_bytes(8, "little")
        return hashlib.blake2b(data, digest_size=32, person=b"kvbaton-block").digest()

    @contextmanager
    def _calling_connector(self) -> Iterator[None]:
        """Exclusive use of the connector; its errors become `StoreError`."""
        with self._turn, self._calling(self._driver.path, Exception):
            yield

"""A store over NIXL's storage plugins: ``nixl:{"backend": "POSIX", "path": "/mnt/kv"}``.

With a `path` the plugin moves bytes of files (POSIX, GDS, GDS_MT, ...). Files, names, accounting
and eviction are those of `stores/filesystem.py`, so both stores may use one directory. Without a
`path` it moves whole objects (OBJ for S3, AZURE_BLOB, ...), each a checksum and its bytes, as in
`stores/s3.py`.

Tested with NIXL 1.5.1 over POSIX and, against a local Azurite, AZURE_BLOB. Its wheel also has OBJ
and GDS, but not their libraries (cuObject, cuFile): `open` then reports that the plugin can't be
loaded. NIXL can neither delete nor count objects, so without a `path` this store can't, either.

A running transfer can't be aborted, since buffers are borrowed. As with a system call, time-outs
are up to the caller, whose memory stays borrowed until the transfer ends.
"""

from __future__ import annotations

import errno
import itertools
import os
import time
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from kvbaton.connectors.nixl_library import load_nixl
from kvbaton.connectors.store import Pieces, StoreCapabilities
from kvbaton.connectors.stores.filesystem import Files
from kvbaton.connectors.stores.filesystem_entry import FileMover
from kvbaton.connectors.stores.threaded import (
    ONE,
    SEAL_BYTES,
    ClientBackend,
    ThreadedStore,
    seal,
    unseal,
)
from kvbaton.errors import ConfigError, StoreError

MAX_PAUSE_S = 0.001
"""Maximum seconds between two polls of a transfer."""
MIN_PAUSE_S = 0.00001
"""Seconds before the second poll of a transfer; the pause doubles with each poll."""

_FILE, _OBJECT, _HOST = "FILE", "OBJ", "DRAM"
_ROW = np.dtype(np.uint64)


class NixlStore(ThreadedStore):
    """Keeps objects through a storage plugin of NIXL; see the module.

    Args:
        name: See `Store.name`.
        backend: NIXL's name of the plugin.
        path: Directory of the files, for a file plugin; None for an object plugin.
        params: Parameters of the plugin, as NIXL documents them: ``{"use_uring": "true"}``,
            ``{"bucket": "kv", "endpoint_override": "http://..."}``, ``{"container_name": "kv"}``.
        max_bytes: See `FilesystemStore`; only with `path`.
        threads: See `ThreadedStore`.
        touch_seconds: See `FilesystemStore`.

    Raises:
        ConfigError: `max_bytes` without `path`.
    """

    def __init__(
        self,
        name: str,
        *,
        backend: str = "POSIX",
        path: str | None = None,
        params: dict[str, str] | None = None,
        max_bytes: int | None = None,
        threads: int = 4,
        touch_seconds: float = 60.0,
    ) -> None:
        values = {key: str(value) for key, value in (params or {}).items()}
        self._plugin = NixlPlugin(backend, values, _OBJECT if path is None else _FILE)
        kept: Files | NixlObjects
        if path is not None:
            mover = NixlMover(self._plugin)
            kept = Files(path, max_bytes, mover, fsync=False, touch_seconds=touch_seconds)
            self.directory = kept.root
        elif max_bytes is None:
            kept = NixlObjects(self._plugin)
        else:
            raise ConfigError("max_bytes", "needs path: what objects take is for their service")
        super().__init__(name, kept, threads=threads)
        self.load_limit = self.store_limit = ONE

    def open(self) -> None:
        """See `Store.open`; loads the plugin."""
        self._plugin.open()
        super().open()

    def register(self, regions: Sequence[memoryview]) -> None:
        """See `Registering.register`."""
        self._plugin.register(regions)

    def close(self) -> None:
        """See `Store.close`."""
        super().close()
        self._plugin.close()


class NixlPlugin:
    """A NIXL agent with one storage plugin. Thread-safe.

    Args:
        backend: Name of the plugin.
        params: Parameters of the plugin.
        kind: Kind of memory that the plugin must support besides host memory: ``FILE`` or ``OBJ``.
    """

    def __init__(self, backend: str, params: dict[str, str], kind: str) -> None:
        self.name = backend
        self.errors: tuple[type[Exception], ...] = (OSError,)
        self._params, self._kind = params, kind
        self._api: Any = None
        self._agent = f"kvbaton-store-{uuid.uuid4()}"
        self._regions: list[tuple[int, int]] = []

    def open(self) -> None:
        """Load the plugin.

        Raises:
            ConfigError: There is no plugin of this name, its libraries are missing, it refuses its
                parameters, or it does not support the kind of memory.
        """
        library = load_nixl("--store")
        self.errors = (OSError, *library.errors)
        # Threads of the store share the agent.
        config = library.api.nixl_agent_config(
            enable_prog_thread=False,
            backends=[],
            sync_mode=library.api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        api = library.api.nixl_agent(self._agent, config)
        if self.name not in api.get_plugin_list():
            there = ", ".join(sorted(api.get_plugin_list()))
            raise ConfigError("backend", f"NIXL has no plugin {self.name!r}, but {there}")
        try:
            api.create_backend(self.name, self._params)
        except self.errors as error:
            text = f"NIXL can't start its plugin {self.name} with {sorted(self._params)}: {error}"
            raise ConfigError("backend", text) from error
        kinds = api.get_backend_mem_types(self.name)
        if not {f"{self._kind}_SEG", f"{_HOST}_SEG"} <= set(kinds):
            way = "without path" if self._kind == _OBJECT else "with path"
            text = f"{self.name} can't be used {way}: it deals with {', '.join(sorted(kinds))}"
            raise ConfigError("backend", text)
        self._api = api

    def close(self) -> None:
        """Destroy the agent, with all registrations."""
        self._api, self._regions = None, []

    def register(self, regions: Sequence[memoryview]) -> None:
        """See `Registering.register`."""
        rows = [(_address(region), len(region), 0, "") for region in regions if len(region)]
        try:
            self._register(rows, _HOST)
        except self.errors as error:
            raise StoreError(f"NIXL's {self.name} can't register memory: {error}") from error
        self._regions = [(address, address + size) for address, size, *_ in rows]

    def move(self, way: str, pieces: Pieces, file: int, key: str = "") -> None:
        """Read or write pieces, in order, and wait for the end.

        Args:
            way: ``READ`` or ``WRITE``.
            pieces: Pieces in host memory; not all of them empty.
            file: Descriptor of an open file, or a number that identifies the object in this call.
            key: Name of the object.

        Raises:
            OSError, NIXL's exceptions: The transfer failed.
        """
        own = [(_address(piece), len(piece), 0) for piece in pieces if len(piece)]
        local = np.array(own, _ROW)
        ends = local[:, 1].cumsum()
        remote = np.stack([ends - local[:, 1], local[:, 1], np.full(len(local), file, _ROW)], 1)
        strange = [
            (first, size, 0, "")
            for first, size, _ in own
            if not any(start <= first and first + size <= end for start, end in self._regions)
        ]
        held: list[Any] = []
        try:
            if strange:
                held.append(self._register(strange, _HOST))
            held.append(self._register([(0, int(ends[-1]), file, key)], self._kind))
            here = self._api.get_xfer_descs(local, _HOST)
            there = self._api.get_xfer_descs(remote, self._kind)
            self._transfer(self._api.initialize_xfer(way, here, there, self._agent))
        finally:
            for registered in held:
                self._api.deregister_memory(registered, backends=[self.name])

    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Per name, whether the object is there."""
        if not keys:
            return []
        rows = [(0, 0, 0, key) for key in keys]
        return [found is not None for found in self._api.query_memory(rows, self.name, self._kind)]

    def _register(self, rows: Sequence[tuple[int, int, int, str]], kind: str) -> Any:
        return self._api.register_memory(rows, kind, backends=[self.name])

    def _transfer(self, transfer: Any) -> None:
        try:
            pause, state = MIN_PAUSE_S, self._api.transfer(transfer)
            while state == "PROC":
                time.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE_S)
                state = self._api.check_xfer_state(transfer)
            if state != "DONE":
                raise OSError(errno.EIO, f"NIXL's {self.name} ended a transfer as {state}")
        finally:
            self._api.release_xfer_handle(transfer)


class NixlMover(FileMover):
    """Moves bytes of files through the plugin."""

    def __init__(self, plugin: NixlPlugin) -> None:
        self._plugin = plugin

    def move(self, file: int, pieces: Pieces, *, write: bool) -> bool:
        """See `FileMover.move`."""
        num_bytes = sum(map(len, pieces))
        if not write and os.fstat(file).st_size < num_bytes:
            return False
        try:
            self._plugin.move("WRITE" if write else "READ", pieces, file)
        except self._plugin.errors as error:
            disk = os.fstatvfs(file)
            if write and disk.f_bavail * disk.f_frsize < num_bytes:  # NIXL gives no reason
                raise OSError(errno.ENOSPC, str(error)) from error
            if isinstance(error, OSError):
                raise
            raise OSError(errno.EIO, f"NIXL's {self._plugin.name}: {error}") from error
        return True


class NixlObjects(ClientBackend):
    """The backend of a `NixlStore` without a directory."""

    capabilities = StoreCapabilities(persistent=True, shared=True, pins=False, deletes=False)

    def __init__(self, plugin: NixlPlugin) -> None:
        self._plugin = plugin
        self._numbers = itertools.count(1)

    def open(self) -> None:
        """Look up an object, to reach the plugin's service.

        Raises:
            StoreError: The service can't be reached.
        """
        with self._asking("look into"):
            self._plugin.exist(["none"])

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Backend.contains`."""
        with self._asking("look into"):
            return self._plugin.exist([_path(key) for key in keys])

    def get(self, key: bytes, target: Pieces) -> bool:
        """See `Backend.get`."""
        sealed = memoryview(bytearray(SEAL_BYTES + sum(map(len, target))))
        with self._asking("read"):
            for last in (False, True):
                try:
                    self._plugin.move("READ", [sealed], next(self._numbers), _path(key))
                    break
                except self._plugin.errors:  # none of them means that the object is missing
                    if not self._plugin.exist([_path(key)])[0]:
                        return False
                    if last:  # the first time it may have been stored just now: retry
                        raise
        return unseal(self, key, sealed, target)

    def put(self, key: bytes, source: Pieces) -> bool:
        """See `Backend.put`."""
        if not self.contains([key])[0]:
            sealed = memoryview(bytearray(b"".join([seal(key, source), *source])))
            with self._asking("write to"):
                self._plugin.move("WRITE", [sealed], next(self._numbers), _path(key))
        return True

    def _asking(self, what: str) -> AbstractContextManager[None]:
        return self._calling(f"can't {what} {self._plugin.name}", *self._plugin.errors)


def _address(piece: memoryview) -> int:
    return int(np.frombuffer(piece, np.uint8).ctypes.data)


def _path(key: bytes) -> str:
    name = key.hex()
    return f"kvbaton-1/{name[:2]}/{name}"

"""The back doors of the built-in stores that keep files."""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from kvbaton.connectors.stores import filesystem_entry
from kvbaton.connectors.stores.filesystem import Files, FilesystemStore


class FilesystemBackDoor:
    """Reads and writes the safetensors files of the filesystem store; a `BackDoor`."""

    def __init__(self, store: FilesystemStore) -> None:
        assert isinstance(store.backend, Files)
        self._files = store.backend

    def get(self, key: bytes) -> bytes | None:
        """The tensor in the file, read as safetensors are."""
        try:
            data = self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        start = 8 + int.from_bytes(data[:8], "little")
        first, end = json.loads(data[8:start])["object"]["data_offsets"]
        return data[start + first : start + end]

    def put(self, key: bytes, data: bytes) -> None:
        """Write a file."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        header = filesystem_entry.header(key, len(data), xxhash.xxh3_128(data).digest())
        path.write_bytes(header + data)

    def cut(self, key: bytes, num_bytes: int) -> None:
        """Shorten the file."""
        path = self._path(key)
        path.write_bytes(path.read_bytes()[:num_bytes])

    def spoil(self, key: bytes) -> None:
        """Change the last byte of the file."""
        path = self._path(key)
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    def _path(self, key: bytes) -> Path:
        return Path(self._files._path(key))

"""The back doors of the built-in stores that keep files."""

from __future__ import annotations

import json
from pathlib import Path

from kvbaton.connectors.stores.filesystem import Files, FilesystemStore, header


class FilesystemBackDoor:
    """Reads and writes the safetensors files of the filesystem store; a `BackDoor`.

    It lacks `spoil`: the engine's digests find bytes that changed on the disk, not this store.
    """

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
        path.write_bytes(header(key, len(data)) + data)

    def cut(self, key: bytes, num_bytes: int) -> None:
        """Shorten the file."""
        path = self._path(key)
        path.write_bytes(path.read_bytes()[:num_bytes])

    def fail(self, failing: bool) -> None:
        """Put a loop of links in the directory's place, which even root can't follow."""
        root, away = Path(self._files._root), Path(f"{self._files._root}-away")
        if failing:
            root.rename(away)
            root.symlink_to(root)
        else:
            root.unlink()
            away.rename(root)

    def _path(self, key: bytes) -> Path:
        return Path(self._files._path(key))

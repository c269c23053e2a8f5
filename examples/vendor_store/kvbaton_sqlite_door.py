"""Back door of the conformance kit: direct access to the rows of a `SqliteStore`."""

from __future__ import annotations

import sqlite3
from typing import Any

from xxhash import xxh3_64_intdigest


class SqliteDoor:
    """Reads and damages objects of an opened store."""

    def __init__(self, store: Any) -> None:
        self._database = store.backend

    def get(self, key: bytes) -> bytes | None:
        """Return the bytes of a row."""
        found = self._run("SELECT data FROM objects WHERE key = ?", key)
        return found[0] if found else None

    def put(self, key: bytes, data: bytes) -> None:
        """Insert a row."""
        row = (key, xxh3_64_intdigest(data) >> 1, data)
        self._run("INSERT INTO objects (key, sum, data) VALUES (?, ?, ?)", *row)

    def cut(self, key: bytes, num_bytes: int) -> None:
        """Truncate a row to its first `num_bytes` bytes."""
        self._run("UPDATE objects SET data = substr(data, 1, ?) WHERE key = ?", num_bytes, key)

    def spoil(self, key: bytes) -> None:
        """Change the last byte of a row."""
        data = self.get(key) or b""
        wrong = data[:-1] + bytes([data[-1] ^ 1])
        self._run("UPDATE objects SET data = ? WHERE key = ?", wrong, key)

    def fail(self, failing: bool) -> None:
        """Make all calls fail, by renaming the table; or undo it."""
        names = ("objects", "away") if failing else ("away", "objects")
        self._run("ALTER TABLE {} RENAME TO {}".format(*names))

    def _run(self, command: str, *values: object) -> tuple[bytes] | None:
        with sqlite3.connect(self._database._path, 20.0) as connection:
            row: tuple[bytes] | None = connection.execute(command, values).fetchone()
        connection.close()
        return row

"""A store that keeps objects as rows of an SQLite database.

A row becomes visible with its transaction, so no reader ever sees a part of it; a checksum detects
later corruption on disk. The oldest rows are evicted to make room for new ones.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from xxhash import xxh3_64_intdigest

from kvbaton.connectors import Pieces, StoreCapabilities, StoreError, ThreadedStore, Usage

LOCK_SECONDS = 20.0
SCHEMA = """
CREATE TABLE IF NOT EXISTS objects
    (id INTEGER PRIMARY KEY, key BLOB UNIQUE, sum INTEGER, data BLOB);
CREATE TABLE IF NOT EXISTS total (objects INTEGER, bytes INTEGER);
INSERT INTO total SELECT 0, 0 WHERE NOT EXISTS (SELECT * FROM total);
CREATE TRIGGER IF NOT EXISTS came AFTER INSERT ON objects
    BEGIN UPDATE total SET objects = objects + 1, bytes = bytes + length(new.data); END;
CREATE TRIGGER IF NOT EXISTS went AFTER DELETE ON objects
    BEGIN UPDATE total SET objects = objects - 1, bytes = bytes - length(old.data); END;
"""


class SqliteStore(ThreadedStore):
    """Keeps objects in an SQLite database.

    Args:
        name: Name of the store in metrics.
        path: File of the database; created if it is missing.
        max_bytes: Most bytes of all objects; None for no limit.
        threads: Number of objects that are transferred at the same time.
    """

    def __init__(
        self, name: str, *, path: str, max_bytes: int | None = None, threads: int = 4
    ) -> None:
        super().__init__(name, Database(path, max_bytes), threads=threads)


class Database:
    """The backend: one connection per thread."""

    capabilities = StoreCapabilities(persistent=True, shared=True, pins=False)

    def __init__(self, path: str, max_bytes: int | None) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._connections: list[sqlite3.Connection] = []
        self._mine = threading.local()
        self._usage = Usage(capacity=max_bytes)
        self._trouble: str | None = "not open"

    def open(self) -> None:
        """Create the tables."""
        self._mine = threading.local()
        with self._connection() as connection:
            # Before the first write: with large pages, a KV block takes few of them.
            connection.execute("PRAGMA page_size=65536")
            connection.execute("PRAGMA journal_mode=WAL")
            connection.executescript(SCHEMA)

    def close(self) -> None:
        """Close every thread's connection."""
        while self._connections:
            self._connections.pop().close()
        self._trouble = "not open"

    def health(self) -> str | None:
        """The error of the last call; None if it succeeded."""
        return self._trouble

    def usage(self) -> Usage:
        """Usage as of the last change by this process."""
        return self._usage

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Look up all keys with one query."""
        marks = ",".join("?" * len(keys))
        with self._connection() as connection:
            rows = connection.execute(f"SELECT key FROM objects WHERE key IN ({marks})", keys)
            there = {key for (key,) in rows}
        return [key in there for key in keys]

    def get(self, key: bytes, target: Pieces) -> bool:
        """Copy a row's bytes into `target`."""
        return self.get_many([key], [target])[0]

    def get_many(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> list[bool]:
        """Copy the bytes of all intact rows into their targets; one query for all."""
        answers = [False] * len(keys)
        # A join costs less than ``IN``, which sorts; the numbers tell which key a row is for.
        asked = ",".join(f"({number},?)" for number in range(len(keys)))
        query = f"WITH asked (number, key) AS (VALUES {asked}) SELECT number, sum, data FROM asked"
        with self._connection() as connection:
            rows = connection.execute(f"{query} CROSS JOIN objects USING (key)", keys)
            for number, total, data in rows:
                if checksum(data) == total:
                    answers[number] = _fill(targets[number], data)
        return answers

    def put(self, key: bytes, source: Pieces) -> bool:
        """Insert a row."""
        return self.put_many([key], [source])[0]

    def put_many(self, keys: Sequence[bytes], sources: Sequence[Pieces]) -> list[bool]:
        """Insert rows, and delete the oldest while there are too many bytes; one transaction."""
        room = self._max_bytes or float("inf")
        objects = [b"".join(source) for source in sources]
        rows = [
            (key, checksum(data), data)
            for key, data in zip(keys, objects, strict=True)
            if len(data) <= room
        ]
        try:
            self._insert(rows)
        except StoreError as error:
            if getattr(error.__cause__, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                return [False] * len(keys)
            raise
        if sum(map(len, objects)) <= room:
            return [True] * len(keys)
        return self.contains(keys)  # new rows may have evicted each other

    def _insert(self, rows: Sequence[tuple[bytes, int, bytes]]) -> None:
        with self._connection() as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            # Storing an object again repairs a row that was corrupted on disk.
            connection.executemany(
                "DELETE FROM objects WHERE key = ? AND sum != checksum(data)",
                [(key,) for key, _, _ in rows],
            )
            connection.executemany(
                "INSERT OR IGNORE INTO objects (key, sum, data) VALUES (?,?,?)", rows
            )
            while self._count(connection) > (self._max_bytes or float("inf")):
                connection.execute("DELETE FROM objects WHERE id = (SELECT min(id) FROM objects)")

    def remove(self, keys: Sequence[bytes]) -> int:
        """Delete rows."""
        marks = ",".join("?" * len(keys))
        with self._connection() as connection:
            gone = connection.execute(f"DELETE FROM objects WHERE key IN ({marks})", keys)
            self._count(connection)
        return gone.rowcount

    def _count(self, connection: sqlite3.Connection) -> int:
        objects, num_bytes = connection.execute("SELECT objects, bytes FROM total").fetchone()
        self._usage = Usage(objects, num_bytes, self._max_bytes)
        return int(num_bytes)

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        try:
            if not hasattr(self._mine, "connection"):
                self._mine.connection = sqlite3.connect(
                    self._path, LOCK_SECONDS, isolation_level=None, check_same_thread=False
                )
                self._mine.connection.create_function("checksum", 1, checksum)
                self._mine.connection.execute("PRAGMA mmap_size=1073741824")
                self._connections.append(self._mine.connection)
            yield self._mine.connection
            self._trouble = None
        except sqlite3.Error as error:
            self._trouble = f"{self._path}: {error}"
            raise StoreError(self._trouble) from error


def checksum(data: bytes) -> int:
    """Checksum of an object, as a 63-bit integer, which SQLite can store."""
    return xxh3_64_intdigest(data) >> 1


def _fill(target: Pieces, data: bytes) -> bool:
    if len(data) != sum(map(len, target)):
        return False
    if len(target) == 1:
        target[0][:] = data
        return True
    rest = memoryview(data)
    for piece in target:
        piece[:] = rest[: len(piece)]
        rest = rest[len(piece) :]
    return True

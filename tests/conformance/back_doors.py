"""The back doors of the built-in stores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from kvbaton.connectors.stores.chunks import HEAD, KEY_TOKENS, tokens_of
from kvbaton.connectors.stores.faulty import FaultyStore
from kvbaton.connectors.stores.filesystem import Files, FilesystemStore
from kvbaton.connectors.stores.filesystem_entry import header, start_of
from kvbaton.connectors.stores.memory import Arena, MemoryStore
from kvbaton.connectors.stores.threaded import SEAL_BYTES, ThreadedStore, seal
from kvbaton.connectors.stores.tiered import TieredStore
from tests.support.store_servers import Server


def replace_by_a_loop(folder: Path, failing: bool) -> None:
    """Put a loop of links in a folder's place, or the folder back."""
    away = folder.with_name(f"{folder.name}-away")
    if failing:
        folder.rename(away)
        folder.symlink_to(folder)
    else:
        folder.unlink()
        away.rename(folder)


class FilesystemBackDoor:
    """Reads and writes the safetensors files of the filesystem store, or of NIXL's; a `BackDoor`.

    It lacks `spoil`: the engine's digests find bytes that changed on the disk, not these stores.
    """

    def __init__(self, store: ThreadedStore) -> None:
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
        path.write_bytes(header(key, len(data), start_of(len(data))) + data)

    def cut(self, key: bytes, num_bytes: int) -> None:
        """Shorten the file."""
        path = self._path(key)
        path.write_bytes(path.read_bytes()[:num_bytes])

    def fail(self, failing: bool) -> None:
        """Put a loop of links in the directory's place, which even root can't follow."""
        replace_by_a_loop(Path(self._files.root), failing)

    def _path(self, key: bytes) -> Path:
        return Path(self._files._path(key))


class MemoryBackDoor:
    """Reads the arena of a memory store, also of one that is inside of a faulty one."""

    def __init__(self, store: MemoryStore | FaultyStore) -> None:
        inner = store.inner if isinstance(store, FaultyStore) else store
        assert isinstance(inner, MemoryStore)
        assert isinstance(inner.backend, Arena)
        self._arena = inner.backend

    def get(self, key: bytes) -> bytes | None:
        """A copy of what is in the arena."""
        entry = self._arena._entries.get(key)
        return None if entry is None else b"".join(self._arena._views(entry))


class TieredBackDoor:
    """Reaches the files of the last tier, a filesystem store."""

    def __init__(self, store: TieredStore) -> None:
        last = store.tiers[-1].store
        assert isinstance(last, FilesystemStore)
        files = FilesystemBackDoor(last)
        self.get, self.put, self.fail = files.get, files.put, files.fail


class S3BackDoor:
    """Reads and writes an S3 store's objects past its checks; stops the server to let it fail."""

    server: ClassVar[Server]
    """Where the bucket is."""

    def __init__(self, store: Any) -> None:
        from kvbaton.connectors.stores.s3 import S3Objects

        objects: S3Objects = store.backend
        self._bucket = objects._bucket

    def get(self, key: bytes) -> bytes | None:
        """What is behind the seal."""
        try:
            return self._value(key)[SEAL_BYTES:]
        except FileNotFoundError:
            return None

    def put(self, key: bytes, data: bytes) -> None:
        """Put an object."""
        self._put(key, seal(key, [memoryview(data)]) + data)

    def cut(self, key: bytes, num_bytes: int) -> None:
        """Shorten an object."""
        self._put(key, self._value(key)[: SEAL_BYTES + num_bytes])

    def spoil(self, key: bytes) -> None:
        """Change the last byte of an object."""
        value = self._value(key)
        self._put(key, value[:-1] + bytes([value[-1] ^ 1]))

    def fail(self, failing: bool) -> None:
        """Stop the server's process, or let it go on."""
        self.server.pause(failing)

    def _value(self, key: bytes) -> bytes:
        import obstore

        from kvbaton.connectors.stores.s3 import _path

        return bytes(obstore.get(self._bucket, _path(key)).bytes())

    def _put(self, key: bytes, value: bytes) -> None:
        import obstore

        from kvbaton.connectors.stores.s3 import _path

        obstore.put(self._bucket, _path(key), value, use_multipart=False)


class MooncakeBackDoor:
    """Reads and writes a Mooncake store's values past its checks; stops the master to fail."""

    server: ClassVar[Server]
    """The master."""

    def __init__(self, store: Any) -> None:
        self._client, self._name = store.backend._client, store.backend._name

    def get(self, key: bytes) -> bytes | None:
        """What is behind the seal."""
        value = bytes(self._client.get(self._name(key)))
        return value[SEAL_BYTES:] if value else None

    def put(self, key: bytes, data: bytes) -> None:
        """Put a value."""
        self._put(key, seal(key, [memoryview(data)]) + data)

    def cut(self, key: bytes, num_bytes: int) -> None:
        """Shorten a value."""
        self._put(key, bytes(self._client.get(self._name(key)))[: SEAL_BYTES + num_bytes])

    def spoil(self, key: bytes) -> None:
        """Change the last byte of a value."""
        value = bytes(self._client.get(self._name(key)))
        self._put(key, value[:-1] + bytes([value[-1] ^ 1]))

    def fail(self, failing: bool) -> None:
        """Stop the master's process, or let it go on."""
        self.server.pause(failing)

    def _put(self, key: bytes, value: bytes) -> None:
        self._client.remove(self._name(key), True)
        assert self._client.put(self._name(key), value) == 0


class RedisBackDoor:
    """Reads and writes a redis store's values by a connection of its own."""

    def __init__(self, store: Any) -> None:
        from kvbaton.connectors.stores.redis import LABELS, RedisValues

        values: RedisValues = store.backend
        self._redis, self._name = values._redis, values._name
        self._labels, self._head = bytes(LABELS.size), SEAL_BYTES + LABELS.size

    def get(self, key: bytes) -> bytes | None:
        """What is behind seal and labels."""
        value: Any = self._redis.get(self._name(key))
        return None if value is None else bytes(value[self._head :])

    def put(self, key: bytes, data: bytes) -> None:
        """Set a value."""
        whole = self._labels + data
        self._redis.set(self._name(key), seal(key, [memoryview(whole)]) + whole)

    def cut(self, key: bytes, num_bytes: int) -> None:
        """Shorten a value."""
        value: Any = self._redis.get(self._name(key))
        self._redis.set(self._name(key), value[: self._head + num_bytes])

    def spoil(self, key: bytes) -> None:
        """Change the last byte of a value."""
        value: Any = self._redis.get(self._name(key))
        self._redis.set(self._name(key), value[:-1] + bytes([value[-1] ^ 1]))

    def fail(self, failing: bool) -> None:
        """Take the permission for everything but this."""
        rights = "-@all" if failing else "+@all"
        command: Any = self._redis.execute_command
        command("ACL", "SETUSER", "default", rights, "+acl")


class LMCacheBackDoor:
    """Reads and writes the chunks of an LMCache engine in this process."""

    def __init__(self, store: Any) -> None:
        self._engine, self._chunk_bytes = store.backend._engine, store.backend._chunk_bytes

    def get(self, key: bytes) -> bytes | None:
        """Behind length and checksum of the first chunk, and all of the others."""
        kept = b""

        def read(slots: list[memoryview]) -> None:
            nonlocal kept
            kept = b"".join(slots)

        self._engine.retrieve(tokens_of(key), move=read)
        if not kept:
            return None
        num_bytes, _ = HEAD.unpack_from(kept)
        chunks = -(-(HEAD.size + num_bytes) // self._chunk_bytes)
        self._engine.retrieve(tokens_of(key, KEY_TOKENS, chunks), move=read)
        return kept[HEAD.size : HEAD.size + num_bytes]

    def put(self, key: bytes, data: bytes) -> None:
        """Store chunks."""
        whole = HEAD.pack(len(data), seal(key, [memoryview(data)])) + data
        tokens = tokens_of(key, KEY_TOKENS, -(-len(whole) // self._chunk_bytes))
        self._engine.store(tokens, move=lambda slots: fill_slots(slots, whole))


def fill_slots(slots: list[memoryview], data: bytes) -> None:
    """Write bytes into memory of chunks, the last of which may be longer."""
    for number, slot in enumerate(slots):
        part = data[number * len(slot) :][: len(slot)]
        slot[: len(part)] = part


class LMCacheServerBackDoor:
    """Reads and writes chunks in an LMCache server's memory; stops its process to let it fail.

    It lacks `cut` and `spoil`: what the server has it neither replaces nor removes.
    """

    server: ClassVar[Server]

    def __init__(self, store: Any) -> None:
        self._store = store

    def get(self, key: bytes) -> bytes | None:
        """Behind length and checksum of the first chunk, and all of the others."""
        with self._store.backend._instance() as instance:
            head = self._kept(instance, key, 1)
            if not head:
                return None
            num_bytes, _ = HEAD.unpack_from(head)
            chunks = -(-(HEAD.size + num_bytes) // len(head))
            return self._kept(instance, key, chunks)[HEAD.size : HEAD.size + num_bytes]

    def put(self, key: bytes, data: bytes) -> None:
        """Store chunks."""
        whole = HEAD.pack(len(data), seal(key, [memoryview(data)])) + data
        with self._store.backend._instance() as instance:
            request = instance._request(key, -(-len(whole) // instance._chunk_bytes))
            room = instance._answer("prepare_store", request, instance._id).context
            fill_slots(instance._slots(room), whole)
            instance._answer("commit_store", request, instance._id, b"")
            instance._end([request])

    def fail(self, failing: bool) -> None:
        """Stop the server's process, or let it go on."""
        self.server.pause(failing)

    def _kept(self, instance: Any, key: bytes, chunks: int) -> bytes:
        request, kept = instance._request(key, chunks), b""
        if instance._lock([request]) == [chunks]:
            found = instance._answer("prepare_retrieve", request, instance._id)
            kept = b"".join(instance._slots(found.context))
            instance._answer("commit_retrieve", request, instance._id)
        instance._end([request])
        return kept


class VllmFilesBackDoor:
    """Reaches the files of ``examples/vllm_connector`` below a `VllmStore`."""

    def __init__(self, store: Any) -> None:
        self._blocks = store.backend
        self._connector = store.backend._driver._scheduler

    def get(self, key: bytes) -> bytes | None:
        """Behind length and checksum of the first block, and all of the others."""
        try:
            data = self._path(key, 0).read_bytes()
        except FileNotFoundError:
            return None
        num_bytes, _ = HEAD.unpack_from(data)
        for number in range(1, -(-(HEAD.size + num_bytes) // len(data))):
            data += self._path(key, number).read_bytes()
        return data[HEAD.size : HEAD.size + num_bytes]

    def put(self, key: bytes, data: bytes) -> None:
        """Write files."""
        size = self._blocks._driver.block_bytes
        whole = HEAD.pack(len(data), seal(key, [memoryview(data)])) + data
        for number, start in enumerate(range(0, len(whole), size)):
            self._path(key, number).write_bytes(whole[start : start + size].ljust(size, b"\0"))

    def cut(self, key: bytes, num_bytes: int) -> None:
        """Shorten the file that has the last byte to be left, and remove those behind it."""
        last, rest = divmod(HEAD.size + num_bytes, self._blocks._driver.block_bytes)
        path = self._path(key, last)
        path.write_bytes(path.read_bytes()[:rest])
        while (path := self._path(key, last := last + 1)).exists():
            path.unlink()

    def fail(self, failing: bool) -> None:
        """Put a loop of links in the folder's place, which even root can't follow."""
        replace_by_a_loop(self._connector._folder, failing)

    def _path(self, key: bytes, number: int) -> Path:
        [name] = self._connector._files(tokens_of(self._blocks._name(key, number)))
        return Path(self._connector._folder / name)

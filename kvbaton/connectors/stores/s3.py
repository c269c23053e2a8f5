"""Objects in a bucket of S3, or of a service that speaks its protocol.

``PREFIX/ab/abcd...``: checksum (`threaded.seal`) and bytes as one S3 object under the key in hex.
It is shown only when all of it is there. What is too old, a lifecycle rule of the bucket removes.

Credentials and region come from `options` or from the usual variables (``AWS_ACCESS_KEY_ID``,
``AWS_SECRET_ACCESS_KEY``, ``AWS_REGION``, ...); neither is ever logged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from kvbaton.connectors.store import Pieces, StoreCapabilities, Usage
from kvbaton.connectors.stores.threaded import SEAL_BYTES, LastCall, ThreadedStore, seal, unseal
from kvbaton.errors import ConfigError

try:
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError
    from obstore.store import S3Store as Bucket
except ImportError as error:
    raise ImportError(f"{error}: pip install 'kvbaton[s3]'") from error


class S3Store(ThreadedStore):
    """Keeps objects in a bucket; see the module.

    Args:
        name: see `Store.name`.
        url: ``s3://bucket/prefix``; the bucket exists.
        endpoint: URL of another service than Amazon's.
        options: more options of obstore's `S3Config` (``region``, ``access_key_id``,
            ``virtual_hosted_style_request``, ...).
        conditional: whether the service knows conditional writes; without them, two who store the
            same object at the same time both send it.
        threads: see `ThreadedStore`.
        lookups: keys that are looked at at the same time.
        timeout_s: the longest that one request takes.
        retry_s: no request that failed is tried again after so long.
    """

    def __init__(
        self,
        name: str,
        *,
        url: str,
        endpoint: str | None = None,
        options: Mapping[str, Any] | None = None,
        conditional: bool = True,
        threads: int = 8,
        lookups: int = 64,
        timeout_s: float = 15.0,
        retry_s: float = 5.0,
    ) -> None:
        config = dict(options or {}) | ({"endpoint": endpoint} if endpoint else {})
        bucket = _bucket(url, config, timeout_s, retry_s)
        super().__init__(name, S3Objects(url, bucket, conditional, lookups), threads=threads)


class S3Objects(LastCall):
    """The backend of `S3Store`."""

    capabilities = StoreCapabilities(persistent=True, shared=True, pins=False, max_keys=256)

    def __init__(self, url: str, bucket: Bucket, conditional: bool, lookups: int) -> None:
        self._url = url
        self._bucket = bucket
        self._conditional = conditional
        self._lookups = lookups

    def open(self) -> None:
        """List the bucket's first objects.

        Raises:
            StoreError: there is no such bucket, or it refuses us.
        """
        with self._asking("list"):
            next(iter(obstore.list(self._bucket)), None)

    def usage(self) -> Usage:
        """Unknown: S3 does not count."""
        return Usage()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Backend.contains`: one request per key, many at the same time."""
        return [size is not None for size in self._sizes(keys)]

    def get(self, key: bytes, target: Pieces) -> bool:
        """See `Backend.get`; an object that is not what it should be is removed."""
        with self._asking("read"):
            try:
                value = memoryview(obstore.get(self._bucket, _path(key)).bytes())
            except FileNotFoundError:
                return False
        return unseal(self, key, value, target)

    def put(self, key: bytes, source: Pieces) -> bool:
        """See `Backend.put`: the bytes are sent only if they are not there yet."""
        [held] = self._sizes([key])
        if held != SEAL_BYTES + sum(map(len, source)):
            # An object of another length is wrong for whoever asks now, so it is replaced.
            create = self._conditional and held is None
            # Another one was faster, or our own first try that lost its answer.
            with self._asking("write to"), suppress(AlreadyExistsError):
                obstore.put(
                    self._bucket,
                    _path(key),
                    [seal(key, source), *source],
                    mode="create" if create else "overwrite",
                    use_multipart=False,
                )
        return True

    def remove(self, keys: Sequence[bytes]) -> int:
        """See `Backend.remove`; of two who remove the same object, both may count it."""
        unique = list(dict.fromkeys(keys))
        paths = [_path(k) for k, found in zip(unique, self.contains(unique), strict=True) if found]
        if paths:
            with self._asking("delete from"):
                obstore.delete(self._bucket, paths)
        return len(paths)

    def _sizes(self, keys: Sequence[bytes]) -> list[int | None]:
        """Bytes of the objects with their checksums, None for those that are not there."""

        async def size(key: bytes, turns: asyncio.Semaphore) -> int | None:
            async with turns:
                try:
                    return (await obstore.head_async(self._bucket, _path(key)))["size"]
                except FileNotFoundError:
                    return None

        async def all_sizes() -> list[int | None]:
            turns = asyncio.Semaphore(self._lookups)
            return await asyncio.gather(*(size(key, turns) for key in keys))

        with self._asking("look into"):
            return asyncio.run(all_sizes())

    def _asking(self, what: str) -> AbstractContextManager[None]:
        return self._calling(f"can't {what} {self._url}", BaseError, OSError)


def _bucket(url: str, config: dict[str, Any], timeout_s: float, retry_s: float) -> Bucket:
    if urlsplit(url).scheme != "s3":
        raise ConfigError("url", f"must be s3://bucket/prefix, not {url!r}")
    timeout = timedelta(seconds=timeout_s)
    try:
        return Bucket.from_url(
            url,
            config=config,  # type: ignore[arg-type]
            client_options={
                "allow_http": str(config.get("endpoint", "")).startswith("http://"),
                "timeout": timeout,
                "connect_timeout": timeout,
            },
            retry_config={"max_retries": 10, "retry_timeout": timedelta(seconds=retry_s)},
        )
    except (BaseError, ValueError, TypeError) as error:
        raise ConfigError("options", str(error).partition("\n")[0]) from error


def _path(key: bytes) -> str:
    name = key.hex()
    return f"{name[:2]}/{name}"

"""Objects in a bucket of S3, or of a service that speaks its protocol.

``PREFIX/ab/abcd...``: checksum (`threaded.seal`) and bytes as one S3 object under the key in hex,
with namespace and tenant in its metadata. It is shown only when all of it is there. What is too
old, a lifecycle rule of the bucket removes. A claim is an empty object, ``PREFIX/claims/abcd...``,
which only one can create; that of a process that died is void after `CLAIM_S`.

Credentials and region come from `options` or from the usual variables (``AWS_ACCESS_KEY_ID``,
``AWS_SECRET_ACCESS_KEY``, ``AWS_REGION``, ...); neither is ever logged.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from kvbaton.connectors.store import CLAIM_S, NO_HINTS, Hints, Pieces, StoreCapabilities, Usage
from kvbaton.connectors.stores.threaded import (
    SEAL_BYTES,
    ClientBackend,
    HeldClaims,
    ThreadedStore,
    check_positive,
    seal,
    unseal,
    usage_by_namespace,
)
from kvbaton.errors import ConfigError, StoreError

try:
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError
    from obstore.store import S3Store as Bucket
except ImportError as error:
    raise ImportError(f"{error}: pip install 'kvbaton[s3]'") from error

if TYPE_CHECKING:
    from obstore import ObjectMeta

Asked = TypeVar("Asked")
Told = TypeVar("Told")

_log = logging.getLogger(__name__)
_PATH = re.compile("[0-9a-f]{2}/[0-9a-f]{64}")
_NOTHING = "nothing"
"""Below it there are no objects: to list them only tells whether there is a bucket."""
_SEEN_S = 10.0
"""Without any object that was there for so long, a lookup lists, to see that there is a bucket."""


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
        claims: let one of several nodes that compute the same prompt at once store it, for
            three more requests (one written, one read, one deleted) for each object. Needs
            conditional writes.
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
        claims: bool = False,
        threads: int = 8,
        lookups: int = 64,
        timeout_s: float = 15.0,
        retry_s: float = 5.0,
    ) -> None:
        check_positive(lookups=lookups, timeout_s=timeout_s)
        if claims and not conditional:
            raise ConfigError(
                "claims", "needs conditional writes: leave out one of the two options"
            )
        config = dict(options or {}) | ({"endpoint": endpoint} if endpoint else {})
        bucket = _bucket(url, config, timeout_s, retry_s)
        backend = S3Objects(url, bucket, conditional, claims, lookups)
        super().__init__(name, backend, threads=threads)


class S3Objects(ClientBackend):
    """The backend of `S3Store`."""

    def __init__(
        self, url: str, bucket: Bucket, conditional: bool, claims: bool, lookups: int
    ) -> None:
        self.capabilities = StoreCapabilities(
            persistent=True,
            shared=True,
            pins=False,
            max_keys=256,
            hints=True,
            prefix=True,
            claims=claims,
            namespaces=True,
        )
        self._url = url
        self._bucket = bucket
        self._conditional = conditional
        self._lookups = self.prefix_step = lookups
        self._seen_at = -math.inf
        self._claims = HeldClaims()

    def open(self) -> None:
        """See that the bucket is there.

        Raises:
            StoreError: there is no such bucket, or it refuses us.
        """
        with self._asking("list"):
            self._see_bucket()

    def close(self) -> None:
        """Give claims back."""
        try:
            self._drop(self._claims.keys())
        except StoreError as error:
            _log.warning("claims are void after %g s: %s", CLAIM_S, error)
        super().close()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Backend.contains`: one request per key, many at the same time."""
        return [size is not None for size in self._sizes(keys)]

    def get(self, key: bytes, target: Pieces) -> bool:
        """See `Backend.get`; an object that is not what it should be is removed."""
        with self._asking("read"):
            try:
                value = memoryview(obstore.get(self._bucket, _path(key)).bytes())
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return False
        return unseal(self, key, value, target)

    def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
        """See `Backend.put`: the bytes are sent only if they are not there yet."""
        [held] = self._sizes([key])
        if held != SEAL_BYTES + sum(map(len, source)):
            # An object of another length is wrong for whoever asks now, so it is replaced.
            create = self._conditional and held is None
            labels = {"namespace": hints.namespace, "tenant": hints.tenant}
            # Another one was faster, or our own first try that lost its answer.
            with self._asking("write to"), suppress(AlreadyExistsError):
                obstore.put(
                    self._bucket,
                    _path(key),
                    [seal(key, source), *source],
                    attributes={name: label for name, label in labels.items() if label},
                    mode="create" if create else "overwrite",
                    use_multipart=False,
                )
        self._drop([key])
        return True

    def remove(self, keys: Sequence[bytes]) -> int:
        """See `Backend.remove`; of two who remove the same object, both may count it."""
        unique = list(dict.fromkeys(keys))
        there = zip(unique, self.contains(unique), strict=True)
        return self._delete([_path(key) for key, found in there if found])

    def claim(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Claiming.claim`: two requests for each key, three for one that is there.

        One who had a claim before us may store its object until we have ours, so it is looked for
        after that.
        """

        async def take(key: bytes) -> bool:
            path, until = _claim_path(key), time.monotonic() + CLAIM_S
            for _ in range(2):
                with suppress(AlreadyExistsError):
                    await obstore.put_async(self._bucket, path, b"", mode="create")
                    self._claims.add([key], until)
                    return True
                with suppress(FileNotFoundError):
                    made = (await obstore.head_async(self._bucket, path))["last_modified"]
                    # One of a time ahead is void, too: the clock was set back since.
                    if abs(datetime.now(UTC) - made) < timedelta(seconds=CLAIM_S):
                        return False
                    await obstore.delete_async(self._bucket, path)  # of one who died
            return False

        self._claims.forget_void()
        with self._asking("claim in"):
            claimed = self._at_once(take, keys)
        taken = [key for key, ours in zip(keys, claimed, strict=True) if ours]
        stored = [key for key, there in zip(taken, self.contains(taken), strict=True) if there]
        self._drop(stored)
        ours = set(taken).difference(stored)
        return [key in ours for key in keys]

    def namespaces(self) -> dict[str, Usage]:
        """See `Namespaced.namespaces`: a request for each object, and for each 1,000."""
        return usage_by_namespace(found[1:] for found in self._labelled())

    def clear(self, namespace: str) -> int:
        """See `Namespaced.clear`: as many requests as `namespaces` makes, and deletions."""
        found = self._labelled()
        return self._delete([path for path, held_in, *_ in found if held_in == namespace])

    def _labelled(self) -> Iterator[tuple[str, str, str, int]]:
        """Path, namespace, tenant and bytes of every object."""

        async def labels(item: ObjectMeta) -> tuple[str, str, str, int] | None:
            try:
                found = await obstore.get_async(self._bucket, item["path"], options={"head": True})
            except FileNotFoundError:
                return None  # deleted meanwhile
            told: Any = found.attributes
            size = item["size"] - SEAL_BYTES
            return item["path"], told.get("namespace", ""), told.get("tenant", ""), size

        with self._asking("list"):
            pages = iter(obstore.list(self._bucket))
        while True:
            with self._asking("list"):
                page = next(pages, None)
                if page is None:
                    return
                objects = [item for item in page if _PATH.fullmatch(item["path"])]
                found = self._at_once(labels, objects)
            yield from filter(None, found)

    def _drop(self, keys: Sequence[bytes]) -> None:
        """Give back those claims of these keys that are ours."""
        self._delete([_claim_path(key) for key in self._claims.take(keys)])

    def _delete(self, paths: list[str]) -> int:
        """Delete what is at these paths; returns how many there are."""
        if paths:
            with self._asking("delete from"):
                obstore.delete(self._bucket, paths)
        return len(paths)

    def _sizes(self, keys: Sequence[bytes]) -> list[int | None]:
        """Bytes of the objects with their checksums, None for those that are not there."""

        async def size(key: bytes) -> int | None:
            try:
                return (await obstore.head_async(self._bucket, _path(key)))["size"]
            except FileNotFoundError:
                return None

        with self._asking("look into"):
            sizes = self._at_once(size, keys)
            if any(found is not None for found in sizes):
                self._seen_at = time.monotonic()
            elif time.monotonic() > self._seen_at + _SEEN_S:
                self._see_bucket()  # a HEAD says the same of an object that is not there
        return sizes

    def _see_bucket(self) -> None:
        next(iter(obstore.list(self._bucket, _NOTHING)), None)
        self._seen_at = time.monotonic()

    def _at_once(
        self, ask: Callable[[Asked], Awaitable[Told]], many: Sequence[Asked]
    ) -> list[Told]:
        """Answers in order, of so many requests at a time."""

        async def in_turn(one: Asked, turns: asyncio.Semaphore) -> Told:
            async with turns:
                return await ask(one)

        async def every() -> list[Told]:
            turns = asyncio.Semaphore(self._lookups)
            return await asyncio.gather(*(in_turn(one, turns) for one in many))

        return asyncio.run(every())

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        with self._calling(f"can't {what} {self._url}", BaseError, OSError):
            try:
                yield
            except (BaseError, OSError) as error:
                # That an object is not there has been caught: it is a miss.
                if not isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error):
                    raise
                missing = f"there is no bucket {urlsplit(self._url).netloc!r}"
                raise FileNotFoundError(missing) from error


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


def _claim_path(key: bytes) -> str:
    return f"claims/{key.hex()}"

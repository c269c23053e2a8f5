"""Objects in a bucket of S3, or of a compatible service.

An object is one S3 object ``PREFIX/ab/abcd...``, named by the key in hex: checksum
(`threaded.seal`) and bytes, with namespace and tenant in its metadata. It becomes visible only once
all of it is there. To remove old objects, give the bucket a lifecycle rule. A claim is an empty
object, ``PREFIX/claims/abcd...``, which only one client can create; the claim of a process that
died is void after `CLAIM_S`.

Credentials and region come from `options` or from the usual variables (``AWS_ACCESS_KEY_ID``,
``AWS_SECRET_ACCESS_KEY``, ``AWS_REGION``, ...), and are never logged.
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
"""A prefix without objects; listing it only checks that the bucket exists."""
_SEEN_S = 10.0
"""Seconds without any found object after which a lookup checks that the bucket exists."""


class S3Store(ThreadedStore):
    """Keeps objects in a bucket; see the module.

    Args:
        name: See `Store.name`.
        url: ``s3://bucket/prefix``; the bucket must exist.
        endpoint: URL of a service other than Amazon's.
        options: Further options of obstore's `S3Config` (``region``, ``access_key_id``,
            ``virtual_hosted_style_request``, ...).
        conditional: Whether the service supports conditional writes. Without them, nodes that store
            the same object at the same time all send it.
        claims: Let only one of several nodes that compute the same prompt at the same time store
            it. This takes three more requests per object (one write, one read, one delete), and
            needs conditional writes.
        threads: See `ThreadedStore`.
        lookups: Number of keys that are looked up at the same time.
        timeout_s: Time-out of one request in seconds.
        retry_s: Seconds after which a failed request is not retried any more.
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
        """Check that the bucket exists.

        Raises:
            StoreError: The bucket does not exist, or refuses access.
        """
        with self._asking("list"):
            self._see_bucket()

    def close(self) -> None:
        """Remove own claims."""
        try:
            self._drop(self._claims.keys())
        except StoreError as error:
            _log.warning("claims are void after %g s: %s", CLAIM_S, error)
        super().close()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Backend.contains`: one request per key, up to `lookups` at the same time."""
        return [size is not None for size in self._sizes(keys)]

    def get(self, key: bytes, target: Pieces) -> bool:
        """See `Backend.get`; a damaged object is removed."""
        with self._asking("read"):
            try:
                value = memoryview(obstore.get(self._bucket, _path(key)).bytes())
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return False
        return unseal(self, key, value, target)

    def put(self, key: bytes, source: Pieces, hints: Hints = NO_HINTS) -> bool:
        """See `Backend.put`: the bytes are sent only if the object is not there yet."""
        try:
            [held] = self._sizes([key])
            if held != SEAL_BYTES + sum(map(len, source)):
                # An object of another length is of no use to current readers: replace it.
                create = self._conditional and held is None
                labels = {"namespace": hints.namespace, "tenant": hints.tenant}
                # It exists: another client was faster, or the answer to a first attempt was lost.
                with self._asking("write to"), suppress(AlreadyExistsError):
                    obstore.put(
                        self._bucket,
                        _path(key),
                        [seal(key, source), *source],
                        attributes={name: label for name, label in labels.items() if label},
                        mode="create" if create else "overwrite",
                        use_multipart=False,
                    )
        finally:
            self._drop([key])
        return True

    def remove(self, keys: Sequence[bytes]) -> int:
        """See `Backend.remove`; two clients that remove the same object may both count it."""
        unique = list(dict.fromkeys(keys))
        there = zip(unique, self.contains(unique), strict=True)
        return self._delete([_path(key) for key, found in there if found])

    def claim(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Claiming.claim`: two requests per key, three if its object is there.

        A former holder of a claim may store the object until this client has the claim, so objects
        are looked up after that.
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
                    # A time in the future is void as well: the clock was set back.
                    if abs(datetime.now(UTC) - made) < timedelta(seconds=CLAIM_S):
                        return False
                    await obstore.delete_async(self._bucket, path)  # its holder has died
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
        """See `Namespaced.namespaces`: one request per object, and one per 1,000 objects."""
        return usage_by_namespace(found[1:] for found in self._labelled())

    def clear(self, namespace: str) -> int:
        """See `Namespaced.clear`: the requests of `namespaces`, and deletions."""
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
        """Remove own claims of `keys`."""
        self._delete([_claim_path(key) for key in self._claims.take(keys)])

    def _delete(self, paths: list[str]) -> int:
        """Delete the objects at `paths`; returns the number of paths."""
        if paths:
            with self._asking("delete from"):
                obstore.delete(self._bucket, paths)
        return len(paths)

    def _sizes(self, keys: Sequence[bytes]) -> list[int | None]:
        """Bytes of each object with its checksum; None for missing ones."""

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
                self._see_bucket()  # HEAD answers the same for a missing object and bucket
        return sizes

    def _see_bucket(self) -> None:
        next(iter(obstore.list(self._bucket, _NOTHING)), None)
        self._seen_at = time.monotonic()

    def _at_once(
        self, ask: Callable[[Asked], Awaitable[Told]], many: Sequence[Asked]
    ) -> list[Told]:
        """Answers in order, with up to `lookups` requests at a time."""

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
                # A missing object was caught before, so this means a missing bucket.
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

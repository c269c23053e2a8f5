"""A store that takes few keys per call."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from kvbaton.connectors.store import Found, Pieces
from kvbaton.connectors.stores.memory import MemoryStore
from kvbaton.errors import StoreError


class FewKeys(MemoryStore):
    """Rejects calls with more keys than it declares."""

    def __init__(self, name: str, *, max_keys: int = 4) -> None:
        super().__init__(name, max_bytes=64 << 20)
        self.capabilities = replace(self.capabilities, max_keys=max_keys)

    def _checked(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        if len(keys) > self.capabilities.max_keys:
            raise StoreError(f"{len(keys)} keys")
        return keys

    def lookup(self, keys: Sequence[bytes], **options: bool) -> Future[Found]:
        return super().lookup(self._checked(keys), **options)

    def load(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> Future[list[bool]]:
        return super().load(self._checked(keys), targets)

    def store(
        self, keys: Sequence[bytes], sources: Sequence[Pieces], **options: Any
    ) -> Future[list[bool]]:
        return super().store(self._checked(keys), sources, **options)

    def delete(self, keys: Sequence[bytes]) -> Future[int]:
        return super().delete(self._checked(keys))


FEW_KEYS = f"{FewKeys.__module__}:{FewKeys.__name__}"

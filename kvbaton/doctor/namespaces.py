"""What a store holds by namespace, listed and cleared: ``kvbaton connectors namespaces SPEC``."""

from __future__ import annotations

from typing import cast

from kvbaton.connectors.registry import load_store
from kvbaton.connectors.store import Namespaced
from kvbaton.errors import ConfigError

CLEAR_S = 600.0
"""A store may have to look at every object."""


def run(spec: str, clear: str | None = None) -> int:
    """List a store's namespaces, and forget one if it is named; the exit status.

    Raises:
        ConfigError: the store can't be opened, or does not tell namespaces apart.
        StoreError: it fails.
    """
    store = load_store(spec)
    if not store.capabilities.namespaces:
        raise ConfigError("SPEC", f"{store.name} does not tell namespaces apart")
    store.open()
    try:
        able = cast(Namespaced, store)
        if clear is not None:
            print(f"{clear}: {able.clear(clear).result(CLEAR_S)} objects forgotten")
        for name, usage in sorted(able.namespaces().result(CLEAR_S).items()):
            tenants = ", ".join(f"{who} {held}" for who, held in sorted(usage.tenants.items()))
            print(
                f"{name or '(none)'}: {usage.objects} objects, {usage.num_bytes} bytes"
                + (f" ({tenants})" if tenants else "")
            )
    finally:
        store.close()
    return 0

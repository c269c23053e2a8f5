"""The connector SDK: layouts, plans, keys, the transfer protocol, transports and stores.

This package exports the names that the author of a connector needs, and imports each on first use;
see ``docs/connectors.md``. For a store, write a `Backend` and wrap it in `ThreadedStore`, or write
a `Store`. For a transport, write a `Transport`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__all__ = [
    "KEY_BYTES",
    "AnyPieces",
    "Backend",
    "BatchBackend",
    "Capabilities",
    "ConfigError",
    "Evicting",
    "FenceScope",
    "Forgetting",
    "Found",
    "Handle",
    "Hints",
    "InDirectory",
    "Memory",
    "Notice",
    "Peer",
    "Pieces",
    "RangeColumn",
    "Ranges",
    "Region",
    "Registering",
    "Status",
    "Store",
    "StoreCapabilities",
    "StoreError",
    "ThreadedStore",
    "Transport",
    "TransportError",
    "Usage",
    "load_store",
    "load_transport",
]

if TYPE_CHECKING:
    from kvbaton.connectors.base import (
        Capabilities,
        FenceScope,
        Handle,
        Memory,
        Notice,
        Peer,
        RangeColumn,
        Ranges,
        Region,
        Status,
        Transport,
    )
    from kvbaton.connectors.registry import load_store, load_transport
    from kvbaton.connectors.store import (
        KEY_BYTES,
        AnyPieces,
        Evicting,
        Forgetting,
        Found,
        Hints,
        InDirectory,
        Pieces,
        Registering,
        Store,
        StoreCapabilities,
        Usage,
    )
    from kvbaton.connectors.stores.threaded import Backend, BatchBackend, ThreadedStore
    from kvbaton.errors import ConfigError, StoreError, TransportError
else:
    # Half of kvbaton's modules import a part of this package, and must not pay for all of it.
    _HOMES = (
        "kvbaton.errors",
        "kvbaton.connectors.store",
        "kvbaton.connectors.stores.threaded",
        "kvbaton.connectors.base",
        "kvbaton.connectors.registry",
    )

    def __getattr__(name):  # noqa: ANN001, ANN202
        if name in __all__:
            for home in _HOMES:
                if hasattr(module := importlib.import_module(home), name):
                    return getattr(module, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

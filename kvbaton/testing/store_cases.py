"""All cases of stores; importing this module fills `STORE_KIT`."""

from kvbaton.testing import (
    store_api,
    store_concurrency,
    store_crash,
    store_data,
    store_identity,
    store_layouts,
    store_soak,
)
from kvbaton.testing.store_rig import STORE_KIT

__all__ = [
    "STORE_KIT",
    "store_api",
    "store_concurrency",
    "store_crash",
    "store_data",
    "store_identity",
    "store_layouts",
    "store_soak",
]

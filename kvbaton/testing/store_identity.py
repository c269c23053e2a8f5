"""L4 of stores: who must not share does not, and who may share does."""

from kvbaton.testing.store_rig import StoreRig

__all__ = ["StoreRig"]

"""Runs connectors written for vLLM's `KVConnectorBase_V1` as stores; see `store.py`."""

"""How fast a connector is beside plain copies, for its certificate: seconds, not minutes."""

from __future__ import annotations

import tempfile
from typing import Any

from kvbaton.bench import store, transfer
from kvbaton.connectors.registry import load_store
from kvbaton.testing.check import Subject

NUM_BYTES = 16 << 20
OBJECT_BYTES = (64 << 10, 2 << 20)
AT_ONCE = 4
COLUMNS = ("object KiB", "what", "at once", "GiB/s", "p50 ms", "of copy")


def speed(subject: Subject) -> list[dict[str, Any]]:
    """Rows of a table; none for a transport that reaches no other process.

    Raises:
        StoreError: a call failed, or what was loaded is not what was stored.
        TransportError: the same of a write.
    """
    if subject.kind == "transport":
        with subject.rig() as pair:
            if not pair.source.capabilities.processes:
                return []
        moved = transfer.TransferLoad(
            transports=(subject.spec,), block_bytes=(64 << 10,), num_bytes=NUM_BYTES, repeats=5
        )
        rows = transfer.measure(moved, 64 << 10)
        return [{key: row[key] for key in ("block KiB", "method", "ms", "GiB/s")} for row in rows]
    with tempfile.TemporaryDirectory(prefix="kvbaton-certify-") as folder:
        spec = subject.spec.replace("{tmp}", folder)
        load = store.StoreLoad(
            spec=spec, object_bytes=OBJECT_BYTES, concurrency=(AT_ONCE,), num_bytes=NUM_BYTES
        )
        opened = load_store(spec)
        opened.open()
        try:
            rows = [row for size in OBJECT_BYTES for row in store.measure(opened, load, size)]
        finally:
            opened.close()
    return [{key: row[key] for key in COLUMNS} for row in rows]

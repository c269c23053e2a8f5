"""A transport that works, stops working and works again while nodes run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from typing_extensions import override

from kvbaton.connectors.base import Notice
from kvbaton.connectors.transports.faulty import FaultyTransport


class DeafTransport(FaultyTransport):
    """Hears nothing of what lands while a file exists.

    Args:
        name: as of any transport.
        deaf: the file's path; empty for none.
        context: of `FaultyTransport`.
    """

    def __init__(self, name: str, *, deaf: str, **context: object) -> None:
        super().__init__(name, **context)  # type: ignore[arg-type]
        self._deaf = Path(deaf) if deaf else None

    @override
    def notices(self) -> Sequence[Notice]:
        found = super().notices()
        return () if self._deaf is not None and self._deaf.exists() else found

"""Profiles that can't be written."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from kvbaton.engine.profiler import TorchProfiler
from kvbaton.errors import RequestError


class FullDisk:
    """A profile for which there is no room."""

    def __init__(self, **options: Any) -> None:
        pass

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_bytes(b"begun")
        raise OSError(errno.ENOSPC, "No space left on device")


def test_what_fits_on_a_full_disk_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbaton.engine.profiler.profile", FullDisk)
    profiler = TorchProfiler(str(tmp_path), "n")
    profiler.start()
    with pytest.raises(RequestError, match=r"can't be written: .*No space left"):
        profiler.stop()
    assert not list(tmp_path.iterdir())

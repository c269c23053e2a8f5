from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.router_rig import MakeRig, Rig, build_rig


@pytest.fixture
async def make_rig() -> AsyncIterator[MakeRig]:
    """See `build_rig`; all are ended with the test."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        numbers = itertools.count()

        async def make(**options: Any) -> Rig:
            sockets = folder / str(next(numbers))
            sockets.mkdir()
            return await build_rig(stack, sockets, **options)

        yield make
